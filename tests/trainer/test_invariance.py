"""The gradient of an optimizer step does not depend on micro-batches or processes: every variant, through the trainer.

All runs train on the same rows: completions are a function of (generation, row), so that only the split differs.
"""

from __future__ import annotations

import functools

import pytest
import torch

from trl_variants import RewardError, VariantGRPOTrainer, variants

from . import toy
from .forked import run_forked

ROWS, GROUP = 24, 8  # three groups; with two processes of twelve rows the middle one straddles them
SPLITS = {"24x1": (24, 1), "6x4": (6, 4), "3x8": (3, 8)}
TOLERANCE = 5e-6
NAMES = [v.name for v in variants]
EXTRA = {
    "window-entropy": (
        "dapo",
        {
            "weight": [{"entropy_quantile": {"keep": 0.5}}],
            "regularizers": [{"entropy_bonus": {"coef": 0.05}}],
        },
    ),
    "adaptive-entropy": ("gspo", {"regularizers": [{"adaptive_entropy": {"coef": 0.02, "target": 2.5}}]}),
    "prompt-mean": ("dapo", {"aggregate": "prompt_mean", "select": ["mask_truncated"]}),
    "correct-nll": ("dr-grpo", {"regularizers": [{"nll": {"coef": 0.1}}]}),
    "live-sequence-kl": ("gspo", {"regularizers": [{"kl": {"coef": 0.1, "weight": "live"}}]}),
    "vapo": ("vapo", {"learners": [{"critic": {"lam": 1.0, "warmup": 0}}]}),  # its warm-up is longer than three steps
    # at first z is the rounding of log-probs, which c_A magnifies; at 1e-6 the reward model hardly leaves the reference
    "vimpo": ("vimpo", {"credit": [{"implicit_value": {"coef": 5e-4}}]}),
    "prime": ("prime", {"learners": [{"implicit_reward": {"lr": 1e-2}}]}),
    # an untrained model finds no token as likely as eta, so the second pass would be empty
    **{
        name: (
            name,
            {
                "credit": [{"low_probability_first": {"eta": 0.04}}],
                "regularizers": [{"kl_of_pass": {"eta": 0.04}}],
            },
        )
        for name in ("lopti", "lopti-ar")
    },
}
CASES = {**{n: (n, None) for n in NAMES}, **EXTRA}
# small enough that a narrow clip leaves some rows their gradient in the off-policy step
RATES = {
    "rloo": 1e-4,
    "grpo-ustat": 1e-4,
    "gspo": 2e-6,
    "gspo-token": 2e-6,
    "luspo": 1e-5,
    "adaptive-entropy": 2e-6,
    "live-sequence-kl": 2e-6,
    "vimpo": 1e-2,
    "vespo": 2e-4,  # its weight is exponential in the summed log-ratio, and so is what rounding makes of it
}
# standardised differences of numbers that are large beside them magnify the rounding of float32: of entropies in GTPO,
# of log-probs to a reference that is still close in VIMPO and PRIME; VESPO's weight is exponential in a sum of them
PRECISE = {"gtpo", "vimpo", "prime", "vespo"}
# the steps of three that carry signal, where it is not all: dr-seg ranks every score 1 until it has a history
LIVE = {"dr-seg": 1}


class Rollout:
    """Random completions with tool tokens, truncated rows and an empty one, the same whatever the number of
    processes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: list, trainer) -> dict:
        first = trainer.accelerator.process_index * len(prompts)
        ids, masks = [], []
        given = trainer.services.given or [None] * len(prompts)
        for row, start in zip(range(first, first + len(prompts)), given, strict=True):
            rng = torch.Generator().manual_seed(1000 * self.calls + row)
            length = int(torch.randint(1, 7, (1,), generator=rng))
            body = torch.randint(2, 2 + len(toy.CHARACTERS), (length,), generator=rng).tolist()
            tools = (torch.rand(length, generator=rng) < 0.2).tolist()
            finished = row % 3 != 0
            ids.append([] if row % ROWS == 13 else body + [toy.EOS] * finished)
            masks.append([] if row % ROWS == 13 else [int(not t) for t in tools] + [1] * finished)
            if start is not None and not start.complete:
                ids[-1], masks[-1] = start.ids + ids[-1], [1] * len(start.ids) + masks[-1]
        self.calls += 1
        prompt_ids = [toy.tokenizer()(p).input_ids for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": masks}


def scores(completions: list[str], prompts: list[str], **_) -> list[float | None]:
    """Digits, with one prompt that is always right (a dead group) and some rows without a score."""
    shares = toy.digits(completions)
    return [
        1.0 if p == "0" else None if len(c) == 3 else s for p, c, s in zip(prompts, completions, shares, strict=True)
    ]


def gradients(case: str, rows: int, accumulation: int, **changes) -> list[torch.Tensor]:
    """Gradients of three optimizer steps: two on the first generation (the second off-policy), one on the next."""
    name, hooks = CASES[case]
    out = toy.train(
        VariantGRPOTrainer,
        variant=name,
        hooks=hooks,
        rewards=scores,
        per_device_train_batch_size=rows,
        num_generations=GROUP,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_iterations=2,
        max_steps=3,
        learning_rate=RATES.get(case, 1e-3),
        dtype=torch.float64 if case in PRECISE else torch.float32,
        trainer_arguments={"rollout_func": Rollout()},
        **changes,
    )
    return out.gradients


@functools.cache
def whole(case: str) -> list[torch.Tensor]:
    """The gradients of one process with all rows in one micro-batch."""
    return gradients(case, *SPLITS["24x1"])


def worst(a: list[torch.Tensor], b: list[torch.Tensor], wanted: int = 3) -> float:
    live = [(x, y) for x, y in zip(a, b, strict=True) if y.norm() > 1e-4]
    silent = [x for x, y in zip(a, b, strict=True) if y.norm() <= 1e-4]
    assert len(a) == 3 and len(live) >= wanted  # a run without signal proves nothing
    assert all(x.norm() <= 1e-4 for x in silent)
    return max(toy.apart(x, y) for x, y in live)


@pytest.mark.parametrize("case", CASES)
def test_gradient_does_not_depend_on_the_split(case):
    differs = worst(gradients(case, *SPLITS["3x8"]), whole(case), LIVE.get(case, 3))  # 6x4: in test_planning
    if case == "bnpo":  # a local rule by definition: it must vary, or the span would be a lie
        assert differs > 1e-3
    else:
        assert differs < TOLERANCE, differs


def test_two_steps_are_off_policy():
    """The second step's ratio has left 1, so clips and anchors are live in the comparison above."""
    first, second, _ = whole("dapo")
    assert toy.apart(second, first) > 1e-2


