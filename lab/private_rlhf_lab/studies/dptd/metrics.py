"""What the runs are judged by. All of it reads the raw transitions: diagnostics of a study, not releases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from private_rlhf_lab.studies.dptd.algorithms import STEP, Path, project
from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.network import features, gradients, kernel, values
from private_rlhf_lab.studies.dptd.trajectories import GAMMA, Transitions

SAMPLE = 600  # transitions that metrics read, evenly spaced
RIDGE = 1e-3  # of mspbe, in units of the squared features' mean
TAIL = 60  # 0.95^60 < 5 %: returns cut earlier than this are not used


def subset(data: Transitions, size: int = SAMPLE) -> Transitions:
    """At most `size` transitions, evenly spaced."""
    if len(data) <= size:
        return data
    return data.take(np.linspace(0, len(data) - 1, size).astype(np.int64))


def objective(path: Path, data: Transitions) -> Array:
    """L(θ, ω) of Eq. 2 over `data`, the ordinate of the paper's figures: (C, R)."""
    return np.array(
        [gradients(theta, omega, data).objective for theta, omega in zip(path.theta, path.omega, strict=True)]
    )


def td_errors(theta: Array, data: Transitions) -> Array:
    """δ of every transition under theta (R, d): (R, n)."""
    return data.reward + data.discount * values(theta, data.following) - values(theta, data.state)


def mspbe(theta: Array, data: Transitions) -> Array:
    """Eq. 1 under theta (R, d): (R,). ½ cᵀ(G_θ + ρI)⁻¹c with c = E[δψ]; ρ = RIDGE·E|ψ|²/d, as G_θ is singular.

    In its kernel form, δᵀK(K + nρ)⁻¹δ/2n with K = ΨΨᵀ, so that d may be large; n should be at most thousands.
    """
    errors, found = td_errors(theta, data), np.empty(len(theta))
    count = len(data)
    for run, vector in enumerate(theta):
        pairs = kernel(vector, data.state)
        ridge = RIDGE * np.trace(pairs) / len(vector)  # = n·ρ
        solved = np.linalg.solve(pairs + ridge * np.eye(count), errors[run])
        found[run] = errors[run] @ pairs @ solved / (2.0 * count)
    return found


def value_error(theta: Array, data: Transitions, most: int | None = None) -> Array:
    """Root mean square of V(s) − the return seen from s, of theta (R, d): (R,), in units of reward.

    most: at most so many states are used, evenly spaced. The square is the mean squared value error plus the returns'
    own variance, which is the same for all θ.

    Rows less than TAIL steps before an episode was cut by its time limit are left out.
    """
    last = np.cumsum(data.lengths()) - 1
    ahead = last[data.trajectory] - np.arange(len(data))
    usable = (data.discount[last][data.trajectory] != GAMMA) | (ahead >= TAIL)
    places = np.flatnonzero(usable)
    if most is not None and len(places) > most:
        places = places[np.linspace(0, len(places) - 1, most).astype(np.int64)]
    gap = values(theta, data.state[places]) - data.returns()[places]
    return np.asarray(np.sqrt((gap**2).mean(axis=1)), dtype=np.float64)


def curvature(theta: Array, data: Transitions) -> Array:
    """Eigenvalues of G_θ = E[ψψᵀ] under one theta (d,), rising (d,): −G_θ is the Hessian of F in ω."""
    psi = features(theta, data.state)
    return np.asarray(np.linalg.eigvalsh(psi.T @ psi / len(data)), dtype=np.float64)


def best_response(theta: Array, omega: Array, data: Transitions, iterations: int = 300) -> tuple[Array, float]:
    """A maximiser of F(θ, ·) over the box near `omega`, and λ_max(G_θ): both under one theta, omega (d,).

    G_θ is singular, so ω*(θ) is a set; accelerated projected ascent from `omega` moves little in the null space.
    """
    psi = features(theta, data.state)
    gram = psi.T @ psi / len(data)
    linear = psi.T @ td_errors(theta[None], data)[0] / len(data)
    largest = float(np.linalg.eigvalsh(gram)[-1])
    point = ahead = omega
    weight = 1.0
    for _ in range(iterations):
        following = project(ahead + (linear - gram @ ahead) / largest)
        growth = (1.0 + np.sqrt(1.0 + 4.0 * weight**2)) / 2.0
        ahead = following + (weight - 1.0) / growth * (following - point)
        point, weight = following, growth
    return point, largest


@dataclass(frozen=True)
class Utility:
    """The three terms of Eq. 4, averaged over the recorded moments: (R,) each. `dual` takes λ_max(G_θ) for L_F, the
    least it can be, and `best_response` for ω*.
    """

    movement: Array
    estimate: Array
    dual: Array

    @property
    def total(self) -> Array:
        """Eq. 4."""
        return self.movement + self.estimate + self.dual


def utility(path: Path, data: Transitions) -> Utility:
    """Eq. 4 for the recorded moments of DPTD or TD, F over `data`; the paper's output is a moment drawn uniformly."""
    terms = np.empty((3, *path.theta.shape[:2]))
    for moment, (theta, omega, estimate) in enumerate(zip(path.theta, path.omega, path.momentum, strict=True)):
        terms[0, moment] = np.linalg.norm(project(theta - STEP * estimate) - theta, axis=1) / STEP
        terms[1, moment] = np.linalg.norm(gradients(theta, omega, data).theta - estimate, axis=1)
        for run in range(len(theta)):
            best, largest = best_response(theta[run], omega[run], data)
            terms[2, moment, run] = largest * np.linalg.norm(omega[run] - best)
    return Utility(*terms.mean(axis=1))
