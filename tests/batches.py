"""Seeded random windows in float64, and the ways a trainer may cut, permute or pad them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from trl_variants import TokenBatch, Variant, variants
from trl_variants.objective import coefficients, evaluate, with_advantages

NAN = float("nan")
STATISTICS = ("logps", "entropy")
# what from_tensors takes per token, and what it is padded with
PER_TOKEN = (
    "logps",
    "old_logps",
    "ref_logps",
    "rollout_logps",
    "teacher_logps",
    "teacher_mask",
    "entropy",
    "sum_sq_probs",
    "values",
    "process_rewards",
    "origin",
    "mask",
)
PER_ROW = ("rewards", "group", "correct", "truncated", "bootstrap", "prompt_key", "texts")


@functools.cache
def divergence_keys() -> tuple[str, ...]:
    """Every divergence that some catalog entry or composition of the battery reads."""
    from tests import loops  # late: the loops import the references, which import nothing from here

    known = [*variants, *loops.collected("COMPOSED").values()]
    return tuple(sorted({d.key for v in known for _, h in v.hooks() for d in h.divergences}))


def inputs(seed: int = 0, width: int = 7, groups: Sequence[int] = (4, 3, 1, 3, 2)) -> dict[str, Any]:
    """Keyword arguments of `TokenBatch.from_tensors` for a hard window.

    Ragged groups in random row order; group 1 is dead (equal rewards), group 2 a singleton; random lengths
    with tool tokens masked inside; one row is all masked, one has NaN for every reward and one for only one
    of them; two rows are truncated; there are two tasks, and problems of two prompts of unequal difficulty. The
    sampler's log-probs are NaN where nothing was trained on and on one trained token. The teacher is silent on one row
    and on single tokens, where its log-prob is nonsense; one row was written by a teacher, another begins with a given
    prefix and one is replayed.
    """
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    group = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
    rows = len(group)
    length = torch.randint(2, width + 1, (rows,), generator=g)
    mask = (torch.arange(width) < length[:, None]).double()
    tool = (rand(rows, width) < 0.2) & (torch.arange(width) > 0) & (torch.arange(width) < length[:, None] - 1)
    mask[tool] = 0.0
    rewards = torch.stack([(rand(rows) < 0.5).double(), rand(rows)], 1)
    rewards[group == 0, 0] = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[: groups[0]]
    rewards[group == 1] = torch.tensor([1.0, 0.25], dtype=torch.float64)
    first = lambda label: int((group == label).nonzero()[0])  # noqa: E731
    rewards[first(3)] = NAN
    rewards[first(0) + 1, 1] = NAN
    mask[first(0) + 2] = 0.0
    truncated = torch.zeros(rows, dtype=torch.bool)
    truncated[[first(0) + 3, first(3) + 1]] = True
    logps = -rand(rows, width) * 2 - 0.05
    old = logps + 0.25 * normal(rows, width)
    rollout = old + 0.2 * normal(rows, width)
    rollout[mask == 0] = NAN
    rollout[first(4), 0] = NAN
    order = torch.randperm(rows, generator=g)
    out = {
        "logps": logps,
        "old_logps": old,
        "ref_logps": logps + 0.3 * normal(rows, width),
        "rollout_logps": rollout,
        "entropy": rand(rows, width) * 2 + 0.01,
        "mask": mask,
        "rewards": rewards,
        "group": group * 3 + 1,
        "correct": rewards[:, 0] > 0.5,
        "truncated": truncated,
    }
    # sum_v pi(v)^2 is at least the sampled token's own pi^2
    out["sum_sq_probs"] = (2 * old).exp() + rand(rows, width) * (1 - old.exp()).clamp(min=0.0) ** 2
    out["teacher_logps"] = logps + 0.5 * normal(rows, width)
    out["teacher_mask"] = (rand(rows, width) < 0.9).double()
    out["teacher_mask"][first(4)] = 0.0
    out["teacher_logps"][out["teacher_mask"] == 0] = 3.0
    out["origin"] = torch.zeros(rows, width, dtype=torch.long)
    out["origin"][first(0)], out["origin"][first(0) + 3], out["origin"][first(3) + 2, :2] = 1, 2, 3
    later = torch.Generator().manual_seed(2000 + seed)
    out["values"] = torch.randn(rows, width, generator=later, dtype=torch.float64) * 0.4 + 0.5
    out["bootstrap"] = torch.randn(rows, generator=later, dtype=torch.float64) * 0.4 + 0.5
    out["process_rewards"] = torch.randn(rows, width, generator=later, dtype=torch.float64) * 0.3
    out = {k: v[order] for k, v in out.items()}
    return out | {
        "divergences": {key: _positive(rows, width, f"{key} {seed}")[order] for key in divergence_keys()},
        "prompt_key": [f"prompt {label}" for label in out["group"].tolist()],
        "texts": _completions(rows, seed),
        "columns": {
            "task": [f"task {label % 2}" for label in group[order].tolist()],
            "id": [f"problem {label // 2}" for label in group[order].tolist()],
            "difficulty": [1.0 + 5 * label % 7 for label in group[order].tolist()],
            "question": [f"question {label // 2}" for label in group[order].tolist()],
            "probes": [(3, 1)[label % 2] for label in group[order].tolist()],
            "greedy_reward": [0.25 * (label % 3) for label in group[order].tolist()],
            "contrastive_loss": [(NAN, 0.2, 4.0, 1.1)[i % 4] for i in order.tolist()],
        },
        "max_completion_length": 11,
        "reward_weights": torch.tensor([1.0, 0.5], dtype=torch.float64),
    }


def _positive(rows: int, width: int, name: str) -> Tensor:
    """(rows, width) positive numbers that depend on the name alone."""
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(rows, width, generator=g, dtype=torch.float64) * 0.8 + 0.01


def _completions(rows: int, seed: int) -> list[str]:
    """Answers that repeat within groups, with words and formulas shared and not; one is empty."""
    g = torch.Generator().manual_seed(1000 + seed)
    pick = lambda n: int(torch.randint(n, (1,), generator=g))  # noqa: E731
    words = ["so", "then", "we", "get", "x", "add", "Wait,"]
    texts = [
        " ".join(words[pick(7)] for _ in range(2 + pick(9)))
        + "".join(f" $a_{pick(3)}={pick(3)}$" for _ in range(pick(4)))
        + f" <answer> {pick(2)} </answer>"
        for _ in range(rows)
    ]
    texts[pick(rows)] = ""
    return texts


def build(given: dict[str, Any], **changes: Any) -> TokenBatch:
    """A window whose log-probs and entropy are leaves that require grad."""
    given = {k: v for k, v in {**given, **changes}.items() if v is not None}
    for name in STATISTICS:
        if name in given:
            given[name] = given[name].clone().requires_grad_()
    compared = given.get("divergences", {})
    given["divergences"] = {key: value.clone().requires_grad_() for key, value in compared.items()}
    return TokenBatch.from_tensors(**given)


def leaves_of(batch: TokenBatch) -> dict[str, Tensor]:
    own = {n: getattr(batch, n) for n in STATISTICS if getattr(batch, n) is not None}
    return {**own, **batch.divergences}


def gradient(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """{statistic: dloss/dstatistic}, zeros where the loss does not depend on it."""
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), found, strict=True)}


def run(variant: Variant, given: dict[str, Any], **changes: Any):
    """(Loss, {statistic: gradient}) of the whole window, by the direct path."""
    batch = build(given, **changes)
    loss = variant.loss(batch)
    return loss, gradient(loss.loss, leaves_of(batch))


def split(whole: TokenBatch, parts: Iterable[Sequence[int]]) -> list[TokenBatch]:
    """Cuts a window (advantages filled in) as a trainer would: rows are local, totals the window's."""
    parts = [list(p) for p in parts]
    rows = len(whole.mask)
    assert sorted(i for p in parts for i in p) == list(range(rows)), "every row is in exactly one part"
    window = replace(whole.window, micro_batches=float(len(parts)))
    cut = []
    for part in parts:
        index = torch.tensor(part, dtype=torch.long)
        own = {
            f.name: v[index]
            for f in fields(whole)
            if isinstance(v := getattr(whole, f.name), Tensor) and len(v) == rows
        }
        own["extra"] = {k: v[index] if len(v) == rows else v for k, v in whole.extra.items()}
        own["divergences"] = {key: value[index] for key, value in whole.divergences.items()}
        own["micro_tokens"] = own["mask"].sum().expand(len(part))
        cut.append(replace(whole, **own, window=window, whole=False, scored=None))
    return cut


