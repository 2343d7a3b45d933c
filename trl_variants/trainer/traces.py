"""Texts of a data set as completions of the policy: its own format, its own end token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import VariantError

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer

_THINK = "<think>"


class Traces:
    """Bound to a trainer's tokenizer and limits."""

    def __init__(self, trainer: VariantGRPOTrainer):
        self._trainer = trainer

    def texts(self, row: dict[str, Any], column: str) -> list[str]:
        """The row's traces: text, a message, or a list of either; empty where there is none.

        LUFFY's public data has one assistant message in a list, in a column `target`.

        Raises:
            VariantError: no such column, or something else in it.
        """
        if column not in row:
            raise VariantError(
                f"traces are read from column {column!r}, and the data set has only {', '.join(sorted(row))}: "
                "set the hook's `column`"
            )
        value = row[column]
        several = value if isinstance(value, (list, tuple)) else [value]
        return [text for one in several if (text := self._text(one, column))]

    def _text(self, one: Any, column: str) -> str:
        if isinstance(one, (list, tuple)) and len(one) == 1:  # one conversation of one message
            one = one[0]
        if isinstance(one, dict) and isinstance(one.get("content"), str) and not one.get("tool_calls"):
            one = one["content"]
        if one is None or isinstance(one, str):
            return one or ""
        raise VariantError(f"column {column!r} must hold text or an assistant message for each trace, it holds {one!r}")

    def ids(self, row: dict[str, Any], text: str) -> list[int]:
        """Token ids of a completion that says `text` and ends, cut at max_completion_length."""
        body, end = self.body(row, text), self._end(row["prompt"])
        return [*body, *([] if body[-1:] == [end] else [end])][: self._trainer.max_completion_length]

    def body(self, row: dict[str, Any], text: str) -> list[int]:
        """Token ids of `text` without an end, after this row's prompt.

        A `<think>` that the prompt's template has opened already is not opened twice.
        """
        prompt = row["prompt"]
        opening = prompt if isinstance(prompt, str) else self._rendered(prompt, add_generation_prompt=True)
        if opening.rstrip().endswith(_THINK) and text.lstrip().startswith(_THINK):
            text = text.lstrip().removeprefix(_THINK)
            text = text.removeprefix("\n") if opening.endswith("\n") else text
        return list(self._trainer._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _rendered(self, messages: list, **how: Any) -> str:
        trainer = self._trainer
        return trainer.processing_class.apply_chat_template(
            messages, tokenize=False, chat_template=trainer.chat_template, **how, **trainer.chat_template_kwargs
        )

    def _end(self, prompt: Any) -> int:
        """The token the policy ends a completion with: in a conversation, the one its template puts after a turn."""
        trainer = self._trainer
        ends = list(trainer.eos_token_ids)
        if not isinstance(prompt, str):
            turn = self._rendered([*prompt, {"role": "assistant", "content": "x"}])
            after = trainer._tokenizer(turn[turn.rindex("x") + 1 :], add_special_tokens=False)["input_ids"]
            found = next((i for i in after if i in ends), None)
            if found is not None:
                return found
        own = trainer._tokenizer.eos_token_id
        return own if own in ends or not ends else ends[0]
