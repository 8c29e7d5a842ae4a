"""Writers of one small preference set in every format that `read_preferences` accepts."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def user(text: str) -> list[dict[str, str]]:
    """A one-message list."""
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    """A one-message list."""
    return [{"role": "assistant", "content": text}]


def triples(n: int = 24) -> list[tuple[str, str, str]]:
    """(prompt, chosen, rejected), with copies in both orders, identical and empty responses, and odd characters."""
    made = [(f"Say {i}, please: ", f'yes {i} "quoted", \u2028 é', f"no {i}\n\nnever") for i in range(n)]
    made.append(made[0])
    made.append((made[1][0], made[1][2], made[1][1]))
    made.append(("Same?", "same", "same"))
    made.append(("Empty?", "", "something"))
    return made


def explicit(prompt: str, chosen: str, rejected: str) -> Row:
    """TRL explicit standard."""
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def implicit(prompt: str, chosen: str, rejected: str) -> Row:
    """TRL implicit standard."""
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}


def explicit_messages(prompt: str, chosen: str, rejected: str) -> Row:
    """TRL explicit conversational."""
    return {"prompt": user(prompt), "chosen": assistant(chosen), "rejected": assistant(rejected)}


def implicit_messages(prompt: str, chosen: str, rejected: str) -> Row:
    """TRL implicit conversational."""
    return {"chosen": user(prompt) + assistant(chosen), "rejected": user(prompt) + assistant(rejected)}


def mixed_messages(prompt: str, chosen: str, rejected: str) -> Row:
    """A prompt string beside whole conversations, as UltraFeedback has it."""
    return {"prompt": prompt} | implicit_messages(prompt, chosen, rejected)


def dialogue(prompt: str, chosen: str, rejected: str) -> Row:
    """Anthropic's files, with an earlier turn."""
    start = f"\n\nHuman: Hello\n\nAssistant: Hi, what is it?\n\nHuman: {prompt}\n\nAssistant: "
    return {"chosen": start + chosen, "rejected": start + rejected}


STYLES: dict[str, Callable[[str, str, str], Row]] = {
    "explicit": explicit,
    "implicit": implicit,
    "explicit_messages": explicit_messages,
    "implicit_messages": implicit_messages,
    "mixed_messages": mixed_messages,
    "dialogue": dialogue,
}


def write_jsonl(folder: Path, rows: list[Row]) -> Path:
    """train.jsonl, returned as a file."""
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_jsonl_gz(folder: Path, rows: list[Row]) -> Path:
    """train.jsonl.gz with escapes instead of UTF-8."""
    path = folder / "train.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\r\n" for row in rows)
    return path


def write_parquet(folder: Path, rows: list[Row]) -> Path:
    """train.parquet."""
    path = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_csv(folder: Path, rows: list[Row]) -> Path:
    """train.csv (strings only)."""
    path = folder / "train.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_shards(folder: Path, rows: list[Row]) -> Path:
    """data/train-0000i-of-00002.parquet, as the hub lays files out; returned as the folder."""
    (folder / "data").mkdir()
    middle = len(rows) // 2
    for i, part in enumerate((rows[:middle], rows[middle:])):
        pq.write_table(pa.Table.from_pylist(part), folder / "data" / f"train-{i:05d}-of-00002.parquet")
    return folder


def write_saved(folder: Path, rows: list[Row]) -> Path:
    """A `DatasetDict.save_to_disk` folder with the split train."""
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(folder / "saved"))
    return folder / "saved"


WRITERS: dict[str, Callable[[Path, list[Row]], Path]] = {
    "jsonl": write_jsonl,
    "jsonl_gz": write_jsonl_gz,
    "parquet": write_parquet,
    "csv": write_csv,
    "shards": write_shards,
    "saved": write_saved,
}
CASES = [(s, w) for s in STYLES for w in WRITERS if not (w == "csv" and "messages" in s)]
