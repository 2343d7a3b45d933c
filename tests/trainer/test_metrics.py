"""What a run logs beside TRL's names: dead groups, effective sample size, hook metrics, our advantages."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainer.toy import PROMPTS, apart, dataset, digits, train
from trl_variants.trainer import grpo as grpo_module

TIMES = ("time", "runtime", "per_second", "epoch")
RIGHT, WRONG, NOBODY = {"a1", "d", "77"}, {"bc2", "0"}, {"g"}


def by_prompt(prompts, completions, **_):
    """Whole groups right, wrong or unscorable by their prompt; the others have a spread."""
    fixed = {p: 1.0 for p in RIGHT} | {p: 0.0 for p in WRONG} | {p: None for p in NOBODY}
    return [fixed.get(p, float(i % 2)) for i, p in enumerate(prompts)]


def groups(table: dict[str, list]) -> list[str]:
    return table["prompt"][::4]


@pytest.mark.parametrize("variant", [None, "grpo"])
def test_dead_groups_are_split_by_what_they_got_right(variant):
    run = train(rewards=by_prompt, variant=variant, steps_per_generation=8, num_iterations=1, max_steps=4)
    asked = groups(run.tables[0])
    assert len(asked) == 8 and set(asked) == set(PROMPTS)
    [line] = [line for line in run.logs if "advantage/dead_groups" in line]
    share = lambda kind: sum(p in kind for p in asked) / len(asked)  # noqa: E731
    assert line["advantage/dead_all_right"] == pytest.approx(share(RIGHT))
    assert line["advantage/dead_all_wrong"] == pytest.approx(share(WRONG))
    assert line["advantage/unscorable"] == pytest.approx(share(NOBODY))
    assert line["advantage/dead_groups"] == pytest.approx(share(RIGHT | WRONG | NOBODY))


def test_an_unscorable_row_does_not_decide_what_its_group_got_right():
    def reward(completions, **_):
        return [None if i % 4 == 0 else 1.0 for i in range(len(completions))]

    run = train(rewards=reward, variant="grpo", max_steps=2)
    assert run.logged("advantage/dead_groups") == run.logged("advantage/dead_all_right") == [1.0]
    assert run.logged("advantage/dead_all_wrong") == [0.0] and run.logged("advantage/unscorable") == [0.25]


def test_correct_above_says_what_counts_as_right():
    def half(completions, **_):
        return [0.4] * len(completions)

    for threshold, right in ((0.5, 0.0), (0.3, 1.0)):
        run = train(rewards=half, variant="grpo", correct_above=threshold, max_steps=1)
        assert run.logged("advantage/dead_all_right") == [right]


@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo", "vespo"])
def test_effective_sample_size_and_mean_ratio(variant, monkeypatch):
    """Against their definitions, over all tokens of a window: (sum r)^2 / (n sum r^2) and the mean of r."""
    seen, stock = [], grpo_module.evaluate

    def spy(composition, batch, *rest):
        result = stock(composition, batch, *rest)
        seen.append((result.log_ratio.detach().expand_as(batch.mask), batch.mask, result.log_ratio.shape[1] == 1))
        return result

    monkeypatch.setattr(grpo_module, "evaluate", spy)
    run = train(variant=variant)
    assert len(seen) == 12  # two micro-batches of each of the six steps
    for step in range(6):
        ratios = []
        for log_ratio, mask, per_row in seen[2 * step : 2 * step + 2]:
            ratios.append(log_ratio[:, 0] if per_row else log_ratio[mask.bool()])
        r = torch.cat(ratios).exp()
        assert run.logged("ratio/mean")[step] == pytest.approx(float(r.mean()), rel=1e-5)
        ess = float(r.sum() ** 2 / (len(r) * (r**2).sum()))
        assert run.logged("ratio/ess")[step] == pytest.approx(ess, rel=1e-4)
    # on-policy at the first update of a generation, off-policy later
    assert run.logged("ratio/mean")[0] == pytest.approx(1.0, abs=1e-5)
    assert run.logged("ratio/ess")[0] == pytest.approx(1.0, abs=1e-5)
    assert min(run.logged("ratio/ess")) < 0.999
    assert run.logged("grad_norm") == pytest.approx([float(g.norm()) for g in run.gradients], rel=1e-5)


def test_the_completions_table_shows_our_advantages():
    run = train(variant="dr-grpo", max_steps=2)
    table = run.tables[0]
    reward = torch.tensor(digits(table["completion"])).view(-1, 4)
    expected = (reward - reward.mean(1, keepdim=True)).flatten()
    assert torch.allclose(torch.tensor(table["advantages"]), expected, atol=1e-6)
    scaled = train(variant="dapo", max_steps=2).tables[0]  # the same completions under another advantage
    assert scaled["completion"] == table["completion"] and scaled["advantages"] != table["advantages"]


def test_the_completions_table_of_token_advantages_has_one_number_a_row():
    run = train(variant="reinforce-pp", max_steps=2)
    shown = torch.tensor(run.tables[0]["advantages"])
    assert shown.shape == (16,) and bool(torch.isfinite(shown).all()) and shown.std() > 0


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"variant": "grpo"}, ["kl", "terms/kl", "terms/policy", "clip_ratio/low_mean", "entropy"]),
        ({"variant": "cispo"}, ["cispo_clip_ratio"]),
        ({"variant": "vespo"}, ["vespo/phi_seq_mean"]),
        (
            {"variant": "dapo", "hooks": {"weight": [{"off_policy_mask": {"threshold": 0.01}}]}},
            ["weight/off_policy_mask_mean"],
        ),
        (
            {"variant": "dapo", "hooks": {"regularizers": [{"entropy_bonus": {"coef": 0.1}}]}},
            ["terms/entropy_bonus"],
        ),
        (
            {
                "variant": "dapo",
                "hooks": {"regularizers": [{"adaptive_entropy": {"coef": 0.1, "max": 1.0, "step": 0.01}}]},
            },
            ["terms/adaptive_entropy", "entropy_coef"],
        ),
    ],
    ids=str,
)
def test_hooks_log_under_their_names(settings, names):
    run = train(**settings, max_steps=3)
    for name in [*names, "ratio/ess", "ratio/mean", "grad_norm", "loss", "policy_loss"]:
        assert len(run.logged(name)) == 3, f"{name} is logged at {len(run.logged(name))} of 3 steps"
        assert all(math.isfinite(v) for v in run.logged(name))


@pytest.mark.parametrize("variant", ["grpo", "gspo", "vespo", "reinforce-pp"])
def test_the_terms_add_up_to_the_loss(variant):
    run = train(variant=variant, max_steps=4)
    for line in run.logs[:-1]:
        total = sum(v for k, v in line.items() if k.startswith("terms/"))
        assert total == pytest.approx(line["loss"], abs=1e-5)


ENTROPY = [{"entropy_bonus": {"coef": 0.05}}]
SPLIT = {
    "grpo": {"variant": "grpo"},
    "dapo": {"variant": "dapo"},
    "gspo": {"variant": "gspo"},
    "gmpo": {"variant": "gmpo"},
    "cispo": {"variant": "cispo"},
    "sapo": {"variant": "sapo"},
    "vespo": {"variant": "vespo"},
    "reinforce-pp": {"variant": "reinforce-pp"},
    "entropy quantile and bonus": {
        "variant": "dapo",
        "hooks": {"weight": [{"entropy_quantile": {"keep": 0.5}}], "regularizers": ENTROPY},
    },
    "off-policy mask": {"variant": "grpo", "hooks": {"weight": [{"off_policy_mask": {"threshold": 0.01}}]}},
}


def split(rows: int, **settings):
    """A window of eight rows in micro-batches of `rows`; two windows a generation, used twice."""
    count = 8 // rows
    geometry = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": count,
        "steps_per_generation": 2 * count,
    }
    return train(**geometry, **settings, max_steps=6, dtype=torch.float64)


def differing(a, b) -> set[str]:
    """The metrics on which two logs disagree, apart from what a split processes."""
    assert len(a) == len(b)
    names = {n for line in a for n in line if not any(t in n for t in (*TIMES, "plan/"))}
    close = lambda x, y: x is y or (None not in (x, y) and math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-5))  # noqa: E731
    return {n for n in names for x, y in zip(a, b, strict=True) if not close(x.get(n), y.get(n))}


@pytest.mark.parametrize("case", list(SPLIT))
def test_metrics_do_not_depend_on_the_split(case):
    whole, *parts = (split(rows, **SPLIT[case]) for rows in (8, 4, 2))
    for part in parts:
        assert apart(part.change, whole.change) < 1e-5
        assert differing(part.logs, whole.logs) == set()


def test_trls_own_metrics_do_depend_on_the_split():
    """So the test above can fail: the mean over micro-batches is not the mean over the window."""
    assert "entropy" in differing(split(8).logs, split(2).logs)


def test_evaluation_logs_the_same_names():
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 8,
        "num_generations_eval": 4,
    }
    run = train(variant="grpo", trainer_arguments={"eval_dataset": dataset(["a", "22"])}, **settings)
    [first, second] = [line for line in run.logs if "eval_loss" in line]
    for name in (
        "kl",
        "entropy",
        "ratio/ess",
        "ratio/mean",
        "terms/policy",
        "advantage/dead_groups",
        "clip_ratio/low_mean",
    ):
        assert math.isfinite(first[f"eval_{name}"]) and math.isfinite(second[f"eval_{name}"]), name
    plain = train(variant="grpo")
    assert apart(run.change, plain.change) > 0  # evaluation draws random numbers and nothing else:
    assert apart(run.gradients[0], plain.gradients[0]) == 0 and len(run.gradients) == len(plain.gradients)


def test_a_log_line_of_several_steps_is_their_mean():
    each, pairs = train(variant="grpo"), train(variant="grpo", logging_steps=2)
    for name in ("ratio/ess", "kl", "entropy", "loss", "policy_loss"):
        by_two = [sum(each.logged(name)[i : i + 2]) / 2 for i in (0, 2, 4)]
        assert pairs.logged(name) == pytest.approx(by_two, abs=1e-5), name
