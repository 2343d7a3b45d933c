"""All learners of a run: called in order, saved and restored together."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import VariantError
from ..records import Scored
from .base import Rows, Worker
from .bodies import AdapterBody

if TYPE_CHECKING:
    from ..trainer.grpo import VariantGRPOTrainer

FOLDER = "_learners"  # a name that transformers leaves out of every push to the Hub


class Team:
    """The workers of a variant's learners, by path ("learners.0").

    Raises:
        VariantError: under DeepSpeed or FSDP, where a second model or adapter needs their engine's help.
    """

    def __init__(self, trainer: VariantGRPOTrainer):
        self.trainer = trainer
        hooks = [(path, h) for path, h in trainer.variant.hooks() if path.startswith("learners.")]
        if hooks and (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
            raise VariantError("learners run on one process or under DDP; DeepSpeed and FSDP are not built")
        devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # new weights must not change what the policy samples
            torch.manual_seed(trainer.args.seed)
            self.workers: dict[str, Worker] = {path: h.attach(trainer, path) for path, h in hooks}

    @property
    def freezes_policy(self) -> bool:
        """Whether some learner wants the policy to stand still for this generation."""
        return any(w.freezes_policy for w in self.workers.values())

    def before(self, scored: Scored, rows: Rows, training: bool) -> Scored:
        """Learners that learn before rewards are read do so; then all predictions enter the record."""
        for worker in self.workers.values():
            if rows.get("pixel_values") is not None:
                raise VariantError(f"learner {worker.hook.hook_name} reads text only, and these rows hold images")
            if training and worker.learns == "before":
                self._log(worker.learn(rows, scored, None))
            found = worker.predict(rows, scored)
            every = {name: self.trainer.gather_rows(x, 0.0) for name, x in found.items()}
            after = every.pop("bootstrap", None)
            tokens = {name: x for name, x in every.items() if x.dim() > 1}
            keys = {name: x for name, x in every.items() if x.dim() == 1}
            changes = {} if after is None else {"bootstrap": after}
            scored = scored.with_(tokens={**scored.tokens, **tokens}, keys={**scored.keys, **keys}, **changes)
        return scored

    def after(self, scored: Scored, rows: Rows, advantage: Tensor) -> dict[str, Tensor]:
        """The other learners learn. Returns what they attach to the rows for hooks in the loss."""
        attached: dict[str, Tensor] = {}
        for worker in self.workers.values():
            if worker.learns == "after":
                self._log(worker.learn(rows, scored, advantage))
            attached.update({f"extra/{name}": x for name, x in worker.attachments(rows, scored).items()})
        return attached

    def _log(self, metrics: dict[str, float] | None) -> None:
        for name, value in (metrics or {}).items():
            self.trainer._metrics["train"][name].append(value)

    # --- the policy's loss, for learners that declare it --------------------------------------------------------

    @property
    def trains_policy(self) -> bool:
        return any(w.trains_policy for w in self.workers.values())

    @contextlib.contextmanager
    def watching(self, model: Any, seen: list[Tensor]) -> Iterator[None]:
        """Keeps the policy's last hidden states of the forward inside, graph included, where a learner needs them."""
        from .bodies import backbone_of

        if not self.trains_policy:
            yield
            return
        backbone = backbone_of(self.trainer.accelerator.unwrap_model(model))
        handle = backbone.register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state))
        try:
            yield
        finally:
            handle.remove()

    def policy_terms(self, seen: list[Tensor], batch: Rows) -> dict[str, Tensor]:
        """What learners add to the policy's loss of a micro-batch, by name."""
        if not seen:
            return {}
        hidden = seen[-1][:, batch["prompt_ids"].shape[1] - 1 :]
        return {w.hook.hook_name: w.policy_term(hidden, batch) for w in self.workers.values() if w.trains_policy}

    # --- saving -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def left_out_of_the_policy(self) -> Iterator[None]:
        """While a policy with adapters is saved, the learners' adapters are not among them."""
        model: Any = self.trainer.model
        own = {w.body.name for w in self.workers.values() if isinstance(w.body, AdapterBody)}
        if not own or not is_peft_model(model):
            yield
            return
        stock, kept = model.save_pretrained, [name for name in model.peft_config if name not in own]

        def save(*args: Any, **kwargs: Any) -> Any:
            return stock(*args, **{"selected_adapters": kept, **kwargs})

        model.save_pretrained = save
        try:
            yield
        finally:
            del model.save_pretrained

    def save_weights(self, folder: str) -> None:
        """Each learner's weights into `folder`/_learners/name."""
        names: dict[str, int] = {}
        for worker in self.workers.values():
            name = worker.hook.hook_name
            names[name] = names.get(name, 0) + 1
            label = name if names[name] == 1 else f"{name}_{names[name]}"
            worker.save_weights(os.path.join(folder, FOLDER, label))

    def save_state(self, folder: str) -> None:
        if not self.workers:
            return
        plain, tensors = {}, {}
        for path, worker in self.workers.items():
            plain[path], own = worker.state_dict()
            tensors.update({f"{path}/{n}": t.detach().cpu().clone().contiguous() for n, t in own.items()})
        save_file(tensors, os.path.join(folder, "variant_learners.safetensors"))
        target = os.path.join(folder, "variant_learners.json")
        with open(target + ".tmp", "w") as f:
            json.dump(plain, f)
        os.replace(target + ".tmp", target)

    def load_state(self, folder: str) -> tuple[dict, dict[str, Tensor]] | None:
        path = os.path.join(folder, "variant_learners.json")
        if not self.workers or not os.path.exists(path):
            return None
        with open(path) as f:
            return json.load(f), load_file(os.path.join(folder, "variant_learners.safetensors"))

    def apply_state(self, loaded: tuple[dict, dict[str, Tensor]]) -> None:
        plain, tensors = loaded
        for path, worker in self.workers.items():
            own = {n.removeprefix(f"{path}/"): t for n, t in tensors.items() if n.startswith(f"{path}/")}
            worker.load_state_dict(plain[path], own)

    def restart(self) -> None:
        for worker in self.workers.values():
            worker.restart()
