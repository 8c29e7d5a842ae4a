"""What a given gain costs: draws from the Gibbs policy on true labels against randomised response on every label.

One prompt, eight actions with unit features in R³, a linear true reward; a fixed public list of pairs whose labels are
random. Utility is the mean true reward of a draw as a share of what the best action gains over π0 (uniform). Both
columns protect one label, under different trust:

- KL: a trusted curator holds the true labels and releases nothing but m draws. ε of the m draws together at δ = 10⁻⁶,
  by the instance form of the label-DP accountant and `repeated_draws`.
- Randomised response: nobody but the labeller needs to be trusted; everything may be released, any number of draws.
  ε of a label, δ = 0. The policy is the Gibbs policy of the private likelihood's fit at a small kl_coef.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.stats import bootstrap
from private_rlhf.reward_models.gibbs import gibbs_log_policy
from private_rlhf.validation.kl_dp import Array, loss
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.accounting.composition import repeated_draws
from private_rlhf_lab.accounting.draws import rlhf_label_instance_epsilon
from private_rlhf_lab.studies.kl_dp.records import bradley_terry, gram, width
from private_rlhf_lab.studies.kl_dp.search import OURS, Search, joined

DRAWS = (1, 100, 10_000)
DELTA = 1e-6
RADIUS = 1.0
RIDGE = 1.0
PRIVATE_RIDGE = 3.0  # the prior of a unit parameter in three dimensions
GREEDY = 0.02
TARGET = 0.8
KL_COEFS = np.geomspace(0.02, 3.0, 14)
EPSILONS = np.geomspace(0.04, 4.0, 12)


@dataclass(frozen=True)
class Curves:
    """kl_share (reps, k) at KL_COEFS, rr_share (reps, e) at EPSILONS; of one draw kl_epsilon (k,), the bound, and
    kl_loss (reps, k), the exact loss over all single flips of that repetition's labels.
    """

    kl_share: Array
    rr_share: Array
    kl_epsilon: Array
    kl_loss: Array


def measure(repetitions: int, pairs: int = 2000, seed: int = 7) -> Curves:
    """Simulates labels, fits and policies; bit-reproducible."""
    from private_rlhf.reward_models.linear import fit_linear

    generator = np.random.default_rng(seed)
    actions = generator.normal(size=(8, 3))
    actions /= np.linalg.norm(actions, axis=1, keepdims=True)
    truth = generator.normal(size=3)
    truth /= np.linalg.norm(truth)
    left = generator.integers(0, 8, pairs)
    right = (left + generator.integers(1, 8, pairs)) % 8
    phi_a, phi_b = actions[left], actions[right]
    difference = phi_a - phi_b
    likely = 1.0 / (1.0 + np.exp(-difference @ truth))
    value = actions @ truth

    def share(weights: Array, kl_coef: float) -> float:
        policy = np.exp(gibbs_log_policy(actions @ weights, np.zeros(8), kl_coef))
        return float((policy @ value - value.mean()) / (value.max() - value.mean()))

    kl_share = np.empty((repetitions, len(KL_COEFS)))
    kl_loss = np.empty_like(kl_share)
    rr_share = np.empty((repetitions, len(EPSILONS)))
    for repetition in range(repetitions):
        label = np.where(generator.random(pairs) < likely, 1.0, -1.0)
        exact, *flipped = _fits_of_all_flips(label[:, None] * difference)
        kl_share[repetition] = [share(exact, float(eta)) for eta in KL_COEFS]
        kl_loss[repetition] = [_largest_loss(exact, np.array(flipped), actions, float(eta)) for eta in KL_COEFS]
        for place, epsilon in enumerate(EPSILONS):
            kept = generator.random(pairs) < LabelNoise.of(float(epsilon)).keep_prob
            private = np.where(kept, label, -label)
            fit = fit_linear(phi_a, phi_b, private, float(epsilon), ridge=PRIVATE_RIDGE)
            rr_share[repetition, place] = share(fit.theta.numpy(), GREEDY)
    matrix = gram(np.ones((1, pairs)), difference, RIDGE)
    apart = (actions[:, None, :] - actions[None, :, :]).reshape(-1, 3)
    action_width, pair_width = float(width(apart, matrix).max()), float(width(difference, matrix).max())
    one = [rlhf_label_instance_epsilon(float(eta), RADIUS, action_width, pair_width) for eta in KL_COEFS]
    return Curves(kl_share, rr_share, np.array(one), kl_loss)


def _fits_of_all_flips(signed: Array) -> Array:
    """The fit on label times difference (n, d), then those with one label turned: one per distinct row; (1 + T, d)."""
    rows, counts = np.unique(signed, axis=0, return_counts=True)
    types = len(rows)
    turned = np.eye(types)
    base = np.concatenate([counts.astype(np.float64), np.zeros(types)])
    table = np.vstack([base, base + np.concatenate([-turned, turned], axis=1)])
    return bradley_terry(table, np.concatenate([rows, -rows]), RIDGE, RADIUS)


def _largest_loss(exact: Array, flipped: Array, actions: Array, kl_coef: float) -> float:
    """Largest exact loss of one draw, π0 uniform."""
    policy = gibbs_log_policy(exact @ actions.T, np.zeros(len(actions)), kl_coef)
    return float(loss(policy, gibbs_log_policy(flipped @ actions.T, np.zeros(len(actions)), kl_coef)).max())


def search(curves: Curves) -> Search:
    """The exact loss of one draw on these data sets against the accountant's bound for their features."""
    claim = "RLHF, label DP for the given features, 2000 random pairs"
    return joined(claim, f"{OURS} Theorem 3, instance form", [curves.kl_loss / curves.kl_epsilon])


