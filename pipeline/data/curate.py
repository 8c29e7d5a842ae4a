"""A release by its holder, in memory that stays bounded: the steps, and `private-rlhf privatize` that takes them.

    read     chunks become sorted runs in an owner-only folder (`engine.spill`)
    gather   of copies with one record and event the first is kept; the events are counted and identified
    reserve  the ledger takes the plan, durably; every event goes into its store; a label that contradicts the store,
             or a total over a budget, ends it here
    write    randomised response and Parquet, shard by shard (`engine.write_bucket`), in a folder that is still
             owner-only, so that a disk that fills up costs nobody's budget; the manifest is last
    publish  the budget is spent, durably; the folder takes its name; the ledger's entry is finished

The stage of a recipe (`private_rlhf.stages.privatize`) takes the same steps for its two folders, and several machines
(`release_step`) the first two and the draws, before one of them does the rest here.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter, deque
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
    ShardJob,
    extra_fields,
    finished_runs,
    gather_events,
    gather_pieces,
    key_loader,
    spill,
    write_bucket,
)
from private_rlhf.data.formats import MarkedSource
from private_rlhf.data.layout import Layout, find_layout, respelled
from private_rlhf.data.other_key_records import compare_keys
from private_rlhf.data.publish import check_publish, counted_as, occupied, publish, refusals, same_release
from private_rlhf.data.release import MANIFEST, PERSON, ROWS_PER_SHARD, SIGNATURE, WORD, ReleaseManifest, shard_name
from private_rlhf.data.sources import Part, open_source
from private_rlhf.data.workers import Workers, default_workers, start_workers
from private_rlhf.data.workfolder import PartMissing, boot_id, code_version, shared_folder, source_identity, work_folder
from private_rlhf.privacy.guarantee import DropCounts, dropped_text, guarantee, nothing_left
from private_rlhf.privacy.keys import PrivacyKey, load_key, make_private_folder
from private_rlhf.privacy.ledger import Budget, Ledger, ReleasePlan, Reservation
from private_rlhf.privacy.mechanism import LevelledResponse, Mechanism, RandomizedResponse
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import MESSAGES, bucket_bits
from private_rlhf.privacy.row_files import replace_file
from private_rlhf.privacy.signatures import file_digest, public_key, sign
from private_rlhf.privacy.sorted_runs import KeptRows, Run
from tqdm import tqdm

EVENTS = "events"
MOST_CHUNK_BYTES = 256 << 20
"""Of a large source that several tasks read: each chunk becomes a file of its own."""


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
    JSONL that one worker reads at a time. shared: tasks of other machines make some of the pieces."""

    key: PrivacyKey
    work: Path
    pool: Workers
    chunk_bytes: int = CHUNK_BYTES
    shared: bool = False


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
    label. chunk_bytes: as in `Workspace`. step: of several (`release_step`)."""

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
    step: str | None = None

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
    """Writes the release, and returns the one line to print. UserError: ε not a finite number above 0, bad key, bad
    input, labels that contradict earlier releases, a budget that would be exceeded, or an output folder that holds
    something else. Nothing is written or spent then."""
    target = Path(request.output)
    with refusals(target):
        mechanism, key = request.mechanism, load_key(request.key_file)
        ledger = Ledger.open(key)
        if request.step and not ledger.folds_names:  # tasks that open no ledger cannot know
            raise UserError("--step must have a ledger that folds names, got one that keeps spellings: leave it out")
        with opened_source(request, key, ledger.folds_names) as (opened, workspace):
            manifest = _release(request, mechanism, ledger, opened, workspace)
    keep_prob = " or ".join(level.noise.keep_text(4) for level in mechanism.levels)
    return (
        f"{manifest.rows} labels released at ε = {manifest.epsilon_text} to {request.output} (each kept with"
        f" probability {keep_prob}), signed by {public_key(key)}; {dropped_text(manifest.dropped)}"
        f"{f'; beware: {mechanism.noise.warning}' if mechanism.noise.warning else ''}"
    )


@contextmanager
def opened_source(request: Request, key: PrivacyKey, fold_names: bool) -> Iterator[tuple[OpenedSource, Workspace]]:
    """The source and the place for its release, with what was begun of it."""
    target = Path(request.output)
    state, place = key.state.folder.resolve(), target.resolve()
    if state in (place, *place.parents):
        raise UserError(f"{target}: is in the key's state folder; choose another output folder")
    options = replace(request.options, fold_names=fold_names)
    opened = OpenedSource.open(request.data, open_source(request.data, request.split), options)
    chunk_bytes, shared = request.chunk_bytes, request.step is not None
    if shared:
        chunk_bytes = max(chunk_bytes, min(opened.size >> 12, MOST_CHUNK_BYTES))
    plan = work_plan([opened], request.mechanism.epsilon, key, chunk_bytes, None if shared else boot_id())
    if shared:  # or the last step would not hold what the others were told
        plan |= {"budget": repr(request.budget), "cap": request.max_events}
    home = target.with_name(f".{target.name}.work")
    last = request.step == "finish"
    folder = shared_folder(home, plan, target, last) if shared else work_folder(home, plan, target)
    with folder as work, start_workers(request.workers or default_workers(opened.size)) as pool:
        yield opened, Workspace(key, work, pool, chunk_bytes, shared)


def _release(
    request: Request,
    mechanism: RandomizedResponse | LevelledResponse,
    ledger: Ledger,
    opened: OpenedSource,
    workspace: Workspace,
) -> ReleaseManifest:
    rows = rows_of(workspace, opened)
    if workspace.shared and not occupied(Path(request.output)):
        check_drawn(workspace, rows)
    (rows,), events, cap = capped(workspace, ledger, [rows], request.max_events)
    counts = dropped(rows.runs, events.duplicates, events.left_out if cap else None)
    if not len(events):
        raise nothing_left(request.data, counts)
    say_repeated(request.data, request.options, counts.duplicates)
    rows_kept, facts = len(events), guarantee(mechanism, workspace.key)
    levels = chosen_levels(request.data, mechanism, events, request.levels_before)[0]
    manifest = describe(opened.layout, rows_kept, rows_kept, request.name, facts, counts, levels)
    made = drawn_folder(workspace, manifest.shard_bits, rows)
    bundle = Bundle(rows, opened.layout, mechanism, manifest, made, Path(request.output))
    taken = occupied(bundle.target)
    if taken:  # compared before anything is spent
        bundle = replace(bundle, manifest=counted_as(manifest, bundle.target))
        write(workspace, bundle)
        same_release(bundle.made, bundle.target)
    else:
        check_publish(workspace.work, bundle.target)
    how = (request.budget, unnamed(rows.runs), request.add_up, cap, request.add_up_keys)
    entry = LedgerEntry(ledger, request.name, mechanism, events, [rows], request.options.columns, *how)
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


# --- its parts, by tasks that share the output's file system ----------------------------------------------------------


def release_step(request: Request) -> str:
    """`privatize_source`, or the step of it that is asked for: "map:i/N" reads every N-th chunk from the i-th on, then
    "reduce:j/M" lists the events of every M-th range of record ids and draws their labels, "finish" does the rest.

    Every file of a step is made whole or not at all, under a name of its own, from the source and the key: a task that
    is killed is run again, and two that do the same leave the same bytes. Only the last step opens the ledger; until it
    publishes them, what is drawn is for its owner only, as the true labels are that lie beside it.
    """
    if request.step in (None, "finish"):
        return privatize_source(request)
    part = re.fullmatch(r"(map|reduce):(\d{1,6})/(\d{1,6})", str(request.step), re.ASCII)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        got = f"got {request.step!r}: for example map:3/7"
        raise UserError(f"--step must be map:i/N, reduce:j/M or finish with i from 1 to N, {got}")
    key = load_key(request.key_file)
    with refusals(request.output), opened_source(request, key, fold_names=True) as (opened, workspace):
        own = replace(workspace, pool=workspace.pool.part(int(part[2]), int(part[3])))
        if part[1] == "map":
            read(own, opened)
        else:
            rows = rows_of(workspace, opened)
            deque(gather_pieces(own.pool, [rows], own.work / EVENTS, keep=True), maxlen=0)
            deque(draw(own, rows, opened.layout, request.mechanism, bits_before(rows)), maxlen=0)
    return f"{request.output}: {request.step} is done"


def rows_of(workspace: Workspace, opened: OpenedSource) -> KeptRows:
    """All rows of the source. PartMissing where tasks share the reading, and one of them did not do its own."""
    if workspace.shared:
        done = [bool(finished_runs(workspace.work, number)) for number, _ in numbered_chunks(workspace, opened)]
        if not all(done):
            raise PartMissing(f"{done.count(False)} of {len(done)} chunks are not read: run the map steps again")
    return KeptRows(read(workspace, opened))


def check_drawn(workspace: Workspace, rows: KeptRows) -> None:
    """PartMissing unless every shard is drawn; a task lists its events before."""
    bits = bits_before(rows)
    done = [(drawn_folder(workspace, bits, rows) / shard_name(shard)).exists() for shard in range(1 << bits)]
    if not all(done):
        raise PartMissing(f"{done.count(False)} of {len(done)} shards are not drawn: run the reduce steps again")


def bits_before(rows: KeptRows) -> int:
    """log2 of the number of shards while repeated rows are not yet counted: mostly that of the release. Where fewer
    are left, the last step draws the shards itself."""
    return bucket_bits(sum(run.rows for run in rows.runs), ROWS_PER_SHARD)


# --- the steps --------------------------------------------------------------------------------------------------------


def work_plan(
    sources: Sequence[OpenedSource], epsilon: float, key: PrivacyKey, chunk_bytes: int, boot: str | None
) -> dict[str, Any]:
    """Facts on which the contents of a work folder depend. boot: the system's, None for files that outlast it."""
    return {
        "code": code_version(),
        "boot": boot,
        "source": source_identity([part for opened in sources for part in opened.parts], key),
        "epsilon": repr(epsilon),
        "options": [repr(asdict(opened.layout.options)) for opened in sources],
        "forms": [opened.layout.convert.__name__ for opened in sources],
        "chunk_bytes": chunk_bytes,
    }


