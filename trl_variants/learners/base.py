"""The worker of a learner: weights, optimizer and the update loop that every learner shares."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import VariantError
from ..records import Scored
from ..schedule import at

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer
    from .bodies import Body

Result = TypeVar("Result")
Rows = dict[str, Any]  # a generation's local rows as TRL holds them: prompt_ids, completion_ids, masks, ...


class Worker:
    """What is learned beside the policy; see the package's text for when each method runs.

    Args:
        hook: the learner's numbers. It has `lr` (None: the policy's) and `max_grad_norm`.
        body: where features come from. heads: the learner's own modules on top, by name.
    """

    provides: frozenset[str] = frozenset()
    learns = "after"  # or "before": rewards are read, and predictions made, after its updates
    trains_policy = False  # whether `policy_term` is added to the policy's loss

    def __init__(
        self,
        trainer: VariantGRPOTrainer,
        path: str,
        hook: Any,
        body: Body,
        heads: Mapping[str, nn.Module] | None = None,
    ):
        self.trainer, self.path, self.hook, self.body = trainer, path, hook, body
        self.heads = dict(heads or {})
        device = trainer.accelerator.device
        for head in self.heads.values():
            head.to(device)
        self.generations = 0  # that it has learned from
        digest = hashlib.sha256(f"{trainer.args.seed}/{path}".encode()).digest()
        self.rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        if trainer.world > 1:
            for parameter in self.parameters().values():
                torch.distributed.broadcast(parameter.data, 0)
        self.optimizer = torch.optim.AdamW(
            list(self.parameters().values()),
            lr=1.0,  # set before each step
            betas=(trainer.args.adam_beta1, trainer.args.adam_beta2),
            eps=trainer.args.adam_epsilon,
            weight_decay=getattr(hook, "weight_decay", 0.0),
        )

    # --- what a learner fills in --------------------------------------------------------------------------------

    def predict(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        """Per-token (b, T) or per-row (b,) tensors of this process's rows, without gradient."""
        return {}

    def learn(self, rows: Rows, scored: Scored, advantage: Tensor | None) -> dict[str, float]:
        """All updates on this generation; returns metrics. `advantage` is None for one that learns before rewards."""
        raise NotImplementedError

    def attachments(self, rows: Rows, scored: Scored) -> dict[str, Tensor]:
        """Tensors of this process's rows, (b,) or (b, T), that hooks in the loss find in `batch.extra`."""
        return {}

    def policy_term(self, hidden: Tensor, batch: Rows) -> Tensor:
        """Added to the policy's loss, a share of the window: `hidden` (B, T + 1, H) carries the policy's graph."""
        raise NotImplementedError

    @property
    def freezes_policy(self) -> bool:
        return False

    def save_weights(self, folder: str) -> None:
        """Writes the trained weights apart from the policy's, so that they can be loaded without this trainer."""
        self.body.save(folder)
        if self.heads:
            from safetensors.torch import save_file

            tensors = {f"{n}.{k}": v.detach().cpu().contiguous() for n, h in self.heads.items() for k, v in _state(h)}
            save_file(tensors, f"{folder}/heads.safetensors")

    # --- shared -------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """Everything it trains, by a name that is the same in every run."""
        own = {f"body.{name}": p for name, p in self.body.parameters().items()}
        return own | {f"{n}.{k}": p for n, head in self.heads.items() for k, p in head.named_parameters()}

    @property
    def number_of_rows(self) -> int:
        """Rows of a micro-batch."""
        return int(self.trainer.args.per_device_train_batch_size)

    def mine(self, count: int) -> slice:
        """This process's rows among those of all processes, `count` of them here."""
        rank = self.trainer.accelerator.process_index
        return slice(rank * count, (rank + 1) * count)

    def together(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, nothing in it being collective. Where it raises, all processes stop with that error."""
        result = error = cause = None
        try:
            result = work()
        except Exception as raised:  # the others would wait for ever in the next collective call
            error, cause = f"learner {self.hook.hook_name} failed: {raised!r}", raised
        self.trainer.fail_together(error, VariantError, cause)
        return result  # type: ignore[return-value]

    def over_rows(self, rows: Rows, predict: Callable[[Rows], Tensor]) -> Tensor:
        """`predict` on micro-batches of the rows without gradient, joined; a second axis is filled up with zeros."""
        count = len(rows["completion_ids"])

        def forwards() -> list[Tensor]:
            with self.trainer.scoring(), self.body.active(), autocast(self.trainer):
                return [predict(take(rows, i)) for i in torch.arange(count).split(self.number_of_rows)]

        parts = self.together(forwards)
        if parts[0].dim() == 1:
            return torch.cat(parts)
        width = max(part.shape[1] for part in parts)
        grown = [part.new_zeros(part.shape[0], width, *part.shape[2:]) for part in parts]
        for whole, part in zip(grown, parts, strict=True):
            whole[:, : part.shape[1]] = part
        return torch.cat(grown)

    def fit(
        self, rows: Rows, weight: Tensor, loss_sum: Callable[[Rows, Tensor], Tensor], epochs: int, minibatches: int
    ) -> dict[str, float]:
        """`epochs` over the generation in `minibatches` optimizer steps each. Returns learning rate and gradient norm.

        Args:
            weight: (b,) what each local row adds to a mini-batch's denominator (its tokens, or 1). A mini-batch without
                any weight takes no step.
            loss_sum: (rows, their local indices) -> the sum to minimise; divided by the weight of the mini-batch over
                all processes. Which rows form a mini-batch does not depend on the number of processes.

        Raises:
            VariantError: on every process, when a gradient is not finite.
        """
        trainer, here = self.trainer, len(weight)
        parameters = list(self.parameters().values())
        lr = self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norms: list[float] = []
        start = trainer.accelerator.process_index * here
        try:
            for _ in range(epochs):
                order = torch.randperm(here * trainer.world, generator=self.rng)
                for chunk in order.tensor_split(minibatches):
                    own = chunk[(chunk >= start) & (chunk < start + here)] - start
                    total = trainer.accelerator.reduce(weight[own.to(weight.device)].sum(), reduction="sum")
                    if float(total) == 0:
                        continue
                    self._backward(rows, own, total, loss_sum)
                    norms.append(self._step(parameters))
        finally:
            for parameter in parameters:
                parameter.grad = None
        return {"lr": lr, "grad_norm": sum(norms) / len(norms)} if norms else {"lr": lr}

    @property
    def learning_rate(self) -> float:
        """Its own, or what the policy's optimizer has now."""
        own = at(self.hook, self.trainer.progress).lr
        if own is not None:
            return float(own)
        scheduler = self.trainer.lr_scheduler
        return float(scheduler.get_last_lr()[0]) if scheduler is not None else float(self.trainer.args.learning_rate)

    def _backward(self, rows: Rows, own: Tensor, total: Tensor, loss_sum: Callable[[Rows, Tensor], Tensor]) -> None:
        def passes() -> None:
            with self.body.active(), torch.enable_grad():
                for part in own.split(self.number_of_rows) if len(own) else ():
                    with autocast(self.trainer):
                        loss = loss_sum(take(rows, part), part) / total
                    loss.backward()

        self.together(passes)

    def _step(self, parameters: list[nn.Parameter]) -> float:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.trainer.world > 1:
                torch.distributed.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, at(self.hook, self.trainer.progress).max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise VariantError(
                f"the gradient of learner {self.hook.hook_name} is not finite at step "
                f"{self.trainer.state.global_step}: lower its lr, or check the rewards it learns from"
            )
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return float(norm)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(plain part, tensors): weights, optimizer, counters and random state."""
        tensors = {f"weight/{name}": p.detach() for name, p in self.parameters().items()}
        for name, parameter in self.parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        tensors["rng"] = self.rng.get_state()
        return {"generations": self.generations}, tensors

    def load_state_dict(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Raises VariantError when the tensors are not those of this learner."""
        own = self.parameters()
        saved = {name.removeprefix("weight/") for name in tensors if name.startswith("weight/")}
        if saved != set(own):
            odd = sorted(saved ^ set(own))[:3]
            raise VariantError(f"{self.path}: the checkpoint holds other weights than this learner trains, e.g. {odd}")
        for name, parameter in own.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weight/{name}"])
            state = {}
            for key, value in _under(tensors, "optimizer/"):
                kind, _, owner = key.partition("/")
                if owner == name:
                    state[kind] = value.clone() if kind == "step" else value.to(parameter.device).clone()
            if state:
                self.optimizer.state[parameter] = state
        self.rng.set_state(tensors["rng"].to(torch.uint8))
        self.generations = plain["generations"]

    def restart(self) -> None:
        """A second `train()`: the weights stay, optimizer and counters begin anew."""
        self.optimizer.state.clear()
        self.generations = 0


def _state(head: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from head.state_dict().items()


def _under(tensors: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    return ((name.removeprefix(prefix), t) for name, t in tensors.items() if name.startswith(prefix))


def autocast(trainer: VariantGRPOTrainer) -> Any:
    """The run's mixed precision; fp16, which would need a loss scaler, is left out."""
    return contextlib.nullcontext() if trainer.accelerator.mixed_precision == "fp16" else trainer.accelerator.autocast()


def take(rows: Rows, index: Tensor) -> Rows:
    """Those rows, their completions cut behind the last token of the longest."""
    text = {name: rows[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    index = index.to(text["completion_ids"].device)
    part = {name: x[index] for name, x in text.items()}
    width = int((part["completion_mask"].cumsum(1).argmax(1) + 1).max()) if len(index) else 1
    return part | {name: part[name][:, :width] for name in ("completion_ids", "completion_mask")}
