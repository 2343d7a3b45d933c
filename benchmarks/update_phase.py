"""The update phase beside TRL's: tokens processed, share of useful ones, time, on the same rollouts.

    python benchmarks/update_phase.py [--rounds 5] [--workloads skewed,dense]
        [--device cuda --dtype bfloat16 --attention flash_attention_2]

Each workload is a window of given lengths and rewards (`rollout_func` returns random tokens of those lengths). TRL's
trainer and ours take one optimizer step on it in turn, in one process; measured are CPU seconds of the micro-steps
without generation and scoring, on a GPU wall seconds. Gradients are compared in every round, in bfloat16 both with
float32's too. Exits 1 when a bound is broken; bounds on time are those of a CPU, and printed only on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantGRPOConfig, VariantGRPOTrainer
from trl_variants.tasks.arithmetic import tiny_model_path

VOCABULARY = 2048
GROUP, MICRO, ACCUMULATION = 8, 4, 8
MOST_DIFFERENCE = 1e-5  # in float32; in bfloat16 ours may be a tenth further from float32's gradient than TRL's is
MORE = 1.1


@dataclass(frozen=True)
class Workload:
    """Lengths and rewards of one window: `draw(rng)` gives (prompt length, completion lengths, whether the group is
    dead) of each prompt."""

    title: str
    draw: Callable[[torch.Generator], list[tuple[int, list[int], bool]]]
    least_ratio: float
    least_share: float


def _uniform(rng: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=rng))


def _log_normal(rng: torch.Generator, median: float, sigma: float, most: int, count: int = GROUP) -> list[int]:
    drawn = median * (sigma * torch.randn(count, generator=rng)).exp()
    return drawn.clamp(1, most).long().tolist()


def skewed(dead: int) -> Callable:
    """Four prompts of 30-120 tokens, completions log-normal (median 80, sigma 0.9, at most 512), `dead` groups of the
    four without signal."""
    return lambda rng: [
        (_uniform(rng, 30, 120), _log_normal(rng, 80, 0.9, 512), k < dead) for k in range(MICRO * ACCUMULATION // GROUP)
    ]


def long_prompts(sigma: float) -> Callable:
    """Four prompts of 256 tokens, completions of median 64."""
    return lambda rng: [(256, _log_normal(rng, 64, sigma, 256), False) for _ in range(MICRO * ACCUMULATION // GROUP)]


def tight(rng: torch.Generator) -> list[tuple[int, list[int], bool]]:
    """Four prompts of 64 tokens, every completion of 128."""
    return [(64, [128] * GROUP, False) for _ in range(MICRO * ACCUMULATION // GROUP)]


WORKLOADS = {
    "skewed": Workload("skewed, half the groups dead", skewed(dead=2), 5.0, 0.95),
    "dense": Workload("skewed, no dead group", skewed(dead=0), 2.5, 0.95),
    "prompts": Workload("P = 4 S, log-normal S", long_prompts(0.8), 3.0, 0.95),
    "equal": Workload("P = 4 S, equal S", long_prompts(0.0), 2.5, 0.95),
    "tight": Workload("equal lengths, no dead group", tight, 1.0, 0.95),
}


class Rollout:
    """Rows of given lengths, random tokens, the same for both trainers."""

    def __init__(self, workload: Workload, seed: int):
        self.rng = torch.Generator().manual_seed(seed)
        self.groups = workload.draw(self.rng)

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=self.rng).tolist()  # noqa: E731
        prompt_ids, completion_ids = [], []
        for size, lengths, _ in self.groups:
            prompt_ids += [draw(size)] * len(lengths)
            completion_ids += [draw(n) for n in lengths]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    def reward(self, completions: list, **_: Any) -> list[float]:
        return [0.0 if dead else float(k % 2) for _, lengths, dead in self.groups for k in range(len(lengths))]


class Measure(TrainerCallback):
    """CPU seconds of the update phase, tokens through the backbone, and the gradient of the step."""

    def __init__(self, trainer: Any):
        self.seconds, self.processed, self.scoring = 0.0, 0, 0.0
        self.on_gpu = trainer.accelerator.device.type == "cuda"
        self.trainer, self.gradient = trainer, torch.empty(0)
        self.handle = trainer.model.model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        trainer._generate_and_score_completions = self._timed(trainer._generate_and_score_completions, "scoring")
        trainer.training_step = self._timed(trainer.training_step, "seconds")

    def _on_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        self.processed += kwargs["input_ids"].numel()

    def _timed(self, function: Callable, name: str) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self, name, getattr(self, name) + self._now() - start)

        return run

    def _now(self) -> float:
        if not self.on_gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradient = torch.cat([p.grad.float().flatten() for p in self.trainer.model.parameters()])


def model(layers: int, width: int, dtype: str = "float32", attention: str = "sdpa") -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(width // 192, 1),
            head_dim=64,
            max_position_embeddings=2048,
            pad_token_id=0,
            eos_token_id=1,
            attn_implementation=attention,
        )
    )
    return made.to(getattr(torch, dtype))


def step(
    cls: type, policy: Any, workload: Workload, seed: int, folder: str, device: str = "cpu", **settings: Any
) -> Measure:
    """One optimizer step of a trainer on the workload's window of this seed; the first forward of a run warms up."""
    rollout = Rollout(workload, seed)
    config = (VariantGRPOConfig if issubclass(cls, VariantGRPOTrainer) else GRPOConfig)(
        output_dir=folder,
        use_cpu=device == "cpu",
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=GROUP,
        max_completion_length=512,
        max_steps=1,
        save_strategy="no",
        learning_rate=0.0,
        max_grad_norm=1e9,
        **settings,
    )
    trainer = cls(
        model=copy.deepcopy(policy),
        reward_funcs=rollout.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(k)} for k in range(MICRO * ACCUMULATION // GROUP)]),
        processing_class=AutoTokenizer.from_pretrained(tiny_model_path()),
        rollout_func=rollout,
    )
    if hasattr(trainer, "forward"):
        _ = trainer.forward.abilities  # the check of a run's first step
    measure = Measure(trainer)
    trainer.add_callback(measure)
    trainer.train()
    measure.handle.remove()
    measure.seconds -= measure.scoring
    return measure


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", default="clip-higher", help="DAPO without its sampling")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--attention", default="sdpa", help="of transformers; flash_attention_2 needs a GPU and bfloat16"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy, broken = model(args.layers, args.width, args.dtype, args.attention), []
    exact = model(args.layers, args.width) if args.dtype != "float32" else None
    ours = dict(variant=args.variant, self_test=False)
    loss = dict(epsilon_high=0.28) if args.variant == "clip-higher" else {}
    table = Table(
        "workload", "tokens, TRL", "ours", "useful, TRL", "ours", "seconds, TRL", "ours", "ratio", "gradient apart",
        title=f"update phase of one optimizer step, {args.rounds} interleaved rounds",
    )  # fmt: skip
    keep, quiet = sys.stdout, open(os.devnull, "w")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.workloads.split(","):
            workload = WORKLOADS[name]
            seen: dict[str, list[float]] = {}
            for round_ in range(args.rounds):
                sys.stdout = quiet
                try:
                    theirs = step(GRPOTrainer, policy, workload, round_, folder, args.device, **loss)
                    mine = step(VariantGRPOTrainer, policy, workload, round_, folder, args.device, **ours)
                    full = exact and step(GRPOTrainer, exact, workload, round_, folder, args.device, **loss)
                finally:
                    sys.stdout = keep
                groups = Rollout(workload, round_).groups
                needed = sum(size * len(lengths) + sum(lengths) for size, lengths, _ in groups)
                share = float(mine.trainer.state.log_history[0]["plan/useful_share"])
                apart = _apart(mine.gradient, theirs.gradient)
                most = MOST_DIFFERENCE
                if full is not None:  # rounding is larger than any fault of the split: whose is nearer to float32?
                    apart, most = (_apart(g.gradient, full.gradient) for g in (mine, theirs))
                    most *= MORE
                if apart > most:
                    broken.append(f"{name} {round_}: gradients are {apart:.1e} apart, {most:.1e} allowed")
                print(
                    f"{name} {round_}: TRL {theirs.seconds:.2f} s, ours {mine.seconds:.2f} s, useful {share:.3f}, "
                    f"gradient apart {apart:.1e} of {most:.1e} allowed",
                    file=sys.stderr,
                    flush=True,
                )
                for key, value in (
                    ("tokens TRL", theirs.processed),
                    ("tokens", mine.processed),
                    ("useful TRL", needed / theirs.processed),
                    ("useful", share),
                    ("seconds TRL", theirs.seconds),
                    ("seconds", mine.seconds),
                    ("ratio", theirs.seconds / mine.seconds),
                    ("apart", apart),
                ):
                    seen.setdefault(key, []).append(value)
            middle = {k: statistics.median(v) for k, v in seen.items()}
            table.add_row(
                workload.title,
                f"{middle['tokens TRL']:.0f}",
                f"{middle['tokens']:.0f}",
                f"{100 * middle['useful TRL']:.0f} %",
                f"{100 * middle['useful']:.1f} %",
                f"{middle['seconds TRL']:.2f}",
                f"{middle['seconds']:.2f}",
                spread(seen["ratio"]),
                f"{max(seen['apart']):.0e}",
            )
            if args.device == "cpu" and middle["ratio"] < workload.least_ratio:
                broken.append(f"{name}: {middle['ratio']:.2f} times faster, {workload.least_ratio} wanted")
            if middle["useful"] < workload.least_share:
                broken.append(f"{name}: {middle['useful']:.1%} of the tokens are useful, {workload.least_share} wanted")
    Console(width=140).print(table)
    print("bounds hold" if not broken else "BROKEN: " + "; ".join(broken))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