def numbered_chunks(workspace: Workspace, opened: OpenedSource) -> Iterator[tuple[int, Chunk]]:
    """The chunks of all files, counted on from one to the next."""
    return enumerate(c for part in opened.parts for c in cut(part, opened.layout.wanted, workspace.chunk_bytes))


def read(workspace: Workspace, opened: OpenedSource, folder: str = "") -> tuple[Run, ...]:
    """All runs of a source, in a folder of their own; those of an interrupted run are taken as they are.

    UserError: the first bad row, or a file that changed meanwhile.
    """
    before = source_identity(opened.parts, workspace.key)
    home = workspace.work / folder
    make_private_folder(home)
    runs: list[Run] = []
    if folder != "eval" and not opened.layout.as_it_stands:
        say(f"{opened.name}: read as {opened.layout.form}")
    given = (opened.layout, key_loader(workspace.key), home, workspace.shared)
    tasks = ((chunk, number, *given) for number, chunk in numbered_chunks(workspace, opened))
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
    events = gather_events(workspace.pool, rows, workspace.key, workspace.work / EVENTS, keep=workspace.shared)
    if ledger is None:
        return rows, events, None
    gone, cap = ledger.left_out(events.partitions(), most)
    if not len(gone):
        return rows, events, cap
    path = workspace.work / f"{workspace.key.keyed_digest([gone.tobytes()])[:16]}.left_out"
    replace_file(path, gone)
    events = gather_events(workspace.pool, rows, workspace.key, path.with_suffix(".events"), path)
    return [replace(part, left_out=path) for part in rows], events, cap


