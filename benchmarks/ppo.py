"""PPO, VAPO and Open-Reasoner-Zero beside GRPO at equal samples, on answers of one step and of many.

    python benchmarks/ppo.py [--tasks arithmetic,scratchpad] [--arms ppo,...] [--seeds 1] [--out runs/ppo]

`arithmetic` is the built-in sum. `scratchpad` is the same with delayed credit: several dependent steps, one reward at
the end. One process, one thread. Each finished run is a line of OUT/results.jsonl and never done again. Beside the
critic's explained variance stands the most that any critic could explain of the trained policy's rewards. Fails unless
every critic method on `arithmetic` goes from at most 0.5 to at least 0.8 greedy accuracy and ends with explained
variance above 0.3.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs as a file too
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch

from benchmarks.learning import sampled
from trl_variants import Variant, variant


@dataclasses.dataclass(frozen=True)
class Budget:
    """The same for every arm of a task: samples, group size, length and the policy's learning rate."""

    generations: int
    rows: int  # completions in a generation
    tokens: int
    learning_rate: float
    passes: int  # policy updates on a generation
    group: int = 8
    problems: int = 400  # held out, for the greedy accuracy


BUDGETS = {
    "arithmetic": Budget(generations=80, rows=128, tokens=4, learning_rate=3e-4, passes=2),
    "scratchpad": Budget(generations=28, rows=128, tokens=48, learning_rate=2.5e-4, passes=4),
}
LEAST, MOST_BEFORE, LEAST_EXPLAINED = 0.8, 0.5, 0.3
CRITICS = ("ppo", "vapo", "open-reasoner-zero")
# the papers' critics learn at rates for billions of weights, VAPO's alpha is for thousands of tokens
CRITIC = {"lr": 5e-4, "body": "model"}


def arm(name: str) -> Variant:
    """A method as it is trained here; its departures from the catalog entry are the rates above."""
    if name == "grpo":
        return variant("grpo", regularizers=[])
    made = variant(name)
    critic = made.learners[0]
    edits: dict[str, Any] = {"learners": [dataclasses.replace(critic, **CRITIC)]}
    if name == "vapo":
        edits["advantage"] = dataclasses.replace(made.advantage, length_alpha=1.0)
    return made.with_(**edits)


def explainable(model: Any, tokenizer: Any, task: Any, problems: int = 100, samples: int = 128) -> float:
    """At most this share of the variance of rewards over an answer's states is known from the state: 1 - E Var(R | s) /
    Var(R), s the problem and the tokens so far. Variances inside a state are unbiased; a state met once counts as
    known."""
    inside, states, total, squares = 0.0, 0, 0.0, 0.0
    for ids, earned in sampled(model, tokenizer, task, problems, samples):
        met: dict[tuple[int, ...], list[float]] = {}
        for tokens, reward in zip(ids.tolist(), earned, strict=True):
            length = tokens.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in tokens else len(tokens)
            for t in range(length):
                met.setdefault(tuple(tokens[:t]), []).append(float(reward))
        for rewards in met.values():
            inside += len(rewards) * statistics.variance(rewards) if len(rewards) > 1 else 0.0
            states, total, squares = states + len(rewards), total + sum(rewards), squares + sum(r * r for r in rewards)
    variance = squares / states - (total / states) ** 2
    return 1.0 - inside / states / variance if variance > 0 else float("nan")


