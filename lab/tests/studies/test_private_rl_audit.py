"""The audit from below: counted reads, sampled draws and the exact pair see the errors that they are there for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf.validation.lab import within
from private_rlhf_lab.studies.private_rl import audit, updates
from private_rlhf_lab.studies.private_rl.updates import DELTA, Memory, Schedule, fixed, geometric, private_exponent


@pytest.mark.parametrize("schedule", [fixed(500, 5), geometric(500, 8, 1.15, 3), geometric(60, 8, 1.3, 1)])
def test_counted_reads_are_the_declared_ones(schedule: Schedule) -> None:
    assert audit.counted_reads(schedule) == schedule.reads


def test_counted_reads_see_a_memory_that_forgets_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = geometric(500, 8, 1.15, 3)
    monkeypatch.setattr(audit, "Memory", lambda window, shape: Memory(window + 2, shape))
    assert audit.counted_reads(schedule) == schedule.reads + 2


def test_the_pair_against_randomised_response_and_against_a_sum() -> None:
    """One read: the largest loss is 2·exponent·sensitivity. Several: δ by brute force over all sequences of coins."""
    assert audit.pair_epsilon(0.5, 1.0, 1, 1e-9) == pytest.approx(1.0, abs=2e-3)
    reads, exponent, offset = 3, 0.7, -0.7
    p, q = 1.0 / (1.0 + math.exp(-offset)), 1.0 / (1.0 + math.exp(-offset - 2.0 * exponent))
    sequences = (np.arange(2**reads)[:, None] >> np.arange(reads)) & 1
    laws = [np.prod(np.where(sequences == 1, chance, 1.0 - chance), axis=1) for chance in (p, q)]
    epsilon = audit.pair_epsilon(exponent, 1.0, reads, 0.01)
    assert np.maximum(laws[0] - math.exp(epsilon) * laws[1], 0.0).sum() <= 0.01 + 1e-12


def test_the_pair_stays_below_what_the_accountant_certifies_and_above_at_twice_the_exponent() -> None:
    for schedule in (fixed(500, 25), geometric(500, 8, 1.15, 3)):
        exponent = private_exponent(schedule, 2.0, 1.0)
        assert 1.5 < audit.pair_epsilon(exponent, 1.0, schedule.reads, DELTA) <= 2.0
        assert audit.pair_epsilon(2.0 * exponent, 1.0, schedule.reads, DELTA) > 3.0
        less = replace(schedule, sizes=schedule.sizes[:2])
        assert audit.pair_epsilon(private_exponent(less, 2.0, 1.0), 1.0, schedule.reads, DELTA) > 2.0


def test_samples_see_the_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % intervals at fixed seeds; the error is 2 times, far outside."""
    assert audit.drawn_exponent(0.3, 20_000, 0).ci_low < 1.0 < audit.drawn_exponent(0.3, 20_000, 0).ci_high
    sound = audit.canary(1.0, 10_000, 0)
    assert 0.4 < sound.ci_low < sound.ci_high < 1.0
    monkeypatch.setattr(audit, "draw", lambda scores, exponent, rng: updates.draw(scores, 2.0 * exponent, rng))
    assert audit.drawn_exponent(0.3, 20_000, 0).ci_low > 1.8
    assert audit.canary(1.0, 10_000, 0).ci_low > 1.0


@pytest.mark.parametrize("factor", [30.0, math.inf])
def test_draws_that_hide_nothing_are_refuted(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """All samples show one event: infinite odds, and an infinite ε of the pair, not a crash."""

    def sharp(scores: np.ndarray, exponent: float, rng: np.random.Generator) -> np.ndarray:
        return scores.argmax(axis=1) if math.isinf(factor) else updates.draw(scores, factor * exponent, rng)

    monkeypatch.setattr(audit, "draw", sharp)
    seen = audit.drawn_exponent(0.3, 20_000, 0)
    assert within("c", "s", seen, low=0.97, high=1.03, what="x").verdict == "refuted"
    assert within("c", "s", audit.canary(1.0, 10_000, 0), low=0.5, high=1.0, what="x").verdict == "refuted"
    assert audit.pair_epsilon(seen.value, 1.0, 3, DELTA) > 40.0
