"""One draw from a KL-regularised (Gibbs) policy as a differentially private release: bandit, linear bandit, RLHF.

The policy is π(a|s) ∝ π0(a|s)·exp(u(s, a)/η), the exact optimum of E[u] − η·KL(π‖π0), with u a pessimistic reward
estimate. A neighbouring data set changes u by d, and the log-likelihood ratio of the draw lies in an interval of length
range(d)/η: so every ε here is a range bound, and `composition.repeated_draws` may use ε²/8-zCDP. (With P ∝ π0 e^f and Q
∝ π0 e^{f+d}, log Q/P = d − log E_P e^d, and that logarithm lies between min d and max d: Lemma 1 with range(d) for 2Δ.)

Theorem and lemma numbers are those of "KL-regularization Itself is Differentially Private in Bandits and RLHF", here
the KL-DP paper. Its statements are corrected: Lemma 1's δ must bound the mass outside under *both* neighbours; a
bandit needs no factor 2 and the others one penalty term, not two; the curvature γ is that of differences of norm 2F;
and the likelihood needs a ridge. `python -m private_rlhf_lab.studies kl_dp` checks each against brute force.

What is covered: *draws* from the exact policy with features and π0 that do not depend on the data. Not weights,
probabilities, PPO policies, tuned backbones, nor the private likelihood. η, the pessimism level, the ridge and the
bounds must not be tuned on the private data, and coverage numbers (counts, λ_min) must hold for both neighbours or be
fixed in advance: an ε computed from private features is not itself covered.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from private_rlhf.accounting.epsilon_delta import (
    Guarantee,
    OutsideAssumptions,
    count,
    guarantee,
    not_negative,
    positive,
    probability,
)

ADD_REMOVE = "neighbours differ by one record added or removed"
LABEL = "neighbours differ in one label; prompts, responses and features are the same and public"
GIBBS = "the draw is from the exact policy, pi proportional to pi0 * exp(u / kl_coef); pi0 is independent of the data"
FIXED = "kl_coef, the pessimism level, the ridge and every bound were fixed without looking at the private data"
DRAW_ONLY = "only the draw is released: no weights, probabilities or scores"


def inverse_root_drop(start: float, step: float = 1.0) -> float:
    """g_c(x) = x^(−1/2) − (x + c)^(−1/2) for x, c > 0, without cancellation."""
    low, high = math.sqrt(start), math.sqrt(start + step)
    return step / (low * high * (low + high))


@dataclass(frozen=True)
class Thresholds:
    """The split of actions behind an approximate guarantee of the linear and RLHF policies.

    Actions with ‖φ‖_{Σ'^−1} > `tau` (Σ' of the larger set) make up A2, those with ‖φ‖_{Σ^−1} ≤ `core` (Σ of the smaller
    set; core < tau) make up G. reference_odds: π0(A2)/π0(G), an upper bound for every prompt, > 0. separation ω: the
    largest ‖φ_a − φ_g‖₂ between A2 and G, 2·feature_norm if None. No unit: norms are features over √Σ.
    """

    tau: float
    core: float
    reference_odds: float
    separation: float | None = None

    def check(self) -> Thresholds:
        """Itself; OutsideAssumptions if 0 ≤ core < tau or odds > 0 is violated."""
        positive("tau", self.tau)
        not_negative("core", self.core)
        positive("reference_odds", self.reference_odds)
        if self.separation is not None:
            positive("separation", self.separation)
        if self.core >= self.tau:
            raise OutsideAssumptions("core", f"must be below tau = {self.tau!r}, got {self.core!r}; lower it")
        return self


def tail_mass(reference_odds: float, kl_coef: float, penalty_gap: float, reward_gap: float) -> float:
    """δ = odds·exp(−(penalty_gap − reward_gap)/η): the mass a policy can give to actions penalised by penalty_gap more.

    May exceed 1, where it promises nothing. The reward gap bounds how much better than G such an action may look. Never
    0, which would be another promise: where the exponential underflows it is the least normal number.
    """
    exponent = (reward_gap - penalty_gap) / kl_coef + math.log(reference_odds)
    return max(math.exp(exponent), sys.float_info.min) if exponent < 700.0 else math.inf


# --- multi-armed bandit ----------------------------------------------------------------------------------------------


def bandit_epsilon(kl_coef: float, pessimism: float, reward_range: float, min_count: int) -> float:
    """ε0(M) = [R/(M+1) + β·g(M)]/η: range of the log ratio if the arm of the differing record had M ≥ 1 records.

    Theorem 1, pure part: the arm's mean moves by at most R/(M+1), its penalty by β·g(M), one arm's utility moves and
    so the range is their sum, without a factor 2. Attained.
    """
    positive("kl_coef", kl_coef)
    not_negative("pessimism", pessimism)
    positive("reward_range", reward_range)
    count("min_count", min_count)
    return (reward_range / (min_count + 1) + pessimism * inverse_root_drop(min_count)) / kl_coef


def bandit_pure(kl_coef: float, pessimism: float, reward_range: float, min_count: int) -> Guarantee:
    """One pull of the Gibbs policy of u(a) = mean reward − β/√N(a): ε0(M)-DP, δ = 0.

    Theorem: Theorem 1, pure part (tight). Assumes rewards in an interval of length R = `reward_range`, and every
    arm with at least M = `min_count` ≥ 1 records in *both* neighbours: for data whose smallest count is m, removals
    included, pass m − 1. Units: η (`kl_coef`), β (`pessimism`, reward·√records) and R in reward units.
    Fails: an arm that one neighbour lacks altogether has infinite loss; then use `bandit_approximate`.
    """
    epsilon = bandit_epsilon(kl_coef, pessimism, reward_range, min_count)
    assumptions = (
        ADD_REMOVE,
        f"every arm has at least {min_count} records in both neighbouring data sets (if that is the count in yours,"
        " pass one less)",
        f"rewards lie in an interval of length {reward_range:g}; utility = mean reward - pessimism / sqrt(count)",
        GIBBS,
        FIXED,
        DRAW_ONLY,
    )
    return guarantee(epsilon, 0.0, "one action drawn from the bandit policy", assumptions)


def bandit_unconditional(kl_coef: float, pessimism: float, reward_range: float) -> Guarantee:
    """As `bandit_pure` for every data set: an arm without records has mean reward 0 and counts as one record in β/√N.

    Theorem 1, convention B: ε = max(R, R/2 + β·g(1))/η, rewards in [0, R]; the first record of an arm moves its mean by
    at most R and no penalty, each later one as at M = 1. Attained.
    """
    epsilon = max(reward_range / positive("kl_coef", kl_coef), bandit_epsilon(kl_coef, pessimism, reward_range, 1))
    rewards = f"rewards lie in [0, {reward_range:g}]; an arm without records has mean reward 0 and penalty pessimism"
    return guarantee(epsilon, 0.0, "one action drawn from the bandit policy", (ADD_REMOVE, rewards, GIBBS, DRAW_ONLY))


def bandit_approximate(
    kl_coef: float,
    pessimism: float,
    reward_range: float,
    max_count: int,
    coverage_ratio: float,
    reference_mass: float,
) -> Guarantee:
    """One pull without coverage of every arm: (ε0(M), δ) with M = ⌊c·N⌋ and δ = exp(−[β(M^−½ − N^−½) − R]/η)/p.

    Theorem: Theorem 1, approximate part, and Corollary 1. Arms with fewer than M records are chosen with probability at
    most δ under both neighbours, as their penalty exceeds that of a* by β(M^−½ − N^−½) and their reward by at most R;
    the others satisfy ε0(M). Assumes: N = `max_count`, the count of the most-pulled arm
    a* in the smaller neighbour; 0 < c < 1 (`coverage_ratio`) with ⌊cN⌋ ≥ 1; p = `reference_mass` = π0(a*), in (0, 1];
    arms without any record have probability 0. Units as in `bandit_pure`.
    Fails: δ ≥ 1 (reported as vacuous) unless β(M^−½ − N^−½) exceeds R + η·log(1/p).
    """
    count("max_count", max_count, 2)
    probability("coverage_ratio", coverage_ratio)
    probability("reference_mass", reference_mass, one=True)
    # ⌊c·N⌋ of the decimal numbers that were meant: 0.29·100 is 28.999… in floating point.
    threshold = math.floor(coverage_ratio * max_count * (1.0 + 1e-12))
    if not 1 <= threshold < max_count:
        raise OutsideAssumptions(
            "coverage_ratio", f"times max_count must be at least 1, got {coverage_ratio * max_count:.3g}; raise one"
        )
    epsilon = bandit_epsilon(kl_coef, pessimism, reward_range, threshold)
    gap = pessimism * inverse_root_drop(threshold, max_count - threshold)
    delta = tail_mass(1.0 / reference_mass, kl_coef, gap, reward_range)
    assumptions = (
        ADD_REMOVE,
        f"in the smaller neighbour the most-pulled arm has at least {max_count} records, and pi0 gives it at least"
        f" {reference_mass:g}; no coverage of the other arms",
        f"rewards lie in an interval of length {reward_range:g}; utility = mean reward - pessimism / sqrt(count), and"
        " an arm without records is never drawn",
        GIBBS,
        FIXED,
        DRAW_ONLY,
    )
    return guarantee(epsilon, delta, "one action drawn from the bandit policy", assumptions, count_threshold=threshold)


# --- linear contextual bandit ----------------------------------------------------------------------------------------


def linear_epsilon(
    kl_coef: float,
    pessimism: float,
    reward_abs_max: float,
    lambda_min: float,
    rows: int,
    *,
    tau: float | None = None,
    parameter_norm: float | None = None,
) -> float:
    """Range of the log ratio of one draw of the linear policy, divided by η included.

    Theorem 2: [2R(1+√(N/μ))/√(μ(μ+1)) + β·g(μ)]/η (by Sherman–Morrison; the residual of the new row is at most
    R(1+√(N/μ)), and the penalty moves one way, so it counts once); with `tau` its approximate part, over actions with
    ‖φ‖_{Σ'^−1} ≤ τ; with `parameter_norm` B the ridge is constrained to ‖θ‖ ≤ B and R√(N/μ) becomes B.
    """
    positive("kl_coef", kl_coef)
    not_negative("pessimism", pessimism)
    positive("reward_abs_max", reward_abs_max)
    positive("lambda_min", lambda_min)
    count("rows", rows, 0)
    if parameter_norm is None:
        residual = reward_abs_max * (1.0 + math.sqrt(rows / lambda_min))
    else:
        residual = reward_abs_max + positive("parameter_norm", parameter_norm)
    if tau is None:
        shift = 2.0 * residual / math.sqrt(lambda_min * (lambda_min + 1.0))
        return (shift + pessimism * inverse_root_drop(lambda_min)) / kl_coef
    growth = math.expm1(0.5 * math.log1p(1.0 / lambda_min))
    return tau * (2.0 * residual / math.sqrt(lambda_min + 1.0) + pessimism * growth) / kl_coef


def linear_draw(
    kl_coef: float,
    pessimism: float,
    reward_abs_max: float,
    lambda_min: float,
    rows: int,
    *,
    thresholds: Thresholds | None = None,
    parameter_norm: float | None = None,
) -> Guarantee:
    """One action of the Gibbs policy of u = φᵀθ̂ − β‖φ‖_{Σ^−1}, θ̂ the ridge estimate.

    Theorem: Theorem 2 (pure without `thresholds`, else approximate); with `parameter_norm` the estimate stays in a
    ball, which bounds the residual by R + B. Assumes ‖φ‖₂ ≤ 1, rewards in [−R, R]; μ = `lambda_min` > 0 a lower bound
    on λ_min(λI + Σφφᵀ) of the smaller neighbour (the ridge λ itself always is one); N = `rows` at least the size of the
    smaller neighbour. Units: η, R in reward units, μ in squared feature units. Fails: for fixed μ the bound grows like
    √N, and so does the truth; it vanishes only if μ ≫ N^(1/3).
    """
    split = None if thresholds is None else thresholds.check()
    epsilon = linear_epsilon(
        kl_coef,
        pessimism,
        reward_abs_max,
        lambda_min,
        rows,
        tau=None if split is None else split.tau,
        parameter_norm=parameter_norm,
    )
    delta = 0.0
    if split is not None:
        largest = reward_abs_max * math.sqrt((rows + 1) / lambda_min)
        gap = (split.separation or 2.0) * (largest if parameter_norm is None else parameter_norm)
        delta = tail_mass(split.reference_odds, kl_coef, pessimism * (split.tau - split.core), gap)
    constrained = "" if parameter_norm is None else f", constrained to norm at most {parameter_norm:g}"
    assumptions = (
        ADD_REMOVE,
        f"feature norms at most 1, rewards in [-{reward_abs_max:g}, {reward_abs_max:g}], ridge regression{constrained}",
        f"the regularised Gram matrix of the smaller neighbour has no eigenvalue below {lambda_min:g} (the ridge"
        f" itself is a bound that needs no coverage), and it has at most {rows} rows",
        GIBBS,
        FIXED,
        DRAW_ONLY,
    )
    return guarantee(epsilon, delta, "one action drawn from the linear policy", assumptions)


# --- RLHF with a linear reward ---------------------------------------------------------------------------------------


def curvature_floor(parameter_norm: float, feature_norm: float = 1.0) -> float:
    """γ = σ'(LB) = 1/(2 + e^{LB} + e^{−LB}), L = 2·feature_norm: the least curvature of the loss over ‖θ‖ ≤ B."""
    reach = 2.0 * positive("feature_norm", feature_norm) * positive("parameter_norm", parameter_norm)
    if reach > 600.0:
        raise OutsideAssumptions(
            "parameter_norm", f"times 2 * feature_norm is {reach:.4g}: beyond 600 no bound can be computed; shrink it"
        )
    return 0.25 / math.cosh(reach / 2.0) ** 2


def rlhf_epsilon(
    kl_coef: float,
    lambda_min: float,
    parameter_norm: float,
    notion: str,
    *,
    feature_norm: float = 1.0,
    pessimism: float = 0.0,
    ridge: float | None = None,
    tau: float | None = None,
) -> float:
    """Range of the log ratio of one draw of the RLHF policy: Theorems 3 and 4, F = `feature_norm`, L = 2F.

    label: 2·F·ξ/(γη√μ), ξ = min(L/√μ, L/√(L²+λ)) (1 for the second where `ridge` λ is not given), whatever the
    pessimism. add-remove: [2 s̄ L F/(γ√(μ(μ+L²))) + β F g_{L²}(μ)]/η, s̄ = σ(LB). With `tau` the approximate forms: τ
    in the place of F/√μ. Derivation: the loss is γ-strongly convex in ‖·‖_Σ on the ball, so by the variational
    inequalities of the two constrained minimisers a flip, whose loss difference is exactly yθᵀx, moves θ̂ by
    ‖x‖_{Σ^−1}/γ, and an added pair by s̄‖x‖_{Σ'^−1}/γ.
    """
    positive("kl_coef", kl_coef)
    positive("lambda_min", lambda_min)
    not_negative("pessimism", pessimism)
    gamma = curvature_floor(parameter_norm, feature_norm)
    width = 2.0 * feature_norm
    if notion == "label":
        inside = 1.0 if ridge is None else width / math.hypot(width, math.sqrt(not_negative("ridge", ridge)))
        reach = feature_norm / math.sqrt(lambda_min) if tau is None else tau
        return 2.0 * reach * min(width / math.sqrt(lambda_min), inside) / (gamma * kl_coef)
    if notion != "add-remove":
        raise OutsideAssumptions("notion", f"must be label or add-remove, got {notion!r}; choose one")
    steepest = 1.0 / (1.0 + math.exp(-width * parameter_norm))
    square = width * width
    shift = 2.0 * steepest * width / (gamma * math.sqrt(lambda_min + square))
    if tau is None:
        penalty = pessimism * feature_norm * inverse_root_drop(lambda_min, square)
        return (shift * feature_norm / math.sqrt(lambda_min) + penalty) / kl_coef
    return tau * (shift + pessimism * math.expm1(0.5 * math.log1p(square / lambda_min))) / kl_coef


def rlhf_label_instance_epsilon(
    kl_coef: float, parameter_norm: float, action_width: float, pair_width: float, feature_norm: float = 1.0
) -> float:
    """Label-DP range of one draw for given public features: max‖φ_a − φ_b‖_{Σ^−1}·max_i‖x_i‖_{Σ^−1}/(γη).

    The instance form of Theorem 3's label part, never above the worst case of `rlhf_epsilon`. action_width: the
    first maximum, over the prompt's actions; pair_width: the second, over the pairs in the data; both under Σ = λI +
    Σxxᵀ, which label neighbours share. Valid for label neighbours only. Other assumptions as in `rlhf_draw`.
    """
    positive("action_width", action_width)
    positive("pair_width", pair_width)
    return action_width * pair_width / (curvature_floor(parameter_norm, feature_norm) * positive("kl_coef", kl_coef))


def rlhf_label_instance(
    kl_coef: float, parameter_norm: float, action_width: float, pair_width: float, feature_norm: float = 1.0
) -> Guarantee:
    """`rlhf_label_instance_epsilon` with what it assumes."""
    return guarantee(
        rlhf_label_instance_epsilon(kl_coef, parameter_norm, action_width, pair_width, feature_norm),
        0.0,
        "one response drawn from the policy, for these features,",
        (
            LABEL,
            f"between two responses to the prompt the features differ by at most {action_width:g}, those of a pair in"
            f" the data by at most {pair_width:g}, in the norm of the inverse of lambda * I + sum of x x^T",
            "plain Bradley-Terry loss on true labels, minimised exactly over norms of at most"
            f" {parameter_norm:g}, with a ridge kappa >= gamma * lambda",
            GIBBS,
            FIXED,
            DRAW_ONLY,
        ),
    )


def rlhf_draw(
    kl_coef: float,
    lambda_min: float,
    parameter_norm: float,
    notion: str,
    *,
    feature_norm: float = 1.0,
    pessimism: float = 0.0,
    ridge: float | None = None,
    thresholds: Thresholds | None = None,
) -> Guarantee:
    """One response drawn from the Gibbs policy of u = φᵀθ̂ − β‖φ‖_{Σ^−1}, θ̂ a Bradley–Terry fit.

    Theorem: Theorems 3 and 4: `notion` "label" (one preference flipped; the tight 1/γ, not the
    delete-and-add 2s̄/γ) or "add-remove". Assumes ‖φ‖₂ ≤ F = `feature_norm` (so differences ≤ L = 2F, and γ = σ'(LB)
    with that L); ‖θ‖ ≤ B = `parameter_norm` by constraint; a ridge κ ≥ γλ in the likelihood, Σ = λI + Σxxᵀ; μ =
    `lambda_min` > 0 a lower bound on λ_min(Σ) of the smaller neighbour (label: of the common one, a public number).
    Units: η in reward units, B reward per feature. Fails: without the ridge (replace μ by μ − λ), for the private
    likelihood of randomised labels, for tuned features, for PPO policies.
    """
    split = None if thresholds is None else thresholds.check()
    if ridge is not None and lambda_min < ridge * (1.0 - 1e-9):  # computed eigenvalues are rounded
        raise OutsideAssumptions("lambda_min", f"is at least the ridge {ridge:g}, got {lambda_min:g}; correct one")
    epsilon = rlhf_epsilon(
        kl_coef,
        lambda_min,
        parameter_norm,
        notion,
        feature_norm=feature_norm,
        pessimism=pessimism,
        ridge=ridge,
        tau=None if split is None else split.tau,
    )
    delta = 0.0
    if split is not None:
        gap = (split.separation or 2.0 * feature_norm) * parameter_norm
        delta = tail_mass(split.reference_odds, kl_coef, pessimism * (split.tau - split.core), gap)
    gamma = curvature_floor(parameter_norm, feature_norm)
    penalty = "any pessimism level" if notion == "label" else f"pessimism level {pessimism:g}"
    assumptions = (
        LABEL if notion == "label" else ADD_REMOVE,
        f"frozen public features of norm at most {feature_norm:g}; {penalty}",
        f"plain Bradley-Terry loss on true labels, minimised exactly over norms of at most {parameter_norm:g},"
        f" with a ridge kappa >= gamma * lambda, gamma = {gamma:.4g}",
        f"lambda * I plus the Gram matrix of the differences has no eigenvalue below {lambda_min:g}"
        + ("" if notion == "label" else ", in the smaller neighbour"),
        GIBBS,
        FIXED,
        DRAW_ONLY,
    )
    return guarantee(epsilon, delta, "one response drawn from the policy", assumptions, notion=notion)
