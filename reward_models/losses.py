"""Per-example losses for preference labels that went through randomised response.

Conventions. `margin` Δ (B,) is r(s, a) − r(s, b). `private_label` z (B,) in {−1, +1} says which response the *released*
label prefers. `epsilon` is the label-LDP parameter: the label was kept with probability α = e^ε/(1+e^ε). Losses take ε,
not α, because a float α is already 1 at ε = 37 and 1 − α is then lost; log α = −softplus(−ε) and log(1−α) =
−softplus(ε) are exact. `math.inf` means a label that was never flipped, 0 a label that carries nothing.

Every function is pure, keeps the shape (B,), works in float32 (float64 stays float64; half types are widened) and is
finite for |Δ| up to 1e4 and any ε in [0, ∞]. Sources: "Eq." numbers are those of the private preference-learning paper
(randomised response Eq. 7, likelihood Eq. 8-9, least squares Algorithm 2 step 8).

The trap of label smoothing: cross-entropy with smoothed targets (α, 1−α) on labels that are *already* flipped corrects
in the wrong direction. Its minimiser shrinks margins a second time, below even the uncorrected loss. It is therefore
not in the registry, and asking for it is refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

LossFunction = Callable[[Tensor, Tensor, float], Tensor]
CurvatureFunction = Callable[[Tensor, float], Tensor]

SMOOTHING_REFUSED = "smoothing labels that were already randomised shrinks every margin a second time"


def check_epsilon(epsilon: float, *, allow_zero: bool = True) -> float:
    """Return `epsilon` if it lies in [0, ∞] (in (0, ∞] without `allow_zero`); ValueError otherwise."""
    value = float(epsilon)
    if math.isnan(value) or value < 0 or (value == 0 and not allow_zero):
        allowed = "at least 0" if allow_zero else "above 0"
        raise ValueError(f"epsilon must be {allowed} (math.inf for labels that were not randomised), not {epsilon!r}")
    return value


def keep_prob(epsilon: float) -> float:
    """α = e^ε/(1+e^ε) in [0.5, 1] (Eq. 7). A float: 1.0 from ε = 37 on, so use it for display, not inside losses."""
    return 1.0 / (1.0 + math.exp(-check_epsilon(epsilon)))


def privacy_factor(epsilon: float) -> float:
    """2α − 1 = tanh(ε/2) in [0, 1]: the factor by which randomised response shrinks every signal."""
    return math.tanh(check_epsilon(epsilon) / 2.0)


def _widen(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _signed(margin: Tensor, private_label: Tensor) -> Tensor:
    """zΔ in at least float32; ValueError when the shapes differ (broadcasting would hide a bug)."""
    if margin.shape != private_label.shape:
        raise ValueError(
            f"margin has shape {tuple(margin.shape)} but private_label {tuple(private_label.shape)}; "
            "pass one label a pair"
        )
    margin = _widen(margin)
    return margin * private_label.to(margin.dtype)


def _sigmoid(values: Tensor) -> Tensor:
    """σ(x) with a derivative that keeps its relative precision in both tails (σ(1−σ) does not where σ rounds to 1)."""
    return torch.exp(logsigmoid(values))


def _log_sigmoid_slope(values: Tensor) -> Tensor:
    """log σ'(x) = log σ(x) + log σ(−x)."""
    return logsigmoid(values) + logsigmoid(-values)


# --- private likelihood (Eq. 8-9) ----------------------------------------------------------------------------------


