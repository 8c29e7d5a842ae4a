"""The released bundle on disk: Parquet shards in TRL's preference format and `_manifest`, a JSON object.

Columns `prompt`, `chosen`, `rejected`, `record_id`, where `chosen` is the response that the *private* label prefers.
Rows stand in `record_id` order and a shard holds a range of record ids, one of a power of two that the number of rows
gives: the layout does not depend on labels, and shards can be written side by side. The files are a pure function of
the rows (`container`), which every reader checks of their names and settings, and `Release.check_rows` of their bytes.
The manifest says nothing about the raw input but its declared name: no size, time, digest, flip count or agreement
rate. `_signature` is the key holder's signature of all other files; a bundle without one opens, and nobody vouches for
it. Readers of data pass over both names, so that the folder loads as it is; older bundles have `OLD_NAMES`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from private_rlhf.core.atomic import json_text
from private_rlhf.core.documents import MANIFESTS, DocumentError, read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, levels_text
from private_rlhf.data.container import (
    EXTRA_TYPES,
    ROWS_PER_GROUP,
    check_columns,
    check_files,
    differs_from_rows,
    writer_version,
)
from private_rlhf.privacy.guarantee import RANDOMISED_BY, DropCounts, stated
from private_rlhf.privacy.mechanism import LevelledResponse, Mechanism, PublicLabels, RandomizedResponse
from private_rlhf.privacy.records import (
    CANONICALISATION,
    MESSAGES,
    TEXT,
    Message,
    Text,
    bucket_bits,
    encode_text,
    to_json,
)
from private_rlhf.privacy.signatures import file_digest, verify
from private_rlhf.recipe.data_section import MessageKey

SCHEMA_VERSION = 2
ROWS_PER_SHARD = 65_536
MANIFEST, SIGNATURE = MANIFESTS[0], "_signature"
OLD_NAMES = {MANIFESTS[1]: MANIFEST, "signature.json": SIGNATURE}
"""Names in older bundles -> the present ones."""
REMEDY = "write it again with `private-rlhf privatize`"
KEY_MODES = ("keyed", "local", "insecure_seed", "none")
MESSAGE_KEYS = dict.fromkeys((*get_args(MessageKey), "tool_call_id"), str) | {"tool_calls": list, "tools": list}
"""Keys of a message beside role and content, with their types; lists are released as JSON. `tools` belongs to the
conversation: its first message has them. `tool_call_id` goes with tool_calls."""
EPSILON = "epsilon"
"""The column with the ε of each label, where each has its own."""
PERSON, WORD = "once by each person", "before the labels, by the word of their holder"
PAGE = "by each person, before the labelling page put the question"
TERMINAL = "by the person at the terminal, before the first question of a round"
"""The four ways in which the levels of a release's labels may have been chosen."""
_NEEDED = ("mechanism", "epsilon", "keep_prob", "flip_prob", "unit", "neighbouring", "key_mode", "mark")


class ReleasedPair(NamedTuple):
    """One released row. `chosen` is what the private label prefers; each text is a string or a message list. epsilon:
    the level of its label, where each has its own."""

    prompt: Text
    chosen: Text
    rejected: Text
    record_id: str
    epsilon: float | None = None


COLUMNS = ReleasedPair._fields[:4]
"""Of every release."""


