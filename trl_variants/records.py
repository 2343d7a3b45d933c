"""The records hooks see: `Scored` (all rows of a generation, before the loss) and `TokenBatch` (rows in the loss).

Shapes: N rows over all processes, B rows of the batch at hand, T completion tokens, F reward functions. A per-row value
is (B, 1), so that everything broadcasts against (B, T).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .divergence import Divergence
from .errors import VariantError

LOG_RATIO_BOUND = 20.0  # log-ratios are clamped here before exp: exp(20) = 4.9e8


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-LOG_RATIO_BOUND, so that a stray token cannot overflow the loss."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def column(x: Tensor) -> Tensor:
    """(B,) -> (B, 1); (B, T) unchanged."""
    return x.unsqueeze(1) if x.dim() == 1 else x


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of each row, (B, T) -> (B, 1); 0 for a row without tokens."""
    return (x * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)


@dataclass(frozen=True)
class Run:
    """Facts of the run that hooks may read."""

    max_completion_length: int = 0
    group_size: int = 0
    temperature: float = 1.0
    iterations: int = 1
    vocabulary: int = 0  # tokens the model chooses from; 0: unknown


@dataclass(frozen=True)
class Window:
    """Totals over one optimizer step: every micro-batch of every process. Known before its first backward."""

    rows: float  # rows, masked ones included
    live_rows: float  # rows with at least one token in the loss
    tokens: float  # tokens in the loss
    prompts: float  # groups with at least one token in the loss
    micro_batches: float  # micro-batches over all processes


@dataclass
class Scored:
    """One generation, gathered from all processes: what rewards, select and advantage hooks see.

    `rewards` is NaN where a function does not apply; a row whose functions all said None has a NaN `reward`, never
    enters a baseline and gets advantage 0. Groups are row numbers' labels, of any size and order.
    """

    rewards: Tensor  # (N, F)
    weights: Tensor  # (F,)
    group: Tensor  # (N,) integer label of the prompt's group
    reward: Tensor = None  # type: ignore[assignment]  # (N,) weighted sum; NaN for an unscorable row
    correct: Tensor = None  # type: ignore[assignment]  # (N,) raw correctness, apart from any shaping
    length: Tensor | None = None  # (N,) tokens the policy produced
    truncated: Tensor | None = None  # (N,) bool, stopped by the length limit
    keep: Tensor = None  # type: ignore[assignment]  # (N,) bool, row may enter the policy loss
    in_baseline: Tensor = None  # type: ignore[assignment]  # (N,) bool, row may enter group statistics
    prompt_key: list[str] | None = None
    keys: Mapping[str, Tensor] = field(default_factory=dict)  # (N,) columns of the dataset: numbers, or labels of text
    origin: Tensor | None = None  # (N,) 0 policy, 1 teacher, 2 replay, 3 prefix
    tokens: Mapping[str, Tensor] = field(default_factory=dict)  # (N, T): mask, ids (-1: padding), old_logps, ...
    token_rewards: Tensor | None = None  # (N, T) where a rewards hook spreads reward over tokens
    spread: bool = False  # token_rewards came per token from a reward function: no score stands for the whole answer
    bootstrap: Tensor | None = None  # (N,) value of the state after the last token, where a critic gives it
    texts: Mapping[str, list] = field(default_factory=dict)
    columns: Mapping[str, list] = field(default_factory=dict)  # raw data set columns that a hook named in `columns`
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)  # (N, d) unit rows of the completions, by encoder
    run: Run = Run()
    progress: float = 0.0
    step: int = 0

    def __post_init__(self):
        if self.reward is None:
            self.reward = weighted_sum(self.rewards, self.weights)
        if self.correct is None:
            self.correct = self.rewards[:, 0] > 0.5
        ones = torch.ones_like(self.reward, dtype=torch.bool)
        self.keep = ones if self.keep is None else self.keep
        self.in_baseline = ones if self.in_baseline is None else self.in_baseline

    def with_(self, **changes: Any) -> Scored:
        """A copy with some fields replaced; a new `rewards` matrix recomputes `reward` unless that is given too."""
        if "rewards" in changes:
            changes.setdefault("reward", None)
        return replace(self, **changes)

    @property
    def valid(self) -> Tensor:
        """(N,) rows that may enter a statistic: scorable and not taken out of the baseline."""
        return ~torch.isnan(self.reward) & self.in_baseline

    def need(self, name: str) -> Tensor:
        """A gathered (N, T) token tensor; raises VariantError naming it when the run did not provide it."""
        if self.tokens.get(name) is None:
            raise VariantError(f"this method needs `{name}` per token when rewards are read, and none was given")
        return self.tokens[name]

    def fact(self, name: str) -> Any:
        """A field that not every run has (length, truncated, prompt_key, texts); raises VariantError naming it."""
        value = getattr(self, name)
        if value is None or (name == "texts" and not value):
            raise VariantError(f"this method needs `{name}` per row when rewards are read, and none was given")
        return value

    @property
    def solved(self) -> Tensor:
        """(N,) share of the row's group that is right, over its valid rows; NaN where it has none."""
        return share_right(self.correct, self.group, self.valid, self.weights)

    def teacher_gap(self) -> Tensor:
        """(N, T) lp_T - lp_old on the policy's tokens, 0 where the teacher says nothing."""
        gap = self.need("teacher_logps") - self.need("old_logps")
        return torch.where(self.teacher_says, gap, torch.zeros_like(gap))

    @property
    def teacher_says(self) -> Tensor:
        """(N, T) bool, trained tokens for which the teacher gave a log-prob."""
        mask = self.need("mask") > 0
        return mask if self.tokens.get("teacher_mask") is None else mask & (self.tokens["teacher_mask"] > 0)

    def embedding(self, encoder: str) -> Tensor:
        """(N, d) unit rows: the completions as that encoder sees them. Computed here where no trainer did."""
        if encoder not in self.embeddings:
            from .rewards.embeddings import embed

            return embed(encoder, self.fact("texts")["completions"]).to(self.reward)
        return self.embeddings[encoder].to(self.reward)

    def column(self, name: str) -> list:
        """A raw data set column, one value a row; raises VariantError when the data set has none of that name."""
        if name not in self.columns:
            raise VariantError(f"this method reads the data set's column {name!r}, and there is none")
        return list(self.columns[name])