def random_parts(rows: int, count: int, seed: int) -> list[list[int]]:
    """Rows dealt to `count` non-empty parts of random sizes, in random order."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=g).tolist()
    cuts = sorted((torch.randperm(rows - 1, generator=g)[: count - 1] + 1).tolist())
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


def by_parts(variant: Variant, given: dict[str, Any], parts: Iterable[Sequence[int]], states=None):
    """(sum of the parts' losses, {statistic: gradient of that sum}): what one optimizer step accumulates."""
    whole = build(given)
    pieces = split(with_advantages(variant, whole, states), parts)
    total = torch.stack([evaluate(variant, p, states).loss for p in pieces]).sum()
    return total, gradient(total, leaves_of(whole))


def by_coefficients(variant: Variant, given: dict[str, Any], states=None):
    """(loss, {statistic: gradient}) by the one window objective."""
    loss, c = coefficients(variant, with_advantages(variant, build(given), states), states)
    return loss.loss, c


def permuted(given: dict[str, Any], order: Tensor) -> dict[str, Any]:
    rows = order.tolist()
    move = lambda v: v[order] if isinstance(v, Tensor) else [v[i] for i in rows]  # noqa: E731
    moved = {k: move(v) if v is not None and k in PER_TOKEN + PER_ROW else v for k, v in given.items()}
    return moved | {name: {k: move(v) for k, v in given[name].items()} for name in ("columns", "divergences")}


def padded(given: dict[str, Any], left: int, right: int, value: float = 0.0) -> dict[str, Any]:
    """Further masked columns on both sides, filled with `value`."""
    out = dict(given)
    wide = lambda x, filled: torch.nn.functional.pad(x, (left, right), value=filled)  # noqa: E731
    for name in PER_TOKEN:
        if name in out:
            out[name] = wide(out[name], 0.0 if name in ("mask", "origin") else value)
    out["divergences"] = {key: wide(x, value) for key, x in given["divergences"].items()}
    return out


def with_empty_rows(given: dict[str, Any], count: int) -> dict[str, Any]:
    """Further rows without a trained token: own groups, no reward, so that no baseline sees them."""
    out = dict(given)
    for name in PER_TOKEN:
        out[name] = torch.cat([out[name], torch.zeros(count, out[name].shape[1], dtype=out[name].dtype)])
    out["divergences"] = {k: torch.cat([x, x[:1].expand(count, -1)]) for k, x in out["divergences"].items()}
    out["rewards"] = torch.cat([out["rewards"], torch.full((count, out["rewards"].shape[1]), NAN, dtype=torch.float64)])
    out["group"] = torch.cat([out["group"], 1000 + torch.arange(count)])
    out["correct"] = torch.cat([out["correct"], torch.zeros(count, dtype=torch.bool)])
    out["prompt_key"] = [*out["prompt_key"], *(f"empty {i}" for i in range(count))]
    out["texts"] = [*out["texts"], *[""] * count]
    out["truncated"] = torch.cat([out["truncated"], torch.zeros(count, dtype=torch.bool)])
    out["bootstrap"] = torch.cat([out["bootstrap"], torch.zeros(count, dtype=torch.float64)])
    out["columns"] = {k: [*v, *v[:1] * count] for k, v in out["columns"].items()}
    return out


def assert_close(got: Any, wanted: Any, what: str = "", atol: float = 1e-11) -> None:
    """Equal to float64 rounding; says which tensor differs."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert_close(got[name], wanted[name], f"{what} {name}", atol)
        return
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64).detach(),
        torch.as_tensor(wanted, dtype=torch.float64).detach(),
        rtol=1e-9,
        atol=atol,
        msg=lambda m: f"{what}: {m}",
    )
