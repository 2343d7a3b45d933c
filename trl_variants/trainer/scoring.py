"""From TRL's generation to `Scored`, and from advantages back to TRL's batch."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..composition import Variant
from ..errors import VariantError
from ..records import Scored, column_numbers, weighted_sum
from .window import loss_mask

if TYPE_CHECKING:
    from .grpo import VariantGRPOTrainer


def scoring_needs(variant: Variant) -> frozenset[str]:
    """What rewards, select and advantage hooks, learners, the teacher and hooks with `attachments` need (the loss has
    needs of its own)."""
    seams = ("teacher", "rewards", "select", "advantage", "learners")
    wanted = [h.needs for path, h in variant.hooks() if path.split(".")[0] in seams or hasattr(h, "attachments")]
    return frozenset().union(*wanted)


def build_scored(
    trainer: VariantGRPOTrainer, rows: list[dict], output: dict, matrix: Tensor, ids: list, group_size: int
) -> Scored:
    """The generation of all processes in one record.

    Args:
        rows: this process's data set rows. ids: its completions' token ids, before padding.
        matrix: (N, F) rewards of all processes. group_size: completions per prompt in this mode.
    """
    needs = scoring_needs(trainer.variant)
    device, gather = matrix.device, trainer.gather_rows
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    facts = torch.tensor([[len(i), i[-1] not in ends] for i in ids], dtype=torch.long, device=device)
    facts[trainer.empty_rows, 0] = 0  # a pad token stands for an empty answer
    if output.get("tool_mask") is not None:  # tool output is not the policy's
        facts[:, 0] -= (output["completion_mask"] * (1 - output["tool_mask"])).sum(1)
    facts = gather(facts, 0)
    tokens: dict[str, Tensor] = {}
    if "tokens" in needs:
        tokens["mask"] = gather(loss_mask(output), 0)
        tokens["ids"] = gather(output["completion_ids"].masked_fill(output["completion_mask"] == 0, -1), -1)
        for name, key in (
            ("old_logps", "old_per_token_logps"),
            ("ref_logps", "ref_per_token_logps"),
            ("rollout_logps", "sampling_per_token_logps"),
        ):
            if output.get(key) is not None:
                tokens[name] = gather(output[key], 0)
        if "sum_sq_probs" in needs:
            logps, tokens["sum_sq_probs"] = (gather(x, 0) for x in trainer.logps_and_sum_sq_probs(output))
            tokens.setdefault("old_logps", logps)
        if "entropy" in needs or ("old_logps" in needs and "old_logps" not in tokens):
            with trainer.scoring():  # TRL computes no entropy here, and no log-probs when the update is on-policy
                logps, entropy, _ = trainer.logps_and_entropy(
                    trainer.model,
                    output,
                    batch_size=trainer.args.per_device_train_batch_size,
                )
            tokens.setdefault("old_logps", gather(logps, 0))
            tokens["entropy"] = gather(entropy, 0)
    every = trainer.gather_objects
    keys = {
        name: column_numbers(every(_column(rows, name))).to(device) for name in sorted(wanted_keys(trainer.variant))
    }
    columns = {name: every(_column(rows, name)) for name in sorted(wanted_columns(trainer.variant))}
    texts, embeddings = {}, {}
    if "texts" in needs:
        own = trainer._tokenizer.batch_decode(ids, skip_special_tokens=True)
        texts = {"prompts": every([r.get("prompt") for r in rows]), "completions": every(own)}
        embeddings = trainer.embedding.of(own)
    return Scored(
        rewards=matrix,
        weights=trainer.reward_weights.to(device),
        group=torch.arange(len(matrix), device=device) // group_size,
        correct=matrix[:, 0] > getattr(trainer.args, "correct_above", 0.5) if matrix.shape[1] else None,  # type: ignore[arg-type]
        length=facts[:, 0],
        truncated=facts[:, 1].bool(),
        tokens=tokens,
        keys=keys,
        prompt_key=every([prompt_key(r) for r in rows]) if "prompt_key" in needs else None,
        texts=texts,
        columns=columns,
        embeddings=embeddings,
        run=trainer.run_facts,
        progress=trainer.progress,
        step=trainer.state.global_step,
    )


def wanted_keys(variant: Variant) -> set[str]:
    """Data set columns that some hook groups by."""
    return {key for _, h in variant.hooks() for key in getattr(h, "keys", ())}


def wanted_columns(variant: Variant) -> set[str]:
    """Data set columns whose raw values some hook reads."""
    return {name for _, h in variant.hooks() for name in getattr(h, "columns", ())}


def prompt_key(row: dict) -> str:
    """A stable name of the prompt that survives restarts: its id column, else a hash of the row without images."""
    if row.get("id") is not None:
        return str(row["id"])
    plain = {k: v for k, v in row.items() if k not in ("image", "images")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def dead_groups(scored: Scored) -> dict[str, float]:
    """Shares of groups without any spread in raw reward, split by what their scorable rows got right; and
    unscorable rows."""
    raw = weighted_sum(scored.rewards, scored.weights)
    valid = ~torch.isnan(raw)
    index = torch.unique(scored.group, return_inverse=True)[1]
    size = int(index.max()) + 1
    high = torch.full((size,), -torch.inf, device=raw.device).scatter_reduce(
        0, index[valid], raw[valid].float(), "amax"
    )
    low = torch.full((size,), torch.inf, device=raw.device).scatter_reduce(0, index[valid], raw[valid].float(), "amin")
    correct = scored.correct[valid].float()
    right = (
        torch.full((size,), -1.0, device=raw.device).scatter_reduce(
            0, index[valid], correct, "amin", include_self=False
        )
        > 0
    )
    wrong = (
        torch.full((size,), -1.0, device=raw.device).scatter_reduce(
            0, index[valid], correct, "amax", include_self=False
        )
        == 0
    )
    dead = high - low <= 1e-8  # a group with no scorable row has high - low = -inf
    shares = torch.stack(
        [
            dead.float().mean(),
            (dead & right).float().mean(),
            (dead & wrong).float().mean(),
            (~valid).float().mean(),
        ]
    ).tolist()
    return {
        "advantage/dead_groups": shares[0],
        "advantage/dead_all_right": shares[1],
        "advantage/dead_all_wrong": shares[2],
        "advantage/unscorable": shares[3],
    }


def _column(rows: list[dict], name: str) -> list[Any]:
    if any(name not in row for row in rows):
        raise VariantError(f"a hook reads column {name!r}, and the data set has only {sorted(rows[0])}")
    return [row[name] for row in rows]
