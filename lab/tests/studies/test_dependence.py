"""What Theorem 4.2 says of β, B, log N and D²: the problems against closed forms, and verdicts that can fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf.validation.bandits import factor, fisher_weights
from private_rlhf_lab.studies.offline import dependence, finite


def test_the_concentrability_of_a_shift() -> None:
    """`shares` against Definition 3.2 on a class of two members, averaged over π*."""
    sweep, ratio = dependence.shares(2, 0)
    rare = np.where(np.arange(8) < 2, 1.0 / 16.0, 0.5)
    bandit = dependence.two_responses(np.log(1.0 / rare - 1.0) / 5.0, rare, 0.2)
    shifted = bandit.reward + np.array([0.1, 0.0])
    concentration = finite.concentrability(np.stack([bandit.reward, shifted]), bandit.log_reference)
    policy = np.exp(bandit.gibbs(bandit.reward))
    assert policy == pytest.approx(0.5)
    at = dependence.SHARES.index(0.25)
    assert sweep.values[at] == pytest.approx((policy * concentration).sum(axis=1).mean())
    assert ratio == pytest.approx([1.0, 8.0, 8.0, 8.0, 8.0])


@pytest.mark.parametrize("epsilon", [0.5, math.inf])
def test_the_range_enters_through_the_information(epsilon: float) -> None:
    """E(error²)/8 at information (n/2)·w(B), half of it since the margin is held in [−B, B]; standard error 3 %."""
    sweep = dependence.ranges(4000, 1, epsilon)
    weight = fisher_weights(np.array(dependence.RANGES), epsilon) / factor(epsilon) ** 2
    share = 1.0 / (1.0 + math.exp(-0.1))  # π* of the better response: margin B at kl_coef 10 B
    assert sweep.subopt.mean(axis=1) == pytest.approx(share * (1.0 - share) / (2.0 * weight), rel=0.15)


def test_the_rows_of_a_code_are_equally_far_apart() -> None:
    rows = dependence.hadamard(max(dependence.SIZES))
    apart = (rows[:, None] != rows[None]).sum(axis=2)
    assert set(apart[~np.eye(len(rows), dtype=bool)]) == {len(rows) // 2}


def test_verdicts_follow_the_exponents() -> None:
    found = dependence.measure(20, 3)
    noise = np.random.default_rng(0).uniform(0.99, 1.01, 50)

    def at(exponents: dict[str, float]) -> list[str]:
        sweeps = {
            name: replace(sweep, subopt=sweep.values[:, None] ** exponents.get(name, -0.5) * noise)
            for name, sweep in found.sweeps.items()
        }
        return [claim.verdict for claim in dependence.claims(replace(found, sweeps=sweeps), 0)]

    true = {"beta": 1.0, "range, public": 1.0, "range, private": 2.0, "log N": 0.9, "D^2": 0.85, "S^2": 0.5, "n": -1.0}
    expected = ["holds", "holds", "refuted", "holds", "holds", "holds", "refuted", "holds", "holds"]
    assert at(true)[:-1] == expected
    slower = {name: exponent - 0.4 for name, exponent in true.items()}  # "no faster than" has no lower end
    assert [at(slower)[place] for place in (1, 3, 5)] == ["holds"] * 3
    false = {"beta": 1.5, "range, public": 2.0, "range, private": 3.0, "log N": 2.0, "D^2": 1.5, "S^2": 1.0, "n": -0.5,
             "n, unregularised": -1.0}  # fmt: skip
    assert at(false)[:-1] == ["refuted"] * 6 + ["holds"] + ["refuted"] * 2
