from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest

from trl_variants import VariantError, rewards
from trl_variants.errors import MissingExtra
from trl_variants.rewards import (
    ActionReward,
    AnswerMatchReward,
    DomainReward,
    DuringSteps,
    EditSimilarityReward,
    GroundingReward,
    LanguageConsistencyReward,
    PatchSimilarityReward,
    ReflectionReward,
    SelfVerificationReward,
    ThinkingLengthReward,
    accuracy_reward,
    think_answer_reward,
)
from trl_variants.rewards.gui import centre_reward, length_window
from trl_variants.rewards.text import bleu, boxed, canonical, edit_distance, final_answer, formulas, repeats
from trl_variants.rewards.verification import part_rewards, parts_of

FORMATTED = "<think>a</think><answer>3</answer>"


def near(values):
    return pytest.approx(values, abs=6e-5)


def one(function, text, **columns):
    """The reward of one completion; the same as plain text and as messages."""
    given = {k: [v] for k, v in columns.items()}
    plain = function(prompts=["p"], completions=[text], completion_ids=[[1]], **given)
    chat = function(prompts=[[]], completions=[[{"role": "assistant", "content": text}]], completion_ids=[[1]], **given)
    assert plain == chat and len(plain) == 1
    return plain[0]


# ---------------------------------------------------------------- answers


def test_accuracy_is_of_the_text_after_thinking():
    assert one(accuracy_reward, "so $\\frac{2}{4}$", answer="\\frac{1}{2}") == 1.0
    assert one(accuracy_reward, "<think>3</think> $4$", solution="3") == 0.0
    assert one(accuracy_reward, "<think>4</think> $3$", answer="3") == 1.0
    with pytest.raises(VariantError, match="'answer' or 'solution'"):
        one(accuracy_reward, "3")


def test_r1_v():
    # answer 1 + format 1; text behind </answer> costs the format; '3' alone is never 2
    both = lambda text: one(AnswerMatchReward(), text, solution="3") + one(think_answer_reward, text)  # noqa: E731
    assert both(FORMATTED) == 2.0
    assert both(FORMATTED + " so") == 1.0
    assert both("3") == 1.0
    assert both("<think>a\nb</think>\n<answer>4\n</answer>") == 1.0, "the dot matches line breaks"
    assert one(AnswerMatchReward(), "<answer> a red cube </answer>", solution="<answer>a red cube</answer>") == 1.0


def test_missing_math_verify_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtra, match=r"trl_variants\[math\]"):
        one(accuracy_reward, "3", answer="3")
    assert one(think_answer_reward, FORMATTED) == 1.0


def test_math_verify_is_not_imported_before_it_is_needed():
    import subprocess

    code = "import sys, trl_variants.rewards; assert 'math_verify' not in sys.modules and 'trl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_edit_similarity_reads_the_box():
    # kitten -> sitting: 3 edits of 7 characters; four wrong of four
    assert one(EditSimilarityReward(), r"\boxed{kitten}", answer="sitting") == near(0.5714)
    assert one(EditSimilarityReward(), r"\boxed{abcd}", answer="wxyz") == 0.0
    assert one(EditSimilarityReward(), "sitting", answer="sitting") == 0.0, "not in the box"


# ---------------------------------------------------------------- reasoning


def test_language_consistency():
    english, russian = " ".join(["word"] * 18), " ".join(["слово"] * 6)
    text = f"<think>{english} 12 + 3 = {russian}</think> ответ"
    assert one(LanguageConsistencyReward(), text) == 0.75  # 18 of 24; digits and signs are no words
    assert one(LanguageConsistencyReward(), "<think>12 = 12</think>") == 0.0
    assert one(LanguageConsistencyReward("ru"), text) == 0.25
    assert one(LanguageConsistencyReward(), text, language="ru") == 0.25
    assert one(LanguageConsistencyReward("zh"), "<think>我们 so</think>") == near(2 / 3)  # 2 letters of 3 words
    assert one(LanguageConsistencyReward("fr", is_target=lambda w: w == "mot"), "mot word") == 0.5
    with pytest.raises(VariantError, match="'fr'"):
        LanguageConsistencyReward("fr")


