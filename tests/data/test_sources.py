"""Opening sources: folders, splits, and files that are missing, truncated, or not what their name says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_prompts
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.source_summary import summary_of
from private_rlhf.data.sources import source_chunks
from private_rlhf.privacy.keys import PrivacyKey
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.privacy.records import RawPair
from support.plain_release import release_pairs
from support.preference_files import (
    assistant,
    explicit,
    triples,
    write_csv,
    write_jsonl,
    write_jsonl_gz,
    write_parquet,
    write_saved,
    write_shards,
)

ROWS = [explicit(*row) for row in triples(40)]
LINE = '{"prompt": "p", "chosen": "a", "rejected": "b"}\n'


def fails(source: Path | str, message: str, split: str | None = None) -> None:
    with pytest.raises(UserError, match=message) as caught:
        list(read_preferences(source, split))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_no_such_file_and_unknown_kinds(tmp_path: Path) -> None:
    fails(tmp_path / "none.jsonl", r"none\.jsonl: no such file or folder; check the path$")
    fails("none.jsonl", r"^none\.jsonl: no such file or folder")
    fails(str(tmp_path / "none"), "no such file or folder")
    with pytest.raises(UserError, match="no such file"):  # before the first row is asked for
        read_preferences(tmp_path / "none.jsonl")
    (tmp_path / "x.txt").write_text("x")
    fails(tmp_path / "x.txt", r"x\.txt: unknown kind of file; use one of \.jsonl, \.jsonl\.gz")


def test_splits_of_a_folder(tmp_path: Path) -> None:
    nothing = r"has no split 'train' \(looked for train\.\*; found nothing readable\); name a file or another split"
    fails(tmp_path, nothing)
    (tmp_path / "README.md").write_text("x")
    write_jsonl(tmp_path, ROWS)
    (tmp_path / "validation.jsonl").write_text(LINE * 2)
    (tmp_path / "test.jsonl").write_text(LINE * 3)
    for split, rows in ((None, len(ROWS)), ("train", len(ROWS)), ("eval", 2), ("validation", 2), ("test", 3)):
        assert len(list(read_preferences(tmp_path, split))) == rows
    fails(
        tmp_path,
        r"has no split 'dev' \(looked for dev\.\*; found test\.jsonl, train\.jsonl, validation\.jsonl\)",
        "dev",
    )
    fails(
        tmp_path / "train.jsonl", r"is one file and has no split 'eval'; give a folder that holds eval\.jsonl", "eval"
    )
    write_parquet(tmp_path, ROWS)
    fails(tmp_path, "has several files for the split 'train'; give the file itself")


def test_saved_data_sets(tmp_path: Path) -> None:
    saved = write_saved(tmp_path, ROWS)
    fails(saved, r"has no split 'eval' .*found train\)", "eval")
    assert len(list(read_preferences(saved / "train"))) == len(ROWS)
    before = {path.name for path in (saved / "train").iterdir()}
    assert not any(name.startswith("cache") for name in before)
    (arrow,) = (saved / "train").glob("*.arrow")
    arrow.unlink()
    fails(saved, "is not a whole saved data set; save it again with `save_to_disk`")


def test_shards_are_read_in_order_and_errors_name_theirs(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, ROWS)
    assert [pair.prompt for pair in read_preferences(folder)] == [row["prompt"] for row in ROWS]
    shard = folder / "data" / "train-00001-of-00002.parquet"
    shard.write_bytes(shard.read_bytes()[:-20])
    fails(folder, r"train-00001-of-00002\.parquet: is not a whole Parquet file \(truncated or damaged\); copy it again")


def test_truncated_gzip(tmp_path: Path) -> None:
    path = write_jsonl_gz(tmp_path, ROWS)
    whole = path.read_bytes()
    for broken in (whole[:-4], whole[: len(whole) // 2], b"no gzip at all", whole[:30] + b"\0\0\0\0" + whole[34:]):
        path.write_bytes(broken)
        fails(path, r"train\.jsonl\.gz: is not a whole gzip file \(truncated or damaged\); copy it again$")


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (write_jsonl_gz, "train.jsonl", r"is a gzip file; end its name with \.gz$"),
        (write_parquet, "train.csv", r"is a Parquet file; end its name with \.parquet$"),
        (None, "train.jsonl.zst", None),
        (None, "train.jsonl", r"is a zstd file; end its name with \.zst$"),
        (None, "train.parquet", "is a zstd file"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, write: Any, name: str, message: str | None) -> None:
    path = tmp_path / name
    path.write_bytes(
        write(tmp_path, ROWS).read_bytes() if write else pa.compress(LINE.encode(), codec="zstd", asbytes=True)
    )
    if message is None:
        assert len(list(read_preferences(path))) == 1
    else:
        fails(path, message)


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.parquet", "train.arrow"])
def test_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    fails(tmp_path / name, r"is a pointer of Git LFS and not the file; fetch the file with `git lfs pull`$")


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, ROWS)
    whole = path.read_bytes()
    for content in (b"hello", b"", whole[:4] + bytes(196) + whole[200:]):
        path.write_bytes(content)
        fails(path, "is not a whole Parquet file")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    for name, prefix in (("train.jsonl", LINE.encode()), ("train.csv", b"prompt,chosen,rejected\n")):
        path = tmp_path / name
        path.write_bytes(prefix + b"caf\xe9,a,b\n")
        fails(path, rf"{name}, line 2: is not UTF-8 text; convert the file to UTF-8$")


@pytest.mark.parametrize("bad", ["{", "[1]", "3", '{"a": 1} x', "[" * 100_000])
def test_broken_json_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(LINE + "\n  \n" + bad + "\n")
    fails(path, r"train\.jsonl, line 4: is not (valid JSON|a JSON object); each line must be one")


def test_lone_surrogate_escape(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(LINE + LINE.replace('"a"', '"\\ud83d\\ude00"') + LINE.replace('"a"', '"\\ud83d"'))
    fails(path, r"line 3: holds a lone surrogate, which is not valid Unicode; repair or remove the row")


@pytest.mark.parametrize("form", ["messages", "kaggle", "calls"])
def test_a_lone_surrogate_in_a_written_list(tmp_path: Path, form: str) -> None:
    """The Kaggle table of the arena holds some; a look at the source names the row too."""
    if form == "kaggle":
        hot = {"winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}
        row = {"prompt": '["q"]', "response_a": '["\\ud83d"]', "response_b": '["b"]', **hot}
    elif form == "calls":
        called = {"role": "assistant", "content": "", "tool_calls": json.dumps([{"id": "\ud83d"}])}
        row = {"prompt": "q", "chosen": json.dumps([called]), "rejected": json.dumps(assistant("b"))}
    else:
        row = {"prompt": "q", **{name: json.dumps(assistant(f"\ud83d{name}")) for name in ("chosen", "rejected")}}
    path = write_csv(tmp_path, [row])
    fails(path, r"row 1: holds a lone surrogate, which is not valid Unicode; repair or remove the row")
    with pytest.raises(UserError, match="row 1: holds a lone surrogate"):
        summary_of(str(path), None, Options(message_keys=("tool_calls",)))


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE.replace("\n", "\r\n").encode() + LINE.strip().encode())
    assert [pair.row for pair in read_preferences(path)] == [1, 2]
    table = tmp_path / "train.csv"
    table.write_bytes(b'\xef\xbb\xbfprompt,chosen,rejected\r\n"p\r\nq",a,"b, ""c"""\r\n')
    assert [pair[:3] for pair in read_preferences(table)] == [("p\r\nq", "a", 'b, "c"')]


