"""Appendix D's MDP, Algorithm 2, the draws and the privacy facts against naive code and enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_rlhf_lab.accounting.private_rl import private_rl
from private_rlhf_lab.studies.private_rl import accounts, honest, outcome, plateaus
from private_rlhf_lab.studies.private_rl.updates import (
    DELTA,
    Schedule,
    appendix_step,
    draw,
    fixed,
    geometric,
    private_exponent,
)
from scipy.stats import chisquare


def test_draw_is_the_exponential_mechanism() -> None:
    """Chi-square of 40,000 draws against the softmax, false alarm 1e-6; a wrong exponent is rejected."""
    scores, exponent = np.array([0.0, 1.0, 2.5, -1.0, 2.0]), 0.8
    drawn = np.bincount(draw(np.tile(scores, (40_000, 1)), exponent, np.random.default_rng(0)), minlength=5)
    weights = np.exp(exponent * scores)
    assert chisquare(drawn, 40_000 * weights / weights.sum()).pvalue > 1e-6
    wrong = np.exp(0.9 * scores)
    assert chisquare(drawn, 40_000 * wrong / wrong.sum()).pvalue < 1e-6


def test_draw_without_privacy_breaks_ties_evenly_and_huge_scores_do_not_overflow() -> None:
    rng = np.random.default_rng(1)
    drawn = np.bincount(draw(np.tile([3.0, -1.0, 3.0, 2.9], (4000, 1)), math.inf, rng), minlength=4)
    assert drawn[1] == drawn[3] == 0
    assert chisquare(drawn[[0, 2]]).pvalue > 1e-6
    assert draw(np.array([[-1e9, -1e9 + 500.0]]), 1.0, rng).tolist() == [1]


@given(
    st.integers(2, 60),
    st.integers(1, 9),
    st.floats(1.0, 2.0),
    st.one_of(st.none(), st.integers(1, 4)),
)
@settings(max_examples=60, deadline=None)
def test_reads_count_the_updates_that_score_one_episode(
    episodes: int, first: int, growth: float, window: int | None
) -> None:
    """Against a naive list of what each update scores."""
    schedule = geometric(episodes, first, growth, window)
    assert schedule.episodes == episodes
    owner = [batch for batch, size in enumerate(schedule.sizes) for _ in range(size)]
    scored = [0] * episodes
    for update in range(len(schedule.sizes)):
        for episode in range(episodes):
            age = update - owner[episode]
            scored[episode] += age >= 1 and (window is None or age <= window)
    assert max(scored) == schedule.reads


def test_equal_batches() -> None:
    assert fixed(12, 5).sizes == (5, 5, 2)
    assert fixed(10, 5).sizes == (5, 5)
    assert fixed(500, 5).reads == 99


def test_exponents_come_from_the_accountant() -> None:
    schedule = fixed(500, 5)
    details = private_rl(99, 8.0, DELTA, 4.0).details
    assert private_exponent(schedule, 8.0, 4.0) == details["exponent"] == details["bounded_range"]["exponent"]
    assert private_exponent(schedule, 8.0, 4.0, "zcdp") == details["zcdp"]["exponent"] < details["exponent"]
    assert private_exponent(schedule, 8.0, 4.0, "basic") == pytest.approx(8.0 / 99 / 8.0)
    assert private_exponent(schedule, 8.0, 4.0, "appendix") == pytest.approx(appendix_step(8.0, 99) / 8.0)
    assert private_exponent(geometric(500, 8, 1.15, 1), 8.0, 1.0) == 4.0  # one draw a user: pure ε, x = ε/2


def naive_sequence(hypothesis: tuple[int, ...], x: tuple[int, ...]) -> list[int]:
    """The prescription of Appendix D, in words."""
    actions: list[int] = []
    for stage in range(4):
        rule = hypothesis[1 + stage]
        previous = actions[-1] if actions else 0
        actions.append([x[0] ^ x[1], x[2] ^ previous, (sum(actions) % 2) ^ x[3]][rule])
    return actions


def naive_value(hypothesis: tuple[int, ...], x: tuple[int, ...], prefix: tuple[int, ...], action: int) -> int:
    """f_h(s, a) for s = (x, prefix)."""
    gate = [1, x[4] ^ x[5], x[0] ^ x[2] ^ x[4]][hypothesis[0]]
    return gate * int(naive_sequence(hypothesis, x)[: len(prefix) + 1] == [*prefix, action])


def test_tables_and_outcome_model_against_naive_code() -> None:
    tables = outcome.value_tables()
    predicted, played = outcome.outcome_model(tables), outcome.greedy_sequences(tables)
    rng = np.random.default_rng(2)
    for index in rng.choice(243, size=12, replace=False):
        hypothesis = tuple(int(part) for part in outcome.HYPOTHESES[index])
        for place in rng.choice(64, size=4, replace=False):
            x = tuple(int(bit) for bit in outcome.CONTEXTS[place])
            for number, actions in enumerate(itertools.product((0, 1), repeat=4)):
                total = 0
                for h in range(4):
                    total += naive_value(hypothesis, x, actions[:h], actions[h])
                    if h < 3:
                        total -= max(naive_value(hypothesis, x, actions[: h + 1], a) for a in (0, 1))
                assert predicted[index, place, number] == total
            own = naive_sequence(hypothesis, x)
            gate = naive_value(hypothesis, x, (), own[0])
            assert played[index, place] == (int("".join(map(str, own)), 2) if gate else 0)


def test_outcome_model_of_any_tables() -> None:
    """Real-valued tables: the sum of the definition, for one trajectory."""
    rng = np.random.default_rng(3)
    tables = [rng.random((2, 3, 2**h, 2)) for h in range(4)]
    actions = (1, 0, 1, 1)
    expected = tables[0][1, 2, 0, 1]
    for h in range(1, 4):
        prefix = int("".join(map(str, actions[:h])), 2)
        expected += tables[h][1, 2, prefix, actions[h]] - tables[h][1, 2, prefix].max()
    assert outcome.outcome_model(tables)[1, 2, 0b1011] == pytest.approx(expected)


@pytest.mark.parametrize(("name", "best", "mean_regret"), [("easy", 1.0, 0.7346), ("hard", 0.5, 0.3760)])
def test_facts_of_the_environment(name: str, best: float, mean_regret: float) -> None:
    world = outcome.problem(name)
    assert world.reward.max(axis=1).mean() == best
    assert set(np.unique(world.losses)) == {0, 1}
    assert len(np.unique(world.predicted.reshape(243, -1), axis=0)) == 207
    target = int((outcome.TARGETS[name] == outcome.HYPOTHESES).all(axis=1).argmax())
    assert world.losses[:, target].max() == 0
    assert world.regret[target] == 0.0
    assert (world.regret == 0.0).sum() == 2
    assert world.regret.mean() == pytest.approx(mean_regret, abs=0.002)


def naive_algorithm_two(
    world: outcome.OutcomeProblem, schedule: Schedule, exponent: float, rng: np.random.Generator
) -> float:
    """Algorithm 2 episode by episode, scores from scratch at every update; final expected regret."""
    data: list[tuple[int, int, int, float]] = []
    total = 0.0
    for batch, size in enumerate(schedule.sizes):
        scores = 3.0 * world.first_value
        for owner, x, sequence, reward in data:
            if schedule.window is None or batch - owner <= schedule.window:
                scores = scores - (world.predicted[:, x, sequence] - reward) ** 2
        weights = np.exp(exponent * (scores - scores.max()))
        chosen = rng.choice(243, p=weights / weights.sum())
        for _ in range(size):
            x = int(rng.integers(64))
            sequence = int(world.played[chosen, x])
            data.append((batch, x, sequence, float(world.reward[x, sequence])))
            total += world.regret[chosen]
    return total


@pytest.mark.parametrize("window", [None, 2])
def test_vectorised_algorithm_two_against_a_naive_one(window: int | None) -> None:
    """Mean final regret, 150 naive runs against 1,500: |z| < 5; a different exponent is told apart."""
    world, schedule = outcome.problem("easy"), geometric(60, 6, 1.2, window)
    rng = np.random.default_rng(4)
    naive = np.array([naive_algorithm_two(world, schedule, 0.7, rng) for _ in range(150)])

    def z(exponent: float) -> float:
        ours = outcome.regret_curves(world, schedule, exponent, 1500, rng).sum(axis=1)
        return float((ours.mean() - naive.mean()) / math.sqrt(ours.var() / ours.size + naive.var() / naive.size))

    assert abs(z(0.7)) < 5.0
    assert abs(z(0.2)) > 5.0


def test_runs_repeat_to_the_bit_and_keep_the_policy_within_a_batch() -> None:
    world, schedule = outcome.problem("hard"), fixed(40, 8)
    first, second = (outcome.regret_curves(world, schedule, 0.5, 20, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first, second)
    batches = first.reshape(20, 5, 8)
    assert (batches == batches[:, :, :1]).all()


def test_a_golden_run() -> None:
    """Seeded regret of the printed recipe on the easy environment: any change of a draw or a formula shows."""
    world = outcome.problem("easy")
    curves = outcome.regret_curves(world, geometric(60, 6, 1.2, None), 0.7, 5, np.random.default_rng(10))
    assert curves.sum(axis=1) == pytest.approx(GOLDEN_REGRET, rel=1e-5)


GOLDEN_REGRET = [10.625, 35.375, 22.625, 26.125, 42.125]


def test_non_private_plateau_reproduces() -> None:
    """Table 1, easy: 13 without batches and 24 with; the plateau of the mean of 200 curves."""
    world = outcome.problem("easy")
    made = [plateaus.cell(world, "x", fixed(250, batch), math.inf, 200, 1) for batch in (1, 5)]
    assert 11 <= made[0].plateau <= 15
    assert 18 <= made[1].plateau <= 28
    assert made[0].estimate.ci_low <= made[0].plateau <= made[0].estimate.ci_high


def test_plateau_by_hand() -> None:
    assert plateaus.plateaus(np.array([[1.0, 2.0, 19.0, 20.0], [5.0, 5.0, 5.0, 5.0]])).tolist() == [3, 1]


def test_interpolated_plateaus() -> None:
    curve = 100.0 / np.array(plateaus.EXPONENTS)
    assert plateaus.at_exponent(curve, plateaus.EXPONENTS[4]) == pytest.approx(curve[4])
    assert plateaus.at_exponent(curve, 0.2) == pytest.approx(500.0)
    assert plateaus.reaching(curve, 500.0) == pytest.approx(0.2)
    assert plateaus.reaching(np.stack([curve, 2 * curve]), 500.0) == pytest.approx([0.2, 0.4])


def test_totals_of_an_exponent_invert_the_accountant() -> None:
    schedule = fixed(500, 25)
    assert plateaus.total_epsilon(private_exponent(schedule, 8.0, 1.0), schedule) == pytest.approx(8.0, rel=2e-4)
    assert 7.0 < plateaus.total_epsilon(private_exponent(schedule, 8.0, 1.0, "zcdp"), schedule) < 7.6


def test_sensitivity_is_one_and_sixteen_is_enough_in_general() -> None:
    assert accounts.outcome_sensitivity() == 1
    assert accounts.general_outcome_sensitivity(4) == 16.0
    assert accounts.general_outcome_sensitivity(1) == 1.0


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=4, max_size=4), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_no_class_in_the_unit_interval_exceeds_sixteen(values: list[list[float]], reward: float) -> None:
    """One trajectory: f_h at the action taken and at the other one."""
    model = values[0][0] + sum(taken - max(taken, other) for taken, other in values[1:])
    assert 0.0 <= (model - reward) ** 2 <= 16.0


@pytest.mark.parametrize("exponent", [0.1, 2.0])
def test_the_loss_of_a_draw_is_bounded_and_nearly_attained(exponent: float) -> None:
    assert 0.9 < accounts.draw_tightness(exponent) <= 1.0 + 1e-9


def test_lost_term_of_appendix_e() -> None:
    """ε₀ = 0.1667 at ε = 8, M = 100: 11.0 by Lemma E.2 and 3.84 by zCDP."""
    rows = [row for row in accounts.table() if (row["epsilon_total"], row["updates"]) == (8.0, 100)]
    (row,) = [row for row in rows if row["accounting"] == "appendix E"]
    assert row["epsilon_per_update"] == pytest.approx(8.0 / math.sqrt(200 * math.log(1e5)))
    assert row["certified_by_lemma_E2"] == pytest.approx(11.02, abs=0.01)
    assert row["certified_by_zcdp"] == pytest.approx(3.84, abs=0.01)
    (own,) = [row for row in rows if row["accounting"] == "zcdp"]
    assert own["certified_by_zcdp"] == pytest.approx(8.0)


def test_theory_batches() -> None:
    """Constants 1: 70 at ε = 8 and sensitivity 25, far from the 4 to 6 that reproduce Table 1."""
    complexity = outcome.complexity(500)
    assert [outcome.theory_batch(500, e, d, complexity) for e, d in ((8.0, 25.0), (8.0, 1.0), (5.0, 25.0))] == [
        70,
        19,
        84,
    ]


def test_honest_arms_are_within_their_budget() -> None:
    """Every arm's exponent, composed over the updates that score one user, stays at its ε."""
    for name, (schedule, route, sensitivity) in honest.arms().items():
        for epsilon in (8.0, 1.0):
            exponent = private_exponent(schedule, epsilon, sensitivity, route)
            assert plateaus.total_epsilon(exponent, schedule, sensitivity) <= epsilon * (1 + 2e-4), name


