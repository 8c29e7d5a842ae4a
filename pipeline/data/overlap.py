"""The end-to-end guard: do demonstrations or prompts repeat one response of a protected pair and not the other?

If they do, whoever picked them may have looked at the labels (fine-tuning on the chosen answers is the classic case),
and the policy carries raw labels past the randomiser. Of every conversation the letters and digits (`letters`) get four
64-bit digests, under a key that is drawn anew for each look:

- of all its text, wherever prompt and response are taken to meet;
- of its last user turn and last assistant turn; an answer of under 32 characters says little without what came before;
- of its last assistant turn, if it has 40 characters: it counts where both responses of a pair have them and no other
  pair holds them;
- of the letters of its last turns, without digits, if they have 32: it counts as the one before.

A demonstration counts with its whole conversation and every assistant turn in its history, a prompt with the latter;
the history of a prompt that is a pair's own does not count. A pair is *one-sided* when one of its responses is found
more often than the other, also after division by how many pairs hold each: a symmetric notion, so its count depends on
no label. Long responses are compared by shingles too (`near_copies`), and rows with a pair's prompt are searched for
short ones (`contained_answers`). It does not see short responses under another prompt, rewritten or encoded texts, a
choice among prompts, or an order of rows (`inputs` reads rows in an order of its own).

Memory: 64 bytes per assistant turn of the demonstrations or prompts, 40 per pair that shares a text with them, and some
1,000 per hundred words for shingles and for the search. A chance collision (10^7 texts against 10^7: probability 1e-4)
refuses a harmless recipe, which another look lets pass.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.data.contained_answers import ContainedAnswers, SearchedRows
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.inputs import rows_of_file
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.letters import Turns, last_question, turns
from private_rlhf.data.near_copies import NearCopies, ShingledRows, Shingler, places, prompts_of
from private_rlhf.data.release import read_release
from private_rlhf.data.release_import import names_bundle
from private_rlhf.data.sources import run_splits
from private_rlhf.embedded import task
from private_rlhf.embedded.task import Split
from private_rlhf.privacy.prf import frame
from private_rlhf.privacy.records import Text, encode_text
from private_rlhf.recipe import BUILT_IN, DataConfig
from tqdm import tqdm

PAIRS_PER_LOOK = 8192
TELLING_CHARACTERS = 32
ALONE_CHARACTERS = 40
_DIGIT = re.compile(r"\d+")
PARTS, NO_DIGEST = 4, -2  # how many digests a conversation has; the place of one that is too short for it


class Pair(NamedTuple):
    """A prompt and its two responses in an order that depends on their text alone: no label is left."""

    prompt: Text
    first: Text
    second: Text


class LookedPairs(NamedTuple):
    """digests: (n, 9) uint64, the four of the first response, those of the second, the whole of the prompt. sides: of
    each pair the shingles that only its first and only its second response have. texts: the last user turn and the
    two responses, as letters and digits."""

    digests: np.ndarray
    sides: list[tuple[np.ndarray, np.ndarray]]
    texts: list[tuple[str, str, str]]


class Overlap(NamedTuple):
    """pairs: how many were looked at. one_sided: those with one response found more often than the other, or (near
    copies) more of it, or before the other."""

    pairs: int
    one_sided: int


def check_overlap(data: DataConfig, released: Path, keys: Iterable[str], new_release: bool) -> None:
    """Refuses demonstrations and prompts that repeat one-sidedly what the protected pairs hold, with a UserError.

    Built-in sources depend on no label but the released ones, and labels that were declared public need no guard.
    keys: of `data`, whose files are looked at. released: folder of the stage that releases the labels. new_release: the
    preferences are about to be released; otherwise they were.
    """
    if data.public_labels or data.allow_label_overlap:
        return
    digests = Digests()
    files = {key: read_texts(data, key, digests) for key in keys if not data.built_in(key)}
    if not files:
        return
    pairs = protected_pairs(data, released, new_release)
    for key, overlap in zip(files, overlaps(list(files.values()), pairs, digests), strict=True):
        if overlap.one_sided:
            raise UserError(
                f"data.{key} {getattr(data, key)}: repeats one response, and not equally the other, of "
                f"{overlap.one_sided} of {overlap.pairs} pairs in data.preferences, so it may tell which was "
                "preferred: leave those rows out, give both responses of each pair, "
                f"use data.{key}: {BUILT_IN[key][1]}, "
                "or set data.allow_label_overlap: true, which marks the run NOT PRIVATE"
            )


def protected_pairs(
    data: DataConfig, released: Path, raw: bool, splits: Sequence[Split] = ("train", "eval")
) -> Iterator[Pair]:
    """The pairs whose labels are protected, without those labels; all of a file or bundle that serves for both splits.

    They are read from the preferences; where these are elsewhere and the stage that needs them is done (`raw` false),
    from what it released.
    """
    source = data.preferences
    if source == "embedded":
        for row in chain.from_iterable(map(task.load_pairs, splits)):
            yield _forget(row.prompt, row.response_a, row.response_b)
    elif not names_bundle(source) and (raw or Path(source).expanduser().exists()):
        divided = run_splits(source, data.split)
        for split in splits if len(divided) > 1 else divided:
            for pair in read_preferences(source, split, Options.of(data)):
                yield _forget(pair.prompt, pair.chosen, pair.rejected)
    else:
        folders = [released / {"train": "release", "eval": "evaluation"}[split] for split in splits]
        for bundle in map(read_release, [Path(source).expanduser()] if names_bundle(source) else folders):
            for released_pair in bundle:
                yield _forget(released_pair.prompt, released_pair.chosen, released_pair.rejected)


def _forget(prompt: Text, response: Text, other: Text) -> Pair:
    return Pair(prompt, *sorted((response, other), key=encode_text))


# --- digests ----------------------------------------------------------------------------------------------------------


class Digests:
    """The four digests of a conversation, and its shingles, under secrets that are drawn here."""

    def __init__(self) -> None:
        secret = secrets.token_bytes(32)
        self.shingler = Shingler()
        self._states = {
            name: hashlib.blake2b(key=secret, digest_size=8, person=name.encode())
            for name in ("whole", "last turns", "alone", "letters")
        }

    def _digest(self, name: str, *chunks: bytes) -> int:
        state = self._states[name].copy()
        state.update(b"".join(chunks))
        return int.from_bytes(state.digest(), "big")

    def whole(self, conversation: Turns) -> int:
        """Of all the text."""
        return self._digest("whole", *(content.encode() for _, content in conversation))

    def last(self, conversation: Turns) -> int:
        """Of the last assistant turn and the last turn before it that is somebody else's; of all if that is short."""
        place = _last_answer(conversation)
        contents = [content for _, content in conversation]
        if contents and len(contents[place]) >= TELLING_CHARACTERS:
            before = [content for assistant, content in conversation[:place] if not assistant]
            contents = [*before[-1:], contents[place]]
        return self._digest("last turns", *(frame(content.encode()) for content in contents))

    def alone(self, conversation: Turns) -> int:
        """Of the last assistant turn; 0 if there is none, or it is short."""
        answer = next((content for assistant, content in reversed(conversation) if assistant), "")
        return self._digest("alone", answer.encode()) if len(answer) >= ALONE_CHARACTERS else 0

    def letters(self, conversation: Turns) -> int:
        """Of the last assistant turn and the last turn before it, without digits; 0 if they are short."""
        place = _last_answer(conversation)
        contents = [_DIGIT.sub("", content) for _, content in conversation[max(0, place - 1) : place + 1]]
        long_enough = sum(map(len, contents)) >= TELLING_CHARACTERS
        return self._digest("letters", " ".join(contents).encode()) if long_enough else 0

    def of(self, conversation: Turns) -> tuple[int, ...]:
        """All four; 0 for those that it does not have."""
        return tuple(part(conversation) for part in (self.whole, self.last, self.alone, self.letters))

    def of_pairs(self, pairs: Iterable[Pair]) -> LookedPairs:
        """The digests of each pair, its shingles and its texts."""
        rows, sides, texts = [], [], []
        for prompt, first, second in pairs:
            history, one, other = turns(prompt), turns(prompt, first), turns(prompt, second)
            parts = [
                np.unique(self.shingler.of(content for _, content in part))
                for part in (history, one[len(history) :], other[len(history) :])
            ]
            sides.append((_without(parts[1], parts[2], parts[0]), _without(parts[2], parts[1], parts[0])))
            answer, another = ("".join(content for _, content in part[len(history) :]) for part in (one, other))
            texts.append((last_question(history), answer, another))
            rows.append((*self.of(one), *self.of(other), self.whole(history)))
        return LookedPairs(np.array(rows, dtype=np.uint64), sides, texts)


