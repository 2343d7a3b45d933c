"""Rewards for answers that attempt, check themselves and attempt again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..errors import VariantError
from .base import Reward, column, texts
from .matching import is_answer

CHECK, RETRY = "Wait,", "Let me try again.\n\n"
_MARKER = re.compile(f"{re.escape(CHECK)}|{re.escape(RETRY)}")
_VERDICT = re.compile(r"\b(incorrect|not correct|isn't correct|wrong|correct|right)\b", re.IGNORECASE)


def parts_of(text: str) -> list[tuple[str, str]]:
    """("attempt" or "verification", text) in order; the first part is an attempt, markers belong to no part.

    The same marker twice in a row starts one part.
    """
    found = [("attempt", "")]
    position, last = 0, ""
    for marker in [*_MARKER.finditer(text), None]:
        kind, so_far = found[-1]
        piece = text[position : marker.start() if marker else len(text)]
        found[-1] = (kind, so_far + piece)
        if marker is None:
            break
        repeated = marker[0] == last and not piece.strip()
        if not repeated:
            found.append(("verification" if marker[0] == CHECK else "attempt", ""))
        position, last = marker.end(), marker[0]
    return found


def verdict(text: str) -> bool | None:
    """What a verification says of the attempt, by its last word on it; None when it says nothing."""
    said = _VERDICT.findall(text)
    return said[-1].lower() in ("correct", "right") if said else None


def part_rewards(
    text: str, is_right: Callable[[str], bool], finished: bool = True, scale_check: float = 1.0, scale_turn: float = 1.0
) -> list[float]:
    """One reward a part: attempt +1 right, -1 wrong; verification +1 truthful, -1 not, 0 without a verdict.

    The last part of an unfinished answer gets -1. The author's options: `scale_check` multiplies the verification of
    a right attempt, `scale_turn` an attempt that changes correctness (2 in their code).
    """
    out: list[float] = []
    truth: bool | None = None
    for kind, piece in parts_of(text):
        if kind == "attempt":
            right = is_right(piece)
            changed = truth is not None and right != truth
            out.append((1.0 if right else -1.0) * (scale_turn if changed else 1.0))
            truth = right
        else:
            said = verdict(piece)
            value = 0.0 if said is None else 1.0 if said == truth else -1.0
            out.append(value * (scale_check if truth else 1.0))
    if not finished:
        out[-1] = -1.0
    return out


class SelfVerificationReward(Reward):
    """S2R (2502.12853) 3.2: rewards of the attempts and checks inside one answer, as one number.

    `level` "outcome" is the last attempt's reward (their outcome-level form), "mean" the mean over all parts. Parts
    start at "Wait," (a check) and "Let me try again." (an attempt). With `eos_token_ids` an answer that does not end in
    one of them has -1 on its last part. Gold: column `answer` (or `solution`); `is_right(text, gold)` replaces the
    comparison as mathematics, which needs math-verify.
    """

    def __init__(
        self,
        level: str = "outcome",
        eos_token_ids: Collection[int] = (),
        is_right: Callable[[str, str], bool] = is_answer,
        scale_check: float = 1.0,
        scale_turn: float = 1.0,
    ):
        super().__init__("self_verification_reward")
        if level not in ("outcome", "mean"):
            raise VariantError(f"level is 'outcome' or 'mean', got {level!r}")
        self.level, self.eos_token_ids, self.is_right = level, frozenset(eos_token_ids), is_right
        self.scale_check, self.scale_turn = scale_check, scale_turn

    def __call__(
        self,
        prompts: Any,
        completions: list[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        golds = column(columns, "answer", "solution")
        ids = completion_ids if completion_ids is not None and self.eos_token_ids else [()] * len(golds)
        rows = zip(texts(completions), golds, ids, strict=True)
        return [self.score(text, str(gold), not i or i[-1] in self.eos_token_ids) for text, gold, i in rows]

    def score(self, text: str, gold: str, finished: bool) -> float:
        values = part_rewards(text, lambda t: self.is_right(t, gold), finished, self.scale_check, self.scale_turn)
        if self.level == "mean":
            return sum(values) / len(values)
        attempts = [k for k, (kind, _) in enumerate(parts_of(text)) if kind == "attempt"]
        return values[-1] if not finished else values[attempts[-1]]
