"""Columns with a teacher's answers, for methods that train on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 500


def with_traces(
    rows: Dataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    max_new_tokens: int,
    seed: int = 0,
) -> Dataset:
    """`rows` with columns `target`, `count` answers sampled from `model` at temperature 1, and `target_logps`.

    Args:
        rows: data set with plain text prompts.
        model, tokenizer: the teacher's.
        count: answers of each row, right or wrong.
        max_new_tokens: longest answer, in tokens.
        seed: of the draws; global random state is left as it is.

    Returns:
        `target`: list of texts; `target_logps`: for each, the log-prob of every token and, where it ended by itself, of
        its end token (nats, under `model`).
    """
    import torch

    texts: list[list[str]] = []
    logps: list[list[list[float]]] = []
    prompts = list(rows["prompt"])
    training, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            for start in range(0, len(prompts), BATCH):
                batch = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True).to(model.device)
                out = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=max_new_tokens,
                    num_return_sequences=count,
                    output_logits=True,
                    return_dict_in_generate=True,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
                new = out.sequences[:, batch["input_ids"].shape[1] :]
                said = torch.stack(out.logits, 1).float().log_softmax(-1)
                chosen = said.gather(-1, new.unsqueeze(-1)).squeeze(-1)
                ended = (new == tokenizer.eos_token_id).long()
                length = ((ended.cumsum(1) - ended) == 0).sum(1).tolist()  # the first end token counts
                answers = tokenizer.batch_decode(new, skip_special_tokens=True)
                values = [row[:n] for row, n in zip(chosen.tolist(), length, strict=True)]
                texts += [answers[i : i + count] for i in range(0, len(answers), count)]
                logps += [values[i : i + count] for i in range(0, len(values), count)]
    finally:
        model.train(training)
        tokenizer.padding_side = side
    return rows.add_column("target", texts).add_column("target_logps", logps)