def _last_answer(conversation: Turns) -> int:
    """The place of the last assistant turn, 0 if there is none."""
    return max((place for place, (assistant, _) in enumerate(conversation) if assistant), default=0)


def _without(shingles: np.ndarray, *others: np.ndarray) -> np.ndarray:
    return shingles[~np.isin(shingles, np.concatenate(others))] if len(shingles) else shingles


class Texts:
    """The conversations of demonstrations or prompts, as digests and shingles."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self.shingled, self.searched = ShingledRows(), SearchedRows()
        self._prompts = array("Q")  # one per row
        self._found = array("Q")  # digests; beside each the row whose *history* holds it, or -1
        self._history_of = array("q")

    def add(self, prompt: Text, response: Text | None = None) -> None:
        """A demonstration, or (without a response) a prompt."""
        history, row = turns(prompt), len(self._prompts)
        self._prompts.append(self._digests.whole(history))
        shingles = self._digests.shingler.of
        self.shingled.add(row, shingles(content for _, content in history), prompt=True)
        for place, (assistant, _) in enumerate(history):
            if assistant:
                self._enter_all(history[: place + 1], row)
        if response is not None:
            conversation = turns(prompt, response)
            self.shingled.add(row, shingles(content for _, content in conversation[len(history) :]), prompt=False)
            self.searched.add(row, last_question(history), "".join(text for _, text in conversation[len(history) :]))
            self._enter_all(conversation, -1)
        elif history and not history[-1][0]:
            self.searched.add(row, history[-1][1], "")
            self._enter(self._prompts[row], row)  # an answer may be pasted onto its question without a turn mark

    def _enter_all(self, conversation: Turns, row: int) -> None:
        for digest in filter(None, self._digests.of(conversation)):
            self._enter(digest, row)

    def _enter(self, digest: int, row: int) -> None:
        self._found.append(digest)
        self._history_of.append(row)

    @property
    def prompts(self) -> np.ndarray:
        """(rows,) uint64 digests of the prompts. Nothing can be added any more."""
        return np.frombuffer(self._prompts, dtype=np.uint64)

    @property
    def found(self) -> tuple[np.ndarray, np.ndarray]:
        """(m,) uint64 digests of conversations, and (m,) int64 the row whose history each belongs to, or -1."""
        return np.frombuffer(self._found, dtype=np.uint64), np.frombuffer(self._history_of, dtype=np.int64)


def read_texts(data: DataConfig, key: str, digests: Digests) -> Texts:
    """All rows of the source of demonstrations or of prompts that a recipe names under `key`."""
    texts = Texts(digests)
    for row in rows_of_file(data, key):
        texts.add(*(row if key == "demonstrations" else (row,)))
    return texts


# --- comparison -------------------------------------------------------------------------------------------------------


def overlaps(files: Sequence[Texts], pairs: Iterable[Pair], digests: Digests) -> list[Overlap]:
    """The number of pairs that are one-sided in each of the files, in one pass over the pairs."""
    comparisons = [_Comparison(texts) for texts in files]
    bar = tqdm(desc="comparing with the pairs", unit="pair", disable=None, leave=False)
    stream = iter(pairs)
    while block := list(islice(stream, PAIRS_PER_LOOK)):
        looked = digests.of_pairs(block)
        for comparison in comparisons:
            comparison.look(looked)
        bar.update(len(block))
    bar.close()
    return [comparison.result() for comparison in comparisons]


class _Comparison:
    """Keeps of the pairs what they share with one file."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._known, self._known_prompts = np.unique(texts.found[0]), np.unique(texts.prompts)
        self._shared = [np.empty((0, 2 * PARTS), dtype=np.int64)]  # places in `_known`: of the one; of the other
        self._which = [np.empty(0, dtype=np.int64)]  # pair of each row of these
        self._asked = [np.empty(0, dtype=np.uint64)]  # its prompt
        self._prompts = [np.empty(0, dtype=np.uint64)]  # of pairs, those that are prompts of the file
        self._near, self._contained = NearCopies(texts.shingled), ContainedAnswers(texts.searched)
        self._pairs = 0

    def look(self, looked: LookedPairs) -> None:
        """The result of `Digests.of_pairs`."""
        self._near.look(looked.sides, looked.digests[:, -1])
        self._contained.look(looked.texts)
        prompts = np.unique(looked.digests[:, -1])
        self._prompts.append(prompts[places(self._known_prompts, prompts) >= 0])
        digests = looked.digests[:, :-1]
        found = np.where(digests == 0, NO_DIGEST, places(self._known, digests))
        shared = np.flatnonzero((found >= 0).any(axis=1))
        self._shared.append(found[shared])
        self._which.append(shared + self._pairs)
        self._asked.append(looked.digests[shared, -1])
        self._pairs += len(looked.digests)

    def result(self) -> Overlap:
        """One-sided: unequal counts, also in proportion to how many pairs hold each response; of the responses alone
        and of letters only where pairs of one prompt hold each, however many: annotators and rankings give several."""
        shared = np.concatenate(self._shared)
        asked = np.broadcast_to(np.concatenate(self._asked)[:, None], shared.shape)
        digests, history_of = self._texts.found
        public = np.isin(self._texts.prompts, np.concatenate(self._prompts))
        counted = digests[(history_of < 0) | ~public[history_of]]
        counts = np.bincount(np.searchsorted(self._known, counted), minlength=len(self._known))
        holders = np.bincount(shared[shared >= 0], minlength=len(self._known))
        prompts = prompts_of(shared[shared >= 0], asked[shared >= 0], len(self._known))
        # The last two: not found.
        counts, holders = np.append(counts, (0, 0))[shared], np.append(holders, (1, 1))[shared]
        prompts = np.append(prompts, (1, 1))[shared]
        one, other = holders[:, :PARTS], holders[:, PARTS:]
        common = (np.maximum(prompts[:, :PARTS], prompts[:, PARTS:]) > 1) & (np.arange(PARTS) >= 2)
        common |= (shared[:, :PARTS] == NO_DIGEST) | (shared[:, PARTS:] == NO_DIGEST)  # only one is long enough
        equal = (common | (counts[:, :PARTS] == counts[:, PARTS:])).all(axis=1)
        proportional = (common | (counts[:, :PARTS] * other == counts[:, PARTS:] * one)).all(axis=1)
        one_sided = np.zeros(self._pairs, dtype=bool)
        if self._pairs:
            one_sided |= self._near.one_sided(public) | self._contained.one_sided(public)
        one_sided[np.concatenate(self._which)[~equal & ~proportional]] = True
        return Overlap(self._pairs, int(one_sided.sum()))
