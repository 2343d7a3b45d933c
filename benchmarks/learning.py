"""One training run of one method on the scratchpad task, and what its loss costs beside a plain one.

Everything runs in one process and one thread; `methods.py` runs several.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch

from trl_variants import Variant
from trl_variants.hooks.advantage import Grouped
from trl_variants.hooks.aggregate import SequenceMean
from trl_variants.hooks.clip import PPOClip
from trl_variants.hooks.ratio import TokenRatio

if TYPE_CHECKING:
    from trl_variants.tasks import Task


# logged by runs with a teacher or with traces: kept where they are there
ALSO = ("teacher/kl", "teacher/rows", "traces/wrong", "reward/policy")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The budget of every run; the same for all methods."""

    steps: int = 56
    rows: int = 64  # completions in an optimizer step
    batches: int = 2  # such batches in a generation
    passes: int = 4  # over each generation: 8 updates, all but the first off-policy
    group: int = 8
    tokens: int = 48
    learning_rate: float = 2.5e-4
    greedy_problems: int = 250
    sampled_problems: int = 64
    cost_pairs: int = 12

    def task(self) -> Task:
        return scratchpad(train_size=2000)

    def key(self, variant: Variant, seed: int | str) -> str:
        """Names a result: another budget, composition or seed is another result."""
        facts = [dataclasses.asdict(self), variant.to_mapping(), seed]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@functools.cache
def scratchpad(**options: Any) -> Task:
    from trl_variants.tasks import load_task

    return load_task("scratchpad", **options)


@functools.cache
def _loaded() -> tuple[Any, Any]:
    task = scratchpad(train_size=1)
    model, tokenizer = task.load_model()
    model.config.name_or_path = task.model_path()  # the reference model is loaded from there
    return model, tokenizer


def fresh_model() -> Any:
    return copy.deepcopy(_loaded()[0])


