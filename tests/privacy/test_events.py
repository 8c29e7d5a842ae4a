"""The event store against a dict, its refusals, its memory, and the files it leaves."""

from __future__ import annotations

import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.privacy import events, labelers
from private_rlhf.privacy.events import EVENT, EventStore, Generation, StagedGeneration, as_tags
from support.ledger_releases import entries

LEVELS = [0.1, 0.5, 1.0, 2.0]
# Tags of partition 7 that differ late, early, and in nothing but zero bytes at the end.
TAGS = [bytes([7, *middle, *bytes(12), last]) for middle in ((0, 0), (0, 255), (255, 0)) for last in (0, 1, 255)]
Row = tuple[int, int]  # index into TAGS, label


def new_store(folder: Path) -> EventStore:
    store = EventStore(folder)
    store.folder.mkdir()
    return store


def arrays(tags: list[bytes], labels: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(tags, "S16"), np.array(labels, np.int8)


def contents(generation: Generation, partition: int) -> dict[bytes, tuple[int, float, bytes]]:
    rows = generation.read(partition)
    tags = [bytes(tag).ljust(16, b"\0") for tag in rows["tag"]]
    people = [bytes(tag).ljust(16, b"\0") for tag in rows["labeler"]]
    labels = (rows["label"] // 2).tolist()
    return dict(zip(tags, zip(labels, rows["epsilon"].tolist(), people, strict=True), strict=True))


release_rows = st.dictionaries(st.integers(0, len(TAGS) - 1), st.booleans(), max_size=len(TAGS))


@settings(max_examples=60, deadline=None)
@given(releases=st.lists(st.tuples(st.sampled_from(LEVELS), release_rows), max_size=5))
def test_merges_agree_with_a_dict(
    releases: list[tuple[float, dict[int, bool]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Labels mostly agree; a release with a conflict is counted, spoils its generation and changes nothing."""
    store = new_store(tmp_path_factory.mktemp("store"))
    current, model = Generation(), dict[bytes, tuple[int, float, bytes]]()
    for serial, (epsilon, flips) in enumerate(releases, start=1):
        chosen = sorted((TAGS[index], -1 if flip and index % 3 == 0 else 1, index) for index, flip in flips.items())
        tags, labels = arrays([row[0] for row in chosen], [row[1] for row in chosen])
        people = np.array([bytes([index % 2]) * 16 for *_, index in chosen], "S16")
        staged = StagedGeneration(current, store.folder / f"{serial:06d}.staged")
        result = store.merge(7, entries(tags, labels, people), epsilon, into=staged)
        assert result.conflicts == sum(tag in model and model[tag][0] != label for tag, label, _ in chosen)
        if result.conflicts:
            with pytest.raises(UserError, match="labels or names differ from those released before"):
                store.join(staged, serial)
            continue
        for tag, label, index in chosen:
            before = model.get(tag, (label, 0.0, b""))[1]
            model[tag] = (label, max(before, epsilon), bytes([index % 2]) * 16)
        current = store.join(staged, serial)
        assert contents(current, 7) == model
        assert list(contents(current, 7)) == sorted(model)
        assert current.rows == len(model)
        top = max((epsilon for _, epsilon, _ in model.values()), default=0.0)
        assert current.epsilon == top
        assert events.problems(current) == []


def test_partitions_join_in_order_and_untouched_ones_are_carried_over(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    first = StagedGeneration(Generation(), store.folder / "1.staged")
    for partition in (200, 0, 255):
        tags, labels = arrays([bytes([partition]).ljust(16, b"\1")], [1])
        store.merge(partition, entries(tags, labels), 0.5, into=first)
    one = store.join(first, 1)
    second = StagedGeneration(one, store.folder / "2.staged")
    tags, labels = arrays([bytes([200]).ljust(16, b"\1")], [1])
    store.merge(200, entries(tags, labels), 2.0, into=second)
    two = store.join(second, 2)
    assert (two.rows, two.epsilon) == (3, 2.0)
    assert [len(two.read(partition)) for partition in (0, 1, 199, 200, 201, 255)] == [1, 0, 0, 1, 0, 1]
    assert contents(two, 255) == contents(one, 255)
    store.sweep({two.path} if two.path else set())
    assert [path.name for path in store.folder.iterdir()] == ["000002.events"]


def test_a_merge_that_changes_nothing_leaves_nothing(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    tags, labels = arrays(TAGS[:2], [1, -1])
    one = StagedGeneration(Generation(), store.folder / "1.staged")
    store.merge(7, entries(tags, labels), 1.0, into=one)
    current = store.join(one, 1)
    again = StagedGeneration(current, store.folder / "2.staged")
    store.merge(7, entries(tags, labels), 0.5, into=again)
    assert not again.folder.exists()
    assert store.join(again, 2) is current


def test_byte_matrices_are_tags_too() -> None:
    matrix = np.array([[7] * 15 + [0], [7] * 16], np.uint8)
    assert as_tags(matrix).tolist() == [b"\7" * 15, b"\7" * 16]
    assert np.array_equal(as_tags(matrix), as_tags(as_tags(matrix)))
    with pytest.raises(ValueError, match=r"S16 or \(n, 16\) uint8"):
        as_tags(np.zeros((2, 15), np.uint8))


@pytest.mark.parametrize(
    ("partition", "tags", "labels", "epsilon"),
    [
        (8, TAGS[:1], [1], 1.0),
        (256, TAGS[:1], [1], 1.0),
        (7, [TAGS[1], TAGS[0]], [1, 1], 1.0),
        (7, [TAGS[0], TAGS[0]], [1, 1], 1.0),
        (7, TAGS[:1], [0], 1.0),
        (7, TAGS[:2], [2, 1], 1.0),
        (7, TAGS[:1], [1], 0.0),
        (7, TAGS[:1], [1], float("nan")),
        (7, TAGS[:1], [1], float("inf")),
    ],
)
def test_malformed_merges_are_refused(
    tmp_path: Path, partition: int, tags: list[bytes], labels: list[int], epsilon: float
) -> None:
    store = new_store(tmp_path)
    staged = StagedGeneration(Generation(), store.folder / "1.staged")
    with pytest.raises(ValueError):
        store.merge(partition, entries(*arrays(tags, labels)), epsilon, into=staged)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    store = new_store(tmp_path)
    staged = StagedGeneration(Generation(), store.folder / "1.staged")
    store.merge(7, entries(*arrays(TAGS[:3], [1, 1, -1])), 1.0, into=staged)
    current = store.join(staged, 1)
    assert current.path is not None
    assert stat.S_IMODE(current.path.stat().st_mode) == 0o600
    content = current.path.read_bytes()
    assert len(content) == 3 * EVENT.itemsize
    if damage == "remove":
        current.path.unlink()
    else:
        current.path.write_bytes({"flip": content[:-1] + b"\1", "cut": content[:-1], "grow": content + b"\0"}[damage])
    (problem,) = events.problems(current)
    assert str(current.path) in problem


def test_memory_is_that_of_a_partition(tmp_path: Path) -> None:
    """100,000 events of 100,000 labellers: 4.1 MB of events and 3.2 MB of tallies pass through less than a fifth."""
    store = new_store(tmp_path)
    count = 100_000
    tags = np.sort(as_tags(np.random.default_rng(1).integers(0, 256, (count, 16), np.uint8)))
    bounds = np.searchsorted(tags.view(np.uint8)[::16], np.arange(257))
    labels = np.ones(count, np.int8)
    people = tags[::-1].copy()
    staged = StagedGeneration(Generation(), store.folder / "1.staged")
    tracemalloc.start()
    try:
        for partition in range(256):
            own = slice(bounds[partition], bounds[partition + 1])
            store.merge(partition, entries(tags[own], labels[own], people[own]), 0.5, into=staged)
        joined = store.join(staged, 1)
        pieces = list(staged.pieces("tally").values())
        totals = labelers.join_tallies(
            labelers.LabelerTotals(), pieces, store.folder / "1.labelers", slice_bytes=100_000
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (joined.rows, totals.labelers) == (count, count)
    assert peak < 0.2 * count * (EVENT.itemsize + labelers.TALLY.itemsize)
