from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.trainer.toy import model, tokenizer, train
from trl_variants import VariantError
from trl_variants.rewards import YesNoReward

A, B, C = (tokenizer().encode(x)[0] for x in "abc")


class Judge:
    """Says these tokens with these logits of "a" (yes) and "b" (no), whatever it reads."""

    device = torch.device("cpu")

    def __init__(self, said, yes=0.0, no=0.0):
        self.said, self.yes, self.no, self.read = said, yes, no, []

    def generate(self, input_ids, **_):
        self.read += tokenizer().batch_decode(input_ids, skip_special_tokens=True)
        rows, steps = len(input_ids), len(self.said)
        logits = torch.zeros(steps, rows, 30)
        where = next((i for i, t in enumerate(self.said) if t in (A, B)), 0)
        logits[where, :, A], logits[where, :, B] = self.yes, self.no
        new = torch.tensor(self.said).expand(rows, steps)
        return SimpleNamespace(sequences=torch.cat([input_ids, new], 1), logits=tuple(logits))


def reward(judge, **more):
    return YesNoReward(judge, tokenizer(), template="{prompt} {completion}", yes="a", no="b", **more)


def test_the_number_of_the_paper():
    # log p(yes) = -.2, log p(no) = -1.8: 1 / (1 + e^-1.6) = .8320, where the judge first says either word
    judge = Judge([C, A, B], -0.2, -1.8)
    assert reward(judge)(["1", "2", "3"], ["x", "y", "z"]) == pytest.approx([0.8320] * 3, abs=6e-5)
    assert reward(Judge([B], -1.8, -0.2))(["1"], ["x"]) == pytest.approx([0.1680], abs=6e-5)


def test_a_judge_that_says_neither_is_neutral_and_counted():
    f = reward(Judge([C, C]))
    assert f(["1", "2"], ["x", "y"]) == [0.5, 0.5] and f.unanswered == 2


def test_the_judge_reads_prompt_and_completion_in_batches():
    judge = Judge([A])
    f = reward(judge, batch_size=2)
    assert len(f(["1", "22", "3"], ["a{b}", "d", "e"])) == 3
    assert judge.read == ["1 ab", "22 d", "3 e"]  # braces are no characters of the toy


def test_messages_of_every_role_are_read():
    judge = Judge([A])
    prompt = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    reward(judge)([prompt], [[{"role": "assistant", "content": "d"}]])
    assert judge.read == ["12 d"]  # nor are line ends


@pytest.mark.parametrize("yes, no", [("ab", "b"), ("?", "b"), ("a", "a")])
def test_words_must_be_one_token_each(yes, no):
    with pytest.raises(VariantError, match="token"):
        YesNoReward(Judge([A]), tokenizer(), yes=yes, no=no)


def test_it_trains_resonate_with_a_real_judge():
    f = reward(model())
    run = train(variant="resonate", rewards=f, max_steps=2, num_iterations=1)
    assert len(run.gradients) == 2 and all(torch.isfinite(g).all() for g in run.gradients)