# --- what a model does ------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(model: Any, settings: Settings) -> dict[str, float]:
    """Behaviour on held-out problems; the sampled part draws with one seed, so that models are compared pairwise.

    Returns:
        accuracy (greedy), sampled (accuracy of samples), pass_n (any of a group's samples right), entropy (nats a
        token), length and wrong_length (tokens), truncated (share), drift (nats a token from the shipped model).
    """
    start, tokenizer = _loaded()
    rows = settings.task().eval_dataset
    accuracy = greedy(model, settings)
    prompts, answers = (list(rows[c][: settings.sampled_problems]) for c in ("prompt", "answer"))
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    width = batch["input_ids"].shape[1]
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        ids = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=settings.tokens, num_return_sequences=settings.group
        )
    new = ids[:, width:]
    ended = (new == tokenizer.eos_token_id).cumsum(1)
    mask = (ended - (new == tokenizer.eos_token_id).long() == 0).float()
    attention = torch.cat([batch["attention_mask"].repeat_interleave(settings.group, 0), mask.long()], 1)
    logps = [m(ids, attention_mask=attention).logits[:, width - 1 : -1].log_softmax(-1) for m in (model, start)]
    entropy = -(logps[0].exp() * logps[0]).sum(-1)
    chosen = [lp.gather(-1, new.unsqueeze(-1)).squeeze(-1) for lp in logps]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    wanted = [a for a in answers for _ in range(settings.group)]
    right = torch.tensor(settings.task().reward_funcs[0](prompts=None, completions=texts, answer=wanted))
    length = mask.sum(1)
    mean = lambda x: float((x * mask).sum() / mask.sum())  # noqa: E731
    return {
        "accuracy": accuracy,
        "sampled": float(right.mean()),
        "pass_n": float(right.view(-1, settings.group).amax(1).mean()),
        "entropy": mean(entropy),
        "length": float(length.mean()),
        "wrong_length": float(length[right == 0].mean()) if (right == 0).any() else float("nan"),
        "truncated": float((ended[:, -1] == 0).float().mean()),
        "drift": mean(chosen[0] - chosen[1]),
    }


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, task: Any, problems: int, samples: int) -> list[tuple[torch.Tensor, list]]:
    """For each of the first held-out problems its samples from one seed: (samples, T) token ids, and their rewards."""
    model.eval()
    rows, found = task.eval_dataset.select(range(problems)), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for prompt, answer in zip(rows["prompt"], rows["answer"], strict=True):
            batch = tokenizer(prompt, return_tensors="pt")
            ids = model.generate(
                **batch, do_sample=True, top_k=0, max_new_tokens=task.max_new_tokens, num_return_sequences=samples
            )[:, batch["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            found.append((ids, task.reward_funcs[0](prompts=None, completions=texts, answer=[answer] * samples)))
    return found


def greedy(model: Any, settings: Settings) -> float:
    """Greedy accuracy on the first held-out problems."""
    problems = settings.greedy_problems
    return settings.task().evaluate(model, _loaded()[1], batch_size=problems, limit=problems)


@functools.cache
def start(settings: Settings) -> dict[str, float]:
    """What the shipped model does before any training."""
    return measure(fresh_model(), settings)


# --- training ---------------------------------------------------------------------------------------------------


@functools.cache
def _classes() -> tuple[type, type]:
    # TRL takes seconds to import, and the process that only hands out work does not need it
    from trl_variants import VariantGRPOConfig, VariantGRPOTrainer

    class Watched(VariantGRPOTrainer):
        """Also sums |advantage| over groups without a right answer, and the seconds scoring takes."""

        signal = rows = scoring_seconds = 0.0

        def scored_generation(self, batch: list, generate: Callable) -> dict:
            generating = 0.0

            def timed(given: list) -> dict:
                nonlocal generating
                began = time.process_time()
                try:
                    return generate(given)
                finally:
                    generating += time.process_time() - began

            began = time.process_time()
            output = super().scored_generation(batch, timed)
            self.scoring_seconds += time.process_time() - began - generating
            advantage = output["advantages"].abs()
            mask = output["completion_mask"].float()
            if advantage.dim() == 2:
                advantage = (advantage * mask).sum(1) / mask.sum(1).clamp(min=1)
            hopeless = ~output["correct"].view(-1, self.num_generations).any(1)
            dead = hopeless.repeat_interleave(self.num_generations)
            self.signal += float(advantage[dead].sum())
            self.rows += float(dead.sum())
            return output

    return Watched, VariantGRPOConfig


def trainer(
    variant: Variant,
    settings: Settings,
    seed: int,
    folder: str,
    model: Any = None,
    callbacks: Any = None,
    **changes: Any,
) -> Any:
    """The trainer of a run of `model` (the shipped one); `changes` are configuration settings."""
    from transformers import PrinterCallback

    watched, config = _classes()
    arguments = dict(
        output_dir=folder,
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
        learning_rate=settings.learning_rate,
        adam_beta2=0.99,
        max_completion_length=settings.tokens,
        num_generations=settings.group,
        per_device_train_batch_size=settings.rows,
        steps_per_generation=settings.batches,
        num_iterations=settings.passes,
        max_steps=settings.steps,
    )
    made = watched(
        model=fresh_model() if model is None else model,
        reward_funcs=settings.task().reward_funcs,
        args=config(**{**arguments, **changes}),
        train_dataset=settings.task().train_dataset,
        processing_class=_loaded()[1],
        variant=variant,
        callbacks=callbacks,
    )
    made.remove_callback(PrinterCallback)
    return made


def train(variant: Variant, seed: int, settings: Settings, model: Any = None, callbacks: Any = None) -> dict[str, Any]:
    """One run. Returns {"start", "end"} as `measure` does, {"run"} (clipped, ess, no_right_signal, grad_norm) and
    CPU seconds a step, the callbacks' among them."""
    before = start(settings)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="methods-") as folder:
        made = trainer(variant, settings, seed, folder, model, callbacks)
        began = time.process_time()
        made.train()
        seconds = (time.process_time() - began) / settings.steps
        after = measure(made.model, settings)
    history = made.state.log_history

    def average(name: str) -> float | None:
        logged = [line[name] for line in history if name in line]
        return statistics.fmean(logged) if logged else None

    result = {
        "start": before,
        "end": after,
        "run": {
            "clipped": average("clip_ratio/region_mean"),
            "ess": average("ratio/ess"),
            "grad_norm": average("grad_norm"),
            "no_right_signal": made.signal / made.rows if made.rows else None,
            **{name: mean for name in ALSO if (mean := average(name)) is not None},
        },
        "seconds": seconds,
        "scope": made.variant.scope,
    }
    del made
    gc.collect()
    return result


# --- cost -------------------------------------------------------------------------------------------------------


def plain(like: Variant, scope: str | None = None) -> Variant:
    """Grouped advantage, token ratio, PPO clip, sequence mean; needs, scope and rollouts of another variant."""
    from trl_variants.trainer.scoring import scoring_needs

    def needing(cls: type, **attributes: Any) -> Any:
        return dataclasses.dataclass(frozen=True)(type(cls.__name__, (cls,), attributes))()

    # the sampler is the trainer's own model here, so there are no log-probs of an engine to ask for
    of_loss = frozenset().union(*(h.needs for _, h in like.hooks())) - {"rollout_logps"}
    return Variant(
        name="plain",
        rollouts=like.rollouts,  # how rows are drawn is no cost of the loss
        advantage=needing(Grouped, needs=scoring_needs(like)),
        ratio=needing(TokenRatio, needs=of_loss | TokenRatio().needs, scope=scope or like.scope),
        clip=PPOClip(),
        aggregate=SequenceMean(),
    )


class _Stepper:
    """Runs a trainer's steps one at a time, without the optimizer, so that every method has the same rows."""

    def __init__(self, variant: Variant, settings: Settings, folder: str):
        passes = 2 * -(-(settings.cost_pairs + 1) // (2 * settings.batches))  # even: lopti takes its passes in pairs
        # the planner would compare which rows a term keeps, a KL keeps them all, and not what its code costs
        plan = {"plan_updates": False}
        self.trainer = trainer(variant, settings, 0, folder, num_iterations=passes, max_steps=1000, **plan)
        self.updates = settings.batches * settings.passes  # of a generation, in a run
        self.rows = next(iter(self.trainer.get_train_dataloader()))
        self.model = self.trainer.model
        self.model.train()
        self.trainer.start_afresh()
        self.trainer.current_gradient_accumulation_steps = 1  # what transformers sets when it trains

    def step(self) -> float:
        """CPU seconds of one forward, loss and backward."""
        began = time.process_time()
        self.trainer._raw_window = [self.rows]
        self.trainer.training_step(self.model, self.rows, None)
        took = time.process_time() - began
        self.model.zero_grad()
        return took

    def first(self) -> None:
        """The step that generates."""
        torch.manual_seed(0)
        self.step()


def cost(variant: Variant, settings: Settings) -> dict[str, float]:
    """What the method's own code costs: its update beside `plain`'s, step by step in turn on the same rows.

    An update is forward, loss and backward, and its share of what rewards, selection and advantages take once a
    generation. Returns {"ratio", "low", "high"}: median and quartiles over pairs; for window scope "with_pass" too, the
    ratio to a plain loss of local scope, which needs no second forward of the window.
    """
    low, median, high = statistics.quantiles(_ratios(variant, plain(variant), settings), n=4)
    found = {"ratio": median, "low": low, "high": high}
    if variant.scope == "window":
        found["with_pass"] = statistics.median(_ratios(variant, plain(variant, scope="local"), settings))
    return found


def _ratios(variant: Variant, against: Variant, settings: Settings) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="methods-") as folder:
        pair = [_Stepper(v, settings, folder) for v in (variant, against)]
        for stepper in pair:
            stepper.first()
        scoring = [s.trainer.scoring_seconds / s.updates for s in pair]
        ratios = []
        for i in range(settings.cost_pairs):
            order = (0, 1) if i % 2 else (1, 0)
            took = {j: pair[j].step() + scoring[j] for j in order}
            ratios.append(took[0] / took[1])
    del pair
    gc.collect()
    return ratios
