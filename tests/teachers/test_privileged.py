"""A teacher that is shown more: the same completion after another prompt, and whose context it is."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.teachers.asked import by_hand, encode, keep_generations, question, teacher_of
from tests.trainer import toy
from tests.trainer.forked import run_forked
from trl_variants import VariantError
from trl_variants.teachers.privileged import PrivilegedTeacher

pytestmark = pytest.mark.usefixtures("one_row_a_line")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TEMPLATE = "{prompt} {context} "
COLUMNS = [{"solution": s} for s in ("1", "77a", None, "")]  # the last two have none


def built(variant="grpo", **parameters):
    return toy.build(variant=variant, teacher={"privileged": {"template": TEMPLATE, **parameters}})


def longer(asked, prompts):
    """The question with other prompts, for `by_hand`."""
    from tests.teachers.asked import padded

    ids, mask = padded([encode(p) for p in prompts], "left")
    asked.batch.update(prompt_ids=ids, prompt_mask=mask)
    return asked


def test_the_same_completion_after_the_longer_prompt():
    trainer = built(of={"model": {"path": toy.model_path("llama")}})
    asked = question(columns=COLUMNS, distribution=True)
    answer = teacher_of(trainer).answer(asked)
    live = asked.batch["completion_mask"] > 0
    assert torch.equal(answer.said[:2] * live[:2], live[:2].float()) and not answer.said[2:].any()
    hand = question(columns=COLUMNS)
    longer(hand, ["a1 1 ", "bc2 77a ", "d", "ef34"])
    logps, whole = by_hand(toy._loaded("llama"), hand)
    torch.testing.assert_close(answer.logps[:2][live[:2]], logps[:2][live[:2]], **CLOSE)
    mine = teacher_of(trainer).head(answer.hidden[:2]).log_softmax(-1)
    torch.testing.assert_close(mine[live[:2]], whole[:2][live[:2]], **CLOSE)
    plain = by_hand(toy._loaded("llama"), asked)[0]
    assert (answer.logps - plain)[:2][live[:2]].abs().max() > 0.01  # the context matters


def test_a_conversation_gets_it_in_its_last_user_message():
    spec = PrivilegedTeacher(template="{prompt}|{context}")
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    shown = spec.prompt(talk, "c")
    assert [m["content"] for m in shown] == ["s", "one", "two", "three|c"]
    assert talk[-1]["content"] == "three"


def test_a_conversation_is_rendered_before_it_is_scored():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy.tokenizer()._tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}j{% endfor %}{% if add_generation_prompt %}h{% endif %}"
    )
    talks = [[{"role": "user", "content": p}] for p in toy.PROMPTS]
    trainer = toy.build(
        variant="grpo",
        data=toy.dataset().remove_columns("prompt").add_column("prompt", talks),
        teacher={"privileged": {"of": {"model": {"path": toy.model_path("llama")}}, "template": TEMPLATE}},
        trainer_arguments={"processing_class": tokenizer},
    )
    asked = question(columns=[{"solution": "9"}] * 4)
    for row in asked.rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    answer = teacher_of(trainer).answer(asked)
    hand = longer(question(), [p + " 9 jh" for p, _ in (("a1", 0), ("bc2", 0), ("d", 0), ("ef34", 0))])
    live = hand.batch["completion_mask"] > 0
    torch.testing.assert_close(answer.logps[live], by_hand(toy._loaded("llama"), hand)[0][live], **CLOSE)


def test_only_rows_with_a_context_are_forwarded():
    trainer = built(of={"model": {"path": toy.model_path("llama")}})
    asked = question(columns=COLUMNS)
    seen = []
    inner = teacher_of(trainer).inner
    handle = inner.model.model.register_forward_pre_hook(
        lambda m, a, k: seen.append(len(k["input_ids"])), with_kwargs=True
    )
    teacher_of(trainer).answer(asked)
    assert sum(seen) == 2
    silent = teacher_of(trainer).answer(question(columns=[{"solution": None}] * 4))
    handle.remove()
    assert sum(seen) == 2 and not silent.said.any()


SIBLINGS = dict(
    rows=[("a1", "11"), ("a1", "22"), ("a1", "33"), ("a1", "44"), ("d", "55"), ("d", "66"), ("g", "77"), ("g", "88")],
    group=[0, 0, 0, 0, 1, 1, 2, 2],
    correct=[False, True, True, False, True, False, False, False],
)


@pytest.mark.parametrize(
    "parameters, expected",
    [
        # group 0 has the right rows 1 and 2, group 1 the right row 4, group 2 none; a right row never sees itself
        ({"siblings": "right", "column": None}, ["22", "33", "22", "22", None, "55", None, None]),
        ({"siblings": "any", "column": None}, ["22", "33", "22", "22", None, "55", "88", "77"]),
        ({"siblings": "right", "column": "solution"}, ["22", "33", "22", "22", "s4", "55", "s6", "s7"]),
        ({"siblings": "none", "column": "solution"}, [f"s{i}" for i in range(8)]),
    ],
)
def test_whose_completion_is_shown(parameters, expected):
    asked = question(columns=[{"solution": f"s{i}"} for i in range(8)], **SIBLINGS)
    assert PrivilegedTeacher(**parameters).contexts(asked, seed=0) == expected


def test_a_random_pick_is_of_the_right_rows_and_the_same_whoever_asks():
    spec = PrivilegedTeacher(siblings="right", column=None, pick="random")
    asked = question(**SIBLINGS)
    whole = [spec.contexts(asked, seed) for seed in range(40)]
    for found in whole:
        assert found[1] == "33" and found[2] == "22" and found[0] in ("22", "33") and found[4] is None
    assert {found[0] for found in whole} == {"22", "33"}  # both are drawn
    for half in (torch.arange(4), torch.arange(4, 8)):  # as two processes would ask
        part = asked.only(half)
        assert spec.contexts(part, 7) == [whole[7][i] for i in half.tolist()]


def test_an_unscorable_sibling_is_no_context():
    asked = question(**SIBLINGS)
    asked.scored.reward[1] = float("nan")
    assert PrivilegedTeacher(siblings="right", column=None).contexts(asked, 0)[0] == "33"


@pytest.mark.parametrize(
    "parameters, why",
    [
        ({"template": "{prompt}"}, r"has no \{context\}"),
        ({"column": None}, "needs a context"),
        ({"of": "nobody"}, "unknown teacher hook 'nobody'"),
    ],
)
def test_wrong_parameters(parameters, why):
    with pytest.raises(VariantError, match=why):
        PrivilegedTeacher(**parameters)


def test_a_missing_column_is_named():
    with pytest.raises(VariantError, match="reads column 'hint', and the data set has only"):
        PrivilegedTeacher(column="hint").contexts(question(columns=COLUMNS), 0)


def test_a_context_that_does_not_fit_is_said():
    trainer = built(of="live")
    with pytest.raises(VariantError, match="the teacher's prompt of .* tokens plus max_completion_length=6 exceeds"):
        teacher_of(trainer).answer(question(columns=[{"solution": "1" * toy.POSITIONS}] * 4))


def _some_rows_on_one_process(rank: int) -> dict:
    """Contexts for the rows of one process alone: the other must not wait for it."""
    seen: list[dict] = []
    prompts = toy.PROMPTS
    toy.train(
        variant="grpo",
        data=toy.dataset(prompts)
        .remove_columns([c for c in toy.dataset().column_names if c == "solution"])
        .add_column("solution", ["5" if p == prompts[0] else None for p in prompts]),
        teacher={"privileged": {"of": "live", "template": TEMPLATE}},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        max_steps=4,
        patch=keep_generations(seen),
    )
    return {"rows": [int((g["teacher_mask"].sum(1) > 0).sum()) for g in seen]}


def test_processes_with_and_without_contexts_do_not_wait_for_each_other():
    first, second = run_forked(_some_rows_on_one_process, ranks=2, timeout=120)
    both = [(a, b) for a, b in zip(first["rows"], second["rows"], strict=True)]
    assert len(both) == 4 and sorted(sum(pair) for pair in both) == [0, 0, 0, 4]
