"""Ties: a fair coin of the event in their place, then the mechanism; or left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.release import read_release
from private_rlhf.privacy.keys import keygen
from support.other_machines import copy_key, move_to
from support.preference_files import write_jsonl

ROWS = [
    {"prompt": f"Question {i}", "response_a": f"a {i}", "response_b": f"b {i}", "label": "ABT"[i % 3]}
    for i in range(600)
]
TURNED = [{**row, "response_a": row["response_b"], "response_b": row["response_a"]} for row in ROWS]


def options(ties: Literal["drop", "coin"], turned: bool = False) -> Options:
    labels = ("A=b", "B=a", "T=tie") if turned else ("A=a", "B=b", "T=tie")
    return Options(label_column="label", labels=labels, ties=ties)


def release(folder: Path, key: Path, rows: list[dict[str, Any]], declared: Options, epsilon: float = 20.0) -> Path:
    folder.mkdir()
    move_to(key.with_suffix(".machine"))
    privatize_source(
        Request(str(write_jsonl(folder, rows)), folder / "out", epsilon, key, source="s", options=declared)
    )
    return folder / "out"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    first = keygen(tmp_path / "first.key")
    first.write_text("private-rlhf key v1\n" + bytes(range(32)).hex() + "\n")
    return first, copy_key(first, tmp_path / "second.key")


def test_a_tie_is_a_fair_coin_that_stays(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """At ε = 20 labels stay, and 200 ties fall to either side: a fair coin is outside 70..130 once in 20,000 keys;
    this key is fixed. Another turn of the responses, and another run, give the same coins."""
    one = read_release(release(tmp_path / "one", keys[0], ROWS, options("coin"))).rows
    two = read_release(release(tmp_path / "two", keys[1], TURNED, options("coin", turned=True))).rows
    assert [row[:4] for row in one] == [row[:4] for row in two]
    assert len(one) == 600
    labels = {row.prompt: row.chosen[0] for row in one}
    assert all(labels[row["prompt"]] == row["label"].lower() for row in ROWS if row["label"] != "T")
    ties = [labels[row["prompt"]] for row in ROWS if row["label"] == "T"]
    assert 70 <= ties.count("a") <= 130


def test_dropped_ties_are_counted(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    out = release(tmp_path / "one", keys[0], ROWS, options("drop"))
    bundle = read_release(out)
    assert bundle.manifest.rows == 400
    assert bundle.manifest.dropped == {"identical": 0, "empty": 0, "duplicates": 0, "ties": 200}


ANSWERS = ["one", "two", "three", "four"]


def chosen_of_four(shape: str, place: int) -> list[dict[str, Any]]:
    """Rows in which the same one of four answers was chosen."""
    others = [each for each in ANSWERS if each != ANSWERS[place]]
    rows: dict[str, dict[str, Any]] = {
        "several": {"chosen": ANSWERS[place], "rejected": others},
        "choice": {"responses": ANSWERS, "choice": place},
        "scores": {"responses": ANSWERS, "scores": [int(each == ANSWERS[place]) for each in ANSWERS]},
    }
    return [{"prompt": f"Question {number}", **rows[shape]} for number in range(20)]


@pytest.mark.parametrize("pairs", ["one", "all"])
@pytest.mark.parametrize("shape", ["several", "choice", "scores"])
def test_which_pairs_of_several_are_released_tells_nothing(
    tmp_path: Path, keys: tuple[Path, Path], shape: str, pairs: Literal["one", "all"]
) -> None:
    """Pairs of two that were not chosen are ties: where they are left out, or a row with one is refused, the one of
    four that is in all pairs, or in none, was chosen. So all are released, or every row is refused alike."""
    said, released = set(), []
    for place in (0, 3):
        rows = chosen_of_four(shape, place)
        for ties in ("drop", None)[: 1 + (shape != "scores")]:
            with pytest.raises(UserError, match=r"line 1: holds more than two responses.*say --ties coin") as caught:
                release(tmp_path / f"{ties}{place}", keys[0], rows, Options(ties=ties, pairs=pairs))
            said.add(str(caught.value).partition("line")[2])
        out = release(tmp_path / f"coin{place}", keys[place > 0], rows, Options(ties="coin", pairs=pairs), 0.1)
        released.append([(row.record_id, {row.chosen, row.rejected}) for row in read_release(out).rows])
    assert len(said) == 1
    assert released[0] == released[1]
    assert len(released[0]) == {"one": 20, "all": 120}[pairs]


def test_a_refusal_does_not_depend_on_which_of_several_was_chosen(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """Two responses of three are at fault, each in its own way."""
    texts = [[{"role": "assistant", "content": "yes"}], [{"role": "robot", "content": "x"}], [{"role": "user"}]]
    said = set()
    for place in range(3):
        others = [each for number, each in enumerate(texts) if number != place]
        row = {"prompt": [{"role": "user", "content": "q"}], "chosen": [texts[place]], "rejected": others}
        with pytest.raises(UserError) as caught:
            release(tmp_path / str(place), keys[0], [row], Options(format="several", ties="coin", pairs="all"))
        said.add(str(caught.value).partition("line")[2])
    assert len(said) == 1
