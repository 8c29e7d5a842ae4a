"""The methods, each a function of the same labels. What a method adds is written out; what all share is not repeated.

Every arm that fits a reward chooses its ridge among `ridges_of` by the labels of a held-out fifth of the prompts and
fits all labels again: equal effort for all, but not equal priors. Its score there is the likelihood of z, or its own
loss where it does not know α. The policy is π_ref·exp(r̂/kl_coef) unless the method has another. `trust`: who sees true
labels.

    uncorrected        Bradley–Terry on z as if nothing had been flipped
    smoothing          conservative DPO's loss: targets (α, 1−α) on labels that were flipped already
    debiased           rDPO (Chowdhury, Kini, Natarajan 2024), "unbiased RR"
    least squares      PPKL Algorithm 2, step 8
    square chi-PO      arXiv 2505.21395: the same loss (its square loss on probabilities has that minimiser), and the
                       policy of the mixed χ² and KL regulariser: n·w + log(n·w) = (r̂ − c)/kl_coef
    PROPS              arXiv 2508.06783: half the labels train a first model by unbiased RR; the other half are combined
                       with its predictions by maximum likelihood (of two answers that differ, the more reliable one's;
                       the first model's reliability follows from how often they agree), and train the second
    PROPS, both        the same, and the second model learns from the first half's labels too
    LP-2ST             Ghazi et al. 2021: the same halves; RRWithPrior answers with the prediction where the first
                       model is surer than α, else with randomised response; the second model learns from both halves
    private MLE        PPKL Eq. 9
      evidence         its ridge of the largest marginal likelihood (`reward_models.evidence`) in the place of the fifth
      pessimism        r̄ − Γ, κ = 1 (PPKL Algorithm 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import AnyNoise, LevelledNoise
from private_rlhf.reward_models.linear import PairProblem, minimize
from private_rlhf.reward_models.losses import (
    PreferenceLoss,
    get_loss,
    logistic_curvature,
    uncorrected_loss,
    uncorrected_slope,
)
from private_rlhf.reward_models.ridge import ridge_by_evidence, ridge_from_margin_scale
from scipy.special import wrightomega
from torch import Tensor

from private_rlhf_lab.league.beds import Bed, Labels

MARGIN_SCALES = (0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.7, 3.0)


@dataclass(frozen=True)
class Outcome:
    """reward (M′, N′) of the held-out answers, and the policy over them."""

    reward: Tensor
    policy: Tensor


@dataclass(frozen=True)
class Fit:
    """theta (k,), information H (k, k) with the ridge in it."""

    theta: Tensor
    information: Tensor

    def gamma(self, x: Tensor) -> Tensor:
        """Γ = √(g̃ᵀH⁻¹g̃), centred over the draws of a prompt: (M, N, k) -> (M, N)."""
        centred = (x - x.mean(dim=1, keepdim=True)).reshape(-1, x.shape[-1])
        solved = torch.linalg.solve_triangular(torch.linalg.cholesky(self.information), centred.T, upper=False)
        return torch.linalg.vector_norm(solved, dim=0).reshape(x.shape[:2])


Arm = Callable[[Bed, Labels], Outcome]


# --- fits -------------------------------------------------------------------------------------------------------------


def problem_of(labels: Labels, loss: PreferenceLoss) -> PairProblem:
    """The fit of one loss to these labels."""
    return PairProblem(labels.x, torch.zeros(1, dtype=torch.float64), labels.z, labels.noise, None, loss)


def fit_at(
    labels: Labels, loss: PreferenceLoss, ridge: float, start: Tensor | None = None, tolerance: float = 1e-5
) -> Fit:
    """One fit."""
    problem = problem_of(labels, loss)
    zero = torch.zeros(labels.x.shape[1], dtype=torch.float64)
    theta = minimize(problem, ridge, zero if start is None else start, tolerance=tolerance)
    information = problem.information(theta)
    information.diagonal().add_(ridge)
    return Fit(theta, information)


def fit(bed: Bed, labels: Labels, loss: PreferenceLoss, score: PreferenceLoss | None = None) -> Fit:
    """With the ridge that a fifth of the prompts judges best by `score`, default the likelihood of z."""
    if loss.name not in labels.fits:
        score = score or get_loss("private_likelihood")
        labels.fits[loss.name] = fit_among(ridges_of(labels), bed, labels, loss, score)
    made: Fit = labels.fits[loss.name]
    return made


def ridges_of(labels: Labels) -> list[float]:
    """The eight ridges; as numbers they are the same for every loss, so that as priors they are not."""
    return [ridge_from_margin_scale(scale, labels.x.shape[1]) for scale in MARGIN_SCALES]


def fit_among(ridges: list[float], bed: Bed, labels: Labels, loss: PreferenceLoss, score: PreferenceLoss) -> Fit:
    """With the one of `ridges` that a fifth of the prompts judges best by `score`."""
    out = torch.isin(labels.prompt, _a_fifth(bed, labels.seed))
    if not out.any() or out.all():
        return fit_at(labels, loss, ridges[3])
    training, judging = problem_of(labels.rows(~out), loss), problem_of(labels.rows(out), score)
    found, theta = [], torch.zeros(labels.x.shape[1], dtype=torch.float64)
    for ridge in ridges:
        theta = minimize(training, ridge, theta, tolerance=1e-3)
        found.append((judging.total_loss(theta), ridge, theta))
    _, ridge, theta = min(found, key=lambda row: row[0])
    return fit_at(labels, loss, ridge, theta)


def _a_fifth(bed: Bed, seed: int) -> Tensor:
    order = torch.randperm(len(bed.x), generator=torch.Generator().manual_seed(seed))
    return order[: len(order) // 5]


def gibbs(bed: Bed, made: Fit, kappa: float = 0.0) -> Outcome:
    """π_ref·exp((r̄ − κΓ)/kl_coef) among the held-out draws."""
    reward = bed.held_x @ made.theta
    if kappa:
        reward = reward - kappa * made.gamma(bed.held_x)
    return Outcome(reward, torch.softmax(reward / bed.kl_coef, dim=1))


# --- losses and policies of others ------------------------------------------------------------------------------------


def smoothed_loss(margin: Tensor, label: Tensor, noise: AnyNoise) -> Tensor:
    """α ℓ(zΔ) + (1−α) ℓ(−zΔ), ℓ the logistic loss."""
    assert not isinstance(noise, LevelledNoise)
    noise = LabelNoise.of(noise)
    return noise.keep_prob * uncorrected_loss(margin, label, noise) + noise.flip_prob * uncorrected_loss(
        margin, -label, noise
    )


def smoothed_slope(margin: Tensor, label: Tensor, noise: AnyNoise) -> Tensor:
    """Its derivative in Δ."""
    assert not isinstance(noise, LevelledNoise)
    noise = LabelNoise.of(noise)
    return noise.keep_prob * uncorrected_slope(margin, label, noise) + noise.flip_prob * uncorrected_slope(
        margin, -label, noise
    )


SMOOTHING = PreferenceLoss("smoothing", smoothed_loss, smoothed_slope, logistic_curvature)


def chi_squared_policy(reward: Tensor, coefficient: float) -> Tensor:
    """w (M, N) with u + log u = (r − c)/coefficient, u = N·w, c such that Σ w = 1: by bisection, to 1e-12 nats."""
    scaled = (reward / coefficient).numpy()
    low, high = scaled.min(axis=1, keepdims=True) - 1.0, scaled.max(axis=1, keepdims=True) - 1.0  # ω(1) = 1
    while (high - low).max() > 1e-12:
        middle = (low + high) / 2
        above = wrightomega(scaled - middle).real.mean(axis=1, keepdims=True) > 1.0
        low, high = (middle * above + low * ~above), (high * above + middle * ~above)
        if not ((low < (low + high) / 2) & ((low + high) / 2 < high)).any():
            break
    weights = torch.from_numpy(wrightomega(scaled - (low + high) / 2).real)
    return weights / weights.sum(dim=1, keepdim=True)


def halves(bed: Bed, labels: Labels) -> tuple[Labels, Labels]:
    """By prompt, at random."""
    if "halves" not in labels.fits:
        generator = torch.Generator().manual_seed(labels.seed + 1)
        one = torch.rand(len(bed.x), generator=generator)[labels.prompt] < 0.5
        labels.fits["halves"] = labels.rows(one), labels.rows(~one)
    first, second = labels.fits["halves"]
    return first, second


# --- arms -------------------------------------------------------------------------------------------------------------


def by_loss(name: str) -> Arm:
    """A loss of `private_rlhf.reward_models.losses`."""
    loss = get_loss(name)
    return lambda bed, labels: gibbs(bed, fit(bed, labels, loss, loss if name == "uncorrected" else None))


def smoothing(bed: Bed, labels: Labels) -> Outcome:
    """Judged by its own loss."""
    return gibbs(bed, fit(bed, labels, SMOOTHING, SMOOTHING))


def square_chi_po(bed: Bed, labels: Labels) -> Outcome:
    """Least squares, and the policy of χ² and KL."""
    reward = bed.held_x @ fit(bed, labels, get_loss("private_least_squares")).theta
    return Outcome(reward, chi_squared_policy(reward, bed.kl_coef))


def props(bed: Bed, labels: Labels, both: bool = False) -> Outcome:
    """Two stages."""
    first, second = halves(bed, labels)
    if not len(first.z) or not len(second.z):
        return by_loss("uncorrected")(bed, labels)
    model = fit(bed, first, get_loss("debiased"))
    said = torch.where(second.x @ model.theta >= 0, 1.0, -1.0).double()
    agree = float((said == second.z).double().mean())
    noise = labels.noise
    reliability = (agree - noise.flip_prob) / noise.factor  # agree = α g + (1−α)(1−g)
    combined = second.relabelled(said if reliability > noise.keep_prob else second.z)
    if both:
        combined = joined(first, combined)
    plain = get_loss("uncorrected")
    return gibbs(bed, fit(bed, combined, plain, plain))


def lp_2st(bed: Bed, labels: Labels) -> Outcome:
    """Two stages; for two classes RRWithPrior is either the prediction or randomised response."""
    first, second = halves(bed, labels)
    plain = get_loss("uncorrected")
    if not len(first.z) or not len(second.z):
        return by_loss("uncorrected")(bed, labels)
    model = fit(bed, first, plain, plain)
    margin = second.x @ model.theta
    sure = torch.sigmoid(margin.abs()) > labels.noise.keep_prob
    z = torch.where(sure, torch.where(margin >= 0, 1.0, -1.0).double(), second.z)
    return gibbs(bed, fit(bed, joined(first, second.relabelled(z)), plain, plain))


def joined(one: Labels, other: Labels) -> Labels:
    """All of both; the noise of the first."""
    parts = [(each.x, each.prompt, each.y, each.z) for each in (one, other)]
    x, prompt, y, z = (torch.cat(pair) for pair in zip(*parts, strict=True))
    return Labels(x, prompt, y, z, one.noise, one.seed)


def by_evidence(bed: Bed, labels: Labels, kappa: float = 0.0) -> Outcome:
    """The private MLE with the ridge of the largest evidence."""
    if "evidence" not in labels.fits:
        zero = torch.zeros(1, dtype=torch.float64)
        ridge = ridge_by_evidence(labels.x, zero, labels.z, labels.noise, None)
        labels.fits["evidence"] = fit_at(labels, get_loss("private_likelihood"), ridge)
    return gibbs(bed, labels.fits["evidence"], kappa)


def pessimism(bed: Bed, labels: Labels) -> Outcome:
    """PPKL Algorithm 1."""
    return gibbs(bed, fit(bed, labels, get_loss("private_likelihood")), kappa=1.0)


OURS = "private MLE"
PUBLISHED: Mapping[str, Arm] = {
    "uncorrected": by_loss("uncorrected"),
    "smoothing": smoothing,
    "debiased": by_loss("debiased"),
    "least squares": by_loss("private_least_squares"),
    "square chi-PO": square_chi_po,
    "PROPS": props,
    "PROPS, both": lambda bed, labels: props(bed, labels, both=True),
    "LP-2ST": lp_2st,
}
"""On randomised labels; nobody but the labeller sees a true one."""
PROJECT: Mapping[str, Arm] = {
    OURS: by_loss("private_likelihood"),
    "private MLE, evidence": by_evidence,
    "private MLE, pessimism": pessimism,
    "private MLE, evidence, pessimism": lambda bed, labels: by_evidence(bed, labels, 1.0),
}
ARMS: Mapping[str, Arm] = {**PUBLISHED, **PROJECT}