def _all_gradients(rank: int) -> dict[str, list[torch.Tensor]]:
    return {case: gradients(case, 3, 4) for case in CASES}


@pytest.fixture(scope="module")
def two_processes() -> list[dict[str, list[torch.Tensor]]]:
    toy.model()
    return run_forked(_all_gradients, ranks=2, timeout=900)


@pytest.mark.parametrize("case", [c for c in CASES if c != "bnpo"])
def test_one_process_equals_two(case, two_processes):
    """Two gloo processes of 3 x 4 rows against one of 24 x 1, groups straddling the processes."""
    for rank in two_processes:
        assert worst(rank[case], whole(case), LIVE.get(case, 3)) < TOLERANCE


@pytest.mark.parametrize("accumulation,per_generation", [(8, 4), (3, 2), (6, 4)])
def test_several_generations_in_one_step(accumulation, per_generation):
    """The window's totals are known before its first backward also when it spans generations: one split equals
    another."""

    def run(rows: int, factor: int) -> list[torch.Tensor]:
        return toy.train(
            VariantGRPOTrainer,
            variant="dapo",
            rewards=scores,
            per_device_train_batch_size=rows,
            num_generations=GROUP,
            num_iterations=1,
            gradient_accumulation_steps=accumulation * factor,
            steps_per_generation=per_generation * factor,
            max_steps=2,
            trainer_arguments={"rollout_func": Rollout()},
        ).gradients

    if accumulation % per_generation:  # the step ends inside a generation: rows are cut after a local shuffle
        assert all(g.norm() > 1e-4 for g in run(8, 1))
    else:
        for a, b in zip(run(8, 1), run(4, 2), strict=True):
            assert a.norm() > 1e-4 and toy.apart(b, a) < TOLERANCE


def _fails_on_one_rank(rank: int) -> str:
    def broken(completions, **_):
        if rank == 1:
            raise KeyError("the answer column")
        return [0.0] * len(completions)

    with pytest.raises(RewardError) as error:
        toy.train(VariantGRPOTrainer, variant="dapo", rewards=broken, max_steps=1)
    return str(error.value)


def test_a_reward_function_that_raises_on_one_rank_stops_all():
    toy.model()
    messages = run_forked(_fails_on_one_rank, ranks=2, timeout=60)
    assert messages[0] == messages[1] == "process 1: reward function 'broken' failed: KeyError('the answer column')"


def _rollout_fails_on_one_rank(rank: int) -> str:
    class Broken(Rollout):
        def __call__(self, prompts: list, trainer) -> dict:
            if rank == 1:
                raise OSError("the environment is gone")
            return super().__call__(prompts, trainer)

    with pytest.raises(RuntimeError) as error:
        toy.train(VariantGRPOTrainer, variant="dapo", max_steps=1, trainer_arguments={"rollout_func": Broken()})
    return str(error.value)


def test_a_rollout_func_that_raises_on_one_rank_stops_all():
    toy.model()
    messages = run_forked(_rollout_fails_on_one_rank, ranks=2, timeout=60)
    assert messages[0] == messages[1] == "process 1: rollout_func failed: OSError('the environment is gone')"


def _uneven(rank: int) -> torch.Tensor:
    trainer = toy.build(VariantGRPOTrainer, variant="dapo")
    return trainer.gather_rows(torch.full((2 + rank, 3 - rank), float(rank + 1)), 0.0)


def test_gathering_rows_that_are_uneven_in_number_and_width():
    toy.model()
    gathered = run_forked(_uneven, ranks=2, timeout=60)
    expected = torch.tensor([[1.0, 1, 1]] * 2 + [[2.0, 2, 0]] * 3)
    assert all(torch.equal(g, expected) for g in gathered)


def _evaluation(rank: int) -> dict[str, float]:
    trainer = toy.build(
        VariantGRPOTrainer,
        variant="dapo",
        hooks=EXTRA["window-entropy"][1],
        rewards=scores,
        per_device_eval_batch_size=8,
        num_generations=8,
        per_device_train_batch_size=8,
        trainer_arguments={"rollout_func": Rollout(), "eval_dataset": toy.dataset()},
    )
    return {
        k: v
        for k, v in trainer.evaluate().items()
        if k in ("eval_loss", "eval_entropy", "eval_reward", "eval_ratio/ess")
    }


def test_evaluation_batches_are_windows_of_their_own():
    """Evaluation works before training, for hooks that need the window, with one process and with two."""
    [one] = run_forked(_evaluation, ranks=1)
    two = run_forked(_evaluation, ranks=2)
    assert one.keys() == two[0].keys() >= {"eval_loss", "eval_reward"}
    assert two[0] == two[1]
    assert all(v == v for v in one.values())