def test_forgetful_batches_learn_faster_than_growing_ones() -> None:
    """ε = 8, easy: mean regret about 20 against 41."""
    world = outcome.problem("easy")
    regrets = []
    for name in (honest.FORGETFUL, honest.GROWING):
        schedule, route, sensitivity = honest.arms()[name]
        exponent = private_exponent(schedule, 8.0, sensitivity, route)
        regrets.append(plateaus.cell(world, name, schedule, exponent, 100, 7).cumulative[:, -1].mean())
    assert regrets[0] < 0.75 * regrets[1]


def sequence_law(users: list[np.ndarray], window: int | None, exponent: float) -> np.ndarray:
    """Exact law of (f₁, f₂, f₃) of three hypotheses, one user a batch; user k answers f by the losses users[k][f]."""
    law = np.zeros((3, 3, 3))
    for drawn in itertools.product(range(3), repeat=3):
        probability = 1.0
        for update in range(3):
            first = 0 if window is None else max(0, update - window)
            scores = -sum((users[k][drawn[k]] for k in range(first, update)), np.zeros(3))
            weights = np.exp(exponent * scores)
            probability *= weights[drawn[update]] / weights.sum()
        law[drawn] = probability
    return law


@pytest.mark.parametrize("window", [None, 1])
def test_a_user_pays_for_the_updates_that_score_them(window: int | None) -> None:
    """Joint law of all draws under every replaced user of 30 random interactions: at most reads·2x, and more than half.

    Losses in {0, 1} per hypothesis and played policy, so the sensitivity is 1.
    """
    rng, exponent = np.random.default_rng(12), 1.5
    reads = Schedule("one a batch", (1, 1, 1), window).reads
    assert reads == (2 if window is None else 1)
    worst = 0.0
    for _ in range(30):
        users = [rng.integers(2, size=(3, 3)) for _ in range(3)]
        before = sequence_law(users, window, exponent)
        assert before.sum() == pytest.approx(1.0)
        for k in range(3):
            for _ in range(10):
                changed = [*users[:k], rng.integers(2, size=(3, 3)), *users[k + 1 :]]
                after = sequence_law(changed, window, exponent)
                worst = max(worst, float(np.abs(np.log(after / before)).max()))
    assert 0.5 * reads * 2.0 * exponent < worst <= reads * 2.0 * exponent
