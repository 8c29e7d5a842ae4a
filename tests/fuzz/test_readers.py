"""Every reader of a file on files that nearly are one: a result, or one line of UserError, soon and in little memory.

A loop in the manner of atheris, without its compiler: mutants of a corpus are read, and one that ends in a way that was
not seen before (another message, numbers and quoted parts apart) joins the corpus.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.audit.canaries import plant, read_truth
from private_rlhf.commands.ledger_command import as_text
from private_rlhf.core.errors import UserError, one_line
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.chunks import cut, read_chunk
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_demonstrations, read_prompts
from private_rlhf.data.layout import find_layout
from private_rlhf.data.release import read_release
from private_rlhf.data.sources import open_source
from private_rlhf.labelling.questions import read_answers, read_questions
from private_rlhf.labelling.tasks import read_tasks
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Ledger
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe

pytestmark = pytest.mark.usefixtures("quick_disk")

ROOT = Path(__file__).resolve().parents[2]
SECONDS, MEMORY_MIB = 5.0, 400
ROWS = [{"prompt": f"prompt {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(6)]
TOKENS = (b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b".inf", b"1" * 400, b"{}", b"[]", b'""', b"[" * 300,
          b"{" * 99, b"\x00", b"\xff\xfe", b'"\\ud800"', b"\r\n", b"\n\n", b",", b":", b"&a [*a, *a]",
          b"!!python/object:x", b"../", b"\xe2\x80\xae", b'"id": "x"', b"label", b"epsilon", b"=",
          b"\x1f\x8b")  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A reader. make: writes whole input into a folder. file: the one that is mutated. read: of the folder."""

    name: str
    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    mode: int = 0o600


def jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def raw(folder: Path) -> object:
    (path,) = folder.glob("raw.*")
    parts, options = open_source(path), Options()
    layout = find_layout(str(path), parts, options)
    return [len(some.preferred) for part in parts for chunk in cut(part, layout.wanted, 1 << 20)
            for some in read_chunk(chunk, layout)]  # fmt: skip


def release(folder: Path) -> None:
    key = keygen(folder / "owner.key")
    (folder / "raw.jsonl").write_text(jsonl([dict(row) for row in ROWS]))
    privatize_source(Request(str(folder / "raw.jsonl"), folder / "release", 1.0, key, source="own"))


def canaries(folder: Path) -> None:
    (folder / "raw.jsonl").write_text(jsonl([dict(row) for row in ROWS]))
    keygen(folder / "owner.key")
    plant(str(folder / "raw.jsonl"), folder / "with.jsonl", folder / "owner.key.canaries.jsonl", 3)


QUESTION = {"id": "1", "prompt": "p", "response_a": "a", "response_b": "b"}
TASK = [{"id": 1, "data": {"prompt": "p", "one": "a", "two": "b"}}]


def targets() -> Iterator[Target]:
    rows = [dict(row) for row in ROWS]
    text = jsonl(rows)
    csv = "prompt,chosen,rejected\n" + "".join(f'"{r["prompt"]}",{r["chosen"]},{r["rejected"]}\n' for r in ROWS)
    table = pa.Table.from_pylist(rows)
    yield Target("recipe", lambda d: shutil.copy(ROOT / "configs" / "demo.yaml", d / "r.yaml"), "r.yaml",
                 lambda d: load_recipe(Recipe, d / "r.yaml"))  # fmt: skip
    yield Target("jsonl", lambda d: (d / "raw.jsonl").write_text(text), "raw.jsonl", raw)
    yield Target("gzip", lambda d: (d / "raw.jsonl.gz").write_bytes(gzip.compress(text.encode())), "raw.jsonl.gz", raw)
    yield Target("csv", lambda d: (d / "raw.csv").write_text(csv), "raw.csv", raw)
    yield Target("parquet", lambda d: pq.write_table(table, d / "raw.parquet"), "raw.parquet", raw)
    yield Target("prompts", lambda d: (d / "p.jsonl").write_text(text), "p.jsonl",
                 lambda d: list(read_prompts(d / "p.jsonl")))  # fmt: skip
    answers = jsonl([{"prompt": "p", "response": "r"}] * 4)
    yield Target("demonstrations", lambda d: (d / "d.jsonl").write_text(answers), "d.jsonl",
                 lambda d: list(read_demonstrations(d / "d.jsonl")))  # fmt: skip
    for part in ("_manifest", "_signature", "part-00000.parquet"):
        yield Target(f"release, {part}", release, f"release/{part}",
                     lambda d: read_release(d / "release").check_rows())  # fmt: skip
    yield Target("key", release, "owner.key", lambda d: load_key(d / "owner.key"))
    yield Target("ledger", release, "owner.key.state/ledger.json",
                 lambda d: as_text(Ledger(load_key(d / "owner.key")).show()))  # fmt: skip
    yield Target("questions", lambda d: (d / "q.jsonl").write_text(jsonl([QUESTION])), "q.jsonl",
                 lambda d: read_questions(d / "q.jsonl"))  # fmt: skip
    yield Target("answers", lambda d: (d / "a.jsonl").write_text('{"id": "1", "label": 1}\n'), "a.jsonl",
                 lambda d: read_answers(d / "a.jsonl", {"1", "2"}))  # fmt: skip
    yield Target("tasks", lambda d: (d / "t.json").write_text(json.dumps(TASK)), "t.json",
                 lambda d: read_tasks(d / "t.json", ("prompt", "one", "two")))  # fmt: skip
    yield Target("truth of canaries", canaries, "owner.key.canaries.jsonl",
                 lambda d: read_truth(d / "owner.key.canaries.jsonl"))  # fmt: skip
    yield Target("manifest of a stage", lambda d: ((d / "sft").mkdir(), (d / "sft/manifest.json").write_text("{}")),
                 "sft/manifest.json", lambda d: RunDir(d).require("sft"))  # fmt: skip


