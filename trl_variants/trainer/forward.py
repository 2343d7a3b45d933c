"""The one pass of rows through a model: log-probs, entropy and whatever else is read off the scored hidden states.

Every pass (update, old policy, reference, whole window, self-test) comes through `Forward`. It chooses the layout that
costs least and is exact on this model (`abilities`), asks the trainer to run it, and puts the results at their rows.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .batching import Cost, Item, Lengths, Rectangle, attention_cost, deal, shared, single
from .layout import Layout, Rows, compact, padded

if TYPE_CHECKING:
    from .seam import SeamTrainer


@dataclass(frozen=True)
class Abilities:
    """What leaves the log-probs of this model as they are. `trim`: moving or removing padding. `pack`: several rows on
    a line. `share`: a prompt processed once for several completions."""

    trim: bool
    pack: bool
    share: bool


@dataclass(frozen=True)
class Scores:
    """Statistics of the completion tokens, (B, T), 0 where there is none; those of the model carry gradient.

    `hidden`, (B, T, H) where asked for, are the hidden states that predict them: what else depends on the next-token
    distribution is computed from these and the head.
    """

    logps: Tensor
    entropy: Tensor
    aux: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None


@dataclass
class Tally:
    """What went through the model since the last reset; `rows` counts every pass, the others those with gradient."""

    rows: int = 0
    processed: int = 0
    useful: int = 0


class Forward:
    """Runs rows of a TRL batch through a model of the trainer (the policy, the reference, wrapped or not)."""

    def __init__(self, trainer: SeamTrainer):
        self._trainer = trainer
        self._abilities: weakref.WeakKeyDictionary[Any, Abilities] = weakref.WeakKeyDictionary()
        self._settled = False
        self.tally = Tally()

    def __call__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        *,
        aux: bool = False,
        batch_size: int | None = None,
        more: tuple[str, ...] = (),
        hidden: bool = False,
    ) -> Scores:
        """One forward where gradients are on, so that DDP sees one; otherwise as many as the token budget asks for.

        Args:
            batch: prompt and completion ids and masks; `arrangement` (a rectangle) where the planner made it.
            batch_size: rows whose padded tokens make the budget of a forward without gradient; None: all rows.
            more: further per-token fields of TRL's fused head, which must have been asked to compute them.
            aux: also the MoE auxiliary loss, which keeps TRL's rows together.
        """
        rows = Rows.of(batch)
        with_grad = torch.is_grad_enabled()
        can = self.abilities_of(model)
        budget = (batch_size or max(rows.shape[0], 1)) * (rows.prompt_ids.shape[1] + rows.completion_ids.shape[1])
        if aux or not (can.trim and rows.regular):
            size = rows.shape[0] if with_grad else batch_size or rows.shape[0]
            parts = [slice(i, i + size) for i in range(0, rows.shape[0], max(size, 1))]
            layouts = [_moved(padded(_part(rows, p), can.trim), p.start) for p in parts]
        else:
            plan = [batch["arrangement"]] if "arrangement" in batch else self._plan(rows, budget, batch_size, can)
            layouts = [compact(rows, rectangle, self._trainer.pad_id) for rectangle in plan]
        if with_grad:
            self.tally.processed += sum(layout.input_ids.numel() for layout in layouts)
            self.tally.useful += sum(layout.useful for layout in layouts)
        self.tally.rows += rows.shape[0]
        runs = [self._trainer.run_layout(model, layout, aux) for layout in layouts]
        return _gathered(rows, layouts, runs, more, hidden)

    def _plan(self, rows: Rows, budget: int, batch_size: int | None, can: Abilities) -> list[Rectangle]:
        cost = self.cost(can)
        if torch.is_grad_enabled():  # as given, in one forward
            items = self.items(range(rows.shape[0]), rows.lengths, budget, can)
            return deal(items, rows.lengths, budget, cost)  # they fit into their own padding: one rectangle
        live = [i for i in range(rows.shape[0]) if rows.lengths.completion[i] > 0]
        if self._trainer.sharded and batch_size:
            live = sorted(range(rows.shape[0]), key=lambda i: (-rows.lengths.of((i,)), i))
            parts = [live[k : k + batch_size] for k in range(0, len(live), batch_size)]
            return [[[item] for item in single(part)] for part in parts]
        return deal(self.items(live, rows.lengths, budget, can), rows.lengths, budget, cost)

    def items(self, rows: Any, lengths: Lengths, budget: int, can: Abilities) -> list[Item]:
        """Rows as items: with the same prompt together where the model can and it pays."""
        return shared(rows, lengths, self.cost(can), budget) if can.share else single(rows)

    def cost(self, can: Abilities) -> Cost:
        """Estimated time of a rectangle on the policy and its attention implementation."""
        config = self._trainer.model.config.get_text_config()
        return Cost(
            attention_cost(config),
            # an accelerator is idle while a small forward is launched
            overhead=64.0 if self._trainer.accelerator.device.type == "cpu" else 1024.0,
            packs=can.pack,
            flat=can.pack and "flash" in _attention(config),
        )

    # --- what a model can ----------------------------------------------------------------------------------------

    @property
    def abilities(self) -> Abilities:
        """The policy's."""
        return self.abilities_of(self._trainer.model)

    def settle(self) -> None:
        """Finds the policy's abilities, the same on every process; a collective call, before any plan depends on
        them."""
        if not self._settled:
            self._settled, policy = True, self._trainer.causal_lm(self._trainer.model)
            self._abilities[policy] = self._trainer.agree(self.abilities)

    def abilities_of(self, model: nn.Module) -> Abilities:
        """Found once for each model by comparing log-probs of a few random rows."""
        bare = self._trainer.causal_lm(model)
        if bare not in self._abilities:
            self._abilities[bare] = self._found(bare, model)
        return self._abilities[bare]

    def _found(self, bare: Any, model: nn.Module) -> Abilities:
        args, named, config = self._trainer.args, self._trainer.named, bare.config.get_text_config()
        if depends_on_length(config):
            return Abilities(False, False, False)
        wanted = Abilities(
            trim=True,
            # with no variant named only padding is trimmed
            pack=named and getattr(args, "packing", "auto") != "none",
            share=named and getattr(args, "shared_prompt", "auto") != "none" and _takes_masks(config),
        )
        with _evaluating(model), torch.no_grad(), self.uncounted():
            return self._compared(bare, model, wanted)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forwards inside are no forwards of the step: of a learner, or of a check, which a resumed run makes in
        another step than the whole one."""
        before, self.tally = self.tally, Tally()
        try:
            yield
        finally:
            self.tally = before

    def _compared(self, bare: Any, model: nn.Module, wanted: Abilities) -> Abilities:
        rows = _probe(bare.config.get_text_config().vocab_size, self._trainer.accelerator.device)
        as_trl = self._logps(model, rows, padded(rows, trim=False))
        probes: dict[str, Rectangle] = {
            "trim": [[item] for item in single(range(rows.shape[0]))],
            "pack": [single(range(rows.shape[0]))],
            "share": [_clusters(rows.lengths)],
        }
        same: dict[str, bool] = {}
        for what, rectangle in probes.items():
            if getattr(wanted, what) and same.get("trim", True):
                same[what] = self._same(model, as_trl, rows, rectangle)
        lost = [what for what, ok in same.items() if not ok]
        if lost:
            names = {"trim": "padding moved", "pack": "rows packed", "share": "a shared prompt"}
            warnings.warn(
                f"the log-probs of {type(bare).__name__} change with {' and '.join(names[w] for w in lost)}, so the "
                f"update phase does without: it processes {'all' if 'trim' in lost else 'some'} of TRL's padding",
                stacklevel=2,
            )
        return Abilities(*(same.get(what, False) for what in probes))

    def _same(self, model: nn.Module, as_trl: Tensor, rows: Rows, rectangle: Rectangle) -> bool:
        try:
            found = self._logps(model, rows, compact(rows, rectangle, self._trainer.pad_id))
        except (TypeError, ValueError, RuntimeError, NotImplementedError):  # a model that takes no positions or mask
            return False
        mask = rows.completion_mask.bool()
        difference, spread = (found - as_trl)[mask].float(), as_trl[mask].float().std()
        precise = self._trainer.full_precision
        return bool(difference.pow(2).mean().sqrt() <= (1e-4 if precise else 0.1) * spread)

    def _logps(self, model: nn.Module, rows: Rows, layout: Layout) -> Tensor:
        output, _ = self._trainer.run_layout(model, layout, False)
        return layout.spread(output.log_probs.flatten(), rows.shape)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    training = [m.training for m in modules]
    model.eval()
    try:
        yield
    finally:
        for m, mode in zip(modules, training, strict=True):
            m.training = mode


def _attention(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", "") or "")


def _takes_masks(config: Any) -> bool:
    """Whether attention takes a mask for each pair of tokens and has no window that such a mask would hide."""
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) is not None and not kinds
    return _attention(config) == "sdpa" and not windowed and kinds <= {"full_attention"}


def depends_on_length(config: Any) -> bool:
    """Whether rotary frequencies change with the length of the padded input."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, Mapping))] if isinstance(rope, Mapping) else []
    return any(k.get("rope_type", k.get("type")) in ("dynamic", "longrope") for k in kinds)


