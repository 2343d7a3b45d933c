"""What a critic costs in memory: SmolLM2-135M under QLoRA, bytes of weights, gradients and optimizer state.

    python benchmarks/memory.py

One optimizer step of each kind of run is taken, then every tensor that is there is counted: weights of policy, critic
and head (4-bit weights as they are packed, with their scales), gradients of everything trained, Adam's moments.
Activations are not counted: a critic's passes come after the policy's generation and before its own, one at a time.
Fails when the adapter critic (r = 8 on q and v) takes more than 5 % above GRPO. Needs `make smollm2` once.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs as a file too
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from torch import Tensor, nn

MOST_ABOVE = 0.05
RUNS: dict[str, dict[str, Any] | None] = {
    "GRPO": None,
    "PPO, adapter critic r=8 on q,v": {"body": "adapter", "r": 8, "targets": "q_proj,v_proj"},
    "PPO, adapter critic r=16, all linear": {"body": "adapter", "r": 16, "alpha": 32.0, "targets": "all-linear"},
    "PPO, head on the policy's trunk": {"body": "trunk"},
    "PPO, separate critic (bfloat16)": {"body": "model"},
}


def size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def weights_of(module: nn.Module) -> int:
    """Bytes of all weights, 4-bit and 8-bit ones packed and with the state that unpacks them."""
    total, seen = 0, set()
    for p in module.parameters():
        if id(p) in seen:
            continue
        seen.add(id(p))
        total += size(p)
        state = getattr(p, "quant_state", None)
        while state is not None:
            total += sum(size(t) for t in (state.absmax, state.code) if t is not None)
            state = getattr(state, "state2", None)
    for layer in module.modules():  # 8-bit scales: with the weight, and with the layer once it was used
        for place in (getattr(layer, "weight", None), getattr(layer, "state", None)):
            if isinstance(scales := getattr(place, "SCB", None), Tensor):
                total += size(scales)
    return total


def bytes_of(trainer: Any) -> dict[str, int]:
    """Bytes by kind, after a step; gradients are as large as what is trained."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    moments = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    weights = weights_of(trainer.model)
    for worker in trainer.team.workers.values():
        inside = {id(p) for p in trainer.model.parameters()}
        weights += sum(size(p) for p in worker.parameters().values() if id(p) not in inside)
        trained += list(worker.parameters().values())
        moments += [v for s in worker.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {"weights": weights, "gradients": sum(map(size, trained)), "optimizer": sum(map(size, moments))}


def method_of(critic: dict[str, Any] | None) -> Any:
    from trl_variants import variant

    return variant("grpo", regularizers=[]) if critic is None else variant("ppo", learners=[{"critic": critic}])


def measure(critic: dict[str, Any] | None) -> dict[str, int]:
    """One optimizer step of GRPO, or of PPO with that critic, and what it holds."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModel, AutoTokenizer, BitsAndBytesConfig, PrinterCallback

    from trl_variants import VariantGRPOConfig, VariantGRPOTrainer
    from trl_variants.tasks import smollm2_path

    path = smollm2_path()

    class Trainer(VariantGRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            if critic and critic["body"] == "model":
                self.given_models = {"value_model": AutoModel.from_pretrained(path, dtype=torch.bfloat16)}
            super().__init__(*args, **kwargs)

    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        args = VariantGRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            self_test=False,
            gradient_checkpointing=False,
            max_completion_length=4,
            num_generations=4,
            per_device_train_batch_size=4,
            max_steps=1,
        )
        trainer = Trainer(
            model=path,
            reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 3 ="] * 4}),
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            variant=method_of(critic),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return bytes_of(trainer)


def estimated(critic: dict[str, Any] | None) -> int:
    """What `estimate_memory` says of such a run, activations left out, without loading it."""
    from peft import LoraConfig

    from trl_variants import estimate_memory
    from trl_variants.tasks import smollm2_path

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return sum(estimate_memory(smollm2_path(), method_of(critic), bits=4, lora=lora).held.values())


def markdown(found: dict[str, dict[str, int]], guesses: dict[str, int]) -> str:
    base = sum(found["GRPO"].values())
    heads = ["run", "weights", "gradients", "optimizer", "together", "above GRPO", "estimated"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, kinds in found.items():
        total = sum(kinds.values())
        cells = [name, *(f"{x / 1e6:.1f} MB" for x in (*kinds.values(), total)), f"{100 * (total / base - 1):.1f} %"]
        cells.append(f"{guesses[name] / 1e6:.1f} MB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    found = {name: measure(critic) for name, critic in RUNS.items()}
    print(markdown(found, {name: estimated(critic) for name, critic in RUNS.items()}))
    names = list(found)
    above = sum(found[names[1]].values()) / sum(found["GRPO"].values()) - 1
    return 0 if above <= MOST_ABOVE else 1


if __name__ == "__main__":
    sys.exit(main())
