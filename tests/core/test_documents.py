"""Untrusted JSON and YAML: read as the standard libraries do, or refused; never a crash, never without end."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core import documents
from private_rlhf.core.documents import DocumentError, parse_json, parse_yaml, read_json

NAMES = "abcdefghijklmnop"
BOMB = "a: &a [1, 1]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in pairwise(NAMES)
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', "gives the key 'a' twice"),
        ('{"b": {"a": 1, "a": 1}}', "gives the key 'a' twice"),
        ('{"a": 1e999}', "a number that no float can"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ("[" * 100 + "]" * 100, "deep"),
        ("[" * 100_000 + "]" * 100_000, "deep"),
        ("9" * 5000, "not valid JSON"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_json_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 50000 values"),
        ("a: &a [*a]", "alias"),
        ("ppo: {a: 1}\nppo: {a: 2}", "gives the key 'ppo' twice"),
        ("a: {b: 1, b: 1}", "gives the key 'b' twice"),
        ("[" * 1000, "deep"),
        ("".join(" " * depth + "a:\n" for depth in range(200)), "deep"),
        ("- " * 1000 + "1", "deep"),
        ("a: 1.0e+999", "no float"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: 2001-99-99", "not valid YAML"),
        ('a: "\\0"', "NUL"),
        ('a: "\\ud800"', "half a character"),
        ("a: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("a: [", "not valid YAML at line"),
        ("{[]: 1}", "not valid YAML"),
        ("# " + "x" * documents.MOST_YAML, "KiB"),
    ],
)
def test_yaml_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        parse_yaml(text)


@given(PLAIN)
@settings(max_examples=60)
def test_what_was_written_is_read(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii")),
                    lambda inner: st.dictionaries(st.text("abc"), inner, max_size=3), max_leaves=8))
@settings(max_examples=40)
def test_recipes_are_read_as_before(value: Any) -> None:
    text = yaml.safe_dump(value)
    if "\\0" not in text:
        assert parse_yaml(text) == yaml.safe_load(text)


@given(st.text(st.sampled_from('{}[]":,0123456789.eE-+ntfau\\ \n&*!|>#'), max_size=80))
@settings(max_examples=150)
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        try:
            parse(text)
        except DocumentError:
            continue


def test_aliases_are_copies() -> None:
    one = parse_yaml("a: &x {k: 1}\nb: *x")
    one["a"]["k"] = 2
    assert one == {"a": {"k": 2}, "b": {"k": 1}}


def test_infinities_that_are_meant() -> None:
    assert parse_yaml("a: .inf") == {"a": math.inf}
    assert math.isnan(parse_json('{"a": NaN, "b": 1e999}', finite=False)["a"])


def test_a_file_without_end(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="over 16384 KiB"):
        read_json(Path("/dev/zero"))
    (tmp_path / "latin.json").write_bytes(b'"\xff"')
    with pytest.raises(DocumentError, match="UTF-8"):
        read_json(tmp_path / "latin.json")
