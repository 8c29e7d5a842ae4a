"""The privatise stage by itself: the plain way's rows in two folders, what lies where meanwhile, budgets, counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.data import curate
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.raw_source import RawSource
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Ledger
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import parse
from private_rlhf.stages import count, privatize
from private_rlhf.stages.context import StageContext
from support.plain_release import PrivateRecord, privatize_records

Row = dict[str, Any]
EPSILON = 1.0
pytestmark = pytest.mark.usefixtures("quick_disk")


def rows_of(first: int, count: int) -> list[Row]:
    return [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(first, first + count)]


def write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keygen(tmp_path / "owner.key")


@pytest.fixture
def context(tmp_path: Path, key: Path) -> Callable[..., StageContext]:
    def make(data: Path | str, labels: str = "private", limit: int | None = None, **privatize: Any) -> StageContext:
        tree = {
            "name": "x",
            "evaluation_labels": labels,
            "model": {"source": "tiny"},
            "privatize": {"epsilon": EPSILON, "key_file": str(key), **privatize},
            "data": {"preferences": str(data), "limit": limit, "public_labels": labels == "public"},
        }
        run, alone = RunDir(tmp_path / "run"), World(rank=0, size=1)
        return StageContext(parse(Recipe, tree, "r"), run, alone, "privatize")

    return make


def bundles(given: StageContext) -> tuple[list[ReleasedPair], list[ReleasedPair]]:
    return read_release(given.folder / "release").rows, read_release(given.folder / "evaluation").rows


def plain(source: Path, key: Path, split: str | None = None) -> list[PrivateRecord]:
    return privatize_records(read_preferences(source, split), RandomizedResponse(EPSILON), load_key(key))[0]


def same(released: list[ReleasedPair], records: list[PrivateRecord]) -> bool:
    expected = []
    for record in records:
        wins, loses = (record.response_a, record.response_b)[:: record.private_label]
        expected.append(ReleasedPair(record.prompt, wins, loses, record.record_id))
    return released == expected


@pytest.mark.parametrize("limit", [None, 1, 40])
def test_a_file_gives_its_last_tenth_to_the_evaluation(
    tmp_path: Path, key: Path, context: Callable[..., StageContext], limit: int | None
) -> None:
    blank = {"prompt": "", "chosen": "a", "rejected": "b"}
    data = write(tmp_path / "raw.jsonl", [*rows_of(0, 57), *rows_of(0, 3), blank])
    given = context(data, limit=limit)
    report = privatize.run(given)
    records = plain(data, key)
    train, test = bundles(given)
    assert same(train, records[:51][:limit])
    assert same(test, records[51:])
    assert (report["events"], report["evaluation_events"]) == (len(train), 6)
    assert report["dropped"] == {"identical": 0, "empty": 1, "duplicates": 3}
    facts = Ledger.open(load_key(key)).show()
    assert (facts["events"], facts["epsilon_total"]) == (len(train) + 6, EPSILON)
    assert privatize.run(given) == report  # the same bits again: no new entry
    assert len(Ledger.open(load_key(key)).show()["releases"]) == 1


def test_a_folder_s_evaluation_pairs_are_not_trained_on(
    tmp_path: Path, key: Path, context: Callable[..., StageContext]
) -> None:
    write(tmp_path / "raw" / "train.jsonl", rows_of(0, 30))
    write(tmp_path / "raw" / "eval.jsonl", [*rows_of(25, 20), *rows_of(40, 2)])
    given = context(tmp_path / "raw")
    report = privatize.run(given)
    train, test = bundles(given)
    assert same(train, plain(tmp_path / "raw", key))
    trained = {row.record_id for row in train}
    assert same(test, [record for record in plain(tmp_path / "raw", key, "eval") if record.record_id not in trained])
    assert (report["evaluation_events"], report["evaluation_overlap_dropped"]) == (15, 5)
    assert read_release(given.folder / "evaluation").manifest.dropped["duplicates"] == 2
    write(tmp_path / "raw" / "eval.jsonl", rows_of(3, 5))
    with pytest.raises(UserError, match="no evaluation pair is left that is not also a training pair"):
        privatize.run(given)


def test_public_evaluation_labels_are_the_true_ones_and_in_no_ledger(
    tmp_path: Path, key: Path, context: Callable[..., StageContext]
) -> None:
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 50)), labels="public")
    privatize.run(given)
    train, test = bundles(given)
    assert all(str(row.chosen).startswith("yes") for row in test)
    assert not all(str(row.chosen).startswith("yes") for row in train)
    assert read_release(given.folder / "evaluation").manifest.as_dict()["mark"] == "NOT PRIVATE"
    assert Ledger.open(load_key(key)).show()["events"] == len(train) == 45


@pytest.mark.parametrize("own", [{"epsilon": math.inf}, {"insecure_seed": 3}])
def test_without_a_secret_key_nothing_is_entered_and_everything_is_marked(
    tmp_path: Path, key: Path, context: Callable[..., StageContext], own: dict[str, Any]
) -> None:
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 20)), labels="public", **own)
    report = privatize.run(given)
    assert (report["mark"], report["ledger"]) == ("NOT PRIVATE", None)
    assert Ledger.open(load_key(key)).show()["releases"] == []


def test_labellers_are_told_apart_and_stay_on_one_side(
    tmp_path: Path, key: Path, context: Callable[..., StageContext]
) -> None:
    rows = [row | {"who": who} for row in rows_of(0, 30) for who in ("ann", "bob", "ann")]
    given = context(write(tmp_path / "raw.jsonl", rows), labeler_column="who", budget=40.0, budget_per="person")
    report = privatize.run(given)
    train, test = bundles(given)
    assert len(train) + len(test) == 60
    assert not {row.record_id for row in train} & {row.record_id for row in test}
    assert report["dropped"]["duplicates"] == 30
    assert report["ledger"]["labelers"]["max_epsilon"] == 30 * EPSILON
    with pytest.raises(UserError, match="one usable preference row is too few"):
        privatize.run(context(write(tmp_path / "raw.jsonl", rows[:3]), labeler_column="who"))


def test_the_run_that_makes_the_key_names_labellers_as_the_next_one_does(
    tmp_path: Path, context: Callable[..., StageContext]
) -> None:
    """Names in capitals, and two spellings of one: otherwise the second run would draw every label anew, at the sum of
    both costs, while the ledger states one."""
    rows = [row | {"who": ("Ann", "BOB", "bob ")[i % 3]} for i, row in enumerate(rows_of(0, 60))]
    own = {"labeler_column": "who", "key_file": str(tmp_path / "new.key")}
    given = context(write(tmp_path / "raw.jsonl", rows), **own)
    report = privatize.run(given)
    before = bundles(given)
    assert report["ledger"]["labelers"]["count"] == 2
    again = privatize.run(given)
    assert bundles(given) == before
    assert again["ledger"]["events"] == report["ledger"]["events"] == 60


def test_a_cap_leaves_out_the_same_events_in_both_bundles(
    tmp_path: Path, key: Path, context: Callable[..., StageContext]
) -> None:
    rows = [row | {"who": "ann" if i % 3 else "bob"} for i, row in enumerate(rows_of(0, 60))]
    own = {"labeler_column": "who", "max_events_per_person": 12}
    given = context(write(tmp_path / "raw.jsonl", rows), **own)
    report = privatize.run(given)
    train, test = bundles(given)
    assert len(train) + len(test) == report["events"] + report["evaluation_events"] == 24
    assert report["dropped"]["over_cap"] == 54 - report["events"]
    assert report["ledger"]["labelers"]["max_epsilon"] == 12 * EPSILON
    assert privatize.run(given)["events"] == report["events"]
    assert bundles(given) == (train, test)


def test_each_level_is_stated_with_its_own_rate(tmp_path: Path, context: Callable[..., StageContext]) -> None:
    rows = [row | {"who": f"w{i % 4}", "eps": (0.5, 4.0)[i % 4 == 0]} for i, row in enumerate(rows_of(0, 40))]
    levels = {"labeler_column": "who", "epsilon_column": "eps", "epsilon_levels": [0.5, 4.0], "epsilon": 4.0}
    report = privatize.run(context(write(tmp_path / "raw.jsonl", rows), **levels))
    assert " labels at ε = 0.5 or 4.0 (each kept with probability 0.622 or 0.982)" in report["summary"]


def test_a_refused_budget_leaves_the_earlier_release(tmp_path: Path, context: Callable[..., StageContext]) -> None:
    data = write(tmp_path / "raw.jsonl", rows_of(0, 20))
    given = context(data)
    privatize.run(given)
    before = bundles(given)
    with pytest.raises(UserError, match=r"over the budget of 1\.5 per event"):
        privatize.run(context(data, epsilon=2.0, budget=1.5))
    assert bundles(given) == before
    privatize.run(context(data, epsilon=1.5, budget=1.5))
    assert bundles(given) != before


def test_raw_labels_lie_beside_the_key_alone(
    tmp_path: Path, key: Path, context: Callable[..., StageContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies leaves owner-only runs there, shards of private labels here, and the next one clears both."""
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 20)))
    with monkeypatch.context() as patched:
        patched.setattr(curate, "publish", lambda *_: (_ for _ in ()).throw(RuntimeError("dies")))
        with pytest.raises(RuntimeError, match="dies"):
            privatize.run(given)
    (work,) = (key.with_name("owner.key.state") / "work").iterdir()
    found = sorted(path for path in tmp_path.rglob("*.run"))
    assert len(found) == 1
    assert work in found[0].parents
    assert all(path.stat().st_mode & 0o077 == 0 for path in (work, *filter(Path.is_file, work.rglob("*"))))
    privatize.run(given)
    assert not list(tmp_path.rglob("*.run"))
    assert sorted(path.name for path in given.folder.iterdir()) == ["evaluation", "release"]
    facts = Ledger.open(load_key(key)).show()
    assert [entry["status"] for entry in facts["releases"]] == ["released"]


