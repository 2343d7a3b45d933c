"""A Variant: one hook (or several) for every seam. Lookup, editing, parsing and printing.

variant("dapo")                                     # from the catalog
variant("dapo", clip=PPOClip(eps_high=0.3))         # edit a seam; also clip="sapo" or clip={"ppo": {...}}
a.with_(ratio=b.ratio)                              # combine two
variant({"name": "dapo", "clip": {"ppo": {...}}})   # the same in YAML
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from . import hooks as _hooks  # noqa: F401  (registers the built-in hooks)
from .errors import VariantError, did_you_mean
from .hooks.base import MANY, OPTIONAL, SEAMS, SINGLE, instantiate, is_stateful, seam_name, to_spec

if TYPE_CHECKING:
    from .objective import Loss
    from .records import TokenBatch

KINDS = ("method", "part", "recipe", "note")
SIDES = ("baseline", "trajectory", "reward", "both")


@dataclass(frozen=True)
class About:
    """What a catalog entry says of a method, apart from its hooks."""

    id: str
    title: str
    family: str
    paper: str  # arXiv id, or "" when there is none
    idea: str
    side: str = "reward"
    kind: str = "method"
    year: int | None = None
    deviations: tuple[str, ...] = ()  # where this entry, the paper and public code differ
    ours: tuple[str, ...] = ()  # defaults that no source gives
    aliases: tuple[str, ...] = ()  # other names of this method alone
    also_called: tuple[str, ...] = ()  # names its authors use that other methods bear too; an id wins over them
    host: str = "grpo"  # the plain method it changes: its update must differ from the host's ...
    inert: str = ""  # ... or this says why it does not

    def __post_init__(self):
        if self.kind not in KINDS or self.side not in SIDES:
            raise VariantError(f"entry {self.id!r}: kind is one of {KINDS}, side one of {SIDES}")

    @property
    def paper_url(self) -> str:
        return f"https://arxiv.org/abs/{self.paper}" if self.paper else ""


@dataclass(frozen=True)
class Variant:
    """A choice for every seam; a value. Single seams hold one hook, `teacher` one or None, the others a tuple applied
    in order."""

    name: str
    advantage: Any
    ratio: Any
    clip: Any
    aggregate: Any
    prompts: tuple = ()
    rollouts: tuple = ()
    rewards: tuple = ()
    select: tuple = ()
    credit: tuple = ()
    weight: tuple = ()
    regularizers: tuple = ()
    learners: tuple = ()
    teacher: Any = None
    about: About | None = field(default=None, compare=False)

    def __post_init__(self):
        for seam in SINGLE:
            object.__setattr__(self, seam, instantiate(seam, getattr(self, seam)))
        for seam in OPTIONAL:
            if getattr(self, seam) is not None:
                object.__setattr__(self, seam, instantiate(seam, getattr(self, seam)))
        for seam in MANY:
            spec = getattr(self, seam)
            several = spec if isinstance(spec, (list, tuple)) else () if spec is None else (spec,)
            object.__setattr__(self, seam, tuple(instantiate(seam, s) for s in several))

    def with_(self, **edits: Any) -> Variant:
        """A copy with some seams replaced (hook, hook name or `{name: parameters}`; a list where a seam takes several).

        Raises:
            VariantError: unknown seam, hook or parameter.
        """
        edits = {k if k in ("name", "about") else _field_of(k): v for k, v in edits.items()}
        return replace(self, **edits)

    def hooks(self) -> Iterator[tuple[str, Any]]:
        """Pairs (path, hook) in the order data flows; the path names the hook in checkpoints: "clip", "weight.0"."""
        for seam in SEAMS:
            for i, h in enumerate(self.at(seam)):
                yield (f"{seam}.{i}" if seam in MANY else seam), h

    def at(self, seam: str) -> tuple:
        """The hooks of one seam, in order; empty where there is none."""
        here = getattr(self, seam)
        return here if seam in MANY else () if here is None else (here,)

    @property
    def needs(self) -> frozenset[str]:
        """Everything some hook needs; a trainer computes this and nothing else."""
        return frozenset().union(*(h.needs for _, h in self.hooks()))

    @property
    def scope(self) -> str:
        """ "window" when some row's value depends on other rows through the current policy, else "local"."""
        exact_count = any((w.selects or w.in_denominator) and w.span != "micro-batch" for w in self.weight)
        return "window" if exact_count or any(h.scope == "window" for _, h in self.hooks()) else "local"

    @property
    def silent_at_zero(self) -> bool:
        """Whether a row whose advantage is 0 on every token adds neither value nor gradient to a local loss."""
        acting = (*self.credit, self.clip, self.aggregate, *self.regularizers)
        return all(h.silent_at_zero for h in acting)

    @property
    def whole_groups(self) -> bool:
        """Whether every row of a prompt must be in the same window (whole-group losses)."""
        return any(h.whole_groups for _, h in self.hooks())

    @property
    def stateful(self) -> dict[str, Any]:
        """The hooks with memory, by path."""
        return {path: h for path, h in self.hooks() if is_stateful(h)}

    def to_mapping(self) -> dict[str, Any]:
        """The YAML form, which `variant(...)` reads back to an equal value. Every seam that holds something is
        named."""
        out: dict[str, Any] = {"name": self.name}
        for seam in SEAMS:
            if here := self.at(seam):
                out[seam] = [to_spec(h) for h in here] if seam in MANY else to_spec(here[0])
        return out

    @property
    def changed_seams(self) -> tuple[str, ...]:
        """The seams on which it departs from its host (GRPO for most), in data order; all it fills when it is its
        own."""
        host = variant(self.about.host if self.about else "grpo")
        return tuple(s for s in SEAMS if s in self.to_mapping()) if host.name == self.name else differing(self, host)

    def loss(self, batch: TokenBatch, states: Mapping[str, Any] | None = None) -> Loss:
        """The loss of a whole window (see `TokenBatch.from_tensors`); fills in advantages where none are given.

        Returns:
            `Loss` with `loss` (scalar with gradient), `advantage`, `log_ratio`, `objective`, `clipped`, `terms`,
            `metrics`.
        """
        from .objective import evaluate, with_advantages

        return evaluate(self, with_advantages(self, batch, states), states)

    def describe(self) -> str:
        """Composition, objective in one line, papers, needs, cost and deviations, as text."""
        from .describe import describe

        return describe(self)

    @classmethod
    def from_config(cls, config: Any) -> Variant:
        """TRL's own settings (a GRPOConfig) as a Variant, with TRL's rules: what its trainer computes, step for
        step."""
        from .parity import from_config

        return from_config(config)

    def __str__(self) -> str:
        return self.describe()


