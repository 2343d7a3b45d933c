"""vLLM beside the trainer: adapters are served as adapters, and what the engine runs is compared with the policy."""

from .build import ClosesEngine, own_engine, refuse_unservable

__all__ = ["ClosesEngine", "own_engine", "refuse_unservable"]
