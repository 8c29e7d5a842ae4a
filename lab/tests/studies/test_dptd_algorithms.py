"""DPTD and its baselines against plain loops; what they sample; reproducible to the bit; the metrics."""

from __future__ import annotations

import numpy as np
import pytest
from private_rlhf_lab.studies.dptd import algorithms, metrics, network
from private_rlhf_lab.studies.dptd.algorithms import Recursion, momentum_runs, sampled_rows
from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.noise import step_sizes
from private_rlhf_lab.studies.dptd.trajectories import Transitions

SIZE, RUNS = 3, 2


@pytest.fixture
def data() -> Transitions:
    generator = np.random.default_rng(0)
    discount = np.full(12, 0.95)
    discount[-1] = 0.0
    state = generator.normal(size=(13, SIZE))
    owners = np.repeat([0, 1], [4, 8])
    return Transitions(state[:-1], generator.normal(size=12), state[1:], discount, owners)


@pytest.fixture
def start() -> tuple[Array, Array]:
    generator = np.random.default_rng(1)
    return network.initial(RUNS, SIZE, generator), network.initial(RUNS, SIZE, generator)


def naive(
    data: Transitions, theta: Array, omega: Array, rows: Array, deviation: Array, clip: float, drawn: Array
) -> tuple[list[Array], list[Array]]:
    """Algorithm 1 as it is printed, one run; drawn (T, 2, d) standard normal."""
    sizes, thetas, omegas = step_sizes(len(rows)), [theta], [omega]
    p = d = np.zeros_like(theta)
    for t, row in enumerate(rows):
        found = network.gradients(theta[None], omega[None], data.take(np.array([row])), clip)
        if t == 0:
            p, d = found.theta[0], found.omega[0]
        else:
            p = (1 - 3 * sizes[t - 1]) * p + 3 * sizes[t - 1] * found.theta[0]
            d = (1 - 3 * sizes[t - 1]) * d + 3 * sizes[t - 1] * found.omega[0]
        p, d = p + deviation[t] * drawn[t, 0], d + deviation[t] * drawn[t, 1]
        theta = theta + sizes[t] * (np.clip(theta - 2 * p, -1, 1) - theta)
        omega = omega + sizes[t] * (np.clip(omega + 2 * d, -1, 1) - omega)
        thetas.append(theta)
        omegas.append(omega)
    return thetas, omegas


def test_dptd_is_algorithm_1(data: Transitions, start: tuple[Array, Array]) -> None:
    """Run 0 without noise and clip (TD), run 1 with both."""
    generator = np.random.default_rng(2)
    rows = sampled_rows(data, 9, RUNS, "transition", generator)
    deviation = np.zeros((9, RUNS))
    deviation[:, 1] = np.linspace(0.5, 0.1, 9)
    state = generator.bit_generator.state
    path = momentum_runs(data, start, rows, deviation, np.array([np.inf, 0.5]), range(9), generator)
    generator.bit_generator.state = state
    drawn = np.array([generator.standard_normal((2, 1, start[0].shape[1])) for _ in range(9)])[:, :, 0]
    for run, clip in ((0, np.inf), (1, 0.5)):
        thetas, omegas = naive(data, start[0][run], start[1][run], rows[:, run], deviation[:, run], clip, drawn)
        assert path.theta[:, run] == pytest.approx(np.array(thetas[:-1]), abs=1e-12)
        assert path.omega[:, run] == pytest.approx(np.array(omegas[:-1]), abs=1e-12)
    assert path.steps.tolist() == list(range(9))
    assert path.clipped[0].tolist() == [0.0, 0.0]
    assert path.clipped[1].max() > 0.0


def test_a_run_that_reads_nothing_does_not_depend_on_the_data(data: Transitions, start: tuple[Array, Array]) -> None:
    paths = []
    for rows in (np.zeros((5, RUNS), int), np.full((5, RUNS), 7)):
        noise = np.ones((5, RUNS))
        generator = np.random.default_rng(4)
        paths.append(momentum_runs(data, start, rows, noise, np.zeros(RUNS), [4], generator))
    assert (paths[0].theta == paths[1].theta).all()
    assert (paths[0].theta != start[0]).any()