def kl_cost(curves: Curves, draws: int) -> Array:
    """ε of `draws` draws at DELTA for every KL_COEFS, (k,)."""
    return np.array([repeated_draws(float(each), 0.0, draws, DELTA).epsilon for each in curves.kl_epsilon])


def cost_at(share: Array, epsilon: Array, target: float) -> float:
    """ε at which the mean share reaches `target`, interpolated in log ε; share (n,) follows epsilon (n,) upwards.

    NaN where the curve does not reach the target.
    """
    order = np.argsort(epsilon)
    rising = np.maximum.accumulate(share[order])
    if not rising[0] <= target <= rising[-1]:
        return float("nan")
    first = int(np.searchsorted(rising, target))
    low, high = max(first - 1, 0), first
    weight = 0.0 if rising[high] == rising[low] else (target - rising[low]) / (rising[high] - rising[low])
    logs = np.log(epsilon[order])
    return float(np.exp(logs[low] + weight * (logs[high] - logs[low])))


def claims(curves: Curves, resamples: int = 400, seed: int = 8) -> Iterator[Claim]:
    """KL's ε over randomised response's at TARGET, per number of draws, with a paired bootstrap over repetitions."""
    shares = np.concatenate([curves.kl_share, curves.rr_share], axis=1).T
    for draws in DRAWS:

        def ratio(drawn: Array, cost: Array = kl_cost(curves, draws)) -> float:  # noqa: B008
            kl, rr = np.split(drawn.mean(axis=1), [len(KL_COEFS)])
            return cost_at(kl, cost, TARGET) / cost_at(rr, EPSILONS, TARGET)

        found = bootstrap(ratio, shares, seed, resamples)  # NaN, so refuted, where the grids do not reach TARGET
        yield within(
            f"At {TARGET:.0%} of the gain, {draws} KL draw{'s' * (draws > 1)} (trusted curator) cost less epsilon than"
            " randomised response (no trust)", "this project", found, high=1.0,
            what=f"epsilon of {draws} draws at delta {DELTA:g} / epsilon of randomised response")


def table(curves: Curves) -> list[dict[str, object]]:
    """Rows for equal_utility.csv."""
    kl, greedy = curves.kl_share.mean(axis=0), np.full(len(EPSILONS), GREEDY)
    arms: list[tuple[str, object, Array, Array, Array]] = [
        *(("kl", draws, KL_COEFS, kl, kl_cost(curves, draws)) for draws in DRAWS),
        ("kl, exact loss", 1, KL_COEFS, kl, curves.kl_loss.max(axis=0)),
        ("randomized_response", "any", greedy, curves.rr_share.mean(axis=0), EPSILONS),
    ]
    return [
        {"arm": arm, "draws": draws, "kl_coef": eta, "share_of_gain": share, "epsilon": epsilon}
        for arm, draws, *columns in arms
        for eta, share, epsilon in zip(*columns, strict=True)
    ]
