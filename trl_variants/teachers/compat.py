"""Whether a teacher reads the policy's tokens as the policy does; found out before anything is generated.

Refused: texts that encode differently, a token under another id. Corrected: end tokens and other tokens the teacher
does not know (it is silent there), embeddings padded to another size (divergences use the common entries). Said:
another chat template. Padding tokens do not matter: they are never attended to. Temperature: a local teacher divides
its logits by the run's; a server cannot, see server.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..errors import VariantError

PROBES = (
    "The answer is 42.\n\nSo x^2 = 3.14159 and 1234567 + 89 = 1234656",
    "def f(x):\n\treturn x ** 2  # tabs,   spaces",
    "Ünïcödé 東京 🙂 \\boxed{\\frac{1}{3}}",
    "0123456789 abcdefghij",
)
CONVERSATION = [{"role": "user", "content": "1 + 1?"}]


@dataclass(frozen=True)
class Fit:
    """What is left between a policy and a teacher that share their tokens.

    Args:
        silent: token ids at which the teacher has nothing to say.
        vocabulary: token ids from here on do not exist for it; None: unknown, or none.
        notes: one line for each thing that is corrected or could not be looked at.
    """

    silent: frozenset[int] = frozenset()
    vocabulary: int | None = None
    notes: tuple[str, ...] = ()


def compare(
    policy: Any, teacher: Any, name: str, *, policy_ends: Collection[int], teacher_ends: Collection[int] = ()
) -> Fit:
    """How a teacher's tokenizer fits the policy's.

    Args:
        teacher: its tokenizer; None where it has none, and then only the ends are looked at.
        policy_ends, teacher_ends: token ids that end an answer; none given for the teacher: not compared.

    Raises:
        VariantError: they do not share their tokens.
    """
    silent: set[int] = set()
    notes = []
    if teacher is None:
        notes.append("it has no tokenizer files, so its tokens were not compared with the policy's")
    else:
        same_tokens(policy, name, lambda text: teacher.encode(text, add_special_tokens=False))
        strangers = _strangers(policy, teacher, name)
        if strangers:
            silent |= set(strangers.values())
            notes.append(
                f"{len(strangers)} tokens of the policy, such as {next(iter(strangers))!r}, are not its own: it says "
                "nothing about them"
            )
        notes += _templates(policy, teacher)
    ends = set(policy_ends) - set(teacher_ends) - silent if teacher_ends else set()
    if ends:
        silent |= ends
        notes.append(
            f"the policy ends with {_shown(policy, ends)} and it with {_shown(policy, teacher_ends)}: it says nothing "
            "about the policy's end tokens, which it would call all but impossible"
        )
    elif not teacher_ends:
        notes.append("it does not say which tokens end its answers, so they were not compared")
    return Fit(frozenset(silent), None, tuple(notes))


def same_tokens(policy: Any, name: str, encode: Callable[[str], list[int]]) -> None:
    """Raises VariantError unless the probes encode as with the policy's tokenizer."""
    for text in PROBES:
        own, others = policy.encode(text, add_special_tokens=False), list(encode(text))
        if own != others:
            raise VariantError(
                f"teacher {name} reads {text!r} as the tokens {_few(others)} and the policy as {_few(own)}: a teacher "
                "must have the policy's tokenizer, name one of its family"
            )


def _strangers(policy: Any, teacher: Any, name: str) -> dict[str, int]:
    """Tokens of the policy that the teacher has not."""
    own, others = policy.get_vocab(), teacher.get_vocab()
    moved = [token for token, i in own.items() if token in others and others[token] != i]
    if moved:
        token = moved[0]
        raise VariantError(
            f"token {token!r} is {own[token]} for the policy and {others[token]} for teacher {name} ({len(moved)} "
            "tokens differ): a teacher must have the policy's tokenizer, name one of its family"
        )
    return {token: i for token, i in own.items() if token not in others}


def _templates(policy: Any, teacher: Any) -> list[str]:
    if not getattr(policy, "chat_template", None):
        return []
    if not getattr(teacher, "chat_template", None):
        return ["it has no chat template: conversations reach it in the policy's"]
    # dates and the like in a template are the same on both sides
    shown = [t.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False) for t in (policy, teacher)]
    if shown[0] == shown[1]:
        return []
    return [
        "its chat template differs: conversations reach it in the policy's, or in its own with `template: own`",
    ]


def tokenizer_at(path: str | None) -> Any:
    """The tokenizer of a folder or Hub name; None where there is none."""
    if not path:
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def ends_of(path: str | None, tokenizer: Any = None, model: Any = None) -> set[int]:
    """Token ids that end an answer, from the tokenizer, the generation configuration and the model's."""
    configurations = [getattr(model, "generation_config", None), getattr(model, "config", None)]
    if model is None and path and (os.path.isdir(path) or tokenizer is not None):
        try:
            from transformers import GenerationConfig

            configurations.append(GenerationConfig.from_pretrained(path))
        except (OSError, ValueError):
            pass
    found = [getattr(c, "eos_token_id", None) for c in (*configurations, tokenizer)]
    return {int(i) for ids in found if ids is not None for i in (ids if isinstance(ids, (list, tuple)) else [ids])}


def announce(name: str, notes: Collection[str], speaks: bool = True) -> None:
    """One warning for a teacher, on the process that speaks."""
    if notes and speaks:
        warnings.warn(f"teacher {name}: " + "; ".join(notes), stacklevel=2)


def _few(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else str(ids[:8])[:-1] + ", ...]"


def _shown(tokenizer: Any, ids: Collection[int]) -> str:
    return ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in sorted(ids))