def test_reflection_is_counted_once_after_a_result_inside_the_reasoning():
    reward = ReflectionReward(weight=0.2)
    right = "<answer>4</answer>"
    assert one(reward, f"<think>2+2=4. Wait, wait, wait</think>{right}", answer="4") == 0.2
    assert one(reward, f"<think>Wait, 2+2=4</think>{right}", answer="4") == 0.0, "before any result"
    assert one(reward, f"<think>2+2=4</think>Wait {right}", answer="4") == 0.0, "outside the reasoning"
    assert one(reward, "<think>2+2=5. Wait</think><answer>5</answer>", answer="4") == 0.0, "gated on correctness"
    assert one(ReflectionReward(gated=False), "<think>2+2=5. <reflect>sure?</reflect></think>") == 0.2
    assert one(ReflectionReward(weight=0.0), f"<think>4. Wait</think>{right}", answer="4") == 0.0


# ---------------------------------------------------------------- SWE-RL

OLD = "a = 1\nb = 2\nc = 3\n"


def edit(search, replace, path="m.py"):
    return (
        f"<think>x</think>\n<solution>\n### {path}\n<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n"
        "</solution>"
    )


def test_swe_rl():
    reward = PatchSimilarityReward()
    oracle = {"m.py": OLD.replace("b = 2", "b = 2 + 3")}
    score = lambda text, o=oracle, c=None: one(reward, text, code_context=c or {"m.py": OLD}, oracle_new_content=o)  # noqa: E731
    # 42 of 43 + 47 characters match: 2 * 42 / 90 = .9333; comparing the whole files gives .85
    assert score(edit("b = 2", "b = 5")) == near(0.9333)
    two = {"m.py": OLD, "n.py": OLD}
    assert score(edit("b = 2", "b = 5"), oracle | {"n.py": OLD + "d\n"}, two) == near((0.9333 + 0) / 2)
    assert score(edit("b = 2", "b = 2 + 3")) == 1.0
    assert score(edit("b = 7", "b = 2 + 3")) == -1.0, "not in the file, even with the right replacement"
    assert score(edit(" = 2", " = 2 + 3")) == -1.0, "not at the start of a line"
    assert score(edit("b = 2", "b = 2")) == -1.0
    assert score(edit("b = 2", "b = 5", "other.py")) == -1.0
    assert score(edit("b = 2", "b = 5").replace("<think>x", "<think> ")) == -1.0
    assert score(edit("b = 2", "b = 5") + "<solution></solution>") == -1.0
    assert score("<think>x</think><solution>nothing</solution>") == -1.0
    # columns of a data set hold None for the keys of other rows
    assert score(edit("b = 2", "b = 5"), oracle | {"z.py": None}, {"m.py": OLD, "z.py": None}) == near(0.9333)


def test_swe_rl_applies_edits_in_order_and_finds_the_last_line():
    reward = PatchSimilarityReward(max_characters=1000)
    text = edit("b = 2", "b = 5").replace("</solution>", "")
    text += "### m.py\n<<<<<<< SEARCH\nb = 5\n=======\nb = 6\n>>>>>>> REPLACE\n</solution>"
    assert one(reward, text, code_context={"m.py": OLD}, oracle_new_content={"m.py": OLD.replace("2", "6")}) == 1.0
    bare = "a\nb"
    assert one(reward, edit("b", "c"), code_context={"m.py": bare}, oracle_new_content={"m.py": "a\nc"}) == 1.0


# ---------------------------------------------------------------- screens


def act(action, *numbers, think="a"):
    return f"<think>{think}</think><answer>[{{'action': '{action}', 'coordinate': {list(numbers)}}}]</answer>"


def test_ui_r1():
    score = lambda text, **c: one(ActionReward(), text, **{"gt_action": "click", "gt_bbox": [0, 0, 10, 10], **c})  # noqa: E731
    assert score(act("click", 10, 0)) == 3.0
    assert score(act("click", 11, 0)) == 2.0
    assert score(act("scroll", 5, 5)) == 1.0, "no point for the place when the type is wrong"
    assert score("{'action': 'scroll'}", gt_action="scroll") == 2.0, "format bad, no click"
    assert score(act("click", 21, 3), scale=(0.5, 2.0)) == 3.0, "10.5 is cut to 10"
    assert score("nothing") == 0.0


