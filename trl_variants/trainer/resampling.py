"""Batches of groups that a rollouts hook keeps: samples, asks the hook, draws fresh prompts for what it drops.

Every process sees the same rewards, so every process decides the same; groups may straddle processes. What was kept is
dealt to the processes again in the order it was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import VariantError
from ..records import Scored
from .rollouts import Earned, Finished, key

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


@dataclass
class Row:
    """One trajectory on its way between processes."""

    row: dict[str, Any]
    generated: tuple  # its part of TRL's tuple, and whether it is empty
    origin: list[int]
    logps: Any
    flags: tuple[bool, bool]
    earned: Earned


class Prompts:
    """The data set in TRL's order: pass e is the e-th permutation of the run's seed."""

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        self._pass: tuple[int, list[int]] = (-1, [])

    def __call__(self, first: int, count: int) -> list[dict[str, Any]]:
        """Prompts number `first` to `first + count` of the run."""
        size = len(self.trainer.train_dataset)
        return [self.trainer.train_dataset[self._order(n // size)[n % size]] for n in range(first, first + count)]

    def _order(self, epoch: int) -> list[int]:
        if self._pass[0] != epoch:
            size = len(self.trainer.train_dataset)
            generator = torch.Generator().manual_seed(self.trainer.args.seed)
            order = list(range(size))
            for _ in range(epoch + 1 if self.trainer.shuffle_dataset else 0):
                order = torch.randperm(size, generator=generator).tolist()
            self._pass = epoch, order
        return self._pass[1]


class Resampling:
    """Bound to a trainer whose variant has a hook that draws prompts."""

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        self.prompts = Prompts(trainer)

    def rows(self, count: int, path: str, hook: Any, choose: Callable[[list], list]) -> list[dict[str, Any]]:
        """This process's `count` data set rows of a full batch, whose trajectories and rewards are known to the seam.

        `choose` is what the prompts hooks make of the rows that were drawn. Advances the hook's state.

        Raises:
            VariantError: the batch is not full after the last round and the hook says that is an error.
        """
        trainer, seam = self.trainer, self.trainer.rollouts
        size, world = trainer.num_generations, trainer.world
        wanted = count * world // size
        drawn = int(trainer.memory.states[path]["drawn"])
        kept: list[list[Row]] = []
        dropped: list[list[Row]] = []
        rounds = 0
        while len(kept) < wanted and rounds < hook.max_rounds:
            rounds += 1
            groups = wanted - len(kept)
            while groups * size % world:
                groups += 1
            everyone = [row for row in self.prompts(drawn, groups) for _ in range(size)]
            drawn += groups
            share = len(everyone) // world
            first = trainer.accelerator.process_index * share
            mine = choose(everyone[first : first + share])
            table = trainer.gather_objects(self._sampled(mine))
            keeps = hook.keeps(self._scored(table)).tolist()
            for g in range(groups):
                (kept if keeps[g * size] else dropped).append(table[g * size : (g + 1) * size])
        trainer.memory.states[path] = {"drawn": drawn}
        short = max(wanted - len(kept), 0)
        self._log(rounds, len(kept), len(kept) + len(dropped), short / wanted, drawn)
        if short and hook.when_short == "error":
            raise VariantError(
                f"{hook.hook_name}: {len(kept)} of {wanted} groups are neither all right nor all wrong after "
                f"{rounds} rounds: easier or harder prompts, more max_rounds, or when_short: train"
            )
        for members in dropped[len(dropped) - short :]:  # the latest: they fill places, and count nowhere
            for row in members:
                row.flags = (False, False)
            kept.append(members)
        first = trainer.accelerator.process_index * count
        chosen = [row for members in kept[:wanted] for row in members][first : first + count]
        rows = [row.row for row in chosen]
        seam.begin(rows)
        seam.ready = _joined(chosen)
        seam.earned = {key(i, row.generated[1]): row.earned for i, row in enumerate(chosen)}
        return rows

    def _sampled(self, rows: list[dict[str, Any]]) -> list[Row]:
        trainer, seam = self.trainer, self.trainer.rollouts
        seam.begin(rows)
        done = seam.run(trainer.staged(rows), trainer.sample_all)
        earned = seam.verify(range(len(rows)), done.generated[1])
        prompt_ids, ids, mask, said, logps, extra, images, tool_images = done.generated
        out = []
        for i, row in enumerate(rows):
            lists = (prompt_ids, ids, mask, said, logps, images, tool_images or None)
            part = (*(None if x is None else x[i] for x in lists), {n: x[i] for n, x in extra.items()}, i in done.empty)
            flags = done.in_baseline[i], done.in_policy_loss[i]
            # rewards travel on the CPU: a pickled tensor comes back on the device of the process that sent it
            got = Earned(earned[i].rewards.cpu(), earned[i].columns)
            out.append(Row(row, part, done.origin[i], done.logps[i], flags, got))
        return out

    def _scored(self, table: list[Row]) -> Scored:
        trainer = self.trainer
        rewards = torch.stack([row.earned.rewards for row in table]).to(trainer.accelerator.device)
        return Scored(
            rewards=rewards,
            weights=trainer.reward_weights.to(rewards),
            group=torch.arange(len(table), device=rewards.device) // trainer.num_generations,
            correct=rewards[:, 0] > trainer.args.correct_above,
            in_baseline=torch.tensor([row.flags[0] for row in table], device=rewards.device),
        )

    def _log(self, rounds: int, kept: int, sampled: int, short: float, drawn: int) -> None:
        metrics = self.trainer._metrics["train"]
        values = {"rounds": rounds, "kept": kept / max(sampled, 1), "short": short, "prompts": drawn}
        for name, value in values.items():
            metrics[f"dynamic/{name}"].append(float(value))


def _joined(rows: list[Row]) -> Finished:
    columns = (list(x) for x in zip(*(r.generated for r in rows), strict=True))
    prompt_ids, ids, mask, said, logps, images, tool_images, fields, empty = columns
    whole = lambda values: None if all(v is None for v in values) else values  # noqa: E731
    extra = {name: [f[name] for f in fields] for name in fields[0]}
    return Finished(
        generated=(prompt_ids, ids, whole(mask), said, whole(logps), extra, whole(images), whole(tool_images) or []),
        origin=[r.origin for r in rows],
        logps=[r.logps for r in rows],
        in_baseline=[r.flags[0] for r in rows],
        in_policy_loss=[r.flags[1] for r in rows],
        empty=[i for i, e in enumerate(empty) if e],
    )
