"""What every reward function here shares: completions as text, and columns by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import VariantError
from .text import completion_text


def texts(completions: Sequence[Any]) -> list[str]:
    """The completions as text, whether TRL passed strings or messages."""
    return [completion_text(c) for c in completions]


def prompt_texts(prompts: Any) -> list[str]:
    """What was asked, as text: TRL passes strings, or messages of any role."""
    every = [[{**m, "role": "assistant"} for m in p] if not isinstance(p, str) else p for p in prompts]
    return texts(every)


def as_message(tokenizer: Any, text: str) -> str:
    """The text as a user's message in the tokenizer's chat template; as it is where there is none."""
    if getattr(tokenizer, "chat_template", None) is None:
        return text
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def column(columns: Mapping[str, Any], *names: str) -> list[Any]:
    """The first of these data set columns that is there, one value a completion.

    Raises:
        VariantError: none is there.
    """
    for name in names:
        if columns.get(name) is not None:
            return list(columns[name])
    raise VariantError(f"the reward reads the data set's column {' or '.join(map(repr, names))}, and there is none")


class Reward:
    """Base of reward functions with settings; `__name__` is what TRL logs them under."""

    def __init__(self, name: str):
        self.__name__ = name


def greedy_continuation(
    model: Any, tokenizer: Any, questions: Sequence[str], max_new_tokens: int, **how: Any
) -> tuple[Any, int]:
    """What `model.generate` returns for n texts, greedily, and how many of its tokens are theirs; `how` goes to it."""
    special = getattr(tokenizer, "chat_template", None) is None  # a template has written its own
    inputs = tokenizer(
        list(questions), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=special
    ).to(model.device)
    said = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **how,
    )
    return said, inputs["input_ids"].shape[1]
