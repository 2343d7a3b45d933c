"""Trajectories from elsewhere in a run: what is given is not sampled, is verified like the rest, and carries its origin
into the loss."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_variants import VariantError, VariantGRPOTrainer, variant
from trl_variants.trainer.traces import Traces

from . import toy
from .forked import run_forked
from .test_invariance import TOLERANCE
from .test_parity import Engine
from .test_resume import kill_and_resume

GROUP = 4
SOLUTIONS = [p[::-1] for p in toy.PROMPTS]
TRACES = {"rollouts": [{"traces": {"column": "solution"}}]}


class Watch:
    """Counts what the engine is asked for, and keeps the rows of every window before any is planned away."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []
        self.batches: list[dict[str, Any]] = []

    def __call__(self, trainer: Any) -> None:
        generate, steps = trainer.model.generate, trainer.buffered_steps

        def counted(*args, **kwargs):
            mask = kwargs["attention_mask"].bool()
            self.asked.append([row[m].tolist() for row, m in zip(kwargs["input_ids"], mask, strict=True)])
            return generate(*args, **kwargs)

        def seen(raw):
            batches = steps(raw)
            self.batches += batches
            return batches

        trainer.model.generate, trainer.buffered_steps = counted, seen

    def joined(self, name: str) -> torch.Tensor:
        """A tensor of every micro-batch, rows side by side."""
        width = max(b["completion_mask"].shape[1] for b in self.batches)
        wide = lambda x: torch.nn.functional.pad(x, (0, width - x.shape[1])) if x.dim() > 1 else x  # noqa: E731
        return torch.cat([wide(b[name]) for b in self.batches])


def train(hooks=TRACES, name="grpo", **changes):
    watch = Watch()
    settings = {"max_steps": 2, "gradient_accumulation_steps": 4, "num_iterations": 1, **changes}
    out = toy.train(VariantGRPOTrainer, variant=name, hooks=hooks, num_generations=GROUP, patch=watch, **settings)
    return out, watch


def text_of(ids: torch.Tensor) -> str:
    return toy.tokenizer().decode(ids, skip_special_tokens=True)


# ---------------------------------------------------------------- whole traces


def test_given_rows_are_not_sampled_and_stand_at_the_end_of_their_group():
    out, watch = train()
    table = out.tables[0]
    assert [len(rows) for rows in watch.asked] == [12, 12], "three of four rows in each of two generations"
    assert table["completion"][3::4] == [p[::-1] for p in table["prompt"][3::4]]
    assert table["prompt"][::4] == table["prompt"][3::4]


def test_no_engine_is_asked_when_every_row_is_given():
    out, watch = train({"rollouts": [{"traces": {"column": "solution", "share": 1.0}}]})
    assert watch.asked == [] and out.logged("traces/rows") == [16.0, 16.0]


def test_a_trace_ends_has_its_origin_and_the_group_s_baseline():
    out, watch = train(name="luffy")
    ids, mask, origin = (watch.joined(n) for n in ("completion_ids", "completion_mask", "origin"))
    traces = (origin[:, 0] == 1).nonzero().squeeze(1)
    assert len(traces) == 8
    for i in traces:
        row = ids[i][mask[i] > 0]
        assert row[-1] == toy.EOS and text_of(row) in SOLUTIONS and bool((origin[i][: len(row)] == 1).all())
    assert not origin[(origin[:, 0] != 1)].any()
    first = out.tables[0]
    rewards = toy.digits(first["completion"])
    for g in range(4):  # no std in LUFFY: A = R - mean of own completions and the trace
        group = rewards[g * 4 : g * 4 + 4]
        wanted = [r - sum(group) / 4 for r in group]
        assert first["advantages"][g * 4 : g * 4 + 4] == pytest.approx(wanted, abs=1e-6)


def test_the_log_reports_wrong_and_truncated_traces():
    data = toy.dataset(solution=["12", "ab", "34", "cd", "0123456789", "56", "78", "90"])
    out, _ = train(data=data, max_steps=2)
    # eight traces, one a prompt: two without a digit, one cut from 11 tokens to max_completion_length 6
    assert sum(out.logged("traces/wrong")) == pytest.approx(2 / 4)
    assert sum(out.logged("traces/truncated")) == pytest.approx(1 / 4)
    assert "012345" in [c for t in out.tables for c in t["completion"]]
    assert len(out.logged("reward/policy")) == len(out.logged("reward/elsewhere")) == 2


