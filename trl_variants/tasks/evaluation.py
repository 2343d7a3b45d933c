"""Batched generation for plain and conversational prompts, greedy or sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..rewards.text import completion_text as completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]


def greedy_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[str]:
    """Greedy continuation of each prompt, in order, without special tokens; see `sampled_completions`."""
    found = sampled_completions(
        model,
        tokenizer,
        prompts,
        temperature=0.0,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        chat_template_kwargs=chat_template_kwargs,
        on_batch=on_batch,
    )
    return [texts[0] for texts in found]


def sampled_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[list[str]]:
    """`n` continuations of each prompt, in order, without special tokens.

    Messages go through the tokenizer's chat template, with `chat_template_kwargs` (`enable_thinking`, ...). The
    model's train/eval mode, the tokenizer's padding side and torch's random state are restored.

    Args:
        max_new_tokens: budget of a continuation, tokens.
        temperature: 0 is greedy, and then nothing is drawn.
        seed: of the draws; they also depend on `batch_size`, which is in continuations.
        on_batch: called with the number of continuations after each batch.
    """
    import torch

    chats = not isinstance(prompts[0], str)
    how = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
    texts = [tokenizer.apply_chat_template(p, **how) if chats else p for p in prompts]
    order = [i for i in sorted(range(len(texts)), key=lambda i: len(texts[i])) for _ in range(n)]
    out: list[list[str]] = [[] for _ in texts]
    drawing: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    training, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            for start in range(0, len(order), batch_size):
                chunk = order[start : start + batch_size]
                # a chat template writes its own special tokens
                batch = tokenizer(
                    [texts[i] for i in chunk], return_tensors="pt", padding=True, add_special_tokens=not chats
                )
                batch = {k: batch[k].to(model.device) for k in ("input_ids", "attention_mask")}
                ids = model.generate(
                    **batch,
                    **drawing,
                    max_new_tokens=max_new_tokens,
                    use_cache=True,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
                new = ids[:, batch["input_ids"].shape[1] :]
                for i, text in zip(chunk, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                    out[i].append(text)
                if on_batch is not None:
                    on_batch(len(chunk))
    finally:
        model.train(training)
        tokenizer.padding_side = side
    return out
