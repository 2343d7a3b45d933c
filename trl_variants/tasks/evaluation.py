"""Batched greedy generation for plain and conversational prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..rewards.text import completion_text as completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]


def greedy_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Greedy continuation of each prompt, in order, without special tokens.

    Messages go through the tokenizer's chat template, with `chat_template_kwargs` (`enable_thinking`, ...). The
    model's train/eval mode and the tokenizer's padding side are restored.
    """
    import torch

    chats = not isinstance(prompts[0], str)
    how = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
    texts = [tokenizer.apply_chat_template(p, **how) if chats else p for p in prompts]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    out = [""] * len(texts)
    training, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    try:
        for start in range(0, len(order), batch_size):
            chunk = order[start : start + batch_size]
            # a chat template writes its own special tokens
            batch = tokenizer(
                [texts[i] for i in chunk], return_tensors="pt", padding=True, add_special_tokens=not chats
            )
            batch = {k: batch[k].to(model.device) for k in ("input_ids", "attention_mask")}
            with torch.no_grad():
                ids = model.generate(
                    **batch,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    use_cache=True,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
            new = ids[:, batch["input_ids"].shape[1] :]
            for i, text in zip(chunk, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                out[i] = text
    finally:
        model.train(training)
        tokenizer.padding_side = side
    return out