def share_right(correct: Tensor, group: Tensor, valid: Tensor, like: Tensor) -> Tensor:
    """(N,) share of right rows among the valid ones with the row's group label; NaN where there is none."""
    labels, index = torch.unique(group, return_inverse=True)
    zeros = torch.zeros(len(labels), dtype=like.dtype, device=group.device)
    right = zeros.index_add(0, index, (valid & (correct > 0)).to(zeros))
    return (right / zeros.index_add(0, index, valid.to(zeros)))[index]


def _without_none(value: Any) -> Any:
    """None in a list of numbers becomes NaN."""
    if isinstance(value, (list, tuple)):
        return [_without_none(v) for v in value]
    return float("nan") if value is None else value


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """(N, F), (F,) -> (N,): functions that do not apply are left out; a row with none is NaN."""
    total = (rewards * weights.to(rewards)).nansum(1)
    return torch.where(torch.isnan(rewards).all(1), torch.nan, total)


def column_numbers(values: Sequence[Any]) -> Tensor:
    """(N,) a data set column to group by: numbers as they are, text as a number that is the same in every run."""
    if all(isinstance(v, (int, float)) for v in values):
        return torch.tensor(values, dtype=torch.long if all(isinstance(v, int) for v in values) else torch.float)
    digests = [hashlib.sha256(str(v).encode()).digest() for v in values]
    return torch.tensor([int.from_bytes(d[:6], "big") for d in digests])


def first_writer(origin: Tensor, mask: Tensor) -> Tensor:
    """(N,) who wrote each row's first trained token, from origin (N, T); 0 for a row without tokens."""
    first = mask.to(torch.long).argmax(1, keepdim=True)
    return torch.where((mask > 0).any(1), origin.gather(1, first).squeeze(1), 0)