def test_ui_agile_grounding():
    box = [100, 100, 200, 140]
    # half sizes 50 and 20: d = 0, .5, 1 (border), outside, max(.5, .75) = .75; 1 + exp(-4 d^2)
    points = [(150, 120), (175, 120), (200, 140), (201, 120), (175, 135)]
    got = [centre_reward(p, box) for p in points]
    assert got == near([2.0, 1.3679, 1.0183, 0.0, 1.1054])
    euclidean = 1 + 2.718281828 ** (-4 * (0.5**2 + 0.75**2))
    assert euclidean == near(1.0388) and got[4] != near(euclidean)
    score = lambda text, **c: one(GroundingReward(), text, gt_bbox=box, **c)  # noqa: E731
    assert score(act("click", 175, 120)) == near(1.3679)
    assert score(act("click", 100, 100, 150, 140)) == 1.0  # 2 * (2000 / 4000)
    assert score(act("scroll", 0, 0), gt_action="scroll") == 1.0
    assert score(act("scroll", 150, 120)) == 0.0


def test_ui_agile_thinking_length():
    assert [length_window(n) for n in (40, 85, 150, 250, 301)] == near([0, 0.5, 1, 0.5, 0])
    box = [100, 100, 200, 140]
    score = lambda n, end, x=150: one(  # noqa: E731
        ThinkingLengthReward(), act("click", x, 120, think="x" * (n - 1) + end), gt_bbox=box
    )
    assert [score(150, "."), score(150, "x"), score(85, "!"), score(400, "x")] == near([1.0, 0.8, 0.6, 0.0])
    assert score(150, ".", x=300) == 0.0, "only where grounding succeeded"


# ---------------------------------------------------------------- S2R

S2R = "2+2=5 Wait, that is incorrect. Let me try again.\n\n2+2=4 Wait, this is correct"


def holds(text, gold):
    return text.strip().endswith(gold)


def test_s2r_parts_and_their_rewards():
    assert [k for k, _ in parts_of(S2R)] == ["attempt", "verification", "attempt", "verification"]
    is_right = lambda t: holds(t, "=4")  # noqa: E731
    assert part_rewards(S2R, is_right) == [-1, 1, 1, 1]
    assert part_rewards(S2R.replace("incorrect", "correct"), is_right) == [-1, -1, 1, 1], "a false verdict"
    assert part_rewards("5 Wait, hmm", is_right) == [-1, 0], "no verdict"
    assert part_rewards(S2R, is_right, finished=False) == [-1, 1, 1, -1]
    assert part_rewards(S2R, is_right, scale_check=2.0, scale_turn=2.0) == [-1, 1, 2, 2]
    assert [k for k, _ in parts_of("a Wait, Wait, b")] == ["attempt", "verification"], "equal markers merge"


def test_s2r_as_one_number():
    reward = SelfVerificationReward(is_right=holds)
    assert one(reward, S2R, answer="=4") == 1.0
    assert one(reward, "2+2=5 Wait, that is incorrect", answer="=4") == -1.0, "a truthful check of a wrong answer"
    assert one(SelfVerificationReward("mean", is_right=holds), S2R, answer="=4") == 0.5
    cut = SelfVerificationReward(is_right=holds, eos_token_ids=[7])
    assert cut(["p"] * 2, [S2R] * 2, [[1, 7], [1, 2]], answer=["=4"] * 2) == [1.0, -1.0]
    assert one(SelfVerificationReward(), "so $4$ Wait, right. Let me try again.\n\nit is $4$", answer="4") == 1.0
    with pytest.raises(VariantError, match="'process'"):
        SelfVerificationReward("process")


# ---------------------------------------------------------------- domains and phases


def constant(value):
    def score(prompts, completions, completion_ids=None, **columns):
        return [value + c for c in columns.get("bonus", [0.0] * len(completions))]

    return score


def at(step, max_steps=1700):
    return SimpleNamespace(global_step=step, max_steps=max_steps)


def test_a_row_is_scored_by_its_domain():
    route = DomainReward({"math": constant(1.0), "chat": constant(5.0)})
    got = route(["p"] * 3, ["c"] * 3, None, domain=["chat", "math", "chat"], bonus=[0.1, 0.2, 0.3], trainer_state=at(0))
    assert got == [5.1, 1.2, 5.3]
    with pytest.raises(VariantError, match="'code'"):
        route(["p"], ["c"], None, domain=["code"])
    with pytest.raises(VariantError, match="'domain'"):
        route(["p"], ["c"])
    with pytest.raises(VariantError, match="did you mean math"):
        DomainReward({"math": constant(1.0)}, phases=[(3, ["mth"])])


