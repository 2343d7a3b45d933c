"""Findings before anything loads: contradictions and missing needs are errors, couplings known to misbehave
warnings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from .composition import Variant
from .hooks.base import hook_class, hook_names
from .parity import SETTINGS
from .rewards.embeddings import available

_READERS = {  # what learners give -> the hook that reads it
    "values": "advantage: gae",
    "greedy_reward": "advantage: greedy_baseline",
    "process_rewards": "advantage: process_and_outcome",
    "contrastive_loss": "rewards: [contrastive_bonus]",
}
ON_POLICY_HINT = "raise num_iterations, or steps_per_generation above gradient_accumulation_steps"


@dataclass(frozen=True)
class Finding:
    """`level` is "error" (the run cannot be what it says), "warning" (it runs, and is likely not what you want) or
    "note" (what it will do, where that is not obvious)."""

    level: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.message}" + (f" ({self.hint})" if self.hint else "")


def check(variant: Variant, config: Any = None, *, rollout_func: Any = None) -> list[Finding]:
    """Findings about a composition and, when given, about the configuration it is to run under.

    Args:
        config: a GRPOConfig (or anything with its attributes); no model is loaded.
        rollout_func: what the trainer is given under that name; it may report the sampler's log-probs.
    """
    found = [*_couplings(variant)]
    if config is not None:
        alone = getattr(config, "allows_single", False) and "values" in variant.needs
        found += [*_contradictions(config), *_run(variant, config, rollout_func), *_batch(config, alone)]
    return found


def _couplings(v: Variant) -> list[Finding]:
    found: list[Finding] = []
    error = lambda m, h="": found.append(Finding("error", m, h))  # noqa: E731
    warn = lambda m, h="": found.append(Finding("warning", m, h))  # noqa: E731
    bound = getattr(v.clip, "inner", v.clip)  # what acts on the policy's own tokens
    ratio, clip, aggregate = v.ratio.hook_name, bound.hook_name, v.aggregate.hook_name
    corrections = [w for w in v.weight if getattr(w, "corrects_sampler", False)]
    if len(corrections) > 1:
        error(
            "two weight hooks correct the sampler mismatch, so it is corrected twice",
            "keep one sampler_correction",
        )
    if corrections and getattr(bound, "sampler", None):
        error(
            f"clip {clip} folds the sampler correction in and a weight hook multiplies it again",
            "drop the weight hook",
        )
    if v.advantage.hook_name == "none" and not v.regularizers and not any(h.adds for h in v.credit):
        error(
            "nothing is learned: advantage none, no credit hook that adds to it and no regularizer",
            "advantage: grouped, credit: teacher_advantage, or a regularizer",
        )
    if corrections and getattr(v.ratio, "anchor", "old") != "old":
        error(
            "the ratio is anchored to the rollout policy and a weight hook corrects the sampler again",
            "use ratio anchor 'old' with the correction, or drop the correction",
        )
    spans = {h.span for _, h in v.hooks() if h.span == "micro-batch"}
    if spans and v.scope == "window":
        error(
            "a hook with span 'micro-batch' cannot be combined with one that needs the whole window",
            "set every span to 'window'",
        )
    for i, h in enumerate(v.rewards):
        per_token = h.hook_name in ("kl_in_reward", "adaptive_kl_in_reward") and h.level == "token"
        reads_tokens = "tokens" in v.advantage.needs and getattr(v.advantage, "reads_token_rewards", True)
        if per_token and not reads_tokens:
            error(
                f"advantage {v.advantage.hook_name} reads one reward per answer and ignores the per-token KL penalty",
                "kl_in_reward.level: sequence, or advantage: token_whitened",
            )
        for later in v.rewards[i + 1 :] if per_token else ():
            if later.hook_name in ("clip_reward", "zero_truncated"):
                error(f"{later.hook_name} after a per-token KL penalty is ignored", f"{later.hook_name} first")
        on_the_sum = h.hook_name in ("kl_in_reward", "adaptive_kl_in_reward", "clip_reward") or getattr(
            h, "combined", False
        )
        if on_the_sum and v.advantage.hook_name == "normalize_each":
            error(
                f"advantage normalize_each reads the single reward functions, so {h.hook_name} is ignored",
                "advantage: grouped",
            )
    read = v.needs.union(*(h.reads for _, h in v.hooks()))
    for h in v.learners:
        for name in sorted(h.provides - read) if not h.provides & read else ():
            reader = _READERS.get(name, "a hook that reads it")
            warn(f"learner {h.hook_name} works and no hook reads its {name}", f"{reader}, or drop the learner")
    if (clip == "geometric_mean" or getattr(bound, "token_ratio_only", False)) and not (
        ratio == "token" or getattr(v.ratio, "per_token", False)
    ):
        error(f"clip {clip} needs a token ratio, and the ratio is {ratio}", "ratio: token")
    if bound.whole_groups and any(h.hook_name == "winners" for h in v.select):
        error(
            f"select winners leaves no wrong answer for clip {clip} to compare with, so nothing is learned",
            "drop the select hook, or clip: ppo",
        )
    if clip == "ppo" and ratio == "token" and max(_high(bound), _low(bound)) < 0.01:
        warn(
            f"a clip range of {_high(bound)} is a sequence-ratio range; on a token ratio it clips almost every token",
            "eps about 0.2",
        )
    if clip == "ppo" and ratio in ("sequence", "sequence_token") and _high(bound) >= 0.1:
        warn(
            f"a clip range of {_high(bound)} never acts on a length-normalised sequence ratio",
            "GSPO uses 3e-4 and 4e-4",
        )
    if ratio in ("sequence", "sequence_token") and aggregate in ("token_mean", "constant"):
        warn(
            "a sequence ratio under token aggregation weights answers by their length",
            "aggregate: sequence_mean",
        )
    if ratio == "product" and aggregate not in ("sequence_mean", "sequence_constant"):
        warn(
            "a product ratio is one action per answer; other aggregations repeat it on every token",
            "aggregate: sequence_mean",
        )
    betas = {h.hook_name: h.beta for _, h in v.hooks() if h.hook_name.startswith("implicit_value")}
    if len(set(betas.values())) > 1:
        warn(
            f"{', '.join(f'{name} has beta {beta}' for name, beta in betas.items())}: z is not one value function",
            "the same beta in both",
        )
    if ratio == "on_policy" and any(h.hook_name == "squared_log_ratio" for h in v.regularizers):
        warn("squared_log_ratio is 0 for ever: the ratio is 1 by definition", "ratio: token or product")
    if clip == "ppo" and ratio == "on_policy":
        warn("the clip can never act: the ratio is 1 by definition", "clip: none")
    if v.advantage.hook_name == "token_whitened" and ratio in ("sequence", "product"):
        warn(
            "token advantages meet a per-sequence ratio: every token's advantage is multiplied by the same ratio",
            "ratio: sequence_token",
        )
    if v.credit and ratio in ("sequence", "product"):
        warn(
            "credit hooks make token advantages, which a per-sequence ratio cannot tell apart",
            "ratio: sequence_token",
        )
    return found


def _high(clip: Any) -> float:
    return clip.eps_high if isinstance(clip.eps_high, (int, float)) else clip.eps_high.end


def _low(clip: Any) -> float:
    return clip.eps_low if isinstance(clip.eps_low, (int, float)) else clip.eps_low.end


def _contradictions(config: Any) -> list[Finding]:
    """A TRL setting that a hook replaces must stay at its default when a variant is named."""
    if getattr(config, "variant", None) is None:
        return []
    defaults = (
        {f.name: f.default for f in fields(type(config))} if hasattr(type(config), "__dataclass_fields__") else {}
    )
    found = []
    for name, instead in SETTINGS.items():
        value = getattr(config, name, None)
        if name in defaults and value != defaults[name]:
            found.append(
                Finding(
                    "error",
                    f"{name}={value!r} has no effect when a variant is named",
                    f"set {instead} instead",
                )
            )
    return found


def _run(v: Variant, config: Any, rollout_func: Any) -> list[Finding]:
    found = _learned(v)
    reported = config.use_vllm or rollout_func is not None or any(h.reports_logps for h in v.rollouts)
    falls_back = (
        getattr(v.ratio, "anchor", "old") == "sampler"
        or any(getattr(w, "corrects_sampler", False) for w in v.weight)
        or getattr(v.clip, "behaviour", "") == "known"  # of traces, which bring it with them
    )
    if "rollout_logps" in v.needs and not reported and not falls_back:
        found.append(
            Finding(
                "error",
                f"{v.name} needs the sampler's own log-probs, which only vLLM or a rollout_func reports",
                "use_vllm: true",
            )
        )
    asks = [
        h.hook_name
        for _, h in v.hooks()
        if "teacher_logps" in h.needs or any(d.anchor == "teacher" for d in h.divergences)
    ]
    if asks and v.teacher is None:
        found.append(
            Finding(
                "error",
                f"{v.name} needs a teacher ({', '.join(asks)} reads its log-probs) and none is named",
                "teacher: {model: {path: NAME_OR_FOLDER}}, or base, ema, privileged, ...",
            )
        )
    for name in sorted({name for _, h in v.hooks() for name in h.encoders}):
        if not available(name):
            message = f"{v.name} reads the sentence encoder {name!r}, and sentence-transformers is not installed"
            hint = 'pip install "trl_variants[embeddings]", or encoder: characters (likeness of spelling, no model)'
            found.append(Finding("error", message, hint))
    bound = getattr(v.clip, "inner", v.clip).hook_name
    window = config.gradient_accumulation_steps
    cycle = (config.steps_per_generation or window) * config.num_iterations
    if window % cycle == 0 and bound in ("ppo", "geometric_mean", "sapo"):
        found.append(
            Finding(
                "warning",
                f"every update is on-policy, so the ratio is 1 and clip {bound} never acts",
                ON_POLICY_HINT,
            )
        )
    if window % cycle and v.ratio.hook_name == "on_policy":
        found.append(
            Finding(
                "warning",
                "rollouts are used for several updates and the ratio is 1 by definition, so later ones are biased",
                "num_iterations: 1, or ratio: token",
            )
        )
    passes = max((getattr(h, "passes", 1) for _, h in v.hooks()), default=1)
    if passes > 1 and (config.num_iterations % passes or window > (config.steps_per_generation or window)):
        found.append(
            Finding(
                "error",
                f"{v.name} trains other tokens in each of {passes} passes over a generation, each an optimizer step",
                f"num_iterations: {passes}, and gradient_accumulation_steps at most steps_per_generation",
            )
        )
    if v.whole_groups and _cuts_groups(config):
        found.append(
            Finding(
                "error",
                f"{v.name} compares a prompt's completions, and its windows cut groups of {config.num_generations}",
                "per_device_train_batch_size a multiple of num_generations, or steps_per_generation equal to "
                "gradient_accumulation_steps",
            )
        )
    bound = [f"{h.hook_name} has span micro-batch" for _, h in v.hooks() if h.span == "micro-batch"]
    if getattr(config, "router_aux_loss_coef", None):
        bound.append("the MoE auxiliary loss is computed per micro-batch and depends on the split")
    if bound:
        found.append(
            Finding("warning", f"{', '.join(bound)}: the update keeps TRL's micro-batches and only leaves padding out")
        )
    return found


def _learned(v: Variant) -> list[Finding]:
    """What some hook reads and only a learner can give."""
    makers = {n: name for name in hook_names("learners") for n in hook_class("learners", name).provides}  # type: ignore[attr-defined]
    given = frozenset().union(*(h.provides for h in v.learners))
    read = {name: h.hook_name for _, h in v.hooks() for name in (*h.needs, *h.reads) if name in makers}
    return [
        Finding(
            "error",
            f"{v.name} needs a learner that gives {name} ({read[name]} reads it)",
            f"learners: [{makers[name]}]",
        )
        for name in sorted(read.keys() - given)
    ]


def _cuts_groups(config: Any) -> bool:
    """Whether an optimizer window can hold a part of a group, rows being dealt group by group."""
    window, generation = config.gradient_accumulation_steps, config.steps_per_generation
    if not generation or window % generation == 0:
        return False
    return config.per_device_train_batch_size * math.gcd(window, generation) % config.num_generations != 0


def _batch(config: Any, alone: bool) -> list[Finding]:
    """`alone`: a group of one is enough, because a critic is the baseline."""
    found = []
    if config.num_generations < 2 and not alone:
        found.append(
            Finding(
                "error",
                f"num_generations={config.num_generations}: a group needs at least two completions",
                "num_generations: 8",
            )
        )
    size = config.generation_batch_size
    if size and config.num_generations and size % config.num_generations:
        found.append(
            Finding(
                "error",
                f"the generation batch of {size} rows is not a multiple of num_generations={config.num_generations}",
            )
        )
    return found
