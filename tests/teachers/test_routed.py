"""Several teachers by a data set column: each asked once, about its own rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from tests.teachers.asked import by_hand, counted, question, teacher_of
from tests.teachers.stub import Stub
from tests.teachers.test_local import PEFT, active_adapter
from tests.trainer import toy
from trl_variants import VariantError, variant
from trl_variants.divergence import Divergence
from trl_variants.hooks.base import to_spec
from trl_variants.teachers.base import Answer, Stateless
from trl_variants.teachers.routed import RoutedTeacher

pytestmark = pytest.mark.usefixtures("one_row_a_line")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
MODEL = {"model": {"path": toy.model_path("llama")}}
TAGS = ["left", "right", "left", "nobody"]


def built(lora: bool = False, **parameters):
    given = {"teachers": {"left": MODEL, "right": "live"}, "column": "subject", **parameters}
    return toy.build(variant="grpo", teacher={"routed": given}, trainer_arguments=PEFT if lora else {})


def asking(tags=TAGS, **changes):
    return question(columns=[{"subject": t} for t in tags], **changes)


def test_each_row_hears_its_own_teacher_and_no_other():
    trainer = built()
    teacher, asked = teacher_of(trainer), asking()
    with counted(teacher.built["left"].model.model) as left:
        answer = teacher.answer(asked)
    assert sum(left) == 2  # its two rows, once
    live = asked.batch["completion_mask"] > 0
    hand = torch.stack([by_hand(m, asked)[0] for m in (toy._loaded("llama"), trainer.model.eval())])
    for row, which in ((0, 0), (1, 1), (2, 0)):
        torch.testing.assert_close(answer.logps[row][live[row]], hand[which, row][live[row]], **CLOSE)
        assert (answer.said[row] == 1).all()
    assert not answer.said[3].any()
    assert (hand[0] - hand[1])[live].abs().max() > 0.1


def test_other_tags_go_to_the_default():
    trainer = built(default="live")
    asked = asking()
    answer = teacher_of(trainer).answer(asked)
    live = asked.batch["completion_mask"] > 0
    hand = by_hand(trainer.model.eval(), asked)[0]
    torch.testing.assert_close(answer.logps[3][live[3]], hand[3][live[3]], **CLOSE)
    assert teacher_of(trainer).built[""] is teacher_of(trainer).built["right"]  # one teacher, held once


def test_nobody_has_a_teacher():
    trainer = built()
    with counted(teacher_of(trainer).built["left"].model.model) as seen:
        answer = teacher_of(trainer).answer(asking(["x"] * 4))
    assert not answer.said.any() and not seen


def test_adapters_of_one_base_share_a_head_and_give_distributions(tmp_path):
    path = active_adapter(tmp_path)
    trainer = built(lora=True, teachers={"left": {"adapter": {"name": "expert", "path": path}}, "right": "base"})
    teacher, asked = teacher_of(trainer), asking(["left", "right", "left", "right"], distribution=True)
    teacher.require((Divergence("rkl"),))
    answer = teacher.answer(asked)
    whole = teacher.head(answer.hidden).log_softmax(-1)
    live = asked.batch["completion_mask"] > 0
    hand = by_hand(toy.model().eval(), asked)[1]
    for row in (1, 3):
        torch.testing.assert_close(whole[row][live[row]], hand[row][live[row]], **CLOSE)
    own = whole.gather(-1, asked.batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(own[live], answer.logps[live], **CLOSE)
    assert (whole[0] - hand[0])[live[0]].abs().max() > 0.1


def test_heads_of_their_own_cannot_give_distributions():
    spec = Divergence("rkl")
    with pytest.raises(VariantError, match="routed teachers left, right have heads of their own: use adapters"):
        teacher_of(built()).require((spec,))
    teacher_of(built()).require(())
    teacher_of(built(teachers={"left": MODEL, "right": MODEL})).require((spec,))  # one and the same


def test_servers_answer_with_the_entries_all_of_them_give():
    with Stub(toy.model("llama").eval(), toy.tokenizer()) as a, Stub(toy.model().eval(), toy.tokenizer()) as b:
        servers = {"left": {"server": {"url": a.url, "top_k": 4}}, "right": {"server": {"url": b.url, "top_k": 2}}}
        teacher = teacher_of(built(teachers=servers))
        teacher.require((Divergence("fkl", top_k=2),))
        with pytest.raises(VariantError, match="its own top 2"):
            teacher.require((Divergence("fkl", top_k=3),))
        asked = asking(distribution=True)
        answer = teacher.answer(asked)
    live = asked.batch["completion_mask"] > 0
    for row, name in ((0, "llama"), (1, "qwen3"), (2, "llama")):
        best = by_hand(toy._loaded(name), asked)[1][row][live[row]].topk(2)
        assert torch.equal(answer.topk[0][row][live[row]], best.indices)
        torch.testing.assert_close(answer.topk[1][row][live[row]], best.values, **CLOSE)


@dataclass
class _Marked(Stateless):
    """Says its own number everywhere."""

    number: float
    asked: list = field(default_factory=list)

    def answer(self, q):
        self.asked.append(q.index.tolist())
        return Answer(torch.full(q.batch["completion_ids"].shape, self.number))


def test_rows_are_put_back_in_their_places():
    trainer = built()
    teacher = teacher_of(trainer)
    one, two = _Marked(1.0), _Marked(2.0)
    teacher.built = {"left": one, "right": two}
    answer = teacher.answer(asking(["right", "left", "nobody", "right"]))
    assert answer.logps[:, 0].tolist() == [2.0, 1.0, 0.0, 2.0] and answer.said[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert one.asked == [[1]] and two.asked == [[0, 3]]


def test_moving_teachers_are_saved_apart():
    trainer = built(teachers={"left": {"ema": {"rate": 0.5}}, "right": {"ema": {"rate": 0.1}}})
    teacher = teacher_of(trainer)
    for p in trainer.model.parameters():
        p.data.add_(1.0)
    teacher.after_step()
    saved = {k: v.clone() for k, v in teacher.state_dict().items()}
    again = teacher_of(built(teachers={"left": {"ema": {"rate": 0.5}}, "right": {"ema": {"rate": 0.1}}}))
    again.load_state_dict(saved)
    for tag, rate in (("left", 0.5), ("right", 0.1)):
        name, value = next(iter(again.built[tag].shadow.items()))
        torch.testing.assert_close(value, dict(toy.model().named_parameters())[name] + rate, **CLOSE)


def test_a_missing_column_and_an_empty_map_are_named():
    with pytest.raises(VariantError, match="reads column 'subject', and the data set has only prompt"):
        teacher_of(built()).answer(question())
    with pytest.raises(VariantError, match="routed.teachers is empty"):
        RoutedTeacher(teachers={})


def test_it_is_a_value_that_yaml_can_hold():
    spec = {"routed": {"teachers": {"left": MODEL, "right": "live"}, "default": {"ema": {"rate": 0.2}}}}
    v = variant("grpo", teacher=spec)
    assert variant(v.to_mapping()) == v
    assert to_spec(v.teacher) == spec
    assert "left: model, right: live" in v.describe()