def test_rows_of_both_notions(data: Transitions) -> None:
    """Uniform over 12 rows; or half of the draws from each trajectory of 4 and 8 (5 sd: false alarm below 1e-6)."""
    generator = np.random.default_rng(5)
    single = np.bincount(sampled_rows(data, 1000, 60, "transition", generator).ravel(), minlength=12) / 60_000
    whole = np.bincount(sampled_rows(data, 1000, 60, "trajectory", generator).ravel(), minlength=12) / 60_000
    wanted = np.repeat([1 / 8, 1 / 16], [4, 8])
    assert np.abs(single - 1 / 12).max() < 5 * np.sqrt(1 / 12 / 60_000)
    assert np.abs(whole - wanted).max() < 5 * np.sqrt(1 / 8 / 60_000)


def test_sgd_and_langevin_by_hand(data: Transitions, start: tuple[Array, Array]) -> None:
    rows = np.array([[3, 3]])
    path = algorithms.sgd_runs(data, start, rows, 0.1, [0, 1])
    found = network.gradients(*start, data.take(np.array([3])))
    assert path.theta[1] == pytest.approx(np.clip(start[0] - 0.1 * found.theta, -1, 1))
    assert path.omega[1] == pytest.approx(np.clip(start[1] + 0.1 * found.omega, -1, 1))
    quiet = algorithms.langevin_runs(data, start, 1, 0.1, 0.0, 0.5, np.random.default_rng(0))
    found = network.gradients(*start, data, 0.5)
    assert quiet.theta[-1] == pytest.approx(np.clip(start[0] - 0.1 * found.theta, -1, 1))
    assert quiet.steps.tolist() == [0, len(data)]


def test_recursive_momentum_by_hand(data: Transitions, start: tuple[Array, Array]) -> None:
    """v_1 = g(θ_1) + (1 − a)(v_0 − g(θ_0)) on the second batch, without noise; the batch is everything."""
    settings = Recursion(batch=len(data), decay=0.3, rate=0.1)
    path = algorithms.recursive_runs(data, start, 4, settings, 0.0, 0.5, np.random.default_rng(0))
    first = network.gradients(*start, data, 0.5)
    theta, omega = (np.clip(start[0] - 0.1 * first.theta, -1, 1), np.clip(start[1] + 0.1 * first.omega, -1, 1))
    second = network.gradients(theta, omega, data, 0.5)
    estimate = second.theta + 0.7 * (first.theta - first.theta)
    assert path.theta[-1] == pytest.approx(np.clip(theta - 0.1 * estimate, -1, 1))
    assert settings.steps(len(data), 4) == 2
    assert settings.sensitivity(0.5) == pytest.approx(2 * np.sqrt(2) * 1.7 * 0.5 / 12)


def test_seeds_reproduce_bits(data: Transitions, start: tuple[Array, Array]) -> None:
    def once() -> algorithms.Path:
        generator = np.random.default_rng(8)
        rows = sampled_rows(data, 6, RUNS, "trajectory", generator)
        return momentum_runs(data, start, rows, np.ones((6, RUNS)), np.ones(RUNS), [0, 5], generator)

    assert (once().theta == once().theta).all()
    # Float32 stays float32, with the same draws of transitions.
    generator = np.random.default_rng(8)
    rows = sampled_rows(data, 6, RUNS, "trajectory", generator)
    light = (start[0].astype(np.float32), start[1].astype(np.float32))
    path = momentum_runs(data.cast(np.float32), light, rows, np.zeros((6, RUNS)), np.ones(RUNS), [5], generator)
    assert path.theta.dtype == np.float32


def test_a_golden_run(data: Transitions, start: tuple[Array, Array]) -> None:
    """Seeded rows, noise and iterates, to seven digits: any change of a draw or a formula shows."""
    generator = np.random.default_rng(9)
    rows = sampled_rows(data, 40, RUNS, "transition", generator)
    deviation = np.tile(np.linspace(0.02, 0.01, 40)[:, None], (1, RUNS))
    path = momentum_runs(data, start, rows, deviation, np.full(RUNS, 0.5), [0, 39], generator)
    assert rows.sum() == GOLDEN_ROWS
    assert path.theta[-1, :, :3] == pytest.approx(np.array(GOLDEN_THETA), rel=1e-7)
    assert path.omega[-1].mean(axis=1) == pytest.approx(GOLDEN_OMEGA, rel=1e-7)


