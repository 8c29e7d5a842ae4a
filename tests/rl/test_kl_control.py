"""The controller moves the right way, by at most 20 % per horizon, and stays in its bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from private_rlhf.rl.ppo_losses import KlController


def test_without_a_target_the_coefficient_is_fixed() -> None:
    controller = KlController(0.1, None, 1000)
    controller.update(1e6, 500)
    assert controller.value == 0.1


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_the_step_is_proportional_and_clipped(kl: float, factor: float) -> None:
    """A tenth of the horizon: an error of 10 % changes 1 %, and errors count at most 20 %."""
    controller = KlController(0.5, 6.0, 100)
    controller.update(kl, 10)
    assert controller.value == pytest.approx(0.5 * factor)


@given(kls=st.lists(st.floats(-10, 1e6), max_size=50), responses=st.integers(1, 100_000))
def test_the_coefficient_stays_within_its_bounds(kls: list[float], responses: int) -> None:
    controller = KlController(0.1, 1.0, 100, lower=0.01, upper=2.0)
    for kl in kls:
        controller.update(kl, responses)
        assert 0.01 <= controller.value <= 2.0


def test_it_settles_where_kl_meets_the_target() -> None:
    """In a world where KL = 1/kl_coef, the fixed point is 1/target."""
    controller = KlController(5.0, 4.0, 100)
    for _ in range(500):
        controller.update(1 / controller.value, 16)
    assert controller.value == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("bounds", "reached"),
    [
        ({}, 0.1 * 0.8),  # KL is 0 in the first iteration, far below its target
        ({"kl_coef_min": 0.095}, 0.095),
        ({"kl_target": 1e-9, "kl_coef_max": 0.105}, 0.105),
    ],
)
def test_the_recipe_s_bounds_hold_in_training(problem: Any, bounds: dict[str, float], reached: float) -> None:
    settings = {"kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 16, "learning_rate": 1e-2, **bounds}
    trainer = problem.trainer(rollouts=16, minibatch_size=16, ppo_epochs=1, **settings)
    for iteration in range(2 if "kl_coef_max" in bounds else 1):
        trainer.controller.value = 0.1
        trainer.update(trainer.collect(iteration)[0], iteration)
    assert trainer.controller.value == pytest.approx(reached)
    assert trainer.config.kl_coef == 0.1  # J is taken at this one