@dataclass(frozen=True)
class ReleaseManifest:
    """Content of the manifest.

    format: "standard" (strings) or "conversational" (message lists). guarantee: `privatize.guarantee(...)`: epsilon
    (null for infinity), keep_prob, unit, neighbouring relation, key_mode, mark. dropped: rows left out {identical,
    empty, duplicates}. source: the input's name as its holder declared it. rows_per_shard: at most, on average.
    extra_columns: columns beside the four that the holder of the labels named and that are released as they are.
    totals: {"record", "person"}, the largest ε of all answers about any one pair and of any one person, at most; the
    latter is null where persons are not known. None where the release does not state them. levels: {"chosen",
    "events"}, where each label has an ε of its own: how the levels were chosen, and [ε, number of labels] by rising ε.
    """

    format: str
    rows: int
    source: str
    guarantee: Mapping[str, Any]
    dropped: Mapping[str, int]
    rows_per_shard: int = ROWS_PER_SHARD
    extra_columns: tuple[str, ...] = ()
    totals: Mapping[str, float | None] | None = None
    levels: Mapping[str, Any] | None = None
    canonicalisation: int = CANONICALISATION
    schema_version: int = SCHEMA_VERSION

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the manifest, with the NOT PRIVATE mark (or null) on top."""
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        facts["extra_columns"] = list(self.extra_columns)
        return {"mark": self.guarantee.get("mark"), "columns": list(self.columns)} | facts

    @property
    def columns(self) -> tuple[str, ...]:
        """Of its shards."""
        return (*COLUMNS, *((EPSILON,) if self.levels else ()), *self.extra_columns)

    @property
    def shard_bits(self) -> int:
        """log2 of the number of shards."""
        return bucket_bits(self.rows, self.rows_per_shard)

    @property
    def noise(self) -> LabelNoise:
        """The noise of the released labels, by the release's own statement. UserError where each has its own."""
        if self.levels is not None:
            raise UserError(
                f"{self.source}: has an ε for each label, {self.epsilon_text}, and this reads labels of one ε:"
                " privatise them at one --epsilon for it"
            )
        return self.largest_noise

    @property
    def epsilon_text(self) -> str:
        """The ε of its labels: "1", or "0.5 (40), 4 (60)" with the number of labels at each level."""
        return levels_text({"epsilon": self.guarantee["epsilon"], "levels": (self.levels or {}).get("events")})

    @property
    def terms(self) -> dict[str, Any]:
        """ε (null for ∞) and α of its labels, of the largest level where each has its own, and then the levels."""
        stated = {name: value for name, value in self.largest_noise.as_json().items() if name != "flip_prob"}
        return stated | ({"levels": self.levels["events"]} if self.levels else {})

    @property
    def largest_noise(self) -> LabelNoise:
        """The noise of the labels; where each has a level, that of the largest, which bounds what one label tells."""
        return LabelNoise.from_json(self.guarantee)

    def noise_of(self, rows: Sequence[ReleasedPair]) -> LabelNoise | LevelledNoise:
        """The noise of these rows' labels: one ε, or that of each."""
        if self.levels is None:
            return self.noise
        return LevelledNoise.of([epsilon for epsilon, _ in self.levels["events"]], [row.epsilon for row in rows])

    @property
    def private(self) -> bool:
        """False if the bundle is marked NOT PRIVATE."""
        return self.guarantee["mark"] is None


@dataclass(frozen=True)
class Release:
    """A bundle whose manifest, row count and signature were verified; rows are read from the shards when asked for.

    signer: the public key (hex) under which it is signed; None for an unsigned one. writer: the version of Parquet's
    writer (that of pyarrow) that its shards state.
    """

    directory: Path
    manifest: ReleaseManifest
    schema: pa.Schema
    writer: str
    signer: str | None = None

    def __len__(self) -> int:
        return self.manifest.rows

    def __iter__(self) -> Iterator[ReleasedPair]:
        for batch in (batch for path in _shards(self.directory) for batch in self._batches(path)):
            columns = [_read(batch.column(name)) for name in batch.schema.names]
            yield from map(ReleasedPair, *columns)

    @property
    def message_keys(self) -> tuple[str, ...]:
        """Keys of its messages beside role and content."""
        return _further(self.schema.field("prompt").type)

    @property
    def comparable(self) -> bool:
        """False if another version of pyarrow wrote the shards than the installed one, which may write other bytes."""
        return self.writer == pa.cpp_version

    def check_rows(self) -> None:
        """Read every row; where `comparable`, write every shard again from its rows. Memory: some row groups.

        UserError for a row that no release holds, an id that is not its texts', a row in another shard than its id's,
        or bytes that are not those of the rows.
        """
        kind = TEXT if self.manifest.format == "standard" else MESSAGES
        counts: Counter[float] = Counter()
        for shard, path in enumerate(_shards(self.directory)):
            batches = self._checked(path, shard, kind, counts)
            if not self.comparable:
                for _ in batches:
                    pass
                check_columns(path)
            elif differs_from_rows(path, self.schema, batches):
                raise UserError(f"{path}: its bytes are not those that its rows give: it may carry more than its rows")
        levels = dict(self.manifest.levels["events"]) if self.manifest.levels else {}
        if counts != {epsilon: count for epsilon, count in levels.items() if count}:
            raise UserError(f"{self.directory}: the ε of its rows are not those of its manifest; {REMEDY}")

    def _checked(self, path: Path, shard: int, kind: bytes, counts: Counter[float]) -> Iterator[pa.RecordBatch]:
        """The batches of a shard, found to be as they must; the labels at each ε are added to `counts`."""
        for batch in self._batches(path, self.schema.names):
            if problem := _odd_pairs(batch, kind, shard, self.manifest.shard_bits):
                raise UserError(f"{path}: {problem}; {REMEDY}")
            if self.manifest.levels:
                counts.update(batch.column(EPSILON).to_pylist())
            yield batch

    def _batches(self, path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        last, columns = "", columns or self.manifest.columns[: 5 if self.manifest.levels else 4]
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=ROWS_PER_GROUP, columns=list(columns)):
                    problem, last = _problem(batch, last)
                    if problem:
                        raise UserError(f"{path}: {problem}; {REMEDY}")
                    yield batch
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            raise UserError(f"{path}: is damaged; {REMEDY}") from None

    @property
    def rows(self) -> list[ReleasedPair]:
        """All rows in memory."""
        return list(self)