def test_bad_csv(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,chosen,rejected\np,a,b\np,a\n")
    fails(path, r"train\.csv, row 2: is not valid CSV, has another number of fields than the header \(3\), .*; quote")
    path.write_text('prompt,chosen,rejected\np,a,"b\n')
    fails(path, r"train\.csv, row 1: is not valid CSV, .*or has a field of over 131072 characters")
    path.write_text("prompt,chosen,rejected\np,a," + "b" * 140_000 + "\n")
    fails(path, r"row 1: is not valid CSV, .*or has a field of over 131072 characters; .*use JSONL$")


@pytest.mark.parametrize("before", ["sep=;\r\n", "\r\n", "\n", '"p";"a\nb";"c"\r\n', f"p;{'a' * 201};c\r\n"])
def test_a_table_that_does_not_begin_with_its_header(tmp_path: Path, before: str) -> None:
    """Spreadsheets write which mark they use into a line of its own; texts of a first row are never shown."""
    path = tmp_path / "train.csv"
    path.write_text(f"{before}prompt;chosen;rejected\r\np;a;b\r\n", encoding="utf-8-sig", newline="")
    fails(path, r"train\.csv: does not begin with a line of names of columns; let it stand first$")


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.csv"])
def test_empty_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for content in (b"", b"prompt,chosen,rejected\n" if name.endswith("csv") else b"\n"):
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        fails(path, "holds no rows; give a data set with at least one$")


def test_a_released_bundle_is_no_raw_input_but_gives_its_prompts(tmp_path: Path) -> None:
    key, mechanism = PrivacyKey(bytes(32)), RandomizedResponse(1.0)
    release_pairs([RawPair(f"p{i}", "a", "b", i) for i in range(9)], tmp_path / "out", mechanism, key)
    fails(tmp_path / "out", "is a released bundle, whose labels are private already; give the raw preferences")
    assert sorted(read_prompts(tmp_path / "out")) == [f"p{i}" for i in range(9)]


def test_source_chunks_tell_inputs_apart(tmp_path: Path) -> None:
    key = PrivacyKey(bytes(32))
    first = key.keyed_digest(source_chunks(write_jsonl(tmp_path, ROWS)))
    assert first == key.keyed_digest(source_chunks(tmp_path))
    assert first != key.keyed_digest(source_chunks(write_jsonl(tmp_path, ROWS[1:])))
    (tmp_path / "shards").mkdir()
    folder = write_shards(tmp_path / "shards", ROWS)
    assert len({key.keyed_digest(source_chunks(path)) for path in (tmp_path, folder)}) == 2


def test_hub_ids_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network in tests: a stand-in for the two functions of `datasets`; streaming leaves no raw cache."""
    import datasets

    def load(name: str, split: str, streaming: bool) -> datasets.IterableDataset:
        assert (name, split, streaming) == ("owner/name", "test", True)
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(list(read_preferences("owner/name", split="eval"))) == len(ROWS)
    fails("owner/name", r"^owner/name: has no split 'odd' .*found train, test\)", "odd")

    def offline(name: str) -> list[str]:
        raise ConnectionError("x")

    monkeypatch.setattr(datasets, "get_dataset_split_names", offline)
    fails("owner/name", r"^owner/name: is no file or folder here, and the hub does not give it \(ConnectionError\)")
