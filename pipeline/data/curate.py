"""A release by its holder, in memory that stays bounded: the steps, and `private-rlhf privatize` that takes them.

    read     chunks become sorted runs in an owner-only folder (`engine.spill`)
    gather   of copies with one record and event the first is kept; the events are counted and identified
    reserve  the ledger takes the plan, durably; every event goes into its store; a label that contradicts the store,
             or a total over a budget, ends it here
    write    randomised response and Parquet, shard by shard (`engine.write_bucket`), in a folder that is still
             owner-only, so that a disk that fills up costs nobody's budget; the manifest is last
    publish  the budget is spent, durably; the folder takes its name; the ledger's entry is finished

The stage of a recipe (`private_rlhf.stages.privatize`) takes the same steps for its two folders.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from private_rlhf.core.atomic import sync_folder, write_json
from private_rlhf.core.errors import MOST_NAME, UserError, is_name, one_line, say
from private_rlhf.data.chunks import CHUNK_BYTES, Chunk, cut
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.engine import (
    Events,
    KeyFile,
    KeyInHand,
    ShardJob,
    extra_fields,
    gather_events,
    spill,
    write_bucket,
)
from private_rlhf.data.formats import MarkedSource
from private_rlhf.data.layout import Layout, find_layout, respelled
from private_rlhf.data.other_key_records import compare_keys
from private_rlhf.data.publish import check_publish, occupied, publish, refusals, same_release
from private_rlhf.data.release import MANIFEST, PERSON, ROWS_PER_SHARD, SIGNATURE, WORD, ReleaseManifest, shard_name
from private_rlhf.data.sources import Part, open_source
from private_rlhf.data.workers import Workers, default_workers, start_workers
from private_rlhf.data.workfolder import boot_id, code_version, source_identity, work_folder
from private_rlhf.privacy.guarantee import DropCounts, dropped_text, guarantee, nothing_left
from private_rlhf.privacy.keys import PrivacyKey, load_key, make_private_folder
from private_rlhf.privacy.ledger import Budget, Ledger, ReleasePlan, Reservation
from private_rlhf.privacy.mechanism import LevelledResponse, Mechanism, RandomizedResponse
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import MESSAGES
from private_rlhf.privacy.row_files import replace_file
from private_rlhf.privacy.signatures import file_digest, public_key, sign
from private_rlhf.privacy.sorted_runs import KeptRows, Run
from tqdm import tqdm


@dataclass(frozen=True)
class OpenedSource:
    """A source that was opened. name: as its holder knows it, for messages."""

    name: str
    parts: tuple[Part, ...]
    layout: Layout

    @classmethod
    def open(cls, name: str, parts: Sequence[Part], options: Options) -> OpenedSource:
        """Looks at the columns and the first row; UserError if they do not fit."""
        return cls(name, tuple(parts), find_layout(name, parts, options))

    @property
    def size(self) -> int:
        """Bytes of its files, as far as known."""
        return sum(path.stat().st_size for part in self.parts for path in part.files)


@dataclass(frozen=True)
class Workspace:
    """The place where releases are made. work: owner-only; it takes what holds true labels. chunk_bytes: of
    JSONL that one worker reads at a time."""

    key: PrivacyKey
    work: Path
    pool: Workers
    chunk_bytes: int = CHUNK_BYTES

    @property
    def key_file(self) -> KeyFile | KeyInHand:
        """The way in which a task gets the key."""
        return KeyInHand(self.key) if self.key.path is None else KeyFile.of(self.key)


@dataclass(frozen=True)
class Bundle:
    """One folder to be released. made: where it is made, in the file system of its target."""

    rows: KeptRows
    layout: Layout
    mechanism: Mechanism
    manifest: ReleaseManifest
    made: Path
    target: Path


@dataclass(frozen=True)
class LedgerEntry:
    """The entry of the ledger. remedies: for labels that contradict an earlier release, and for records of one that
    come under other names, of another key of this user or in another spelling. unnamed: empty names of labellers and
    events. add_up, add_up_keys: charge such records the sum. rows: of the events."""

    ledger: Ledger
    source: str
    mechanism: RandomizedResponse | LevelledResponse
    events: Events
    rows: Sequence[KeptRows]
    columns: tuple[str, ...] = ()
    budget: Budget | None = None
    unnamed: int = 0
    add_up: bool = False
    max_events: int | None = None
    add_up_keys: bool = False
    remedies: tuple[str, str, str, str] = (
        "a corrected label needs an event id of its own (--event-column) and names the record that it corrects"
        " (--corrects-column)",
        "keep the names of the first release, leave these rows out, or charge both draws (--add-up-renamed)",
        "name that key (--key), leave these pairs out, or charge both draws (--add-up-keys)",
        "give the first texts, leave these pairs out, or charge both draws (--add-up-renamed)",
    )


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A release to be made. source: the name it is released under, default the data's own. workers: processes,
    default by cores and size. levels_before: its holder says that the ε of each label was set before the
    label. chunk_bytes: as in `Workspace`."""

    data: str
    output: Path
    epsilon: float | None
    key_file: Path
    split: str | None = None
    source: str | None = None
    options: Options = field(default_factory=Options)
    budget: Budget | None = None
    add_up: bool = False
    max_events: int | None = None
    workers: int | None = None
    add_up_keys: bool = False
    levels_before: bool = False
    chunk_bytes: int = CHUNK_BYTES

    @property
    def mechanism(self) -> RandomizedResponse | LevelledResponse:
        """One ε, or that of each label. UserError for none or both."""
        if (self.epsilon is None) != bool(self.options.epsilon_levels):
            raise UserError("--epsilon or --epsilon-column must be given, not both: one ε for all, or each its own")
        return response(self.epsilon or 0.0, self.options)

    @property
    def name(self) -> str:
        """The declared name of the source."""
        return one_line(Path(self.data).name, MOST_NAME) if self.source is None else self.source

    def __post_init__(self) -> None:
        if self.source is not None and not is_name(self.source):
            raise UserError(f"--source is no name: give one line of at most {MOST_NAME} printable characters")