def is_release(folder: Path) -> bool:
    """True if a folder holds a bundle, sound or not: a manifest and shards. Raw data may have a manifest too."""
    return file_of(folder, MANIFEST).is_file() and bool(_shards(folder))


def file_of(folder: Path, name: str) -> Path:
    """The path of a bundle's MANIFEST or SIGNATURE: under the old name where its manifest has the old one."""
    old = not os.path.lexists(folder / MANIFEST) and os.path.lexists(folder / MANIFESTS[1])
    return folder / (next(before for before, now in OLD_NAMES.items() if now == name) if old else name)


def read_release(directory: str | Path) -> Release:
    """Open a bundle. UserError if it is missing, incomplete, of another version, does not say what it guarantees, or is
    not what was signed."""
    folder = Path(directory)
    if not folder.is_dir():
        wrong = "is a file, not a release" if folder.is_file() else "no such release"
        raise UserError(f"{folder}: {wrong} folder; {REMEDY}")
    for inner in (folder / "release", folder / "privatize" / "release", folder / "online" / "release"):
        if inner.is_dir():  # of a run, or of its stage
            raise UserError(f"{folder}: is not a release folder but has one; give {inner}")
    stated = file_of(folder, MANIFEST)
    facts = _document(stated)
    if facts is None:
        raise UserError(f"{folder}: has no {MANIFEST}, so it is no complete release; {REMEDY}")
    manifest = _parse_manifest(facts, stated)
    try:
        shards = {path: pq.read_metadata(path) for path in _shards(folder)}
        schemas = {path: each.schema.to_arrow_schema() for path, each in shards.items()}
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        raise UserError(f"{folder}: a shard is damaged; {REMEDY}") from None
    rows = sum(each.num_rows for each in shards.values())
    if rows != manifest.rows:
        raise UserError(f"{folder}: holds {rows} rows where its manifest says {manifest.rows}; {REMEDY}")
    if [path.name for path in shards] != [shard_name(shard) for shard in range(1 << manifest.shard_bits)]:
        raise UserError(f"{folder}: its shards are not those of its manifest; {REMEDY}")
    expected = _schema(manifest, next(iter(schemas.values())))
    for path, schema in schemas.items():
        if expected is None or not schema.equals(expected) or any(field.metadata for field in schema):
            raise UserError(f"{path}: its columns are not those of its manifest; {REMEDY}")
    versions = {writer_version(path, footer) for path, footer in shards.items()}
    if len(versions) > 1:
        raise UserError(f"{folder}: its shards were written by {' and '.join(sorted(versions))} of pyarrow; {REMEDY}")
    most = manifest.rows_per_shard
    if most > ROWS_PER_SHARD or most < ROWS_PER_SHARD >= manifest.rows:  # another number would be free to say anything
        raise UserError(f"{stated}: rows_per_shard is not that of a release of {manifest.rows}; {REMEDY}")
    signer = _signer(folder)
    if stated.read_bytes() != json_text(manifest.as_dict()).encode(errors="surrogatepass"):
        raise UserError(f"{stated}: has words, fields, an order or spaces that no release has; {REMEDY}")
    signature = {file_of(folder, SIGNATURE).name} if signer else set()
    check_files(folder, {stated.name, *(path.name for path in shards)} | signature)
    return Release(folder, manifest, expected, versions.pop(), signer)