def test_a_row_without_a_trace_is_sampled():
    data = toy.dataset(solution=["12", "", None, "34", "", None, "56", ""])
    out, watch = train(data=data)
    assert sum(len(rows) for rows in watch.asked) == 32 - 3
    assert out.logged("traces/rows")[0] + out.logged("traces/rows")[1] == 3


def test_several_traces_are_distinct_in_a_group_and_change_over_the_run():
    several = [["1", "22", "333"]] * 8
    hooks = {"rollouts": [{"traces": {"column": "solution", "per_group": 2}}]}
    out, _ = train(hooks, data=toy.dataset(solution=several), max_steps=8)
    first_choices = set()
    for table in out.tables:
        for g in range(4):
            two = table["completion"][g * 4 + 2 : g * 4 + 4]
            assert len(set(two)) == 2 and set(two) <= set(several[0])
            first_choices.add(two[0])
    assert first_choices == set(several[0])


def test_log_probs_of_a_trace_reach_the_loss_where_they_are_known():
    known = [[-0.5] * (len(s) + 1) for s in SOLUTIONS]
    hooks = {"rollouts": [{"traces": {"column": "solution", "logps": "lps"}}]}
    _, watch = train(hooks, data=toy.dataset(lps=known), max_steps=1)
    reported, origin, mask = (watch.joined(n) for n in ("sampling_per_token_logps", "origin", "completion_mask"))
    theirs = (origin == 1) & (mask > 0)
    assert bool((reported[theirs] == -0.5).all()) and bool(reported[(origin == 0) & (mask > 0)].isnan().all())
    without_end = [[-0.25] * len(s) for s in SOLUTIONS]
    _, watch = train(hooks, data=toy.dataset(lps=without_end), max_steps=1)
    reported, ids = watch.joined("sampling_per_token_logps"), watch.joined("completion_ids")
    theirs = (watch.joined("origin") == 1) & (watch.joined("completion_mask") > 0)
    assert bool(reported[theirs & (ids == toy.EOS)].isnan().all()) and bool(
        (reported[theirs & (ids != toy.EOS)] == -0.25).all()
    )
    with pytest.raises(VariantError, match="log-probs for a trace of"):
        train(hooks, data=toy.dataset(lps=[[-1.0]] * 8, solution=["1234"] * 8), max_steps=1)


def test_a_rollout_function_s_rows_are_replaced_too():
    def rollout(prompts, trainer):
        ids = [toy.tokenizer()("abc").input_ids for _ in prompts]
        masks = [[1, 0, 1] for _ in prompts]
        prompt_ids = [toy.tokenizer()(p).input_ids for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[-1.0] * 3] * len(ids), "env_mask": masks}

    out, watch = train(trainer_arguments={"rollout_func": rollout})
    table = out.tables[0]
    assert table["completion"][0] == "abc" and table["completion"][3::4] == [p[::-1] for p in table["prompt"][3::4]]
    reported, origin = watch.joined("sampling_per_token_logps"), watch.joined("origin")
    assert bool(reported[(origin == 1) & (watch.joined("completion_mask") > 0)].isnan().all()), "not the engine's rows"
    with pytest.raises(VariantError, match="does not continue the given prefixes"):
        train({"rollouts": [{"prefix_splice": {"column": "solution"}}]}, trainer_arguments={"rollout_func": rollout})


def test_the_sampler_s_correction_leaves_traces_alone():
    """With an engine that reports its log-probs, a trace has none of its own and weight 1."""

    def engine(trainer):
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(trainer, 0.3), -1

    watch = Watch()

    def patch(trainer):
        engine(trainer)
        watch(trainer)

    hooks = {**TRACES, "weight": [{"sampler_correction": {"max": 1.01}}]}
    out = toy.train(VariantGRPOTrainer, variant="luffy", hooks=hooks, num_generations=GROUP, patch=patch, max_steps=4)
    reported, origin = watch.joined("sampling_per_token_logps"), watch.joined("origin")
    inside = watch.joined("completion_mask") > 0
    assert bool(reported[(origin == 1) & inside].isnan().all())
    assert float(reported[(origin == 0) & inside].isnan().double().mean()) < 0.1
    assert all(math.isfinite(x) for line in out.logs for k, x in line.items() if k.startswith(("sampling/", "loss")))
    assert float(out.change.norm()) > 0


