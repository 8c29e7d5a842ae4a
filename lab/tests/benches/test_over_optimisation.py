"""Over-optimisation curves: the truth keeps what it promises, noise keeps nothing, and few labels promise too much."""

from __future__ import annotations

import math

import numpy as np
from private_rlhf_lab.benches.over_optimisation import KL_COEFS, curve_of, measure, table
from private_rlhf_lab.league.beds import linear_bed


def test_the_truth_keeps_its_promise_and_noise_keeps_none_of_it() -> None:
    """Within 5 standard errors of 0 for noise; KL rises as kl_coef falls, to log N at the most."""
    truth, noise = np.random.default_rng(0).standard_normal((2, 4000, 16))
    kl, promised, true = curve_of(truth, truth)
    assert promised == true
    assert kl == sorted(kl)
    assert 0 < kl[0] < kl[-1] < math.log(16)
    _, promised, true = curve_of(noise, truth)
    assert promised[-1] > 1.5  # the largest of 16 standard normal draws: 1.77
    assert abs(true[-1]) < 5 / math.sqrt(4000)


def test_few_private_labels_promise_more_than_they_give() -> None:
    """A linear bed, 300 labels: at ε = 0.5 the promise is broken by more than at ε = ∞; the table has every cell."""
    curves = measure(linear_bed(0, dimension=8, prompts=200, answers=4), 300, 4)
    kept = {at: own["true"][:, -1].mean() / own["promised"][:, -1].mean() for at, own in curves.items()}
    assert kept[0.5, 0.0] < kept[math.inf, 0.0] < 1.5
    assert all(own["kl"].shape == (4, len(KL_COEFS)) for own in curves.values())
    assert len(table(curves, 300).splitlines()) == 4 + len(curves)
