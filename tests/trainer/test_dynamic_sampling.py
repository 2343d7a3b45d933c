"""Dynamic sampling: mixed groups only, refilled from fresh prompts, the same on any number of processes and after a
resume."""

from __future__ import annotations

import zlib

import pytest
import torch

from trl_variants import VariantError, VariantGRPOTrainer

from . import toy
from .forked import run_forked
from .test_invariance import TOLERANCE
from .test_resume import kill_and_resume

GROUP = 4
ALL_RIGHT, ALL_WRONG = ("a1", "77"), ("d", "hij")
ON = {"rollouts": ["dynamic_sampling"]}
OFF: dict = {"rollouts": []}


class Rollout:
    """A completion says its place in the group, so that it is the same however rows are dealt."""

    def __init__(self) -> None:
        self.sampled: list[str] = []

    def __call__(self, prompts: list, trainer) -> dict:
        self.sampled += prompts
        first = trainer.accelerator.process_index * len(prompts)
        ids = [
            toy.tokenizer()(f"{(first + i) % GROUP}{'0' * (i % 2)}").input_ids + [toy.EOS] for i in range(len(prompts))
        ]
        prompt_ids = [toy.tokenizer()(p).input_ids for p in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}


def right(prompts: list[str], completions: list[str], **_) -> list[float]:
    """Some prompts are always right, some never, of the others every second completion."""
    known = {**dict.fromkeys(ALL_RIGHT, 1.0), **dict.fromkeys(ALL_WRONG, 0.0)}
    return [known.get(p, float(int(c[0]) % 2)) for p, c in zip(prompts, completions, strict=True)]


def train(hooks=ON, rewards=right, **changes):
    given = {"trainer_arguments": {"rollout_func": Rollout()}, **changes}
    return toy.train(VariantGRPOTrainer, variant="dapo", hooks=hooks, rewards=rewards, num_generations=GROUP, **given)


def first_group_order(shuffled: bool = True, passes: int = 1) -> list[str]:
    """The data set's prompts in the order of TRL's sampler."""
    generator, out = torch.Generator().manual_seed(toy.settings()["seed"]), []
    for _ in range(passes):
        order = torch.randperm(len(toy.PROMPTS), generator=generator).tolist()
        out += [toy.PROMPTS[i] for i in (order if shuffled else range(len(toy.PROMPTS)))]
    return out


def kept_prompts(out) -> list[list[str]]:
    return [table["prompt"][::GROUP] for table in out.tables[::4]]  # four optimizer steps a generation


# ---------------------------------------------------------------- what is kept, and in which order


def test_only_mixed_groups_are_trained_on_in_the_order_they_are_drawn():
    out = train(max_steps=8)
    order = [p for p in first_group_order(passes=2) if p not in (*ALL_RIGHT, *ALL_WRONG)]
    assert kept_prompts(out) == [order[:4], order[4:8]]
    # four of the first eight prompts are mixed: the second generation begins where the first one ended
    assert out.logged("dynamic/prompts")[0] + 1 > 4 and out.logged("dynamic/prompts")[-1] <= 16
    assert out.logged("dynamic/short") == [0.0, 0.0] and min(out.logged("dynamic/rounds")) >= 2
    assert float(out.change.norm()) > 0


def test_every_prompt_is_drawn_once_a_pass():
    rollout = Rollout()
    out = train(max_steps=8, trainer_arguments={"rollout_func": rollout})
    drawn = int(out.logged("dynamic/prompts")[-1])
    assert rollout.sampled[::GROUP] == first_group_order(passes=2)[:drawn] and len(rollout.sampled) == GROUP * drawn


def test_the_data_set_s_own_order_without_shuffling():
    out = train(max_steps=4, shuffle_dataset=False)
    mixed = [p for p in toy.PROMPTS if p not in (*ALL_RIGHT, *ALL_WRONG)]
    assert kept_prompts(out) == [mixed[:4]]


