"""Modules for Hugging Face `evaluate`, loaded from this folder: `evaluate.load(metric_path("pass_at_k"))`."""

from __future__ import annotations

from pathlib import Path


def metric_path(name: str) -> str:
    """File of a module: greedy_accuracy, avg_at_k or pass_at_k."""
    return str(Path(__file__).parent / f"{name}.py")