# --- counts -----------------------------------------------------------------------------------------------------------


def asking(context: StageContext) -> StageContext:
    """Of stage count in the same run."""
    return replace(context, name="count")


def right(rows: list[ReleasedPair], decisions: list[int]) -> int:
    """How often a rule is right, counted by hand: every true label prefers `yes`."""
    expected = [(row.chosen, row.rejected)[::sign] for row, sign in zip(rows, decisions, strict=True) if sign]
    return sum(str(preferred).startswith("yes") for preferred, _ in expected)


def test_counts_are_of_the_true_labels_with_noise(
    tmp_path: Path, key: Path, context: Callable[..., StageContext]
) -> None:
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 400)), labels="laplace", count_epsilon=500.0)
    privatize.run(given)
    _, test = bundles(given)
    decisions = {"all": [1] * 40, "some": [(1, 0, -1)[i % 3] for i in range(40)], "none": [0] * 40}
    answer = count.noisy_counts(asking(given), decisions)
    assert answer["counts"] == {rule: right(test, signs) for rule, signs in decisions.items()}  # noise: e^-166
    assert answer["counts"]["some"] not in (0, 26)
    assert json.loads((asking(given).folder / "counts.json").read_text())["counts"] == answer["counts"]
    assert answer["ledger"]["epsilon_total"] == EPSILON + 500.0
    assert count.noisy_counts(asking(given), decisions) == answer
    assert Ledger.open(load_key(key)).show()["epsilon_total"] == EPSILON + 500.0
    count.noisy_counts(asking(given), {"all": [1] * 39 + [-1]})
    facts = Ledger.open(load_key(key)).show()
    assert facts["epsilon_total"] == EPSILON + 1000.0
    assert [entry.get("kind") for entry in facts["releases"]] == [None, "counts", "counts"]