class _PrivateNegativeLogLikelihood(torch.autograd.Function):
    """−log P of x = zΔ for finite ε, with P = α σ(x) + (1−α) σ(−x) and its derivatives in cancellation-free form.

    Autograd through logaddexp would form the gradient as a difference of two nearly equal weights, which loses all
    digits as ε → 0. Both backward passes are differentiable, so derivatives of any order are exact.
    """

    @staticmethod
    def forward(ctx: Any, signed: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(signed)
        ctx.epsilon = epsilon
        return _mixture_nll(signed, epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (signed,) = ctx.saved_tensors
        return -grad * _PrivateScore.apply(signed, ctx.epsilon), None


class _PrivateScore(torch.autograd.Function):
    """w = ∂ log P/∂x = (2α−1) σ'(x)/P > 0, and w' = −w [σ(x) − σ(−x) (1−α)/P]: the loss is concave where that is
    positive.
    """

    @staticmethod
    def forward(ctx: Any, signed: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(signed)
        ctx.epsilon = epsilon
        return privacy_factor(epsilon) * torch.exp(_log_sigmoid_slope(signed) + _mixture_nll(signed, epsilon))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (signed,) = ctx.saved_tensors
        flipped = torch.exp(_log_flip(ctx.epsilon) + _PrivateNegativeLogLikelihood.apply(signed, ctx.epsilon))
        bend = _sigmoid(-signed) * flipped - _sigmoid(signed)
        return grad * bend * _PrivateScore.apply(signed, ctx.epsilon), None


def _log_flip(epsilon: float) -> float:
    """log(1−α) for finite ε."""
    return -math.log1p(math.exp(-epsilon)) - epsilon


def _mixture_nll(signed: Tensor, epsilon: float) -> Tensor:
    if math.isinf(epsilon):
        return softplus(-signed)
    log_keep = -math.log1p(math.exp(-epsilon))
    return -torch.logaddexp(log_keep + logsigmoid(signed), _log_flip(epsilon) + logsigmoid(-signed))


def private_likelihood_loss(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """−log P̃(z) with P̃(z) = α σ(zΔ) + (1−α) σ(−zΔ) (Eq. 8-9), in nats, (B,) ≥ 0.

    At ε = ∞ this is the Bradley-Terry loss exactly; at ε = 0 it is log 2 with zero gradient. Not convex in Δ for α < 1.
    """
    epsilon = check_epsilon(epsilon)
    signed = _signed(margin, private_label)
    if math.isinf(epsilon):
        return softplus(-signed)
    return _PrivateNegativeLogLikelihood.apply(signed, epsilon)


def private_likelihood_slope(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """∂ loss/∂Δ = −z (2α−1) σ'(Δ)/P̃(z), (B,), between −1 and 1."""
    epsilon = check_epsilon(epsilon)
    signed = _signed(margin, private_label)
    label = private_label.to(signed.dtype)
    if math.isinf(epsilon):
        return -label * torch.sigmoid(-signed)
    return -label * privacy_factor(epsilon) * torch.exp(_log_sigmoid_slope(signed) + _mixture_nll(signed, epsilon))


def fisher_weight(margin: Tensor, epsilon: float) -> Tensor:
    """Expected information of one private label about its margin: (2α−1)² σ'(Δ)²/(P̃(1−P̃)), (B,) in [0, 1/4]."""
    epsilon = check_epsilon(epsilon)
    margin = _widen(margin)
    if math.isinf(epsilon):
        return torch.exp(_log_sigmoid_slope(margin))
    log_weight = 2.0 * _log_sigmoid_slope(margin) + _mixture_nll(margin, epsilon) + _mixture_nll(-margin, epsilon)
    return privacy_factor(epsilon) ** 2 * torch.exp(log_weight)


# --- private least squares (Algorithm 2 step 8) --------------------------------------------------------------------


def _least_squares_error(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """z − (2σ(Δ)−1)(2α−1), times z: 2 [(1−α) + (2α−1) σ(−zΔ)], (B,) in [0, 2], free of cancellation."""
    flip = 0.0 if math.isinf(epsilon) else math.exp(-epsilon) / (1.0 + math.exp(-epsilon))
    return 2.0 * (flip + privacy_factor(epsilon) * _sigmoid(-_signed(margin, private_label)))


def private_least_squares_loss(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """[(2σ(Δ)−1)(2α−1) − z]², (B,) in [0, 4]: the squared error of the label's conditional mean."""
    return _least_squares_error(margin, private_label, check_epsilon(epsilon)).square()


def private_least_squares_slope(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """∂ loss/∂Δ = 4 (2α−1) σ'(Δ) [(2σ(Δ)−1)(2α−1) − z], (B,)."""
    error = _least_squares_error(margin, private_label, check_epsilon(epsilon))
    margin = _widen(margin)
    slope = torch.exp(_log_sigmoid_slope(margin))
    return -4.0 * privacy_factor(epsilon) * slope * private_label.to(margin.dtype) * error


def least_squares_curvature(margin: Tensor, epsilon: float) -> Tensor:
    """Gauss-Newton (= expected) curvature 8 (2α−1)² σ'(Δ)², (B,)."""
    return 8.0 * privacy_factor(epsilon) ** 2 * torch.exp(2.0 * _log_sigmoid_slope(_widen(margin)))


# --- debiased ("robust", rDPO-style) -------------------------------------------------------------------------------


def _debiasing_slope(epsilon: float) -> float:
    """(1−α)/(2α−1) = 1/(e^ε − 1), in [0, ∞)."""
    epsilon = check_epsilon(epsilon, allow_zero=False)
    return 0.0 if epsilon > 700.0 else 1.0 / math.expm1(epsilon)


def debiased_loss(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """[α ℓ(zΔ) − (1−α) ℓ(−zΔ)]/(2α−1) with ℓ = −log σ: unbiased for the loss on the true label; (B,), nats.

    Because ℓ(−x) = ℓ(x) + x this is ℓ(zΔ) − zΔ/(e^ε−1): convex, consistent, but unbounded below per example, with a
    variance that grows like (2α−1)^−2 everywhere rather than only where the data are uninformative.
    ValueError at ε = 0, where it does not exist.
    """
    weight = _debiasing_slope(epsilon)
    signed = _signed(margin, private_label)
    return softplus(-signed) - weight * signed


def debiased_slope(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """∂ loss/∂Δ = −z [σ(−zΔ) + 1/(e^ε−1)], (B,)."""
    signed = _signed(margin, private_label)
    return -private_label.to(signed.dtype) * (torch.sigmoid(-signed) + _debiasing_slope(epsilon))


# --- uncorrected (baseline) ----------------------------------------------------------------------------------------


def uncorrected_loss(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """Bradley-Terry on z as if nothing had been flipped, (B,), nats. A baseline only: ε is validated and ignored.

    It converges to the log-odds of P̃ instead of Δ: a true margin of 2 becomes 0.08, 0.38, 1.33 at ε = 0.1, 0.5, 2.
    """
    check_epsilon(epsilon)
    return softplus(-_signed(margin, private_label))


def uncorrected_slope(margin: Tensor, private_label: Tensor, epsilon: float) -> Tensor:
    """∂ loss/∂Δ = −z σ(−zΔ), (B,)."""
    check_epsilon(epsilon)
    signed = _signed(margin, private_label)
    return -private_label.to(signed.dtype) * torch.sigmoid(-signed)


def logistic_curvature(margin: Tensor, epsilon: float) -> Tensor:
    """σ'(Δ), (B,): the second derivative of the debiased and the uncorrected loss, whatever the label."""
    check_epsilon(epsilon)
    return torch.exp(_log_sigmoid_slope(_widen(margin)))


# --- registry ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss with its first derivative and a non-negative curvature for scoring iterations.

    `value` and `slope` map (margin, private_label, epsilon) to (B,); `curvature` maps (margin, epsilon) to (B,) ≥ 0.
    """

    name: str
    value: LossFunction
    slope: LossFunction
    curvature: CurvatureFunction


_LOSSES = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            PreferenceLoss("private_likelihood", private_likelihood_loss, private_likelihood_slope, fisher_weight),
            PreferenceLoss(
                "private_least_squares",
                private_least_squares_loss,
                private_least_squares_slope,
                least_squares_curvature,
            ),
            PreferenceLoss("debiased", debiased_loss, debiased_slope, logistic_curvature),
            PreferenceLoss("uncorrected", uncorrected_loss, uncorrected_slope, logistic_curvature),
        )
    }
)


def loss_names() -> tuple[str, ...]:
    """Names that `get_loss` knows; the first is the default."""
    return tuple(_LOSSES)


def get_loss(name: str) -> PreferenceLoss:
    """Look a loss up by name; ValueError names the choices (and says why label smoothing is not among them)."""
    if name in _LOSSES:
        return _LOSSES[name]
    choices = ", ".join(_LOSSES)
    if "smooth" in name:
        raise ValueError(f"loss {name!r} is refused: {SMOOTHING_REFUSED}; choose one of {choices}")
    raise ValueError(f"unknown loss {name!r}; choose one of {choices}")
