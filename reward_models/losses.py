"""Per-example losses for preference labels that went through randomised response.

`margin` Δ (B,) is r(s, a) − r(s, b); `private_label` z (B,) ±1 the *released* label; `noise` what its release states
(`LabelNoise`), an ε in [0, ∞], or an ε for each label (`LevelledNoise`). Every function is pure, keeps (B,), works in
float32 or float64, and is finite for |Δ| up to 1e4. "Eq." numbers are PPKL's.

Label smoothing is refused: on labels that are already flipped it shrinks every margin a second time. r is the smooth
bound (B/2)·tanh(2u/B) of the raw score u; a hard clamp would have zero gradient outside. `reward_bound` None means r =
u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from private_rlhf.core.noise import LABEL_RULE, LabelNoise, as_float
from private_rlhf.core.noise_levels import AnyNoise, known_noise
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

SMOOTHING_REFUSED = "smoothing labels that were already randomised shrinks every margin a second time"


def check_signs(private_label: Tensor) -> None:
    """Refuse labels other than -1 and +1 with a ValueError."""
    if not private_label.dtype.is_signed:  # bool, and unsigned integers, of which 255 equals -1
        raise ValueError(LABEL_RULE)
    valid = ((private_label == 1) | (private_label == -1)).all()
    if private_label.device.type != "cpu":
        torch._assert_async(valid, LABEL_RULE)  # the host does not wait for it: training asks in every step
    elif not bool(valid):
        raise ValueError(LABEL_RULE)


def _widen(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _signed(margin: Tensor, private_label: Tensor) -> Tensor:
    """zΔ in at least float32. ValueError: the shapes differ (broadcasting would hide a bug), or a label is not ±1."""
    margin, private_label = torch.as_tensor(margin), torch.as_tensor(private_label)
    if margin.shape != private_label.shape:
        raise ValueError(f"private_label must have the shape {tuple(margin.shape)}, got {tuple(private_label.shape)}")
    check_signs(private_label)
    margin = _widen(margin)
    return margin * private_label.to(margin.dtype)


def _sigmoid(values: Tensor) -> Tensor:
    """σ(x) with a derivative that keeps its relative precision in both tails (σ(1−σ) does not where σ rounds to 1)."""
    return torch.exp(logsigmoid(values))


def _log_sigmoid_slope(values: Tensor) -> Tensor:
    """log σ'(x) = log σ(x) + log σ(−x)."""
    return logsigmoid(values) + logsigmoid(-values)


# --- bounded rewards -----------------------------------------------------------------------------------------------


def check_reward_bound(reward_bound: float | None) -> float | None:
    """A positive finite width as a float, None as it is; ValueError otherwise."""
    bound = None if reward_bound is None else as_float(reward_bound)
    if bound is not None and not 0.0 < bound < math.inf:
        raise ValueError(f"reward_bound must be a positive width or None (rewards in [-B/2, B/2]), got {bound}")
    return bound


def bounded_reward(raw_score: Tensor, reward_bound: float | None) -> Tensor:
    """r = (B/2)·tanh(2u/B), same shape as `raw_score`; half types are widened to float32."""
    raw_score, bound = _widen(raw_score), check_reward_bound(reward_bound)
    return raw_score if bound is None else (bound / 2.0) * torch.tanh(raw_score * (2.0 / bound))


def bound_slope(raw_score: Tensor, reward_bound: float | None) -> Tensor:
    """dr/du = 1/cosh²(2u/B) in (0, 1], same shape; written with sigmoids so that it keeps its relative precision."""
    raw_score, bound = _widen(raw_score), check_reward_bound(reward_bound)
    if bound is None:
        return torch.ones_like(raw_score)
    scaled = raw_score * (4.0 / bound)
    return 4.0 * torch.sigmoid(scaled) * torch.sigmoid(-scaled)


# --- noise ---------------------------------------------------------------------------------------------------------


class _Terms(NamedTuple):
    """The parts of the noise that a loss reads: floats for one ε, (B,) in the margin's type for an ε of each label."""

    public: bool
    factor: float | Tensor
    flip_prob: float | Tensor
    log_keep: float | Tensor
    log_flip: float | Tensor