TARGETS = {target.name: target for target in targets()}


def mutate(data: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """A few small changes."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        place = dice.randrange(len(changed) + 1)
        end = min(len(changed), place + dice.choice((1, 2, 4, 16, 64)))
        kind = dice.randrange(7)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            changed[place:place] = dice.choice(TOKENS)
        elif kind == 2:
            changed[place:end] = dice.choice(TOKENS)
        elif kind == 3:
            del changed[place:end]
        elif kind == 4:
            changed[place:place] = changed[place:end] * dice.choice((1, 2, 50))
        elif kind == 5:
            del changed[place:]
        else:
            other = dice.choice(others)
            changed[place:end] = other[dice.randrange(len(other) + 1) :][:200]
    return bytes(changed)


class Late(BaseException):
    """Raised by the alarm."""


@contextmanager
def alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(target: Target, folder: Path, data: bytes) -> str:
    """How the reader ends on these bytes. Fails on anything but a result and one line of UserError."""
    path = folder / target.file
    path.write_bytes(data)
    path.chmod(target.mode)
    try:
        with alarm():
            target.read(folder)
    except UserError as error:
        return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "#", one_line(str(error), 300))
    except BaseException as error:
        where = [str(step) for step in traceback.extract_tb(error.__traceback__)[-4:]]
        pytest.fail(f"{target.name}: {type(error).__name__} at {where}: {error}\nof {data[:3000]!r}", pytrace=False)
    return "read"


def prepared(target: Target, folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    target.make(folder)
    return (folder / target.file).read_bytes()


def explore(target: Target, folder: Path, count: int, seconds: float, seed: int = 0) -> tuple[int, set[str]]:
    """Reads at most `count` mutants; returns how many, and the ways in which they ended."""
    whole = prepared(target, folder)
    corpus, dice, began = [whole], random.Random(f"{target.name} {seed}"), time.monotonic()
    seen = {outcome(target, folder, whole)}
    assert seen == {"read"}
    peak, number = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    while number < count and time.monotonic() - began < seconds:
        number += 1
        data = mutate(dice.choice(corpus), dice, corpus)[: 1 << 20]
        ended = outcome(target, folder, data)
        if ended not in seen:
            seen.add(ended)
            corpus.append(data)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) >> 10 < MEMORY_MIB
    return number, seen


@pytest.mark.parametrize("name", TARGETS)
def test_mutants_of_a_whole_file(name: str, tmp_path: Path) -> None:
    number, seen = explore(TARGETS[name], tmp_path / "box", 1000, 60.0)
    assert number == 1000
    assert len(seen) > 1  # some were refused


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutants(name: str, tmp_path: Path) -> None:
    """PRIVATE_RLHF_FUZZ_SECONDS of each reader, 20 unless told, from a seed of the time."""
    seed = time.time_ns()
    seconds = float(os.environ.get("PRIVATE_RLHF_FUZZ_SECONDS", "20"))
    number, seen = explore(TARGETS[name], tmp_path / "box", 10**9, seconds, seed)
    print(f"{name}: {number} mutants of seed {seed} ended in {len(seen)} ways")


@pytest.mark.parametrize("name", [name for name in TARGETS if not name.startswith(("release", "ledger", "truth"))])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(name: str, tmp_path: Path, data: bytes) -> None:
    target, folder = TARGETS[name], tmp_path / "box"
    if not folder.exists():
        prepared(target, folder)
    outcome(target, folder, data)


def test_a_fault_is_found(tmp_path: Path) -> None:
    """A reader that forgets one case is caught by the loop."""

    def read(folder: Path) -> object:
        text = (folder / "x").read_text(encoding="utf-8", errors="replace")
        if not text:
            raise UserError("empty")
        return text.split(":")[1]

    target = Target("planted", lambda folder: (folder / "x").write_text("a: b"), "x", read)
    with pytest.raises(pytest.fail.Exception, match="IndexError"):
        explore(target, tmp_path / "box", 2000, 60.0)
