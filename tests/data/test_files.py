"""Kinds of files and folders that people have: each gives the rows that were written, or is refused in one line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.chunks import cut, read_chunk
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.layout import find_layout, read_preferences
from private_rlhf.data.sources import open_source, run_splits
from support.preference_files import explicit, triples

ROWS = [explicit(*row) for row in triples(40)]
PAIRS = [(row["prompt"], row["chosen"], row["rejected"]) for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
HASH = "b42a775f407cee45"


def arrow(path: Path, name: str, stream: bool = False) -> None:
    table = pa.Table.from_pylist(ROWS)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path / name, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def text(name: str, content: str, compress: Callable[[bytes], bytes] = bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(compress(content.encode())) and None


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def table() -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, ROWS[0])
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue()


FILES: dict[str, Callable[[Path], None]] = {
    "an array": text("f.json", json.dumps(ROWS)),
    "an indented array": text("f.json", "\n " + json.dumps(ROWS, indent=4) + "\n"),
    "an array after a mark": text("f.json", "\ufeff" + json.dumps(ROWS)),
    "an array, gzip": text("f.json.gz", json.dumps(ROWS), gzip.compress),
    "an array, zstd": text("f.json.zst", json.dumps(ROWS), zstd),
    "lines in .json": text("f.json", LINES),
    "lines, zstd": text("f.jsonl.zst", LINES, zstd),
    "lines, two zstd frames": text("f.jsonl.zst", LINES, lambda data: zstd(data[:500]) + zstd(data[500:])),
    "lines, .ndjson": text("f.ndjson", LINES),
    "CSV, gzip": text("f.csv.gz", table(), gzip.compress),
    "CSV, zstd": text("f.csv.zst", table(), zstd),
    "Arrow file": lambda path: arrow(path, "f.arrow"),
    "Arrow stream": lambda path: arrow(path, "f.arrow", stream=True),
    "Feather": lambda path: arrow(path, "f.feather"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_kind_of_file_gives_its_rows(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the row reader, and in the chunks that are released."""
    monkeypatch.setattr("private_rlhf.data.other_files._PIECE", 61)
    FILES[kind](tmp_path)
    (path,) = tmp_path.iterdir()
    assert [pair[:3] for pair in read_preferences(path)] == PAIRS
    parts = open_source(path)
    layout = find_layout(str(path), parts, Options())
    read = []
    for chunk in (chunk for part in parts for chunk in cut(part, layout.wanted, 100)):
        for each in read_chunk(chunk, layout):
            read += zip(*(texts.to_pylist() for texts in (each.prompt, each.first, each.second)), strict=True)
    assert read == PAIRS


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_cut_is_refused_or_gives_its_first_rows(tmp_path: Path, kind: str) -> None:
    """Never another text. Lines and CSV may be cut at an end of line."""
    FILES[kind](tmp_path)
    (path,) = tmp_path.iterdir()
    data, draw = path.read_bytes(), random.Random(1)
    for size in [0, 1, len(data) - 1, *(draw.randrange(len(data)) for _ in range(12))]:
        path.write_bytes(data[:size])
        try:
            read = [pair[:3] for pair in read_preferences(path)]
        except UserError:
            pass
        else:
            assert read == PAIRS[: len(read)]
            assert path.suffix in (".jsonl", ".ndjson", ".csv") or "lines" in kind or len(read) == len(PAIRS)


BAD_ARRAYS = {
    "[]": "holds no rows",
    "[1]": "is not a JSON object",
    '[{"a": 1},]': "must be one whole array",
    '[{"a": 1}] x': "must be one whole array",
    '[{"a": 1} {"a": 2}]': "must be one whole array",
    "[{'a': 1}]": "must be one whole array",
    "[": "must be one whole array",
    "[" * 100_000: "must be one whole array|is not a JSON object|is not valid JSON",
    '[{"prompt": "a", "prompt": "b", "chosen": "c", "rejected": "d"}]': "has column 'prompt' twice",
    '[{"prompt": "\\ud83d", "chosen": "c", "rejected": "d"}]': "lone surrogate",
}


