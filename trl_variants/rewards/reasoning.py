"""Rewards for the shape of a reasoning text: format, language, visible reflection."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import VariantError, did_you_mean
from .base import Reward, column, texts
from .matching import is_answer

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_THINK_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)

# first word of a letter's Unicode name, by language
SCRIPTS = {
    "en": {"LATIN"},
    "latin": {"LATIN"},
    "zh": {"CJK"},
    "ja": {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"},
    "ko": {"HANGUL"},
    "ru": {"CYRILLIC"},
    "ar": {"ARABIC"},
    "el": {"GREEK"},
    "he": {"HEBREW"},
    "hi": {"DEVANAGARI"},
    "th": {"THAI"},
}
_WITHOUT_SPACES = {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "THAI"}


def reasoning(text: str) -> str:
    """The <think> parts; without any, what comes before <answer>."""
    parts = _THINK.findall(text)
    return "\n".join(parts) if parts else text.partition("<answer>")[0]


def think_answer_reward(
    prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
) -> list[float | None]:
    """1.0 where the whole completion is <think>...</think>, spaces, <answer>...</answer>; else 0.0.

    DeepSeek-R1-Zero's (2501.12948) and R1-V's format reward. Text after </answer> makes it 0.
    """
    return [float(_THINK_ANSWER.fullmatch(text) is not None) for text in texts(completions)]


def words(text: str) -> list[str]:
    """Runs of letters; in scripts without spaces every letter is a word. Digits and symbols are no words."""
    found: list[str] = []
    run = ""
    for ch in text:
        if ch.isalpha() and _script(ch) not in _WITHOUT_SPACES:
            run += ch
            continue
        if run and not (unicodedata.combining(ch) or ch in "'’"):
            found.append(run)
            run = ""
        if ch.isalpha():
            found.append(ch)
    return [*found, run] if run else found


def _script(ch: str) -> str:
    return unicodedata.name(ch, "").split(" ")[0]


class LanguageConsistencyReward(Reward):
    """Share of the reasoning's words that are in the target language; 0.0 without words.

    DeepSeek-R1 (2501.12948) 2.3.2, added to the other rewards. Languages are told apart by script (two that share
    one are not), or by `is_target(word)`. The target is column `language`, else `language`.
    """

    def __init__(self, language: str = "en", is_target: Callable[[str], bool] | None = None):
        super().__init__("language_consistency_reward")
        self.language, self.is_target = language, is_target
        self._scripts(language)

    def _scripts(self, language: str) -> set[str]:
        if language not in SCRIPTS and self.is_target is None:
            raise VariantError(
                f"no script is known for language {language!r}{did_you_mean(language, SCRIPTS)}: pass is_target="
            )
        return SCRIPTS.get(language, set())

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        languages = columns.get("language") or [self.language] * len(completions)
        return [self.share(text, str(name)) for text, name in zip(texts(completions), languages, strict=True)]

    def share(self, text: str, language: str) -> float:
        scripts = self._scripts(language)
        inside = self.is_target or (lambda word: all(_script(ch) in scripts for ch in word))
        found = words(reasoning(text))
        return sum(map(bool, map(inside, found))) / max(1, len(found))


class ReflectionReward(Reward):
    """`weight` where the reasoning looks back at a first result, and (`gated`) the answer is right; else 0.0.

    For GRPO with a reflection reward (2603.14041), whose measure was not seen: this one is ours. A <reflect> part or
    one of `markers` counts, once, inside the reasoning and after a number or a box. Needs math-verify and column
    `answer` (or `solution`) when gated.
    """

    MARKERS = ("wait", "let me check", "let me verify", "re-verify", "let me double-check")

    def __init__(self, weight: float = 0.2, gated: bool = True, markers: Sequence[str] = MARKERS):
        super().__init__("reflection_reward")
        self.weight, self.gated, self.markers = weight, gated, tuple(markers)
        either = "|".join(map(re.escape, self.markers))
        self._marker = re.compile(rf"<reflect>.+?</reflect>|\b(?:{either})\b", re.DOTALL | re.IGNORECASE)

    def __call__(
        self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        found = texts(completions)
        golds = column(columns, "answer", "solution") if self.gated else [""] * len(found)
        return [
            self.weight if self.reflects(text) and (not self.gated or is_answer(text, str(gold))) else 0.0
            for text, gold in zip(found, golds, strict=True)
        ]

    def reflects(self, text: str) -> bool:
        """Whether a marker follows a candidate result inside the reasoning."""
        thought = reasoning(text)
        result = re.search(r"\d|\\boxed", thought)
        return result is not None and self._marker.search(thought, result.end()) is not None
