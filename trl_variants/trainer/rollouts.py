"""The rollouts seam: what is known before a generation, sampled in it and decided after it.

    given    hooks say which rows come from elsewhere; those are not sampled, and a given beginning is continued
    __call__ hooks may replace trajectories once all are there, and may ask what they earn
    rewards  each trajectory is rewarded once, whoever asks first

Everything here is about this process's rows, in order; what is called collective runs on every process alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import VariantError
from ..records import Given, Rollouts, Scored, first_writer
from ..schedule import at
from .window import loss_mask

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer

Logps = list[Any]  # one row: numbers, None or NaN where unknown


@dataclass
class Earned:
    """What one trajectory got: its rewards (F,) and what the reward functions logged of it."""

    rewards: Tensor
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Finished:
    """This process's rows when every hook has run: TRL's tuple, who wrote each token, and where the rows count."""

    generated: tuple
    origin: list[list[int]]
    logps: list[Logps | None]  # of tokens that are not the policy's
    in_baseline: list[bool]
    in_policy_loss: list[bool]
    empty: list[int] = field(default_factory=list)  # rows for which nothing was generated


class RolloutSeam:
    """Bound to a trainer; holds the generation at hand."""

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        self.rows: list[dict[str, Any]] = []  # data set rows of the generation at hand
        self.prompts: list = []  # the same as TRL generates from
        self.plan: list[Given | None] = []
        self.earned: dict[tuple, Earned] = {}  # by row and token ids
        self.generated: tuple = ()  # TRL's tuple before the hooks
        self.finished: Finished | None = None
        self.ready: Finished | None = None  # sampled already: what TRL's next generation is answered with
        drawing = [h.hook_name for h in self._hooks() if h.draws_prompts]
        if drawing and not hasattr(trainer.train_dataset, "__len__"):
            raise VariantError(
                f"{drawing[0]} draws fresh prompts, which needs a data set with a length, not a stream: rollouts: []"
            )
        if drawing and trainer.environment_factories is not None:
            raise VariantError(f"{drawing[0]} draws fresh prompts and cannot reset environments for them: rollouts: []")
        if len(drawing) > 1:
            raise VariantError(f"{' and '.join(drawing)} both decide which groups stay: keep one")

    def _hooks(self) -> list[Any]:
        return [at(h, self.trainer.progress) for h in self.trainer.variant.rollouts]

    @property
    def _active(self) -> bool:
        return bool(self.trainer.variant.rollouts)

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Another generation, of these data set rows."""
        self.rows, self.plan, self.earned, self.finished = rows, [], {}, None

    # --- before and in the generation ---------------------------------------------------------------------------

    def sampled(self, prompts: list, generate: Callable[[list], tuple]) -> tuple:
        """TRL's tuple for these prompts, after every rollouts hook."""
        if not self._active:
            return generate(prompts)
        if self.ready is None:
            self.run(prompts, generate)
        else:
            self.finished, self.ready = self.ready, None
            self.trainer.empty_rows = self.finished.empty
        return self.finished.generated  # type: ignore[union-attr]

    def run(self, prompts: list, generate: Callable[[list], tuple]) -> Finished:
        """Samples what is not given and lets the hooks decide."""
        self.prompts = prompts
        self.plan = self._given()
        self.generated = generated = generate(prompts)
        rollouts = self._record(generated)
        for h in self._hooks():
            if callable(h):
                rollouts = h(rollouts, self.trainer.services)
        self.finished = self._finish(generated, rollouts)
        return self.finished

    def _given(self) -> list[Given | None]:
        trainer, error, cause = self.trainer, None, None
        plan: list[Given | None] = [None] * len(self.rows)
        try:
            for h in self._hooks():
                if hasattr(h, "given"):
                    found = h.given(self.rows, trainer.services)
                    plan = [known or new for known, new in zip(plan, found, strict=True)]
            for g in filter(None, plan):
                self._refuse_impossible(g)
            if any(plan) and trainer.tools:
                raise VariantError("trajectories from elsewhere cannot be mixed with tools: drop the tools or the hook")
        except Exception as raised:  # the other processes must not wait for this one
            error, cause = (
                str(raised) if isinstance(raised, VariantError) else f"a rollouts hook failed: {raised!r}",
                raised,
            )
        trainer.fail_together(error, cause=cause)
        return plan

    def _refuse_impossible(self, g: Given) -> None:
        limit = self.trainer.max_completion_length or math.inf
        if not g.ids or len(g.ids) > limit or (not g.complete and len(g.ids) == limit):
            raise VariantError(
                f"a given trajectory has {len(g.ids)} tokens: at least 1, and at most max_completion_length={limit}"
            )
        if g.logps is not None and len(g.logps) != len(g.ids):
            raise VariantError(f"a given trajectory of {len(g.ids)} tokens comes with {len(g.logps)} log-probs")

    def first_turn(self, generate: Callable, prompt_ids: list, images: Any, fields: dict, group_size: int) -> tuple:
        """(completion ids, log-probs) of every row; rows that are given in full are not generated."""
        plan = self.plan
        if not self._active or not any(self.trainer.gather_objects([any(plan)])):
            return generate(prompt_ids, images, fields, group_size)
        begun = [i for i, g in enumerate(plan) if g is not None and not g.complete]
        if images is not None:  # image tensors do not divide by row
            if begun:
                raise VariantError("a given prefix cannot be continued in prompts with images")
            ids, logps = generate(prompt_ids, images, fields, group_size)
            return self._filled(list(ids), logps)
        own = [i for i, g in enumerate(plan) if g is None]
        limit = self.trainer.max_completion_length
        left = max([limit - len(plan[i].ids) for i in begun], default=None) if limit else None  # type: ignore[union-attr]
        ids, logps = [[] for _ in plan], [[] for _ in plan]
        continued = [prompt_ids[i] + plan[i].ids for i in begun]  # type: ignore[union-attr]
        spare = min(prompt_ids, key=len)
        known = False
        for rows, texts, budget in ((own, [prompt_ids[i] for i in own], None), (begun, continued, left)):
            new, said = self.part(generate, texts, spare, budget)
            known |= said is not None
            for k, i in enumerate(rows):
                ids[i], logps[i] = list(new[k]), list(said[k]) if said is not None else [None] * len(new[k])
        known = any(self.trainer.gather_objects([known]))
        return self._filled(ids, logps if known else None)

    def part(self, generate: Callable, prompts: list, spare: list[int], budget: int | None) -> tuple[list, Any]:
        """Generates for some rows only. Where engines are collective every process asks for equally many."""
        trainer, size = self.trainer, len(prompts)
        if trainer.world > 1 and (trainer.use_vllm or trainer.sharded):
            prompts = prompts + [spare] * (max(trainer.gather_objects([size])) - size)
        if not prompts:
            return [], None
        with trainer.services.budget(budget):
            ids, logps = generate(prompts, None, {}, 1)  # groups are no longer complete
        return ids[:size], None if logps is None else logps[:size]

    def _filled(self, ids: list, logps: list | None) -> tuple[list, list | None]:
        """Puts what is given before, or in place of, what was generated."""
        for i, g in enumerate(self.plan):
            if g is not None:
                unknown = [None] * len(g.ids)
                room = self.trainer.max_completion_length
                new = [] if g.complete else ids[i][: None if room is None else room - len(g.ids)]
                ids[i] = [*g.ids, *new]
                if logps is not None:
                    logps[i] = [*unknown, *([] if g.complete else logps[i][: len(new)])]
        return ids, logps

    def replaced(self, output: dict) -> dict:
        """A rollout function's answer with the given rows in it.

        It samples rows that are given in full for nothing; a given prefix it must continue itself, see
        `services.given`.
        """
        out = {name: list(v) if isinstance(v, list) else v for name, v in output.items()}
        for i, g in enumerate(self.plan):
            if g is None:
                continue
            if g.complete:
                out["completion_ids"][i] = list(g.ids)
                if "env_mask" in out:
                    out["env_mask"][i] = [1] * len(g.ids)
            elif list(out["completion_ids"][i][: len(g.ids)]) != list(g.ids):
                raise VariantError(
                    "rollout_func does not continue the given prefixes: the completion of row i must begin with "
                    "trainer.services.given[i].ids where that is not None"
                )
            if out["logprobs"] is not None:
                rest = [] if g.complete else list(out["logprobs"][i][len(g.ids) :])
                out["logprobs"][i] = [None] * len(g.ids) + rest
        return out

    # --- after it -----------------------------------------------------------------------------------------------

    def _record(self, generated: tuple) -> Rollouts:
        prompt_ids, completion_ids, tool_mask, _, logps, *_ = generated
        rows = len(prompt_ids)
        origin: list[int | list[int]] = [0] * rows
        known: list[Any] = [None] * rows if logps is None else list(logps)
        for i, g in enumerate(self.plan):
            if g is not None:
                rest = len(completion_ids[i]) - len(g.ids)
                origin[i] = [g.origin] * len(g.ids) + [0] * rest
                if g.logps is not None:
                    known[i] = [*g.logps, *(logps[i][len(g.ids) :] if logps is not None else [None] * rest)]
        return Rollouts(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            mask=tool_mask,
            logps=known if any(x is not None for x in known) else None,
            origin=origin,
            in_baseline=[True] * rows,
            in_policy_loss=[True] * rows,
        )

    def _finish(self, generated: tuple, rollouts: Rollouts) -> Finished:
        prompt_ids, before, _, completions, logps, extra, images, tool_images = generated
        rows = len(prompt_ids)
        if len(rollouts.completion_ids) != rows or any(not ids for ids in rollouts.completion_ids):
            raise VariantError(
                f"a rollouts hook must return {rows} non-empty completions, got {len(rollouts.completion_ids)}"
            )
        ids = rollouts.completion_ids
        origin = [
            [o] * len(row) if isinstance(o, int) else list(o) for o, row in zip(rollouts.origin, ids, strict=True)
        ]
        if wrong := [i for i in range(rows) if len(origin[i]) != len(ids[i])]:
            raise VariantError(f"a rollouts hook gave row {wrong[0]} one origin for each of another number of tokens")
        completions = [
            said if list(row) == list(old) else self.said(row, said)
            for row, old, said in zip(ids, before, completions, strict=True)
        ]
        behaviour, engine = self._logps(rollouts.logps, ids, origin)
        return Finished(
            generated=(
                rollouts.prompt_ids,
                ids,
                rollouts.mask,
                completions,
                None if logps is None else engine,
                extra,
                images,
                tool_images,
            ),
            origin=origin,
            logps=behaviour,
            in_baseline=list(rollouts.in_baseline),
            in_policy_loss=list(rollouts.in_policy_loss),
            empty=[i for i in self.trainer.empty_rows if list(ids[i]) == list(before[i])],
        )

    def _logps(self, logps: list | None, ids: list, origin: list) -> tuple[list[Logps | None], list[Logps]]:
        """(of tokens from elsewhere, of the engine's own): only the second is TRL's to correct."""
        elsewhere, engine = [], []
        for i, row in enumerate(ids):
            known = None if logps is None else logps[i]
            known = [None] * len(row) if known is None or len(known) != len(row) else known
            pairs = list(zip(known, origin[i], strict=True))
            other = [x if o else None for x, o in pairs]
            elsewhere.append(other if any(x is not None for x in other) else None)
            engine.append([None if o else x for x, o in pairs])
        return elsewhere, engine

    def said(self, ids: list[int], like: Any) -> Any:
        """A completion as the reward functions see it, of the kind of `like`: text or an assistant message."""
        text = self.trainer._tokenizer.decode(ids, skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if isinstance(like, list) else text

    def mark(self, scored: Scored, output: dict) -> Scored:
        """Writes origin and behaviour log-probs (B, T) into the batch; returns `scored` with origin and flags."""
        if self.finished is None:
            return scored
        trainer, done = self.trainer, self.finished
        gather, like = trainer.gather_rows, output["completion_mask"]
        origin = torch.zeros_like(like, dtype=torch.long)
        for i, row in enumerate(done.origin):
            origin[i, : len(row)] = torch.tensor(row, device=like.device)
        output["origin"] = origin
        if any(h.reports_logps for h in trainer.variant.rollouts):
            known = output.get("sampling_per_token_logps")
            known = torch.full(like.shape, math.nan, device=like.device) if known is None else known.clone()
            for i, logps in enumerate(done.logps):
                for t, x in enumerate(logps or []):
                    known[i, t] = known[i, t] if x is None else x
            output["sampling_per_token_logps"] = known
        flag = lambda x: gather(torch.tensor(x, device=like.device), 0)  # noqa: E731
        tokens = dict(scored.tokens)
        if "mask" in tokens:
            tokens["origin"] = gather(origin, 0)
            if "sampling_per_token_logps" in output:
                tokens["rollout_logps"] = gather(output["sampling_per_token_logps"], 0)
        scored = replace(
            scored,
            origin=gather(first_writer(origin, loss_mask(output)), 0),
            in_baseline=flag(done.in_baseline),
            keep=flag(done.in_policy_loss),
            tokens=tokens,
        )
        self._log(scored)
        return scored

    def _log(self, scored: Scored) -> None:
        metrics = self.trainer._metrics["train"]
        origin: Tensor = scored.origin  # type: ignore[assignment]
        traces, foreign = origin.eq(1), origin.ne(0)
        for name, rows in (("policy", ~foreign), ("elsewhere", foreign)):
            if rows.any():
                metrics[f"reward/{name}"].append(float(scored.reward[rows].nanmean()))
        if not any(hasattr(h, "given") for h in self.trainer.variant.rollouts):
            return
        metrics["traces/rows"].append(float(foreign.sum()))
        if count := int(traces.sum()):
            metrics["traces/wrong"].append(float((traces & ~scored.correct.bool()).sum()) / count)
            metrics["traces/truncated"].append(float((traces & scored.fact("truncated")).sum()) / count)

    # --- rewards ------------------------------------------------------------------------------------------------

    def rewards(self, stock: Callable, rows: list, prompts: list, completions: list, ids: list) -> Tensor:
        """(N, F) of all processes: what is known already, and the reward functions for the rest. Collective."""
        if not self._active or not any(self.trainer.gather_objects([bool(self.earned)])):
            return stock(rows, prompts, completions, ids)
        known = [self.earned.get(key(i, row)) for i, row in enumerate(ids)]
        fresh = [i for i, e in enumerate(known) if e is None]
        pick = lambda values: [values[i] for i in fresh]  # noqa: E731
        new = self.earn(stock, pick(rows), pick(prompts), pick(completions), pick(ids))
        for i, e in zip(fresh, new, strict=True):
            known[i] = e
        names = sorted({name for e in known for name in e.columns})  # type: ignore[union-attr]
        self.trainer.log_columns({n: [e.columns.get(n) for e in known] for n in names})  # type: ignore[union-attr]
        matrix = torch.stack([e.rewards.to(self.trainer.accelerator.device) for e in known])  # type: ignore[union-attr]
        return self.trainer.gather_rows(matrix, math.nan)

    def earn(self, stock: Callable, rows: list, prompts: list, completions: list, ids: list) -> list[Earned]:
        """What these trajectories of this process get. Collective; a process may have none."""
        trainer, size = self.trainer, len(rows)
        most = max(trainer.gather_objects([size]))
        if not most:
            return []
        pad = trainer._tokenizer.pad_token_id
        if size < most:  # TRL gathers equally many rows of every process
            filler = self.rows[0], self.prompts[0], self._completion(0, [pad]), [pad]  # nobody reads its reward
            rows, prompts, completions, ids = (
                list(values) + [extra] * (most - size)
                for values, extra in zip((rows, prompts, completions, ids), filler, strict=True)
            )
        with trainer.logged_columns() as columns:
            matrix = stock(rows, prompts, completions, ids)
        first = trainer.accelerator.process_index * most
        own = matrix[first : first + size]
        return [Earned(own[i], {n: v[i] for n, v in columns.items() if len(v) == most}) for i in range(size)]

    def verify(self, chosen: Sequence[int], ids: list) -> list[Earned]:
        """What the chosen rows of this process get for these token ids, asked for once. Collective."""
        new = [i for i in chosen if key(i, ids[i]) not in self.earned]
        fresh = self.earn(
            self.trainer.stock_rewards,
            [self.rows[i] for i in new],
            [self.prompts[i] for i in new],
            [self._completion(i, ids[i]) for i in new],
            [list(ids[i]) for i in new],
        )
        self.earned.update((key(i, ids[i]), e) for i, e in zip(new, fresh, strict=True))
        return [self.earned[key(i, ids[i])] for i in chosen]

    def _completion(self, i: int, ids: list[int]) -> Any:
        _, before, _, completions, *_ = self.generated
        return completions[i] if list(before[i]) == list(ids) else self.said(ids, completions[i])


def key(i: int, ids: Sequence[int]) -> tuple:
    """Names a trajectory of this process."""
    return i, *ids
