"""JSON and YAML from files of unknown origin: bounded in size, depth and time, and nothing is lost silently.

Refused: a key that is given twice (the later one would win), numbers beyond floats, NUL and lone surrogates in YAML
text (no path can hold them), and YAML aliases that stand for many values (600 bytes can stand for more than any memory
holds) or for themselves. Aliases are copied, so changing one value never changes the other.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from private_rlhf.core.errors import UserError

MOST_JSON = 16 << 20  # bytes of a JSON document
MOST_YAML = 256 << 10
"""Bytes of a YAML document: a second or two of PyYAML."""
MOST_DEPTH = 64
MOST_NODES = 50_000
"""Values in a YAML document, counted as often as aliases repeat them."""
MANIFESTS = ("_manifest", "manifest.json")
"""Of a release, now and before: readers of data pass over the first."""


class DocumentError(ValueError):
    """The defect of a document, as words that follow its name: "is not valid JSON"."""


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """The value in a JSON file of at most `most` bytes. DocumentError; OSError if it cannot be read."""
    return parse_json(read_text(path, most))


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in the YAML file of a recipe. UserError when it is missing, broken, or not a mapping."""
    try:
        content = parse_yaml(read_text(path, MOST_YAML))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"recipe {path} does not exist: name a file or a shipped recipe with --config") from None
    except DocumentError as error:
        raise UserError(f"recipe {path} {error}; fix it") from None
    if not isinstance(content, dict):
        raise UserError(f"recipe {path} must be a mapping: give it sections such as 'model:' and 'ppo:'")
    return content


def parse_json(text: str, finite: bool = True) -> Any:
    """The value of a JSON text. finite: NaN and infinities are refused, as JSON has none. DocumentError."""
    hooks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _no_constant} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=_distinct, **hooks)
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError(f"is nested more than {MOST_DEPTH} deep") from None
    except ValueError:
        raise DocumentError("is not valid JSON") from None
    _check_depth(value)
    return value


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. DocumentError."""
    if len(text) > MOST_YAML:
        raise DocumentError(f"is over {MOST_YAML >> 10} KiB of YAML")
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError(f"is nested more than {MOST_DEPTH} deep") from None
    except (yaml.YAMLError, ValueError) as error:  # a number of 5000 digits and the 99th of March are ValueErrors
        place = getattr(error, "problem_mark", None)
        raise DocumentError("is not valid YAML" + (f" at line {place.line + 1}" if place else "")) from None


def read_text(path: Path, most: int) -> str:
    """The text in a file of at most `most` bytes. DocumentError; OSError if it cannot be read."""
    if path.is_fifo():
        raise DocumentError("is a pipe, which may never end")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DocumentError(f"is over {most >> 10} KiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DocumentError("is not UTF-8 text") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise DocumentError(f"gives the key {_first_double(key for key, _ in pairs)!r} twice")
    return value


def _first_double(keys: Iterable[Any]) -> Any:
    return next(key for key, times in Counter(keys).items() if times > 1)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise DocumentError("holds a number that no float can")
    return number


def _no_constant(text: str) -> float:
    raise DocumentError(f"holds {text}, which JSON does not have")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for each in level if isinstance(each, dict | list)
                 for inner in (each.values() if isinstance(each, dict) else each)]  # fmt: skip
        if not level:
            return
    raise DocumentError(f"is nested more than {MOST_DEPTH} deep")


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.nodes = 0
        self.sizes: dict[str, int] = {}  # anchor -> values that its aliases stand for

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias, anchor, before = self.check_event(yaml.AliasEvent), self.peek_event().anchor, self.nodes
        if alias and anchor in self.anchors and anchor not in self.sizes:
            raise DocumentError(f"has a YAML alias *{anchor} inside what it stands for")
        self.nodes += self.sizes.get(anchor, 0) if alias else 1
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise DocumentError(f"is nested more than {MOST_DEPTH} deep")
        if self.nodes > MOST_NODES:
            raise DocumentError(f"stands for more than {MOST_NODES} values")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if anchor is not None and not alias:
            self.sizes[anchor] = self.nodes - before
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            raise DocumentError(
                f"gives the key {_first_double(keys)[1]!r} twice, in the mapping at line"
                f" {node.start_mark.line + 1}: keep one"
            )
        return super().construct_mapping(node, deep)

    def construct_yaml_str(self, node: Any) -> str:
        text: str = super().construct_yaml_str(node)
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise DocumentError(f"holds NUL or half a character at line {node.start_mark.line + 1}: remove it")
        return text

    def construct_yaml_int(self, node: Any) -> int:
        self._check_digits(node)
        return int(super().construct_yaml_int(node))

    def _check_digits(self, node: Any) -> None:
        """YAML 1.1 reads 1_0 as 10."""
        if "_" in node.value:
            raise DocumentError(f"holds a number with an underscore at line {node.start_mark.line + 1}: write digits")

    def construct_yaml_float(self, node: Any) -> float:
        self._check_digits(node)
        number: float = super().construct_yaml_float(node)
        if math.isinf(number) and "inf" not in node.value.lower():
            raise DocumentError(f"holds a number that no float can at line {node.start_mark.line + 1}: write .inf")
        return number


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