def _schema(manifest: ReleaseManifest, stated: pa.Schema) -> pa.Schema | None:
    """The columns that the manifest names, with the types of the extra ones as a shard states them; None if they are
    not those of a release."""
    if stated.names != list(manifest.columns):
        return None
    extra = [pa.field(name, stated.field(name).type) for name in manifest.extra_columns]
    keys = _further(stated.field("prompt").type)
    if not all(each.type in EXTRA_TYPES for each in extra):
        return None
    return release_schema(manifest.format, extra, keys, manifest.levels is not None)


def _signer(folder: Path) -> str | None:
    """The signer of the bundle. UserError for a signature that does not hold."""
    path = file_of(folder, SIGNATURE)
    stated = _document(path)
    if stated is None and not os.path.lexists(path):
        return None
    try:
        signed = (file_of(folder, MANIFEST), *_shards(folder))
        signer = verify(stated, {each.name: file_digest(each) for each in signed})
        if path.read_bytes() != json_text(stated).encode():
            raise ValueError("has spaces that no signature has")
        return signer
    except ValueError as error:
        raise UserError(f"{path}: {error}; {REMEDY}") from None


def _document(path: Path) -> Any:
    """Content of a JSON file, None if there is no such file. UserError if it cannot be read."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
    except DocumentError as error:
        raise UserError(f"{path}: {error}; {REMEDY}") from None


def _parse_manifest(facts: Any, path: Path) -> ReleaseManifest:
    if not isinstance(facts, dict):
        raise UserError(f"{path}: is not a JSON object; {REMEDY}")
    if not _counts(facts.get("schema_version")) or facts["schema_version"] != SCHEMA_VERSION:
        raise UserError(f"{path}: has schema version {facts.get('schema_version')!r}, not {SCHEMA_VERSION}; {REMEDY}")
    facts = {"totals": None, "levels": None} | facts
    names = [entry.name for entry in fields(ReleaseManifest)]
    missing = [name for name in names if name not in facts]
    guarantee = facts.get("guarantee")
    if isinstance(guarantee, dict):
        missing += [f"guarantee.{name}" for name in _NEEDED if name not in guarantee]
    if missing or not isinstance(guarantee, dict):
        raise UserError(f"{path}: lacks {', '.join(missing) or 'the guarantee'}; {REMEDY}")
    words = _check_guarantee(guarantee, path)
    if "mark" in facts and facts["mark"] != words["mark"]:
        raise UserError(f"{path}: its two marks differ; {REMEDY}")
    wrong = [name for name, sound in _SOUND.items() if not sound(facts[name])]
    if not wrong and not _levels_agree(facts, words):
        wrong = ["levels"]
    if wrong:
        raise UserError(f"{path}: `{'` and `'.join(wrong)}` has no valid value; {REMEDY}")
    facts |= {"extra_columns": tuple(facts["extra_columns"]), "guarantee": words}
    return ReleaseManifest(**{name: facts[name] for name in names})


def _levels_agree(facts: Mapping[str, Any], guarantee: Mapping[str, Any]) -> bool:
    """True if a manifest counts the labels at the levels of its guarantee, all of them, or neither has levels."""
    if facts["levels"] is None:
        return "levels" not in guarantee
    levels, counts = zip(*facts["levels"]["events"], strict=True)
    # 1 in place of 1.0 is the same number in a form that no release has
    return repr(list(levels)) == repr(guarantee.get("levels")) and sum(counts) == facts["rows"]


def _counts(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 53


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "format": lambda value: value in ("standard", "conversational"),
    "rows": _counts,
    "source": lambda value: isinstance(value, str),
    "dropped": lambda value: isinstance(value, dict) and all(map(_counts, value.values())) and _drop_counts(value),
    "rows_per_shard": lambda value: _counts(value, 1),
    "extra_columns": lambda value: isinstance(value, list)
    and all(isinstance(name, str) and name not in COLUMNS for name in value)
    and len(set(value)) == len(value),
    "totals": lambda value: value is None
    or (isinstance(value, dict) and set(value) == {"record", "person"} and _positive(value["record"])
        and (value["person"] is None or _positive(value["person"]))),
    "levels": lambda value: value is None
    or (isinstance(value, dict) and list(value) == ["chosen", "events"] and isinstance(value["events"], list)
        and value["chosen"] in (PERSON, WORD, PAGE, TERMINAL) and len(value["events"]) > 1
        and all(isinstance(each, list) and len(each) == 2 and _positive(each[0]) and _counts(each[1])
                for each in value["events"])),
    "canonicalisation": lambda value: _counts(value) and value == CANONICALISATION,
}


def _drop_counts(value: Mapping[str, int]) -> bool:
    names, required = list(DropCounts(over_cap=0, ties=0, unjudged=0).as_dict()), DropCounts().as_dict().keys()
    return list(value) == [name for name in names if name in value] and value.keys() >= required


def _check_guarantee(guarantee: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Words of the program where this is stated; the manifest's own words are not passed on.

    No silent step from "not stated" to "not private", nor from NOT PRIVATE to private.
    """
    mode, epsilon = guarantee["key_mode"], guarantee["epsilon"]
    if mode not in KEY_MODES:
        raise UserError(f"{path}: key_mode is {mode!r}, not one of {', '.join(KEY_MODES)}; {REMEDY}")
    try:
        noise = LabelNoise.from_json(guarantee)
    except ValueError as error:
        raise UserError(f"{path}: {error}; {REMEDY}") from None
    if noise.public != (mode == "none"):
        raise UserError(f"{path}: epsilon is {epsilon!r}, which does not go with key_mode {mode!r}; {REMEDY}")
    if (guarantee["mark"] is None) != (mode in ("keyed", "local")):
        raise UserError(f"{path}: the NOT PRIVATE mark does not go with key_mode {mode!r}; {REMEDY}")
    mechanism: Mechanism = PublicLabels() if noise.public else RandomizedResponse(noise.epsilon)
    if "levels" in guarantee:
        mechanism = _levelled(guarantee["levels"], noise, path)
    by, unsigned = guarantee.get("randomised_by"), guarantee.get("unsigned", False)
    if (by is not None and (mode != "local" or by not in RANDOMISED_BY)) or type(unsigned) is not bool:
        raise UserError(f"{path}: states who randomised the labels in words that this program does not; {REMEDY}")
    words = stated(mechanism, mode, by, unsigned) | noise.as_json()
    if guarantee["mechanism"] != words["mechanism"] or guarantee["mark"] != words["mark"]:
        raise UserError(f"{path}: states a mechanism or a mark that this program does not; {REMEDY}")
    return words


