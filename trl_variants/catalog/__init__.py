"""The named methods. An entry is data: hooks, paper, side, idea, deviations; one file per family."""

from __future__ import annotations

import importlib
import pkgutil

from ..composition import About, Variant
from ..errors import VariantError, did_you_mean

_CATALOG: dict[str, Variant] = {}


def entry(about: About, **seams) -> Variant:
    """Adds a method to the catalog and returns it. Raises VariantError when the id or an alias is taken."""
    value = Variant(name=about.id, about=about, **seams)
    for label in (about.id, *about.aliases):
        if label in _CATALOG:
            raise VariantError(f"the catalog has an entry named {label!r} already")
    _CATALOG[about.id] = value
    return value


def lookup(name: str) -> Variant:
    """The catalog entry of that id or alias (upper and lower case are the same).

    Raises:
        VariantError: unknown name, with the closest ones; a name several methods share, with the choices.
    """
    wanted = name.strip().lower().replace("_", "-")
    if wanted in _CATALOG:
        return _CATALOG[wanted]
    if by_alias := [v for v in _CATALOG.values() if v.about and wanted in v.about.aliases]:
        return by_alias[0]
    if shared := namesakes(wanted):
        raise VariantError(f"{name!r} is the name of several methods: {', '.join(v.name for v in shared)}; use an id")
    known = [*_CATALOG, *(a for v in _CATALOG.values() if v.about for a in v.about.aliases)]
    raise VariantError(f"unknown variant {name!r}{did_you_mean(wanted, known)}; `trl-variants list` shows them all")


def published(name: str) -> Variant | None:
    """The entry of exactly this id, if there is one."""
    return _CATALOG.get(name)


def namesakes(name: str) -> list[Variant]:
    """The methods whose authors use this name, sorted by id."""
    return sorted((v for v in _CATALOG.values() if v.about and name in v.about.also_called), key=lambda v: v.name)


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

variants: list[Variant] = list(_CATALOG.values())
