"""Algorithm 1, its sensitivity, covers and Appendix C's matrices against naive code and enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from private_rlhf.accounting.conversions import zcdp_rho
from private_rlhf.validation.lab import Claim
from private_rlhf_lab.studies.private_rl import design, general, rates, run, worlds
from private_rlhf_lab.studies.private_rl.updates import DELTA, fixed, geometric


@pytest.fixture(scope="module")
def small() -> general.Instances:
    return worlds.random_worlds(2, seed=9)


def test_classes_are_complete_and_hold_the_optimum(small: general.Instances) -> None:
    """T_h f lies in F_h for every f in F_{h+1}; J* is reached by a greedy policy of the class."""
    for stage in range(small.horizon):
        images = general.backup(small, stage, small.next_values(stage))
        gaps = np.abs(images[:, :, None] - small.classes[stage][:, None]).max(axis=(3, 4)).min(axis=2)
        assert gaps.max() < 1e-12
        assert small.classes[stage].min() >= 0.0
        assert small.classes[stage].max() <= 1.0
    members = itertools.product(*(range(each.shape[1]) for each in small.classes))
    greedy = [each.argmax(axis=3) for each in small.classes]
    picks = np.array(list(members))
    actions = [greedy[h][:, picks[:, h]] for h in range(3)]
    assert general.evaluate(small, actions).max(axis=1) == pytest.approx(general.optimum(small))


def test_policy_values_against_sampled_episodes(small: general.Instances) -> None:
    """Mean reward of 200,000 episodes against J(π), 5 standard errors; visits add up."""
    rng = np.random.default_rng(0)
    actions = [rng.integers(2, size=(2, 1, 4)) for _ in range(3)]
    size = 200_000
    counts = general.episodes(small, actions, size, rng)
    reward = np.zeros(2)
    for stage, used in enumerate(counts):
        assert (used.sum(axis=(2, 3, 4)) == size).all()
        reward += (used[:, 0].sum(axis=3) * small.reward[:, stage]).sum(axis=(1, 2)) / size
        played = np.take_along_axis(used.sum(axis=4), actions[stage][..., None], axis=3)
        assert played.sum() == used.sum()
        if stage:
            assert (used.sum(axis=(3, 4)) == counts[stage - 1].sum(axis=(2, 3))).all()
    assert reward == pytest.approx(general.evaluate(small, actions)[:, 0], abs=5.0 / math.sqrt(size))


def naive_loss(world: general.Instances, data: list[list[tuple[int, int, int]]], f: tuple[int, ...]) -> float:
    """L^BE of the product member f on trajectories of (s, a, t), by the definition, the infimum over all of F."""

    def total(head: tuple[int, ...]) -> float:
        sums = 0.0
        for trajectory in data:
            for h, (s, a, t) in enumerate(trajectory):
                ahead = world.classes[h + 1][0, f[h + 1], t].max() if h + 1 < world.horizon else 0.0
                sums += (world.classes[h][0, head[h], s, a] - world.reward[0, h, s, a] - ahead) ** 2
        return sums

    others = itertools.product(*(range(each.shape[1]) for each in world.classes))
    return total(f) - min(total(head) for head in others)


def tiny(seed: int) -> general.Instances:
    """One MDP with classes of 3 × 2 × 2 functions, not complete: the loss does not need that."""
    full = worlds.random_worlds(1, seed)
    sizes = (3, 2, 2)
    return general.Instances(
        full.transition, full.reward, tuple(each[:, :n] for each, n in zip(full.classes, sizes, strict=True))
    )


def trajectory(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    states = [0, *rng.integers(4, size=3)]
    return [(int(states[h]), int(rng.integers(2)), int(states[h + 1])) for h in range(3)]


def counts_of(data: list[list[tuple[int, int, int]]]) -> list[np.ndarray]:
    counts = [np.zeros((4, 2, 4)) for _ in range(3)]
    for each in data:
        for h, (s, a, t) in enumerate(each):
            counts[h][s, a, t] += 1
    return counts


def score_loss(world: general.Instances, data: list[list[tuple[int, int, int]]]) -> np.ndarray:
    errors = []
    for h, used in enumerate(counts_of(data)):
        columns = 1 if h + 1 == world.horizon else world.classes[h + 1].shape[1]
        errors.append((general.squares(world, h)[0] @ used.ravel()).reshape(1, -1, columns))
    return np.asarray(general.bellman_loss(errors)[0])


def test_bellman_loss_against_the_definition() -> None:
    world, rng = tiny(3), np.random.default_rng(1)
    data = [trajectory(rng) for _ in range(7)]
    found = score_loss(world, data)
    assert found.shape == (3, 2, 2)
    for f in itertools.product(range(3), range(2), range(2)):
        assert found[f] == pytest.approx(naive_loss(world, data, f))
    assert found.min() >= 0.0


def test_no_replaced_trajectory_exceeds_the_sensitivity() -> None:
    """Random data sets and replacements on a full class; the largest change found is a fair part of the bound."""
    world, rng = worlds.random_worlds(1, seed=4), np.random.default_rng(2)
    (bound,) = general.sensitivities(world)
    assert bound <= 24.0
    worst = 0.0
    for size in (1, 2, 5, 20):
        for _ in range(30):
            rest = [trajectory(rng) for _ in range(size)]
            change = score_loss(world, [*rest, trajectory(rng)]) - score_loss(world, [*rest, trajectory(rng)])
            worst = max(worst, float(np.abs(change).max()))
    assert 0.3 * bound < worst <= bound


def test_step_sensitivity_by_brute_force() -> None:
    """Every pair of members, transitions and rewards on a grid that holds the ends."""
    rng = np.random.default_rng(3)
    functions, ahead = rng.random((3, 2, 2)), rng.random((2, 2))
    cells = list(itertools.product(range(2), range(2), range(2), np.linspace(0.0, 0.3, 4)))
    worst = -math.inf
    for g, f, other in itertools.product(range(2), range(3), range(3)):
        for (s, a, t, r), (s2, a2, t2, r2) in itertools.product(cells, repeat=2):
            added = [(functions[k, s2, a2] - r2 - ahead[g, t2]) ** 2 for k in (f, other)]
            removed = [(functions[k, s, a] - r - ahead[g, t]) ** 2 for k in (f, other)]
            worst = max(worst, (added[1] - removed[1]) - (added[0] - removed[0]))
    assert general.step_sensitivity(functions, ahead, 0.3) == pytest.approx(worst)


def test_algorithm_one_learns_and_repeats(small: general.Instances) -> None:
    """Without privacy the regret of the last quarter is far below that of the first; two runs agree to the bit."""
    schedule = fixed(1600, 40)
    first, second = (
        general.cumulative_regret(small, schedule, np.full(2, math.inf), 8.0, 3, np.random.default_rng(6))
        for _ in range(2)
    )
    assert np.array_equal(first, second)
    assert first.shape == (2, 3, 40)
    mean = first.mean(axis=(0, 1))
    assert mean[-1] - mean[-10] < 0.5 * mean[10]
    with pytest.raises(ValueError, match="window"):
        general.cumulative_regret(small, geometric(50, 5, 1.5, 2), np.full(2, 1.0), 1.0, 1, np.random.default_rng(0))


def test_a_small_exponent_is_uniform_choice(small: general.Instances) -> None:
    """Exponent → 0: regret per episode is the mean over the class, within 5 standard errors of 400 draws."""
    picks = np.array(list(itertools.product(*(range(each.shape[1]) for each in small.classes))))
    greedy = [each.argmax(axis=3) for each in small.classes]
    regret = general.optimum(small)[:, None] - general.evaluate(small, [greedy[h][:, picks[:, h]] for h in range(3)])
    found = general.cumulative_regret(small, fixed(10, 1), np.full(2, 1e-9), 1.0, 40, np.random.default_rng(8))
    gap = np.abs(found[:, :, -1].mean(axis=1) / 10.0 - regret.mean(axis=1))
    assert (gap < 5.0 * regret.std(axis=1) / math.sqrt(400)).all()


def test_slope_of_a_power() -> None:
    episodes = np.array([10, 100, 1000])
    grown = rates.Growth("x", episodes, np.outer(episodes**0.6, np.linspace(1.0, 2.0, 8)))
    measured = grown.slope(slice(None))
    assert measured.value == pytest.approx(0.6)
    assert measured.ci_low <= 0.6 + 1e-9
    assert measured.ci_high >= 0.6 - 1e-9


@pytest.mark.parametrize("members", [2, 7])
def test_covers_cover_both_stages(members: int) -> None:
    """Every θ is within β = 1/(2N) of a member, in the supremum norm, at stage 2 and, through T₁, at stage 1."""
    world = worlds.covered_worlds(members, 1)
    theta = np.linspace(0.0, 1.0, 101)
    last = worlds.family(theta)[None]
    first = general.backup(world, 0, last.max(axis=3))
    for infinite, cover in ((first, world.classes[0]), (last, world.classes[1])):
        gaps = np.abs(infinite[0][:, None] - cover[0][None]).max(axis=(2, 3)).min(axis=1)
        assert gaps.max() <= 0.5 / members + 1e-12
    assert world.classes[0].min() >= 0.0
    assert world.classes[0].max() <= 1.0
    assert np.abs(world.reward[0, 1] - worlds.family(worlds.parameters(members))).max(axis=(1, 2)).min() > 1e-6


def test_tree_noise_has_the_variance_of_its_nodes() -> None:
    """At k the noise is a sum of popcount(k) nodes: variances over 400 trees within 5 standard errors."""
    rng = np.random.default_rng(9)
    drawn = np.stack([design.tree_noise(8, 1.0, rng)[:, 0] for _ in range(400)])
    assert np.array_equal(drawn, drawn.transpose(0, 1, 3, 2))
    deviation = math.sqrt(4 * design.STAGES / zcdp_rho(1.0, DELTA))
    for k in (1, 3, 7, 8):
        variance = drawn[:, k - 1, 0, 0].var() / (deviation**2 * k.bit_count())
        assert variance == pytest.approx(1.0, abs=5.0 * math.sqrt(2.0 / 400))
        off = drawn[:, k - 1, 0, 1].var() / (deviation**2 * k.bit_count())
        assert off == pytest.approx(0.5, abs=2.5 * math.sqrt(2.0 / 400))


def test_tree_noise_loses_what_it_promises() -> None:
    """The exact Gaussian loss of orthogonal features at every stage: L nodes, ‖Δ‖² = 2H in noise coordinates."""
    levels, rho = 4, zcdp_rho(1.0, DELTA)
    deviation = math.sqrt(levels * design.STAGES / rho)
    rng = np.random.default_rng(10)
    worst = 0.0
    for pair in [np.eye(4)[:2], *rng.normal(size=(50, 2, 4))]:
        unit = pair / np.linalg.norm(pair, axis=1, keepdims=True)
        change = np.outer(unit[0], unit[0]) - np.outer(unit[1], unit[1])
        scale = np.where(np.eye(4, dtype=bool), 1.0, 1.0 / math.sqrt(2.0))
        independent = np.triu(change / scale)  # in units of each entry's own deviation
        worst = max(worst, levels * design.STAGES * float((independent**2).sum()) / (2 * deviation**2))
    assert 0.99 * rho < worst <= rho * (1 + 1e-12)


def test_determinant_rule_by_hand() -> None:
    """diag(1, 4) to diag(4, 1): no determinant doubles, a direction shrinks, a norm ratio of 4."""
    first, second = np.diag([1.0, 4.0])[None], np.diag([4.0, 1.0])[None]
    found = design.follow(np.stack([first, second])[None])
    assert (found.shrinking.tolist(), found.counts.tolist()) == ([1.0], [0])
    assert found.ratios[0] == pytest.approx([1.0, 4.0])
    grown = design.follow(np.stack([first, 3.0 * first])[None])
    assert (grown.shrinking.tolist(), grown.counts.tolist()) == ([0.0], [1])
    assert grown.smallest_products == pytest.approx([9.0])


def test_appendix_c_needs_the_noise() -> None:
    """The private matrices break both claims; the control keeps them."""
    found = design.measure(256, 8)
    claims = design.claims(found, 256)
    assert all(claim.interval for claim in claims)
    verdicts = {claim.claim: claim.verdict for claim in claims}
    assert {text: verdict for text, verdict in verdicts.items() if text.startswith("Without")} == {
        text: "holds" for text in verdicts if text.startswith("Without")
    }
    assert {verdict for text, verdict in verdicts.items() if text.startswith("Private")} == {"refuted"}
    assert found["private"].shrinking.min() > 0.9
    assert found["no noise"].shrinking.max() == 0.0


@pytest.mark.slow
def test_the_quick_module_decides_every_claim() -> None:
    report = run.run(quick=True)
    assert all(isinstance(claim, Claim) for claim in report.claims)
    verdicts = {claim.verdict for claim in report.claims}
    assert {"holds", "refuted"} <= verdicts
    assert all(rows for rows in report.tables.values())
