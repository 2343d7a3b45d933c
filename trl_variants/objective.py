"""From a batch to a loss: the whole pipeline on one page.

    advantage -> credit -> (token selection) -> ratio -> clip -> weight -> aggregate -> + regularizers

Two ways to the same gradient:
* direct: `evaluate` on each micro-batch, its share of the window's loss is back-propagated (hooks of scope "local");
* one window objective: the statistics of the whole window are collected without gradient, `coefficients` evaluates the
  objective once and returns c = dL/d(statistic), and each micro-batch back-propagates sum(c * statistic). Hooks of
  scope "window" are written as if the window fitted in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import VariantError
from .hooks.base import is_stateful
from .hooks.clip import Clipped
from .hooks.metrics import Max, Mean, Metric, Min
from .hooks.regularizers import Term
from .records import Scored, TokenBatch, bounded_exp, column
from .schedule import at

if TYPE_CHECKING:
    from .composition import Variant

States = Mapping[str, Any]
Generators = Mapping[str, torch.Generator]


@dataclass
class Loss:
    """What a batch contributes to the window's loss, and what was seen on the way."""

    loss: Tensor  # scalar with gradient, to be minimised
    advantage: Tensor  # (B, 1) or (B, T), after credit
    log_ratio: Tensor  # (B, 1) or (B, T)
    objective: Tensor  # (B, 1) or (B, T), after clip and weights, to be maximised
    clipped: Tensor  # bool, where the clip took the gradient away
    terms: dict[str, Tensor]  # "policy" and each regularizer: shares of the loss, coefficients included
    parts: dict[str, Metric] = field(default_factory=dict)  # metrics that merge over micro-batches
    stats: dict[str, dict[str, Mean]] = field(default_factory=dict)  # hook path -> what its update() will see

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of this batch alone, as numbers."""
        return {name: part.value() for name, part in self.parts.items()}


def call(h: Any, *args: Any, path: str, states: States | None, rngs: Generators | None = None) -> Any:
    """Calls a hook, with its state and its named generator when it has them."""
    extra: dict[str, Any] = {}
    if is_stateful(h):
        extra["state"] = h.init() if states is None or path not in states else states[path]
    if h.random:
        extra["rng"] = (rngs or {}).get(path) or torch.Generator().manual_seed(0)
    return h(*args, **extra)


def _shaped(x: Any, h: Any, rows: int, width: int | None) -> Tensor:
    """What a hook returned, as (rows, 1) or (rows, T).

    Raises:
        VariantError: it is no tensor, or of another shape, which broadcasting would hide. `width` None: any T.
    """
    if isinstance(x, Tensor):
        x = column(x)
        if x.dim() == 2 and x.shape[0] == rows and (width is None or x.shape[1] in (1, width)):
            return x
    got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    wanted = f"({rows}, {'T' if width is None else width})"
    raise VariantError(f"{h.seam} hook {h.hook_name!r} must return a tensor ({rows},) or {wanted}, it returned {got}")


def score(
    variant: Variant,
    scored: Scored,
    states: States | None = None,
    rngs: Generators | None = None,
    *,
    selecting: bool = True,
) -> Scored:
    """Runs the rewards and select hooks. Returns the narrowed record; `selecting=False` in evaluation."""
    for path, h in ((p, at(h, scored.progress)) for p, h in variant.hooks()):
        if path.startswith("rewards."):
            result = call(h, scored, path=path, states=states, rngs=rngs)
            if isinstance(result, Tensor):
                same = result.shape == scored.rewards.shape and result.dim() == 2
                result = scored.with_(rewards=result) if same else scored.with_(reward=result)
            scored = _still_scored(result, h)
        elif path.startswith("select.") and selecting:
            result = call(h, scored, path=path, states=states, rngs=rngs)
            if isinstance(result, Tensor):
                kept = _shaped(result, h, len(scored.group), 1).squeeze(1)
                if kept.dtype != torch.bool:
                    raise VariantError(f"select hook {h.hook_name!r} must return bool, it returned {kept.dtype}")
                result = scored.with_(keep=scored.keep & kept, in_baseline=scored.in_baseline & kept)
            scored = _still_scored(result, h)
    return scored


def _still_scored(result: Any, h: Any) -> Scored:
    if not isinstance(result, Scored) or len(result.reward) != len(result.group):
        raise VariantError(f"{h.seam} hook {h.hook_name!r} must return the Scored record or one value per row of it")
    return result


def advantages(
    variant: Variant, scored: Scored, states: States | None = None, rngs: Generators | None = None
) -> Tensor:
    """(N,) or (N, T) advantages of a scored generation; rows without a reward are 0, never NaN."""
    h = at(variant.advantage, scored.progress)
    advantage = call(h, scored, path="advantage", states=states, rngs=rngs)
    per_row = isinstance(advantage, Tensor) and advantage.dim() == 1
    advantage = _shaped(advantage, h, len(scored.reward), None)
    scorable = ~torch.isnan(scored.reward)
    if lost := int((advantage.isnan().any(1) & scorable).sum()):
        warnings.warn(
            f"advantage {h.hook_name} is NaN for {lost} rows that have a reward: they count as 0", stacklevel=2
        )
    advantage = torch.where(column(scorable).expand_as(advantage), advantage.nan_to_num(nan=0.0), 0.0)
    return advantage.squeeze(1) if per_row else advantage


def attachments(variant: Variant, scored: Scored) -> dict[str, Tensor]:
    """(N, ...) tensors that hooks of the loss want of the whole generation: what their `attachments(scored)` returns.
    They find them in `TokenBatch.extra`."""
    found: dict[str, Tensor] = {}
    for _, h in variant.hooks():
        if hasattr(h, "attachments"):
            found |= at(h, scored.progress).attachments(scored)
    return found


def with_advantages(variant: Variant, batch: TokenBatch, states: States | None = None) -> TokenBatch:
    """Fills in the advantages of a batch made by `TokenBatch.from_tensors` from its rewards, and what hooks attach.

    Raises:
        VariantError: neither advantages nor rewards were given.
    """
    if batch.advantage is not None:
        return batch
    if batch.scored is None:
        raise VariantError("the batch has neither advantages nor rewards: pass advantage= or rewards= (and group=)")
    scored = score(variant, batch.scored, states)
    mask = batch.mask * column(scored.keep).to(batch.mask)
    batch = replace(batch.with_mask(mask), advantage=column(advantages(variant, scored, states)))
    return replace(batch, reward=scored.reward, extra={**batch.extra, **attachments(variant, scored)})


def evaluate(variant: Variant, batch: TokenBatch, states: States | None = None, rngs: Generators | None = None) -> Loss:
    """The share of these rows in the window's loss. See the module's text for the order of the seams."""
    hooks = [(path, at(h, batch.progress)) for path, h in variant.hooks()]
    of = lambda seam: [(p, h) for p, h in hooks if p == seam or p.startswith(seam + ".")]  # noqa: E731
    run = lambda path, h, *args: call(h, *args, path=path, states=states, rngs=rngs)  # noqa: E731
    parts: dict[str, Metric] = {}

    advantage = column(batch.advantage)
    # the same object: a term over all tokens then needs no recount
    batch = replace(batch, uncredited=advantage, active=batch.mask)
    for path, h in of("credit"):
        advantage = _shaped(run(path, h, advantage, batch), h, *batch.mask.shape)
    batch = replace(batch, advantage=advantage)

    # a 0/1 choice of tokens depends on no ratio, and everything after it must see it
    selections, counted = [], batch.mask
    for path, h in of("weight"):
        if h.selects:
            choice = _shaped(run(path, h, batch), h, *batch.mask.shape)
            selections.append(choice)
            batch = replace(batch, active=batch.active * choice)
            counted = counted * choice if h.in_denominator else counted

    [(path, h)] = of("ratio")
    log_ratio = _shaped(run(path, h, batch), h, *batch.mask.shape)
    batch = replace(batch, log_ratio=log_ratio)
    [(path, h)] = of("clip")
    clipped = run(path, h, log_ratio, advantage, batch)
    clipped = clipped if isinstance(clipped, Clipped) else Clipped(clipped)
    clipped = replace(clipped, objective=_shaped(clipped.objective, h, *batch.mask.shape))
    batch = replace(batch, clipped=clipped.clipped)
    parts.update(clipped.metrics)
    parts.update(_clip_metrics(clipped, batch.mask))

    objective = clipped.objective
    for choice in selections:
        objective = objective if clipped.over_tokens else objective * choice
    for path, h in of("weight"):
        if not h.selects:
            weight = _shaped(run(path, h, batch), h, *batch.mask.shape).detach()
            if h.drift and batch.origin is not None:  # what another policy wrote is no drift of this one's sampler
                weight = torch.where((batch.origin == 1) | (batch.origin == 2), torch.ones_like(weight), weight)
            objective = objective * weight
            counted = counted * (weight != 0) if h.in_denominator else counted
            parts[f"weight/{h.hook_name}_mean"] = Mean.over(weight, batch.mask)
            parts[f"weight/{h.hook_name}_zeros"] = Mean.over((weight == 0).to(weight), batch.mask)

    [(path, aggregate)] = of("aggregate")
    counting = batch if counted is batch.mask else batch.with_mask(counted)
    policy = run(path, aggregate, objective if counted is batch.mask else objective * (counted > 0), counting)
    if not isinstance(policy, Tensor) or policy.dim():
        raise VariantError(
            f"aggregate hook {aggregate.hook_name!r} must return a scalar tensor, it returned {policy!r}"
        )
    policy = -policy
    terms, stats, loss = {"policy": policy}, {}, policy
    for path, h in of("regularizers"):
        term: Term = run(path, h, batch)
        if not isinstance(term, Term):
            raise VariantError(f"regularizers hook {h.hook_name!r} must return a Term, it returned {term!r}")
        rows = batch if term.mask is None or term.mask is batch.mask else batch.with_mask(term.mask)
        value = term.coefficient * (term.aggregate or aggregate)(term.value, rows)
        terms[path if h.hook_name in terms else h.hook_name] = value
        loss = loss + value
        parts.update(term.metrics)
        if term.stats:
            stats[path] = dict(term.stats)
    if hasattr(aggregate, "bound"):  # a rule about the loss of the whole window, every term included
        loss = aggregate.bound(loss)

    parts.update(_ratio_metrics(log_ratio.detach(), batch.mask))
    return Loss(loss, advantage, log_ratio, objective, clipped.clipped, terms, parts, stats)


def coefficients(
    variant: Variant, batch: TokenBatch, states: States | None = None, rngs: Generators | None = None
) -> tuple[Loss, dict[str, Tensor]]:
    """The one window objective: evaluates the whole window once and returns (loss, {statistic: dL/d(statistic)}).

    `batch.whole` must hold. Statistics are `logps`, where given `entropy`, and the divergences, (N, T) each.
    """
    if not batch.whole:
        raise VariantError("the window objective needs the whole window; this batch is a part of it")
    leaves = {"logps": batch.logps.detach().requires_grad_()}
    if batch.entropy is not None:
        leaves["entropy"] = batch.entropy.detach().requires_grad_()
    compared = {key: value.detach().requires_grad_() for key, value in batch.divergences.items()}
    with torch.enable_grad():
        loss = evaluate(variant, replace(batch, **leaves, divergences=compared), states, rngs)  # type: ignore[arg-type]
        leaves |= compared
        grads = torch.autograd.grad(loss.loss, list(leaves.values()), allow_unused=True)
    return loss, {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), grads, strict=True)
    }


def _clip_metrics(clipped: Clipped, mask: Tensor) -> dict[str, Metric]:
    if clipped.low is None or clipped.high is None:
        return {}
    low, high = clipped.low.to(mask), clipped.high.to(mask)
    return {
        "clip_ratio/low_mean": Mean.over(low, mask),
        "clip_ratio/high_mean": Mean.over(high, mask),
        "clip_ratio/region_mean": Mean.over(torch.maximum(low, high), mask),
        "clip_ratio/low_min": Min.over_rows(low, mask),
        "clip_ratio/high_max": Max.over_rows(high, mask),
    }


def _ratio_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Always on: mean ratio, and the effective sample size over tokens, (sum r)^2 / (n sum r^2), from its two
    moments."""
    ratio = bounded_exp(log_ratio)
    return {"ratio/mean": Mean.over(ratio, mask), "ratio/second_moment": Mean.over(ratio**2, mask)}
