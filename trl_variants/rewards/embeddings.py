"""Sentence embeddings by name: a registered function, or a sentence-transformers model."""

from __future__ import annotations

import functools
import importlib.util
import re
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import MissingExtra, VariantError, did_you_mean

Encoder = Callable[[list[str]], Tensor]  # n texts -> (n, d), any scale

MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # 22 M parameters, d = 384
CHARACTER_DIMENSIONS = 512
_REGISTERED: dict[str, Encoder] = {}


def encoder(name: str) -> Callable[[Encoder], Encoder]:
    """Registers a function from n texts to an (n, d) tensor (or array) under a name that hooks and YAML files use.

    A registered name wins over a model of that name. Raises VariantError for a taken name; a notebook cell may be run
    again.
    """

    def register(function: Encoder) -> Encoder:
        taken = _REGISTERED.get(name)
        modules = {getattr(f, "__module__", None) for f in (taken, function)}
        if taken is not None and modules != {"__main__"}:
            raise VariantError(f"an encoder named {name!r} exists already: choose another name")
        _REGISTERED[name] = function
        return function

    return register


@encoder("characters")
def characters(texts: list[str]) -> Tensor:
    """(n, 512) counts of runs of one to three characters, hashed: likeness of spelling, not of meaning. No model."""
    out = torch.zeros(len(texts), CHARACTER_DIMENSIONS, dtype=torch.float64)
    for i, text in enumerate(texts):
        clean = re.sub(r"\s+", " ", text).strip().casefold()
        for n in (1, 2, 3):
            for k in range(len(clean) - n + 1):
                out[i, zlib.crc32(clean[k : k + n].encode()) % CHARACTER_DIMENSIONS] += 1.0
    return out


def available(name: str) -> bool:
    """Whether a registered encoder has that name, or the package that loads models is there."""
    return name in _REGISTERED or importlib.util.find_spec("sentence_transformers") is not None


def load_encoder(name: str, device: str | None = None) -> Encoder:
    """The encoder of that name: registered, else a sentence-transformers model (Hub id or folder), loaded once.

    Raises:
        MissingExtra: sentence-transformers is not installed.
        VariantError: neither an encoder nor a model of that name is to be had.
    """
    return _REGISTERED[name] if name in _REGISTERED else _sentence_model(name, device)


@functools.cache
def _sentence_model(name: str, device: str | None) -> Encoder:
    hint = did_you_mean(name, _REGISTERED)
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        if error.name != "sentence_transformers":  # it is there, and something it needs is not
            raise VariantError(f"the sentence encoder {name!r} cannot be loaded: {error}") from error
        raise MissingExtra(f"the sentence encoder {name!r}{hint}", "embeddings") from None
    try:
        model = SentenceTransformer(name, device=device)
    except (OSError, ValueError, RuntimeError) as error:
        raise VariantError(
            f"cannot load the sentence encoder {name!r}{hint}: no folder and the Hub gave nothing "
            f"({type(error).__name__}); name another, `characters`, or register one with @encoder({name!r})"
        ) from error

    def encode(texts: list[str]) -> Tensor:
        return model.encode(texts, convert_to_tensor=True, show_progress_bar=False)

    return encode


def embed(encode: Encoder | str, texts: Sequence[str], device: str | None = None) -> Tensor:
    """(n, d) on the CPU, rows of length 1 (0 where the encoder gives 0). Each distinct text is encoded once.

    Raises:
        VariantError: the encoder returned another number of rows, or a number that is not finite.
    """
    encode = load_encoder(encode, device) if isinstance(encode, str) else encode
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        return torch.zeros(0, 0)
    z = torch.as_tensor(encode(distinct)).detach().cpu()
    z = z if z.dtype == torch.float64 else z.float()
    label = getattr(encode, "__name__", repr(encode))
    if z.dim() != 2 or len(z) != len(distinct):
        raise VariantError(
            f"encoder {label} must return ({len(distinct)}, d) for that many texts, got {tuple(z.shape)}"
        )
    if not bool(torch.isfinite(z).all()):
        raise VariantError(f"encoder {label} returned a number that is not finite")
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1e-12)
    place = {text: i for i, text in enumerate(distinct)}
    return z[[place[text] for text in texts]]


def cosines(a: Tensor, b: Tensor | None = None) -> Tensor:
    """(n, m) cosines of unit rows; of rows among themselves without `b`, the diagonal then exactly 1."""
    if b is None:
        return (a @ a.T).fill_diagonal_(1.0)
    return a @ b.T