def privatize_source(request: Request) -> str:
    """Writes the release, and returns the one line to print.

    Raises:
        UserError: ε not a finite number above 0, bad key, bad input, labels that contradict earlier releases, a budget
            that would be exceeded, or an output folder that holds something else. Nothing is written or spent then.
    """
    target = Path(request.output)
    with refusals(target):
        mechanism, key = request.mechanism, load_key(request.key_file)
        state, place = key.state.folder.resolve(), target.resolve()
        if state in (place, *place.parents):
            raise UserError(f"{target}: is in the key's state folder; choose another output folder")
        ledger = Ledger.open(key)
        options = replace(request.options, fold_names=ledger.folds_names)
        opened = OpenedSource.open(request.data, open_source(request.data, request.split), options)
        workers = request.workers or default_workers(opened.size)
        plan = work_plan([opened], mechanism.epsilon, key, request.chunk_bytes)
        folder = target.with_name(f".{target.name}.work")
        with work_folder(folder, plan, target) as work, start_workers(workers) as pool:
            manifest = _release(request, mechanism, ledger, opened, Workspace(key, work, pool, request.chunk_bytes))
    keep_prob = " or ".join(level.noise.keep_text(4) for level in mechanism.levels)
    return (
        f"{manifest.rows} labels released at ε = {manifest.epsilon_text} to {request.output} (each kept with"
        f" probability {keep_prob}), signed by {public_key(key)}; {dropped_text(manifest.dropped)}"
        f"{f'; beware: {mechanism.noise.warning}' if mechanism.noise.warning else ''}"
    )


