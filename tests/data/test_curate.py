"""The command's engine: the plain way's bytes, resume, copies, events, label columns, budgets, refusals."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.data import curate, engine
from private_rlhf.data.conversation import RowError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options, parse_labels
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.release import read_release
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.recipe import DataConfig
from support import killed_release
from support.other_machines import move_to
from support.plain_release import contents, manifest_of, privatize_records, write_release

Row = dict[str, Any]
words = st.sampled_from(["", " ", "a", "b", "c", "é\u2028", "\U0001f600", "\0", "a b"])
table = st.lists(st.fixed_dictionaries({"prompt": words, "chosen": words, "rejected": words}), max_size=12)


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


def rows_of(count: int) -> list[Row]:
    return [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(count)]


def released(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


def run(data: Path, output: Path, key: Path, epsilon: float = 1.0, **more: Any) -> str:
    return privatize_source(Request(str(data), output, epsilon, key, **more))


def plain(data: Path, output: Path, key_file: Path, epsilon: float) -> None:
    key, mechanism = load_key(key_file), RandomizedResponse(epsilon)
    records, counts = privatize_records(read_preferences(data), mechanism, key, str(data))
    write_release(records, output, manifest_of(records, counts, mechanism, key, data.name), key)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table, st.sampled_from([1, 90, 1 << 20]), st.sampled_from([1e-6, 0.5, 50.0]))
def test_the_bytes_and_the_refusals_of_the_plain_way(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], chunk_bytes: int, epsilon: float
) -> None:
    """From no rows up; ties, copies, contradicting copies, blanks; chunks of one line and of all."""
    folder = tmp_path_factory.mktemp("plain")
    move_to(tmp_path_factory.mktemp("machine"))  # where no earlier example left a key
    key, data = keygen(folder / "key"), write(folder / "train.jsonl", rows)
    refusal = None
    try:
        plain(data, folder / "plain", key, epsilon)
    except UserError as error:
        refusal = str(error)
    if refusal is not None:
        with pytest.raises(UserError) as caught:
            run(data, folder / "out", key, epsilon, chunk_bytes=chunk_bytes)
        assert str(caught.value) == refusal
        assert Ledger.open(load_key(key)).show()["releases"] == []
        assert sorted(path.name for path in folder.iterdir()) == ["key", "key.state", "train.jsonl"]
        return
    run(data, folder / "out", key, epsilon, chunk_bytes=chunk_bytes)
    assert contents(folder / "out") == contents(folder / "plain")


def test_workers_give_the_same_bytes_and_the_first_error(tmp_path: Path, key: Path) -> None:
    data = write(tmp_path / "train.jsonl", rows_of(300))
    run(data, tmp_path / "one", key, chunk_bytes=2000)
    run(data, tmp_path / "two", key, chunk_bytes=2000, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    rows = rows_of(300)
    rows[120]["chosen"] = rows[250]["chosen"] = None
    with pytest.raises(UserError, match="line 121: one of 'chosen'/'rejected' is null"):
        run(write(data, rows), tmp_path / "three", key, chunk_bytes=2000, workers=2)
    assert not (tmp_path / ".three.work").exists()


def test_a_rerun_is_free_and_leaves_the_folder_alone(tmp_path: Path, key: Path) -> None:
    data = write(tmp_path / "train.jsonl", rows_of(20))
    run(data, tmp_path / "out", key)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    run(data, tmp_path / "out", key)
    run(data, tmp_path / "elsewhere", key)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert contents(tmp_path / "elsewhere") == contents(tmp_path / "out")
    facts = Ledger.open(load_key(key)).show()
    assert len(facts["releases"]) == 1
    assert (facts["epsilon_total"], facts["events"]) == (1.0, 20)
    with pytest.raises(UserError, match="holds something else and is not overwritten"):
        run(data, tmp_path / "out", key, 2.0)
    assert Ledger.open(load_key(key)).show()["epsilon_total"] == 1.0


def test_a_contradicting_label_is_refused_with_the_count_alone(tmp_path: Path, key: Path) -> None:
    rows = rows_of(20)
    data = write(tmp_path / "train.jsonl", rows)
    run(data, tmp_path / "out", key, 0.5)
    for row in rows[3:6]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    other = write(tmp_path / "other.jsonl", [*rows, {"prompt": "new", "chosen": "a", "rejected": "b"}])
    with pytest.raises(UserError, match="3 events carry another label than the one released before") as caught:
        run(other, tmp_path / "out2", key, 2.0)
    assert "Say" not in str(caught.value)
    assert not (tmp_path / "out2").exists()
    assert not (tmp_path / ".out2.work").exists()
    facts = Ledger.open(load_key(key)).show()
    assert (facts["epsilon_total"], facts["events"], len(facts["releases"])) == (0.5, 20, 1)
    run(data, tmp_path / "out3", key, 2.0)  # the labels released before, at another epsilon


def test_a_budget_refuses_before_anything_is_written(tmp_path: Path, key: Path) -> None:
    data = write(tmp_path / "train.jsonl", [row | {"who": "ann"} for row in rows_of(5)])
    with pytest.raises(UserError, match=r"over the budget of 0\.5 per event"):
        run(data, tmp_path / "out", key, 1.0, budget=Budget(0.5, "event"))
    options = Options(labeler_column="who")
    with pytest.raises(UserError, match="over the budget of 3 per person"):
        run(data, tmp_path / "out", key, 1.0, budget=Budget(3.0, "person"), options=options)
    assert not (tmp_path / "out").exists()
    assert Ledger.open(load_key(key)).show()["epsilon_total"] == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_labellers_and_events_tell_copies_apart_and_are_not_released(tmp_path: Path, kind: str) -> None:
    rows = [
        {"prompt": "p", "chosen": chosen, "rejected": "ab".replace(chosen, ""), "who": who, "event": event}
        for who in ("ann", "bob")
        for event in ("1", "2")
        for chosen in ("a", "b")  # the second is a contradicting copy
    ]
    data = write(tmp_path / "train.jsonl", rows)
    if kind == "parquet":
        data = tmp_path / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows), data)
    for name, options, kept in (
        ("plain", Options(), 1),
        ("who", Options(labeler_column="who"), 2),
        ("event", Options(event_column="event"), 2),
        ("both", Options(labeler_column="who", event_column="event"), 4),
    ):
        move_to(tmp_path / f"machine of {name}")
        own = keygen(tmp_path / f"{name}.key")  # for one key these are other names of the same labels
        run(data, tmp_path / name, own, 50.0, options=options)
        opened = read_release(tmp_path / name)
        assert len(opened) == len(opened.rows) == kept
        assert opened.manifest.dropped == {"identical": 0, "empty": 0, "duplicates": 8 - kept}
        assert [row.chosen for row in opened] == ["a"] * kept
        assert "ann" not in str(released(tmp_path / name).to_pylist())
        assert released(tmp_path / name).column_names == ["prompt", "chosen", "rejected", "record_id"]
        people = Ledger.open(load_key(own)).show()["labelers"]["count"]
        assert people == 2 * (options.labeler_column is not None)


def test_named_columns_are_released_as_they_are(tmp_path: Path, key: Path) -> None:
    rows = [
        row | {"who": f"w{i}", "n": i, "x": i / 2, "ok": i > 1, "odd": [i], "none": None}
        for i, row in enumerate(rows_of(5))
    ]
    names = ("who", "n", "x", "ok", "odd", "none")
    options = Options(labeler_column="who", columns=names)
    run(write(tmp_path / "train.jsonl", rows), tmp_path / "out", key, options=options)
    out = released(tmp_path / "out")
    assert out.column_names == ["prompt", "chosen", "rejected", "record_id", *names]
    assert [str(field.type) for field in out.schema][4:] == ["string", "int64", "double", "bool", "string", "string"]
    for row in out.to_pylist():
        number = row["n"]
        assert row["prompt"] == f"Say {number}."
        assert (row["who"], row["x"], row["ok"]) == (f"w{number}", number / 2, number > 1)
        assert (row["odd"], row["none"]) == (f"[{number}]", None)
    assert read_release(tmp_path / "out").manifest.extra_columns == names


ALPHABETS: list[tuple[str, list[Any]]] = [
    ("1,-1", [1, -1]),
    ("-1,1", ["-1", "1"]),
    ("0,1", [0, 1.0]),
    ("A,B", ["A", "B"]),
    ("true,false", [True, False]),
]


@pytest.mark.parametrize(("labels", "values"), ALPHABETS)
def test_label_columns_mean_what_is_declared(tmp_path: Path, key: Path, labels: str, values: list[Any]) -> None:
    """The first value means that response_a is preferred; the release is that of the chosen/rejected form."""
    pairs = rows_of(30)
    rows = []
    for i, row in enumerate(pairs):
        a, b = (row["chosen"], row["rejected"]) if i % 2 else (row["rejected"], row["chosen"])
        rows.append({"prompt": row["prompt"], "response_a": a, "response_b": b, "label": values[0 if i % 2 else 1]})
    options = Options(label_column="label", labels=parse_labels(labels))
    run(write(tmp_path / "labelled.jsonl", rows), tmp_path / "one", key, 1.0, options=options, source="s")
    run(write(tmp_path / "pairs.jsonl", pairs), tmp_path / "two", key, 1.0, source="s")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("bad", [2, "C", None, 0.5, [], "a"])
def test_an_undeclared_label_is_refused_unseen(tmp_path: Path, key: Path, bad: Any) -> None:
    rows = [{"prompt": "p", "response_a": "x", "response_b": "y", "label": value} for value in ("A", bad)]
    options = Options(label_column="label", labels=("A", "B"))
    with pytest.raises(UserError, match=r"line 2: (has a label that --labels does not declare|column 'label' is null)"):
        run(write(tmp_path / "d.jsonl", rows), tmp_path / "out", key, options=options)


def test_messages_on_label_columns_are_the_same_whichever_response_is_at_fault(tmp_path: Path, key: Path) -> None:
    options, messages = Options(label_column="label", labels=("A", "B")), set()
    for bad in ({"response_a": 3, "response_b": "y"}, {"response_a": "y", "response_b": 3}):
        for label in ("A", "B"):
            data = write(tmp_path / "d.jsonl", [{"prompt": "p", "label": label} | bad])
            with pytest.raises(UserError) as caught:
                run(data, tmp_path / "out", key, options=options)
            messages.add(str(caught.value))
    assert len(messages) == 1
    assert "one of 'response_a'/'response_b' is neither text" in messages.pop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "l"}, "--label-column and --labels go together"),
        ({"labels": ("A", "B")}, "--label-column and --labels go together"),
        ({"label_column": "l", "labels": ("A", "A")}, "declare two different values"),
        ({"columns": ("chosen",)}, "--columns: 'chosen' holds the pair or its label"),
        ({"label_column": "l", "labels": ("A", "B"), "columns": ("l",)}, "'l' holds the pair or its label"),
        ({"labeler_column": "rejected"}, "--labeler-column: 'rejected' holds the pair"),
        ({"columns": ("a", "a")}, "names a column twice"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "l"}, r"^data\.label_column and data\.labels go together: .*data\.labels: A,B\)$"),
        ({"label_column": "l", "labels": ("A", "A")}, r"^data\.labels: declare two different values"),
        ({"labeler_column": "rejected"}, r"^privatize\.labeler_column: 'rejected' holds the pair"),
        ({"ties": "none"}, r"^data\.ties must be drop or coin, got 'none'"),
        ({"corrects_column": "c"}, r"^privatize\.corrects_column needs privatize\.event_column"),
    ],
)
def test_errors_about_labels_name_the_keys_of_a_recipe(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(**options, in_recipe=True)
    with pytest.raises(UserError, match=r"^--"):
        Options(**options)


def test_a_recipe_s_labels_are_named_by_its_key() -> None:
    with pytest.raises(UserError, match=r"^data\.labels: declare two values"):
        Options.of(DataConfig(label_column="l", labels="A"))
    with pytest.raises(RowError, match=r"a label that data\.labels does not declare"):
        Options.of(DataConfig(label_column="l", labels="A,B")).score(["C"])


def test_two_values_are_declared() -> None:
    with pytest.raises(UserError, match="--labels: declare two values"):
        parse_labels("A")


@pytest.mark.parametrize("who", [None, True, 1.5, ["x"]])
def test_a_row_without_a_labeller_is_named(tmp_path: Path, key: Path, who: Any) -> None:
    rows = [row | {"who": who if i == 2 else i} for i, row in enumerate(rows_of(4))]
    data, options = write(tmp_path / "d.jsonl", rows), Options(labeler_column="who")
    with pytest.raises(UserError, match=r"line 3: column 'who' is (null|neither text nor a whole number)"):
        run(data, tmp_path / "out", key, options=options)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_bad_epsilon_leaves_nothing(tmp_path: Path, key: Path, epsilon: float) -> None:
    data = write(tmp_path / "d.jsonl", rows_of(3))
    with pytest.raises(UserError, match="epsilon must be a finite number above 0"):
        run(data, tmp_path / "out", key, epsilon)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "owner.key", "owner.key.state"]


def test_a_lost_key_and_one_of_the_wrong_length(tmp_path: Path, key: Path) -> None:
    data = write(tmp_path / "d.jsonl", rows_of(3))
    with pytest.raises(UserError, match="no such key file"):
        run(data, tmp_path / "out", tmp_path / "lost.key")
    key.write_text("private-rlhf key v1\n" + "00" * 31 + "\n")
    with pytest.raises(UserError, match="the key has 248 bits, not 256"):
        run(data, tmp_path / "out", key)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_what_is_done_and_spends_nothing(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    data = write(tmp_path / "d.jsonl", rows_of(50))

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(reason, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "write_run", full)
        with pytest.raises(OSError, match="No space left"):
            run(data, tmp_path / "out", key)
    assert Ledger.open(load_key(key)).show()["epsilon_total"] == 0
    with monkeypatch.context() as patched:
        patched.setattr(engine, "write_shard", full)
        with pytest.raises(OSError, match="No space left"):
            run(data, tmp_path / "out", key)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / ".out.work").glob("*.run"))
    assert Ledger.open(load_key(key)).show()["epsilon_total"] == 0
    run(data, tmp_path / "out", key)
    facts = Ledger.open(load_key(key)).show()
    assert (facts["epsilon_total"], len(facts["releases"])) == (1.0, 1)
    assert facts["releases"][0]["status"] == "released"
    assert not (tmp_path / ".out.work").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "d.jsonl", rows_of(5))
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write the release"):
        run(data, tmp_path / "file" / "out", key)
    with pytest.raises(UserError, match="is a file; choose another output folder"):
        run(data, tmp_path / "file", key)

    def denied(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(engine, "write_run", denied)
    with pytest.raises(UserError, match=r"cannot write the release \(Read-only file system\): fix that and run again"):
        run(data, tmp_path / "new" / "deep" / "out", key)
    assert not (tmp_path / "new").exists()


def test_a_ledger_that_fails_after_publishing_is_not_said_to_have_released_nothing(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = write(tmp_path / "d.jsonl", rows_of(5)), tmp_path / "out"

    def failed(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(curate.Reservation, "commit", failed)
        with pytest.raises(UserError, match=r"\(Input/output error\): fix that and run again$"):
            run(data, output, key)
    assert read_release(output).manifest.rows == 5
    run(data, output, key)
    assert [entry["status"] for entry in Ledger.open(load_key(key)).show()["releases"]] == ["released"]


@pytest.mark.parametrize(
    ("step", "calls"),
    [("write_run", 3), ("gather_events", 0), ("_enter", 0), ("write_shard", 0), ("write_json", 0), ("publish", 0)],
)
def test_killed_anywhere_and_run_again(tmp_path: Path, key: Path, step: str, calls: int) -> None:
    data = write(tmp_path / "d.jsonl", rows_of(120))
    arguments = [step, str(calls), str(data), str(tmp_path / "out"), str(key)]
    done = subprocess.run([sys.executable, killed_release.__file__, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    work = tmp_path / ".out.work"
    assert work.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in work.rglob("*.run"))
    left = {path.name: path.stat().st_ino for path in work.glob("*.run")}
    assert left
    adopted = set()
    original = engine.open_run

    def watched(path: Path) -> Any:
        found = original(path)
        if found is not None and path.stat().st_ino == left.get(path.name):
            adopted.add(path.name)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "open_run", watched)
        run(data, tmp_path / "out", key, chunk_bytes=1500)
    assert adopted == left.keys()
    plain(data, tmp_path / "plain", key, 1.0)
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    facts = Ledger.open(load_key(key)).show()
    assert [entry["status"] for entry in facts["releases"]] == ["released"]
    assert not work.exists()


def test_what_another_plan_left_is_thrown_away(tmp_path: Path, key: Path) -> None:
    data = write(tmp_path / "d.jsonl", rows_of(60))
    arguments = ["gather_events", "0", str(data), str(tmp_path / "out"), str(key)]
    done = subprocess.run([sys.executable, killed_release.__file__, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    time.sleep(0.01)
    write(data, rows_of(61))
    os.utime(data)
    run(data, tmp_path / "out", key, chunk_bytes=1500)
    plain(data, tmp_path / "plain", key, 1.0)
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
