"""The swap test: chosen and rejected change places in a random half of the rows, under two copies of one key.

Everything that leaves the stage (bundle, manifest, prompts, error messages) must be the same but for the private
labels of those rows. The input holds copies in both orders, so the drop rules are in the test too.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import read_demonstrations, read_prompts
from private_rlhf.data.layout import read_preferences
from private_rlhf.data.release import read_release
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from support.other_machines import copy_key, move_to
from support.plain_release import contents, release_pairs
from support.preference_files import CASES, STYLES, WRITERS, Row, triples, write_jsonl

EPSILON = 2.0


def swap(row: Row) -> Row:
    """Change the places of the two responses' values; a missing one is missing on the other side."""
    renamed = {
        "chosen": "rejected",
        "rejected": "chosen",
        "score_chosen": "score_rejected",
        "score_rejected": "score_chosen",
    }
    swapped = {renamed.get(name, name): value for name, value in row.items()}
    return {name: swapped[name] for name in [*(n for n in row if n in swapped), *(n for n in swapped if n not in row)]}


def some(rows: list[Any]) -> set[int]:
    return set(random.Random(7).sample(range(len(rows)), len(rows) // 2))


def privatize(source: Path, key_file: Path, out: Path, options: Options | None = None) -> str:
    """The command itself, on small pieces of the input; returns the line it prints, without the output's path."""
    move_to(key_file.with_suffix(".machine"))
    request = Request(
        str(source), out, EPSILON, key_file, source="declared", chunk_bytes=500, options=options or Options()
    )
    return privatize_source(request).replace(str(out), "OUT")


def privatize_in_memory(source: Path, key_file: Path, out: Path) -> None:
    """The plain way: read, privatise, write the bundle."""
    release_pairs(read_preferences(source), out, RandomizedResponse(EPSILON), load_key(key_file))


@pytest.fixture
def key_files(tmp_path: Path) -> tuple[Path, Path]:
    first = keygen(tmp_path / "first.key")
    first.write_text("private-rlhf key v1\n" + bytes(range(32)).hex() + "\n")
    return first, copy_key(first, tmp_path / "second.key")


@pytest.mark.parametrize(("style", "writer"), CASES)
def test_only_private_labels_of_swapped_rows_change(
    tmp_path: Path, key_files: tuple[Path, Path], style: str, writer: str
) -> None:
    rows = [STYLES[style](*row) | {"score_chosen": "9", "score_rejected": "1"} for row in triples()]
    swapped_rows = some(rows)
    variants = (rows, [swap(row) if i in swapped_rows else row for i, row in enumerate(rows)])
    assert variants[0] != variants[1]
    outs, prompts, said = [], [], []
    for name, variant, key_file in zip(("one", "two"), variants, key_files, strict=True):
        (tmp_path / name).mkdir()
        source = WRITERS[writer](tmp_path / name, variant)
        said.append(privatize(source, key_file, tmp_path / name / "out"))
        privatize_in_memory(source, key_file, tmp_path / name / "plain")
        assert contents(tmp_path / name / "out") == contents(tmp_path / name / "plain")
        outs.append(tmp_path / name / "out")
        prompts.append(list(read_prompts(source)))
    assert prompts[0] == prompts[1]
    assert said[0] == said[1]
    assert (outs[0] / "_manifest").read_bytes() == (outs[1] / "_manifest").read_bytes()
    dropped = json.loads((outs[0] / "_manifest").read_text())["dropped"]
    assert dropped == {"identical": 1, "empty": 1, "duplicates": 2}
    assert [path.name for path in sorted(outs[0].iterdir())] == [path.name for path in sorted(outs[1].iterdir())]
    first, second = read_release(outs[0]).rows, read_release(outs[1]).rows
    assert len(first) == len(second) == 24
    changed = 0
    for one, two in zip(first, second, strict=True):
        assert (one.record_id, one.prompt) == (two.record_id, two.prompt)
        if one != two:
            assert (one.chosen, one.rejected) == (two.rejected, two.chosen)
            number = int(str(one.prompt).split("Say ")[1].split(",")[0])
            assert number in swapped_rows
            changed += 1
    assert 0 < changed <= len(swapped_rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [({"city": "Oslo", "days": 1}, {"days": 1, "city": "Oslo"}), ({"days": 1}, {"days": 1.0}), ({"x": 1}, {"x": True})],
)
def test_a_prompt_written_in_two_ways_is_of_neither_response(
    tmp_path: Path, key_files: tuple[Path, Path], one: Row, other: Row
) -> None:
    """A tool call before both answers, equal in Python and not in its bytes: the prompt that is released would be the
    preferred one's, whatever ε is."""

    def talk(arguments: Row, answer: str) -> list[Row]:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}]}
        return [{"role": "user", "content": "Rain?"}, call, {"role": "assistant", "content": answer}]

    sides = talk(one, "No."), talk(other, "Yes.")
    released = []
    for name, (chosen, rejected), key_file in zip(("one", "two"), (sides, sides[::-1]), key_files, strict=True):
        (tmp_path / name).mkdir()
        source = write_jsonl(tmp_path / name, [{"chosen": chosen, "rejected": rejected}])
        privatize(source, key_file, tmp_path / name / "out", Options(message_keys=("tool_calls",)))
        (row,) = read_release(tmp_path / name / "out").rows
        released.append((row.record_id, repr(row.prompt), {repr(row.chosen), repr(row.rejected)}))
    assert released[0] == released[1]


