"""Released bundles that somebody else wrote or edited: every field of the manifest, the shards, the signature."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from cli.bad_inputs.sandbox import Row
from private_rlhf.core.atomic import json_text
from private_rlhf.data.container import settle, write_shard

MANIFEST, SHARD, SIGNATURE = (Path("release") / name for name in ("_manifest", "part-00000.parquet", "_signature"))
VERIFY = ["verify-release", "release"]
RUN = ["run", "--config=tiny.yaml", "--dry-run", "--run-dir=r", "data.preferences=release", "privatize.epsilon=0.5",
       "evaluation_labels=private", "data.public_labels=false", "data.limit=null"]  # fmt: skip
ATTACK = ["attack", "release", "--canaries=2"]
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, 1 << 60, "x", "", [], {}, [1], {"x": 1})


def rows() -> Iterator[Row]:
    """All of this module."""
    yield Row("bundle: as it was released", VERIFY, code=0)
    yield from manifest_rows()
    yield from document_rows()
    yield from shard_rows()
    yield from signature_rows()


def edited(change: Callable[[dict[str, Any]], Any], signed: bool = False) -> Callable[[], None]:
    """Edits the manifest; unless `signed`, the signature goes, which it would no longer fit."""

    def make() -> None:
        facts = json.loads(MANIFEST.read_text())
        change(facts)
        MANIFEST.write_text(json_text(facts))
        if not signed:
            SIGNATURE.unlink()
        settle(MANIFEST.parent)

    return make


def put(path: tuple[str, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a field."""

    def change(facts: dict[str, Any]) -> None:
        for name in path[:-1]:
            facts = facts[name]
        facts[path[-1]] = value

    return change


def drop(path: tuple[str, ...]) -> Callable[[dict[str, Any]], None]:
    """Removes a field."""

    def change(facts: dict[str, Any]) -> None:
        for name in path[:-1]:
            facts = facts[name]
        del facts[path[-1]]

    return change


def manifest_rows() -> Iterator[Row]:
    """Each field of another type, or missing, or a lie."""
    fields = {name: (name,) for name in ("format", "rows", "source", "guarantee", "dropped", "rows_per_shard", "extra_columns",
                                          "canonicalisation", "schema_version", "mark")}  # fmt: skip
    fields |= {f"guarantee.{name}": ("guarantee", name) for name in ("mechanism", "epsilon", "keep_prob", "flip_prob", "key_mode", "mark")}
    right: dict[str, tuple[Any, ...]] = {
        "source": ("x", ""), "extra_columns": ([],), "mark": (None,), "guarantee.mark": (None,), "guarantee.epsilon": (1.5, 1 << 60),
    }  # fmt: skip
    count = 0
    for name, path in fields.items():
        for value in WRONG:
            if not any(type(value) is type(good) and value == good for good in right.get(name, ())):
                count += 1
                yield Row(f"bundle: {name} is {value!r}", VERIFY, make=edited(put(path, value)), slow=count % 3 > 0)
    for name in ("format", "rows", "guarantee", "dropped", "schema_version", "rows_per_shard", "extra_columns", "canonicalisation", "source"):
        yield Row(f"bundle: without {name}", VERIFY, make=edited(drop((name,))))
    for name in ("mechanism", "epsilon", "keep_prob", "flip_prob", "unit", "neighbouring", "key_mode", "mark"):
        yield Row(f"bundle: without guarantee.{name}", VERIFY, make=edited(drop(("guarantee", name))))
    lies: dict[str, tuple[tuple[str, ...], Any]] = {
        "one row more": (("rows",), 9), "one row less": (("rows",), 7), "another format": (("format",), "conversational"), "more shards": (("rows_per_shard",), 1),
        "a smaller epsilon": (("guarantee", "epsilon"), 0.1), "epsilon 0": (("guarantee", "epsilon"), 0), "an infinite epsilon": (("guarantee", "epsilon"), None),
        "a larger keep_prob": (("guarantee", "keep_prob"), 0.9), "keep_prob 1": (("guarantee", "keep_prob"), 1), "keep_prob 2": (("guarantee", "keep_prob"), 2),
        "not keyed": (("guarantee", "key_mode"), "insecure_seed"), "no key": (("guarantee", "key_mode"), "none"), "NOT PRIVATE": (("guarantee", "mark"), "NOT PRIVATE"),
        "another mark on top": (("mark",), "NOT PRIVATE"), "a column that is none": (("extra_columns",), ["score"]), "a column twice": (("extra_columns",), ["a", "a"]),
        "a column of the pair": (("extra_columns",), ["chosen"]), "a later canonical form": (("canonicalisation",), 99), "canonical form 0": (("canonicalisation",), 0),
        "a later schema": (("schema_version",), 3), "schema 2.0": (("schema_version",), 2.5), "negative drops": (("dropped",), {"identical": -1}),
    }  # fmt: skip
    for name, (path, value) in lies.items():
        yield Row(f"bundle: {name}", VERIFY, make=edited(put(path, value)))
        yield Row(f"bundle, run: {name}", RUN, make=edited(put(path, value)))
    yield Row("bundle: a name that is HTML", VERIFY, make=edited(put(("source",), "<img src=x>\x1b[2J")), code=0)
    yield Row("bundle: a field more", VERIFY, make=edited(put(("note",), "x")))


