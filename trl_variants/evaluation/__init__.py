"""Accuracy, avg@k and pass@k of a model, with intervals; `EvaluateEvery` measures greedy accuracy during training."""

from __future__ import annotations

from .callback import EvaluateEvery
from .estimators import Estimate, bootstrap, pass_at_k, wilson
from .measure import Problems, evaluate_model

__all__ = ["Estimate", "EvaluateEvery", "Problems", "bootstrap", "evaluate_model", "pass_at_k", "wilson"]
