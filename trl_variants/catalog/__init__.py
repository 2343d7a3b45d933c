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
    shared = [v.name for v in _CATALOG.values() if v.about and wanted in v.about.aliases]
    if len(shared) == 1:
        return _CATALOG[shared[0]]
    if shared:
        raise VariantError(f"{name!r} is the name of several methods: {', '.join(sorted(shared))}")
    aliases = [a for v in _CATALOG.values() if v.about for a in v.about.aliases]
    raise VariantError(
        f"unknown variant {name!r}{did_you_mean(wanted, [*_CATALOG, *aliases])}; `trl-variants list` shows them all"
    )


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

variants: list[Variant] = list(_CATALOG.values())
