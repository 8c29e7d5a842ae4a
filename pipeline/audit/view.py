"""The adversary's view: tables of pairs with labels on them, and every other file beside them.

A *table* is any set of rows with a prompt and two responses, whatever the columns are called: a release of ours (TRL's
prompt/chosen/rejected), or somebody else's (a1/a2 and a label column). Shards of one folder are one table. Only rows
of judged events are kept, each as the position of its event; texts are kept once per event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.audit.canaries import RawFacts, Truth, pair_key
from private_rlhf.core.documents import MANIFESTS, read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, as_float, check_epsilon, epsilon_of, is_public
from private_rlhf.data.release import EPSILON
from private_rlhf.data.sources import open_source
from private_rlhf.privacy.mechanism import LEVELLED
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
DOCUMENTS = ("", ".json", ".yaml", ".yml", ".jsonl", ".txt", ".log", ".md", ".csv", ".html", ".tsv")
LARGEST_DOCUMENT = 1 << 24
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
    tables hold. levels: (n,) the largest ε that a table states of each event; empty where no label has an ε of its own.
    untried: what the attacks could not try.
    """

    roots: list[Path]
    alpha: float
    prompts: list[Text]
    first: list[Text]
    second: list[Text]
    known: np.ndarray
    tables: list[Table]
    copies: np.ndarray
    files: list[Path]
    table_files: set[Path]
    present: dict[Path, set[bytes]]
    facts: tuple[RawFacts, ...]
    signs: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    levels: np.ndarray = field(default_factory=lambda: np.zeros(0))
    untried: list[str] = field(default_factory=list)

    def spread(self, table: Table, values: np.ndarray, elsewhere: int = 0) -> np.ndarray:
        """(n,) by event, of values (m,) of a table's rows; `elsewhere` for events that it does not hold."""
        result = np.full(self.size, elsewhere, dtype=values.dtype)
        result[table.event] = values
        return result

    def own_z(self, table: Table) -> np.ndarray:
        """(n,) int8 released labels of a table by event; 0 for events that it does not hold."""
        return self.spread(table, table.z)

    @property
    def size(self) -> int:
        """Number of judged events that were found in the tables."""
        return len(self.prompts)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n, 3) int64: characters of each event's prompt, first and second response."""
        texts = zip(self.prompts, self.first, self.second, strict=True)
        return np.array([[len(plain_text(text)) for text in row] for row in texts], dtype=np.int64).reshape(-1, 3)

    def documents(self) -> Iterator[tuple[Path, str]]:
        """(path, text) of every text file that is not a table."""
        for path in self.files:
            known = path.suffix.lower() in DOCUMENTS and path not in self.table_files
            if known and path.stat().st_size <= LARGEST_DOCUMENT:
                yield path, path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class Answers:
    """The truth beside a view: labels (n,) int8 of its events, products (c,) int8 of the pairs of copies."""

    labels: np.ndarray
    products: np.ndarray


def all_files(roots: Sequence[Path]) -> list[Path]:
    """Every file below the roots, in a fixed order; hidden ones too, since caches like to hide."""
    below = ([root] if root.is_file() else sorted(filter(Path.is_file, root.rglob("*"))) for root in roots)
    return list(dict.fromkeys(chain.from_iterable(below)))


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a data file; UserError for another or a damaged file."""
    if not path.name.lower().endswith(SUFFIXES):
        raise UserError(f"{path}: must be a data file; give Parquet, Arrow, JSONL or CSV")
    for part in open_source(path):
        for _, row in part.rows(()):
            yield row


def response_columns(row: Row) -> tuple[str, str] | None:
    """The names of the two response columns, or None."""
    return next((pair for pair in RESPONSES if pair[0] in row and pair[1] in row), None)


def stated_epsilon(folder: Path) -> float | None:
    """The epsilon that a manifest in the folder (or one of the two above) claims; inf for "released as they are".

    The nearest manifest that names one counts: `guarantee.epsilon`, or the outermost epsilon, or else the outermost
    usable eps. UserError: epsilon is neither null nor a finite number above 0.
    """
    for home in (folder, folder.parent, folder.parent.parent):
        for path in (*sorted(home.glob("*manifest*.json")), home / MANIFESTS[0]):
            try:
                facts = read_json(path)
            except (OSError, ValueError):
                continue
            guarantee = facts.get("guarantee") if isinstance(facts, dict) else None
            facts = guarantee if isinstance(guarantee, dict) else facts
            usable = (eps for eps in _values(facts, "eps") if eps is None or as_float(eps) > 0)
            for epsilon in chain(_values(facts, "epsilon"), usable):
                return epsilon_of(None if epsilon is None else check_epsilon(epsilon, f"epsilon in {path}"))
    return None


def states_levels(folder: Path) -> bool:
    """True for a bundle in which each label has an ε of its own."""
    try:
        facts = read_json(folder / MANIFESTS[0])
        return bool(facts["guarantee"]["mechanism"] == LEVELLED)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _values(value: Any, name: str) -> Iterator[Any]:
    level = [value]
    while level:
        pairs = [pair for each in level if isinstance(each, dict) for pair in each.items()]
        yield from (inner for key, inner in pairs if key.lower() == name and not isinstance(inner, (dict, list)))
        level = [inner for _, inner in pairs] + [inner for each in level if isinstance(each, list) for inner in each]


class _Builder:
    """Collects rows of judged events while the files are read once."""

    def __init__(self, truth: Truth | None, most: int | None = None) -> None:
        self.truth, self.most = truth, most
        self.position: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self.texts: tuple[list[Text], list[Text], list[Text]] = ([], [], [])
        self.copies: list[tuple[int, int]] = []
        self.products: list[int] = []

    def labels_of(self, key: bytes) -> tuple[int, ...] | None:
        """The labels of a pair's events, 0 where none is known; None for a pair that is not judged."""
        return (0,) if self.truth is None else self.truth.labels.get(key)

    def read(self, name: str, paths: Sequence[Path], epsilon: float | None) -> list[Table]:
        """The table of these files; rows of an event that stands there twice go to a second table, and so on."""
        layers: defaultdict[int, list[tuple[tuple[int, ...], Row]]] = defaultdict(list)
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
                labels = self.labels_of(key)
                if labels is None or (key not in self.position and self.most == len(self.keys)):
                    continue
                if len(labels) > 1:
                    doubles[key].append(z)
                    continue
                if key not in self.position:
                    self.position[key] = len(self.keys)
                    self.keys.append(key)
                    for store, text in zip(self.texts, (texts[0], *texts[1:][::side]), strict=True):
                        store.append(text)
                layers[seen[key]].append(((self.position[key], side, z, total - 1, part), rest))
                seen[key] += 1
        for key, released in doubles.items():
            labels = self.labels_of(key) or ()
            if len(labels) == len(released) == 2 and all(released):
                self.copies.append((released[0], released[1]))
                self.products.append(labels[0] * labels[1])
        return [_table(f"{name} (copy {layer + 1})" if layer else name, epsilon, total, rows)
                for layer, rows in layers.items()]  # fmt: skip


