"""A critic beside the policy: actor-critic with GAE, PPO, PPO from human feedback, Open-Reasoner-Zero, VAPO."""

from __future__ import annotations

from ..composition import About
from ..hooks.advantage_gae import GAE
from ..hooks.advantage_remax import GreedyAnswer, GreedyBaseline
from ..hooks.aggregate import TokenMean
from ..hooks.clip import PPOClip, Unclipped
from ..hooks.learners_critic import Critic
from ..hooks.ratio import OnPolicy, TokenRatio
from ..hooks.regularizers import PositiveNLL
from ..hooks.rewards import KLInReward
from ..hooks.rewards_ppo import ZeroTruncated
from . import entry

_UPDATES = (
    "the critic makes its updates of a generation before the policy's, with an optimizer of its own: neither sees the "
    "other's gradient, so the order changes nothing"
)

ACTOR_CRITIC_GAE = entry(
    About(
        id="actor-critic-gae",
        title="Actor-critic with generalised advantage estimation",
        family="actor-critic",
        paper="1506.02438",
        year=2015,
        side="baseline",
        idea="A learned value per token replaces the constant baseline; lambda trades its bias against the return's variance.",
        aliases=("a2c",),
        deviations=(
            "a plain policy gradient: one update on each generation; the paper's trust region is left out",
            "an answer cut by the length limit goes on in the critic's value; verl and OpenRLHF treat it as ended",
            _UPDATES,
        ),
        ours=("critic: one epoch in one mini-batch, no value clipping",),
    ),
    advantage=GAE(lam=0.95),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=TokenMean(),
    learners=(Critic(clip=None),),
)

PPO = entry(
    About(
        id="ppo",
        title="Proximal Policy Optimization",
        family="actor-critic",
        paper="1707.06347",
        year=2017,
        side="baseline",
        idea="Several updates on one batch: the surrogate stops rewarding moves of a token's ratio beyond 1 +- eps.",
        deviations=(
            "no entropy bonus; value clip and four epochs as in TRL 1.12's PPOTrainer, dual clip (verl) is clip.floor",
            "critic.clip 0.2 is in units of value: it means nothing when rewards are not of order 1 (verl and OpenRLHF: 0.5)",
            "an answer cut by the length limit goes on in the critic's value; TRL, verl and OpenRLHF treat it as ended",
            _UPDATES,
        ),
        host="actor-critic-gae",
    ),
    advantage=GAE(lam=0.95),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    learners=(Critic(clip=0.2, epochs=4),),
)

RLHF_PPO = entry(
    About(
        id="rlhf-ppo",
        title="PPO from human feedback (InstructGPT)",
        family="actor-critic",
        paper="2203.02155",
        year=2022,
        side="baseline",
        idea="The score at the end and a penalty per token for leaving the reference are token rewards, so the critic learns both.",
        also_called=("instructgpt",),
        deviations=(
            "KL is k1 of the policy that sampled, computed once a generation, never clamped: a token may earn a bonus",
            "a coefficient that holds a target KL is rewards: adaptive_kl_in_reward; the PPO-ptx term is VariantPPOTrainer's ptx_coef",
            _UPDATES,
        ),
        ours=("coef 0.05, TRL 1.12's: the 0.02 quoted for InstructGPT was not confirmed",),
        host="ppo",
    ),
    rewards=(KLInReward(coef=0.05, level="token"),),
    advantage=GAE(lam=0.95),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    learners=(Critic(clip=0.2, epochs=4),),
)

OPEN_REASONER_ZERO = entry(
    About(
        id="open-reasoner-zero",
        title="Open-Reasoner-Zero",
        family="actor-critic",
        paper="2503.24290",
        year=2025,
        side="baseline",
        idea="PPO with gamma = lambda = 1, no KL, no bonus and a bare binary check: the whole return minus a learned value.",
        aliases=("orz",),
        deviations=(
            "one policy update for each batch: num_iterations 1, where the ratio is 1 and the clip never acts",
            "the critic is a network of its own in the repository, its head drawn from U(-sqrt 5, sqrt 5) without bias; here body: auto, "
            "and the head starts at 0",
            "hard-prompt mining and its annealing stage are not in this entry",
            _UPDATES,
        ),
        ours=("whitening with the unbiased variance and 1e-8 under the root: the repository's were not pinned",),
        host="ppo",
    ),
    rewards=(ZeroTruncated(),),
    advantage=GAE(lam=1.0, bootstrap=False),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.2),
    aggregate=TokenMean(),
    learners=(Critic(lam=1.0, clip=None, minibatches=12, lr=5e-6),),
)

VAPO = entry(
    About(
        id="vapo",
        title="VAPO: Value-based Augmented PPO",
        family="actor-critic",
        paper="2504.05118",
        year=2025,
        side="both",
        idea="The critic, repaired for long chains: pre-trained on returns, lambda 1 for its target, a lambda that grows with length "
        "for the policy; clip-higher, token mean and imitation of right answers.",
        deviations=(
            "group sampling is num_generations 16; no group baseline is used",
            "answers of at most 20 tokens get lambda 0 (1 - 1/(alpha l) clamped at 0)",
            "right answers are those whose first reward exceeds correct_above",
            _UPDATES,
        ),
        ours=(
            "whitening of the advantage: the paper does not say, verl and NeMo RL do",
            "warm-up of 10 generations and one critic epoch; value clip 0.2",
            "an answer cut by the length limit counts as ended, so that the critic's target is R everywhere",
        ),
        host="ppo",
    ),
    advantage=GAE(lam=0.95, length_alpha=0.05, bootstrap=False),
    ratio=TokenRatio(),
    clip=PPOClip(0.2, 0.28),
    aggregate=TokenMean(),
    regularizers=(PositiveNLL(coef=0.1),),
    learners=(Critic(lam=1.0, clip=0.2, warmup=10),),
)

REMAX = entry(
    About(
        id="remax",
        title="ReMax",
        family="actor-critic",
        paper="2310.10505",
        year=2023,
        side="baseline",
        idea="The score of the policy's own greedy answer is the baseline: neither a critic nor a group, one more decode.",
        deviations=(
            "the authors' code: only the current token's KL is subtracted, the score difference is held within +-5 and the loss is a "
            "token mean; the paper writes a sum over tokens without KL",
            "gamma 1.0 is the paper's; author scripts use 0.99",
            "verl's form, reward-to-go with the penalty in it, is advantage: greedy_baseline.form to_go",
        ),
        host="rloo",
    ),
    advantage=GreedyBaseline(),
    ratio=OnPolicy(),
    clip=Unclipped(),
    aggregate=TokenMean(),
    learners=(GreedyAnswer(),),
)
