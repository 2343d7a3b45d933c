"""WS-GRPO's prefix preference: a small model of which answer is better, fitted on whole answers, asked about prefixes.

Three phases: `fit_preference` on answers with correctness, freeze (what it returns cannot train), RL with
`PrefixPreferenceReward` beside the outcome's reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import VariantError
from .base import Reward, prompt_texts, texts
from .embeddings import MINILM, Encoder, embed, load_encoder

FORMAT = "trl_variants preference 1"


def steps_of(text: str) -> list[str]:
    """The steps of an answer, its lines with their ends; blank lines belong to the step before them."""
    out: list[str] = []
    for line in text.splitlines(keepends=True):
        if out and not (line.strip() and out[-1].strip()):
            out[-1] += line
        else:
            out.append(line)
    return out if text.strip() else []


def prefixes_of(text: str, split: Callable[[str], list[str]] = steps_of) -> list[str]:
    """tau_0 = "", tau_1, ..., tau_K: the answer up to the end of each step."""
    out = [""]
    for step in split(text):
        out.append(out[-1] + step)
    return out


def _shown(question: str, answer: str) -> str:
    return f"{question}\n\n{answer}"


class Preference:
    """f(a, b) = sigmoid(h(enc(a)) - h(enc(b))): how likely answer a is better than b; h one hidden layer. Frozen.

    `encoder` is kept by name; a function is given again to `load`.
    """

    def __init__(self, score: nn.Module, encoder: str | Encoder, accuracy: float | None = None):
        self.score = score.eval().requires_grad_(False)
        self.name = encoder if isinstance(encoder, str) else getattr(encoder, "__name__", "given")
        self.encode = load_encoder(encoder) if isinstance(encoder, str) else encoder
        self.accuracy = accuracy  # share of held-out pairs in the right order

    @torch.no_grad()
    def heights(self, questions: Sequence[str], answers: Sequence[str]) -> Tensor:
        """(n,) h of each answer to its question."""
        z = embed(self.encode, [_shown(q, a) for q, a in zip(questions, answers, strict=True)])
        return self.score(z.to(next(self.score.parameters()))).squeeze(1)

    def __call__(self, question: str, first: str, second: str) -> float:
        high, low = self.heights([question] * 2, [first, second])
        return float(torch.sigmoid(high - low))

    def save(self, path: str | Path) -> None:
        """Writes the weights and the encoder's name to one safetensors file."""
        about = {"format": FORMAT, "encoder": self.name, "accuracy": json.dumps(self.accuracy)}
        save_file({k: v.contiguous() for k, v in self.score.state_dict().items()}, str(path), metadata=about)

    @classmethod
    def load(cls, path: str | Path, encoder: Encoder | None = None) -> Preference:
        """Reads what `save` wrote; `encoder` where it was fitted with a function that has no registered name."""
        try:
            with safe_open(str(path), "pt") as file:
                about, weights = file.metadata() or {}, {k: file.get_tensor(k) for k in file.keys()}
        except (OSError, SafetensorError) as error:
            raise VariantError(f"cannot read the preference model {path}: {error}") from error
        if about.get("format") != FORMAT:
            raise VariantError(f"{path} holds no preference model: fit one with fit_preference and save it")
        hidden, width = weights["0.weight"].shape
        score = _network(width, hidden).to(weights["0.weight"].dtype)
        score.load_state_dict(weights)
        return cls(score, encoder or about["encoder"], json.loads(about["accuracy"]))


def _network(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def pairs_of(questions: Sequence[str], correct: Sequence[bool]) -> list[tuple[int, int]]:
    """(right, wrong) answers of one question; pairs that are both right or both wrong say nothing and are left out."""
    by_question: dict[str, tuple[list[int], list[int]]] = {}
    for i, (q, c) in enumerate(zip(questions, correct, strict=True)):
        by_question.setdefault(q, ([], []))[0 if c else 1].append(i)
    return [(i, j) for right, wrong in by_question.values() for i in right for j in wrong]


def fit_preference(
    questions: Sequence[str],
    answers: Sequence[str],
    correct: Sequence[bool],
    encoder: str | Encoder = MINILM,
    *,
    hidden: int = 512,
    epochs: int = 200,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    held_out: float = 0.2,
    seed: int = 0,
) -> Preference:
    """Fits h by cross-entropy on every (right, wrong) pair of a question and freezes it. WS-GRPO (2602.17025), phase 1.

    `held_out`: share of the questions that are not fitted but measured (`accuracy`), none where that leaves no pair.
    The global random state is left alone.

    Raises:
        VariantError: no question has both a right and a wrong answer.
    """
    pairs = pairs_of(questions, correct)
    if not pairs:
        raise VariantError("no question has both a right and a wrong answer: sample more answers per question")
    encode = load_encoder(encoder) if isinstance(encoder, str) else encoder
    z = embed(encode, [_shown(q, a) for q, a in zip(questions, answers, strict=True)]).float()
    rng = torch.Generator().manual_seed(seed)
    names = list(dict.fromkeys(questions[i] for i, _ in pairs))
    order = torch.randperm(len(names), generator=rng).tolist()
    apart = {names[k] for k in order[: int(held_out * len(names))]}
    fitted = [p for p in pairs if questions[p[0]] not in apart] or pairs
    measured = [p for p in pairs if questions[p[0]] in apart]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        score = _network(z.shape[1], hidden)
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(score.parameters(), lr=lr, weight_decay=weight_decay)
        right, wrong = (torch.tensor(side) for side in zip(*fitted, strict=True))
        for _ in range(epochs):
            h = score(z).squeeze(1)
            optimizer.zero_grad()
            nn.functional.softplus(h[wrong] - h[right]).mean().backward()  # -log sigmoid(h_right - h_wrong)
            optimizer.step()
    accuracy = None
    if measured:
        with torch.no_grad():
            h = score(z).squeeze(1)
        accuracy = sum(bool(h[i] > h[j]) for i, j in measured) / len(measured)
    return Preference(score, encoder, accuracy)


class PrefixPreferenceReward(Reward):
    """Mean over the steps j of f(tau_j, tau_(j-1)), in [0, 1]: is each longer prefix better than the one before?
    WS-GRPO (2602.17025), phase 2.

    A mean keeps length out of the reward; f(tau_1, "") asks whether the first step is better than none. An answer
    without a step gives 0. The paper's R = lam1 mean + lam2 final is reward_funcs [outcome, this] with reward_weights
    [5, 1].

    Args:
        preference: a `Preference`, or the path of a saved one. split: answer -> steps; default its lines.
    """

    def __init__(self, preference: Preference | str | Path, split: Callable[[str], list[str]] = steps_of):
        super().__init__("prefix_preference_reward")
        self.preference = preference if isinstance(preference, Preference) else Preference.load(preference)
        self.split = split

    def __call__(self, prompts: Any, completions: list[Any], completion_ids: Any = None, **columns: Any) -> list[float]:
        paths = [prefixes_of(t, self.split) for t in texts(completions)]
        asked = [q for q, path in zip(prompt_texts(prompts), paths, strict=True) for _ in path]
        heights = self.preference.heights(asked, [p for path in paths for p in path])
        parts = heights.split([len(path) for path in paths])
        return [float(torch.sigmoid(h[1:] - h[:-1]).mean()) if len(h) > 1 else 0.0 for h in parts]
