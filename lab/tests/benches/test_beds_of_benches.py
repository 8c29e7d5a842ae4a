"""The benches that measure levels and forecasts: their shares, and the bed of their options."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf_lab.benches.design_calibration import agreement, measured
from private_rlhf_lab.benches.own_epsilons import OWN, TRUE, WAYS, rows_of_cell
from private_rlhf_lab.benches.stored_bed import add_options, bed_of
from private_rlhf_lab.league.beds import Bed, linear_bed


def bed_options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


def test_the_bed_follows_the_options() -> None:
    name, make_bed = bed_of(bed_options())
    assert (name, make_bed(3).source) == ("linear", linear_bed(3).source)
    with pytest.raises(UserError, match="give one of them"):
        bed_of(bed_options("--run", "r", "--pool", "p"))


def test_agreement_is_the_mean_over_pairs() -> None:
    truth = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)  # a margin of log 3: .75 and .25
    bed = Bed(truth[..., None], truth, truth[..., None], truth, 0.5, "two answers")
    assert agreement(bed) == pytest.approx(0.75**2 + 0.25**2)


def test_more_epsilon_gains_more_on_the_same_coins() -> None:
    gains = [measured(linear_bed(seed, prompts=60), 400, seed) for seed in range(4)]
    means = {epsilon: sum(each[epsilon] for each in gains) / 4 for epsilon in (0.5, 2.0, math.inf)}
    assert means[0.5] < means[2.0] < means[math.inf]


def test_what_is_retained_of_no_clear_gain_is_not_a_number() -> None:
    trials = [dict.fromkeys(WAYS, (0.4 + 0.01 * seed, 1.0)) | {TRUE: (0.8 + 0.01 * seed, 1.0)} for seed in range(5)]
    rows = {row[2]: row for row in rows_of_cell("mix", 500, trials)}
    assert rows[OWN][7] == f"{0.42 / 0.82:.3f}"
    assert rows[TRUE][7:10] == ("1.000", "1.000", "1.000")
    flat = [each | {TRUE: (0.1 * (-1) ** seed, 1.0)} for seed, each in enumerate(trials)]
    assert {row[7] for row in rows_of_cell("mix", 500, flat)} == {"nan"}
