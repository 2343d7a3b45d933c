"""Offline, one thread, and none of the libraries' chatter."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def quiet():
    """Progress bars of model loading off, once transformers is there at all."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def offline_encoder():
    """The catalog's sentence encoder is a download: a registered function of its name takes its place."""
    from trl_variants.rewards.embeddings import MINILM, characters, encoder

    encoder(MINILM)(characters)
