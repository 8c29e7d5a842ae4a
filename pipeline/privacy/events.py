"""The owner-only store of labelling events: for each one its label, its labeller and the ε it has cost so far.

One array of rows sorted by tag in one file (`SERIAL.events`), in 256 partitions by the first byte of the tags, which
are merged one by one, by several processes. A merge leaves what it changed as a piece in a staging folder; `join`
writes the next file from the pieces and the old file.

Tags are keyed digests of the event, of its record and of the labeller, and a stored label is the true one times a keyed
sign: without the key nobody can tell which event a row belongs to (but for the first byte of its record's public id)
nor what its label is. All releases of one event under one key cost the largest ε together (`mechanism`), so a merge is
idempotent. A new event of a known record is either another person's label (all of them named, and none is this one), or
the same label again. That is refused, unless it says that it is a correction or the holder asked for the sum: then the
events of that record are `shared`, and each of them costs what all of them cost together.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from private_rlhf.core.atomic import new_file
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.labelers import TALLY, LabelerTotals, tally
from private_rlhf.privacy.row_files import check_rows, read_rows, replace_file, row_digest

TAG_BYTES = 16
PARTITIONS = 256
TAG = np.dtype(f"S{TAG_BYTES}")  # numpy pads with zero bytes and compares bytes unsigned, so any 16 bytes are a tag
NOBODY = b""  # the labeller's tag of an event that names none, as numpy gives it back

UNKNOWN, NOT_TAGGED = 0, 1  # tags of letters: of events that an earlier version released; of rows outside the sample

# What a release enters. record: the tag that the record's event without names has. label: the true one, -1 or +1.
# blind: the keyed sign, -1 or +1. corrects: says of itself that it corrects an earlier event of its record. left_out:
# is not released, now or ever (`left_out`). letters: the tag that all spellings of the record have (`data.spellings`).
# level: number of its ε among those of the release.
ENTRY = np.dtype(
    [
        *(("tag", TAG), ("record", TAG), ("labeler", TAG)),
        *(("label", "i1"), ("blind", "i1"), ("corrects", "?"), ("left_out", "?"), ("letters", "<u8"), ("level", "u1")),
    ]
)
# What is kept. label: -2 or +2, blinded; -1 or +1, unblinded (earlier versions); 0 for an event that was left out
# for good (`left_out`). shared: its label may be that of the record's other shared events, so that their totals add up.
# respelled: so may those of all events with these letters.
BEFORE_LETTERS = np.dtype(
    [("tag", TAG), ("record", TAG), ("labeler", TAG), ("epsilon", "<f8"), ("label", "i1"), ("shared", "?")]
)
EVENT = np.dtype(
    [*((name, BEFORE_LETTERS[name]) for name in BEFORE_LETTERS.names or ()), ("letters", "<u8"), ("respelled", "?")]
)
LEGACY = np.dtype([("tag", TAG), ("labeler", TAG), ("epsilon", "<f8"), ("label", "i1")])  # of earlier versions


@dataclass(frozen=True)
class Generation:
    """One state of the store. `path`: its file, None while it is empty. `bounds`: 257 row numbers; partition p is rows
    bounds[p] to bounds[p + 1]. `epsilon`: the largest total of any event, 0 if there is none. `digest`: of the file.
    `left_out`: rows of events that were left out for good.
    `legacy`: an earlier version wrote the file, without records; its events are taken for their records' only ones.
    `lettered`: its rows have tags of letters; of `unlettered` of them the tag is unknown."""

    path: Path | None = None
    bounds: tuple[int, ...] = (0,) * (PARTITIONS + 1)
    epsilon: float = 0.0
    digest: str = ""
    legacy: bool = False
    left_out: int = 0
    lettered: bool = True
    unlettered: int = 0

    @property
    def events(self) -> int:
        """Events that were released."""
        return self.rows - self.left_out

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Type of the file's rows."""
        return LEGACY if self.legacy else EVENT if self.lettered else BEFORE_LETTERS

    @property
    def unknown_letters(self) -> int:
        """Events whose other spellings are not known, as an earlier version released them."""
        return self.unlettered if self.dtype == EVENT else self.events

    @property
    def rows(self) -> int:
        """Events in the store, with those that were left out for good."""
        return self.bounds[-1]

    def read(self, partition: int) -> np.ndarray:
        """The rows (EVENT) of one partition. UserError if the file is missing or too short."""
        start, end = self.bounds[partition], self.bounds[partition + 1]
        if self.path is None or start == end:
            return np.empty(0, EVENT)
        rows = read_rows(self.path, self.dtype, start, end)
        if self.dtype == EVENT:
            return rows
        wide = np.zeros(len(rows), EVENT)
        for name in self.dtype.names or ():
            wide[name] = rows[name]
        if self.legacy:
            wide["record"] = rows["tag"]
        return wide