def test_a_run_without_dropped_groups_is_the_run_without_the_hook():
    """Bit for bit, with the trainer's own sampling."""
    always = lambda completions, **_: [float(i % 2) for i in range(len(completions))]  # noqa: E731
    runs = [toy.train(VariantGRPOTrainer, variant="dapo", hooks=h, rewards=always, max_steps=9) for h in (ON, OFF)]
    assert runs[0].tables == runs[1].tables
    assert torch.equal(runs[0].change, runs[1].change) and float(runs[0].change.norm()) > 0
    assert runs[0].logged("dynamic/kept") == [1.0] * 3


def test_raw_correctness_decides_and_not_the_shaped_reward():
    lengths = lambda completions, **_: [-0.1 * len(c) for c in completions]  # noqa: E731
    plain, shaped = train(max_steps=4), train(rewards=[right, lengths], max_steps=4)
    assert kept_prompts(shaped) == kept_prompts(plain)
    by_reward = train({"rollouts": [{"dynamic_sampling": {"by": "reward"}}]}, rewards=[right, lengths], max_steps=4)
    assert kept_prompts(by_reward) == [first_group_order()[:4]], "lengths differ in every group"


def test_every_trajectory_is_rewarded_once():
    seen: list[int] = []

    def counted(prompts, completions, log_extra, **_):
        seen.append(len(prompts))
        log_extra("said", completions)
        return right(prompts, completions)

    rollout = Rollout()
    out = train(rewards=counted, max_steps=4, trainer_arguments={"rollout_func": rollout}, log_completions=True)
    assert sum(seen) == len(rollout.sampled)
    assert list(out.trainer._logs["extra"]["said"]) == out.tables[0]["completion"], "columns of the kept rows, in order"


def test_traces_and_dynamic_sampling_together():
    hooks = {"rollouts": ["dynamic_sampling", {"traces": {"column": "solution"}}]}
    out = toy.train(VariantGRPOTrainer, variant="dapo", hooks=hooks, max_steps=4)
    table = out.tables[0]
    assert table["completion"][3::4] == [p[::-1] for p in table["prompt"][3::4]]


# ---------------------------------------------------------------- when the batch stays short


def none_mixed(prompts, completions, **_):
    return [0.0] * len(prompts)


def one_mixed(prompts, completions, **_):
    return [float(int(c[0]) % 2) if p == "g" else 1.0 for p, c in zip(prompts, completions, strict=True)]


def test_open_places_stay_out_of_the_loss_and_every_count():
    rounds = {"rollouts": [{"dynamic_sampling": {"max_rounds": 2}}]}
    counted = []

    def patch(trainer):
        plain = trainer.window_batches

        def spy(raw):
            batches = plain(raw)
            counted.append((trainer.window.live_rows, trainer.window.prompts))
            return batches

        trainer.window_batches = spy

    out = train(rounds, one_mixed, max_steps=2, gradient_accumulation_steps=4, patch=patch)
    assert counted[0] == (GROUP, 1) and out.logged("dynamic/short") == [0.75] and out.logged("dynamic/rounds") == [2.0]
    assert float(out.change.norm()) > 0
    assert out.tables[0]["prompt"][:GROUP] == ["g"] * GROUP
    assert not any(out.tables[0]["advantages"][GROUP:])


def test_no_mixed_group_at_all_changes_nothing():
    out = train({"rollouts": [{"dynamic_sampling": {"max_rounds": 3}}]}, none_mixed, max_steps=2)
    assert float(out.change.norm()) == 0.0 and out.logged("dynamic/kept") == [0.0]


def test_a_short_batch_can_be_an_error():
    hooks = {"rollouts": [{"dynamic_sampling": {"max_rounds": 2, "when_short": "error"}}]}
    with pytest.raises(VariantError, match="0 of 4 groups .* after 2 rounds"):
        train(hooks, none_mixed, max_steps=1)


def test_a_stream_is_refused():
    with pytest.raises(VariantError, match="a data set with a length"):
        toy.build(variant="dapo", hooks=ON, data=toy.dataset().to_iterable_dataset())


