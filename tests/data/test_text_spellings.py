"""Pairs that were released before in another spelling: refused with the count, or charged the sum."""

from __future__ import annotations

import html
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.data import spellings
from private_rlhf.data.letters import is_dressed, plain, plain_ascii, turns
from private_rlhf.data.spellings import letter_tags
from private_rlhf.privacy.batches import Columns, canonicalize
from private_rlhf.privacy.events import BEFORE_LETTERS, EVENT, NOT_TAGGED, EventStore, Generation, StagedGeneration
from private_rlhf.privacy.keys import load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from private_rlhf.privacy.prf import Prf
from private_rlhf.privacy.records import MESSAGES, TEXT, encode_text
from private_rlhf.privacy.row_files import row_digest
from support.raw_releases import Row, run, shown

pytestmark = pytest.mark.usefixtures("quick_disk")
Respell = Callable[[Row], Row]
COUNT = 40
REFUSED = r"{count} or more labels of pairs that were released before .* come in another spelling .*--add-up-renamed"


@given(st.lists(st.sampled_from(["a", "Z", "0", " ", ".:", "\n\n", "\x1c", "\t'", "Human", "é", "<"])).map("".join))
def test_letters_of_bytes_are_those_of_the_text(text: str) -> None:
    assume(not is_dressed(text.encode()))
    assert plain_ascii(text.encode()).decode() == plain(text)
    assert turns(text) == ([(False, plain(text))] if plain(text) else [])


def rows_of(**more: Any) -> list[Row]:
    return [
        {"prompt": f"Say it & mean it: {i}.", "chosen": f"Yes, it is {i}", "rejected": f"No, not {i}", **more}
        for i in range(COUNT)
    ]


def each(change: Callable[[str], str]) -> Respell:
    return lambda row: row | {name: change(row[name]) for name in ("prompt", "chosen", "rejected")}


def messages(row: Row) -> Row:
    said = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return row | {name: [{"role": role, "content": row[name]}] for name, role in said.items()}


def dialogue(row: Row) -> Row:
    return (
        row
        | {name: f"\n\nHuman: {row['prompt']}\n\nAssistant: {row[name]}" for name in ("chosen", "rejected")}
        | {"prompt": f"\n\nHuman: {row['prompt']}\n\nAssistant:"}
    )


def one_text(row: Row) -> Row:
    """TRL's implicit form: the prompt stands in both answers."""
    return {name: f"{row['prompt']} {row[name]}" for name in ("chosen", "rejected")}


