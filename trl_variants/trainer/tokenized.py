"""Data sets of old PPO scripts, whose prompts are tokenised already."""

from __future__ import annotations

from typing import Any

from ..errors import VariantError


def with_prompts(data: Any, tokenizer: Any, known: dict[str, list[int]], processes: int | None = None) -> Any:
    """The data set with a column `prompt` where it has only `input_ids`; others, and a dict's, as they are.

    Prompts whose text does not tokenise to the same ids again are entered into `known`, text -> ids.

    Raises:
        VariantError: two prompts differ in their ids and not in their text.
    """
    if isinstance(data, dict):
        return {name: with_prompts(part, tokenizer, known, processes) for name, part in data.items()}
    columns = getattr(data, "column_names", None)
    if not isinstance(columns, list) or "prompt" in columns or "input_ids" not in columns:
        return data
    pad = tokenizer.pad_token_id

    def decoded(row: dict) -> dict:
        kept = row.get("attention_mask") or [int(i != pad) for i in row["input_ids"]]
        ids = [i for i, m in zip(row["input_ids"], kept, strict=True) if m]
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=False), "prompt_tokens": ids}

    data = data.map(
        decoded, num_proc=processes, remove_columns=[c for c in ("input_ids", "attention_mask") if c in columns]
    )
    for prompt, ids in zip(data["prompt"], data["prompt_tokens"], strict=True):
        if tokenizer(prompt)["input_ids"] != ids and known.setdefault(prompt, ids) != ids:
            raise VariantError(
                f"two prompts read {prompt!r} and differ in their token ids; give them as `prompt` instead"
            )
    return data.remove_columns("prompt_tokens")
