"""A cap on the events of one person over the ledger's life: chosen by the key, not by labels, and never revised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.release import read_release
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Ledger
from support import raw_releases
from support.other_machines import copy_key, move_to
from support.raw_releases import Row, shown

pytestmark = pytest.mark.usefixtures("quick_disk")


def rows_of(**people: range) -> list[Row]:
    return [
        {"prompt": f"{who} {i}.", "chosen": f"yes {i}", "rejected": f"no {i}", "who": who}
        for who, numbers in people.items()
        for i in numbers
    ]


def run(rows: list[Row], output: Path, key: Path, epsilon: float = 1.0, **more: Any) -> set[str]:
    """The prompts that were released."""
    return {str(row.prompt) for row in raw_releases.run(rows, output, key, epsilon, labeler_column="who", **more)}


def test_a_person_s_events_stop_at_the_cap_for_good(tmp_path: Path, key: Path) -> None:
    rows = rows_of(ann=range(40), bob=range(3))
    first = run(rows, tmp_path / "v1", key, max_events=5)
    mine = {prompt for prompt in first if prompt.startswith("ann")}
    assert (len(mine), len(first)) == (5, 8)
    manifest = read_release(tmp_path / "v1").manifest
    assert (manifest.rows, manifest.dropped["over_cap"]) == (8, 35)
    facts = shown(key)
    assert (facts["events"], facts["events_left_out"], facts["max_events_per_person"]) == (8, 35, 5)
    assert facts["labelers"]["max_epsilon"] == 5.0
    # Another ε, an export without those that were released, new events: nothing of ann's is added.
    assert run(rows, tmp_path / "v2", key, 0.5) == first
    rest = [row for row in rows if row["prompt"] not in first]
    with pytest.raises(UserError, match="no rows are left"):
        run(rest, tmp_path / "v3", key)
    more = run([*rest, *rows_of(ann=range(40, 60), bob=range(3, 9))], tmp_path / "v4", key)
    assert (sum(prompt.startswith("ann") for prompt in more), len(more)) == (0, 2)
    facts = shown(key)
    assert (facts["labelers"]["count"], facts["labelers"]["max_epsilon"], facts["events"]) == (2, 5.0, 10)
    assert Ledger.open(load_key(key)).verify() == []


def test_a_rerun_gives_the_same_release_at_no_cost(tmp_path: Path, key: Path) -> None:
    rows = rows_of(ann=range(20), bob=range(20))
    first = run(rows, tmp_path / "v1", key, max_events=4)
    assert run(rows, tmp_path / "v1", key, max_events=4) == first
    assert run(rows, tmp_path / "again", key) == first
    assert len(shown(key)["releases"]) == 1


def test_the_choice_depends_on_the_key_and_on_no_label(tmp_path: Path, key: Path) -> None:
    rows = rows_of(ann=range(60))
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    first = run(rows, tmp_path / "v1", key, max_events=10)
    move_to(tmp_path)
    assert run(turned, tmp_path / "v2", copy_key(key, tmp_path / "copy.key"), max_events=10) == first
    assert run(rows, tmp_path / "v3", keygen(tmp_path / "other.key"), max_events=10, add_up_keys=True) != first


def test_a_cap_may_fall_and_not_rise(tmp_path: Path, key: Path) -> None:
    run(rows_of(ann=range(3)), tmp_path / "v1", key, max_events=6)
    with pytest.raises(UserError, match="--max-events-per-person 7: this key's ledger states 6"):
        run(rows_of(ann=range(9)), tmp_path / "v2", key, max_events=7)
    assert len(run(rows_of(ann=range(9), eve=range(9)), tmp_path / "v2", key, max_events=4)) == 4 + 4
    assert shown(key)["max_events_per_person"] == 4


def test_a_key_that_released_more_before_releases_no_more(tmp_path: Path, key: Path) -> None:
    run(rows_of(ann=range(8)), tmp_path / "v1", key)
    assert len(run(rows_of(ann=range(12), bob=range(5)), tmp_path / "v2", key, max_events=3)) == 8 + 3


def test_a_cap_stated_with_a_release_that_was_made_before_is_checked_and_kept(tmp_path: Path, key: Path) -> None:
    """The review's E6: it was dropped without a word."""
    rows = rows_of(ann=range(6), bob=range(2))
    run(rows, tmp_path / "v1", key)
    with pytest.raises(UserError, match="--max-events-per-person must be 6 or more, got 3"):
        run(rows, tmp_path / "again", key, max_events=3)
    assert shown(key)["max_events_per_person"] is None
    run(rows, tmp_path / "again", key, max_events=7)
    assert (shown(key)["max_events_per_person"], len(shown(key)["releases"])) == (7, 1)
    assert len(run(rows_of(ann=range(9)), tmp_path / "v2", key)) == 7


def test_a_cap_stated_again_without_labellers_is_refused(tmp_path: Path, key: Path) -> None:
    data = tmp_path / "v1.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(ann=range(6))))
    privatize_source(Request(str(data), tmp_path / "v1", 1.0, key))
    with pytest.raises(UserError, match="needs the labeller of every event, and 6 events under this key have none"):
        privatize_source(Request(str(data), tmp_path / "again", 1.0, key, max_events=8))
    assert shown(key)["max_events_per_person"] is None


def test_a_cap_needs_labellers(tmp_path: Path, key: Path) -> None:
    with pytest.raises(UserError, match="this key releases at most 2 events of a person, got 6 that do not"):
        run(rows_of(**{"": range(6)}), tmp_path / "v1", key, max_events=2)
    assert shown(key)["releases"] == []