def _field_of(seam: str) -> str:
    known = [f.name for f in fields(Variant)]
    try:
        return seam_name(seam)
    except VariantError:
        raise VariantError(
            f"a variant has no seam {seam!r}{did_you_mean(seam, known)}; the seams are {', '.join(SEAMS)}"
        ) from None


def variant(spec: str | Mapping[str, Any] | Variant, **edits: Any) -> Variant:
    """A method by catalog name, from a mapping, or a Variant as it is; `edits` replace seams.

    A mapping is `{"name": base, seam: hook, ...}`; without a catalog name it must fill all four single seams.

    Raises:
        VariantError: unknown name (with the closest ones), seam, hook or parameter.
    """
    if isinstance(spec, Variant):
        return spec.with_(**edits) if edits else spec
    if isinstance(spec, str):
        from .catalog import lookup

        found = lookup(spec)
        return found.with_(**edits) if edits else found
    if not isinstance(spec, Mapping):
        raise VariantError(f"a variant is a catalog name, a mapping or a Variant, got {spec!r}")
    seams = {_field_of(k): v for k, v in {**spec, **edits}.items() if k != "name"}
    name = spec.get("name")
    if set(SINGLE) <= set(seams):
        # a full composition does not inherit: what is not written is empty
        about = _about_of(name)
        return Variant(name=str(name or "custom"), about=about, **seams)
    if name is None:
        missing = [s for s in SINGLE if s not in seams]
        raise VariantError(f"a composition without `name:` must say {', '.join(missing)} too")
    return variant(str(name)).with_(**seams)


def _about_of(name: Any) -> About | None:
    from .catalog import lookup

    try:
        return lookup(str(name)).about
    except VariantError:
        return None


def with_hooks(base: Variant, edits: Mapping[str, Any] | None) -> Variant:
    """Applies the `hooks:` mapping of a recipe (seam -> hook) to a variant.

    Parameters given for the hook the variant already has are merged into it, so `hooks: {clip: {ppo: {eps_high: 0.3}}}`
    changes one number and keeps the others.
    """
    if not edits:
        return base
    if not isinstance(edits, Mapping):
        raise VariantError(f"hooks is a mapping seam -> hook, such as {{clip: sapo}}, got {edits!r}")
    merged = {}
    for seam, spec in edits.items():
        seam = _field_of(seam)
        merged[seam] = spec if seam in MANY else _merge(getattr(base, seam), spec)
    return base.with_(**merged)


def _merge(current: Any, spec: Any) -> Any:
    if current is not None and isinstance(spec, Mapping) and len(spec) == 1:
        [(name, params)] = spec.items()
        if name == current.hook_name and isinstance(params, Mapping):
            kept = {f.name: getattr(current, f.name) for f in fields(current)}
            instantiate(current.seam, {name: dict(params)})  # names unknown parameters before they are merged away
            return {name: {**kept, **params}}
    return spec


def differing(a: Variant, b: Variant) -> tuple[str, ...]:
    """The seams on which two variants differ, in data order."""
    return tuple(seam for seam in SEAMS if getattr(a, seam) != getattr(b, seam))


def diff(a: Variant, b: Variant) -> list[str]:
    """The seams on which two variants differ, one line each; empty when they compute the same."""
    left, right = a.to_mapping(), b.to_mapping()
    return [f"{k}: {left.get(k)!r} -> {right.get(k)!r}" for k in differing(a, b)]
