"""The adversary's view: tables of pairs with labels on them, and every other file beside them.

A *table* is any set of rows with a prompt and two responses, whatever the columns are called: a release of ours (TRL's
prompt/chosen/rejected), or somebody else's (a1/a2 and a label column). Shards of one folder are one table. Only rows
of judged events are kept, each as the position of its event; texts are kept once per event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from private_rlhf.audit.canaries import RawFacts, Truth, pair_key
from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, epsilon_of, is_public
from private_rlhf.core.outputs import MANIFESTS
from private_rlhf.data.sources import open_source
from private_rlhf.privacy.records import Text, message_text
from private_rlhf.recipe import SUFFIXES

RESPONSES = (
    ("chosen", "rejected"), ("a1", "a2"), ("response_a", "response_b"), ("response_0", "response_1"),
    ("response_1", "response_2"), ("answer_a", "answer_b"), ("answer_1", "answer_2"), ("a", "b"),
)  # fmt: skip
LABELS = ("private_label", "z", "noisy_label", "y_tilde", "label", "preference", "winner")
PROMPTS = ("prompt", "question", "instruction", "query", "x")
LEFT_WINS = {"1": 1, "1.0": 1, "True": 1, "true": 1, "A": 1, "a": 1, "-1": -1, "-1.0": -1, "0": -1, "0.0": -1,
             "False": -1, "false": -1, "B": -1, "b": -1, "2": -1}  # fmt: skip
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of one table, only those of judged events (m of `total` rows), in file order.

    event: (m,) int64 positions in the view, each at most once. side: (m,) int8, +1 if the left-hand column holds the
    event's first response. z: (m,) int8, the released label relative to the first response; 0 where none is stated.
    row: (m,) int64 place in the table. part: (m,) int64 number of the file. columns: every other column's values.
    epsilon: what the table's manifest claims, or None.
    """

    name: str
    epsilon: float | None
    total: int
    event: np.ndarray
    side: np.ndarray
    z: np.ndarray
    row: np.ndarray
    part: np.ndarray
    columns: Mapping[str, Sequence[Any]]


@dataclass
class View:
    """Everything an attack may use. known: (n,) int8, the labels that the adversary knows, 0 elsewhere.

    copies: (c, 2) int8, the released labels of the two events of each pair that has two. texts of event i: prompts[i],
    first[i], second[i]. files: every file of the roots. facts: candidate raw files' digests and sizes. signs: of the
    tables, by identity, from `learn.frames`. present: by root, the keys of the judged events that its
    tables hold.
    """

    roots: list[Path]
    alpha: float
    prompts: list[Text] = field(default_factory=list)
    first: list[Text] = field(default_factory=list)
    second: list[Text] = field(default_factory=list)
    known: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    tables: list[Table] = field(default_factory=list)
    copies: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int8))
    files: list[Path] = field(default_factory=list)
    table_files: set[Path] = field(default_factory=set)
    facts: tuple[RawFacts, ...] = ()
    signs: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    present: dict[Path, set[bytes]] = field(default_factory=dict)

    def own_z(self, table: Table) -> np.ndarray:
        """(n,) int8 released labels of a table by event; 0 for events that it does not hold."""
        spread = np.zeros(self.size, dtype=np.int8)
        spread[table.event] = table.z
        return spread

    @property
    def size(self) -> int:
        """Number of judged events that were found in the tables."""
        return len(self.prompts)


@dataclass(frozen=True)
class Answers:
    """The truth beside a view: labels (n,) int8 of its events, products (c,) int8 of the pairs of copies."""

    labels: np.ndarray
    products: np.ndarray


