"""`private-rlhf-lab account KIND`: JSON on stdout, refusals in one line that names the flag."""

from __future__ import annotations

import json
import math
import shlex

import pytest
from private_rlhf_lab.accounting.draws import linear_epsilon, rlhf_epsilon
from private_rlhf_lab.cli import main

Capture = pytest.CaptureFixture[str]

COMMANDS = {
    "bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 9": (0.1, 0.0),
    "bandit --kl-coef 2 --pessimism 1 --reward-range 3 --unconditional": (1.5, 0.0),
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
    "linear --kl-coef 1 --pessimism 9 --reward-abs-max 1 --lambda-min 4 --rows 5 --tau 0.4 --core 0.1"
    " --reference-odds 1e-9": (
        linear_epsilon(1.0, 9.0, 1.0, 4.0, 5, tau=0.4),
        pytest.approx(1e-9 * math.exp(2.0 * math.sqrt(6.0 / 4.0) - 9.0 * 0.3)),
    ),
    "rlhf --kl-coef 1 --lambda-min 9 --parameter-norm 1 --notion label --tau 0.3 --core 0.1 --reference-odds 1e-3": (
        rlhf_epsilon(1.0, 9.0, 1.0, "label", tau=0.3),
        pytest.approx(1e-3 * math.exp(2.0)),
    ),
    "rlhf-features --kl-coef 1 --parameter-norm 1 --action-width 0.2 --pair-width 0.5": (
        0.1 * (2.0 + math.exp(2.0) + math.exp(-2.0)),
        0.0,
    ),
    "repeated --epsilon 0.1 --draws 3 --target-delta 1e-6": (0.3, 0.0),
    "combined --epsilon-draw 1 --epsilon-label 2": (2.0 * math.atanh(math.tanh(0.5) * math.tanh(1.0)), 0.0),
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
    assert main([*shlex.split(command), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert 0 < printed["epsilon"] < 10
    assert printed["delta"] == 1e-5


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bandit --kl-coef 1 --pessimism 0 --reward-range 1", "account bandit needs --min-count, or all of"),
        ("bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 0", "--min-count must be a whole number"),
        (
            "bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 2 --max-count 9",
            "--min-count (pure) does not go with --max-count",
        ),
        (
            "bandit --kl-coef 1 --pessimism 0 --reward-range 1 --min-count 2 --unconditional",
            "--min-count (pure) does not go with --unconditional",
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
        (
            "linear --kl-coef 1 --pessimism 0 --reward-abs-max 1 --lambda-min 1 --rows 1 --tau 1",
            "needs --tau, --core and --reference-odds",
        ),
        ("rlhf --kl-coef 1 --lambda-min 0.5 --parameter-norm 1 --notion label --ridge 1", "--lambda-min is at least"),
        ("inexact --epsilon 1", "needs --distance or --log-error"),
        ("inexact --epsilon 1 --distance 0.1 --log-error 0.1", "needs --distance or --log-error"),
        ("combined --epsilon-draw 0 --epsilon-label 1", "--epsilon-draw must be a finite number above 0"),
        ("nonsense", "nonsense"),
    ],
)
def test_refusals_take_one_line_and_exit_code_2(command: str, message: str, capsys: Capture) -> None:
    assert main(["account", *shlex.split(command)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("command", "epsilon", "delta"),
    [("--distance 0.01", 0.5, 1e-3 + (1 + math.exp(0.5)) * 0.01), ("--log-error 0.1", 0.7, 1e-3 * math.exp(0.1))],
)
def test_inexact(command: str, epsilon: float, delta: float, capsys: Capture) -> None:
    assert main(["account", "inexact", "--epsilon", "0.5", "--delta", "1e-3", "--json", *shlex.split(command)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["epsilon"], printed["delta"]) == (pytest.approx(epsilon), pytest.approx(delta))


def test_a_delta_that_underflows_is_not_called_pure(capsys: Capture) -> None:
    """The mechanism has an infinite pure loss; its δ is about 1e-1000 and was printed as 0."""
    command = "bandit --kl-coef 0.01 --pessimism 40 --reward-range 1 --max-count 400 --coverage-ratio 0.02"
    assert main(["account", *shlex.split(command), "--reference-mass", "0.1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert 0.0 < printed["delta"] < 1e-300
    assert "(delta = 0)" not in printed["statement"]
    assert "e-308)-differentially private" in printed["statement"]
