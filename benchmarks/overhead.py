"""What a variant costs beside TRL: forwards, tokens, time in hooks, step time.

    python benchmarks/overhead.py [--pairs 12] [--steps 3] [--variant dapo]

Runs TRL's trainer and ours on the same model, data and seed, in turn inside one process (T O N, T O N, ...: TRL, ours
without a variant, ours with one), so that a machine whose speed drifts treats all alike. CPU seconds of the process,
not wall time. Prints the figures as a table and exits 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_variants import VariantGRPOConfig, VariantGRPOTrainer
from trl_variants.tasks.arithmetic import tiny_model_path
from trl_variants.trainer import grpo

MOST_HOOK_SHARE = 0.02
MOST_RATIO = 1.05
COLUMNS = ("TRL", "ours, no variant", "ours, variant")


class Meter:
    """Counts backbone passes and tokens, and the seconds spent in the variant's own code."""

    def __init__(self) -> None:
        self.forwards = self.tokens = 0
        self.hook_seconds = 0.0

    def on_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and ids.shape[1] > 1:  # single-token calls are generation
            self.forwards += 1
            self.tokens += ids.numel()

    def timed(self, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.hook_seconds += time.process_time() - start

        return run


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def reward(completion_ids: list, **_: Any) -> list[float]:
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def train(kind: str, steps: int, name: str, folder: str) -> tuple[float, Meter]:
    """One run; returns CPU seconds a step (its first step left out: it warms up and holds the self-test) and the
    meter."""
    own = kind != "TRL"
    config = (VariantGRPOConfig if own else GRPOConfig)(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        steps_per_generation=4,
        num_iterations=2,
        num_generations=8,
        max_completion_length=48,
        max_steps=steps + 1,
        save_strategy="no",
        learning_rate=1e-4,
        **({"plan_updates": False} if own else {}),  # the same work, so that what is compared is what hooks cost
        **({"variant": name} if kind == COLUMNS[2] else {}),
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    data = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(8) for b in range(8)])
    trainer = (VariantGRPOTrainer if own else GRPOTrainer)(
        model=model(), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
    )
    meter, marks = Meter(), []
    trainer.model.model.register_forward_pre_hook(meter.on_forward, with_kwargs=True)

    class Clock(__import__("transformers").TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append(time.process_time())
            if len(marks) == 1:
                meter.forwards = meter.tokens = 0
                meter.hook_seconds = 0.0

    trainer.add_callback(Clock())
    names = (
        "evaluate",
        "coefficients",
        "score",
        "advantages",
        "build_scored",
        "count_window",
        "dead_groups",
        "token_batch",
    )
    stock = {n: getattr(grpo, n) for n in names}
    try:
        if own:
            for n, function in stock.items():
                setattr(grpo, n, meter.timed(function))
            trainer._end_of_window = meter.timed(trainer._end_of_window)
        trainer.train()
    finally:
        for n, function in stock.items():
            setattr(grpo, n, function)
    return (marks[-1] - marks[0]) / steps, meter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps measured per run, besides one to warm up")
    parser.add_argument(
        "--variant", default="dapo", help="a variant without a reference model, so that the work is the same"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    seconds: dict[str, list[float]] = {c: [] for c in COLUMNS}
    meters: dict[str, Meter] = {}
    hook_share: dict[str, list[float]] = {c: [] for c in COLUMNS}
    quiet = open(os.devnull, "w")
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs + 1):
            for kind in COLUMNS:
                keep, sys.stdout = sys.stdout, quiet
                try:
                    took, meters[kind] = train(kind, args.steps, args.variant, folder)
                finally:
                    sys.stdout = keep
                if pair:  # the first round warms the process up
                    seconds[kind].append(took)
                    hook_share[kind].append(meters[kind].hook_seconds / (took * args.steps))
    table = Table("", *COLUMNS, title=f"one optimizer step, {args.pairs} interleaved rounds of {args.steps} steps")
    ratios = {c: [o / t for o, t in zip(seconds[c], seconds["TRL"], strict=True)] for c in COLUMNS[1:]}
    table.add_row("forwards (update phase and scoring)", *(f"{meters[c].forwards / args.steps:g}" for c in COLUMNS))
    table.add_row("tokens processed", *(f"{meters[c].tokens / args.steps:g}" for c in COLUMNS))
    table.add_row("CPU seconds, median", *(f"{statistics.median(seconds[c]):.3f}" for c in COLUMNS))
    spread = lambda r: f"{statistics.median(r):.3f} ({min(r):.3f} to {max(r):.3f})"  # noqa: E731
    table.add_row("ratio to TRL, median (range)", "1", *(spread(ratios[c]) for c in COLUMNS[1:]))
    table.add_row(
        "of it in hooks, totals and metrics",
        "",
        *(f"{100 * statistics.median(hook_share[c]):.2f} %" for c in COLUMNS[1:]),
    )
    Console(width=110).print(table)
    work = {(meters[c].forwards, meters[c].tokens) for c in COLUMNS}
    broken = [] if len(work) == 1 else ["forwards or tokens differ"]
    for c in COLUMNS[1:]:
        if statistics.median(ratios[c]) > MOST_RATIO:
            broken.append(f"{c}: step time ratio above {MOST_RATIO}")
        if statistics.median(hook_share[c]) > MOST_HOOK_SHARE:
            broken.append(f"{c}: hooks take more than {MOST_HOOK_SHARE:.0%} of a step")
    print("bounds hold" if not broken else "BROKEN: " + "; ".join(broken))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