def test_what_counts_refuse(tmp_path: Path, key: Path, context: Callable[..., StageContext]) -> None:
    data = write(tmp_path / "raw.jsonl", rows_of(0, 100))
    given = context(data, labels="laplace", count_epsilon=0.5, budget=1.6)
    privatize.run(given)
    with pytest.raises(UserError, match="is not what the privatise stage released"):
        count.noisy_counts(asking(given), {"all": [1] * 9})
    first = count.noisy_counts(asking(given), {"all": [1] * 10})["counts"]
    with pytest.raises(UserError, match=r"over the budget of 1\.6 per event"):
        count.noisy_counts(asking(given), {"all": [-1] * 10})
    assert count.noisy_counts(asking(given), {"all": [1] * 10})["counts"] == first
    rows = rows_of(0, 100)
    for row in rows:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    write(data, rows)
    with pytest.raises(UserError, match="run again with --from privatize"):
        count.noisy_counts(asking(given), {"all": [1] * 10})
    raw_source = RawSource(given.recipe.data, given.recipe.privatize, given.run.root)
    raw_source.remember_input()  # even if that look is passed, the store knows the labels
    with pytest.raises(UserError, match="is not what the privatise stage released"):
        count.noisy_counts(asking(context(data, labels="laplace", count_epsilon=0.5, budget=3.0)), {"all": [1] * 10})
    assert Ledger.open(load_key(key)).show()["epsilon_total"] == 1.5


def test_public_labels_go_out_under_a_second_key_and_private_ones_do_not(
    context: Callable[..., StageContext], tmp_path: Path
) -> None:
    """As two shipped recipes do with the built-in task, whose labels belong to nobody; the sum is charged."""
    data = write(tmp_path / "train.jsonl", rows_of(0, 40))
    privatize.run(context(data, "public"))
    other = keygen(tmp_path / "other.key")
    with pytest.raises(UserError, match="another key of yours"):
        privatize.run(context(data, key_file=str(other)))
    privatize.run(context(data, "public", key_file=str(other)))
    assert Ledger.open(load_key(other)).show()["epsilon_total"] == 2 * EPSILON