SPELLINGS: dict[str, Respell] = {
    "a trailing space in the prompt": lambda row: row | {"prompt": row["prompt"] + " "},
    "trailing spaces": each(lambda text: text + " "),
    "messages": messages,
    "one text": one_text,
    "a zero-width space": each(lambda text: text[:3] + "\u200b" + text[3:]),
    "a zero-width space at the end": each(lambda text: text + "\u200b"),
    "capitals": each(str.upper),
    "small letters": each(str.lower),
    "a full stop": each(lambda text: text + "."),
    "no full stop": each(lambda text: text.rstrip(".")),
    "other spaces": each(lambda text: text.replace(" ", "\u00a0 ")),
    "entities": each(html.escape),
    "full width": each(lambda text: text.replace("a", "\uff41")),
    "typographic": each(lambda text: f"\u201c{text}\u201d \u2014"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_pairs_in_another_spelling_are_refused_or_charged_the_sum(spelling: str, tmp_path: Path, key: Path) -> None:
    """The same 400 pairs went out three times at ε = 1 while the ledger said 1."""
    respelled = [SPELLINGS[spelling](row) for row in rows_of()]
    run(rows_of(), tmp_path / "v1", key)
    with pytest.raises(UserError, match=REFUSED.format(count=COUNT)):
        run(respelled, tmp_path / "v2", key, 0.5)
    assert not (tmp_path / "v2").exists()
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (1.0, COUNT)
    with pytest.raises(UserError, match=r"over the budget of 1 per event: .* would make it 1\.5"):
        run(respelled, tmp_path / "v2", key, 0.5, add_up=True, budget=Budget(1.0, "event"))
    run(respelled, tmp_path / "v2", key, 0.5, add_up=True)
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (1.5, 2 * COUNT)
    run(respelled, tmp_path / "v2", key, 0.5)  # made before: nothing more
    run(rows_of(), tmp_path / "v3", key, 2.0)  # the first draw at a larger ε raises the sum
    assert shown(key)["epsilon_total"] == 2.5
    assert Ledger.open(load_key(key)).verify() == []


def test_a_few_respelled_pairs_are_counted(tmp_path: Path, key: Path) -> None:
    run(rows_of(), tmp_path / "v1", key)
    rows = [
        *rows_of()[:5],
        *map(SPELLINGS["capitals"], rows_of()[5:8]),
        *({**row, "prompt": "new"} for row in rows_of()),
    ]
    with pytest.raises(UserError, match=REFUSED.format(count=3)):
        run(rows, tmp_path / "v2", key)
    run(rows, tmp_path / "v2", key, add_up=True)
    assert shown(key)["epsilon_total"] == 2.0


def test_pairs_of_one_file_that_differ_in_punctuation_are_different_pairs(tmp_path: Path, key: Path) -> None:
    """Side by side they are two records, in later releases too; one that takes the place of another is not."""
    one, two, three = ({"prompt": "Test:", "chosen": f"x {sign} 0", "rejected": "x is 0"} for sign in "<>=")
    run([one, two], tmp_path / "v1", key)
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (1.0, 2)
    run([one, two, three], tmp_path / "v2", key)
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (1.0, 3)
    with pytest.raises(UserError, match=REFUSED.format(count=1)):
        run([one, two, three | {"chosen": "x >= 0"}], tmp_path / "v3", key)


def test_another_person_s_label_may_be_of_another_spelling(tmp_path: Path, key: Path) -> None:
    run(rows_of(who="ann"), tmp_path / "v1", key, labeler_column="who")
    run([SPELLINGS["capitals"](row) for row in rows_of(who="bob")], tmp_path / "v2", key, labeler_column="who")
    assert (shown(key)["epsilon_total"], shown(key)["events"]) == (1.0, 2 * COUNT)
    with pytest.raises(UserError, match=REFUSED.format(count=COUNT)):
        run([SPELLINGS["a full stop"](row) for row in rows_of(who="ann")], tmp_path / "v3", key, labeler_column="who")


TEXTS = [(f"Why {i * 7919}?", f"Because it is number {i}.", f"I do not know {i * 31}!") for i in range(4000)]


def tags_of(texts: list[tuple[str, str, str]], kind: bytes = TEXT, position: int = spellings.WHOLE) -> dict[int, int]:
    """The tag by the place in the input; position: of the first row, behind those that all have tags."""
    columns = [pa.array(column, pa.large_string()) for column in zip(*texts, strict=True)]
    count = len(texts)
    rows = canonicalize(
        Columns(*columns, np.ones(count, np.int8), kind, np.zeros(count, bool)), position, Prf(bytes(range(32)))
    )
    places = rows.keys["position"].astype(int) - position
    return dict(zip(places.tolist(), letter_tags(rows, kind, Prf(bytes(range(32)))).tolist(), strict=True))


@pytest.mark.parametrize("spelling", sorted(SPELLINGS.keys() - {"one text", "messages", "full width", "entities"}))
def test_the_sample_of_large_files_is_the_same_in_every_spelling(spelling: str) -> None:
    """Expected 125 of 4,000 (standard deviation 11); false alarm below 1e-9, for a fixed file."""
    first = tags_of(TEXTS)
    sample = {place for place, tag in first.items() if tag > NOT_TAGGED}
    assert 125 - 66 < len(sample) < 125 + 66
    names = ("prompt", "chosen", "rejected")
    changed = [SPELLINGS[spelling](dict(zip(names, row, strict=True))) for row in TEXTS]
    assert tags_of([tuple(row[name] for name in names) for row in changed]) == first  # type: ignore[misc]


def test_the_sample_is_the_same_for_messages() -> None:
    turns = [
        tuple(encode_text([{"role": role, "content": text}]).decode() for role, text in zip("uaa", row, strict=True))
        for row in TEXTS
    ]
    assert tags_of(turns, MESSAGES) == tags_of(TEXTS)  # type: ignore[arg-type]


def test_the_sample_of_other_scripts_is_there_in_either_case() -> None:
    draw = random.Random(3)
    words = [
        tuple("".join(chr(draw.randrange(0x430, 0x450)) for _ in range(30)) for _ in range(3)) for _ in range(2000)
    ]
    first = tags_of(words)  # type: ignore[arg-type]
    assert 62 - 50 < sum(tag > NOT_TAGGED for tag in first.values()) < 62 + 50
    assert tags_of([tuple(map(str.upper, row)) for row in words]) == first  # type: ignore[misc]


def test_a_store_without_tags_of_letters_opens_and_gains_them(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version left it: spellings are not known until an event is released at a larger epsilon."""
    join = EventStore.join

    def joined(self: EventStore, staged: StagedGeneration, serial: int) -> Generation:
        made = join(self, staged, serial)
        assert made.path is not None
        old = np.fromfile(made.path, EVENT)[list(BEFORE_LETTERS.names or ())].astype(BEFORE_LETTERS)
        made.path.write_bytes(old.tobytes())
        digest = row_digest()
        digest.update(old.tobytes())
        return replace(made, digest=digest.hexdigest(), lettered=False)

    with monkeypatch.context() as patch:
        patch.setattr(EventStore, "join", joined)
        run(rows_of(), tmp_path / "v1", key)
    assert Ledger.open(load_key(key)).verify() == []
    assert json.loads((key.with_name(key.name + ".state") / "ledger.json").read_text())["ledger"]["format"] == 2
    assert shown(key)["events_before_spellings"] == COUNT
    respelled = [SPELLINGS["capitals"](row) for row in rows_of()]
    run(rows_of()[:8], tmp_path / "v2", key, 2.0)
    assert shown(key)["events_before_spellings"] == COUNT - 8
    with pytest.raises(UserError, match=REFUSED.format(count=8)):
        run(respelled, tmp_path / "v3", key)
    run(respelled[8:], tmp_path / "v3", key)  # what cannot be known
    assert (shown(key)["epsilon_total"], Ledger.open(load_key(key)).verify()) == (2.0, [])


def test_a_large_file_in_another_spelling_is_refused(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rows of the sample have tags, and they are enough."""
    monkeypatch.setattr(spellings, "WHOLE", 0)
    names = ("prompt", "chosen", "rejected")
    rows = [dict(zip(names, row, strict=True)) for row in TEXTS]
    run(rows, tmp_path / "v1", key)
    with pytest.raises(UserError, match=r"\d\d\d? or more labels .* come in another spelling"):
        run([SPELLINGS["trailing spaces"](row) for row in reversed(rows)], tmp_path / "v2", key)
    run([*rows, {"prompt": "a new one", "chosen": "yes", "rejected": "no"}], tmp_path / "v3", key)
    assert shown(key)["epsilon_total"] == 1.0
