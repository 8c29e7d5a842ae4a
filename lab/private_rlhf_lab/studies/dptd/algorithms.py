"""DPTD (Algorithm 1), TD, and the baselines SGD, DPGLD and DPSRM in primal-dual form; R runs side by side.

R runs, d parameters, C recorded moments, as in `network`. A run's p_t, d_t are the momentum estimates of both players.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.network import BOX, gradients
from private_rlhf_lab.studies.dptd.noise import MOMENTUM, Neighbors, step_sizes
from private_rlhf_lab.studies.dptd.trajectories import Transitions

STEP = 2.0  # κ = η, Appendix G


@dataclass(frozen=True)
class Path:
    """steps (C,): gradient queries made before each record. theta, omega, momentum, dual (C, R, d): iterates, and
    p, d at those θ, ω (zero for the baselines, which have none). clipped (R, 2): share of shortened gradients of both
    players.
    """

    steps: NDArray[np.int64]
    theta: Array
    omega: Array
    momentum: Array
    dual: Array
    clipped: Array

    def runs(self, chosen: slice) -> Path:
        """The same for some of the R runs."""
        theta, omega, momentum, dual = (
            each[:, chosen] for each in (self.theta, self.omega, self.momentum, self.dual)
        )
        return Path(self.steps, theta, omega, momentum, dual, self.clipped[chosen])


class _Recorder:
    """Copies the state of the runs at `moments`; ends as a Path."""

    def __init__(self, moments: Sequence[int], shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.place = {moment: place for place, moment in enumerate(sorted(set(moments)))}
        self.kept = np.zeros((4, len(self.place), *shape), dtype)
        self.clipped, self.seen = np.zeros((shape[0], 2)), 0

    def state(self, moment: int, theta: Array, omega: Array, estimate: Array | None = None) -> None:
        """estimate (2, R, d): p and d."""
        if moment in self.place:
            self.kept[:2, self.place[moment]] = theta, omega
            self.kept[2:, self.place[moment]] = 0.0 if estimate is None else estimate

    def share(self, clipped: Array) -> None:
        self.clipped, self.seen = self.clipped + clipped, self.seen + 1

    def path(self) -> Path:
        theta, omega, momentum, dual = self.kept
        share = self.clipped / max(self.seen, 1)
        return Path(np.array(list(self.place)), theta, omega, momentum, dual, share)


def sampled_rows(
    data: Transitions, steps: int, runs: int, neighbors: Neighbors, generator: np.random.Generator
) -> NDArray[np.int64]:
    """(steps, R) rows: uniform, or uniform in a uniformly drawn trajectory, as each notion's accountant assumes."""
    if neighbors == "transition":
        return generator.integers(0, len(data), (steps, runs))
    lengths = data.lengths()
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    drawn = generator.integers(0, len(lengths), (steps, runs))
    return first[drawn] + generator.integers(0, lengths[drawn])


def project(parameters: Array) -> Array:
    """Onto the box."""
    return np.clip(parameters, -BOX, BOX)


def momentum_runs(
    data: Transitions,
    start: tuple[Array, Array],
    rows: NDArray[np.int64],
    deviation: Array,
    clip: Array,
    moments: Sequence[int],
    generator: np.random.Generator,
    step_size: float | Array = STEP,
) -> Path:
    """Algorithm 1; TD where the noise is zero. start: θ_0 and ω_0 (R, d). rows, deviation (T, R): the transition of
    each step and run, and the deviation of the noise on p_t and d_t. clip (R,): G, infinite for none, 0 for a run that
    reads no data. moments: recorded t, from 0 to T − 1. step_size: κ = η, one or (R, 1).
    """
    theta, omega = (each.copy() for each in start)
    steps, dtype = len(rows), theta.dtype
    sizes = step_sizes(steps)
    recorder = _Recorder(moments, theta.shape, dtype)
    noisy = np.flatnonzero(deviation.any(axis=0))
    estimate = np.zeros((2, *theta.shape), dtype)
    bound, length = clip[:, None].astype(dtype), np.asarray(step_size, dtype)
    for step in range(steps):
        found = gradients(theta, omega, data.take(rows[step][:, None]), bound)
        # At t = 0 the estimate is the gradient itself, without a momentum factor.
        weight = MOMENTUM * sizes[step - 1] if step else 1.0
        estimate *= dtype.type(1.0 - weight)
        estimate[0] += dtype.type(weight) * found.theta
        estimate[1] += dtype.type(weight) * found.omega
        if len(noisy):
            drawn = generator.standard_normal((2, len(noisy), theta.shape[1]), dtype.type)
            estimate[:, noisy] += deviation[step, noisy, None].astype(dtype) * drawn
        recorder.share(found.clipped)
        recorder.state(step, theta, omega, estimate)
        size = dtype.type(sizes[step])
        theta += size * (project(theta - length * estimate[0]) - theta)
        omega += size * (project(omega + length * estimate[1]) - omega)
    return recorder.path()