def _terms(noise: AnyNoise, margin: Tensor) -> _Terms:
    known = known_noise(noise)
    if isinstance(known, LabelNoise):
        return _Terms(known.public, known.factor, known.flip_prob, known.log_keep, known.log_flip)
    if len(known) != len(margin):
        raise ValueError(f"noise must be of {len(margin)} labels, one for each margin, got {len(known)}")
    margin = _widen(margin)
    values = (known.factor, known.flip_prob, known.log_keep, known.log_flip)
    return _Terms(False, *(torch.as_tensor(each, dtype=margin.dtype, device=margin.device) for each in values))


# --- private likelihood (Eq. 8-9) ----------------------------------------------------------------------------------


class _PrivateNegativeLogLikelihood(torch.autograd.Function):
    """−log P of x = zΔ for finite ε, P = α σ(x) + (1−α) σ(−x), with derivatives in cancellation-free form.

    Autograd through logaddexp would lose all digits as ε → 0. Both backward passes are differentiable.
    """

    @staticmethod
    def forward(ctx: Any, signed: Tensor, noise: _Terms) -> Tensor:
        ctx.save_for_backward(signed)
        ctx.noise = noise
        return _mixture_nll(signed, noise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (signed,) = ctx.saved_tensors
        return -grad * _PrivateScore.apply(signed, ctx.noise), None


class _PrivateScore(torch.autograd.Function):
    """w = ∂ log P/∂x = (2α−1) σ'(x)/P > 0; w' = −w [σ(x) − σ(−x) (1−α)/P]: the loss is concave where w' > 0."""

    @staticmethod
    def forward(ctx: Any, signed: Tensor, noise: _Terms) -> Tensor:
        ctx.save_for_backward(signed)
        ctx.noise = noise
        return _score(signed, noise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (signed,) = ctx.saved_tensors
        flipped = torch.exp(ctx.noise.log_flip + _PrivateNegativeLogLikelihood.apply(signed, ctx.noise))
        bend = _sigmoid(-signed) * flipped - _sigmoid(signed)
        return grad * bend * _PrivateScore.apply(signed, ctx.noise), None


def _mixture_nll(signed: Tensor, noise: _Terms) -> Tensor:
    if noise.public:
        return softplus(-signed)
    return -torch.logaddexp(noise.log_keep + logsigmoid(signed), noise.log_flip + logsigmoid(-signed))


def _score(signed: Tensor, noise: _Terms) -> Tensor:
    """∂ log P/∂x of x = zΔ, (B,) > 0."""
    if noise.public:
        return torch.sigmoid(-signed)
    return noise.factor * torch.exp(_log_sigmoid_slope(signed) + _mixture_nll(signed, noise))


def private_likelihood_loss(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """−log P̃(z) with P̃(z) = α σ(zΔ) + (1−α) σ(−zΔ) (Eq. 8-9), in nats, (B,) ≥ 0; not convex in Δ for α < 1."""
    signed = _signed(margin, private_label)
    terms = _terms(noise, signed)
    return _mixture_nll(signed, terms) if terms.public else _PrivateNegativeLogLikelihood.apply(signed, terms)


def private_likelihood_slope(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """∂ loss/∂Δ = −z (2α−1) σ'(Δ)/P̃(z), (B,), between −1 and 1."""
    signed = _signed(margin, private_label)
    return -private_label.to(signed.dtype) * _score(signed, _terms(noise, signed))


def fisher_weight(margin: Tensor, noise: AnyNoise) -> Tensor:
    """Expected information of one private label about its margin: (2α−1)² σ'(Δ)²/(P̃(1−P̃)), (B,) in [0, 1/4]."""
    margin = _widen(margin)
    terms = _terms(noise, margin)
    if terms.public:
        return torch.exp(_log_sigmoid_slope(margin))
    log_weight = 2.0 * _log_sigmoid_slope(margin) + _mixture_nll(margin, terms) + _mixture_nll(-margin, terms)
    return terms.factor ** 2 * torch.exp(log_weight)


# --- private least squares (Algorithm 2 step 8) --------------------------------------------------------------------


def _least_squares_error(margin: Tensor, private_label: Tensor, noise: _Terms) -> Tensor:
    """z − (2σ(Δ)−1)(2α−1), times z: 2 [(1−α) + (2α−1) σ(−zΔ)], (B,) in [0, 2], free of cancellation."""
    return 2.0 * (noise.flip_prob + noise.factor * _sigmoid(-_signed(margin, private_label)))


def private_least_squares_loss(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """[(2σ(Δ)−1)(2α−1) − z]², (B,) in [0, 4]: the squared error of the label's conditional mean."""
    return _least_squares_error(margin, private_label, _terms(noise, margin)).square()


def private_least_squares_slope(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """∂ loss/∂Δ = 4 (2α−1) σ'(Δ) [(2σ(Δ)−1)(2α−1) − z], (B,)."""
    margin = _widen(margin)
    terms = _terms(noise, margin)
    error = _least_squares_error(margin, private_label, terms)
    slope = torch.exp(_log_sigmoid_slope(margin))
    return -4.0 * terms.factor * slope * private_label.to(margin.dtype) * error


def least_squares_curvature(margin: Tensor, noise: AnyNoise) -> Tensor:
    """Gauss-Newton (= expected) curvature 8 (2α−1)² σ'(Δ)², (B,)."""
    return 8.0 * _terms(noise, margin).factor ** 2 * torch.exp(2.0 * _log_sigmoid_slope(_widen(margin)))


# --- debiased ("robust", rDPO-style) -------------------------------------------------------------------------------


def _debiasing_slope(noise: AnyNoise, margin: Tensor) -> float | Tensor:
    """(1−α)/(2α−1) = 1/(e^ε − 1), in [0, ∞)."""
    terms = _terms(known_noise(noise, allow_zero=False), margin)
    return terms.flip_prob / terms.factor


def debiased_loss(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """[α ℓ(zΔ) − (1−α) ℓ(−zΔ)]/(2α−1) = ℓ(zΔ) − zΔ/(e^ε−1), ℓ = −log σ, in nats (B,): unbiased for the loss on the true
    label, unbounded below, of a variance like (2α−1)^−2. ValueError at ε = 0."""
    signed = _signed(margin, private_label)
    return softplus(-signed) - _debiasing_slope(noise, signed) * signed


def debiased_slope(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """∂ loss/∂Δ = −z [σ(−zΔ) + 1/(e^ε−1)], (B,)."""
    signed = _signed(margin, private_label)
    return -private_label.to(signed.dtype) * (torch.sigmoid(-signed) + _debiasing_slope(noise, signed))


# --- uncorrected (baseline) ----------------------------------------------------------------------------------------


def uncorrected_loss(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """Bradley-Terry on z as if nothing had been flipped, (B,), nats: a baseline; `noise` is validated and ignored."""
    known_noise(noise)
    return softplus(-_signed(margin, private_label))


def uncorrected_slope(margin: Tensor, private_label: Tensor, noise: AnyNoise) -> Tensor:
    """∂ loss/∂Δ = −z σ(−zΔ), (B,)."""
    known_noise(noise)
    signed = _signed(margin, private_label)
    return -private_label.to(signed.dtype) * torch.sigmoid(-signed)


def logistic_curvature(margin: Tensor, noise: AnyNoise) -> Tensor:
    """σ'(Δ), (B,): the second derivative of the debiased and the uncorrected loss, whatever the label."""
    known_noise(noise)
    return torch.exp(_log_sigmoid_slope(_widen(margin)))


# --- registry ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss: `value` and `slope` map (margin, private_label, noise) to (B,), `curvature` maps (margin, noise) to (B,)
    ≥ 0."""

    name: str
    value: Callable[[Tensor, Tensor, AnyNoise], Tensor]
    slope: Callable[[Tensor, Tensor, AnyNoise], Tensor]
    curvature: Callable[[Tensor, AnyNoise], Tensor]


LOSSES = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            PreferenceLoss("private_likelihood", private_likelihood_loss, private_likelihood_slope, fisher_weight),
            PreferenceLoss("private_least_squares", private_least_squares_loss, private_least_squares_slope,
                           least_squares_curvature),
            PreferenceLoss("debiased", debiased_loss, debiased_slope, logistic_curvature),
            PreferenceLoss("uncorrected", uncorrected_loss, uncorrected_slope, logistic_curvature),
        )
    }
)


def get_loss(name: str) -> PreferenceLoss:
    """Look a loss up by name; ValueError names the choices (and says why label smoothing is not among them)."""
    if name in LOSSES:
        return LOSSES[name]
    reason = f": {SMOOTHING_REFUSED}" if "smooth" in str(name) else ""
    raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {name!r}{reason}")
