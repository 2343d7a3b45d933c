"""Reading completions: their text, answer, formulas, words; nothing here needs more than the standard library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import exp, log
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def completion_text(completion: Any) -> str:
    """Text of a completion as TRL passes it: a string, or messages (the assistant's contents)."""
    if isinstance(completion, str):
        return completion
    parts = [_content(m.get("content")) for m in completion if m.get("role", "assistant") == "assistant"]
    return "\n".join(parts)


def _content(content: Any) -> str:
    if isinstance(content, list):  # typed parts of a multimodal message
        return "".join(p.get("text") or "" for p in content if isinstance(p, dict))
    return content or ""


def tagged_answer(text: str) -> str | None:
    """Stripped content of the last <answer> part; None without one."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    r"""Content of the last closed \boxed{...}, braces inside balanced; None without one."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None


def final_answer(text: str) -> str:
    r"""The <answer> part, else the last \boxed{...}, else what follows </think>, else the whole text; stripped."""
    for found in (tagged_answer(text), boxed(text)):
        if found is not None:
            return found.strip()
    return text.rpartition("</think>")[2].strip()


def last_number(text: str) -> str | None:
    """Last number in `text`, without thousands separators; None if there is none.

    A minus right after a digit, a letter or a closing bracket is an operator.
    """
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def canonical(answer: str) -> str:
    """One spelling for answers that are the same: case, spaces and closing punctuation removed."""
    return re.sub(r"\s+", " ", answer).strip().strip(".,;:!?").strip().casefold()


def formulas(text: str) -> frozenset[str]:
    r"""The formulas between $, $$, \( \) or \[ \], without spaces."""
    found = ("".join(groups) for groups in _FORMULA.findall(text))
    return frozenset(re.sub(r"\s+", "", f) for f in found if f.strip())


def repeats(text: str, n: int = 20) -> bool:
    """Whether some run of n words occurs twice."""
    words = text.split()
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(runs)) < len(runs)


def edit_distance(a: Sequence, b: Sequence) -> int:
    """Levenshtein distance between two sequences (characters, or words)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def bleu(candidate: Sequence[str], reference: Sequence[str], weights: Sequence[float]) -> float:
    """Sentence BLEU with brevity penalty; an order without a match counts 0.1 matches (NLTK's method 1).

    0 when no word is shared. `weights` of the 1-, 2-, ... gram precisions enter as they are, whatever their sum.
    """
    if not candidate or not set(candidate) & set(reference):
        return 0.0
    total = 0.0
    for n, weight in enumerate(weights, 1):
        grams, wanted = _grams(candidate, n), _grams(reference, n)
        matches = sum(min(count, wanted[g]) for g, count in grams.items())
        total += weight * log((matches or 0.1) / max(1, sum(grams.values())))
    shorter = min(0.0, 1.0 - len(reference) / len(candidate))
    return exp(total + shorter)


def _grams(words: Sequence[str], n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