def test_traces_stay_out_of_evaluation():
    trainer = toy.build(
        variant="luffy", per_device_eval_batch_size=4, trainer_arguments={"eval_dataset": toy.dataset(target=[""] * 8)}
    )
    assert "eval_reward" in trainer.evaluate()


@pytest.mark.parametrize(
    "value, words",
    [({"name": 1}, "must hold text or an assistant message"), ([7], "must hold text or an assistant message")],
)
def test_another_thing_than_a_trace_is_named(value, words):
    with pytest.raises(VariantError, match=words):
        Traces(SimpleNamespace()).texts({"target": value}, "target")


def test_a_missing_column_is_named_and_so_are_tools():
    with pytest.raises(VariantError, match="column 'proof', and the data set has only"):
        train({"rollouts": [{"traces": {"column": "proof"}}]})
    trainer = toy.build(variant="grpo", hooks=TRACES)
    trainer.tools = [len]
    trainer.rollouts.begin([dict(r) for r in toy.dataset()][:4])
    with pytest.raises(VariantError, match="cannot be mixed with tools"):
        trainer.rollouts._given()


# ---------------------------------------------------------------- the policy's format

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def conversational(**columns) -> Any:
    data = toy.dataset(**columns)
    return data.map(lambda r: {"prompt": [{"role": "user", "content": r["prompt"]}]})


def test_a_message_becomes_what_the_policy_would_have_said(monkeypatch):
    monkeypatch.setattr(toy.tokenizer(), "chat_template", TEMPLATE)
    authors = [[{"role": "assistant", "content": f"{i}{i}"}] for i in range(8)]
    out, watch = train({"rollouts": ["traces"]}, data=conversational(target=authors), rewards=of_messages, max_steps=1)
    ids = watch.joined("completion_ids")[watch.joined("origin")[:, 0] == 1]
    said = out.tables[0]["completion"][3::4]
    assert all(m[0]["role"] == "assistant" and m[0]["content"] in [f"{i}{i}" for i in range(8)] for m in said)
    assert all(row[:3].tolist() == toy.tokenizer()(text_of(row)).input_ids + [toy.EOS] for row in ids)


def of_messages(completions, **_):
    return toy.digits([c[0]["content"] for c in completions])


def tokens(text: str, prompt: Any = "p", *, template: str = "", limit: int | None = None) -> tuple[str, list[int]]:
    """The trace's text and ids under a tokenizer of bytes that ends with 0, or with 1 after a turn."""

    class Bytes:
        eos_token_id = 0

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1 if c == "|" else ord(c) for c in text]}

        def apply_chat_template(self, messages, add_generation_prompt=False, **_):
            body = "".join(m["content"] + "|" for m in messages)
            return body + (template if add_generation_prompt else "")

    trainer = SimpleNamespace(
        _tokenizer=Bytes(),
        processing_class=Bytes(),
        chat_template=None,
        chat_template_kwargs={},
        eos_token_ids=[0, 1],
        max_completion_length=limit,
    )
    ids = Traces(trainer).ids({"prompt": prompt}, text)
    return "".join(chr(i) for i in ids if i > 1), ids


def test_the_end_is_the_one_the_policy_writes():
    conversation = [{"role": "user", "content": "q"}]
    assert tokens("ab") == ("ab", [97, 98, 0])
    assert tokens("ab", conversation)[1] == [97, 98, 1], "in a conversation a turn ends as the template says"
    assert tokens("ab|", conversation)[1] == [97, 98, 1], "not twice"
    assert tokens("abc", limit=3)[1] == [97, 98, 99] and tokens("abc", limit=2)[1] == [97, 98]


def test_an_opened_thought_is_not_opened_twice():
    conversation = [{"role": "user", "content": "q"}]
    assert tokens("<think>\nso</think>", "p<think>\n")[0] == "so</think>"
    assert tokens("<think>\nso</think>", conversation, template="a<think>\n")[0] == "so</think>"
    assert tokens("<think>\nso</think>", conversation)[0] == "<think>\nso</think>"


# ---------------------------------------------------------------- prefixes


def splice(**params):
    return {"rollouts": [{"prefix_splice": {"column": "solution", **params}}]}


