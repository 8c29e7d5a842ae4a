"""the study online: Algorithm 2's pieces against naive loops, growth laws on known curves, verdicts that can fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from private_rlhf.core.stats import bootstrap
from private_rlhf.validation import growth
from private_rlhf.validation.bandits import Counts, factor
from private_rlhf.validation.regret import World, confidence_radius, grid_world, stretches, uncertainty
from private_rlhf_lab.studies.online import dependence, late_growth, thompson
from private_rlhf_lab.studies.online.arms import Arm, Learner, Trace, proof_constant, simulate
from private_rlhf_lab.studies.online.study import ARMS, EPSILONS, HALVED, MIXTURE, NONE, OPTIMISM, Study, claims

LEAST_SQUARES = "private_least_squares"


def world(worlds: int = 3, seed: int = 0, **options: float | None) -> World:
    return grid_world(np.random.default_rng(seed), worlds, side=4, **options)  # type: ignore[arg-type]


def test_a_world_is_what_it_says() -> None:
    made = world(5, bound=2.0)
    assert made.members.shape == (5, 16, 4, 4)
    assert made.members.min() >= 0.0
    assert made.members.max() <= 2.0
    reference = np.exp(made.bandit.log_reference)
    assert reference.sum(axis=-1) == pytest.approx(1.0)
    for index in range(5):
        assert any(np.array_equal(member, made.bandit.reward[index]) for member in made.members[index])
        for s in range(4):
            if np.ptp(made.bandit.reward[index, s]) > 0:
                assert reference[index, s, made.bandit.reward[index, s].argmax()] == pytest.approx(0.02)
    assert np.exp(world(best_mass=None).bandit.log_reference) == pytest.approx(0.25)


def test_stretches_cover_the_horizon_and_start_with_single_rounds() -> None:
    lengths = stretches(1000, 20)
    assert sum(lengths) == 1000
    assert lengths[:40] == [1] * 40
    done = np.cumsum([0, *lengths[:-1]])
    assert all(length <= max(1, start / 20) for length, start in zip(lengths, done, strict=True))
    assert stretches(50, 10**9) == [1] * 50


def rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    first = generator.integers(0, 4, count)
    return (
        generator.integers(0, 4, count),
        first,
        (first + generator.integers(1, 4, count)) % 4,
        generator.choice([-1, 1], count),
    )


def as_counts(made: World, data: tuple[np.ndarray, ...]) -> Counts:
    """Rows (s, a¹, a², z) of the first world as counts; the other worlds have none."""
    pairs = made.pairs
    place = {(int(s), int(a), int(b)): p for p, (s, a, b) in enumerate(zip(*pairs, strict=True))}
    counts = Counts(*np.zeros((2, len(made.members), len(place))))
    for s, a, b, z in zip(*data, strict=True):
        sign = z if a < b else -z
        (counts.plus if sign > 0 else counts.minus)[0, place[int(s), min(int(a), int(b)), max(int(a), int(b))]] += 1.0
    return counts


@pytest.mark.parametrize(("epsilon", "constant"), [(0.7, 0.06), (math.inf, 0.15)])
def test_a_refresh_by_naive_loops(epsilon: float, constant: float) -> None:
    """Steps 8–10 from a list of rows: least squares, F_t, U, b, π¹ and π²."""
    made, arm = world(2, kl_coef=0.4), Arm("optimism", "optimism", constant=constant)
    data = rows(1, 30)
    learner = Learner(made, arm, epsilon, 1000)
    learner.add(as_counts(made, data))
    learner.refresh(30)
    members = made.members[0]

    def gap(r: np.ndarray) -> np.ndarray:
        return r[data[0], data[1]] - r[data[0], data[2]]

    losses = [(((2 / (1 + np.exp(-gap(r))) - 1) * factor(epsilon) - data[3]) ** 2).sum() for r in members]
    best = int(np.argmin(losses))
    assert learner.estimate[0] == pytest.approx(members[best])
    exploit = np.exp(made.bandit.log_reference[0] + members[best] / 0.4)
    exploit /= exploit.sum(axis=1, keepdims=True)
    assert np.exp(learner.exploit[0]) == pytest.approx(exploit)
    radius = confidence_radius(constant, 1.0, 1000, 16, epsilon)
    ridge = min(1.0, radius**2 / 2)
    inside = [r for r in members if ((gap(r) - gap(members[best])) ** 2).sum() + ridge <= radius**2]
    assert 2 <= len(inside) < 16  # F_t leaves some out
    naive = np.zeros((4, 4))
    for r1 in inside:
        for r2 in inside:
            error = r1 - r2 - (exploit * (r1 - r2)).sum(axis=1, keepdims=True)
            naive = np.maximum(naive, np.abs(error) / math.sqrt(ridge + ((gap(r1) - gap(r2)) ** 2).sum()))
    assert learner.uncertainty[0] == pytest.approx(naive, abs=1e-9)
    assert learner.bonus[0] == pytest.approx(np.minimum(2.0, radius * naive), abs=1e-9)
    explore = exploit * np.exp(learner.bonus[0] / 0.4)
    assert np.exp(learner.explore[0]) == pytest.approx(explore / explore.sum(axis=1, keepdims=True))


def test_uncertainty_without_rivals_is_zero() -> None:
    made = world(1)
    inside = np.zeros((1, 16), dtype=bool)
    inside[0, 4] = True
    margin = made.pairs.difference(made.members)
    assert not uncertainty(made.members, margin, np.ones((1, 24)), inside, 1.0).any()


def test_the_other_explorers() -> None:
    made, counts = world(2), as_counts(world(2), rows(2, 40))
    learners = {}
    for arm in (Arm("none", "none"), Arm("mix", "uniform", mixture=5.0), Arm("ref", "reference")):
        learners[arm.name] = learner = Learner(made, arm, 1.0, 1000)
        learner.add(counts)
        learner.refresh(400)
    assert np.array_equal(learners["none"].explore, learners["none"].exploit)
    assert np.array_equal(learners["ref"].explore, made.bandit.log_reference)
    share = 5.0 / (math.tanh(0.5) ** 2 * 400)
    mixed = (1 - share) * np.exp(learners["mix"].exploit) + share / 4
    assert np.exp(learners["mix"].explore) == pytest.approx(mixed)


def test_the_proofs_constant_saturates_the_bonus_and_a_constant_bonus_cancels() -> None:
    assert proof_constant(1.0) == pytest.approx(7.48, abs=0.01)
    radius = confidence_radius(proof_constant(1.0), 1.0, 1000, 9, 1.0)
    error = 8 * (math.exp(-1) + 2 + math.e) ** 2 / math.tanh(0.5) ** 2 * math.log(1000 * 9 / 0.05)
    assert radius**2 / 2 == pytest.approx(error)  # Lemma C.3
    learner = Learner(world(2), Arm("proof", "optimism", constant=proof_constant(1.0), clip=0.01), 1.0, 1000)
    learner.add(as_counts(world(2), rows(3, 10)))
    learner.refresh(10)
    assert (learner.bonus == 0.01).all()
    assert learner.explore == pytest.approx(learner.exploit)


def test_a_trace_is_exact_where_it_can_be() -> None:
    made = world(4)
    trace = simulate(made, Arm("o", "optimism"), 1.0, 300, 5)
    assert trace.rounds[-1] == 300
    start = made.bandit.suboptimality(made.bandit.log_reference)
    assert trace.regret[0] == pytest.approx(start)
    for curve in (trace.regret, trace.regret_exploiting, trace.eluder, trace.promised):
        assert (np.diff(curve, axis=0) >= -1e-12).all()
    assert (trace.eluder[-1] <= 300).all()
    again = simulate(made, Arm("o", "optimism"), 1.0, 300, 5)
    assert np.array_equal(trace.regret, again.regret)
    assert np.array_equal(trace.eluder, again.eluder)
    none = simulate(made, Arm("n", "none"), 1.0, 300, 5)
    assert np.array_equal(none.regret, none.regret_exploiting)


@pytest.mark.parametrize("estimator", [LEAST_SQUARES, "private_likelihood"])
def test_everybody_finds_the_truth_in_the_end(estimator: str) -> None:
    """Without privacy and with plenty of rounds from π_ref the estimate is the truth in every world."""
    made = world(6, best_mass=None)
    trace = simulate(made, Arm("ref", "reference", estimator), math.inf, 20_000, 6)
    late = trace.regret_exploiting[-1] - trace.regret_exploiting[-10]
    assert late == pytest.approx(0.0, abs=1e-9)
    assert (trace.regret[-1] - trace.regret[-10] > 1.0).all()


def test_stretches_do_not_change_the_regret_much() -> None:
    """Refreshing every round and every t/20 rounds: means over 60 worlds within 25 %, about 4 standard errors."""
    made = grid_world(np.random.default_rng(7), 60, side=4)
    lazy, eager = (simulate(made, Arm("n", "none"), 2.0, 400, 8, refresh) for refresh in (20, 10**9))
    assert len(eager.rounds) == 400 > 2 * len(lazy.rounds)
    assert lazy.regret[-1].mean() == pytest.approx(eager.regret[-1].mean(), rel=0.25)


def test_optimism_fails_with_the_papers_clip_and_never_with_the_range_of_the_error() -> None:
    made = grid_world(np.random.default_rng(9), 8, side=5, bound=3.0)
    arm = Arm("proof", "optimism", constant=proof_constant(3.0))
    wide, narrow = (simulate(made, replace(arm, clip=clip), 1.0, 500, 10) for clip in (None, 1.0))
    assert not wide.failed.any()
    assert (narrow.failed > 0).mean() > 0.5


ROUNDS = np.cumsum(stretches(1_000_000))


FASTER = [
    *(lambda t, p=p: t**p for p in (0.1, 0.2, 0.24, 0.3, 0.4, 0.5)),
    *(lambda t, p=p: np.log(t) ** p for p in (2, 3)),
]


@pytest.mark.parametrize("curve", FASTER)
def test_what_grows_faster_than_log_is_rejected(curve: Callable[[np.ndarray], np.ndarray]) -> None:
    """Twelve worlds of the law with levels of their own and independent increments of 10 % noise."""
    values = curve(ROUNDS.astype(float))
    generator = np.random.default_rng(0)
    steps = np.diff(values, prepend=0.0)[:, None] * generator.normal(1.0, 0.1, (len(ROUNDS), 12))
    worlds = 5.0 + generator.uniform(0.8, 1.2, 12) * steps.cumsum(axis=0)
    found = bootstrap(lambda drawn: growth.power(ROUNDS, drawn), worlds, 0)
    assert found.ci_low > growth.LOGARITHMIC


@pytest.mark.parametrize("curve", [np.log, lambda t: 1.0 - np.exp(-t / 1e4), np.ones_like, lambda t: t**-0.3,
                                   lambda t: np.sqrt(np.log(t))])  # fmt: skip
def test_what_grows_no_faster_than_log_is_accepted(curve: Callable[[np.ndarray], np.ndarray]) -> None:
    values = curve(ROUNDS.astype(float))[:, None]
    assert growth.power(ROUNDS, 3.0 + 2.0 * values) <= 0.0


def test_growth_powers_are_found() -> None:
    at = ROUNDS.astype(float)[:, None]
    for power in (-0.5, 0.1, 0.5, 0.9):
        assert growth.power(ROUNDS, 7.0 + 2.0 * np.sign(power) * at**power) == pytest.approx(power)
    assert late_growth.late_exponent(ROUNDS, np.sqrt(at)) == pytest.approx(0.5)
    assert late_growth.slope_per_log(ROUNDS, 7.0 * np.log(at)) == pytest.approx(7.0)
    assert ROUNDS[growth.late(ROUNDS)][0] >= 10_000


def synthetic(
    arm: Arm, epsilon: float, level: float, law: str, failed: float = 0.0, clip: float | None = None
) -> Trace:
    """12 worlds whose regret follows a law, up to 5 % noise."""
    rounds = np.unique(np.round(np.geomspace(1, 1e5, 120)).astype(np.int64))
    basis = {"log": np.log(rounds) + 1.0, "root": np.sqrt(rounds), "line": 1.0 * rounds}[law]
    noise = np.random.default_rng(len(arm.name)).uniform(0.95, 1.05, 12)
    curve = level * basis[:, None] * noise
    zero = np.full(12, failed)
    return Trace(rounds, curve, replace(arm, clip=clip), epsilon, 0.9 * curve, 3.0 * curve, curve, zero, zero)


def synthetic_study(law: str, none: float, mixture: float) -> Study:
    def level(name: str, epsilon: float) -> float:
        relative = none if NONE in name else mixture if MIXTURE in name else 1.0
        return relative / factor(epsilon) ** 2

    traces = {
        (arm.name, epsilon): synthetic(arm, epsilon, level(arm.name, epsilon), law)
        for arm in ARMS
        for epsilon in EPSILONS
    }
    arm = ARMS[0]
    clips = [
        synthetic(Arm(name, "optimism"), 1.0, 1.0, law, failed, clip)
        for name, failed, clip in (("clip 1", 0.5, 1.0), ("clip 2B", 0.0, None), (HALVED, 0.0, None))
    ]
    return Study(
        traces,
        [synthetic(arm, 1.0, 1.0, law) for _ in range(3)],
        synthetic(arm, 1.0, 1.0, "line"),
        clips,
        [synthetic(arm, 1.0, 1.0, law)] * 2,
    )


def test_verdicts_follow_the_curves() -> None:
    def verdicts(found: Study) -> dict[str, str]:
        return {claim.claim: claim.verdict for claim in claims(found, 0)}

    good, bad = verdicts(synthetic_study("log", 2.0, 2.0)), verdicts(synthetic_study("root", 0.5, 0.5))
    assert good.keys() == bad.keys()
    for text in good:
        if "no faster than log T" in text:
            assert (good[text], bad[text]) == ("holds", "refuted"), text
        if text.startswith(f"{OPTIMISM[:8].capitalize()} (c = 0.2) has less regret"):
            assert (good[text], bad[text]) == ("holds", "refuted"), text
        if "proof's constant c" in text or "bonus with clip 1" in text or "(e^epsilon - 1)^-2" in text:
            assert (good[text], bad[text]) == ("refuted", "refuted"), text
        if "(2 alpha - 1)^-2" in text:
            assert good[text] == "holds"


def test_posterior_sampling_by_naive_loops() -> None:
    """r̄ and π² after 300 labels: members one by one, weights by Bayes' rule."""
    made, epsilon = world(2, seed=4), 0.7
    learner = Learner(made, Arm("t", "posterior", "posterior_mean"), epsilon, 100)
    plus = np.random.default_rng(5).integers(0, 50, (2, 24)).astype(float)
    learner.add(Counts(plus, 10.0 + 0.0 * plus))
    learner.refresh(300)
    keep = 1.0 / (1.0 + math.exp(-epsilon))
    for r in range(2):
        logs = []
        for member in made.members[r]:
            margin = made.pairs.difference(member)
            likely = keep / (1.0 + np.exp(-margin)) + (1.0 - keep) / (1.0 + np.exp(margin))
            logs.append((plus[r] * np.log(likely) + 10.0 * np.log(1.0 - likely)).sum())
        weight = np.exp(np.array(logs) - max(logs))
        weight /= weight.sum()
        raw = np.exp(made.bandit.log_reference[r] + made.members[r] / made.bandit.kl_coef)
        policies = raw / raw.sum(axis=-1, keepdims=True)
        assert learner.estimate[r] == pytest.approx(np.tensordot(weight, made.members[r], 1))
        assert np.exp(learner.explore[r]) == pytest.approx(np.tensordot(weight, policies, 1))