def all_files(roots: Sequence[Path]) -> list[Path]:
    """Every file below the roots, in a fixed order; hidden ones too, since caches like to hide."""
    found: list[Path] = []
    for root in roots:
        found += [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    return list(dict.fromkeys(found))


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a data file; UserError for another or a damaged file."""
    name = path.name.lower()
    if name.endswith(".arrow"):
        yield from _arrow_rows(path)
    elif name.endswith(SUFFIXES):
        for part in open_source(path):
            for _, row in part.rows(()):
                yield row
    else:
        raise UserError(f"{path}: is no data file; give Parquet, Arrow, JSONL or CSV")


def _arrow_rows(path: Path) -> Iterator[Row]:
    """An Arrow file or stream, as the `datasets` cache writes them."""
    try:
        with pa.memory_map(str(path)) as file:
            try:
                reader: Any = pa.ipc.open_stream(file)
                batches: Iterator[Any] = iter(reader)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            for batch in batches:
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError):
        raise UserError(f"{path}: is not a whole Arrow file; remove or repair it") from None


def response_columns(row: Row) -> tuple[str, str] | None:
    """The names of the two response columns, or None."""
    return next((pair for pair in RESPONSES if pair[0] in row and pair[1] in row), None)


def stated_epsilon(folder: Path) -> float | None:
    """The epsilon that a manifest in the folder (or one of the two above) claims; inf for "released as they are".

    The nearest manifest that names one counts: `guarantee.epsilon`, or the first key called epsilon (or eps).
    """
    for home in (folder, folder.parent, folder.parent.parent):
        for path in (*sorted(home.glob("*manifest*.json")), home / MANIFESTS[0]):
            try:
                facts = read_json(path)
            except (OSError, ValueError):
                continue
            guarantee = facts.get("guarantee") if isinstance(facts, dict) else None
            found = list(_find(guarantee if isinstance(guarantee, dict) else facts, ("epsilon", "eps")))
            if found:
                return epsilon_of(found[0])
    return None


def _find(value: Any, names: Sequence[str]) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            plain = isinstance(inner, int | float) and not isinstance(inner, bool)
            if str(key).lower() in names and (plain or inner is None):
                yield inner
            yield from _find(inner, names)
    elif isinstance(value, list):
        for inner in value:
            yield from _find(inner, names)


class _Builder:
    """Collects rows of judged events while the files are read once."""

    def __init__(self, truth: Truth, most: int | None = None) -> None:
        self.truth, self.most = truth, most
        self.position: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self.texts: tuple[list[Text], list[Text], list[Text]] = ([], [], [])
        self.copies: list[tuple[int, int]] = []
        self.products: list[int] = []

    def place(self, key: bytes, side: int, prompt: Text, left: Text, right: Text) -> int:
        """The event's position, a new one if it was not seen before."""
        if key not in self.position:
            self.position[key] = len(self.keys)
            self.keys.append(key)
            ordered = (prompt, left, right) if side > 0 else (prompt, right, left)
            for store, text in zip(self.texts, ordered, strict=True):
                store.append(text)
        return self.position[key]

    def read(self, name: str, paths: Sequence[Path], epsilon: float | None) -> list[Table]:
        """The table of these files; rows of an event that stands there twice go to a second table, and so on."""
        layers: defaultdict[int, list[tuple[int, int, int, int, int, Row]]] = defaultdict(list)
        seen: Counter[bytes] = Counter()
        doubles: defaultdict[bytes, list[int]] = defaultdict(list)
        total = 0
        for part, path in enumerate(paths):
            for row in file_rows(path):
                total += 1
                parsed = _pair_of(row)
                if parsed is None:
                    continue
                key, side, z, texts, rest = parsed
                labels = self.truth.labels.get(key)
                if labels is None or (key not in self.position and self.most == len(self.keys)):
                    continue
                if len(labels) > 1:
                    doubles[key].append(z)
                    continue
                event = self.place(key, side, *texts)
                layers[seen[key]].append((event, side, z, total - 1, part, rest))
                seen[key] += 1
        for key, released in doubles.items():
            labels = self.truth.labels[key]
            if len(labels) == len(released) == 2 and all(released):
                self.copies.append((released[0], released[1]))
                self.products.append(labels[0] * labels[1])
        return [_table(f"{name} (copy {layer + 1})" if layer else name, epsilon, total, rows)
                for layer, rows in layers.items()]  # fmt: skip


def _pair_of(row: Row) -> tuple[bytes, int, int, tuple[Text, Text, Text], Row] | None:
    """(key, side, z, texts, other columns) of a row; None where it holds no pair of two different responses."""
    names = response_columns(row)
    asked = next((name for name in PROMPTS if name in row), None)
    if names is None:
        return None
    left, right = row[names[0]], row[names[1]]
    prompt = row[asked] if asked is not None else ""
    try:
        key, side = pair_key(prompt, left, right)
    except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
        return None
    if not side:
        return None
    used = {*names, asked}
    z = side
    if names[0] != "chosen":
        label = next((name for name in LABELS if name in row), None)
        z = 0 if label is None else side * LEFT_WINS.get(str(row[label]), 0)
        used.add(label)
    return key, side, z, (prompt, left, right), {name: value for name, value in row.items() if name not in used}


def _table(name: str, epsilon: float | None, total: int, rows: list[tuple[int, int, int, int, int, Row]]) -> Table:
    names = list(dict.fromkeys(column for row in rows for column in row[5]))
    return Table(
        name=name,
        epsilon=epsilon,
        total=total,
        event=np.array([row[0] for row in rows], dtype=np.int64),
        side=np.array([row[1] for row in rows], dtype=np.int8),
        z=np.array([row[2] for row in rows], dtype=np.int8),
        row=np.array([row[3] for row in rows], dtype=np.int64),
        part=np.array([row[4] for row in rows], dtype=np.int64),
        columns={column: [row[5].get(column) for row in rows] for column in names},
    )


def _grouped(files: Sequence[Path]) -> dict[tuple[Path, tuple[str, str]], list[Path]]:
    """Files that hold pairs, by folder and kind of columns; the first row decides."""
    groups: defaultdict[tuple[Path, tuple[str, str]], list[Path]] = defaultdict(list)
    for path in files:
        if not path.name.lower().endswith((*SUFFIXES, ".arrow")):
            continue
        try:
            first = next(file_rows(path), None)
        except UserError:
            continue
        names = response_columns(first) if first is not None else None
        if names is not None:
            groups[path.parent, names].append(path)
    return groups


class _AnyPair(dict[bytes, tuple[int, ...]]):
    """The labels of an adversary without any: every pair is there, its label unknown."""

    def get(self, key: bytes, default: Any = None) -> tuple[int, ...]:
        return (0,)

    def __missing__(self, key: bytes) -> tuple[int, ...]:
        return (0,)


def unlabelled_view(roots: Sequence[Path], most: int, epsilon: float | None = None) -> View:
    """The view of somebody who knows no label, of the first `most` pairs. UserError as `build_view`."""
    return build_view(roots, Truth(_AnyPair(), coins=False), epsilon, most)[0]


def build_view(
    roots: Sequence[Path], truth: Truth, epsilon: float | None = None, most: int | None = None
) -> tuple[View, Answers]:
    """Reads everything once. epsilon: the claim to test where it is not the largest that the manifests state.

    most: stop taking new events after so many. Half of the events, chosen by a hash of the pair, get their labels into
    `known`.

    Raises:
        UserError: a root that does not exist, no table, no claim, or none of the truth's events in the tables.
    """
    for root in roots:
        if not root.exists():
            raise UserError(f"{root}: no such folder; give a release or a run directory")
    files = all_files(roots)
    groups = _grouped(files)
    where = ", ".join(map(str, roots))
    if not groups:
        raise UserError(f"{where}: holds no preference data; give a release or a run")
    builder, tables, claims = _Builder(truth, most), [], []
    present: dict[Path, set[bytes]] = {root: set() for root in roots}
    for (folder, _), paths in groups.items():
        stated = stated_epsilon(folder)
        added = builder.read(_name(folder, roots), paths, stated)
        for root in roots:
            if root == folder or root in (*folder.parents, *paths):
                present[root] |= {builder.keys[event] for table in added for event in table.event.tolist()}
        tables += added
        claims += [stated] if stated is not None and not is_public(stated) else []
    if not builder.keys and not builder.copies:
        raise UserError(f"{where}: holds none of the judged events; it was made from other data than the truth")
    claim = epsilon if epsilon is not None else max(claims, default=None)
    if claim is None or is_public(claim):
        raise UserError(f"{where}: states no finite epsilon to be held to; pass --epsilon")
    labels = np.array([truth.labels[key][0] for key in builder.keys], dtype=np.int8)
    for table in tables:
        if is_public(table.epsilon):
            labels[table.event] = 0  # released as they are, as its manifest says: nothing was promised about these
    half = np.array([key[0] & 1 for key in builder.keys], dtype=np.int8)
    alpha = LabelNoise.of(claim).keep_prob
    view = View(list(roots), alpha, *builder.texts, known=labels * half, tables=tables, files=files)
    view.copies = np.array(builder.copies, dtype=np.int8).reshape(-1, 2)
    view.table_files = {path for paths in groups.values() for path in paths}
    view.facts, view.present = truth.facts, present
    return view, Answers(labels, np.array(builder.products, dtype=np.int8))


def plain_text(text: Text) -> str:
    """The string, or what the messages say one after the other."""
    return text if isinstance(text, str) else "\n".join(map(message_text, text))


def _name(folder: Path, roots: Sequence[Path]) -> str:
    for number, root in enumerate(roots):
        if folder == root or root in folder.parents:
            inner = folder.relative_to(root)
            label = root.name if len(roots) == 1 else f"{number + 1}:{root.name}"
            return label if inner == Path() else f"{label}/{inner}"
    return folder.name