def test_a_prefix_is_continued_by_the_policy_within_the_budget():
    data = toy.dataset(solution=["0123456789"] * 8)
    out, watch = train(splice(high=0.5, end=0.5), data=data, max_steps=1)
    assert [len(rows) for rows in watch.asked] == [12, 4]
    assert all(text_of(torch.tensor(row)).endswith("01234") for row in watch.asked[1]), "the engine continues ids"
    origin, mask, ids = (watch.joined(n) for n in ("origin", "completion_mask", "completion_ids"))
    hybrid = (origin == 3).any(1)
    assert int(hybrid.sum()) == 4
    for o, m, row in zip(origin[hybrid], mask[hybrid], ids[hybrid], strict=True):
        assert o.tolist()[:6] == [3] * 5 + [0] and m[:6].tolist() == [1] * 6  # in the loss, 5 + 1 = the limit of 6
        assert text_of(row[:5]) == "01234"
    assert all(c.startswith("01234") for c in out.tables[0]["completion"][3::4])
    assert int(mask.sum(1).max()) <= 6


def test_the_prefix_never_fills_the_whole_budget():
    out, watch = train(splice(high=1.0, end=1.0), data=toy.dataset(solution=["0123456789"] * 8), max_steps=1)
    origin = watch.joined("origin")
    assert ((origin == 3).sum(1)).max() == 5 and out.logged("traces/rows") == [4.0]


def test_the_prefix_shrinks_over_the_run():
    data = toy.dataset(solution=["01234567890123456789"] * 8)
    out, watch = train(splice(high=0.95), data=data, max_steps=12, max_completion_length=30, name="prefix-rft")
    lengths = [(b["origin"] == 3).sum(1) for b in watch.batches]
    means = [float(torch.cat(lengths[4 * i : 4 * i + 4]).double().sum()) / 4 for i in range(12)]
    assert means[0] == 19.0 and sum(means[9:]) / 3 < 14, "q = .95 at first, uniform on [low, .95] later"
    assert all(math.isfinite(x) for x in out.logged("loss"))


def test_without_a_demonstration_prefix_rft_samples_everything():
    _, watch = train(splice(), data=toy.dataset(solution=[""] * 8), name="prefix-rft", max_steps=1)
    assert [len(rows) for rows in watch.asked] == [16] and not watch.joined("origin").any()


# ---------------------------------------------------------------- hinted rollouts