@dataclass(frozen=True)
class StagedGeneration:
    """A generation in the making: `base` and the pieces below `folder`. Can be sent to other processes."""

    base: Generation
    folder: Path

    def pieces(self, kind: str) -> dict[str, Path]:
        """The finished pieces of a kind ("events", "tally", "conflict") by their partition's name, in order."""
        if not self.folder.is_dir():
            return {}
        return {path.stem: path for path in sorted(self.folder.glob(f"*.{kind}")) if not path.name.startswith(".")}


class MergeResult(NamedTuple):
    """Counts of one merge; which events they are of stays unknown to everybody."""

    conflicts: int  # events whose stored label differs from the one given
    renamed: int  # new events of known records that are not another person's, and do not say that they correct one


class EventStore:
    """The store of one key. `folder`: the key's state folder; the files lie in `folder/events`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "events"

    def merge(
        self,
        partition: int,
        rows: np.ndarray,
        epsilon: float | np.ndarray,
        *,
        into: StagedGeneration,
        add_up: bool = False,
    ) -> MergeResult:
        """Enter events of one partition, released at `epsilon`, into a staged generation.

        rows: (n,) ENTRY, their tags strictly rising, first byte = partition. epsilon: finite, > 0, of all of them
        or (n,) of each. add_up: known records under new names are charged the sum. Repeating a merge replaces it; a
        merge that changes nothing leaves nothing. If any label conflicts, or a record is renamed, the generation is
        spoilt: it can no longer be made current. ValueError for malformed arguments.
        """
        cost = np.broadcast_to(np.asarray(epsilon, np.float64), rows.shape)
        _check(partition, rows, cost)
        old = into.base.read(partition)
        place, known = places(old, rows["tag"])
        fitting = ~(known & rows["left_out"])  # those stand there as such
        rows, place, known, cost = rows[fitting], place[fitting], known[fitting], cost[fitting]
        hits, given = place[known], rows[known]
        stored = old["label"][hits]
        signs = np.where(abs(stored) == 2, given["blind"], 1)
        conflicts = int(np.count_nonzero(np.sign(stored) != given["label"] * signs))
        new = rows[~known]
        kept = ~new["left_out"]
        same_label = _same_label(old, new) & kept
        renamed = 0 if add_up else int(np.count_nonzero(same_label & ~new["corrects"]))
        shared = same_label | _may_repeat(new[new["corrects"] & kept], new, "record") & kept  # beside their original
        if conflicts or renamed:
            self._stage(into, partition, "conflict", np.empty(0, EVENT))
            return MergeResult(conflicts, renamed)
        rises = old["epsilon"][hits] < cost[known]
        raised, risen = hits[rises], cost[known][rises]
        if len(new) == 0 and len(raised) == 0:
            return MergeResult(0, 0)
        fresh = np.zeros(len(new), EVENT)
        for name in ("tag", "record", "labeler", "letters"):
            fresh[name] = new[name]
        fresh["label"], fresh["epsilon"], fresh["shared"] = 2 * new["label"] * new["blind"], cost[~known], shared
        fresh["label"][new["left_out"]], fresh["epsilon"][new["left_out"]] = 0, 0.0
        self._stage(into, partition, "tally", _changes(fresh[~new["left_out"]], old[raised], risen))
        old["label"][hits] = 2 * given["label"] * given["blind"]
        old["letters"][hits] = np.maximum(old["letters"][hits], given["letters"])
        if same_label.any():
            old["shared"] |= np.isin(old["record"], fresh["record"][same_label])
        self._stage(into, partition, "events", _merged(old, raised, risen, fresh, place[~known]))
        return MergeResult(0, 0)

    def respelled(self, release: Callable[[], Iterable[tuple[int, np.ndarray]]], into: StagedGeneration) -> int:
        """Count the new events whose record was released before in another spelling; stage their tags of letters.

        release: (partition, rows (ENTRY)) of a release, each time anew. A record is another spelling of an earlier one
        if it is unknown, has the letters of that one, and that one is not in this release: records that stand side by
        side in one release are different. Whose label it is is asked as of known records under new names.
        """
        unknown = [
            rows[~np.isin(rows["record"], into.base.read(partition)["record"])]
            for partition, rows in (
                (partition, rows[(rows["letters"] > NOT_TAGGED) & ~rows["left_out"]]) for partition, rows in release()
            )
            if len(rows)
        ]
        new = np.concatenate([np.empty(0, ENTRY), *unknown])
        if not len(new) or not into.base.rows:
            return 0
        tags, earlier = np.unique(new["letters"]), {}
        for partition in range(PARTITIONS):
            old = into.base.read(partition)
            earlier[partition] = old[np.isin(old["letters"], tags) & (old["label"] != 0)]
        for partition, rows in release():
            earlier[partition] = earlier[partition][~np.isin(earlier[partition]["record"], rows["record"])]
        old = np.concatenate(list(earlier.values()))
        again = new[_may_repeat(old, new, "letters")]
        if len(again):
            self._stage(into, 0, "letters", np.unique(again["letters"]))
        return len(again)

    def _stage(self, into: StagedGeneration, partition: int, kind: str, rows: np.ndarray) -> None:
        into.folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(into.folder / f"{partition:02x}.{kind}", rows)

    def join(self, staged: StagedGeneration, serial: int) -> Generation:
        """Write the next generation's file, durably; `base` itself if no piece changes it.

        Memory: one partition, and the events that were released in several spellings. The caller makes it current by
        naming it in the ledger. UserError if a merge met a conflict.
        """
        if staged.pieces("conflict"):
            raise UserError(
                "labels or names differ from those released before for the same records, so nothing is released;"
                " an event's label and name never change: a corrected label says so (--corrects-column)"
            )
        pieces = staged.pieces("events")
        if not pieces:
            return staged.base
        path = self.folder / f"{serial:06d}.events"
        bounds, top, left_out, unlettered, digest = [0], 0.0, 0, 0, row_digest()
        again = np.concatenate(
            [np.empty(0, "<u8"), *(read_rows(p, np.dtype("<u8")) for p in staged.pieces("letters").values())]
        )
        several = [np.empty(0, EVENT)]
        with new_file(path, 0o600) as temporary, temporary.open("wb") as file:
            for partition in range(PARTITIONS):
                piece = pieces.get(f"{partition:02x}")
                rows = read_rows(piece, EVENT) if piece else staged.base.read(partition)
                if len(again):
                    rows["respelled"] |= np.isin(rows["letters"], again)
                file.write(rows.data)
                digest.update(rows.data)
                several.append(rows[rows["respelled"]])
                unlettered += int(np.count_nonzero((rows["letters"] == UNKNOWN) & (rows["label"] != 0)))
                bounds.append(bounds[-1] + len(rows))
                top = max(top, largest_total(rows))
                left_out += int(np.count_nonzero(rows["label"] == 0))
        top = max(top, _total(np.concatenate(several), "letters"))
        return Generation(path, tuple(bounds), top, digest.hexdigest(), left_out=left_out, unlettered=unlettered)

    def sweep(self, keep: set[Path]) -> None:
        """Remove every file and staging folder that is not in `keep`: left by runs that died, or superseded."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path not in keep:
                path.unlink(missing_ok=True)