def _levelled(levels: Any, noise: LabelNoise, path: Path) -> LevelledResponse:
    """The mechanism of the levels that a guarantee states, with this noise of the largest."""
    try:
        mechanism = LevelledResponse.of(levels if isinstance(levels, list) else [], "guarantee.levels")
    except UserError as error:
        raise UserError(f"{path}: {error}; {REMEDY}") from None
    if [each.epsilon for each in mechanism.levels] != levels or mechanism.noise != noise:
        raise UserError(f"{path}: guarantee.levels do not rise to its epsilon; {REMEDY}")
    return mechanism


def _problem(batch: pa.RecordBatch, last: str) -> tuple[str | None, str]:
    """(what is wrong with rows that follow the record id `last`, their last record id)."""
    ids = batch.column("record_id")
    if any(_has_null(batch.column(name)) for name in ReleasedPair._fields if name in batch.schema.names):
        return "holds a null", last
    if not pc.all(pc.match_substring_regex(ids, "^[0-9a-f]{64}$"), min_count=0).as_py():
        return "holds a record_id that is none", last
    if not pc.all(pc.less_equal(ids[:-1], ids[1:]), min_count=0).as_py() or (len(ids) and ids[0].as_py() < last):
        return "its rows are not in the order of their record ids", last
    batch.validate(full=True)  # among others that texts are UTF-8
    return None, ids[-1].as_py() if len(ids) else last