def test_phases_of_qwq():
    route = DomainReward(
        {"math": constant(1.0), "general": constant(5.0)}, phases=[(10, ["math"]), (3, ["math", "general"])]
    )
    score = lambda step: route(["p"] * 2, ["c"] * 2, None, domain=["math", "general"], trainer_state=at(step))  # noqa: E731
    assert score(9) == [1.0, None] and score(10) == [1.0, 5.0] and score(99) == [1.0, 5.0]
    only = DomainReward({"math": constant(1.0), "general": constant(5.0)}, phases=[(10, ["math"])])
    assert only(["p"], ["c"], None, domain=["general"], trainer_state=at(10**6)) == [None], "S2 = 0: verifiers alone"


def test_reward_models_of_deepseek_r1_in_the_last_steps():
    model = DuringSteps(constant(3.0), final=400)
    score = lambda step: model(["p"], ["c"], None, trainer_state=at(step))[0]  # noqa: E731
    assert score(1299) is None and score(1300) == 3.0, "the final 400 of 1700, not the steps after 400"
    early = DuringSteps(constant(3.0), first=2, last=4)
    assert [early.applies(s, 9) for s in (1, 2, 3, 4)] == [False, True, True, False]
    with pytest.raises(VariantError, match="trainer_state"):
        model(["p"], ["c"])


# ---------------------------------------------------------------- text and the package


def test_reading_texts():
    assert boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == r"\frac{1}{2}" and boxed(r"\boxed{1") is None
    assert final_answer(r"<think>1</think> so \boxed{ 2 }") == "2" and final_answer("<think>1</think> so 3") == "so 3"
    assert canonical("  The  Red Cube. ") == "the red cube"
    assert formulas(r"$a b$ \(c\) $$d$$ \[ e \]") == {"ab", "c", "d", "e"}
    assert repeats("a b c a b", 2) and not repeats("a b c a b", 3)
    assert edit_distance("kitten", "sitting") == 3 and edit_distance("", "ab") == 2


def test_bleu():
    weights = (0.5, 0.5)
    # a b c against a b d: 2/3 words, 1/2 pairs: sqrt(1/3); half as long: exp(1 - 2) more; pairs missing: .1/1
    assert bleu("a b c".split(), "a b d".split(), weights) == near((1 / 3) ** 0.5)
    assert bleu("a b".split(), "a b c d".split(), weights) == near(2.718281828**-1)
    assert bleu("a c".split(), "a b".split(), weights) == near((0.5 * 0.1) ** 0.5)
    assert bleu(["x"], ["y"], weights) == 0.0 and bleu([], ["y"], weights) == 0.0


HOLD_A_MODEL = {"YesNoReward", "ProcessRewardModel", "PrefixPreferenceReward"}
NO_REWARDS = {"LocalJudge", "ServerJudge", "Preference", "encoder", "fit_preference"}


@pytest.mark.parametrize("name", sorted(set(rewards.__all__) - HOLD_A_MODEL - NO_REWARDS))
def test_every_reward_has_a_name_and_can_be_pickled(name):
    made = getattr(rewards, name)
    needs = {"DomainReward": ({"math": accuracy_reward},), "DuringSteps": (accuracy_reward,)}
    needs |= {"JudgeScoreReward": (max,), "JudgePreferenceReward": (max,)}
    function = made(*needs.get(name, ())) if isinstance(made, type) else made
    assert function.__name__.endswith("_reward") or name == "DuringSteps"
    assert pickle.loads(pickle.dumps(function)).__name__ == function.__name__


def test_they_run_in_the_trainer():
    from tests.trainer import toy

    data = toy.dataset(domain=["math", "other"] * 4, language=["en"] * 8)
    letters = [
        LanguageConsistencyReward(),
        DomainReward(
            {"math": toy.digits, "other": think_answer_reward}, phases=[(1, ["math"]), (9, ["math", "other"])]
        ),
        DuringSteps(toy.digits, final=2),
    ]
    out = toy.train(variant="grpo", rewards=letters, data=data, max_steps=4)
    assert all(g.isfinite().all() for g in out.gradients) and float(out.gradients[0].norm()) > 0
    assert "rewards/domain_reward/mean" in out.logs[0]