def problems(generation: Generation) -> list[str]:
    """Problems of a generation's file, one line each; reads all of it, one partition at a time."""
    if generation.path is None:
        return []
    return check_rows(generation.path, generation.dtype, generation.bounds, generation.digest)


def largest_total(rows: np.ndarray) -> float:
    """The most that any one label of these rows (EVENT, a whole partition) has cost; 0 without rows."""
    return max(float(rows["epsilon"].max(initial=0.0)), _total(rows[rows["shared"]], "record"))


def _total(rows: np.ndarray, name: str) -> float:
    """The most that the rows (EVENT) with one value of a field cost together; 0 without rows."""
    _, which = np.unique(rows[name], return_inverse=True)
    return float(np.bincount(which, weights=rows["epsilon"]).max(initial=0.0))


def as_tags(tags: np.ndarray) -> np.ndarray:
    """(n,) S16 from (n,) S16 or (n, 16) uint8. ValueError for anything else."""
    if tags.dtype == np.uint8 and tags.ndim == 2 and tags.shape[1] == TAG_BYTES:
        return np.ascontiguousarray(tags).view(TAG).reshape(-1)
    if tags.dtype == TAG and tags.ndim == 1:
        return tags
    raise ValueError(f"tags are (n,) S16 or (n, 16) uint8, got {tags.shape} {tags.dtype}")