def document_rows() -> Iterator[Row]:
    """Manifests and signatures that are no such document."""
    texts: dict[str, bytes] = {
        "empty": b"", "a list": b"[]", "null": b"null", "a number": b"3", "cut short": b'{"rows": ', "not UTF-8": b'{"rows": "\xff"}', "UTF-16": "{}".encode("utf-16"),
        "deep": b"[" * 100_000, "deep and whole": b"[" * 500 + b"]" * 500, "a key twice": b'{"rows": 8, "rows": 9}', "NaN": b'{"rows": NaN}', "infinity": b'{"rows": 1e999}',
        "a huge number": b'{"rows": ' + b"9" * 100_000 + b"}", "17 MiB": b" " * (17 << 20) + b"{}", "NUL": b"\0" * 100, "two documents": b"{}{}", "a comment": b"// x\n{}",
        "half a character": b'{"schema_version": "\\ud800"}', "a byte order mark": b"\xef\xbb\xbf{}", "wide": b'{"x": [' + b"1," * 500_000 + b"1]}",
    }  # fmt: skip
    for name, text in texts.items():
        yield Row(f"manifest: {name}", VERIFY, make=lambda t=text: MANIFEST.write_bytes(t))
        yield Row(f"signature: {name}", VERIFY, make=lambda t=text: SIGNATURE.write_bytes(t))
    odd: dict[str, Callable[[], Any]] = {
        "missing": MANIFEST.unlink, "a folder": lambda: (MANIFEST.unlink(), MANIFEST.mkdir()), "a pipe": lambda: (MANIFEST.unlink(), os.mkfifo(MANIFEST)),
        "a loop": lambda: (MANIFEST.unlink(), os.symlink("_manifest", MANIFEST)), "a link to /dev/zero": lambda: (MANIFEST.unlink(), os.symlink("/dev/zero", MANIFEST)),
    }  # fmt: skip
    for name, make in odd.items():
        yield Row(f"manifest: {name}", VERIFY, make=make)
        yield Row(f"manifest, run: {name}", RUN, make=make)


def shards(change: Callable[[pa.Table], pa.Table], **options: Any) -> Callable[[], None]:
    """Writes the shard anew."""

    def make() -> None:
        made = change(pq.read_table(SHARD))
        if options:
            pq.write_table(made, SHARD, **options)
        else:
            write_shard(SHARD, made.schema, [made])
        SIGNATURE.unlink()
        settle(SHARD.parent)

    return make


