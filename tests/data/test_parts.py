"""A release in parts: the bytes of one process, whatever is killed or run twice; what does not fit is refused."""

from __future__ import annotations

import filecmp
import json
import multiprocessing
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.core import code
from private_rlhf.core.errors import UserError
from private_rlhf.data import curate, engine, release
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.privacy.keys import Lock, load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from support import killed_release
from support.other_machines import copy_key, move_to
from support.plain_release import contents

ROWS, PER_SHARD = 2000, 128


def rows_of(end: int, start: int = 0) -> list[dict[str, Any]]:
    """Of ten people; every seventh row is a copy of a far earlier one, with the other label."""
    rows = []
    for i in range(start, end):
        text = i // 2 if i % 7 == 0 else i
        first, second = (f"yes {text}", f"no {text}")[:: -1 if i % 7 == 0 else 1]
        rows.append({"prompt": f"Say {text}.", "chosen": first, "rejected": second, "who": f"w{text % 10}"})
    return rows


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards and several groups of events."""
    monkeypatch.setattr(curate, "ROWS_PER_SHARD", PER_SHARD)
    monkeypatch.setattr(engine, "ROWS_IN_MEMORY", 2 * PER_SHARD)


@pytest.fixture
def request_of(tmp_path: Path, key: Path) -> Request:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(ROWS)))
    options = Options(labeler_column="who")
    return Request(str(data), tmp_path / "out", 1.0, key, options=options, chunk_bytes=8000)


def at(request: Request, name: str, **more: Any) -> Request:
    return replace(request, output=request.output.with_name(name), **more)


def in_parts(request: Request, maps: int, reduces: int) -> str:
    for number in range(maps, 0, -1):
        release_step(request, f"map:{number}/{maps}")
    for number in range(1, reduces + 1):
        release_step(request, f"reduce:{number}/{reduces}")
    return release_step(request, "finish")


def release_step(request: Request, step: str) -> str:
    return curate.release_step(replace(request, step=step))


def entries(request: Request) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = Ledger.open(load_key(request.key_file)).show()["releases"]
    return entries


@pytest.mark.parametrize(("maps", "reduces"), [(1, 1), (3, 2), (7, 64)])
def test_parts_give_the_bytes_of_one_process(request_of: Request, maps: int, reduces: int) -> None:
    parts, one = at(request_of, "parts"), at(request_of, "one")
    line = in_parts(parts, maps, reduces)
    assert [entry["status"] for entry in entries(parts)] == ["released"]
    assert privatize_source(one) == line.replace("/parts ", "/one ")
    assert contents(parts.output) == contents(one.output)
    assert len(contents(one.output)) == 16 + 2
    assert len(entries(parts)) == 1
    left = {path.name for path in request_of.output.parent.iterdir()}
    assert left == {"train.jsonl", "owner.key", "owner.key.state", "parts", "one"}  # and so no true label


def test_nothing_is_spent_or_seen_before_the_end(request_of: Request) -> None:
    limited = replace(request_of, budget=Budget(0.5, "event"))
    release_step(limited, "map:1/1")
    release_step(limited, "reduce:1/1")
    work = limited.output.with_name(".out.work")
    assert work.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*work.glob("*.run"), *work.glob("events/*")])
    assert not entries(limited)
    with pytest.raises(UserError, match=r"over the budget of 0\.5 per event"):
        release_step(limited, "finish")
    assert not work.exists()
    assert not limited.output.exists()
    assert not entries(limited)


@pytest.mark.parametrize(("cap", "shards"), [(None, 8), (50, 4)])
def test_many_copies_and_a_cap_leave_fewer_shards(
    request_of: Request, tmp_path: Path, cap: int | None, shards: int
) -> None:
    """The last step draws them itself: the tasks could not know how many rows would stay."""
    data = Path(request_of.data)
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:1100] * 2))
    capped = replace(request_of, max_events=cap)
    (tmp_path / "copy").mkdir()
    other = copy_key(capped.key_file, tmp_path / "copy" / "owner.key")
    in_parts(capped, 3, 3)
    assert len(contents(capped.output)) == shards + 2
    move_to(tmp_path / "another machine")
    privatize_source(at(capped, "one", key_file=other))
    assert contents(capped.output) == contents(tmp_path / "one")


def test_killed_tasks_are_run_again(request_of: Request) -> None:
    parts, one = at(request_of, "parts"), at(request_of, "one")

    def kill(step: str, place: str, calls: int) -> None:
        given = (place, str(calls), parts.data, str(parts.output), str(parts.key_file), step)
        done = subprocess.run([sys.executable, killed_release.__file__, *given], check=False)
        assert done.returncode == -signal.SIGKILL

    kill("map:1/2", "write_run", 3)
    for number in (1, 2):
        release_step(parts, f"map:{number}/2")
    kill("reduce:1/2", "write_shard", 2)
    for number in (1, 2):
        release_step(parts, f"reduce:{number}/2")
    kill("finish", "publish", 0)
    assert not parts.output.exists()
    release_step(parts, "finish")
    privatize_source(one)
    assert contents(parts.output) == contents(one.output)
    assert [entry["status"] for entry in entries(parts)] == ["released"]


def test_a_last_step_that_died_after_publishing_is_run_again(
    request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(curate.Reservation, "commit", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            in_parts(request_of, 2, 2)
    before = contents(request_of.output)
    with pytest.raises(UserError, match="holds something already"):
        release_step(request_of, "map:1/2")
    release_step(request_of, "finish")
    assert contents(request_of.output) == before
    assert [entry["status"] for entry in entries(request_of)] == ["released"]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_same_task_twice_at_the_same_time(request_of: Request) -> None:
    with ThreadPoolExecutor(4) as threads:
        for step in ("map", "reduce"):
            list(threads.map(partial(release_step, request_of), [f"{step}:{number}/2" for number in (1, 1, 2, 2)]))
    release_step(request_of, "finish")
    privatize_source(at(request_of, "one"))
    assert contents(request_of.output) == contents(request_of.output.with_name("one"))


def test_what_is_missing_is_refused_and_what_is_there_stays(request_of: Request) -> None:
    with pytest.raises(UserError, match="out: run the map steps first: it has no parts"):
        release_step(request_of, "finish")
    release_step(request_of, "map:1/2")
    with pytest.raises(UserError, match="of 20 chunks are not read: run the map steps again"):
        release_step(request_of, "reduce:1/1")
    with pytest.raises(UserError, match="of 20 chunks are not read: run the map steps again"):
        release_step(request_of, "finish")
    release_step(request_of, "map:2/2")
    release_step(request_of, "reduce:1/3")
    with pytest.raises(UserError, match="10 of 16 shards are not drawn: run the reduce steps again"):
        release_step(request_of, "finish")
    for number in (2, 3):
        release_step(request_of, f"reduce:{number}/3")
    release_step(request_of, "finish")
    with pytest.raises(UserError, match="holds something already, and takes no parts"):
        release_step(request_of, "finish")
    assert len(entries(request_of)) == 1


def test_parts_of_something_else_are_refused(request_of: Request) -> None:
    release_step(request_of, "map:1/2")
    work = request_of.output.with_name(".out.work")
    runs = contents(work)
    with pytest.raises(UserError, match="holds parts whose epsilon differ: give"):
        release_step(replace(request_of, epsilon=2.0), "map:2/2")
    with pytest.raises(UserError, match="holds parts whose options differ: give"):
        release_step(replace(request_of, options=Options()), "map:2/2")
    for stated in (replace(request_of, budget=Budget(9.0, "event")), replace(request_of, max_events=30)):
        with pytest.raises(UserError, match=r"holds parts whose (budget|cap) differ: give"):
            release_step(stated, "finish")
    with pytest.raises(UserError, match="is being made in parts; end it with --step finish, or remove"):
        privatize_source(request_of)
    lock = Lock(work / "lock")
    assert lock.acquire(0.0, shared=True)
    with pytest.raises(UserError, match="another run is writing it"):
        release_step(request_of, "finish")
    lock.release()
    with Path(request_of.data).open("a") as file:
        file.write(json.dumps(rows_of(1)[0]) + "\n")
    for late in ("map:2/2", "finish"):
        with pytest.raises(UserError, match="holds parts whose source differ: give what they were made with"):
            release_step(request_of, late)
    assert contents(work) == runs


def test_parts_of_another_version_are_refused(request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the noise differs: the tasks would draw at other probabilities than the manifest states."""
    release_step(request_of, "map:1/1")
    digest = code._digest
    monkeypatch.setattr(code, "_digest", lambda path: "other" if path.name == "noise.py" else digest(path))
    with pytest.raises(UserError, match="holds parts whose code differ: give what they were made with"):
        release_step(request_of, "reduce:1/1")