def test_a_quote_that_is_not_closed_is_refused_alike_on_either_side(tmp_path: Path) -> None:
    """One order is no CSV, the other has too few fields: two sentences would tell which response holds it."""
    path, said = tmp_path / "train.csv", set()
    for sides in ('a","open\n', '"open\n,a"'):
        path.write_text(f"prompt,chosen,rejected\nQuestion?,{sides}\n")
        with pytest.raises(UserError) as caught:
            list(read_preferences(path))
        said.add(str(caught.value))
    assert len(said) == 1


def labelled(row: Row, a_is_chosen: bool, label: str) -> Row:
    """The pair as response_a, response_b and the label "A" or "B" that says which is preferred."""
    first, second = (row["chosen"], row["rejected"]) if a_is_chosen else (row["rejected"], row["chosen"])
    rest = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
    return rest | {"response_a": first, "response_b": second, "winner": label, "score": "9" if label == "A" else "1"}


@pytest.mark.parametrize(("style", "writer"), CASES)
def test_in_the_labelled_form_the_label_moves_private_labels_alone(
    tmp_path: Path, key_files: tuple[Path, Path], style: str, writer: str
) -> None:
    """The other label in a random half: all but z in those rows is the same. Responses and label swapped together say
    the same, and give the same bytes. And they are those of the chosen/rejected form."""
    rows = [STYLES[style](*row) for row in triples()]
    half, places = some(rows), [random.Random(3).random() < 0.5 for _ in rows]
    variants = {
        "plain": [labelled(row, True, "A") for row in rows],
        "mirrored": [labelled(row, place, "A" if place else "B") for row, place in zip(rows, places, strict=True)],
        "swapped": [labelled(row, True, "B" if i in half else "A") for i, row in enumerate(rows)],
        "pairs": [swap(row) if i in half else row for i, row in enumerate(rows)],
    }
    said = {}
    for name, variant in variants.items():
        (tmp_path / name).mkdir()
        options = Options() if name == "pairs" else Options(label_column="winner", labels=("A", "B"))
        key_file = key_files[name in ("swapped", "pairs")]  # other labels, which the first one's store would refuse
        said[name] = privatize(WRITERS[writer](tmp_path / name, variant), key_file, tmp_path / name / "out", options)
    outs = {name: contents(tmp_path / name / "out") for name in variants}
    assert outs["plain"] == outs["mirrored"]
    assert outs["swapped"] == outs["pairs"]
    assert outs["plain"]["_manifest"] == outs["swapped"]["_manifest"]
    assert len(set(said.values())) == 1
    first, second = (read_release(tmp_path / name / "out").rows for name in ("plain", "swapped"))
    changed = {
        int(str(one.prompt).split("Say ")[1].split(",")[0])
        for one, two in zip(first, second, strict=True)
        if one != two and (one.chosen, one.rejected) == (two.rejected, two.chosen)
    }
    assert changed
    assert changed <= half
    assert [(one.record_id, one.prompt) for one in first] == [(two.record_id, two.prompt) for two in second]


GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}
MESSAGES = [{"role": "user", "content": "x"}]
BAD_ROWS: dict[str, list[Row]] = {
    "missing": [GOOD, {"prompt": "p", "chosen": "a"}],
    "misspelt": [{"prompt": "p", "chosen": "a", "rejetced": "b"}],
    "null": [GOOD, {"prompt": "p", "chosen": "a", "rejected": None}],
    "null and missing": [{"prompt": "p", "chosen": None}],
    "number": [GOOD, {"prompt": "p", "chosen": 3, "rejected": "b"}],
    "number and null": [{"prompt": "p", "chosen": 3, "rejected": None}],
    "list and text": [GOOD, {"prompt": "p", "chosen": MESSAGES, "rejected": "b"}],
    "number and list": [{"prompt": "p", "chosen": 3, "rejected": MESSAGES}],
    "bad message": [{"chosen": MESSAGES, "rejected": [{"role": "user"}]}],
    "two bad messages": [{"chosen": [1], "rejected": [{"role": "user", "content": None}]}],
    "messages then text": [{"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES * 2}, GOOD],
    "text then messages": [GOOD, {"prompt": "p", "chosen": MESSAGES, "rejected": MESSAGES * 2}],
    "prompt number": [GOOD, {"prompt": 1, "chosen": "a", "rejected": "b"}],
    "surrogate": [GOOD, {"prompt": "p", "chosen": "\ud800", "rejected": "b"}],
    "nothing left": [{"prompt": "p", "chosen": "a", "rejected": ""}],
    "not a dialogue": [
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "hello"},
    ],
    "no shared start": [{"chosen": "abc", "rejected": "xyz"}],
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_error_messages_do_not_depend_on_labels(tmp_path: Path, key_files: tuple[Path, Path], name: str) -> None:
    """Both `read_preferences` and what follows it; every row swapped, and only the last one."""
    rows = BAD_ROWS[name]
    variants = [rows, [swap(row) for row in rows], [*rows[:-1], swap(rows[-1])]]
    messages = set()
    for variant in variants:
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in variant))
        with pytest.raises(UserError) as caught:
            privatize(path, key_files[0], tmp_path / "out")
        messages.add(str(caught.value))
        assert caught.value.__cause__ is None
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / ".out.work").exists()
    assert len(messages) == 1
    (message,) = messages
    assert "\n" not in message
    assert ";" in message  # the remedy


@pytest.mark.parametrize(
    ("template", "bad"),
    [
        (b'{"prompt": "p", "chosen": %b, "rejected": %b}', b'"long \xff answer"'),
        (b'{"prompt": "p", "chosen": %b, "rejected": %b}', b'"a long answer'),
        (b'{"prompt": "p", "chosen": %b, "rejected": %b', b'"a long answer"'),
    ],
)
def test_broken_text_says_the_same_either_way(
    tmp_path: Path, key_files: tuple[Path, Path], template: bytes, bad: bytes
) -> None:
    """Bytes that are no UTF-8 and broken JSON sit inside one of the responses; the message has no position."""
    messages = set()
    for values in ((bad, b'"a"'), (b'"a"', bad)):
        path = tmp_path / "train.jsonl"
        path.write_bytes(template % values + b"\n")
        with pytest.raises(UserError) as caught:
            privatize(path, key_files[0], tmp_path / "out")
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_demonstrations_refuse_preferences_with_one_message(tmp_path: Path) -> None:
    messages = set()
    for row in (GOOD, swap(GOOD)):
        with pytest.raises(UserError) as caught:
            list(read_demonstrations(write_jsonl(tmp_path, [row])))
        messages.add(str(caught.value))
    assert len(messages) == 1