@dataclass
class TokenBatch:
    """Rows in the loss. `logps` and `entropy` carry gradient; every other tensor is detached."""

    logps: Tensor  # (B, T) current policy, sampled tokens
    mask: Tensor  # (B, T) 1 on tokens of the policy that are trained on
    advantage: Tensor = None  # type: ignore[assignment]  # (B, 1) or (B, T)
    old_logps: Tensor | None = None  # (B, T) policy at the start of the update phase; None: on-policy
    rollout_logps: Tensor | None = None  # (B, T) as the sampling engine reported them; NaN where it did not
    ref_logps: Tensor | None = None
    teacher_logps: Tensor | None = None
    teacher_mask: Tensor | None = None  # (B, T) 1 where the teacher gave a log-prob; None: everywhere
    divergences: Mapping[str, Tensor] = field(default_factory=dict)  # (B, T) with gradient, by `Divergence.key`
    entropy: Tensor | None = None
    values: Tensor | None = None
    turn: Tensor | None = None
    segment: Tensor | None = None
    origin: Tensor | None = None  # (B, T) who wrote the token: 0 policy, 1 teacher, 2 replay, 3 a given prefix
    reward: Tensor | None = None  # (B,) NaN for an unscorable row
    correct: Tensor | None = None  # (B,)
    solved: Tensor | None = None  # (B,) share of the row's group that is right, whatever the window holds of it
    group: Tensor | None = None  # (B,)
    truncated: Tensor | None = None  # (B,)
    window: Window = None  # type: ignore[assignment]
    prompt_tokens: Tensor | None = None  # (B,) tokens of the row's whole group in the window
    generation_tokens: Tensor | None = None  # (B,) tokens of the row's generation batch, scaled to one window
    micro_tokens: Tensor | None = None  # (B,) tokens of the row's micro-batch
    whole: bool = True  # whether this batch is the whole window of all processes
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # what a hook's or learner's `attachments` gave
    run: Run = Run()
    step: int = 0
    rollout_step: int = 0
    iteration: int = 0  # which pass over this generation
    progress: float = 0.0
    gather: Callable[[Tensor], Tensor] = lambda x: x  # values of this micro-batch from all processes, (n,) -> (m,)
    # filled in by the objective, in this order
    uncredited: Tensor = None  # type: ignore[assignment]  # (B, 1) or (B, T) advantage before any credit hook
    active: Tensor = None  # type: ignore[assignment]  # (B, T) mask times every selecting weight
    log_ratio: Tensor = None  # type: ignore[assignment]
    clipped: Tensor = None  # type: ignore[assignment]  # bool, where the clip took the gradient away
    scored: Scored | None = None  # from_tensors only: what advantages are computed from

    def __post_init__(self):
        self.mask = self.mask.to(self.logps.dtype)
        if self.advantage is not None:
            self.advantage = column(self.advantage)
            self.uncredited = self.advantage if self.uncredited is None else self.uncredited
        if self.active is None:
            self.active = self.mask
        if self.window is None:
            self._count_as_whole()

    def _count_as_whole(self) -> None:
        tokens = self.mask.sum(-1)
        group = self.group if self.group is not None else torch.arange(len(tokens), device=tokens.device)
        _, index = torch.unique(group, return_inverse=True)
        per_group = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=tokens.dtype, device=tokens.device)
        per_group = per_group.index_add(0, index, tokens)
        self.window = Window(
            rows=float(len(tokens)),
            live_rows=float((tokens > 0).sum()),
            tokens=float(tokens.sum()),
            prompts=float((per_group > 0).sum()),
            micro_batches=1.0,
        )
        self.prompt_tokens = per_group[index]
        if self.generation_tokens is None:
            self.generation_tokens = tokens.sum().expand_as(tokens)
        if self.micro_tokens is None:
            self.micro_tokens = tokens.sum().expand_as(tokens)

    @property
    def anchor(self) -> Tensor:
        """(B, T) log-probs the ratio is taken against: the old policy's, or the current ones when on-policy."""
        return self.logps.detach() if self.old_logps is None else self.old_logps

    @property
    def teacher_says(self) -> Tensor:
        """(B, T) bool, tokens in the loss for which the teacher gave a log-prob."""
        mask = self.mask > 0
        return mask if self.teacher_mask is None else mask & (self.teacher_mask > 0)

    def teacher_gap(self, of: str = "old") -> Tensor:
        """(B, T) detached lp_T - lp, 0 where the teacher says nothing; lp is the "old" or the "current" policy's."""
        own = self.anchor if of == "old" else self.logps.detach()
        gap = self.need("teacher_logps") - own
        return torch.where(self.teacher_says, gap, torch.zeros_like(gap))

    def divergence(self, spec: Divergence) -> Tensor:
        """(B, T) with gradient: the statistic a hook named in its `divergences`; raises VariantError without it."""
        if spec.key not in self.divergences:
            raise VariantError(
                f"this method needs the divergence {spec.key!r}, and the batch has none: "
                f"pass divergences={{{spec.key!r}: ...}} to TokenBatch.from_tensors"
            )
        return self.divergences[spec.key]

    def with_mask(self, mask: Tensor) -> TokenBatch:
        """The same rows counted under another mask: totals are recounted, which needs the whole window.

        In a part of a window only the micro-batch's own count is known; a hook that then asks for a window total
        would divide by the wrong number, so the totals become NaN. So do the tokens per generation of a window that
        holds several.
        """
        unknown = replace(_UNKNOWN, micro_batches=self.window.micro_batches)
        counted = replace(
            self,
            mask=mask,
            active=mask,
            window=None if self.whole else unknown,  # type: ignore[arg-type]  # None: count again
            micro_tokens=None,
            prompt_tokens=None,
        )
        if not self.whole:
            counted.micro_tokens = counted.mask.sum().expand(len(mask))
        tokens = counted.mask.sum().expand(len(mask))
        one_generation = (
            self.whole
            and self.generation_tokens is not None
            and bool((self.generation_tokens == self.window.tokens).all())
        )
        counted.generation_tokens = tokens if one_generation else torch.full_like(tokens, torch.nan)
        return counted

    def need(self, name: str) -> Tensor:
        """A tensor this hook declared in `needs`; raises VariantError naming it when it is missing."""
        value = getattr(self, name, None)
        if value is None:
            value = self.extra.get(name)
        if value is None:
            raise VariantError(
                f"this method needs `{name}`, and the batch has none: pass {name}= to TokenBatch.from_tensors"
            )
        return value

    @classmethod
    def from_tensors(
        cls,
        logps: Any,
        old_logps: Any = None,
        mask: Any = None,
        advantage: Any = None,
        rewards: Any = None,
        group: Any = None,
        ref_logps: Any = None,
        teacher_logps: Any = None,
        rollout_logps: Any = None,
        entropy: Any = None,
        values: Any = None,
        turn: Any = None,
        origin: Any = None,
        progress: float = 0.0,
        *,
        truncated: Any = None,
        correct: Any = None,
        max_completion_length: int | None = None,
        reward_weights: Any = None,
        sum_sq_probs: Any = None,
        process_rewards: Any = None,
        bootstrap: Any = None,
        extra: Mapping[str, Any] | None = None,
        teacher_mask: Any = None,
        divergences: Mapping[str, Any] | None = None,
        prompt_key: Sequence[str] | None = None,
        texts: Sequence[str] | None = None,
        columns: Mapping[str, Sequence] | None = None,
        **facts: Any,
    ) -> TokenBatch:
        """A whole window from plain tensors or lists, to try a method without a model.

        Args:
            logps: (B, T), may require grad. A (T,) input is one row.
            mask: (B, T), default all ones. rewards: (B,) or (B, F). group: (B,), default one group.
            advantage: (B,) or (B, T); when missing, `Variant.loss` computes it from rewards and group.
            prompt_key, texts: (B,) stable names of the prompts, and the completions as text.
            columns: data set columns by name, (B,) values each; hooks may group by them.
            bootstrap: (B,) value of the state after the last token, for an answer cut by the length limit.
            sum_sq_probs: (B, T) sum over the vocabulary of pi_old^2. process_rewards: (B, T) what a learner gives each
                token.
            teacher_mask: (B, T) 1 where the teacher gave a log-prob, default all ones.
            divergences: (B, T) by `Divergence.key`, may require grad; hooks on rewards see them detached.
            facts: step, rollout_step, iteration, segment.

        Raises:
            VariantError: a shape that does not fit `logps`, or an unknown field.
        """
        try:
            logps = torch.as_tensor(logps)
        except (TypeError, ValueError, RuntimeError) as error:
            raise VariantError(f"logps is no (rows, tokens) tensor of numbers: {error}") from None
        if not logps.is_floating_point():
            logps = logps.to(torch.get_default_dtype())
        logps = logps.unsqueeze(0) if logps.dim() == 1 else logps
        shape = tuple(logps.shape)

        def number_like(value: Any) -> Tensor:
            value = _without_none(value)
            try:
                tensor = torch.as_tensor(value, device=logps.device)
            except (TypeError, ValueError, RuntimeError) as error:
                raise VariantError(f"{value!r} is no tensor of numbers: {error}") from None
            if tensor.is_floating_point() and not isinstance(
                value, Tensor
            ):  # from Python numbers, without a detour over float32
                return torch.as_tensor(value, dtype=logps.dtype, device=logps.device)
            return tensor.to(logps.dtype) if tensor.is_floating_point() else tensor

        def fit(name: str, value: Any, per_row: bool = False) -> Tensor | None:
            if value is None:
                return None
            value = number_like(value)
            if not per_row and value.dim() == 1 and shape[0] == 1:
                value = value.unsqueeze(0)
            wanted = (shape[0],) if per_row else shape
            if tuple(value.shape) != wanted:
                raise VariantError(f"{name} has shape {tuple(value.shape)}, expected {wanted} to fit logps {shape}")
            # whatever stands on a masked token (NaN, -inf) must not reach a sum, not even times 0
            free = per_row or name == "mask" or not value.is_floating_point()
            return value if free else value.masked_fill(mask == 0, 0)

        if len(shape) != 2 or not shape[0]:
            raise VariantError(f"logps has shape {shape}, expected (rows, tokens) with at least one row")
        mask = torch.ones_like(logps, requires_grad=False) if mask is None else fit("mask", mask)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise VariantError("mask holds other values than 0 and 1")
        logps = logps.masked_fill(mask == 0, 0)
        advantage = None if advantage is None else number_like(advantage).to(logps.dtype)
        if advantage is not None and tuple(advantage.shape) not in ((shape[0],), (shape[0], 1), shape):
            raise VariantError(f"advantage has shape {tuple(advantage.shape)}, expected ({shape[0]},) or {shape}")
        if group is None:
            group = torch.zeros(shape[0], dtype=torch.long, device=logps.device)
        elif not isinstance(group, Tensor) and any(isinstance(label, str) for label in group):
            group = column_numbers(list(group)).to(logps.device)
        group = fit("group", group, per_row=True)
        tokens = {
            "old_logps": fit("old_logps", old_logps),
            "ref_logps": fit("ref_logps", ref_logps),
            "teacher_logps": fit("teacher_logps", teacher_logps),
            "teacher_mask": fit("teacher_mask", teacher_mask),
            "rollout_logps": fit("rollout_logps", rollout_logps),
            "values": fit("values", values),
            "turn": fit("turn", turn),
        }
        run = Run(
            max_completion_length=max_completion_length or shape[1],
            group_size=int(torch.unique(group, return_counts=True)[1].max()),
        )
        truncated = fit("truncated", truncated, per_row=True)
        compared = {key: fit(f"divergences[{key!r}]", value) for key, value in (divergences or {}).items()}
        scored = None
        if rewards is not None:
            rewards = number_like(rewards).to(logps.dtype)
            rewards = rewards.unsqueeze(1) if rewards.dim() == 1 else rewards
            if rewards.dim() != 2:
                raise VariantError(
                    f"rewards has shape {tuple(rewards.shape)}, expected ({shape[0]},) or ({shape[0]}, F)"
                )
            if rewards.shape[0] != shape[0]:
                raise VariantError(f"rewards has {rewards.shape[0]} rows, logps has {shape[0]}")
            weights = torch.ones(rewards.shape[1]) if reward_weights is None else number_like(reward_weights)
            if weights.shape != rewards.shape[1:]:
                raise VariantError(f"reward_weights has shape {tuple(weights.shape)}, rewards {tuple(rewards.shape)}")
            tokens_seen = {k: v for k, v in tokens.items() if v is not None} | {"mask": mask}
            tokens_seen.setdefault("old_logps", logps.detach())
            tokens_seen |= {f"divergence/{key}": value.detach() for key, value in compared.items()}  # type: ignore[union-attr]
            writers = fit("origin", origin)
            if writers is not None:
                tokens_seen["origin"] = writers
            for name, given in (("sum_sq_probs", sum_sq_probs), ("process_rewards", process_rewards)):
                if given is not None:
                    tokens_seen[name] = fit(name, given)
            if entropy is not None:
                tokens_seen["entropy"] = fit("entropy", entropy).detach()  # type: ignore[union-attr]
            scored = Scored(
                rewards=rewards,
                weights=weights.to(logps.dtype),
                group=group,
                length=mask.sum(-1),
                truncated=truncated,
                correct=fit("correct", correct, per_row=True),  # type: ignore[arg-type]
                bootstrap=fit("bootstrap", bootstrap, per_row=True),
                tokens=tokens_seen,
                origin=None if writers is None else first_writer(writers, mask),
                prompt_key=None if prompt_key is None else [str(k) for k in prompt_key],
                texts={} if texts is None else {"completions": list(texts)},
                columns={k: list(v) for k, v in (columns or {}).items()},
                keys={k: column_numbers(list(v)) for k, v in (columns or {}).items()},
                run=run,
                progress=progress,
            )
        correct = fit("correct", correct, per_row=True) if scored is None else scored.correct
        solved = scored.solved if scored is not None else None
        if solved is None and correct is not None:
            solved = share_right(correct, group, torch.ones_like(correct, dtype=torch.bool), logps)
        unknown = set(facts) - {"step", "rollout_step", "iteration", "segment"}
        if unknown:
            raise VariantError(f"TokenBatch.from_tensors has no argument {sorted(unknown)[0]!r}")
        return cls(
            logps=logps,
            mask=mask,
            advantage=advantage,
            entropy=fit("entropy", entropy),
            origin=fit("origin", origin),
            reward=None if scored is None else scored.reward,
            correct=correct,
            solved=solved,
            group=group,
            truncated=truncated,
            progress=progress,
            run=run,
            scored=scored,
            extra={k: torch.as_tensor(v) for k, v in (extra or {}).items()},
            divergences=compared,  # type: ignore[arg-type]
            **tokens,  # type: ignore[arg-type]
            **facts,
        )


_UNKNOWN = Window(*(float("nan"),) * 5)


@dataclass(frozen=True)
class Given:
    """A trajectory that comes from elsewhere, or its beginning, in place of a sampled one.

    Args:
        ids: its tokens. origin: 1 teacher, 2 replay, 3 a given prefix.
        complete: nothing is sampled for this row; False: the policy goes on from `ids`, within what is left of
            max_completion_length.
        logps: log-probs of `ids` under what sampled them, where known; NaN or None for single unknown tokens.
    """

    ids: list[int]
    origin: int = 1
    complete: bool = True
    logps: list[float] | None = None


@dataclass
class Rollouts:
    """Generated trajectories of one process before rewards, as lists of B rows: what rollouts hooks see and return."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]  # a hook may replace rows, never change their number
    mask: list[list[int]] | None  # 1 on tokens of the policy; None: all of them
    logps: list[Any] | None  # per row: the behaviour's log-probs where the engine or the source knows them, or None
    origin: list[int | list[int]]  # of the row or of each token: 0 policy, 1 teacher, 2 replay, 3 a given prefix
    in_baseline: list[bool]
    in_policy_loss: list[bool]