def test_rows_of_another_round_have_their_tools_and_environments_are_refused():
    def add(a: int, b: int) -> int:
        return a + b

    async def look_up(word: str) -> str:
        return word

    trainer = toy.build(variant="dapo", hooks=ON)
    trainer.tools = trainer._standalone_tools = [add, look_up]
    rows = [dict(row) for row in toy.dataset()][:3]
    assert trainer.staged(rows) == list(toy.PROMPTS[:3])
    assert trainer._sync_tool_dicts == [{"add": add}] * 3 and trainer._async_tool_dicts == [{"look_up": look_up}] * 3
    trainer.environment_factories = {None: object}
    with pytest.raises(VariantError, match="cannot reset environments"):
        type(trainer.rollouts)(trainer)


def test_two_hooks_that_draw_prompts_are_refused():
    with pytest.raises(VariantError, match="both decide which groups stay"):
        toy.build(variant="dapo", hooks={"rollouts": ["dynamic_sampling", {"dynamic_sampling": {"by": "reward"}}]})


def test_evaluation_samples_once():
    rollout = Rollout()
    trainer = toy.build(
        variant="dapo",
        hooks=ON,
        rewards=right,
        per_device_eval_batch_size=4,
        trainer_arguments={"eval_dataset": toy.dataset(), "rollout_func": rollout},
    )
    trainer.evaluate()
    assert len(rollout.sampled) == GROUP * len(toy.PROMPTS)


# ---------------------------------------------------------------- processes and resume


def test_two_processes_train_on_the_same_groups():
    """Twelve rows a process in groups of eight cut the middle group; two processes are one."""

    def run(rank: int, rows: int) -> dict:
        out = toy.train(
            VariantGRPOTrainer,
            variant="dapo",
            hooks=ON,
            rewards=by_hash,
            num_generations=8,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            max_steps=6,
            dtype=torch.float64,
            trainer_arguments={"rollout_func": Hashed()},
        )
        return {
            "gradients": out.gradients,
            "prompts": [t["prompt"][::8] for t in out.tables],
            "drawn": out.logged("dynamic/prompts"),
            "rounds": out.logged("dynamic/rounds"),
        }

    toy.model()
    [alone] = run_forked(lambda r: run(r, 24))
    first, second = run_forked(lambda r: run(r, 12), ranks=2)
    assert first["prompts"] == second["prompts"] == alone["prompts"]
    assert first["drawn"] == second["drawn"] == alone["drawn"] and max(alone["rounds"]) > 1
    for a, b, c in zip(alone["gradients"], first["gradients"], second["gradients"], strict=True):
        assert float(a.norm()) > 0 and toy.apart(b, a) < TOLERANCE and torch.equal(b, c)


class Hashed:
    """Completions that depend on the prompt and the place in the group alone."""

    def __call__(self, prompts: list, trainer) -> dict:
        first = trainer.accelerator.process_index * len(prompts)
        digits = [zlib.crc32(f"{p} {(first + i) % 8}".encode()) % 1000 for i, p in enumerate(prompts)]
        ids = [toy.tokenizer()(str(d)).input_ids + [toy.EOS] for d in digits]
        return {
            "prompt_ids": [toy.tokenizer()(p).input_ids for p in prompts],
            "completion_ids": ids,
            "logprobs": None,
        }


def by_hash(prompts: list[str], completions: list[str], **_) -> list[float]:
    known = {**dict.fromkeys(ALL_RIGHT, 1.0), **dict.fromkeys(ALL_WRONG, 0.0)}
    return [known.get(p, float(int(c) % 2)) for p, c in zip(prompts, completions, strict=True)]


# some groups of the toy's model are all right or all wrong by this measure
FILTERED = {"variant": "dapo", "hooks": ON, "correct_above": 0.6}


def assert_some_were_dropped(whole: dict) -> None:
    assert whole["plain"]["rollouts.0"]["__map__"][0][1] > 4 * 4, "four generations of four groups"


@pytest.mark.parametrize("at", [3, 10])
def test_a_killed_run_draws_the_prompts_the_whole_one_would_have_drawn(at):
    assert_some_were_dropped(kill_and_resume(FILTERED, at=at))


def test_a_killed_run_on_two_processes():
    assert_some_were_dropped(kill_and_resume(FILTERED, at=10, ranks=2))
