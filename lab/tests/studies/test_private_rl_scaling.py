"""Private RL's exponents and batched coverability: the needles and the lemma by naive loops, verdicts that fail."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf_lab.studies.private_rl import coverability, scaling
from private_rlhf_lab.studies.private_rl.scaling import Needle
from private_rlhf_lab.studies.private_rl.updates import draw, fixed, private_exponent


def naive_regret(case: Needle, gap: float, rng: np.random.Generator) -> float:
    """Member by member: |F| functions, squared errors of every played arm against its reward."""
    members, rewards = round(math.exp(case.log_members)), np.full(case.arms, 0.5)
    rewards[0] += gap
    claimed = np.concatenate([[0], np.arange(members - 1) % (case.arms - 1) + 1])
    tables = 0.5 + gap * (claimed[:, None] == np.arange(case.arms))
    schedule, loss, regret = fixed(case.episodes, case.batch), np.zeros(members), 0.0
    exponent = private_exponent(schedule, case.epsilon, 1.0, "zcdp")
    for size in schedule.sizes:
        arm = int(tables[draw(-loss[None], exponent, rng)[0]].argmax())
        regret += size * (rewards.max() - rewards[arm])
        loss += size * (tables[:, arm] - rewards[arm]) ** 2
    return regret


def test_needles_are_algorithm_1_on_the_class_written_out() -> None:
    """300 runs each way: the difference of the means within four of its standard errors."""
    case = Needle(2000, 8.0, 4, math.log(31.0))
    rng = np.random.default_rng(0)
    naive = np.array([naive_regret(case, 0.3, rng) for _ in range(300)])
    fast = scaling.needle_regret(replace(case, log_members=math.log(30.0) + math.log(4 / 3)), 0.3, 300, rng)
    error = math.sqrt((naive.var() + fast.var()) / 300)
    assert abs(naive.mean() - fast.mean()) < 4.0 * error
    assert 0.0 < fast.mean() < 0.3 * case.episodes


def test_the_worst_gap_is_inside_the_grid() -> None:
    """Else the exponents would be those of the grid's end. (At 64 arms the batches' cost at gap ½ comes as high.)"""
    for case in (Needle(), Needle(epsilon=1.0), Needle(arms=16), Needle(640_000, 16.0, 4, 800.0)):
        means = [scaling.needle_regret(case, gap, 4, np.random.default_rng(1)).mean() for gap in scaling.GAPS]
        assert 0 < int(np.argmax(means)) < len(means) - 1


def test_verdicts_follow_the_exponents() -> None:
    sweeps = scaling.measure(2, 0, (500, 1000))
    assert len(scaling.rows(sweeps)) == 4 + 3 * 5 + 2 * 2
    noise = np.random.default_rng(0).uniform(0.99, 1.01, 30)
    for shift, verdict in ((0.0, "holds"), (0.1, "refuted")):
        made = [replace(one, regret=one.values[:, None] ** (one.high + shift) * noise) for one in sweeps]
        assert {claim.verdict for claim in scaling.claims(made, 0)} == {verdict}


def test_the_lemma_by_naive_loops() -> None:
    rng = np.random.default_rng(2)
    laws, functions, batch, spread = rng.dirichlet(np.ones(5), 4), rng.uniform(size=(4, 5)), 3, 2.0
    each = np.repeat(laws, batch, axis=0)
    left = training = 0.0
    for k in range(12):
        left += each[k] @ functions[k // batch]
        training += sum(each[t] @ functions[k // batch] ** 2 for t in range(k - k % batch))
    cover = laws.max(axis=0).sum()
    log = math.log(1.0 + cover * 12 / spread)
    root = math.sqrt(4.0 * cover * log * (2.0 * 12 * spread + training))
    found = coverability.ratio(laws, functions, batch, spread)
    assert found.whole == pytest.approx(left / (cover * batch * log / math.log(2.0) + root))
    assert found.without_batch == pytest.approx(left / root)


def test_the_batch_term_is_needed_and_enough() -> None:
    claims = {claim.kind: claim for claim in coverability.claims(200, 0)}
    assert claims["statement"].verdict == "holds"
    assert claims["reading"].verdict == "refuted"
    assert coverability.ratio(*coverability.fresh(24), 1).without_batch < 1.0
