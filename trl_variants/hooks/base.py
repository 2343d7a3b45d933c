"""What a hook is, how it is registered, and how its parameters are checked.

A hook is a frozen dataclass: its fields are hyper-parameters, its `__call__` is a pure function of the records it is
given. `@hook(seam, name)` registers a class or a plain function under a name that YAML files can use.

The seams, in the order data flows (signatures in each seam's own module):

    prompts -> rollouts -> rewards -> select -> advantage -> credit -> ratio -> clip -> weight -> aggregate
                                                                                    -> + regularizers -> loss; learners

and, beside the flow, the teacher whose log-probs some of them read.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any

from ..errors import VariantError, did_you_mean
from ..schedule import Schedule

SINGLE = ("advantage", "ratio", "clip", "aggregate")
OPTIONAL = ("teacher",)  # one hook or none
MANY = ("prompts", "rollouts", "rewards", "select", "credit", "weight", "regularizers", "learners")
SEAMS = (
    "prompts",
    "rollouts",
    "teacher",
    "rewards",
    "select",
    "advantage",
    "credit",
    "ratio",
    "clip",
    "weight",
    "aggregate",
    "regularizers",
    "learners",
)
_SINGULAR = {
    "regularizer": "regularizers",
    "learner": "learners",
    "prompt": "prompts",
    "rollout": "rollouts",
    "reward": "rewards",
}

# What a hook may ask the trainer to compute. A name outside this list is a typing mistake.
NEEDS = frozenset(
    {
        "old_logps",
        "ref_logps",
        "teacher_logps",
        "rollout_logps",
        "entropy",
        "sum_sq_probs",
        "values",
        "process_rewards",
        "distribution",
        "tokens",
        "texts",
        "prompt_key",
        "truncated",
        "extra_rollouts",
        "embeddings",
    }
)

_DEFAULTS: dict[str, Any] = {
    "needs": frozenset(),  # what the trainer must compute for it
    "scope": "local",  # "window": a row's value depends on other rows, see objective.py
    "math": "",  # one-line formula, formatted with the fields
    "update_every": "step",  # when a stateful hook's update() runs: "step" or "generation"
    "random": False,  # whether it wants a named torch.Generator as `rng`
    "selects": False,  # weight hooks: the weight is a 0/1 choice of tokens, seen by later hooks as batch.active
    "adds": False,  # credit hooks: gives an advantage to rows that have none
    "drift": False,  # weight hooks: corrects what the policy's own samples drifted, so other origins keep weight 1
    "in_denominator": False,  # weight hooks: the weight also enters the aggregation's token count
    "provides": frozenset(),  # learners: what other hooks read of it, in their `needs` or `reads`
    "reads": frozenset(),  # a learner's numbers per row, found in `scored.keys`
    "whole_groups": False,  # compares rows of a group in the loss: the trainer never cuts a group between windows
    "divergences": (),  # the `Divergence`s read, beside "distribution" in needs
    "encoders": (),  # names of the sentence encoders read, beside "texts" and "embeddings" in needs
    "teacher_rows": None,  # (scored) -> (N,) bool, the rows whose teacher log-probs it reads; None: every row
    "reports_logps": False,  # rollouts hooks: whether trajectories may come with their behaviour's log-probs
    "draws_prompts": False,  # rollouts hooks: keeps some groups and replaces the others by fresh prompts
    "span": "window",  # "micro-batch": the rule depends on the split by definition and says so
    # a row whose advantage is 0 on every token: credit leaves it at 0, clip, aggregate and regularizer give it neither
    # value nor gradient, so that the update need not process it
    "silent_at_zero": False,
}

_REGISTRY: dict[tuple[str, str], type] = {}


def seam_name(seam: str) -> str:
    """Returns the canonical seam name ("regularizer" -> "regularizers"); raises VariantError for an unknown one."""
    seam = _SINGULAR.get(seam, seam)
    if seam not in SEAMS:
        raise VariantError(f"unknown seam {seam!r}{did_you_mean(seam, SEAMS)}; the seams are {', '.join(SEAMS)}")
    return seam


def param(
    default: Any = MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple | None = None,
    ours: bool = False,
) -> Any:
    """A hook field with a checked range: `low <= value <= high`, `value > above`, or one of `choices`.

    `ours=True` marks a default that no source gives.
    """
    meta = {"low": low, "high": high, "above": above, "choices": choices, "ours": ours}
    return field(metadata=meta) if default is MISSING else field(default=default, metadata=meta)


def hook(seam: str, name: str | None = None) -> Callable[[Any], type]:
    """Registers a hook class or function for `seam` under `name` (default: its own name in snake_case).

    A function's leading parameters are the seam's arguments; its keyword parameters with defaults become the hook's
    hyper-parameters. Registering a name twice is an error, except for a notebook cell that is run again.

    Raises:
        VariantError: unknown seam, taken name, or an undeclared need.
    """
    seam = seam_name(seam)

    def register(obj: Any) -> type:
        cls: Any = obj if isinstance(obj, type) else _class_from_function(obj)
        if "__dataclass_fields__" not in vars(cls):
            cls = dataclass(frozen=True)(cls)
        label = name or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        taken = _REGISTRY.get((seam, label))
        if taken is not None and not (taken.__module__ == cls.__module__ == "__main__"):
            raise VariantError(
                f"a {seam} hook named {label!r} exists already ({taken.__module__}.{taken.__qualname__})"
            )
        for attribute, value in _DEFAULTS.items():
            if not hasattr(cls, attribute):
                setattr(cls, attribute, value)
        if "__call__" in vars(cls) and "silent_at_zero" not in vars(cls):  # never inherited by another rule
            cls.silent_at_zero = False
        unknown = set() if isinstance(cls.needs, property) else set(cls.needs) - NEEDS
        if unknown:
            raise VariantError(
                f"hook {label!r} needs {sorted(unknown)}, which no trainer offers; known: {sorted(NEEDS)}"
            )
        cls.seam, cls.hook_name = seam, label
        _check_fields_on_init(cls)
        _REGISTRY[seam, label] = cls
        return cls

    return register


def hook_class(seam: str, name: str) -> type:
    """Looks a registered hook up. Raises VariantError with the closest names of that seam."""
    found = _REGISTRY.get((seam, name))
    if found is None:
        known = hook_names(seam)
        elsewhere = sorted(s for s, n in _REGISTRY if n == name)
        where = f" ({name!r} is a {', '.join(elsewhere)} hook)" if elsewhere else did_you_mean(name, known)
        raise VariantError(f"unknown {seam} hook {name!r}{where}; known: {', '.join(known) or 'none'}")
    return found


def hook_names(seam: str) -> list[str]:
    """Names registered for a seam, sorted."""
    return sorted(n for s, n in _REGISTRY if s == seam)


def is_stateful(h: Any) -> bool:
    """Whether the hook has memory: an `init() -> state` method."""
    return callable(getattr(h, "init", None))


def _class_from_function(function: Callable) -> type:
    parameters = list(inspect.signature(function).parameters.values())
    hyper = [p for p in parameters if p.default is not inspect.Parameter.empty]
    leading = [p for p in parameters if p.default is inspect.Parameter.empty]
    # an annotation written under `from __future__ import annotations` is a string: resolve it or do not check it
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):
        hints = {}
    columns = [(p.name, hints.get(p.name, _kind_of(p.default)), field(default=p.default)) for p in hyper]

    def call(self, *args):
        return function(*args[: len(leading)], **{p.name: getattr(self, p.name) for p in hyper})

    cls = make_dataclass(
        function.__name__, columns, frozen=True, namespace={"__call__": call, "__doc__": function.__doc__}
    )
    cls.__module__, cls.__qualname__ = function.__module__, function.__qualname__
    return cls


def _kind_of(default: Any) -> Any:
    """The type a parameter without an annotation is checked against: that of its default, numbers being numbers."""
    if isinstance(default, bool) or isinstance(default, str):
        return type(default)
    return float if isinstance(default, (int, float)) else Any


def _check_fields_on_init(cls: Any) -> None:
    own = getattr(cls, "__post_init__", None)  # an inherited one too: a subclass keeps its base's checks
    hints = typing.get_type_hints(cls)

    def __post_init__(self):
        for f in fields(self):
            _check_value(self, f, getattr(self, f.name), hints.get(f.name, Any))
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__
    # the generated __init__ calls __post_init__ only if it existed then
    calls_it = "__post_init__" in cls.__init__.__code__.co_names
    cls.__init__ = _checked_init(cls.__init__, None if calls_it else __post_init__)


def _checked_init(init: Callable, check: Callable | None) -> Callable:
    def __init__(self, *args, **kwargs):
        known = [f.name for f in fields(self) if f.init]
        for name in kwargs:
            if name not in known:
                takes = f"it takes {', '.join(known) or 'none'}"
                raise VariantError(f"{self.hook_name} has no parameter {name!r}{did_you_mean(name, known)}; {takes}")
        init(self, *args, **kwargs)
        if check is not None:
            check(self)

    __init__.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return __init__


def _check_value(self: Any, f: Any, value: Any, annotation: Any) -> None:
    label = f"{self.hook_name}.{f.name}"
    if isinstance(value, Schedule):
        for end in (value.start, value.end):
            _check_value(self, f, end, annotation)
        return
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    kinds = typing.get_args(annotation) if union else (annotation,)
    if Any not in kinds and not any(_fits(value, k) for k in kinds):
        wanted = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
        raise VariantError(f"{label} must be {wanted}, got {value!r}")
    if value is None:
        return
    meta = f.metadata
    if meta.get("choices") and value not in meta["choices"]:
        raise VariantError(
            f"{label} must be one of {', '.join(map(repr, meta['choices']))}, got {value!r}"
            f"{did_you_mean(value, map(str, meta['choices']))}"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value:
            raise VariantError(f"{label} is NaN")
        low, high, above = meta.get("low"), meta.get("high"), meta.get("above")
        if (
            (low is not None and value < low)
            or (high is not None and value > high)
            or (above is not None and value <= above)
        ):
            bounds = [
                f">= {low}" if low is not None else "",
                f"> {above}" if above is not None else "",
                f"<= {high}" if high is not None else "",
            ]
            raise VariantError(f"{label} must be {' and '.join(b for b in bounds if b)}, got {value}")


def _fits(value: Any, kind: Any) -> bool:
    if kind is None or kind is type(None):
        return value is None
    origin = typing.get_origin(kind) or kind
    if not isinstance(origin, type):
        return True
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin)


def instantiate(seam: str, spec: Any) -> Any:
    """Turns what a user wrote for one hook into a hook.

    Accepts a hook, a hook class, a registered name, or `{name: parameters}` as YAML gives it.

    Raises:
        VariantError: unknown hook or parameter, missing parameter, wrong type or range, hook of another seam.
    """
    if isinstance(spec, str):
        return _build(hook_class(seam, spec), {})
    if isinstance(spec, dict):
        if len(spec) != 1:
            raise VariantError(f"{seam}: write one hook as {{name: parameters}}, got the keys {sorted(map(str, spec))}")
        [(name, params)] = spec.items()
        return _build(hook_class(seam, name), params or {})
    if isinstance(spec, type) and hasattr(spec, "seam"):
        spec = _build(spec, {})
    if callable(spec) and not hasattr(spec, "seam"):
        raise VariantError(
            f"{seam}: {getattr(spec, '__name__', spec)!r} is not a hook yet; decorate it with @hook({seam!r})"
        )
    if not hasattr(spec, "seam"):
        raise VariantError(f"{seam} takes a hook, a hook's name or {{name: parameters}}, got {spec!r}")
    if spec.seam != seam:
        raise VariantError(f"{spec.hook_name!r} is a {spec.seam} hook and cannot be used as {seam}")
    return spec


def _build(cls: Any, params: dict) -> Any:
    from ..schedule import parse

    if not isinstance(params, dict):
        raise VariantError(f"{cls.hook_name}: parameters are a mapping, got {params!r}")
    known = [f.name for f in fields(cls) if f.init]
    for key in params:
        if key not in known:
            raise VariantError(
                f"{cls.hook_name} has no parameter {key!r}{did_you_mean(key, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
    missing = [
        f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING and f.name not in params
    ]
    if missing:
        raise VariantError(f"{cls.hook_name} needs a value for {', '.join(missing)}")
    return cls(**{k: parse(v) for k, v in params.items()})


def to_spec(h: Any) -> Any:
    """The YAML form of a hook: its name, or `{name: parameters that differ from the default}`."""
    changed = {}
    for f in fields(h):
        value = getattr(h, f.name)
        default = (
            f.default
            if f.default is not MISSING
            else (f.default_factory() if f.default_factory is not MISSING else MISSING)
        )
        if value != default:
            changed[f.name] = _plain(value)
    return {h.hook_name: changed} if changed else h.hook_name


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return {"schedule": {g.name: getattr(value, g.name) for g in fields(value)}}
    if hasattr(value, "hook_name"):  # a hook inside a hook, such as the teacher a privileged context is shown to
        return to_spec(value)
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