def _release(
    request: Request,
    mechanism: RandomizedResponse | LevelledResponse,
    ledger: Ledger,
    opened: OpenedSource,
    workspace: Workspace,
) -> ReleaseManifest:
    (rows,), events, cap = capped(workspace, ledger, [KeptRows(read(workspace, opened))], request.max_events)
    counts = dropped(rows.runs, events.duplicates, events.left_out if cap else None)
    if not len(events):
        raise nothing_left(request.data, counts)
    say_repeated(request.data, request.options, counts.duplicates)
    columns = request.options.columns
    rows_kept, facts = len(events), guarantee(mechanism, workspace.key)
    levels = chosen_levels(request.data, mechanism, events, request.levels_before)[0]
    manifest = describe(opened.layout, rows_kept, rows_kept, request.name, facts, counts, levels)
    bundle = Bundle(rows, opened.layout, mechanism, manifest, workspace.work / "release", Path(request.output))
    taken = occupied(bundle.target)
    if taken:  # compared before anything is spent
        write(workspace, bundle)
        same_release(bundle.made, bundle.target)
    else:
        check_publish(workspace.work, bundle.target)
    names = unnamed(rows.runs)
    up = (request.add_up, cap, request.add_up_keys)
    entry = LedgerEntry(ledger, request.name, mechanism, events, [rows], columns, request.budget, names, *up)
    with reserved(workspace, entry) as reservation:
        if not taken:
            write(workspace, bundle)
            reservation.written()
            try:
                publish(bundle.made, bundle.target)
            except OSError as error:
                raise UserError(
                    f"{bundle.target}: the release cannot be given its name ({error.strerror}); the ledger counts it as"
                    " written: fix the place and run the same command again, which costs nothing more"
                ) from None
        reservation.commit(bundle.target.resolve())
    return manifest


# --- the steps --------------------------------------------------------------------------------------------------------


def work_plan(sources: Sequence[OpenedSource], epsilon: float, key: PrivacyKey, chunk_bytes: int) -> dict[str, Any]:
    """Facts on which the contents of a work folder depend."""
    return {
        "code": code_version(),
        "boot": boot_id(),
        "source": source_identity([part for opened in sources for part in opened.parts], key),
        "epsilon": repr(epsilon),
        "options": [repr(asdict(opened.layout.options)) for opened in sources],
        "forms": [opened.layout.convert.__name__ for opened in sources],
        "chunk_bytes": chunk_bytes,
    }


def read(workspace: Workspace, opened: OpenedSource, folder: str = "") -> tuple[Run, ...]:
    """All runs of a source, in a folder of their own; those of an interrupted run are taken as they are.

    UserError: the first bad row, or a file that changed meanwhile.
    """
    before = source_identity(opened.parts, workspace.key)
    home = workspace.work / folder
    make_private_folder(home)
    runs: list[Run] = []

    def chunks() -> Iterator[tuple[int, Chunk]]:
        number = 0
        for part in opened.parts:
            for chunk in cut(part, opened.layout.wanted, workspace.chunk_bytes):
                yield number, chunk
                number += 1

    if folder != "eval" and not opened.layout.as_it_stands:
        say(f"{opened.name}: read as {opened.layout.form}")
    tasks = ((chunk, number, opened.layout, workspace.key_file, home) for number, chunk in chunks())
    with tqdm(total=opened.size or None, desc="reading", unit="B", unit_scale=True, disable=None) as bar:
        try:
            for some in workspace.pool.run(spill, tasks):
                runs += some
                bar.update(sum(run.facts["bytes"] for run in some[:1]))
        except MarkedSource as fault:
            raise opened.layout.marked(opened.parts, fault) from None
    if all(part.files for part in opened.parts) and source_identity(opened.parts, workspace.key) != before:
        raise UserError(f"{opened.name}: changed while it was read; run again")
    if more := respelled(run.facts["spellings"] for run in runs):
        say(f"{opened.name}: {more} names of labellers are other spellings of names that are there: one person each")
    return tuple(runs)


