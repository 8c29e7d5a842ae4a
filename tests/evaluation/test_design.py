"""`private-rlhf design`: what labels would bring, before anyone is asked."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from private_rlhf.cli import main
from private_rlhf.commands.design import consent, draw, terms
from private_rlhf.core.errors import UserError
from private_rlhf.evaluation.forecast import Answers, Forecast, agreement_of, forecasts, learn, margin_scale
from private_rlhf.lm.base_models import tiny_checkpoint

FEW = Answers(Answers.normal().x[:40, :8, :8])


@pytest.mark.parametrize("agreement", [0.51, 0.65, 0.9])
def test_the_scale_of_margins_is_that_of_the_agreement(agreement: float) -> None:
    """Against a million draws of a margin and of two people's labels: 5 standard errors, a false alarm in 10⁶."""
    scale = margin_scale(agreement)
    assert agreement_of(scale) == pytest.approx(agreement, abs=1e-9)
    generator = np.random.default_rng(0)
    chance = 1 / (1 + np.exp(-scale * generator.standard_normal(10**6)))
    one, other = generator.random((2, 10**6)) < chance
    assert np.mean(one == other) == pytest.approx(agreement, abs=5 * math.sqrt(agreement * (1 - agreement) / 10**6))


def test_the_gain_is_that_of_the_gibbs_policy_of_what_was_learnt() -> None:
    """By the sum over two answers: J of π ∝ exp(θ̂x/kl_coef), against the uniform one."""
    answers = Answers(torch.tensor([[[1.0], [0.0]]], dtype=torch.float64))
    theta, learnt, kl_coef = torch.tensor([2.0]).double(), torch.tensor([0.5]).double(), 0.5
    p = 1 / (1 + math.exp(-1.0))
    expected = 2 * (p - 0.5) - kl_coef * (p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)))
    assert answers.gain(theta, learnt, kl_coef) == pytest.approx(expected, abs=1e-12)
    assert answers.gain(theta, 0 * learnt, kl_coef) == 0.0
    assert answers.gain(theta, theta, kl_coef) > answers.gain(theta, learnt, kl_coef)


def test_gains_rise_with_labels_and_epsilon_and_follow_the_law() -> None:
    cells = [(400, 0.5), (400, 2.0), (1600, 2.0), (400, math.inf), (round(400 / math.tanh(1.0) ** 2), 2.0)]
    low, middle, more, public, law = forecasts(FEW, cells, 0.7, 0.5, rewards=8)
    means = [each.gain.mean() for each in (low, middle, more)]
    assert 0 < means[0] < means[1] < means[2]
    assert (public.retained == 1).all()
    assert public.right.mean() > middle.right.mean() > low.right.mean() > 0.5
    assert law.gain.mean() == pytest.approx(public.gain.mean(), rel=0.08)  # n/tanh²(ε/2) labels are worth n true ones


def test_labels_are_flipped_where_the_coin_says_so() -> None:
    """At ε = 0⁺ half of the labels are flipped, and nothing is learnt; coins below α keep every label."""
    rows, true = FEW.differences[:300], torch.ones(300, dtype=torch.float64)
    kept = learn(rows, true, torch.zeros(300, dtype=torch.float64), 1.0)
    flipped = learn(rows, true, torch.ones(300, dtype=torch.float64), 1.0)
    assert torch.allclose(kept, -flipped, atol=1e-4)
    assert (rows @ kept).mean() > 0


def test_a_share_is_never_outside_0_and_1() -> None:
    """And nothing is retained of a gain that is none."""
    gains, public = [-0.1, 0.2, 0.5, -0.1, 0.1], [0.4, 0.4, 0.4, -0.05, 0.0]
    forecast = Forecast(np.array(gains), np.array(public), np.zeros(5))
    assert forecast.retained == pytest.approx([0.0, 0.5, 1.0, 0.0, 0.0])


def test_a_budget_buys_the_best_number_of_answers() -> None:
    assert terms(20, 1.0, None) == (20, 1.0)
    assert terms(20, None, 2.0) == (1, 2.0)
    asked, epsilon = terms(20, None, 20.0)
    assert (asked, epsilon) == (9, pytest.approx(20 / 9))


def test_the_consent_form_says_what_a_report_and_all_of_them_tell() -> None:
    text = consent(4, 1.0)
    assert "of 100 people who prefer A, 73 reports say A" in text
    assert "at most 2.8; whoever sees all of yours, by 54.6.”" in text
    assert "at most 1.3; whoever sees all of yours, by 1.3.”" in consent(1, 0.2)  # e^0.2 is 1.22
    assert "e^20. So each answer is protected, and all of yours together hardly.”" in consent(20, 1.0)


def test_the_command_prints_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "design.md"
    command = ["design", "--people", "10", "--answers", "2", "--epsilon", "1", "--rewards", "8", "--output", str(page)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# 20 labels at ε = 1: 2 of each of 10 people\n\nThey carry what 4 true labels would")
    assert page.read_text(encoding="utf-8").startswith(printed.rstrip())
    rows = [line.split(" | ")[:2] for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == len({*map(tuple, rows)}) == 1 + 5 + 4  # the head, five ε at 20 labels, four other numbers
    assert "Retained gain" in (tmp_path / "design.svg").read_text(encoding="utf-8")
    assert main(command) == 0  # its own page is written again
    page.write_text("notes", encoding="utf-8")
    assert main(command) == 2


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "--epsilon (of an answer) or --budget"),
        (["--epsilon", "1", "--budget", "2"], "--epsilon (of an answer) or --budget"),
        (["--epsilon", "0"], "--epsilon"),
        (["--epsilon", "1", "--agreement", "0.5"], "--agreement must lie between 0.5 and 1, got 0.5"),
        (["--epsilon", "1", "--policy", "absent"], "--policy"),
        (["--epsilon", "1", "--output", "page.svg"], "--output must be a Markdown page, got page.svg"),
    ],
)
def test_what_cannot_be_forecast_is_one_line(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["design", "--people", "10", "--answers", "2", *options]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_answers_of_a_checkpoint_are_drawn_in_its_features(tmp_path: Path) -> None:
    """A `pair_basis` of its answers: differences have a mean second moment of about 1."""
    home = tiny_checkpoint(tmp_path / "tiny", ["the quick brown fox jumps over the lazy dog"], 0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the quick dog"}\n{"prompt": "the lazy fox"}\n', encoding="utf-8")
    answers = draw(str(home), str(prompts))
    assert answers.x.shape[:2] == (2, 8)
    assert answers.differences.square().mean() == pytest.approx(1.0, rel=0.8)
    with pytest.raises(UserError, match=r"absent\.jsonl: no such file"):
        draw(str(home), str(tmp_path / "absent.jsonl"))
