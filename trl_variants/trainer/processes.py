"""What the processes of a run do together: gather rows of unequal number, stop with one error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import VariantError


class Processes:
    """A part of the trainer."""

    accelerator: Any

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    def fail_together(
        self, error: str | None, kind: type[Exception] = VariantError, cause: Exception | None = None
    ) -> None:
        """Raises `kind` on every process when any process reports an error, so that none waits for ever."""
        errors = [error]
        if self.world > 1:
            errors = [None] * self.world
            torch.distributed.all_gather_object(errors, error)
        for rank, message in enumerate(errors):
            if message is not None:
                raise kind(message if self.world == 1 else f"process {rank}: {message}") from cause

    def gather_objects(self, values: list) -> list:
        """The lists of all processes, joined in the order of their ranks."""
        if self.world == 1:
            return values
        parts: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(parts, values)
        return [value for part in parts for value in part]

    def gather_rows(self, x: Tensor, fill: float) -> Tensor:
        """Concatenates (rows, ...) tensors of all processes, whose row counts and widths may differ.

        Extra columns are filled with `fill`; extra rows are removed again.
        """
        if self.world == 1:
            return x
        sizes = self.accelerator.gather(torch.tensor([x.shape[0]], device=x.device))
        for dim in range(x.dim()):
            x = self.accelerator.pad_across_processes(x, dim=dim, pad_index=fill)
        if not len(x):  # no process has a row
            return x
        parts = self.accelerator.gather(x.contiguous()).split(x.shape[0])
        return torch.cat([part[: int(n)] for part, n in zip(parts, sizes, strict=True)])
