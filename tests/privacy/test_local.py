"""Local mode: the draw, the store that makes each draw once, and the lines that the filter answers."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.local import (
    LEVELS,
    MAX_LINE_BYTES,
    DrawStore,
    LabelFilter,
    keep_threshold,
    parse_labels,
    privatize_label,
)
from private_rlhf.privacy.mechanism import RandomizedResponse
from scipy.stats import binomtest

SIGNS = (-1, 1)


def answer(lines: str | bytes, store: DrawStore, epsilon: float = 1.0, **options: Any) -> tuple[list[Any], int]:
    """What the filter says to the lines, all at once, and how many it refused."""
    chunks, sent = [lines if isinstance(lines, bytes) else lines.encode(), b""], bytearray()
    labels = options.pop("labels", SIGNS)
    refused = LabelFilter(store, epsilon, labels, **options).serve(lambda: chunks.pop(0), sent.extend)
    return [json.loads(line) for line in sent.decode().splitlines()], refused


@pytest.fixture
def store(tmp_path: Path) -> DrawStore:
    return DrawStore(tmp_path / "draws.db", SIGNS)


# --- the draw ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(1e-6, 200.0))
def test_the_threshold_is_that_of_the_keyed_mechanism(epsilon: float) -> None:
    assert keep_threshold(epsilon) == RandomizedResponse(epsilon).threshold
    assert (LEVELS + keep_threshold(epsilon)) / (2 * LEVELS) <= 1 / (1 + math.exp(-epsilon)) + 1e-16


@pytest.mark.parametrize("epsilon", [0, 0.0, -1.0, math.inf, math.nan, True, None, "1"])
def test_epsilon_is_a_finite_number_above_0(epsilon: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="epsilon must be a finite number above 0"):
        privatize_label(1, epsilon)
    with pytest.raises(UserError, match="epsilon must be a finite number above 0"):
        LabelFilter(DrawStore(tmp_path / "draws.db", SIGNS), epsilon, SIGNS)


@pytest.mark.parametrize("label", [0, 2, True, "1", None])
def test_a_label_is_minus_one_or_one(label: Any) -> None:
    with pytest.raises(UserError, match="must be -1 or"):
        privatize_label(label, 1.0)


@pytest.mark.parametrize("label", [-1, 1])
def test_labels_are_kept_with_their_due_probability(label: int, store: DrawStore) -> None:
    """Two-sided exact binomial tests at 1e-6 each; α = 0.731 at ε = 1. Half of that excess would fail by 20 σ."""
    alpha = 1 / (1 + math.exp(-1.0))
    kept = sum(privatize_label(label, 1.0) == label for _ in range(4000))
    assert binomtest(kept, 4000, alpha).pvalue > 1e-6
    lines = "".join(json.dumps({"id": i, "label": label}) + "\n" for i in range(4000))
    kept = sum(row["label"] == label for row in answer(lines, store)[0])
    assert binomtest(kept, 4000, alpha).pvalue > 1e-6


# --- the store --------------------------------------------------------------------------------------------------------


def test_an_event_is_drawn_once(tmp_path: Path) -> None:
    """Sent again, by a later process, with the other label: the stored draw. 300 fresh draws at ε = 0.1 would agree
    with the first ones with probability below 1e-80."""
    first = [(f"e{i}", i % 2) for i in range(300)]
    draws = DrawStore(tmp_path / "draws.db", SIGNS).answer(first, 0.1)
    assert Counter(draws) != Counter({draws[0]: 300})
    later = DrawStore(tmp_path / "draws.db", SIGNS)
    assert not later.created
    assert later.answer(first, 0.1) == draws
    assert later.answer([(event, 1 - place) for event, place in first], 0.1) == draws
    assert later.answer(first[:1] * 50, 0.1) == draws[:1] * 50
    batch = later.answer([(f"new{i // 2}", i % 2) for i in range(200)], 0.1)
    assert batch[0::2] == batch[1::2], "twice in one batch"


def test_another_epsilon_is_refused_and_changes_nothing(store: DrawStore) -> None:
    draws = store.answer([("a", 0)], 1.0)
    assert store.answer([("a", 0), ("b", 0)], 2.0)[0] is None
    assert store.answer([("a", 0)], 1) == draws  # 1 and 1.0 are one epsilon


def test_the_store_holds_draws_and_nothing_else(tmp_path: Path) -> None:
    """At ε = 50 draws are the labels; the bytes of a store then depend on labels through the draws alone."""
    path = tmp_path / "draws.db"
    store = DrawStore(path, SIGNS)
    store.answer([("secret-id", 1)], 0.5)
    before = path.read_bytes()
    for place in (0, 1, 1, 0):
        store.answer([("secret-id", place)], 0.5)
    assert path.read_bytes() == before  # a changed label leaves no trace, not even a count
    assert b"secret-id" not in before
    base = sqlite3.connect(path)
    assert [row[1] for row in base.execute("PRAGMA table_info(draws)")] == ["event", "epsilon", "draw"]
    assert sorted(os.listdir(tmp_path)) == ["draws.db"]


def test_draws_are_durable_before_they_are_known(store: DrawStore) -> None:
    """EXTRA: the deleted journal's folder is synced as well; FULL may roll a committed draw back at a power cut."""
    assert store._base.execute("PRAGMA synchronous").fetchone() == (3,)
    assert store._base.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "draws.db"
    assert DrawStore(path, SIGNS).created
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(UserError, match="can be read by others; run `chmod 600"):
        DrawStore(path, SIGNS)