def train(task_name: str, name: str, seed: int) -> dict[str, Any]:
    """One run: accuracy before and after, explained variance over the last tenth of the generations, seconds."""
    from transformers import PrinterCallback

    from trl_variants import VariantGRPOConfig, VariantGRPOTrainer, VariantPPOConfig, VariantPPOTrainer
    from trl_variants.tasks import load_task

    budget, task = BUDGETS[task_name], load_task(task_name)
    passes = 1 if name == "open-reasoner-zero" else budget.passes
    torch.manual_seed(seed)
    model, tokenizer = task.load_model()
    accuracy = lambda: float(task.evaluate(model, tokenizer, batch_size=200, limit=budget.problems))  # noqa: E731
    before = accuracy()
    with tempfile.TemporaryDirectory(prefix="ppo-") as folder:
        alone = name in CRITICS  # a critic needs no group: every completion has a prompt of its own
        args = (VariantPPOConfig if alone else VariantGRPOConfig)(
            folder,
            temperature=1.0,
            seed=seed,
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            self_test=False,
            lr_scheduler_type="constant",
            learning_rate=budget.learning_rate,
            adam_beta2=0.99,
            max_completion_length=budget.tokens,
            num_generations=1 if alone else budget.group,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=budget.rows // 64,
            steps_per_generation=budget.rows // 64,
            num_iterations=passes,
            max_steps=budget.generations * passes,
        )
        trainer = (VariantPPOTrainer if alone else VariantGRPOTrainer)(
            model=model,
            reward_funcs=task.reward_funcs,
            args=args,
            train_dataset=task.train_dataset,
            processing_class=tokenizer,
            variant=arm(name),
        )
        trainer.remove_callback(PrinterCallback)
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
    model = trainer.model
    explained = [x for line in trainer.state.log_history if (x := line.get("critic/explained_variance")) is not None]
    explained = [x for x in explained if x == x]
    last = explained[-max(1, len(explained) // 10) :]
    return {
        "before": before,
        "after": accuracy(),
        "explained": statistics.fmean(last) if last else None,
        "explainable": explainable(model, tokenizer, task) if last else None,
        "seconds": seconds,
    }


def read(path: Path) -> dict[tuple[str, str, int], dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(r["task"], r["arm"], r["seed"]): r for r in map(json.loads, lines)}


def _mean(runs: list[dict], key: str) -> float:
    return statistics.fmean(r[key] for r in runs)


def markdown(done: dict[tuple[str, str, int], dict], tasks: list[str], arms: list[str], seeds: int) -> str:
    lines = [
        "| task | method | samples | greedy accuracy | explained variance | of at most | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in tasks:
        for name in arms:
            runs = [done[task, name, s] for s in range(seeds) if (task, name, s) in done]
            if not runs:
                continue
            spread = (max(r["after"] for r in runs) - min(r["after"] for r in runs)) / 2
            explained = "" if runs[0]["explained"] is None else f"{_mean(runs, 'explained'):.2f}"
            most = "" if runs[0]["explainable"] is None else f"{_mean(runs, 'explainable'):.2f}"
            samples = BUDGETS[task].generations * BUDGETS[task].rows
            after = f"{_mean(runs, 'after'):.2f}" + (f" ± {spread:.2f}" if len(runs) > 1 else "")
            moved, took = f"{_mean(runs, 'before'):.2f} -> {after}", f"{_mean(runs, 'seconds'):.0f}"
            cells = (task, name, f"{samples}", moved, explained, most, took)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def broken(done: dict[tuple[str, str, int], dict]) -> list[str]:
    """One line for each claim on `arithmetic` that a run contradicts."""
    out = []
    for (task, name, seed), r in done.items():
        if task != "arithmetic" or name not in CRITICS:
            continue
        if r["before"] > MOST_BEFORE or r["after"] < LEAST:
            out.append(f"{name}, seed {seed}: accuracy {r['before']:.2f} -> {r['after']:.2f}")
        if r["explained"] is None or r["explained"] <= LEAST_EXPLAINED:
            out.append(f"{name}, seed {seed}: explained variance {r['explained']}")
    return out


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="arithmetic,scratchpad")
    parser.add_argument("--arms", default="grpo," + ",".join(CRITICS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/ppo"))
    args = parser.parse_args(words)
    tasks, arms = args.tasks.split(","), args.arms.split(",")
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.jsonl"
    for seed in range(args.seeds):
        for task in tasks:
            for name in arms:
                if (task, name, seed) in read(path):
                    continue
                found = train(task, name, seed)
                with path.open("a") as f:
                    f.write(json.dumps({"task": task, "arm": name, "seed": seed, **found}) + "\n")
                print(task, name, seed, found, flush=True)
    done = read(path)
    table = markdown(done, tasks, arms, args.seeds)
    (args.out / "table.md").write_text(table + "\n")
    print(table)
    wrong = broken({k: v for k, v in done.items() if k[0] in tasks and k[1] in arms and k[2] < args.seeds})
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
