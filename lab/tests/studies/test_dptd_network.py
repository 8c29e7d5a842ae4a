"""DPTD's closed-form gradients against autograd on ℓ itself, per-sample clipping, and the shapes of the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from private_rlhf_lab.studies.dptd import network
from private_rlhf_lab.studies.dptd.environments import TASKS, Array
from private_rlhf_lab.studies.dptd.trajectories import Transitions

SIZE = 3


def example(rows: int = 6, runs: int = 2, seed: int = 0) -> tuple[Array, Array, Transitions]:
    """Parameters of `runs` runs and `rows` transitions for all of them, one of which is terminal."""
    generator = np.random.default_rng(seed)
    theta = generator.uniform(-1, 1, (runs, network.dimension(SIZE)))
    omega = generator.uniform(-1, 1, (runs, network.dimension(SIZE)))
    discount = np.full(rows, 0.95)
    discount[0] = 0.0
    data = Transitions(
        generator.normal(size=(rows, SIZE)),
        generator.normal(size=rows),
        generator.normal(size=(rows, SIZE)),
        discount,
        np.arange(rows) // 3,
    )
    return theta, omega, data


def torch_value(theta: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """V written with torch's own ELU."""
    units = theta[:-1].reshape(network.HIDDEN, SIZE + 2)
    return torch.nn.functional.elu(units[:, :SIZE] @ state + units[:, SIZE]) @ units[:, -1] + theta[-1]


def torch_gradients(theta: Array, omega: Array, data: Transitions, row: int) -> tuple[Array, Array, float]:
    """∇_θ ℓ and ∇_ω ℓ of one transition and ℓ, by automatic differentiation of Eq. 2 as it is printed."""
    primal, dual = torch.tensor(theta, requires_grad=True), torch.tensor(omega, requires_grad=True)
    state, following = torch.tensor(data.state[row]), torch.tensor(data.following[row])
    value = torch_value(primal, state)
    (psi,) = torch.autograd.grad(value, primal, create_graph=True)
    delta = data.reward[row] + data.discount[row] * torch_value(primal, following) - value
    loss = (delta * psi) @ dual - 0.5 * dual @ torch.outer(psi, psi) @ dual
    first, second = torch.autograd.grad(loss, (primal, dual))
    return first.numpy(), second.numpy(), float(loss.detach())


def test_dimensions_of_the_paper_s_tasks() -> None:
    assert [network.dimension(TASKS[name].size) for name in TASKS] == [301, 401, 6501]


def test_gradients_are_those_of_autograd() -> None:
    theta, omega, data = example()
    found = network.gradients(theta, omega, data)
    for run in range(2):
        each = [torch_gradients(theta[run], omega[run], data, row) for row in range(len(data))]
        assert found.theta[run] == pytest.approx(np.mean([one[0] for one in each], axis=0), abs=1e-12)
        assert found.omega[run] == pytest.approx(np.mean([one[1] for one in each], axis=0), abs=1e-12)
        assert found.objective[run] == pytest.approx(np.mean([one[2] for one in each]), abs=1e-12)
    assert not found.clipped.any()


@pytest.mark.parametrize("clip", [0.5, 3.0])
def test_every_sample_is_clipped_before_the_mean(clip: float) -> None:
    theta, omega, data = example()
    found = network.gradients(theta, omega, data, clip)
    for run in range(2):
        shortened = []
        for player, mean in enumerate((found.theta[run], found.omega[run])):
            each = np.array([torch_gradients(theta[run], omega[run], data, row)[player] for row in range(len(data))])
            norms = np.linalg.norm(each, axis=1)
            wanted = (each * np.minimum(1.0, clip / norms)[:, None]).mean(axis=0)
            assert mean == pytest.approx(wanted, abs=1e-12)
            shortened.append((norms > clip).mean())
        assert found.clipped[run] == pytest.approx(shortened)
    assert found.clipped.any()


def test_a_run_with_its_own_transition_is_the_run_alone() -> None:
    """Columns (R, B, …) give each run its own sample."""
    theta, omega, data = example()
    rows = np.array([[4], [1]])
    together = network.gradients(theta, omega, data.take(rows), 1.0)
    for run in range(2):
        alone = network.gradients(theta[run : run + 1], omega[run : run + 1], data.take(rows[run]), 1.0)
        assert together.theta[run] == pytest.approx(alone.theta[0], abs=1e-14)
        assert together.omega[run] == pytest.approx(alone.omega[0], abs=1e-14)


def test_values_and_features() -> None:
    theta, _, data = example()
    assert network.values(theta, data.state).shape == (2, len(data))
    state = torch.tensor(data.state[1])
    primal = torch.tensor(theta[1], requires_grad=True)
    value = torch_value(primal, state)
    value.backward()
    assert network.values(theta, data.state)[1, 1] == pytest.approx(float(value.detach()))
    psi = network.features(theta[1], data.state)
    assert psi[1] == pytest.approx(primal.grad.numpy())
    assert network.kernel(theta[1], data.state) == pytest.approx(psi @ psi.T)


def test_start_lies_in_the_box_and_is_reproducible() -> None:
    first = network.initial(4, SIZE, np.random.default_rng(1))
    assert first.shape == (4, network.dimension(SIZE))
    assert np.abs(first).max() <= 1 / np.sqrt(SIZE)
    assert np.abs(first).max() > 0.9 / np.sqrt(SIZE)
    assert np.abs(first[:, -1]).max() <= 1 / np.sqrt(network.HIDDEN)
    assert (first == network.initial(4, SIZE, np.random.default_rng(1))).all()