@pytest.mark.parametrize("content", BAD_ARRAYS)
def test_a_broken_array_is_refused(tmp_path: Path, content: str) -> None:
    row = '{"prompt": "p", "chosen": "c", "rejected": "d"}'
    (tmp_path / "f.json").write_text(content.replace('{"a": 1}', row))
    with pytest.raises(UserError, match=BAD_ARRAYS[content]):
        list(read_preferences(tmp_path / "f.json"))


# --- folders ----------------------------------------------------------------------------------------------------------


def shards(folder: Path, *names: str, suffix: str = ".parquet") -> Path:
    """The rows in files of these names, in equal pieces."""
    step = len(ROWS) // len(names)
    for place, name in enumerate(names):
        path = folder / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ROWS[place * step : (place + 1) * step]
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SHARDS = ("train-00000-of-00002", "train-00001-of-00002")
FOLDERS: dict[str, tuple[str, ...]] = {
    "hub": tuple(f"data/{name}" for name in SHARDS),
    "hub, hashes": tuple(f"data/{name}-{HASH}" for name in SHARDS),
    "one configuration": tuple(f"default/{name}" for name in SHARDS),
    "converted by the hub": ("default/train/0000", "default/train/0001"),
    "a folder for the split": ("train/0000", "train/0001"),
    "Spark": ("part-00000-1f2e.c000.snappy", "part-00001-1f2e.c000.snappy"),
    "Dask": ("part.0", "part.1"),
    "DuckDB": ("data_0", "data_1"),
    "a folder of texts": ("helpful-base/train",),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_folder_gives_all_its_rows(tmp_path: Path, kind: str, suffix: str) -> None:
    shards(tmp_path, *FOLDERS[kind], suffix=suffix)
    for other in ("_SUCCESS", "README.md", ".part-00000.parquet.crc", "_metadata.json"):
        (tmp_path / other).write_text("x")
    assert [pair[:3] for pair in read_preferences(tmp_path)] == PAIRS
    whole = kind in ("Spark", "Dask", "DuckDB")
    assert run_splits(tmp_path) == ((None,) if whole else ("train", "eval"))


def test_a_split_of_any_name(tmp_path: Path) -> None:
    """As the recipe key data.split and --split name it."""
    shards(tmp_path, "data/train_sft-00000-of-00001", "data/train_prefs-00000-of-00001")
    assert [pair[:3] for pair in read_preferences(tmp_path, "train_prefs")] == PAIRS[len(PAIRS) // 2 :]
    assert run_splits(tmp_path, "train_prefs") == ("train_prefs",)
    with pytest.raises(UserError, match=r"found data/train_prefs-0.*--split, or data\.split"):
        read_preferences(tmp_path)


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a shard is missing": (("train-00000-of-00003", "train-00002-of-00003"), "has 2 of the 3 shards"),
    "two uploads": ((f"train-00000-of-00001-{HASH}", f"train-00000-of-00001-{HASH[::-1]}"), "several files"),
    "shards of two counts": (("train-00000-of-00001", "train-00001-of-00002"), "shards|several files"),
    "one file beside its shards": (("train", "train-00000-of-00001"), "several files"),
    "two configurations": (("helpful/train", "harmless/train"), r"several folders \(harmless, helpful\); give one"),
    "a file that is no part": (("part-00000", "other"), r"found other\.parquet, part-00000\.parquet"),
    "readable, two levels down": (("a/b/train",), "found nothing readable"),
    "another split in a folder": (("a/test",), r"found a/test\.parquet"),
    "a configuration below files": (("mine", "old/train"), r"found mine\.parquet"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_with_a_choice_to_make_is_refused(tmp_path: Path, kind: str) -> None:
    names, message = REFUSED[kind]
    shards(tmp_path, *names)
    with pytest.raises(UserError, match=message):
        read_preferences(tmp_path)