def dropped(runs: Sequence[Run], duplicates: int, over_cap: int | None = None) -> DropCounts:
    """Rows left out of a source on the way."""
    empty, identical = (sum(run.facts[name] for run in runs) for name in ("empty", "identical"))
    others = sum((Counter(run.facts["dropped"]) for run in runs), Counter[str]())
    return DropCounts(identical, empty, duplicates, over_cap, **others)


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


def chosen_levels(source: str, mechanism: Mechanism, events: Events, told: bool) -> list[dict[str, Any] | None]:
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


def drawn_folder(workspace: Workspace, bits: int, rows: KeptRows) -> Path:
    """The folder for the 2^bits shards of these rows until they are released: others of the same work have another."""
    return workspace.work / f"release-{bits}{rows.left_out.stem if rows.left_out else ''}"


def draw(
    workspace: Workspace, rows: KeptRows, layout: Layout, mechanism: Mechanism, bits: int, made: Path | None = None
) -> Iterator[int]:
    """Randomise and write each of the 2^bits shards that is not there yet; yields its rows."""
    folder = made or drawn_folder(workspace, bits, rows)
    make_private_folder(folder)
    fields, keys = extra_fields(layout.options.columns, rows.runs), layout.options.message_keys
    job = ShardJob(mechanism, key_loader(workspace.key), layout.kind, fields, bits, folder, keys)
    return workspace.pool.run(write_bucket, ((job, rows, shard) for shard in range(1 << bits)))


def write(workspace: Workspace, bundle: Bundle) -> None:
    """All shards that are not there yet, then the manifest and the signature; on the disk when it returns."""
    done, manifest = bundle.made, bundle.manifest
    shards = draw(workspace, bundle.rows, bundle.layout, bundle.mechanism, manifest.shard_bits, done)
    wanted = {MANIFEST, *(shard_name(shard) for shard in range(1 << manifest.shard_bits))}
    for path in done.iterdir():
        if path.name not in wanted:
            path.unlink()
    with tqdm(total=manifest.rows, desc="writing", unit="row", disable=None) as bar:
        for rows in shards:
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
