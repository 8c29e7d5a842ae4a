"""Recipes: every key of every section with each kind of wrong value, from the schema; and whole files."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cli.bad_inputs.sandbox import Row
from private_rlhf.recipe import Recipe
from pydantic import TypeAdapter

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
SCALARS: dict[str, Any] = {"string": "many", "integer": 3, "number": 1.5, "boolean": True, "array": [1], "object": {"x": 1}}
OFF = {"privatize.epsilon", "ppo.max_grad_norm", "ppo.max_kl", "ppo.clip_range", "ppo.value_clip_range"}
"""Of which infinity is a value."""
NEAR = {"integer": {"number"}, "number": {"integer"}}  # of which some values are legal


def rows() -> Iterator[Row]:
    """All of this module."""
    yield from key_rows()
    yield from file_rows()
    yield from override_rows()


def shown(value: Any) -> str:
    """As YAML on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def keys(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted key, its schema) of everything that a recipe may say, sections before what is in them."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for option in node.get("anyOf", ()):
        if "$ref" in option:
            yield from keys(schema, option, path)
    for name, inner in node.get("properties", {}).items():
        key = f"{path}.{name}".lstrip(".")
        yield key, inner
        yield from keys(schema, inner, key)
    if node.get("type") == "array" and "$ref" in node["items"]:
        yield from keys(schema, node["items"], f"{path}.0")


def key_rows() -> Iterator[Row]:
    """One override each, of which the default suite takes a sixth. Items of lists are given as a list of one."""
    schema = TypeAdapter(Recipe).json_schema()
    sections, count = {""}, 0
    for key, node in keys(schema, schema):
        sections.add(key.rpartition(".")[0])
        for what, value in wrong(schema, node):
            if what == "infinity" and key in OFF:
                continue
            count += 1
            yield Row(f"{key}: {what}", ["print-config", "--config=tiny.yaml", override(key, value)], says=key.split(".")[0],
                      slow=count % 6 > 0)
    for section in sorted(sections):
        for name in ("no_such_key", "", "\x1b[2J"):
            key = f"{section}.{name}".lstrip(".")
            yield Row(f"{section or 'recipe'}: unknown key {name!r}", ["print-config", "--config=tiny.yaml", override(key, 1)])


def override(key: str, value: Any) -> str:
    """key=value; a key inside a list's first item as that list."""
    head, inside, tail = key.partition(".0.")
    return f"{head}={shown([{tail: value}])}" if inside else f"{key}={shown(value)}"


