"""A language model's yes or no as a reward."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import VariantError
from .base import Reward, as_message, greedy_continuation, prompt_texts, texts

TEMPLATE = "{prompt}\n\nAnswer: {completion}\n\nIs this answer good? Reply with Yes or No only."


class YesNoReward(Reward):
    """sigmoid(log p(yes) - log p(no)) of a judge, where it first says either word. Resonate (2603.11661).

    The judge continues the text greedily for at most `max_new_tokens` tokens. One that says neither word gives
    `neutral`; such completions are counted in `unanswered`.

    Args:
        model, tokenizer: a causal language model; its chat template is used where it has one.
        template: what the judge reads, with {prompt} and {completion}.
        yes, no: the words, each one token of this tokenizer (case matters).

    Raises:
        VariantError: a word that is not one token, or both are the same token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        template: str = TEMPLATE,
        yes: str = "Yes",
        no: str = "No",
        max_new_tokens: int = 4,
        neutral: float = 0.5,
        batch_size: int = 8,
    ):
        super().__init__("yes_no")
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.max_new_tokens, self.neutral, self.batch_size = max_new_tokens, neutral, batch_size
        self.unanswered = 0
        self.yes, self.no = self._token(yes), self._token(no)
        if self.yes == self.no:
            raise VariantError(f"{yes!r} and {no!r} are the same token of the judge")

    def _token(self, word: str) -> int:
        ids = self.tokenizer.encode(word, add_special_tokens=False)
        if len(ids) != 1 or self.tokenizer.decode(ids).strip() != word.strip():
            raise VariantError(f"{word!r} is {len(ids)} tokens of the judge, or unknown to it; name a word that is one")
        return ids[0]

    def _question(self, prompt: str, completion: str) -> str:
        # replaced, not formatted: answers may hold braces
        text = self.template.replace("{prompt}", prompt).replace("{completion}", completion)
        return as_message(self.tokenizer, text)

    @torch.no_grad()
    def __call__(self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
        questions = [self._question(p, c) for p, c in zip(prompt_texts(prompts), texts(completions), strict=True)]
        out: list[float] = []
        for i in range(0, len(questions), self.batch_size):
            out += self._judge(questions[i : i + self.batch_size])
        return out

    def _judge(self, questions: list[str]) -> list[float]:
        how = {"return_dict_in_generate": True, "output_logits": True}
        said, width = greedy_continuation(self.model, self.tokenizer, questions, self.max_new_tokens, **how)
        new = said.sequences[:, width:]
        logits = torch.stack(said.logits, 1).float()  # (rows, tokens, vocabulary)
        either = (new == self.yes) | (new == self.no)
        out = []
        for row, places in enumerate(either):
            if not places.any():
                self.unanswered += 1
                out.append(self.neutral)
                continue
            at = logits[row, int(places.nonzero()[0])]
            out.append(float(torch.sigmoid(at[self.yes] - at[self.no])))
        return out