class Hints:
    """A policy that is right only when it sees the solution: its answer is then the solution's first character."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.rewarded: list[str] = []

    def __call__(self, trainer: Any) -> None:
        stock = trainer._generate_single_turn

        def generate(prompts, *rest):
            if trainer._first_turn:
                return stock(prompts, *rest)
            self.prompts += [text_of(torch.tensor(p)) for p in prompts]
            answers = [toy.tokenizer()("0" if i % 2 else "jj").input_ids + [toy.EOS] for i in range(len(prompts))]
            return answers, None

        trainer._generate_single_turn = generate

    def reward(self, prompts, completions, **_):
        self.rewarded += completions
        return [float(c == "0" and p in ("a1", "d", "g", "0")) for p, c in zip(prompts, completions, strict=True)]


def hinted(name="hdpo", hooks=None, **changes):
    hints, watch = Hints(), Watch()
    settings = {"gradient_accumulation_steps": 4, "num_iterations": 1, "max_steps": 2, **changes}

    def patch(trainer):
        hints(trainer)
        watch(trainer)

    out = toy.train(VariantGRPOTrainer, variant=name, hooks=hooks, rewards=hints.reward, patch=patch, **settings)
    return out, watch, hints


def test_failed_groups_are_tried_again_with_the_solution_and_right_answers_stay():
    out, watch, hints = hinted()
    origin, mask, advantage = (watch.joined(n) for n in ("origin", "completion_mask", "advantages"))
    kept = origin[:, 0] == 1
    # every group failed: all 32 rows are tried again, every second answer is right on half of the prompts
    assert sum(out.logged("hinted/groups")) == 8 and len(hints.prompts) == 32
    assert int(kept.sum()) == sum(out.logged("hinted/kept")) == 8
    assert all(
        text_of(row[m > 0]) == "0" for row, m in zip(watch.joined("completion_ids")[kept], mask[kept], strict=True)
    )
    assert not advantage.any(), "out of the baseline, in a group without spread"
    assert (
        bool((watch.joined("teacher_mask")[kept] * mask[kept]).any()) and not watch.joined("teacher_mask")[~kept].any()
    )
    assert float(out.change.norm()) > 0 and len(hints.rewarded) == 32 + 32, "each trajectory is rewarded once"


def test_without_its_weight_hdpo_learns_nothing_from_failed_groups():
    term = {**variant("hdpo").to_mapping()["regularizers"][0]["teacher_kl"], "coef": 0.0}
    out, _, _ = hinted(hooks={"regularizers": [{"teacher_kl": term}]})
    assert float(out.change.norm()) == 0.0


def test_a_group_with_a_right_answer_is_left_alone():
    right = lambda prompts, completions, **_: [float(i % 4 == 0) for i in range(len(completions))]  # noqa: E731
    hints = Hints()
    out = toy.train(VariantGRPOTrainer, variant="hdpo", rewards=right, patch=hints, max_steps=2)
    assert hints.prompts == [] and out.logged("hinted/groups") == [0.0]


def test_per_group_limits_the_hinted_rows():
    _, _, hints = hinted(hooks={"rollouts": [{"hinted": {"per_group": 1}}]}, max_steps=1)
    assert len(hints.prompts) == 4


def test_a_missing_solution_is_named():
    with pytest.raises(VariantError, match="hinted reads column 'proof'"):
        hinted(hooks={"rollouts": [{"hinted": {"column": "proof"}}]})


# ---------------------------------------------------------------- processes and resume

CASES = {
    "luffy": {"variant": "luffy", "hooks": {"rollouts": [{"traces": {"column": "several", "per_group": 2}}]}},
    "prefix-rft": {"variant": "prefix-rft", "hooks": {"rollouts": [{"prefix_splice": {"column": "solution"}}]}},
    "hdpo": {"variant": "hdpo", "correct_above": 0.9},
    "gap1": {"variant": "gap1-ta-substitution-endpoint", "hooks": {"rollouts": [{"traces": {"share": 0.5}}]}},
}


def case(name: str) -> dict:
    data = toy.dataset(several=[["1", "22", "3a"]] * 8, solution=["0123456789"] * 8)
    return {**CASES[name], "data": data}


@pytest.mark.parametrize("name", ["luffy", "prefix-rft", "hdpo", pytest.param("gap1", marks=pytest.mark.slow)])
def test_a_killed_run_is_the_run_that_was_not(name):
    kill_and_resume(case(name), at=10)


@pytest.mark.parametrize("name", ["luffy", pytest.param("hdpo", marks=pytest.mark.slow)])
def test_a_killed_run_on_two_processes(name):
    kill_and_resume(case(name), at=10, ranks=2)


def test_two_processes_give_the_same_traces():
    """Twelve rows a process in groups of eight cut the middle group; everything is given, so that runs compare."""

    def run(rank: int, rows: int) -> dict:
        out = toy.train(
            VariantGRPOTrainer,
            variant="gap1-ta-substitution-endpoint",
            hooks={"rollouts": [{"traces": {"column": "several", "share": 1.0}}]},
            data=toy.dataset(several=[["1", "22", "3a"]] * 8),
            num_generations=8,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            max_steps=4,
            dtype=torch.float64,
        )
        return {"gradients": out.gradients, "said": [t["completion"] for t in out.tables]}

    toy.model()
    [alone] = run_forked(lambda r: run(r, 24))
    first, second = run_forked(lambda r: run(r, 12), ranks=2)
    assert first["said"] == second["said"] == alone["said"]
    for a, b in zip(alone["gradients"], first["gradients"], strict=True):
        assert float(a.norm()) > 0 and toy.apart(b, a) < TOLERANCE


def test_a_process_without_rows_of_its_own_to_sample_goes_along():
    """Four rows a process: with share .5 of groups of eight the second process is given all of its rows."""

    def run(rank: int) -> list:
        out = toy.train(
            VariantGRPOTrainer,
            variant="luffy",
            hooks={"rollouts": [{"traces": {"column": "solution", "share": 0.5}}]},
            num_generations=8,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            max_steps=3,
        )
        return [t["completion"] for t in out.tables]

    toy.model()
    first, second = run_forked(run, ranks=2)
    assert first == second and all(said[4:] == [said[4]] * 4 and said[4] in SOLUTIONS for said in first)
