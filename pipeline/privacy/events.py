"""The owner-only store of labelling events: for each one its label, its labeller and the ε it has cost so far.

The store is one array of rows sorted by tag in one file (`SERIAL.events`), cut into 256 partitions by the first byte
of the tags, so that partitions can be merged one by one, by several processes, in the memory of one. A merge leaves
what it changed as a piece in a staging folder; `join` writes the next file from the pieces and the old file. Every
release of more than a few hundred events touches every partition, so a file per partition would share nothing between
generations and need 256 times as many writes to be forced to the disk.

Tags are keyed digests of the event and of the labeller: without the key nobody can tell which event a stored label
belongs to, so a row is a commitment that the owner alone can open. The files are 0600 in the key's 0700 folder.

All releases of one event under one key are a Markov chain in ε and cost the largest ε together (`mechanism`): the
event's total is a maximum, and a merge is idempotent.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.errors import UserError
from pipeline.core.noise import is_public
from pipeline.privacy.labelers import tally
from pipeline.privacy.owner_files import check_rows, create_file, read_rows, replace_file, row_digest

TAG_BYTES = 16
PARTITIONS = 256
TAG = np.dtype(f"S{TAG_BYTES}")  # numpy pads with zero bytes and compares bytes unsigned, so any 16 bytes are a tag
EVENT = np.dtype([("tag", TAG), ("labeler", TAG), ("epsilon", "<f8"), ("label", "i1")])


@dataclass(frozen=True)
class Generation:
    """One state of the store. `path`: its file, None while it is empty. `bounds`: 257 row numbers; partition p is rows
    bounds[p] to bounds[p + 1]. `epsilon`: the largest total of any event, 0 if there is none. `digest`: of the file."""

    path: Path | None = None
    bounds: tuple[int, ...] = (0,) * (PARTITIONS + 1)
    epsilon: float = 0.0
    digest: str = ""

    @property
    def rows(self) -> int:
        """Events in the store."""
        return self.bounds[-1]

    def read(self, partition: int) -> np.ndarray:
        """The rows (EVENT) of one partition. UserError if the file is missing or too short."""
        start, end = self.bounds[partition], self.bounds[partition + 1]
        if self.path is None or start == end:
            return np.empty(0, EVENT)
        return read_rows(self.path, EVENT, start, end)


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


@dataclass(frozen=True)
class MergeResult:
    """What one merge found. Counts alone leave it: which events conflict is known to nobody."""

    conflicts: int  # events whose stored label differs from the one given
    new_events: int
    rows: int  # in the partition after the merge
    max_event_epsilon: float  # the largest total of any event in the partition after the merge; 0 without events


class EventStore:
    """The store of one key. `folder`: the key's state folder; the files lie in `folder/events`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "events"

    def merge(
        self,
        partition: int,
        tags: np.ndarray,
        labels: np.ndarray,
        labelers: np.ndarray | None,
        epsilon: float,
        *,
        into: StagedGeneration,
    ) -> MergeResult:
        """Enter n events of one partition, released at `epsilon`, into a staged generation.

        tags: (n,) S16 or (n, 16) uint8, strictly rising, first byte = partition. labels: (n,) int8 in {-1, +1}.
        labelers: as tags but in any order, all zero = no labeller; None = no labeller anywhere. epsilon: finite, > 0.
        Repeating a merge replaces it; a merge that changes nothing leaves nothing. If any label conflicts the
        generation is spoilt: it can no longer be made current. ValueError for malformed arguments.
        """
        keys = as_tags(tags)
        _check(partition, keys, labels, epsilon)
        old = into.base.read(partition)
        place = np.searchsorted(old["tag"], keys)
        known = np.zeros(len(keys), bool)
        inside = place < len(old)
        known[inside] = old["tag"][place[inside]] == keys[inside]
        hits = place[known]
        conflicts = int(np.count_nonzero(old["label"][hits] != labels[known]))
        new_events = len(keys) - len(hits)
        top = max(float(old["epsilon"].max(initial=0.0)), epsilon if len(keys) else 0.0)
        result = MergeResult(conflicts, new_events, len(old) + new_events, top)
        if conflicts:
            self._stage(into, partition, "conflict", np.empty(0, EVENT))
            return result
        raised = hits[old["epsilon"][hits] < epsilon]
        if new_events == 0 and len(raised) == 0:
            return result
        fresh = np.zeros(new_events, EVENT)
        fresh["tag"], fresh["label"], fresh["epsilon"] = keys[~known], labels[~known], epsilon
        if labelers is not None:
            fresh["labeler"] = as_tags(labelers)[~known]
        self._stage(into, partition, "tally", _changes(fresh, old[raised], epsilon))
        self._stage(into, partition, "events", _merged(old, raised, epsilon, fresh, place[~known]))
        return result

    def _stage(self, into: StagedGeneration, partition: int, kind: str, rows: np.ndarray) -> None:
        into.folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(into.folder / f"{partition:02x}.{kind}", rows)

    def join(self, staged: StagedGeneration, serial: int) -> Generation:
        """Write the next generation's file, durably; `base` itself if no piece changes it.

        Memory: one partition. The caller makes it current by naming it in the ledger. UserError if a merge met a
        conflict.
        """
        if staged.pieces("conflict"):
            raise UserError(
                "labels differ from those released before for the same events, so nothing is released;"
                " an event's label never changes: give a corrected label an event id of its own (--event-column)"
            )
        pieces = staged.pieces("events")
        if not pieces:
            return staged.base
        path = self.folder / f"{serial:06d}.events"
        bounds, top, digest = [0], 0.0, row_digest()
        with create_file(path) as file:
            for partition in range(PARTITIONS):
                piece = pieces.get(f"{partition:02x}")
                rows = read_rows(piece, EVENT) if piece else staged.base.read(partition)
                file.write(rows.data)
                digest.update(rows.data)
                bounds.append(bounds[-1] + len(rows))
                top = max(top, float(rows["epsilon"].max(initial=0.0)))
        return Generation(path, tuple(bounds), top, digest.hexdigest())

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
    """What is wrong with a generation's file, one line each; reads all of it, one partition at a time."""
    if generation.path is None:
        return []
    return check_rows(generation.path, EVENT, generation.bounds, generation.digest)


