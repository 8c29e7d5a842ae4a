"""Raw preferences of every kind that `privatize` reads, and lines that `label-filter` reads."""

# ruff: noqa: E501 (one input, one line)

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from cli.bad_inputs.sandbox import RELEASED, ROWS, SECRET, Row, lines, option, privatize

PAIR = {"prompt": "p", "chosen": f"{SECRET} c", "rejected": f"{SECRET} r"}
MIB = 1 << 20


def rows() -> Iterator[Row]:
    """All of this module."""
    yield from jsonl_rows()
    yield from gzip_rows()
    yield from csv_rows()
    yield from parquet_rows()
    yield from folder_rows()
    yield from column_rows()
    yield from label_filter_rows()


def write(name: str, content: bytes) -> Callable[[], Any]:
    """Makes a file."""
    return lambda: Path(name).write_bytes(content)


def text(*odd: Any, before: int = 3) -> bytes:
    """Good lines, the odd ones (bytes as they are), and one more good line."""
    shown = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in odd]
    good = [json.dumps(row).encode() for row in ROWS]
    return b"\n".join([*good[:before], *shown, good[-1]]) + b"\n"


def jsonl_rows() -> Iterator[Row]:
    """Lines that are no row; each is named by its number."""
    message = {"role": "user", "content": "x"}
    odd: dict[str, Any] = {
        "no JSON": b"hello", "cut short": b'{"prompt": "p", "chosen": "c"', "an open text": b'{"prompt": "p',
        "a list": [PAIR], "a text": "x", "a number": 3, "null": None, "nothing in it": {}, "two objects": b'{"a": 1} {"b": 2}',
        "two rows": (json.dumps(PAIR) * 2).encode(), "a comment": b"// no", "single quotes": b"{'prompt': 'p'}",
        "a trailing comma": b'{"prompt": "p", "chosen": "c", "rejected": "r",}', "NaN for a text": b'{"prompt": "p", "chosen": NaN, "rejected": "r"}',
        "a number for a text": PAIR | {"chosen": 3}, "null for a text": PAIR | {"chosen": None}, "true for a text": PAIR | {"rejected": True},
        "a list with a number": PAIR | {"chosen": ["x", 3], "rejected": ["y"]}, "a mapping": PAIR | {"chosen": {"x": 1}},
        "one side missing": {"prompt": "p", "chosen": "c"}, "the other side missing": {"prompt": "p", "rejected": "r"},
        "no prompt": {"chosen": "c", "rejected": "r"}, "a prompt that is null": PAIR | {"prompt": None},
        "a prompt that is a number": PAIR | {"prompt": 1}, "another spelling": {"Prompt": "p", "Chosen": "c", "Rejected": "r"},
        "messages and text": PAIR | {"chosen": [message]}, "messages of no role": PAIR | {"chosen": [{"content": "x"}], "rejected": [{"content": "y"}]},
        "messages of no content": PAIR | {"chosen": [{"role": "a"}], "rejected": [{"role": "b"}]}, "no messages": PAIR | {"chosen": [], "rejected": []},
        "content that is null": PAIR | {"chosen": [{"role": "a", "content": None}], "rejected": [{"role": "a", "content": "y"}]},
        "content in parts": PAIR | {"chosen": [{"role": "a", "content": [{"text": "x"}]}], "rejected": [message]},
        "a column twice": b'{"prompt": "p", "chosen": "c", "chosen": "d", "rejected": "r"}',
        "a column twice, escaped": b'{"prompt": "p", "chosen": "c", "\\u0063hosen": "d", "rejected": "r"}',
        "twice in a message": b'{"prompt": "p", "chosen": [{"role": "a", "content": "x", "content": "y"}], "rejected": [{"role": "a", "content": "z"}]}',
        "half a character": b'{"prompt": "p", "chosen": "\\ud800", "rejected": "r"}', "half a character in the other answer": b'{"prompt": "p", "chosen": "c", "rejected": "\\ud800"}', "half a character in the prompt": b'{"prompt": "\\udfff", "chosen": "c", "rejected": "r"}',
        "not UTF-8": b'{"prompt": "p", "chosen": "\xff", "rejected": "r"}', "Latin-1": '{"prompt": "ä", "chosen": "c", "rejected": "r"}'.encode("latin-1"),
        "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80", "chosen": "c", "rejected": "r"}', "a bad escape": b'{"prompt": "\\x", "chosen": "c", "rejected": "r"}',
        "a raw control character": b'{"prompt": "a\x00b", "chosen": "c", "rejected": "r"}', "deep lists": b"[" * 100_000,
        "a huge number": b'{"prompt": ' + b"9" * 100_000 + b"}", "an endless line": b'{"prompt": "' + b"x" * (17 * MIB) + b'"}',
        "a byte order mark inside": b"\xef\xbb\xbf" + json.dumps(PAIR).encode(), "a form feed": b"\x0c" + b"{",
    }  # fmt: skip
    for name, line in odd.items():
        yield Row(f"JSONL: {name}", privatize(data="bad.jsonl"), make=write("bad.jsonl", text(line)), says="line 4")
        if name not in ("an endless line", "no prompt", "no messages", "a byte order mark inside"):  # other rules
            yield Row(f"JSONL, first: {name}", privatize(data="bad.jsonl"), make=write("bad.jsonl", text(line, before=0)), says="line 1", slow=len(name) % 3 > 0)
    whole: dict[str, bytes] = {
        "empty": b"", "line breaks alone": b"\n" * 1000, "spaces alone": b" " * 1000, "a byte order mark alone": b"\xef\xbb\xbf",
        "UTF-16": text().decode().encode("utf-16"), "UTF-32": text().decode().encode("utf-32"), "one JSON list": json.dumps(ROWS).encode(),
        "indented JSON": json.dumps(PAIR, indent=2).encode(), "NULs": b"\0" * 100_000, "identical answers": text(before=0).replace(b"no 7", b"yes 7"),
        "a Parquet file": b"PAR1" + b"\0" * 100, "a zip": b"PK\x03\x04" + b"\0" * 50, "old Mac line ends": text().replace(b"\n", b"\r"),
    }  # fmt: skip
    for name, content in whole.items():
        yield Row(f"JSONL file: {name}", privatize(data="bad.jsonl"), make=write("bad.jsonl", content))
    fine: dict[str, bytes] = {
        "a byte order mark": b"\xef\xbb\xbf" + text(), "Windows line ends": text().replace(b"\n", b"\r\n"), "no last line break": text().rstrip(),
        "empty lines": text(b"", b"  ", b"\t"), "other columns twice": text(b'{"prompt": "p", "chosen": "c", "rejected": "r", "x": 1, "x": 2}'),
        "further columns": text(PAIR | {"score": float("nan"), "x": [1, {"y": None}]}), "NUL escaped": text(PAIR | {"chosen": "a\0b"}),
        "line separators": text(PAIR | {"chosen": "a\u2028b\u2029c\x85d"}), "an emoji in two halves": text(b'{"prompt": "\\ud83d\\ude00", "chosen": "c", "rejected": "r"}'),
        "copies": text(PAIR, PAIR), "copies that contradict": text(PAIR, {"prompt": "p", "chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}),
        "deep in a column": text(b'{"prompt": "p", "chosen": "c", "rejected": "r", "x": ' + b"[" * 9000 + b"]" * 9000 + b"}"),
        "an empty answer": text(PAIR | {"chosen": ""}), "a long text": text(PAIR | {"chosen": "x" * (9 * MIB)}),
    }  # fmt: skip
    for name, content in fine.items():
        yield Row(f"JSONL file: {name}", privatize(data="fine.jsonl"), make=write("fine.jsonl", content), code=0, may_change=RELEASED)


def gzip_rows() -> Iterator[Row]:
    """Compressed JSON lines."""
    good = gzip.compress(text())
    whole: dict[str, bytes] = {
        "empty": b"", "no gzip": text(), "cut short": good[:-9], "half": good[: len(good) // 2], "the header alone": good[:10],
        "a wrong sum": good[:-6] + b"\0\0" + good[-4:], "a wrong size": good[:-4] + b"\1\2\3\4", "bytes behind": good + b"hello",
        "a turned bit": good[:40] + bytes([good[40] ^ 1]) + good[41:], "of nothing": gzip.compress(b""), "twice": gzip.compress(good),
        "an endless line": gzip.compress(b'{"prompt": "' + b"x" * (20 * MIB), 1), "zeros": gzip.compress(b"\0" * (20 * MIB), 1),
        "a bomb of line breaks": gzip.compress(b"\n" * (20 * MIB), 1), "a zstd frame": b"\x28\xb5\x2f\xfd" + b"\0" * 40,
    }  # fmt: skip
    for name, content in whole.items():
        yield Row(f"gzip: {name}", privatize(data="bad.jsonl.gz"), make=write("bad.jsonl.gz", content))
    yield Row("gzip: members", privatize(data="x.jsonl.gz"), make=write("x.jsonl.gz", good + gzip.compress(text(PAIR))),
              code=0, may_change=RELEASED)


def csv_rows() -> Iterator[Row]:
    """CSV."""
    head = "prompt,chosen,rejected\n"
    whole: dict[str, bytes] = {
        "empty": b"", "the header alone": head.encode(), "no header": b"p,c,r\n", "a field too few": f"{head}p,c\n".encode(),
        "a field too many": f"{head}p,c,r,x\n".encode(), "an open quote": f'{head}"p,c,r\n'.encode(), "a column twice": b"prompt,chosen,chosen,rejected\np,c,d,r\n",
        "not UTF-8": head.encode() + b"p,\xff,r\n", "UTF-16": f"{head}p,c,r\n".encode("utf-16"),
        "semicolons and commas": b"prompt;chosen,rejected\np;c,r\n", "bars": b"prompt|chosen|rejected\np|c|r\n", "a column missing": b"prompt,chosen\np,c\n",
        "an endless field": head.encode() + b"p,c," + b"x" * (2 * MIB) + b"\n", "quotes inside": f'{head}p,a"b"c"d,"e"f\n'.encode(),
        "an endless header": b"x" * (17 * MIB), "many columns": b",".join(b"c%d" % n for n in range(100_000)) + b"\n",
        "the header twice": f"{head}{head}p,c\n".encode(), "a lone carriage return": f"{head}p,c\rx,r\n".encode(),
    }  # fmt: skip
    for name, content in whole.items():
        yield Row(f"CSV: {name}", privatize(data="bad.csv"), make=write("bad.csv", content))
    fine = {"NUL": f"{head}p\0,c,r\n", "line breaks in a field": f'{head}p,"a\nb",r\n', "empty lines": f"{head}\np,c,r\n\n", "a byte order mark": f"\ufeff{head}p,c,r\n",
            "semicolons": "prompt;chosen;rejected\np;c;r\n", "tabs": "prompt\tchosen\trejected\np\tc\tr\n"}  # fmt: skip
    for name, shown in fine.items():
        yield Row(f"CSV: {name}", privatize(data="fine.csv"), make=write("fine.csv", shown.encode()), code=0, may_change=RELEASED)


def table(columns: dict[str, Any] | pa.Table, **options: Any) -> bytes:
    """A Parquet file."""
    made, file = columns if isinstance(columns, pa.Table) else pa.table(columns), io.BytesIO()
    pq.write_table(made, file, **options)
    return file.getvalue()


def parquet_rows() -> Iterator[Row]:
    """Parquet."""
    good = table(pa.Table.from_pylist(ROWS))
    strings = {"prompt": ["p"], "chosen": ["c"], "rejected": ["r"]}
    twice = pa.Table.from_arrays([pa.array(["p"]), pa.array(["c"]), pa.array(["d"]), pa.array(["r"])],
                                 names=["prompt", "chosen", "chosen", "rejected"])
    latin = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    struct = pa.array([{"role": "a"}], pa.struct([("role", pa.string())]))
    whole: dict[str, bytes] = {
        "empty": b"", "magic alone": b"PAR1PAR1", "cut short": good[:-9], "half": good[: len(good) // 2], "no head": good[4:],
        "an overlong footer": good[:-8] + b"\xff\xff\xff\x7fPAR1", "a footer of zeros": good[:-60] + b"\0" * 52 + good[-8:],
        "zeros in the data": good[:4] + b"\0" * 400 + good[404:], "no rows": table(pa.Table.from_pylist(ROWS)[:0]), "no columns": table(pa.table({})),
        "numbers": table(strings | {"chosen": [1]}), "nulls": table(strings | {"chosen": pa.array([None], pa.string())}), "bytes": table(strings | {"chosen": [b"x"]}),
        "a column of nulls": table(strings | {"chosen": pa.nulls(1)}), "structs": table(strings | {"chosen": struct, "rejected": struct}),
        "lists of numbers": table(strings | {"chosen": [[1]], "rejected": [[2]]}), "a column twice": table(twice), "a column missing": table({"prompt": ["p"], "chosen": ["c"]}),
        "text that is not UTF-8": table(strings | {"chosen": latin}), "dates": table(strings | {"chosen": pa.array([0], pa.timestamp("s"))}),
        "encrypted": b"PARE" + good[4:-4] + b"PARE", "rows of a release": b"",
        "a dictionary of nulls": table(strings | {"chosen": pa.array([None]).cast(pa.string()).dictionary_encode()}),
    }  # fmt: skip
    for name, content in whole.items():
        made = (lambda: os.link("release/part-00000.parquet", "bad.parquet")) if name == "rows of a release" else write("bad.parquet", content)
        command = privatize(data="bad.parquet", output="out")
        if name == "rows of a release":
            continue  # named by its folder alone: its rows cannot be told from raw ones
        yield Row(f"Parquet: {name}", command, make=made)
    bomb = {"prompt": ["p"], "chosen": ["c"], "rejected": ["x" * (1200 * MIB)]}
    yield Row("Parquet: a gigabyte in a row", privatize(data="bad.parquet"), slow=True,
              make=lambda: Path("bad.parquet").write_bytes(table(bomb, compression="zstd", use_dictionary=False)))
    yield Row("Parquet: dictionaries", privatize(data="x.parquet"), code=0, may_change=RELEASED,
              make=write("x.parquet", table({name: pa.array([row[name] for row in ROWS]).dictionary_encode() for name in PAIR})))
    yield Row("Parquet: large strings", privatize(data="x.parquet"), code=0, may_change=RELEASED,
              make=write("x.parquet", table({name: pa.array([row[name] for row in ROWS], pa.large_string()) for name in PAIR})))
    yield Row("Parquet: many row groups", privatize(data="x.parquet"), code=0, may_change=RELEASED,
              make=write("x.parquet", table(pa.Table.from_pylist(ROWS), row_group_size=1)))


def folder_rows() -> Iterator[Row]:
    """Folders and other places."""

    def made(*names: str, content: bytes = text()) -> None:
        for name in names:
            Path("data", name).parent.mkdir(parents=True, exist_ok=True)
            Path("data", name).write_bytes(content)

    cases: dict[str, Callable[[], Any]] = {
        "empty": lambda: Path("data").mkdir(), "no split": lambda: made("other.jsonl"), "two kinds": lambda: made("train.jsonl", "train.csv"),
        "two of one name": lambda: made("train.jsonl", "train.jsonl.gz"), "a broken saved data set": lambda: made("state.json", "dataset_info.json", content=b"{}"),
        "a broken dictionary": lambda: made("dataset_dict.json", content=b"{"), "a dictionary without splits": lambda: made("dataset_dict.json", content=b'{"splits": ["train"]}'),
        "deep JSON in a saved data set": lambda: (made("state.json", content=b"[" * 100_000), made("dataset_info.json", content=b"{}")),
        "a pipe": lambda: (Path("data").mkdir(), os.mkfifo("data/train.jsonl")), "a link to nowhere": lambda: (Path("data").mkdir(), os.symlink("x", "data/train.jsonl")),
        "a loop": lambda: os.symlink("data", "data"), "a folder of that name": lambda: Path("data/train.jsonl").mkdir(parents=True),
        "a saved data set of odd Arrow": lambda: (made("state.json", content=b'{"_data_files": [{"filename": "x.arrow"}], "_fingerprint": "a"}'),
                                                  made("dataset_info.json", content=b"{}"), made("x.arrow", content=b"ARROW1")),
        "a manifest and shards": lambda: made("_manifest", "part-00000.parquet"),
        "one bad shard": lambda: (made("train-0-of-2.jsonl"), made("train-1-of-2.jsonl", content=b"x\n")),
    }  # fmt: skip
    for name, make in cases.items():
        yield Row(f"folder: {name}", privatize(data="data"), make=make)
    for place in ("nowhere.jsonl", "", ".", "/", "/dev/null", "/dev/zero", "/proc/self/mem", "owner.key", "owner.key.state", "release", "tiny.yaml",
                  "x" * 5000, "a\0b.jsonl", "a\udc80.jsonl", "data/typo.jsonl", "./no/such", "http://x/y", "s3://b/k", "hf://datasets/a/b"):  # fmt: skip
        yield Row(f"data: {place[:20]!r}", privatize(data=place))
    for name in ("pipe.jsonl", "pipe.parquet", "pipe.csv"):
        yield Row(f"data: {name}", privatize(data=name), make=lambda n=name: os.mkfifo(n))
    yield Row("data: its output inside it", privatize(data="data", output="data/out"), make=lambda: made("train.jsonl"),
              code=0, may_change=("data/out", *RELEASED))


def column_rows() -> Iterator[Row]:
    """Columns that are named."""
    named: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "a labeller that is a list": ({"labeler_column": "who"}, [PAIR | {"who": [1]}]),
        "a labeller that is a number with a point": ({"labeler_column": "who"}, [PAIR | {"who": 1.5}]),
        "a labeller that is a mapping": ({"labeler_column": "who"}, [PAIR | {"who": {"a": 1}}]),
        "a labeller that is true": ({"labeler_column": "who"}, [PAIR | {"who": True}]),
        "labellers missing in a row": ({"labeler_column": "who"}, [PAIR | {"who": "a"}, {"prompt": "q", "chosen": "c", "rejected": "r"}]),
        "an event that is a list": ({"event_column": "e"}, [PAIR | {"e": []}]),
        "a correction of nothing": ({"corrects_column": "e", "event_column": "f"}, [PAIR | {"e": "0" * 64, "f": "1"}]),
        "a correction that is no id": ({"corrects_column": "e", "event_column": "f"}, [PAIR | {"e": "x", "f": "1"}]),
        "a correction that is a number": ({"corrects_column": "e", "event_column": "f"}, [PAIR | {"e": 3, "f": "1"}]),
        "an extra column missing": ({"columns": "e"}, [PAIR]),
        "an extra column twice": ({"columns": "e"}, [PAIR | {"e": "x"}, b'{"prompt": "p", "chosen": "c", "rejected": "r", "e": 1, "e": 2}']),
        "a label of neither value": ({"label_column": "y", "labels": "A,B"}, [{"prompt": "p", "response_a": "a", "response_b": "b", "y": "C"}]),
        "a label that is null": ({"label_column": "y", "labels": "A,B"}, [{"prompt": "p", "response_a": "a", "response_b": "b", "y": None}]),
        "a label that is a list": ({"label_column": "y", "labels": "A,B"}, [{"prompt": "p", "response_a": "a", "response_b": "b", "y": ["A"]}]),
        "a label column twice": ({"label_column": "y", "labels": "A,B"}, [b'{"prompt": "p", "response_a": "a", "response_b": "b", "y": "A", "y": "B"}']),
        "a label column beside chosen": ({"label_column": "y", "labels": "A,B"}, [PAIR | {"y": "A"}]),
        "a label column that is a response": ({"label_column": "response_a", "labels": "A,B"}, [{"prompt": "p", "response_a": "A", "response_b": "b"}]),
        "budget per person without labellers": ({"budget": 3, "budget_per": "person"}, [PAIR]),
        "a cap without labellers": ({"max_events_per_person": 3}, [PAIR]),
    }  # fmt: skip
    for name, (options, content) in named.items():
        yield Row(f"columns: {name}", privatize(data="c.jsonl", **options), may_change=("owner.key.state/ledger.", "home/"),
                  make=lambda c=content: Path("c.jsonl").write_bytes(b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in c)))
    flipped = [{"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    yield Row("columns: labels that contradict a release", privatize(data="c.jsonl"), make=lambda: lines("c.jsonl", flipped),
              may_change=("owner.key.state/ledger.", "home/"), says="carry another label")
    yield Row("columns: a budget that is too small", privatize(budget=0.7), may_change=("owner.key.state/ledger.", "home/"), says="over the budget")


def label_filter_rows() -> Iterator[Row]:
    """`label-filter`: its options, its store, its lines."""
    given = {"epsilon": 1, "store": "draws.db"}

    def command(**changed: Any) -> list[str]:
        return option("label-filter", given, changed)

    for value in ("nan", "inf", "0", "-1", "x", ""):
        yield Row(f"label-filter --epsilon {value!r}", command(epsilon=value))
    for value in ("", "A", "A,A", "A,B,C", ","):
        yield Row(f"label-filter --labels {value!r}", command(labels=value))
    for name, value in (("id-field", "label"), ("label-field", "id"), ("keep", "id"), ("keep", "a,a"), ("keep", "error"), ("id-field", "line")):
        yield Row(f"label-filter --{name} {value}", command(**{name: value}), may_change=("draws.db",))
    for place in ("", ".", "/", "release", "good.jsonl", "good.jsonl/x", "no/where/x", "y" * 250, "x" * 5000, "/dev/null", "/dev/zero", "/proc/x", "a\0b"):
        yield Row(f"label-filter --store {place[:12]!r}", command(store=place))
    stores: dict[str, Callable[[], Any]] = {
        "empty": write("draws.db", b""), "bytes": write("draws.db", bytes(range(256)) * 40), "text": write("draws.db", b"SQLite format 3\0" + b"\0" * 4000),
        "a link to nowhere": lambda: os.symlink("x", "draws.db"), "a loop": lambda: os.symlink("draws.db", "draws.db"), "a pipe": lambda: os.mkfifo("draws.db", 0o600),
        "open to others": lambda: other_store(mode=0o644), "another database": lambda: other_store(),
    }  # fmt: skip
    for name, make in stores.items():
        yield Row(f"label-filter: a store that is {name}", command(), make=make)
    odd: list[bytes] = [
        b"hello", b"[]", b"3", b"null", b"{}", b'{"id": "a"}', b'{"label": 1}', b'{"id": "a", "label": 2}', b'{"id": "a", "label": "1"}',
        b'{"id": "a", "label": true}', b'{"id": "a", "label": 1.0}', b'{"id": "a", "label": null}', b'{"id": "a", "label": [1]}', b'{"id": "", "label": 1}',
        b'{"id": null, "label": 1}', b'{"id": true, "label": 1}', b'{"id": 1.5, "label": 1}', b'{"id": [], "label": 1}', b'{"id": "a", "label": 1, "label": -1}',
        b'{"id": "a", "id": "b", "label": 1}', b'{"id": "\\ud800", "label": 1}', b'{"id": "\xff", "label": 1}', b'{"id": "a", "label": 1', b"[" * 100_000,
        b'{"id": "a", "label": ' + b"9" * 10_000 + b"}", b'{"id": ' + b"9" * 10_000 + b', "label": 1}', b'{"id": "a", "label": NaN}', b"\0" * 1000, b'{"id": {"a": 1}, "label": 1}',
    ]  # fmt: skip
    for line in odd:
        yield Row(f"label-filter: {line[:40]!r}", command(), stdin=line + b"\n", may_change=("draws.db",), says='"error"')
    yield Row("label-filter: an endless line", command(), stdin=b"x" * (3 * MIB), may_change=("draws.db",))
    yield Row("label-filter: nothing", command(), code=0, may_change=("draws.db",))
    yield Row("label-filter: no last line break", command(), stdin=b'{"id": "a", "label": 1}', code=0, may_change=("draws.db",), says='"id": "a"')
    yield Row("label-filter: Windows line ends", command(), stdin=b'{"id": "a", "label": 1}\r\n', code=0, may_change=("draws.db",), says='"id": "a"')


def other_store(mode: int = 0o600) -> None:
    """An SQLite file of something else."""
    import sqlite3

    base = sqlite3.connect("draws.db")
    base.execute("CREATE TABLE x (y)")
    base.commit()
    base.close()
    Path("draws.db").chmod(mode)