def _odd_pairs(batch: pa.RecordBatch, kind: bytes, shard: int, bits: int) -> str | None:
    """The fault of rows of shard number `shard` of 2^bits, if there is one: responses, ids, place."""
    from private_rlhf.privacy.batches import record_ids  # not for the stages, which read rows that were checked

    columns = [batch.column(name) for name in COLUMNS[:3]]
    if _further(columns[0].type) and any(text_array(_read(column), column.type) != column for column in columns):
        return "holds messages in another form than a release"
    if kind != TEXT:
        columns = [pa.array([encode_text(text).decode() for text in _read(column)], pa.string()) for column in columns]
    prompt, chosen, rejected = columns
    if pc.any(pc.equal(chosen, rejected)).as_py():
        return "holds a pair of two equal responses"
    ids = record_ids(prompt, chosen, rejected, kind)
    if bytes(ids).hex() != "".join(batch.column("record_id").to_pylist()):
        return "holds a record_id that is not that of its texts"
    if any(ids[:, :4].copy().view(">u4").ravel().astype(np.uint64) >> np.uint64(32 - bits) != shard):
        return "holds rows of another shard"
    return None


def _read(texts: pa.Array) -> list[Any]:
    """Values as Python has them, messages without absent keys."""
    values: list[Any] = texts.to_pylist()
    try:
        return [[_message(turn) for turn in text] for text in values] if _further(texts.type) else values
    except ValueError:
        raise UserError(f"a release holds tools that are not JSON; {REMEDY}") from None


def _message(fields: Mapping[str, str | None]) -> Message:
    values = {name: value for name, value in fields.items() if value is not None}
    return {name: json.loads(value) if MESSAGE_KEYS.get(name) is list else value for name, value in values.items()}


def text_array(texts: Sequence[Any], type: pa.DataType) -> pa.Array:
    """Texts or messages as a column of a release; the inverse of `_read`."""
    if _further(type):
        texts = [[{name: value if isinstance(value, str) else to_json(value) for name, value in message.items()}
                  for message in text] for text in texts]  # fmt: skip
    return pa.array(texts, type)


def _has_null(column: pa.Array) -> bool:
    nested = [column.field(name) for name in ("role", "content")] if pa.types.is_struct(column.type) else []
    nested = [column.flatten()] if pa.types.is_list(column.type) else nested
    return bool(column.null_count) or any(map(_has_null, nested))


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("part-*.parquet") if path.is_file())  # a pipe would never end


def release_schema(
    format: str, extra: Sequence[pa.Field] = (), keys: Collection[str] = (), levelled: bool = False
) -> pa.Schema:
    """The shards' columns. format: as in the manifest. keys: of messages, beside role and content. levelled: each label
    has an ε of its own."""
    text = pa.string() if format == "standard" else messages_type(keys)
    four = [("prompt", text), ("chosen", text), ("rejected", text), ("record_id", pa.string())]
    return pa.schema([*four, *([(EPSILON, pa.float64())] if levelled else []), *extra])


def messages_type(keys: Collection[str]) -> pa.DataType:
    """The type of a list of messages with some of `MESSAGE_KEYS`."""
    further = [key for key in MESSAGE_KEYS if key in keys or (key == "tool_call_id" and "tool_calls" in keys)]
    return pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", *further)]))


def _further(type: pa.DataType) -> tuple[str, ...]:
    """The keys of messages of this type beside role and content; none for texts."""
    return tuple(field.name for field in type.value_type)[2:] if pa.types.is_list(type) else ()


def shard_name(shard: int) -> str:
    """The file of the shard's number."""
    return f"part-{shard:05d}.parquet"
