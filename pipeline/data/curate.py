"""`private-rlhf privatize --data SRC --output DIR`: a holder of labels makes a release, in memory that stays bounded.

    read     chunks become sorted runs in an owner-only folder beside the output (`engine.spill`)
    gather   of copies with one record and event the first is kept; the events are counted and identified
    reserve  the ledger takes the plan; every event goes into its store; a label that contradicts the store, or a total
             over a budget, ends it here, with nothing written
    write    randomised response and Parquet, shard by shard (`engine.write_bucket`); the manifest is last
    publish  the folder takes its name, and the ledger's entry is finished
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.core.atomic import sync_folder, write_json
from pipeline.core.errors import UserError
from pipeline.data.chunks import CHUNK_BYTES, Chunk, cut
from pipeline.data.engine import (
    Events,
    KeyFile,
    ShardJob,
    extra_fields,
    finished_runs,
    gather_events,
    spill,
    write_bucket,
)
from pipeline.data.layout import Layout, Options, find_layout
from pipeline.data.release import (
    MANIFEST,
    ReleaseManifest,
    occupied,
    publish,
    refusals,
    same_release,
    shard_name,
)
from pipeline.data.sources import Part, open_source
from pipeline.data.workers import Workers, default_workers, start_workers
from pipeline.data.workfolder import boot_id, code_version, source_identity, work_folder
from pipeline.privacy.keys import PrivacyKey, load_key
from pipeline.privacy.ledger import Budget, Ledger, ReleasePlan, Reservation
from pipeline.privacy.mechanism import RandomizedResponse
from pipeline.privacy.prf import frame
from pipeline.privacy.privatize import DropCounts, guarantee, nothing_left
from pipeline.privacy.records import MESSAGES
from pipeline.privacy.runs import Run


@dataclass(frozen=True)
class Request:
    """What is to be released. source: the name it is released under, default the data's own. workers: processes,
    default by cores and size. chunk_bytes: of JSONL that one worker reads at a time."""

    data: str
    output: Path
    epsilon: float
    key_file: Path
    split: str | None = None
    source: str | None = None
    options: Options = field(default_factory=Options)
    budget: Budget | None = None
    workers: int | None = None
    chunk_bytes: int = CHUNK_BYTES

    @property
    def name(self) -> str:
        """The declared name of the source."""
        return self.source or Path(self.data).name


@dataclass(frozen=True)
class _Job:
    """A request with everything that was opened for it."""

    request: Request
    mechanism: RandomizedResponse
    key: PrivacyKey
    ledger: Ledger
    parts: list[Part]
    layout: Layout

    def plan(self) -> dict[str, Any]:
        """What the contents of the work folder depend on."""
        options = asdict(self.request.options) | {"convert": self.layout.convert.__name__}
        return {
            "code": code_version(),
            "boot": boot_id(),
            "source": source_identity(self.parts, self.key),
            "epsilon": self.mechanism.epsilon,
            "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
            "chunk_bytes": self.request.chunk_bytes,
        }


def privatize_source(request: Request) -> str:
    """Writes the release, and returns the one line to print.

    Raises:
        UserError: ε not a finite number above 0, bad key, bad input, labels that contradict earlier releases, a budget
            that would be exceeded, or an output folder that holds something else. Nothing is written or spent then.
    """
    target = Path(request.output)
    with refusals(target):
        mechanism, key = RandomizedResponse(request.epsilon), load_key(request.key_file)
        ledger = Ledger.open(key)
        parts = open_source(request.data, request.split)
        job = _Job(request, mechanism, key, ledger, parts, find_layout(request.data, parts, request.options))
        size = sum(path.stat().st_size for part in parts for path in part.files)
        workers = request.workers or default_workers(size)
        with work_folder(target, job.plan()) as work, start_workers(workers) as crew:
            manifest = _release(job, work, crew, size)
    dropped = ", ".join(f"{count} {name}" for name, count in manifest.dropped.items())
    return (
        f"{manifest.rows} labels released at ε = {mechanism.epsilon:g} to {request.output} (each kept with probability "
        f"{mechanism.keep_prob:.4f}); dropped: {dropped}"
    )


def _release(job: _Job, work: Path, crew: Workers, size: int) -> ReleaseManifest:
    request, target = job.request, Path(job.request.output)
    before = source_identity(job.parts, job.key)
    runs = _read(job, work, crew, size)
    if all(part.files for part in job.parts) and source_identity(job.parts, job.key) != before:
        raise UserError(f"{request.data}: changed while it was read; run again")
    events = gather_events(runs, job.key, work / "events.bin")
    counts = DropCounts(
        sum(run.facts["identical"] for run in runs), sum(run.facts["empty"] for run in runs), events.duplicates
    )
    if not len(events):
        raise nothing_left(request.data, counts)
    manifest = ReleaseManifest(
        format="conversational" if job.layout.kind == MESSAGES else "standard",
        rows=len(events),
        source=request.name,
        guarantee=guarantee(job.mechanism, job.key),
        dropped=counts.as_dict(),
        extra_columns=request.options.columns,
    )
    done = work / "release"
    done.mkdir(mode=0o700, exist_ok=True)
    if occupied(target):  # compared before anything is spent
        _write(job, runs, manifest, done, crew)
        same_release(done, target)
    with job.ledger.reserve(_ledger_plan(job, events), request.budget) as reservation:
        _enter(job, events, reservation)
        if not occupied(target):
            _write(job, runs, manifest, done, crew)
            sync_folder(done)
            publish(done, target, _default_mode(work))
        reservation.commit(target.resolve())
    return manifest


def _read(job: _Job, work: Path, crew: Workers, size: int) -> list[Run]:
    """All runs of the source; those of an interrupted run are taken as they are."""
    key_file = KeyFile.of(job.key)
    runs: list[Run] = []
    wanted = job.layout.options.wanted

    def chunks() -> Iterator[tuple[int, Chunk]]:
        number = 0
        for part in job.parts:
            for chunk in cut(part, wanted, job.request.chunk_bytes):
                yield number, chunk
                number += 1

    tasks = ((chunk, number, job.layout, key_file, work) for number, chunk in chunks())
    with tqdm(total=size or None, desc="reading", unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
        for some in crew.run(spill_once, tasks):
            runs += some
            bar.update(sum(run.facts["bytes"] for run in some[:1]))
    return runs


def spill_once(chunk: Chunk, number: int, layout: Layout, key_file: KeyFile, work: Path) -> list[Run]:
    """The runs of a chunk, made unless an interrupted run left them."""
    return finished_runs(work, number) or spill(chunk, number, layout, key_file, work)


def _ledger_plan(job: _Job, events: Events) -> ReleasePlan:
    columns = b"".join(frame(name.encode()) for name in job.request.options.columns)
    fields = (b"release", events.content, repr(job.mechanism.epsilon).encode(), columns)
    identity = job.key.keyed_digest(map(frame, fields))
    return ReleasePlan(job.request.name, job.mechanism.epsilon, len(events), identity)


def _enter(job: _Job, events: Events, reservation: Reservation) -> None:
    """Events into the store and ε into the totals, before the first byte is written."""
    if reservation.already:
        return
    conflicts = events.merge(job.ledger.store, job.mechanism.epsilon, reservation.generation)
    if conflicts:
        raise UserError(
            f"{job.request.data}: {conflicts} events carry another label than the one released before under this key,"
            " so nothing is released; a label never changes: give a correction or a second opinion an event id of its"
            " own (--event-column)"
        )
    reservation.written()


def _write(job: _Job, runs: list[Run], manifest: ReleaseManifest, done: Path, crew: Workers) -> None:
    """All shards that are not there yet, then the manifest."""
    fields = extra_fields(job.request.options.columns, runs)
    shards = ShardJob(job.mechanism, KeyFile.of(job.key), job.layout.kind, fields, manifest.shard_bits, done)
    tasks = ((shards, runs, shard) for shard in range(1 << shards.bits))
    wanted = {MANIFEST, *(shard_name(shard) for shard in range(1 << shards.bits))}
    for path in done.iterdir():
        if path.name not in wanted:
            path.unlink()
    with tqdm(total=manifest.rows, desc="writing", unit="row", disable=None, file=sys.stderr) as bar:
        for rows in crew.run(write_bucket, tasks):
            bar.update(rows)
    write_json(done / MANIFEST, manifest.as_dict())


def _default_mode(work: Path) -> int:
    """The mode that new folders get here."""
    probe = work / "mode"
    probe.mkdir(exist_ok=True)
    return probe.stat().st_mode & 0o777