def capped(
    workspace: Workspace, ledger: Ledger | None, rows: list[KeptRows], most: int | None
) -> tuple[list[KeptRows], Events, int | None]:
    """The rows and their events without those over the cap on a person's events, and the cap that holds, if any."""
    folder, path = workspace.work / "events", workspace.work / "left_out"
    events = gather_events(workspace.pool, rows, workspace.key, folder)
    if ledger is None:
        return rows, events, None
    gone, cap = ledger.left_out(events.partitions(), most)
    if not len(gone):
        return rows, events, cap
    replace_file(path, gone)
    events = gather_events(workspace.pool, rows, workspace.key, folder, path)
    return [replace(part, left_out=path) for part in rows], events, cap


def dropped(runs: Sequence[Run], duplicates: int, over_cap: int | None = None) -> DropCounts:
    """Rows left out of a source on the way."""
    empty, identical = (sum(run.facts[name] for run in runs) for name in ("empty", "identical"))
    ties = sum(run.facts.get("ties", 0) for run in runs) or None
    return DropCounts(identical, empty, duplicates, over_cap, ties)


def say_repeated(name: str, options: Options, duplicates: int) -> None:
    """A line where pairs come again and nothing says whose labels they are: only one label of each is released."""
    if duplicates and options.labeler_column is None:
        say(
            f"{name}: {duplicates} rows hold a pair that an earlier row holds; only its first label is kept. If several"
            " people labelled it, the column that says who (--labeler-column, privatize.labeler_column) keeps all"
        )


def unnamed(runs: Iterable[Run]) -> int:
    """Empty names of labellers or events."""
    return sum(run.facts["unnamed"] for run in runs)


def response(epsilon: float, options: Options) -> RandomizedResponse | LevelledResponse:
    """The randomiser at one ε, or at the levels that the options declare. UserError for others."""
    if options.epsilon_levels:
        return LevelledResponse.of(options.epsilon_levels, options.key("epsilon_levels"))
    return RandomizedResponse(epsilon)


def chosen_levels(
    source: str, mechanism: Mechanism, events: Events, told: bool
) -> list[dict[str, Any] | None]:
    """The `levels` in the manifest of each of the events' `KeptRows`; None where there is one ε.

    A level that was chosen after the label can tell it. UserError where one person's labels differ in it, unless `told`
    that every level was set before its label.
    """
    if not isinstance(mechanism, LevelledResponse):
        return [None] * len(events.rows)
    once = events.one_level_each
    if not once and not told:
        raise UserError(
            f"{source}: labels of one person (or of persons without a name) have several ε, and an ε that was chosen"
            " after the answer tells it: give each person one level and name the column of labellers; or, if every"
            " level was set before its label, say so (--levels-before-labels, privatize.levels_before_labels)"
        )
    epsilons = [level.epsilon for level in mechanism.levels]
    counts = [[[each, n] for each, n in zip(epsilons, part, strict=False)] for part in events.levels]
    return [{"chosen": PERSON if once else WORD, "events": part} for part in counts]