@pytest.mark.parametrize("content", [b"", b"a letter to a friend" * 100, "database"])
def test_something_else_is_no_store_and_is_left_alone(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "draws.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        sqlite3.connect(path).execute("CREATE TABLE draws (event)").connection.commit()
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(UserError, match="a store of label draws"):
        DrawStore(path, SIGNS)
    assert path.read_bytes() == before


def test_a_damaged_store_draws_nothing(tmp_path: Path) -> None:
    path = tmp_path / "draws.db"
    DrawStore(path, SIGNS).answer([(f"e{i}", 0) for i in range(2000)], 1.0)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"draws\.db: (is damaged|cannot be used)"):
        DrawStore(path, SIGNS).answer([(f"e{i}", 0) for i in range(2000)], 1.0)


def test_a_full_disk_sends_nothing(tmp_path: Path) -> None:
    """`max_page_count` makes SQLite say "database or disk is full"."""
    store = DrawStore(tmp_path / "draws.db", SIGNS)
    store._base.execute("PRAGMA max_page_count = 4")
    lines = "".join(json.dumps({"id": i, "label": 1}) + "\n" for i in range(5000))
    with pytest.raises(UserError, match=r"full.*nothing was sent"):
        answer(lines, store)
    assert store._base.execute("SELECT count(*) FROM draws").fetchone() == (0,)


def test_a_store_in_use_is_said_to_be_so(tmp_path: Path) -> None:
    first, second = (DrawStore(tmp_path / "draws.db", SIGNS, wait_seconds=0.05) for _ in range(2))
    first._base.execute("BEGIN IMMEDIATE")
    with pytest.raises(UserError, match=r"locked.*nothing was sent"):
        second.answer([("a", 0)], 1.0)


def test_other_labels_need_another_store(tmp_path: Path) -> None:
    DrawStore(tmp_path / "draws.db", ("A", "B"))
    with pytest.raises(UserError, match=r'was made for the labels \["A", "B"\]'):
        DrawStore(tmp_path / "draws.db", ("B", "A"))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot make a store here"):
        DrawStore(tmp_path / "nowhere" / "draws.db", SIGNS)


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UserError) as refused:
        DrawStore(tmp_path / "draws.db", SIGNS)
    reason = "cannot make a store here (Operation not permitted, hard links); choose another --store"
    assert str(refused.value) == f"{tmp_path / 'draws.db'}: {reason}"
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_is_named_as_it_was_given(tmp_path: Path) -> None:
    for name in ("s" * 250, "s" * 300):
        with pytest.raises(UserError, match=f"/{name}: cannot make a store here \\(File name too long\\)"):
            DrawStore(tmp_path / name, SIGNS)
    assert list(tmp_path.iterdir()) == []


# --- the lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels"),
    [("-1,1", (-1, 1)), ("0,1", (0, 1)), ("A,B", ("A", "B")), ("true,false", (True, False)), ("links, rechts",
     ("links", "rechts")), ("1.5,x", ("1.5", "x"))],
)
def test_the_alphabets(text: str, labels: tuple[Any, Any], tmp_path: Path) -> None:
    parsed = parse_labels(text)
    assert [(type(value), value) for value in parsed] == [(type(value), value) for value in labels]
    store = DrawStore(tmp_path / "draws.db", parsed)
    lines = "".join(json.dumps({"id": i, "label": parsed[i % 2]}) + "\n" for i in range(60))
    rows, refused = answer(lines, store, 0.5, labels=parsed)
    assert refused == 0
    assert {row["label"] for row in rows} == set(parsed)  # all 60 alike: probability below 1e-16


@pytest.mark.parametrize("text", ["", "1", "1,1", "A,B,C", ",", "1,true"])
def test_not_two_labels(text: str) -> None:
    with pytest.raises(UserError, match="does not name two different labels"):
        parse_labels(text)


