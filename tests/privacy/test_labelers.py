"""Totals per labeller against a Counter, in slices of any size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.privacy import labelers
from private_rlhf.privacy.labelers import NO_LABELER, TALLY, LabelerTotals, join_tallies, tally

# Tags that share the first 8 bytes, differ in zero bytes alone, or stand at the ends of the range.
PEOPLE = [NO_LABELER, bytes(15) + b"\1", b"\1" * 8 + bytes(8), b"\1" * 8 + bytes(7) + b"\2", b"\1" * 16, b"\xff" * 16]
change = st.tuples(st.integers(0, len(PEOPLE) - 1), st.sampled_from([0.1, 0.5, 2.0]), st.integers(1, 3))


def columns(changes: list[tuple[int, float, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([PEOPLE[who] for who, _, _ in changes], "S16"),
        np.array([epsilon for _, epsilon, _ in changes], np.float64),
        np.array([count for _, _, count in changes], np.int64),
    )


def counted(rows: np.ndarray) -> dict[tuple[bytes, float], int]:
    return {(row["labeler"].ljust(16, b"\0"), float(row["epsilon"])): int(row["events"]) for row in rows}


@given(st.lists(change, max_size=12), st.booleans())
def test_tally_is_a_sorted_counter(changes: list[tuple[int, float, int]], one_level: bool) -> None:
    if one_level:
        changes = [(who, 0.5, count) for who, _, count in changes]
    rows = tally(*columns(changes))
    expected = Counter[tuple[bytes, float]]()
    for who, epsilon, count in changes:
        expected[PEOPLE[who], epsilon] += count
    assert counted(rows) == expected
    assert list(counted(rows)) == sorted(expected)


def test_tally_leaves_out_what_cancels() -> None:
    assert counted(tally(*columns([(1, 0.5, 2), (1, 0.5, -2), (1, 2.0, 1)]))) == {(PEOPLE[1], 2.0): 1}


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(st.lists(change, min_size=1, max_size=6), min_size=1, max_size=4),
    slice_bytes=st.sampled_from([1, 100, 10**6]),
)
def test_totals_agree_with_a_counter(
    rounds: list[list[tuple[int, float, int]]], slice_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("totals")
    model = Counter[tuple[bytes, float]]()
    current = LabelerTotals()
    for number, changes in enumerate(rounds):
        files = []
        for half in (changes[::2], changes[1::2]):
            files.append(folder / f"{number}.{len(files)}.tally")
            files[-1].write_bytes(tally(*columns(half)).tobytes())
        for who, epsilon, count in changes:
            model[PEOPLE[who], epsilon] += count
        current = join_tallies(current, files, folder / f"{number}.labelers", slice_bytes)
    assert current.path is not None
    assert counted(np.fromfile(current.path, TALLY)) == model
    sums = Counter[bytes]()
    for (who, epsilon), count in model.items():
        sums[who] += epsilon * count
    assert current.unattributed == sum(count for (who, _), count in model.items() if who == NO_LABELER)
    del sums[NO_LABELER]
    assert current.labelers == len(sums)
    assert current.epsilon == pytest.approx(max(sums.values(), default=0.0), rel=1e-12)
    total = sum(model.values())
    assert labelers.problems(current, total) == []
    assert "counts" in labelers.problems(current, total + 1)[0]


def test_nothing_changes_without_changes(tmp_path: Path) -> None:
    empty = LabelerTotals()
    assert join_tallies(empty, [], tmp_path / "x") is empty
    assert not (tmp_path / "x").exists()


def test_negative_counts_are_damage(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(tally(*columns([(2, 0.5, -1)])).tobytes())
    with pytest.raises(UserError, match="totals are damaged"):
        join_tallies(LabelerTotals(), [tmp_path / "t"], tmp_path / "x")
    assert not (tmp_path / "x").exists()