def describe(
    layout: Layout,
    rows: int,
    of: int,
    source: str,
    facts: dict[str, Any],
    counts: DropCounts,
    levels: dict[str, Any] | None = None,
) -> ReleaseManifest:
    """The manifest of a bundle. of: how many rows a source has of which these are a range of ids: shards are ranges of
    all ids, so that more of them are needed for the same number of rows in one. facts: `privatize.guarantee`. levels:
    as the manifest has them."""
    per_shard = ROWS_PER_SHARD if rows <= ROWS_PER_SHARD else max(1, ROWS_PER_SHARD * rows // of)
    return ReleaseManifest(
        format="conversational" if layout.kind == MESSAGES else "standard",
        rows=rows,
        source=source,
        guarantee=facts,
        dropped=counts.as_dict(),
        rows_per_shard=per_shard,
        extra_columns=layout.options.columns,
        levels=levels,
    )


@contextmanager
def reserved(workspace: Workspace, entry: LedgerEntry) -> Iterator[Reservation]:
    """The ledger's reservation for the events, with all of them in the store's next generation.

    UserError: labels that contradict earlier releases, or a budget that would be exceeded; nothing is spent then.
    """
    columns = b"".join(frame(name.encode()) for name in entry.columns)
    epsilon, levels = entry.mechanism.epsilon, [level.epsilon for level in entry.mechanism.levels]
    fields = [b"release", entry.events.content, repr(epsilon).encode(), columns]
    counts: tuple[tuple[float, int], ...] = ()
    if len(levels) > 1:
        fields.append(repr(levels).encode())
        counts = tuple(zip(levels, map(sum, zip(*entry.events.levels, strict=True)), strict=False))
    identity = workspace.key.keyed_digest(map(frame, fields))
    plan = ReleasePlan(entry.source, epsilon, len(entry.events), identity, max_events=entry.max_events, levels=counts)
    with entry.ledger.reserve(plan, entry.budget) as reservation:
        _enter(workspace, entry, reservation)
        yield reservation


def _enter(workspace: Workspace, entry: LedgerEntry, reservation: Reservation) -> None:
    """Events into the store's next generation."""
    if reservation.already:
        return
    if not reservation.resumed:
        remedy = None if entry.add_up_keys else entry.remedies[2]
        compare_keys(workspace.pool, entry.source, entry.rows, entry.ledger, reservation, remedy)
    if entry.unnamed and reservation.generation.base.legacy:
        raise UserError(
            f"{entry.source}: {entry.unnamed} names of labellers or events are empty, and this key's ledger was begun"
            " when an empty name was a name: give every row one, or leave the column out"
        )
    store, into = entry.ledger.store, reservation.generation
    respelled = store.respelled(entry.events.partitions, into)
    if respelled and not entry.add_up:
        raise UserError(
            f"{entry.source}: {respelled} or more labels of pairs that were released before under this key come in"
            " another spelling (case, spaces, punctuation, messages for text) and would be drawn a second time, at the"
            f" sum of both costs; nothing is released: {entry.remedies[3]}"
        )
    levels = tuple(level.epsilon for level in entry.mechanism.levels)
    conflicts, renamed = entry.events.merge(workspace.pool, store, levels, into, entry.add_up)
    if conflicts:
        raise UserError(
            f"{entry.source}: {conflicts} events carry another label than the one released before under this key,"
            f" so nothing is released; a label never changes: {entry.remedies[0]}"
        )
    if renamed:
        raise UserError(
            f"{entry.source}: {renamed} labels of pairs that were released before under this key come under other names"
            " (of event or labeller) and would be drawn a second time, at the sum of both costs; nothing is released:"
            f" {entry.remedies[1]}"
        )


def write(workspace: Workspace, bundle: Bundle) -> None:
    """All shards that are not there yet, then the manifest and the signature; on the disk when it returns."""
    done, manifest = bundle.made, bundle.manifest
    make_private_folder(done)
    fields = extra_fields(bundle.layout.options.columns, bundle.rows.runs)
    kind, bits = bundle.layout.kind, manifest.shard_bits
    keys = bundle.layout.options.message_keys
    shards = ShardJob(bundle.mechanism, workspace.key_file, kind, fields, bits, done, keys)
    tasks = ((shards, bundle.rows, shard) for shard in range(1 << bits))
    wanted = {MANIFEST, *(shard_name(shard) for shard in range(1 << bits))}
    for path in done.iterdir():
        if path.name not in wanted:
            path.unlink()
    with tqdm(total=manifest.rows, desc="writing", unit="row", disable=None) as bar:
        for rows in workspace.pool.run(write_bucket, tasks):
            bar.update(rows)
    write_json(done / MANIFEST, manifest.as_dict())
    if manifest.guarantee["key_mode"] == "keyed":
        names = sorted(wanted)
        digests = workspace.pool.run(file_digest, ((done / name,) for name in names))
        write_json(done / SIGNATURE, sign(workspace.key, dict(zip(names, digests, strict=True))))
    sync_folder(done)


def put(workspace: Workspace, bundle: Bundle) -> None:
    """Give a finished bundle its name, in place of what an earlier run left there."""
    shutil.rmtree(bundle.target, ignore_errors=True)
    publish(bundle.made, bundle.target)