def sgd_runs(
    data: Transitions,
    start: tuple[Array, Array],
    rows: NDArray[np.int64],
    rate: float | Array,
    moments: Sequence[int],
) -> Path:
    """Projected stochastic gradient descent ascent at a constant step (one, or (R, 1)), one transition a step, nothing
    clipped.
    """
    theta, omega = (each.copy() for each in start)
    length = np.asarray(rate, theta.dtype)
    recorder = _Recorder(moments, theta.shape, theta.dtype)
    for step, chosen in enumerate(rows):
        recorder.state(step, theta, omega)
        found = gradients(theta, omega, data.take(chosen[:, None]))
        theta = project(theta - length * found.theta)
        omega = project(omega + length * found.omega)
    recorder.state(len(rows), theta, omega)
    return recorder.path()


def langevin_runs(
    data: Transitions,
    start: tuple[Array, Array],
    epochs: int,
    rate: float | Array,
    sigma: float | Array,
    clip: float | Array,
    generator: np.random.Generator,
) -> Path:
    """DPGLD (Wang, Chen and Xu 2019): a full gradient a step, with noise of deviation `sigma` on its mean.

    rate, sigma, clip: one, or (R, 1). Langevin's inverse temperature is 2/(rate·σ²). Recorded after every epoch, in
    steps of single gradients.
    """
    theta, omega = (each.copy() for each in start)
    dtype = theta.dtype
    length, spread, clip = (np.asarray(each, dtype) for each in (rate, sigma, clip))
    recorder = _Recorder([len(data) * epoch for epoch in range(epochs + 1)], theta.shape, dtype)
    for epoch in range(epochs):
        recorder.state(epoch * len(data), theta, omega)
        found = gradients(theta, omega, data, clip)
        recorder.share(found.clipped)
        noise = spread * generator.standard_normal((2, *theta.shape), dtype.type)
        theta = project(theta - length * (found.theta + noise[0]))
        omega = project(omega + length * (found.omega + noise[1]))
    recorder.state(epochs * len(data), theta, omega)
    return recorder.path()


@dataclass(frozen=True)
class Recursion:
    """DPSRM's settings: batch drawn without replacement, `decay` a in v = g(θ) + (1 − a)(v − g(θ_before)), and the step
    `rate`, one or (R, 1).
    """

    batch: int
    decay: float
    rate: float | Array

    def steps(self, rows: int, epochs: float) -> int:
        """Steps that two gradients of each batch row allow in `epochs` times `rows` gradients."""
        return max(1, round(epochs * rows) // (2 * self.batch))

    def sensitivity(self, clip: float) -> float:
        """Of a batch mean of g(θ) − (1 − a)g(θ_before), both players, one record replaced, each g clipped."""
        return 2.0 * np.sqrt(2.0) * (2.0 - self.decay) * clip / self.batch


def recursive_runs(
    data: Transitions,
    start: tuple[Array, Array],
    epochs: float,
    settings: Recursion,
    sigma: float | Array,
    clip: float | Array,
    generator: np.random.Generator,
) -> Path:
    """DPSRM (Wang, Jayaraman, Evans and Gu 2019): stochastic recursive momentum with noise `sigma` on v at every step.

    All runs share the batches; their noise differs. Recorded at about every epoch.
    """
    theta, omega = (each.copy() for each in start)
    dtype, steps = theta.dtype, settings.steps(len(data), epochs)
    whole = max(1, round(epochs))
    every = [round(steps * epoch / whole) for epoch in range(whole + 1)]
    recorder = _Recorder(every, theta.shape, dtype)
    estimate, before = np.zeros((2, *theta.shape), dtype), (theta, omega)
    keep = dtype.type(1.0 - settings.decay)
    length, spread, clip = (np.asarray(each, dtype) for each in (settings.rate, sigma, clip))
    for step in range(steps):
        recorder.state(step, theta, omega)
        batch = data.take(generator.choice(len(data), settings.batch, replace=False))
        found = gradients(theta, omega, batch, clip)
        recorder.share(found.clipped)
        if step:
            old = gradients(*before, batch, clip)
            estimate = keep * (estimate - np.stack([old.theta, old.omega]))
        estimate = estimate + np.stack([found.theta, found.omega])
        estimate += spread * generator.standard_normal(estimate.shape, dtype.type)
        before = (theta, omega)
        theta = project(theta - length * estimate[0])
        omega = project(omega + length * estimate[1])
    recorder.state(steps, theta, omega)
    path = recorder.path()
    return replace(path, steps=path.steps * 2 * settings.batch)