def test_the_command_takes_the_steps(request_of: Request, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(request_of.output)
    given = ("--data", request_of.data, "--output", out, "--key", str(request_of.key_file), "--labeler-column", "who")
    command = ["privatize", *given, "--epsilon", "1"]
    assert [main([*command, "--step", step]) for step in ("map:1/1", "reduce:1/1", "finish")] == [0, 0, 0]
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == [f"{out}:", f"{out}:", "1857"]
    assert main([*command, "--step", "finish"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("step", ["map", "map:0/3", "reduce:4/3", "map:1", "map:1/0", "map:a/b", "reduce:1/2/3", ""])
def test_a_step_is_one_of_several(request_of: Request, step: str) -> None:
    with pytest.raises(UserError, match=r"--step must be map:i/N, reduce:j/M or finish with i from 1 to N, got"):
        release_step(request_of, step)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_000_000, 10_000_000])
def test_many_rows(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Real shards and chunks; the tasks run by two processes at a time."""
    monkeypatch.setattr(curate, "ROWS_PER_SHARD", release.ROWS_PER_SHARD)
    monkeypatch.setattr(engine, "ROWS_IN_MEMORY", 131_072)
    data = tmp_path / "train.jsonl"
    with data.open("w") as file:
        for start in range(0, count, 1000):
            rows = rows_of(start + 1000, start)
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    one = Request(str(data), tmp_path / "one", 1.0, key, options=Options(labeler_column="who"))
    parts = at(one, "parts")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as tasks:
        for step in ("map", "reduce"):
            list(tasks.map(partial(release_step, replace(parts, workers=1)), [f"{step}:{i}/7" for i in range(1, 8)]))
    release_step(parts, "finish")
    privatize_source(one)
    names = {path.name for path in parts.output.iterdir()}
    assert names == {path.name for path in one.output.iterdir()}
    assert sorted(filecmp.cmpfiles(parts.output, one.output, names, shallow=False)[0]) == sorted(names)