def column(name: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
    """Replaces a column."""
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


def shard_rows() -> Iterator[Row]:
    """Shards that are not those of the manifest, or of rows that no release holds."""
    size = 8
    changes: dict[str, Callable[[pa.Table], pa.Table]] = {
        "a row less": lambda table: table[1:], "a row more": lambda table: pa.concat_tables([table, table[:1]]), "no rows": lambda table: table[:0],
        "in another order": lambda table: table.take(list(range(size))[::-1]), "a column less": lambda table: table.drop_columns(["prompt"]),
        "a column more": lambda table: table.append_column("label", pa.array([1] * size)), "another order of columns": lambda table: table.select(table.column_names[::-1]),
        "a column twice": lambda table: pa.Table.from_arrays([*table.columns, table["chosen"]], names=[*table.column_names, "chosen"]),
        "numbers for texts": column("chosen", pa.array([1] * size)), "nulls": column("chosen", pa.array(["x", None] * 4)), "bytes for texts": column("prompt", pa.array([b"x"] * size)),
        "ids that are none": column("record_id", pa.array(["x"] * size)), "ids of capitals": column("record_id", pa.array(["A" * 64] * size)), "no ids": column("record_id", pa.nulls(size, pa.string())),
        "large strings": column("chosen", pa.array(["x"] * size, pa.large_string())), "a dictionary": column("chosen", pa.array(["x"] * size).dictionary_encode()),
        "text that is not UTF-8": column("chosen", pa.Array.from_buffers(pa.string(), size, [None, pa.py_buffer(bytes(4 * size) + b"\1\0\0\0"), pa.py_buffer(b"\xff")])),
        "messages": column("chosen", pa.array([[{"role": "a", "content": "b"}]] * size)),
    }  # fmt: skip
    for name, option in {"a compression": {"compression": "gzip"}, "small groups": {"row_group_size": 3}, "another version": {"version": "1.0"}}.items():
        yield Row(f"shard: with {name} of its own", VERIFY, make=shards(lambda table: table, **option))
    for name, change in changes.items():
        yield Row(f"shard: {name}", VERIFY, make=shards(change))
        yield Row(f"shard, run: {name}", RUN, make=shards(change))
    content: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda data: b"", "cut short": lambda data: data[:-9], "half": lambda data: data[: len(data) // 2], "no head": lambda data: data[4:], "zeros inside": lambda data: data[:8] + b"\0" * 300 + data[308:],
        "text": lambda data: b"hello", "an overlong footer": lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "a wrong footer": lambda data: data[:-40] + b"\xff" * 32 + data[-8:],
    }  # fmt: skip
    for name, mutate in content.items():
        yield Row(f"shard: {name}", VERIFY, make=lambda m=mutate: (SHARD.write_bytes(m(SHARD.read_bytes())), SIGNATURE.unlink()))
        yield Row(f"shard, attack: {name}", ATTACK, make=lambda m=mutate: (SHARD.write_bytes(m(SHARD.read_bytes())), SIGNATURE.unlink()))
    places: dict[str, Callable[[], Any]] = {
        "missing": SHARD.unlink, "a second one": lambda: shutil.copy(SHARD, "release/part-00001.parquet"), "under another number": lambda: SHARD.rename("release/part-00001.parquet"),
        "a folder": lambda: (SHARD.unlink(), SHARD.mkdir()), "a pipe": lambda: (SHARD.unlink(), os.mkfifo(SHARD)), "a link to nowhere": lambda: (SHARD.unlink(), os.symlink("x", SHARD)),
        "a loop": lambda: (SHARD.unlink(), os.symlink(SHARD.name, SHARD)),
    }  # fmt: skip
    for name, make in places.items():
        yield Row(f"shard: {name}", VERIFY, make=make)
        yield Row(f"shard, run: {name}", RUN, make=make)
    for name in ("a smaller epsilon", "an infinite one", "another signer"):
        wrong = {"a smaller epsilon": "privatize.epsilon=0.4", "an infinite one": "privatize.epsilon=.inf", "another signer": f"data.signer={'0' * 64}"}
        yield Row(f"bundle, run: recipe with {name}", [*RUN, wrong[name]])
    yield Row("bundle, run: raw evaluation labels", [*RUN, "evaluation_labels=public", "data.public_labels=true"])


def signature_rows() -> Iterator[Row]:
    """Signatures that do not hold."""

    def signed(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
        def make() -> None:
            facts = json.loads(SIGNATURE.read_text())
            change(facts)
            SIGNATURE.write_text(json.dumps(facts, indent=2) + "\n")
            settle(SIGNATURE.parent)

        return make

    count = 0
    for name in ("schema_version", "algorithm", "public_key", "files", "signature"):
        for value in (*WRONG, "0" * 64, "0" * 128, "g" * 64, "\ud800"):
            if not (name == "schema_version" and value is True):
                count += 1
                made = signed(put((name,), copy.deepcopy(value)))
                yield Row(f"signature: {name} is {value!r:.99}", VERIFY, make=made, slow=count % 3 > 0)
        yield Row(f"signature: without {name}", VERIFY, make=signed(drop((name,))))
    yield Row("signature: a file more", VERIFY, make=signed(put(("files", "../x"), "0" * 64)))
    yield Row("signature: a digest that is null", VERIFY, make=signed(put(("files", "_manifest"), None)))
    yield Row("signature: an edited manifest", VERIFY, make=edited(put(("source",), "other"), signed=True))
    yield Row("signature: an edited shard", VERIFY, make=lambda: SHARD.write_bytes(SHARD.read_bytes()[:-1] + b"2"))
    yield Row("signature: gone, with a signer asked for", [*VERIFY, f"--signer={'0' * 64}"], make=SIGNATURE.unlink)
    yield Row("signature: gone", VERIFY, make=lambda: (SIGNATURE.unlink(), settle(SIGNATURE.parent)), code=0, says="unsigned")