def wrong(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(what is wrong, value): another type, outside the bounds, none of the choices, not finite."""
    options = [resolved(schema, option) for option in node.get("anyOf", [node])]
    types = {option.get("type", "string" if "enum" in option else "any") for option in options}
    if "any" in types:
        return
    allowed = types | {near for kind in types for near in NEAR.get(kind, ())}
    for kind, value in SCALARS.items():
        if kind not in allowed:
            yield f"a {kind}", value
    if "null" not in types:
        yield "null", None
    for option in options:
        if option.get("type") in ("number", "integer"):
            yield from out_of_range(option)
        if "enum" in option or "const" in option:
            yield "none of the choices", "neither"
        if "pattern" in option:
            yield "another form", "%\n%"
        if option.get("type") == "object" and option.get("properties") is None:
            yield "a text for a mapping", "x"


def resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The definition that a reference names."""
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def out_of_range(option: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers just outside, and those that are none."""
    step = 1 if option["type"] == "integer" else 0.5
    edges = {
        "exclusiveMinimum": 0, "minimum": -step, "exclusiveMaximum": 0, "maximum": step,
    }  # fmt: skip
    for name, offset in edges.items():
        if name in option:
            yield f"beyond its {name}", option[name] + offset
    if option["type"] == "integer":
        yield "a fraction", 2.5
    yield "not a number", float("nan")
    yield "minus infinity", float("-inf")
    yield "infinity", float("inf")


def file_rows() -> Iterator[Row]:
    """Whole files."""
    good = Path("tiny.yaml")
    texts: dict[str, bytes] = {
        "empty": b"", "a comment": b"# nothing\n", "null": b"null\n", "a list": b"- a\n", "a text": b"hello\n",
        "a number": b"3\n", "an open list": b"name: [\n", "an open text": b'name: "x\n', "a tab": b"name:\n\t- x\n",
        "not UTF-8": b"name: \xff\n", "UTF-16": "name: x\n".encode("utf-16"), "NUL": b"name: a\0b\n", "NUL escaped": b'name: "a\\0b"\n',
        "half a character": b'name: "\\ud800"\n', "two documents": b"name: a\n---\nname: b\n", "a tag": b"name: !!python/object:os.system x\n",
        "a tag that runs": b"!!python/object/apply:os.system ['touch sprung']\n", "an unknown tag": b"name: !secret x\n",
        "alias of itself": b"name: &a [*a]\n", "alias of nothing": b"name: *a\n", "alias bomb": BOMB.encode(),
        "merge bomb": b"a: &a {x: 1}\n" + b"b:\n" + b"  <<: [" + b"*a, " * 20000 + b"*a]\n",
        "a key twice": b"name: a\nname: b\n", "a section twice": b"ppo: {}\nppo: {}\n", "twice in a section": b"ppo: {lam: 1, lam: 1}\n",
        "a key that is a list": b"? [a]\n: 1\n", "a key that is null": b"~: 1\n", "a key that is a number": b"3: 1\n",
        "a key that is a mapping": b"? {a: 1}\n: 1\n", "deep lists": b"name: " + b"[" * 5000, "deep mappings": b"{a: " * 5000,
        "deep blocks": b"".join(b" " * n + b"a:\n" for n in range(300)), "a huge number": b"seed: " + b"9" * 5000 + b"\n",
        "a huge float": b"privatize: {epsilon: 1e999}\n", "an endless line": b"name: " + b"x" * (1 << 20), "a date": b"name: 2020-01-99\n",
        "a megabyte of keys": b"".join(b"k%d: 1\n" % n for n in range(100_000)), "binary": bytes(range(256)),
        "JSON cut short": b'{"name": "x", ', "missing keys": b"name: a\n", "an odd name": b"name: ../../etc\n",
        "a name with a line break": b'name: "a\\nb"\nevaluation_labels: public\nmodel: {source: tiny}\nprivatize: {epsilon: 1}\n',
        "a long name": b"name: " + b"x" * 5000 + b"\nevaluation_labels: private\nmodel: {source: tiny}\nprivatize: {epsilon: 1}\n",
        "dots for a name": b"name: ..\nevaluation_labels: private\nmodel: {source: tiny}\nprivatize: {epsilon: 1}\n",
        "base 60": b"seed: 1:2:3:4\nname: x\n", "a byte order mark alone": b"\xef\xbb\xbf", "percent": b"%YAML 9.9\n---\nname: x\n",
    }  # fmt: skip
    for name, text in texts.items():
        for command in ("print-config", "run"):
            more = ["--dry-run"] if command == "run" else []
            yield Row(f"recipe, {command}: {name}", [command, "--config=bad.yaml", *more],
                      make=lambda t=text: Path("bad.yaml").write_bytes(t))
    yield Row("recipe: a pipe", ["plan", "--config=pipe.yaml"], make=lambda: os.mkfifo("pipe.yaml"), says="is a pipe")
    yield Row("recipe: no suffix", ["print-config", "--config=tiny"], make=good.unlink, code=0)
    yield Row("recipe: a byte order mark", ["print-config", "--config=bad.yaml"], code=0,
              make=lambda: Path("bad.yaml").write_bytes(b"\xef\xbb\xbf" + good.read_bytes()))
    yield Row("recipe: Windows line ends", ["print-config", "--config=bad.yaml"], code=0,
              make=lambda: Path("bad.yaml").write_bytes(good.read_bytes().replace(b"\n", b"\r\n")))
    yield Row("recipe: aliases that are fine", ["print-config", "--config=bad.yaml"], code=0,
              make=lambda: Path("bad.yaml").write_text(good.read_text() + "dpo: &d {epochs: 2}\nrloo: {epochs: 2}\n"))


def override_rows() -> Iterator[Row]:
    """Words after the options."""
    words = [
        "ppo", "ppo.iterations", "=", "=1", "ppo=", "ppo.=1", ".ppo=1", "..=1", "ppo..iterations=1", "ppo.iterations.x=1",
        "name.x=1", "ppo.iterations=[", "ppo.iterations=*a", "ppo.iterations=&a [*a]", "ppo.iterations={a: 1, a: 2}",
        "ppo.iterations=!!python/name:os.system", "ppo.iterations=\x1b[2J", "ppo.iterations=" + "[" * 1000,
        "ppo.iterations=" + "9" * 5000, "ppo=x", "ppo=[]", "a" * 100_000 + "=1", "ppo." + "a." * 1000 + "b=1", "name=\0",
        "name=\udc80", "ppo.extra_rewards=[{}]", "ppo.extra_rewards=[1]", "ppo.extra_rewards=[{callable: x}]",
        "ppo.extra_rewards=[{callable: 'a:b', path: c}]", "ppo.extra_rewards=[{callable: 'a:b', weight: 0}]",
        "privatize.epsilon=1_0", "privatize.epsilon=1_0.5", "sft.max_steps=1_0", "ppo.minibatch_size=3", "ppo.samples_per_prompt=3", "reward.refit_ridge=2", "reward.quantize=4bit",
        "privatize.epsilon=0", "privatize.epsilon=-1", "data.public_labels=false", "data.signer=me",
        "evaluation_labels=laplace", "privatize.budget_per=person", "privatize.max_events_per_person=3",
        "ppo.top_p=0.5", "model.revision=main", "ppo.report_samples=true", "reward.early_stopping={}x",
        "evaluate.judge={}", "evaluate.judge={url: 'http://x', model: m, public: true}", "evaluate.judge={url: 'ftp://x', model: m}",
        "evaluate.judge={path: a, url: b}", "evaluate.judge={url: 'https://x/v1', model: m, public: true, request: {n: 3}}",
        "ppo.kl_target=1e9x", "reward.trainer_args={label_smoothing_factor: 0.1}", "model.chat_template_kwargs={tokenize: 1}",
    ]  # fmt: skip
    for word in words:
        yield Row(f"override {word[:40]!r}", ["print-config", "--config=tiny.yaml", "--", word])