def places(old: np.ndarray, tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place of each tag among the old rows, and a mask of those that are there."""
    place = np.searchsorted(old["tag"], tags)
    known, inside = np.zeros(len(tags), bool), place < len(old)
    known[inside] = old["tag"][place[inside]] == tags[inside]
    return place, known


def _same_label(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Mask of new events that may repeat the label of an old one: their record is known, and not all of its events
    are other people's."""
    plain = all(np.array_equal(rows["record"], rows["tag"]) for rows in (old, new))
    if plain or not len(old) or not len(new):  # events without names are told apart by their records
        return np.zeros(len(new), bool)
    return _may_repeat(old, new, "record")


def _may_repeat(old: np.ndarray, new: np.ndarray, name: str) -> np.ndarray:
    """`_same_label` for records that are told apart by the field `name`."""
    order = np.argsort(old[name], kind="stable")
    records, labelers = old[name][order], old["labeler"][order]
    start, end = (np.searchsorted(records, new[name], side) for side in ("left", "right"))
    unnamed = np.concatenate([[0], np.cumsum(labelers == NOBODY)])
    same = (start < end) & ((new["labeler"] == NOBODY) | (unnamed[end] > unnamed[start]))
    others = np.flatnonzero((start < end) & ~same)
    if len(others):
        pairs = set(zip(records.tolist(), labelers.tolist(), strict=True))
        queries = zip(new[name][others].tolist(), new["labeler"][others].tolist(), strict=True)
        same[others] = [pair in pairs for pair in queries]
    return same


def _check(partition: int, rows: np.ndarray, cost: np.ndarray) -> None:
    """ValueError for arguments of `merge` that are not as it states."""
    if rows.dtype != ENTRY or rows.ndim != 1:
        raise ValueError(f"the rows of a merge must be (n,) ENTRY, got {rows.shape} {rows.dtype}")
    tags, labels = rows["tag"], rows["label"]
    if not 0 <= partition < PARTITIONS or not np.all((cost > 0.0) & np.isfinite(cost)):
        raise ValueError(f"0 <= partition < {PARTITIONS} and 0 < epsilon < inf, got {partition} and {cost}")
    if not np.all(np.abs(labels) == 1) or not np.all(np.abs(rows["blind"]) == 1):
        raise ValueError("labels and signs are -1 or +1")
    if np.any(tags[1:] <= tags[:-1]):
        raise ValueError("the tags of a merge are not strictly rising")
    if np.any(np.ascontiguousarray(tags).view(np.uint8)[::TAG_BYTES] != partition):
        raise ValueError(f"a tag does not belong to partition {partition}")


def _merged(
    old: np.ndarray, raised: np.ndarray, epsilon: np.ndarray, fresh: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """The partition after a merge, in tag order: `old` with ε raised in the rows `raised`, and `fresh`, whose row i
    stands before the old row place[i]."""
    if len(old) == 0:
        return fresh
    rows = np.empty(len(old) + len(fresh), EVENT)
    is_fresh = np.zeros(len(rows), bool)
    is_fresh[place + np.arange(len(fresh))] = True
    old["epsilon"][raised] = epsilon
    rows[is_fresh], rows[~is_fresh] = fresh, old
    return rows


def _changes(fresh: np.ndarray, before: np.ndarray, risen: np.ndarray) -> np.ndarray:
    """Changes that a merge makes to the labellers' tallies (`person.TALLY`). before: the raised rows as they were.
    risen: their ε from now on."""
    labelers = np.concatenate([fresh["labeler"], before["labeler"]])
    levels = np.concatenate([fresh["epsilon"], risen])
    gained = tally(labelers, levels, np.ones(len(labelers), np.int64))
    if len(before) == 0:
        return gained
    lost = tally(before["labeler"], before["epsilon"], np.full(len(before), -1, np.int64))
    both = np.concatenate([gained, lost])
    return tally(both["labeler"], both["epsilon"], both["events"])


def left_out(
    partitions: Iterable[tuple[int, np.ndarray]], store: Generation, totals: LabelerTotals, most: int
) -> np.ndarray:
    """The tags (m,) S16, sorted, of the events that are not to be released.

    partitions: number and rows (ENTRY) of each that a release touches. most: events of a person over the ledger's life.
    Memory: 32 bytes for each new event. UserError if a new event names no labeller.
    """
    gone, tags, labelers = [np.empty(0, TAG)], [np.empty(0, TAG)], [np.empty(0, TAG)]
    for partition, rows in partitions:
        old = store.read(partition)
        place, known = places(old, rows["tag"])
        gone.append(rows["tag"][known][old["label"][place[known]] == 0])
        tags.append(rows["tag"][~known])
        labelers.append(rows["labeler"][~known])
    new, people = np.concatenate(tags), np.concatenate(labelers)
    if nameless := int(np.count_nonzero(people == NOBODY)):
        raise UserError(
            f"every new event must name its labeller, since this key releases at most {most} events of a person, got"
            f" {nameless} that do not: name the column of labellers, and a labeller in every row"
        )
    keyed = np.ascontiguousarray(new).view(np.uint8).reshape(-1, TAG.itemsize)[:, 1:]  # the first byte is public
    order = np.lexsort((*keyed.T[::-1], people)) if len(new) else np.zeros(0, np.int64)
    person, start = np.unique(people[order], return_index=True)
    rank = np.arange(len(new)) - np.repeat(start, np.diff(np.append(start, len(new))))
    room = most - np.repeat(_events_of(person, totals), np.diff(np.append(start, len(new))))
    return np.sort(np.concatenate([*gone, new[order][rank >= room]]))


def _events_of(people: np.ndarray, totals: LabelerTotals) -> np.ndarray:
    """Number of events of each of these labellers (sorted) in the store."""
    counts = np.zeros(len(people), np.int64)
    if totals.path is None:
        return counts
    for byte in range(256):
        rows = read_rows(totals.path, TALLY, totals.bounds[byte], totals.bounds[byte + 1])
        place = np.searchsorted(people, rows["labeler"])
        inside = np.flatnonzero(place < len(people))
        inside = inside[people[place[inside]] == rows["labeler"][inside]]
        np.add.at(counts, place[inside], rows["events"][inside])
    return counts
