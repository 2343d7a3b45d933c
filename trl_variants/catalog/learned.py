"""What is learned beside the policy, or read off it, instead of a critic: process rewards, values, a contrastive head."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage import Grouped
from ..hooks.advantage_process import ProcessAndOutcome
from ..hooks.aggregate import TokenMean
from ..hooks.clip import PPOClip
from ..hooks.implicit_value import ImplicitValue, ImplicitValueRegression
from ..hooks.learners_contrast import ContrastiveBonus, ContrastiveHead
from ..hooks.learners_process import ImplicitReward
from ..hooks.ratio import TokenRatio
from ..hooks.regularizers import KL
from ..hooks.select_groups import AccuracyBand
from . import entry

PRIME = entry(
    About(
        id="prime",
        title="PRIME: process reinforcement through implicit rewards",
        family="actor-critic",
        paper="2502.01456",
        year=2025,
        side="reward",
        idea="A language model trained to tell right answers from wrong ones gives, as its log-ratio to the reference, a reward for "
        "every token: dense rewards without step labels.",
        deviations=(
            "the authors' code; the paper scales no r_t by K/(K-1) (advantage: process_and_outcome.form paper) and feeds beta q "
            "(learners: implicit_reward.scaled), which normalisation undoes",
            "process rewards are divided by their largest sum over the whole generation; the code takes it per worker",
            "with order: before the reward model learns from every answer with a reward, also of prompts that the accuracy band drops",
            "dropped prompts are not replaced; for fresh ones add rollouts: dynamic_sampling",
            "a reward model that starts elsewhere than at the reference is not built",
        ),
        ours=(
            "with PEFT the reward model is a second LoRA adapter (body: auto): 1e-6 is then low",
            "one step of the reward model a generation",
        ),
    ),
    select=(AccuracyBand(0.2, 0.8),),
    advantage=ProcessAndOutcome(form="code", gamma=1.0, normalize=True),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    learners=(ImplicitReward(beta=0.05, order="after", lr=1e-6),),
)

VIMPO = entry(
    About(
        id="vimpo",
        title="VIMPO: Value-Implicit Policy Optimization",
        family="actor-critic",
        paper="2606.20008",
        year=2026,
        side="both",
        idea="The policy is its own critic: beta (lp - lp_ref - KL) is the advantage it implies, and its sum over the answer is "
        "regressed on R minus the group's mean.",
        deviations=(
            "whitening over the optimizer step, var dividing by n; the authors' runs whiten each micro-batch (n - 1 on a single rank)",
            "c_A scales the advantage, not the policy's term: the same for a clip that is homogeneous in A, as this one",
            "lam 1 as in the authors' configuration; A_t = z_t is lam 0",
            "beta and c_A are for long answers: the regression sums over tokens and the policy's term is their mean; on answers of "
            "four tokens the latter wins and the run collapses (arithmetic task: 0.37 -> 0.00; with beta 0.1 in both hooks 0.85)",
            "before the first update z is 0, and so is the policy's term: only the regression moves the policy",
            "an answer without a reward is not regressed on; its tokens keep the advantage they imply",
        ),
        ours=("token mean of the policy's term: the source does not say",),
    ),
    advantage=Grouped(mean="group", std="none"),
    credit=(ImplicitValue(beta=5e-4, lam=1.0, coef=5e-3),),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28, floor=10.0),
    aggregate=TokenMean(),
    regularizers=(ImplicitValueRegression(beta=5e-4),),
)

CLIPO = entry(
    About(
        id="clipo",
        title="CLIPO: Contrastive Learning in Policy Optimization",
        family="actor-critic",
        paper="2603.10101",
        year=2026,
        side="reward",
        idea="A small head learns to bring the right answers of a prompt together; how far a right answer is from another one is "
        "taken off its reward, so that a lucky one earns less.",
        deviations=(
            "answers are pooled in the trainer's forward, over all their tokens; the authors pool in the sampling engine",
            "the loss is among the answers of one prompt; negatives from other prompts (cross, batch) are not built",
            "the authors' script trains the head alone for 14 steps first: learners: contrastive_head.warmup",
            "dim 512 (gsm8k); 2048 for their math runs. verl's dual clip at 3 is clip.floor",
            "group sampling is num_generations 16",
        ),
        ours=("the head's gradient is clipped at norm 1; token mean, which their script leaves at verl's default",),
    ),
    rewards=(ContrastiveBonus(lam=0.2, floor=-0.5),),
    advantage=Grouped(),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    regularizers=(KL(coef=0.001, estimator="k3"),),
    learners=(ContrastiveHead(tau=0.05, dim=512, lr=1e-3, weight_decay=0.01),),
)
