"""Reads one YAML recipe per experiment into strict, typed dataclasses (`private_rlhf.recipe`).

Unknown or ill-typed keys are errors that name the key, the section and the nearest valid key. Overrides from the
command line (`reward.epochs=3`) go through the same check.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib.metadata
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from private_rlhf.core import documents
from private_rlhf.core.errors import UserError, printable
from private_rlhf.core.world import device_type
from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", use_enum_values=True, allow_inf_nan=False)
"""A number is finite unless its own field says that .inf switches something off."""

NO_EFFECT = "no effect on results"
"""Marks a key of a recipe, as Annotated[…, NO_EFFECT]: it changes what is shown or logged, and nothing that is learnt
or measured. No stage runs again for it."""
IF_SET = "no effect while it is null"
"""Marks a key in the same way: runs of before it was added do not run again for its default."""


def all_overrides(data: str | None, overrides: Sequence[str] | None, accept_reward: bool = False) -> list[str]:
    """The options --data and --accept-reward as overrides, then `overrides`. A path is quoted: YAML would cut it."""
    quoted = yaml.safe_dump(data, default_style='"', width=1 << 20).strip()
    extra = [] if data is None else [f"data.preferences={quoted}"]
    return [*extra, *(["reward.accept_coin=true"] if accept_reward else []), *(overrides or [])]


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `tree` with each `section.key=value` applied; values are read as YAML."""
    result = copy.deepcopy(tree)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise UserError(f"override '{override}' is not of the form section.key=value")
        try:
            value = documents.parse_yaml(text)
        except documents.DocumentError as error:
            raise UserError(f"override '{override}': the value {error}; quote it") from None
        *sections, key = dotted.split(".")
        node = result
        for section in sections:
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
            if not isinstance(node, dict):
                raise UserError(f"override '{override}': '{section}' is a value, not a section")
        node[key] = value
    return result


def parse(schema: type[T], tree: Mapping[str, Any], where: str) -> T:
    """`tree` as an instance of the (nested) pydantic dataclass `schema`.

    UserError names the source (`where`), the first wrong key, and the nearest valid key or the rule for its value.
    """
    keys = list(_keys(schema, tree))
    for path, _, hint, valid in keys:
        if hint is None:
            raise UserError(f"{where}: unknown key '{'.'.join(path)}'{nearest(path[-1], valid)}")
    for path, value, hint, _ in keys:  # as a number true would be read as 1
        if isinstance(value, bool) and bool not in (hint, *typing.get_args(hint)):
            rule = f"{where}: {'.'.join(path)} must be a number or a text, got {str(value).lower()}"
            raise UserError(f"{rule}: put a word in quotes, as YAML reads on, off, yes and no as true or false")
    try:
        return TypeAdapter(schema).validate_python(dict(tree))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "recipe"
        if first["type"] == "missing":
            raise UserError(f"{where}: key '{key}' is required and has no default: add it") from None
        message = first["msg"].removeprefix("Value error, ")
        suffix = "" if isinstance(first["input"], dict) else f" (given {first['input']!r})"
        suffix += ": put it in quotes" * (first["type"] == "string_type" and isinstance(first["input"], int | float))
        raise UserError(f"{where}: {key}: {message}{suffix}") from None


def nearest(key: str, valid: Sequence[str]) -> str:
    """'; did you mean …?' for a misspelt key, or the list of valid keys."""
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid keys here: {', '.join(sorted(valid))}"


def load_recipe(schema: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The recipe in the YAML file `path`, or the shipped one of that name, with command-line `overrides` applied. Sizes
    that neither states are those of its `effort` (`sizes_of`).

    UserError: neither the file nor a shipped recipe exists; see also `parse`.
    """
    file = path if path.suffix or path.exists() else shipped_recipe(str(path))
    tree = apply_overrides(documents.read_mapping(file), overrides)
    return parse(schema, merge(sizes_of(tree), tree), str(file))


def sizes_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that efforts.yaml gives to the recipe `tree` on this device; none without an effort that it knows."""
    if tree.get("effort") is None:  # as in saved recipes; the device is not looked for, which takes seconds
        return {}
    efforts = documents.read_mapping(Path(__file__).with_name("efforts.yaml"))
    sizes = efforts["cpu" if device_type() == "cpu" else "gpu"].get(str(tree["effort"]), {})
    for section, keys in sizes.items():
        if isinstance(stated := tree.get(section), Mapping) and "max_steps" in stated:  # these go through all rows
            sizes[section] = {key: size for key, size in keys.items() if not key.startswith("max_")}
    return sizes


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees, section by section; where both state a key, `over` wins."""
    nested = {key: merge(value, over[key]) for key, value in under.items()
              if isinstance(value, Mapping) and isinstance(over.get(key), Mapping)}  # fmt: skip
    return {**under, **over, **nested}


def shipped_recipe(name: str) -> Path:
    """The file of a recipe that comes with the program: in configs/ of a checkout, or installed beside it."""
    folder = Path(__file__).resolve().parents[2] / "configs"
    paths = list(folder.glob("*.yaml"))
    if not paths:
        files = importlib.metadata.files("private-rlhf") or []
        paths = [Path(str(path.locate())) for path in files if path.parent.name == "configs"]
    recipes = {path.stem: path for path in paths}
    if name not in recipes:
        raise UserError(f"recipe must be a file or shipped, got {name}: name one of {', '.join(sorted(recipes))}")
    return recipes[name]


def to_tree(config: Any) -> dict[str, Any]:
    """The plain nested mapping of a resolved config, for saving and printing."""
    tree: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return tree


def effective(schema: Any, tree: Any) -> Any:
    """`tree` of the dataclass `schema` without the keys that have no effect (`NO_EFFECT`, `IF_SET`), at any depth."""
    schema = _dataclass_of(schema)
    if schema is not None and isinstance(tree, list):
        return [effective(schema, item) for item in tree]
    if schema is None or not isinstance(tree, Mapping):
        return tree
    hints = typing.get_type_hints(schema, include_extras=True)
    marks = {key: getattr(hints.get(key), "__metadata__", ()) for key in tree}
    idle = {key for key, value in tree.items() if NO_EFFECT in marks[key] or (IF_SET in marks[key] and value is None)}
    rest = {key: value for key, value in tree.items() if key not in idle}
    return {key: effective(hints.get(key), value) for key, value in rest.items()}


def dump_yaml(config: Any) -> str:
    """The resolved config as YAML, every key written out."""
    tree = to_tree(config)
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    if printable(text) != text:  # a character that YAML folds, or `print_lines` escapes, where it stands as it is
        text = yaml.safe_dump(tree, sort_keys=False)
    return text


def _keys(schema: Any, tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any, list[str]]]:
    """(path, value, type or None for a key that `schema` lacks, the keys that it has) of every key in `tree`."""
    schema = _dataclass_of(schema)
    if schema is not None and isinstance(tree, list):
        for place, item in enumerate(tree):
            yield from _keys(schema, item, (*path, str(place)))
    if schema is None or not isinstance(tree, Mapping):
        return
    hints = typing.get_type_hints(schema)
    valid = [field.name for field in dataclasses.fields(schema)]
    for key, value in tree.items():
        hint = hints[key] if key in valid else None
        yield (*path, str(key)), value, hint, valid
        yield from _keys(hint, value, (*path, str(key)))


def _dataclass_of(annotation: Any) -> Any:
    """The dataclass inside `X`, `X | None`, `list[X]` or `Annotated[X, …]`, or None."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return next(filter(None, map(_dataclass_of, typing.get_args(annotation))), None)