def _pair_of(row: Row) -> tuple[bytes, int, int, tuple[Text, Text, Text], Row] | None:
    """(key, side, z, texts, other columns) of a row; None where it holds no pair of two different responses."""
    names = response_columns(row)
    question = next((name for name in PROMPTS if name in row), None)
    if names is None:
        return None
    left, right = row[names[0]], row[names[1]]
    prompt = row[question] if question is not None else ""
    try:
        key, side = pair_key(prompt, left, right)
    except (TypeError, KeyError, AttributeError, UnicodeEncodeError):
        return None
    if not side:
        return None
    used = {*names, question}
    z = side
    if names[0] != "chosen":
        label = next((name for name in LABELS if name in row), None)
        z = 0 if label is None else side * LEFT_WINS.get(str(row[label]), 0)
        used.add(label)
    return key, side, z, (prompt, left, right), {name: value for name, value in row.items() if name not in used}


def _table(name: str, epsilon: float | None, total: int, rows: list[tuple[tuple[int, ...], Row]]) -> Table:
    """rows: (event, side, z, row, part), and the other columns."""
    event, side, z, row, part = np.array([numbers for numbers, _ in rows], dtype=np.int64).T
    names = dict.fromkeys(column for _, rest in rows for column in rest)
    columns = {column: [rest.get(column) for _, rest in rows] for column in names}
    return Table(name, epsilon, total, event, side.astype(np.int8), z.astype(np.int8), row, part, columns)


def _grouped(files: Sequence[Path]) -> dict[tuple[Path, tuple[str, str]], list[Path]]:
    """Files that hold pairs, by folder and kind of columns; the first row decides."""
    groups: defaultdict[tuple[Path, tuple[str, str]], list[Path]] = defaultdict(list)
    for path in files:
        if not path.name.lower().endswith(SUFFIXES):
            continue
        try:
            first = next(file_rows(path), None)
        except UserError:
            continue
        names = response_columns(first) if first is not None else None
        if names is not None:
            groups[path.parent, names].append(path)
    return groups


def build_view(
    roots: Sequence[Path], truth: Truth | None, epsilon: float | None = None, most: int | None = None
) -> tuple[View, Answers]:
    """Read everything once. truth: None where no label is known; every pair is then judged. epsilon: the claim to test
    where it is not the largest that the manifests state. most: stop taking new events after so many. Half of the
    events, chosen by a hash of the pair, get their labels into `known`.

    UserError: a root that does not exist, no table, no claim, or no protected event of the truth in the tables.
    """
    for root in roots:
        if not root.exists():
            raise UserError(f"{root}: no such folder; give a release or a run directory")
    files = all_files(roots)
    groups = _grouped(files)
    where = ", ".join(map(str, roots))
    if not groups:
        raise UserError(f"{where}: holds no preference data; give a release or a run")
    builder, tables, claims, levelled = _Builder(truth, most), [], [], False
    present: dict[Path, set[bytes]] = {root: set() for root in roots}
    for (folder, _), paths in groups.items():
        stated, levelled = None, levelled or states_levels(folder)
        with nullcontext() if epsilon is None else suppress(UserError):
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
    labels = np.array([truth.labels[key][0] if truth else 0 for key in builder.keys], dtype=np.int8)
    for table in tables:
        if is_public(table.epsilon):
            labels[table.event] = 0  # released as they are, as its manifest says: nothing was promised about these
    if truth and not labels.any() and not builder.copies:
        raise UserError(f"{where}: must hold labels to judge, got only public ones by its manifests: correct these")
    half = np.array([key[0] & 1 for key in builder.keys], dtype=np.int8)
    alpha = LabelNoise.of(claim).keep_prob
    copies = np.array(builder.copies, dtype=np.int8).reshape(-1, 2)
    table_files = {path for paths in groups.values() for path in paths}
    view = View(list(roots), alpha, *builder.texts, labels * half, tables, copies, files, table_files, present,
                truth.facts if truth else ())  # fmt: skip
    if epsilon is None and levelled:
        view.levels = np.zeros(view.size)
        for table in tables:
            level = np.asarray(table.columns.get(EPSILON, table.epsilon or 0.0), np.float64)
            view.levels[table.event] = np.maximum(view.levels[table.event], level)
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