def as_tags(tags: np.ndarray) -> np.ndarray:
    """(n,) S16 from (n,) S16 or (n, 16) uint8. ValueError for anything else."""
    if tags.dtype == np.uint8 and tags.ndim == 2 and tags.shape[1] == TAG_BYTES:
        return np.ascontiguousarray(tags).view(TAG).reshape(-1)
    if tags.dtype == TAG and tags.ndim == 1:
        return tags
    raise ValueError(f"tags are (n,) S16 or (n, 16) uint8, got {tags.shape} {tags.dtype}")


def _check(partition: int, tags: np.ndarray, labels: np.ndarray, epsilon: float) -> None:
    if not 0 <= partition < PARTITIONS or not epsilon > 0.0 or is_public(epsilon):
        raise ValueError(f"0 <= partition < {PARTITIONS} and 0 < epsilon < inf, got {partition} and {epsilon}")
    if labels.shape != tags.shape or labels.dtype != np.int8 or not np.all(np.abs(labels) == 1):
        raise ValueError("labels are (n,) int8 in {-1, +1}, one for each tag")
    if np.any(tags[1:] <= tags[:-1]):
        raise ValueError("the tags of a merge are not strictly rising")
    if len(tags):
        first, last = (np.ascontiguousarray(tags[[0, -1]]).view(np.uint8)[::TAG_BYTES]).tolist()
        if first != partition or last != partition:
            raise ValueError(f"a tag does not belong to partition {partition}")


def _merged(old: np.ndarray, raised: np.ndarray, epsilon: float, fresh: np.ndarray, place: np.ndarray) -> np.ndarray:
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


def _changes(fresh: np.ndarray, before: np.ndarray, epsilon: float) -> np.ndarray:
    """What a merge changes in the labellers' tallies (`labelers.TALLY`). before: the raised rows as they were."""
    labelers = np.concatenate([fresh["labeler"], before["labeler"]])
    gained = tally(labelers, np.full(len(labelers), epsilon), np.ones(len(labelers), np.int64))
    if len(before) == 0:
        return gained
    lost = tally(before["labeler"], before["epsilon"], np.full(len(before), -1, np.int64))
    both = np.concatenate([gained, lost])
    return tally(both["labeler"], both["epsilon"], both["events"])