def test_thompson_verdicts_follow_the_regrets() -> None:
    found = thompson.measure(3, 0, 60)
    assert len(thompson.rows(found)) == len(thompson.ARMS) * len(EPSILONS)
    pairs = thompson.pairs(found, 0)
    assert len(pairs) == (len(thompson.ARMS) - 1) * len(EPSILONS)
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in pairs)
    assert all(row["difference_low"] <= row["difference"] <= row["difference_high"] for row in pairs)
    first, other = (found[name, EPSILONS[0]].regret[-1] for name in (thompson.THOMPSON, thompson.ARMS[1].name))
    assert pairs[0]["ratio"] == pytest.approx(first.mean() / other.mean())
    assert pairs[0]["difference"] == pytest.approx((first - other).mean())
    for share, verdict in ((0.5, "holds"), (2.0, "refuted")):
        made = {key: synthetic(trace.arm, 1.0, share if key[0] == thompson.THOMPSON else 1.0, "log")
                for key, trace in found.items()}  # fmt: skip
        assert {claim.verdict for claim in thompson.claims(made, 0)} == {verdict}


def test_the_sweeps_of_theorem_5_2() -> None:
    """Values as named, one row each, and exponents above 1 refuted."""
    sweeps = dependence.measure(2, 40, 1)
    assert [each.name for each in sweeps] == ["beta", "e^(2B)", "log N", "realised sum of min(1, U^2)"]
    assert all(each.regret.shape == (4, 2) and (each.regret > 0.0).all() for each in sweeps)
    assert len(dependence.rows(sweeps)) == 16
    assert grid_world(np.random.default_rng(0), 1, dimension=6, side=2).members.shape == (1, 64, 4, 4)
    noise = np.random.default_rng(0).uniform(0.95, 1.05, 20)
    for power, verdict in ((0.8, "holds"), (1.3, "refuted")):
        made = [replace(each, values=np.array([1.0, 2.0, 4.0]), regret=np.array([[1.0], [2.0], [4.0]]) ** power * noise)
                for each in sweeps]  # fmt: skip
        assert {claim.verdict for claim in dependence.claims(made, 0)} == {verdict}


def test_a_golden_run() -> None:
    """Seeded worlds, draws and refreshes to seven digits."""
    trace = simulate(world(2, seed=11), Arm("o", "optimism"), 1.0, 200, 12)
    assert trace.regret[-1] == pytest.approx(GOLDEN, rel=1e-7)


GOLDEN = [9.52081766, 15.7727746]


def test_figures_show_every_arm_once() -> None:
    """π² of every arm but the one that never learns, and π¹ of every arm, in the final figure."""
    from private_rlhf_lab.studies.online import plots

    found = synthetic_study("log", 2.0, 2.0)
    exploring, deployed = plots.final(found).axes
    assert (len(exploring.containers), len(deployed.containers)) == (len(ARMS) - 1, len(ARMS))
    assert len(plots.regret(found).axes) == len(EPSILONS)
    assert len(plots.fits(found).axes) == 2