def _clusters(lengths: Lengths) -> list[tuple[int, ...]]:
    found: dict[Any, list[int]] = {}
    for i, key in enumerate(lengths.key):
        found.setdefault(key, []).append(i)
    return [tuple(rows) for rows in found.values()]


def _probe(vocabulary: int, device: torch.device) -> Rows:
    """Five random rows of two prompts, padded on both sides; the same in every run."""
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (n,), generator=rng) for n in (9, 5)]
    lengths, width, most = (7, 4, 6, 3, 8), 11, 9
    rows = Rows(*(torch.zeros(5, n, dtype=torch.long, device=device) for n in (width, width, most, most)))
    for i, m in enumerate(lengths):
        prompt = prompts[int(i > 2)]
        rows.prompt_ids[i, width - len(prompt) :] = prompt.to(device)
        rows.prompt_mask[i, width - len(prompt) :] = 1
        rows.completion_ids[i, :m] = torch.randint(vocabulary, (m,), generator=rng).to(device)
        rows.completion_mask[i, :m] = 1
    return rows


def _part(rows: Rows, part: slice) -> Rows:
    return Rows(rows.prompt_ids[part], rows.prompt_mask[part], rows.completion_ids[part], rows.completion_mask[part])


def _moved(layout: Layout, start: int) -> Layout:
    return replace(layout, row=layout.row + start) if start else layout


def _gathered(
    rows: Rows, layouts: list[Layout], runs: list[tuple[Any, Tensor]], more: tuple[str, ...], with_hidden: bool
) -> Scores:
    def joined(values: list[Tensor]) -> Tensor:
        total: Tensor | None = None
        for layout, x in zip(layouts, values, strict=True):
            # a row without a scored token still hangs on the model: its gradient is zero, not missing
            part = layout.spread(x[: len(layout.row)], rows.shape) + 0.0 * x[len(layout.row) :].sum()
            total = part if total is None else total + part
        return rows.completion_ids.new_zeros(rows.shape, dtype=torch.float32) if total is None else total

    per_token = lambda name: joined([output[name].flatten() for output, _ in runs])  # noqa: E731
    aux = [output.aux_loss for output, _ in runs if output.aux_loss is not None]
    logps = per_token("log_probs")
    return Scores(
        logps=logps,
        # TRL's reference model computes none
        entropy=per_token("entropy") if runs and runs[0][0].entropy is not None else torch.zeros_like(logps),
        aux=torch.stack(aux).mean() if aux else None,
        more={name: per_token(name) for name in more},
        hidden=joined([hidden for _, hidden in runs]) if with_hidden and runs else None,
    )
