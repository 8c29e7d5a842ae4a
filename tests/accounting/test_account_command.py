"""`private-rlhf account KIND`: JSON on stdout, refusals in one line that names the flag."""

from __future__ import annotations

import json
import shlex

import pytest

from pipeline.accounting.draws import rlhf_epsilon
from pipeline.cli import main

Capture = pytest.CaptureFixture[str]

COMMANDS = {
    "randomized-response --epsilon 0.5 --labels-per-person 100": (50.0, 0.0),
    "bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 9": (0.1, 0.0),
    "bandit --kl-coef 1 --pessimism 0 --reward-range 1 --max-count 90 --coverage-ratio 0.1 --reference-mass 0.5": (
        0.1,
        1.0,
    ),
    "linear --kl-coef 1 --pessimism 0 --reward-abs-max 1 --lambda-min 1 --rows 0": (2**0.5, 0.0),
    "rlhf --kl-coef 1 --lambda-min 100 --parameter-norm 1 --feature-norm 1 --notion label": (
        rlhf_epsilon(1.0, 100.0, 1.0, "label"),
        0.0,
    ),
    "rlhf --kl-coef 1 --lambda-min 9 --parameter-norm 1 --notion add-remove --pessimism 2": (
        rlhf_epsilon(1.0, 9.0, 1.0, "add-remove", pessimism=2.0),
        0.0,
    ),
    "repeated --epsilon 0.1 --delta 0 --draws 3 --target-delta 1e-6": (0.3, 0.0),
    "private-rl --updates 99 --epsilon-total 8 --delta 1e-5 --sensitivity 1": (8.0, 1e-5),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_kind_prints_its_guarantee(command: str, capsys: Capture) -> None:
    assert main(["account", *shlex.split(command), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed)[:4] == ["epsilon", "delta", "statement", "assumptions"]
    assert (printed["epsilon"], printed["delta"]) == (pytest.approx(COMMANDS[command][0]), COMMANDS[command][1])
    assert len(printed["assumptions"]) >= 3


@pytest.mark.parametrize("neighbors", ["transition", "trajectory --trajectories 5"])
def test_dptd(neighbors: str, capsys: Capture) -> None:
    command = f"account dptd --rows 2500 --steps 5 --clip 1 --sigma 9 --target-delta 1e-5 --neighbors {neighbors}"
    assert main(shlex.split(command)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert 0 < printed["epsilon"] < 10
    assert printed["delta"] == 1e-5


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("randomized-response --epsilon -1 --labels-per-person 1", "--epsilon must be a finite number above 0"),
        ("bandit --kl-coef 1 --pessimism 0 --reward-range 1", "account bandit needs --min-count, or all of"),
        ("bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 0", "--min-count must be a whole number"),
        (
            "bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 2 --max-count 9",
            "--min-count (pure) does not go with --max-count",
        ),
        ("linear --kl-coef nan --pessimism 0 --reward-abs-max 1 --lambda-min 1 --rows 1", "--kl-coef must be"),
        ("rlhf --kl-coef 1 --lambda-min 9 --parameter-norm 1 --notion swap", "--notion must be label or add-remove"),
        ("repeated --epsilon 1 --delta 1e-5 --draws 9 --target-delta 1e-6", "--target-delta must be at least"),
        (
            "dptd --rows 9 --steps 5 --clip 1 --sigma 1 --target-delta 1e-5 --neighbors trajectory",
            "--trajectories is missing",
        ),
        ("private-rl --updates 3 --epsilon-total 8 --delta 2 --sensitivity 1", "--delta must lie in (0, 1)"),
        ("linear --kl-coef 1 --pessimism 0 --reward-abs-max 1 --rows 1", "--lambda-min"),
        ("nonsense", "nonsense"),
    ],
)
def test_refusals_take_one_line_and_exit_code_2(command: str, said: str, capsys: Capture) -> None:
    assert main(["account", *shlex.split(command)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert said in captured.err
