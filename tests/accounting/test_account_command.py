"""`private-rlhf account KIND`: words or JSON on stdout, refusals in one line that names flag or lab command."""

from __future__ import annotations

import json
import shlex

import pytest
from private_rlhf.cli import main
from private_rlhf.privacy.person import epsilon_each, person_epsilon

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("command", "epsilon"),
    [("randomized-response --epsilon 0.5 --labels-per-person 100", 50.0), ("person --budget 2 --questions 20", 2.0)],
)
def test_every_kind_prints_its_guarantee(command: str, epsilon: float, capsys: Capture) -> None:
    assert main(["account", *shlex.split(command), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed)[:4] == ["epsilon", "delta", "statement", "assumptions"]
    assert (printed["epsilon"], printed["delta"], len(printed["assumptions"])) == (epsilon, 0.0, 3)


def test_person_adds_up_answers_at_several_levels(capsys: Capture) -> None:
    assert main(shlex.split("account person --answers 0.1:3,4:2 --json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["epsilon"], printed["by_level"][0]) == (8.3, {"epsilon": 0.1, "answers": 3, "total": 0.3})
    assert "chosen with its answer in view" in printed["assumptions"][0]
    for given in ("", "--answers 4", "--answers 4:x", "--answers 0:2", "--answers 4:0"):
        assert main(shlex.split(f"account person {given}")) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "must be" in line


def test_without_json_a_guarantee_is_said_in_words(capsys: Capture) -> None:
    assert main(shlex.split("account person --answers 0.5:10,4:2")) == 0
    statement, odds, levels, exact, head, *assumed = capsys.readouterr().out.splitlines()
    assert statement.endswith("is 13-differentially private (delta = 0)")
    assert odds == "ε = 13: the odds of any guess change by at most a factor of 442,414"
    assert levels == "by_level: epsilon 0.5, answers 10, total 5; epsilon 4, answers 2, total 8"
    assert (exact, head, len(assumed)) == ("exact: epsilon 13, delta 1e-06", "if", 3)


def test_person_takes_answers_or_a_budget(capsys: Capture) -> None:
    for other in ("--budget 1", "--questions 3"):
        assert main(shlex.split(f"account person --answers 0.1:3 {other}")) == 2
        assert "--answers must be given without --budget and --questions" in capsys.readouterr().err


def test_person_marks_the_best_number_of_answers(capsys: Capture) -> None:
    assert main(shlex.split("account person --budget 2 --questions 20")) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head == "answers  ε of each  information  ε at δ = 1e-06"
    assert [row.split()[0] for row in rows] == [str(k) for k in range(1, 21)]
    assert [row for row in rows if "best" in row] == rows[:1]
    assert rows[19].split()[:3] == ["20", "0.1", "0.0861"]  # 1/11.62
    assert "1 of at most 20 answers" in last


def test_person_as_json(capsys: Capture) -> None:
    assert main(shlex.split("account person --budget 20 --questions 100000 --target-delta 1e-5 --json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["answers"], printed["epsilon_each"], printed["target_delta"]) == (9, epsilon_each(20, 9), 1e-5)
    table = {row["answers"]: row for row in printed["table"]}
    assert {1, 8, 9, 10, 100, 5000, 100_000} <= set(table)
    assert max(table.values(), key=lambda row: float(row["information"])) is table[9]
    assert table[9]["epsilon_at_delta"] == person_epsilon([(epsilon_each(20, 9), 9)], 1e-5) < 20
    assert table[100_000]["epsilon_at_delta"] is None
    for row in table.values():
        assert row["answers"] * row["epsilon"] == pytest.approx(20)
