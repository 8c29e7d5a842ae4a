"""The value network of DPTD's Section 6 and the gradients of ℓ (Eq. 2), in closed form and for many runs at once.

Legend of shapes: R runs, B transitions of a run, p state size, k = 50 hidden units, d = k(p + 2) + 1 parameters. A
parameter vector is (R, d): for every unit its p weights, its bias and its output weight, then the output bias.

V(s) = b + Σ_k o_k·ELU(z_k), z = W s + c; ψ = ∇_θ V(s); e = ψ·ω; δ = r + γ V(s') − V(s);
ℓ(θ, ω) = δ e − e²/2. Hence, with H the Hessian of V at s and ω the dual variable,
    ∇_ω ℓ = (δ − e) ψ,        ∇_θ ℓ = e (γ ψ' − ψ) + (δ − e) H ω.
ELU's second derivative jumps from 1 to 0 at z = 0, so V is not twice differentiable there, as the paper assumes it to
be; `_curvature` takes 0 at z = 0, as autograd does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from private_rlhf_lab.studies.dptd.environments import Array
from private_rlhf_lab.studies.dptd.trajectories import Transitions

HIDDEN = 50
BOX = 1.0  # Θ = Ω = [−1, 1]^d


def dimension(size: int) -> int:
    """d of the value network for states of length p = `size`: 50·(p + 1) + 50 + 1."""
    return HIDDEN * (size + 2) + 1


def initial(runs: int, size: int, generator: np.random.Generator) -> Array:
    """(R, d): uniform in ±1/√fan-in layer by layer, the usual default; the paper does not say."""
    found = generator.uniform(-1.0, 1.0, (runs, dimension(size)))
    units = found[:, :-1].reshape(runs, HIDDEN, size + 2)
    units[..., :-1] /= np.sqrt(size)
    units[..., -1] /= np.sqrt(HIDDEN)
    found[:, -1] /= np.sqrt(HIDDEN)
    return found


@dataclass(frozen=True)
class _Layer:
    """value, slope, bend: ELU and its two derivatives at the units, (R, B, k)."""

    value: Array
    slope: Array
    bend: Array


def _units(vector: Array, size: int) -> Array:
    """(R, k, p + 2) view of (R, d)."""
    return vector[:, :-1].reshape(len(vector), HIDDEN, size + 2)


def _extended(state: Array) -> Array:
    """(…, p) to (…, p + 1) with a last 1, for the biases."""
    return np.concatenate([state, np.ones((*state.shape[:-1], 1), state.dtype)], axis=-1)


def _layer(units: Array, extended: Array) -> _Layer:
    before = extended @ units[..., :-1].swapaxes(1, 2)
    slope = np.exp(np.minimum(before, 0.0))
    bend = np.where(before < 0.0, slope, 0.0)
    return _Layer(np.maximum(before, 0.0) + slope - 1.0, slope, bend)


def values(theta: Array, state: Array) -> Array:
    """V of states (R, B, p) or (B, p) under theta (R, d): (R, B)."""
    units = _units(theta, state.shape[-1])
    hidden = _layer(units, _extended(state)).value
    return (hidden @ units[..., -1:])[..., 0] + theta[:, -1:]


def features(theta: Array, state: Array) -> Array:
    """ψ(s) = ∇_θ V(s) of states (B, p) under one theta (d,): (B, d)."""
    units = _units(theta[None], state.shape[-1])
    extended = _extended(state)
    layer = _layer(units, extended)
    inner = (layer.slope * units[:, None, :, -1])[0]
    found = np.empty((len(state), HIDDEN, state.shape[-1] + 2))
    found[..., :-1] = inner[..., None] * extended[:, None, :]
    found[..., -1] = layer.value[0]
    return np.concatenate([found.reshape(len(state), -1), np.ones((len(state), 1))], axis=1)


def kernel(theta: Array, state: Array) -> Array:
    """ψ(s)·ψ(s') for all pairs of states (B, p) under one theta (d,): (B, B), without forming ψ."""
    units = _units(theta[None], state.shape[-1])
    extended = _extended(state)
    layer = _layer(units, extended)
    inner, hidden = (layer.slope * units[:, None, :, -1])[0], layer.value[0]
    return (inner @ inner.T) * (extended @ extended.T) + hidden @ hidden.T + 1.0


@dataclass(frozen=True)
class Gradients:
    """Means over the B transitions of a run. theta, omega (R, d): ∇_θ and ∇_ω of ℓ, each sample's clipped to the
    norm `clip` first. objective (R,): ℓ. clipped (R, 2): share of samples whose gradient was shortened, both players.
    """

    theta: Array
    omega: Array
    objective: Array
    clipped: Array


@dataclass(frozen=True)
class _Factors:
    """A sample's gradients as products. objective, carried = γe (its own discount), step = e, rest = δ − e: (R, B).
    W's and c's part of ∇_θ ℓ is on_now ⊗ (s, 1) + on_then ⊗ (s', 1), o's on_out, (R, B, k) each, and b's carried − e;
    those of ψ are inner ⊗ (s, 1), hidden (R, B, k) and 1. norm_theta, norm_omega (R, B): their ℓ2 norms.
    """

    objective: Array
    carried: Array
    step: Array
    rest: Array
    on_now: Array
    on_then: Array
    on_out: Array
    inner: Array
    hidden: Array
    norm_theta: Array
    norm_omega: Array


def _factors(theta: Array, omega: Array, data: Transitions, now: Array, then: Array) -> _Factors:
    """now, then: the extended states (R, B, p + 1) or (B, p + 1)."""
    primal, dual = _units(theta, now.shape[-1] - 1), _units(omega, now.shape[-1] - 1)
    here, there = _layer(primal, now), _layer(primal, then)
    out, out_dual = primal[:, None, :, -1], dual[:, None, :, -1]
    value, ahead = ((layer.value @ primal[..., -1:])[..., 0] + theta[:, -1:] for layer in (here, there))
    error = data.reward + data.discount * ahead - value
    tilt = now @ dual[..., :-1].swapaxes(1, 2)  # the dual weights' own pre-activations
    inner = out * here.slope
    step = (inner * tilt + out_dual * here.value).sum(axis=-1) + omega[:, -1:]
    rest, carried = error - step, data.discount * step
    on_now = rest[..., None] * (out * here.bend * tilt + out_dual * here.slope) - step[..., None] * inner
    on_then = carried[..., None] * out * there.slope
    on_out = rest[..., None] * here.slope * tilt + carried[..., None] * there.value - step[..., None] * here.value
    squared_now, squared_then = (now**2).sum(-1), (then**2).sum(-1)
    both = (on_now**2).sum(-1) * squared_now + (on_then**2).sum(-1) * squared_then
    both += 2.0 * (on_now * on_then).sum(-1) * (now * then).sum(-1)
    norm_theta = np.sqrt(np.maximum(both + (on_out**2).sum(-1) + (carried - step) ** 2, 0.0))
    norm_omega = np.abs(rest) * np.sqrt((inner**2).sum(-1) * squared_now + (here.value**2).sum(-1) + 1.0)
    objective = error * step - 0.5 * step**2
    return _Factors(objective, carried, step, rest, on_now, on_then, on_out, inner, here.value, norm_theta, norm_omega)


def gradients(theta: Array, omega: Array, data: Transitions, clip: float | Array = np.inf) -> Gradients:
    """Gradients of the runs theta, omega (R, d) on their transitions: columns of `data` (R, B, …), or (B, …) for all.
    clip: one G, or (R, 1).

    Norms of single samples come from the factors of each gradient, so that nothing of size B·d is formed.
    """
    now, then = _extended(data.state), _extended(data.following)
    size = data.state.shape[-1]
    part = _factors(theta, omega, data, now, then)
    keep_theta, keep_omega = _shrink(part.norm_theta, clip), _shrink(part.norm_omega, clip)
    found = np.empty((2, *theta.shape), theta.dtype)
    units = [_units(each, size) for each in found]
    weight = (keep_theta / part.step.shape[1])[..., None]
    units[0][..., :-1] = (weight * part.on_now).swapaxes(1, 2) @ now + (weight * part.on_then).swapaxes(1, 2) @ then
    units[0][..., -1] = (weight * part.on_out).sum(axis=1)
    found[0, :, -1] = (keep_theta * (part.carried - part.step)).mean(axis=1)
    weight = (keep_omega * part.rest / part.step.shape[1])[..., None]
    units[1][..., :-1] = (weight * part.inner).swapaxes(1, 2) @ now
    units[1][..., -1] = (weight * part.hidden).sum(axis=1)
    found[1, :, -1] = (keep_omega * part.rest).mean(axis=1)
    clipped = np.stack([(keep_theta < 1.0).mean(axis=1), (keep_omega < 1.0).mean(axis=1)], axis=1)
    return Gradients(found[0], found[1], part.objective.mean(axis=1), clipped)


def _shrink(norm: Array, clip: float | Array) -> Array:
    """min(1, clip / norm), 1 for a zero gradient."""
    with np.errstate(divide="ignore"):
        return np.minimum(1.0, clip / norm)