GOLDEN_ROWS = 516
GOLDEN_THETA = [[0.00436306995, 0.607404206, -0.418313185], [-0.6324617996, -0.0324111872, 0.231507582]]
GOLDEN_OMEGA = [0.02687486943, -0.00114915164]


def test_objective_is_eq_2(data: Transitions, start: tuple[Array, Array]) -> None:
    theta, omega = start
    psi = network.features(theta[0], data.state)
    errors = metrics.td_errors(theta, data)[0]
    step = psi @ omega[0]
    path = algorithms.Path(np.array([0]), theta[None], omega[None], theta[None], theta[None], np.zeros((2, 2)))
    assert metrics.objective(path, data)[0, 0] == pytest.approx((errors * step - step**2 / 2).mean())
    silent = algorithms.Path(np.array([0]), theta[None], 0.0 * omega[None], theta[None], theta[None], np.zeros((2, 2)))
    assert metrics.objective(silent, data)[0].tolist() == [0.0, 0.0]


def test_mspbe_is_eq_1_and_bounds_the_objective(data: Transitions, start: tuple[Array, Array]) -> None:
    """Against the d × d form with the same ridge; Fenchel: no ω exceeds the unridged value."""
    theta, omega = start
    psi = network.features(theta[0], data.state)
    errors = metrics.td_errors(theta, data)[0]
    ridge = metrics.RIDGE * (psi**2).sum() / len(data) / psi.shape[1]
    gram, linear = psi.T @ psi / len(data), psi.T @ errors / len(data)
    direct = 0.5 * linear @ np.linalg.solve(gram + ridge * np.eye(len(gram)), linear)
    found = metrics.mspbe(theta, data)
    assert found[0] == pytest.approx(direct)
    assert found[0] <= 0.5 * (errors**2).mean() + 1e-12
    best, largest = metrics.best_response(theta[0], omega[0], data)
    assert largest == pytest.approx(metrics.curvature(theta[0], data)[-1])
    value = linear @ best - 0.5 * best @ gram @ best
    assert value >= linear @ omega[0] - 0.5 * omega[0] @ gram @ omega[0]
    assert value <= 0.5 * linear @ np.linalg.pinv(gram) @ linear + 1e-9
    slope = linear - gram @ best
    # First-order optimality in the box: |projected gradient| is small.
    assert np.abs(np.clip(best + slope, -1, 1) - best).max() < 1e-2


def test_value_error_of_a_known_function(data: Transitions) -> None:
    """A network that is constant 0 errs by the returns, also in an episode that ended."""
    theta = np.zeros((1, network.dimension(SIZE)))
    ended = data.take(np.arange(4, 12))
    ended.trajectory[:] = 0
    assert metrics.value_error(theta, ended)[0] == pytest.approx(np.sqrt((ended.returns() ** 2).mean()))
    assert ended.returns()[-2] == pytest.approx(ended.reward[-2] + 0.95 * ended.reward[-1])


def test_utility_vanishes_where_nothing_moves(data: Transitions, start: tuple[Array, Array]) -> None:
    """Rewards 0 and a constant value 0: gradients vanish at ω = 0, which is its own best response."""
    quiet = Transitions(data.state, 0.0 * data.reward, data.following, data.discount, data.trajectory)
    zero = np.zeros((1, RUNS, start[0].shape[1]))
    found = metrics.utility(algorithms.Path(np.array([0]), zero, zero, zero, zero, np.zeros((2, 2))), quiet)
    assert found.total.tolist() == [0.0, 0.0]
    moved = metrics.utility(algorithms.Path(np.array([0]), zero, zero, zero + 0.1, zero, np.zeros((2, 2))), quiet)
    length = 0.1 * np.sqrt(zero.shape[2])
    assert moved.movement == pytest.approx([length] * RUNS)
    assert moved.estimate == pytest.approx([length] * RUNS)
