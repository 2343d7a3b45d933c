"""YAML files and `--dotted.key value` words as one nested mapping."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import VariantError
from ..hooks.base import MANY


class _Loader(yaml.SafeLoader):
    """YAML 1.2 where 1.1 surprises: 1e-3 is a number, `no` is a word; a key written twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise VariantError(f"{', '.join(twice)} is written twice, see line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$"
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def read_value(text: str) -> Any:
    """Returns a command-line value as YAML reads it: a number, true, null, {a: 1}, [1, 2], else the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Returns a recipe file as a mapping. Raises VariantError for a missing, broken or non-mapping file."""
    path = Path(path)
    if not path.is_file():
        near = sorted(str(p) for p in (path.parent if path.parent.is_dir() else Path("recipes")).glob("*.yaml"))
        raise VariantError(f"no recipe at {path}" + (f"; there is {', '.join(near)}" if near else ""))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else ""
        raise VariantError(f"{path} is not valid YAML{where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise VariantError(f"{path} must be a YAML mapping of settings, such as `variant: dapo`")
    return content


def split_words(words: list[str]) -> list[tuple[str, list[str]]]:
    """Groups `--key a b --other=c` into [("key", ["a", "b"]), ("other", ["c"])].

    Raises VariantError for a word that belongs to no option.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            groups.append((key, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise VariantError(f"{word!r} is no option: write --key value")
    return groups


def structured(values: list[str]) -> Any:
    """Returns the values of one option as YAML data: none is true, one is itself, several are a list."""
    if not values:
        return True
    return read_value(values[0]) if len(values) == 1 else [read_value(v) for v in values]


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Sets one dotted key inside a nested mapping, in place; `hooks.SEAM.HOOK.PARAMETER` finds its hook.

    Raises VariantError where a key leads into a number or a name that cannot hold it.
    """
    if not all(keys):
        raise VariantError(f"--{'.'.join(keys)} has an empty part between its dots")
    head, *rest = keys
    if not rest:
        tree[head] = value
    elif head == "hooks" and len(rest) > 1:
        hooks = tree[head] = dict(tree.get(head) or {})
        hooks[rest[0]] = _seam_with(hooks.get(rest[0]), rest[0], rest[1:], value)
    else:
        inner = tree.get(head)
        if inner is None:
            inner = {}
        elif isinstance(inner, str) and head in ("task", "variant"):
            inner = {"name": inner}
        elif isinstance(inner, str) and head == "teacher":  # its name, with parameters to come
            inner = {inner: {}}
        elif not isinstance(inner, dict):
            raise VariantError(f"--{'.'.join(keys)}: {head} is {inner!r} and has no {rest[0]!r}")
        tree[head] = dict(inner)
        put(tree[head], rest, value)


def _seam_with(current: Any, seam: str, keys: list[str], value: Any) -> Any:
    """Returns a seam (a name, {name: parameters} or a list of those) with one hook changed or added."""
    name, *rest = keys
    entries: Iterable[Any] = current if isinstance(current, list) else [] if current is None else [current]
    mappings = [{e: {}} if isinstance(e, str) else dict(e) for e in entries]
    found = next((m for m in mappings if name in m), None)
    if found is None:
        found = {name: {}}
        mappings = [*mappings, found] if seam in MANY else [found]
    if rest:
        found[name] = dict(found[name] or {})
        put(found[name], rest, value)
    elif isinstance(value, dict):
        found[name] = value
    elif value is not True:
        raise VariantError(f"--hooks.{seam}.{name} takes no value; write --hooks.{seam}.{name}.PARAMETER {value}")
    return mappings[0] if len(mappings) == 1 else mappings