def test_only_named_fields_pass(store: DrawStore) -> None:
    """A comment, a score or the annotator's hesitation may tell the label."""
    line = json.dumps({"label": 1, "comment": "the first", "id": "e", "score": 9, "page": [1]}) + "\n"
    rows, _ = answer(line, store, keep=("page", "absent"))
    assert [list(row) for row in rows] == [["id", "label", "page"]]
    with pytest.raises(UserError, match="must be different"):
        LabelFilter(store, 1.0, SIGNS, keep=("label",))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"SECRET", "is not one JSON object in UTF-8"),
        (b'["SECRET"]', "is not one JSON object in UTF-8"),
        (b'{"id": "\xff", "label": "SECRET"}', "is not one JSON object in UTF-8"),
        (b"[" * 100_000, "is not one JSON object in UTF-8"),
        (b'{"id": "a", "label": "SECRET"}', "field 'label' must be one of the two labels [-1, 1]"),
        (b'{"id": "a", "label": "1"}', "field 'label' must be one of the two labels [-1, 1]"),
        (b'{"id": "a", "label": 1, "label": -1}', "gives a field twice"),
        (b'{"id": "a", "id": "b", "label": 1}', "gives a field twice"),
        (b'{"id": "a", "label": true}', "field 'label' must be one of the two labels [-1, 1]"),
        (b'{"id": "a", "label": 1.0}', "field 'label' must be one of the two labels [-1, 1]"),
        (b'{"id": "a", "lable": "SECRET"}', "field 'label' must be one of the two labels [-1, 1]"),
        (b'{"id": null, "label": 1}', "field 'id' is not a string or whole number"),
        (b'{"id": "", "label": 1}', "field 'id' is not a string or whole number"),
        (b'{"id": true, "label": 1}', "field 'id' is not a string or whole number"),
        (b'{"id": 1.5, "label": 1}', "field 'id' is not a string or whole number"),
        (b'{"id": "\\ud800", "label": 1}', "field 'id' holds a lone surrogate"),
    ],
)
def test_a_malformed_line_is_refused_without_repeating_it(store: DrawStore, line: bytes, said: str) -> None:
    good = b'{"id": "before", "label": 1}\n'
    rows, refused = answer(good + line + b"\n" + good.replace(b"before", b"after"), store)
    assert refused == 1
    assert [row.get("id") for row in rows] == ["before", None, "after"]
    assert rows[1] == {"line": 2, "error": said}


def test_an_error_does_not_depend_on_the_label(tmp_path: Path) -> None:
    """Wrong epsilon, wrong id: the same bytes whichever label was in the line."""
    said = []
    for label in SIGNS:
        store = DrawStore(tmp_path / f"{label}.db", SIGNS)
        answer(json.dumps({"id": "a", "label": label}) + "\n", store, 1.0)
        lines = [{"id": "a", "label": label}, {"id": [], "label": label}]
        said.append(answer("".join(json.dumps(line) + "\n" for line in lines), store, 2.0))
    assert said[0] == said[1]
    assert said[0][1] == 2
    assert "answered at another epsilon" in said[0][0][0]["error"]


def test_numbers_and_their_text_are_one_id(store: DrawStore) -> None:
    lines = "".join(f'{{"id": {i}, "label": 1}}\n{{"id": "{i}", "label": 1}}\n' for i in range(100))
    rows, _ = answer(lines, store, 0.1)
    assert [row["label"] for row in rows[0::2]] == [row["label"] for row in rows[1::2]]
    assert rows[0]["id"] == 0
    assert rows[1]["id"] == "0"


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=20), st.randoms())
def test_chunks_do_not_matter(tmp_path_factory: pytest.TempPathFactory, ids: list[str], random: Any) -> None:
    """Any ids, cut anywhere, blank lines and a missing last line break included: the same answers in the same order."""
    store = DrawStore(tmp_path_factory.mktemp("store") / "draws.db", SIGNS)
    whole = "\n\n".join(json.dumps({"id": name, "label": 1}, ensure_ascii=False) for name in ids).encode()
    rows, refused = answer(whole, store)
    assert refused == 0
    assert [row["id"] for row in rows] == ids
    cuts = sorted(random.choices(range(len(whole) + 1), k=5))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]
    chunks.append(b"")
    sent = bytearray()
    LabelFilter(store, 1.0, SIGNS).serve(lambda: chunks.pop(0), sent.extend)
    assert [json.loads(line) for line in sent.decode().splitlines()] == rows
    store.close()


def test_an_endless_line_is_refused(store: DrawStore) -> None:
    with pytest.raises(UserError, match=f"line 2 is over {MAX_LINE_BYTES} bytes"):
        answer(b'{"id": "a", "label": 1}\n' + b"x" * (MAX_LINE_BYTES + 1), store)
