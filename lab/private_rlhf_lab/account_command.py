"""`private-rlhf-lab account KIND …`: accountants of the papers' mechanisms; a guarantee in words or as JSON."""

from __future__ import annotations

from typing import Annotated

import typer
from private_rlhf.commands.account import AsJson, print_guarantee
from private_rlhf.core.errors import UserError

from private_rlhf_lab.accounting import composition, draws
from private_rlhf_lab.accounting.draws import Thresholds

app = typer.Typer(
    no_args_is_help=True,
    help="Compute (ε, δ) of a mechanism from its parameters: what is promised, in words, and what is assumed.",
)

KlCoef = Annotated[float, typer.Option("--kl-coef", help="η: coefficient of KL(π‖π0), in reward units, > 0.")]
Pessimism = Annotated[float, typer.Option("--pessimism", help="β: level of the penalty, ≥ 0.")]
LambdaMin = Annotated[
    float, typer.Option("--lambda-min", help="μ: least eigenvalue of λI + Σφφᵀ, a lower bound for both neighbours.")
]
Delta = Annotated[float, typer.Option("--delta", help="δ in [0, 1).")]
Tau = Annotated[float | None, typer.Option("--tau", help="Approximate: width from which actions are badly covered.")]
Core = Annotated[float | None, typer.Option("--core", help="Approximate: largest width of the well covered ones.")]
Odds = Annotated[float | None, typer.Option("--reference-odds", help="Approximate: π0(badly) / π0(well covered).")]
Apart = Annotated[float | None, typer.Option("--separation", help="Approximate: largest ‖φ‖ between the two.")]
TargetDelta = Annotated[float, typer.Option("--target-delta", help="δ of the result, in (0, 1).")]


@app.command()
def bandit(
    kl_coef: KlCoef,
    pessimism: Pessimism,
    reward_range: Annotated[float, typer.Option("--reward-range", help="R: length of the interval of rewards, > 0.")],
    min_count: Annotated[int | None, typer.Option("--min-count", help="Pure: least count of any arm, ≥ 1.")] = None,
    max_count: Annotated[int | None, typer.Option("--max-count", help="Approximate: count of the best arm.")] = None,
    coverage_ratio: Annotated[float | None, typer.Option("--coverage-ratio", help="Approximate: c in (0, 1).")] = None,
    reference_mass: Annotated[float | None, typer.Option("--reference-mass", help="Approximate: π0(best arm).")] = None,
    unconditional: Annotated[
        bool, typer.Option("--unconditional", help="Pure for all data: an unseen arm counts as one record of 0.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """One pull of a Gibbs bandit policy: pure with --min-count or --unconditional, otherwise approximate."""
    approximate = {
        "--max-count": max_count,
        "--coverage-ratio": coverage_ratio,
        "--reference-mass": reference_mass,
    }
    used = [name for name, value in approximate.items() if value is not None]
    pure = ["--min-count"] * (min_count is not None) + ["--unconditional"] * unconditional
    if pure and len(pure) + len(used) > 1:
        rest = ", ".join([*pure[1:], *used])
        raise UserError(f"{pure[0]} (pure) does not go with {rest}: drop one kind")
    if unconditional:
        print_guarantee(draws.bandit_unconditional, kl_coef, pessimism, reward_range, as_json=as_json)
        return
    if min_count is not None:
        print_guarantee(draws.bandit_pure, kl_coef, pessimism, reward_range, min_count, as_json=as_json)
        return
    if len(used) < len(approximate):
        raise UserError(f"account bandit needs --min-count, or all of {', '.join(approximate)}: pass one kind")
    accountant = draws.bandit_approximate
    given = (kl_coef, pessimism, reward_range, max_count, coverage_ratio, reference_mass)
    print_guarantee(accountant, *given, as_json=as_json)


@app.command()
def linear(
    kl_coef: KlCoef,
    pessimism: Pessimism,
    reward_abs_max: Annotated[float, typer.Option("--reward-abs-max", help="R: rewards lie in [−R, R], > 0.")],
    lambda_min: LambdaMin,
    rows: Annotated[int, typer.Option("--rows", help="N: rows of the data set, ≥ 0.")],
    parameter_norm: Annotated[
        float | None, typer.Option("--parameter-norm", help="B of a fit constrained to ‖θ‖ ≤ B: no √N.")
    ] = None,
    tau: Tau = None,
    core: Core = None,
    reference_odds: Odds = None,
    separation: Apart = None,
    as_json: AsJson = False,
) -> None:
    """One action of a Gibbs policy on a ridge estimate; features of norm at most 1. With --tau approximate."""
    split = _thresholds(tau, core, reference_odds, separation)
    options = {"thresholds": split, "parameter_norm": parameter_norm}
    print_guarantee(draws.linear_draw, kl_coef, pessimism, reward_abs_max, lambda_min, rows, **options, as_json=as_json)


@app.command()
def rlhf(
    kl_coef: KlCoef,
    lambda_min: LambdaMin,
    parameter_norm: Annotated[float, typer.Option("--parameter-norm", help="B: the fit is over ‖θ‖ ≤ B, > 0.")],
    notion: Annotated[str, typer.Option("--notion", help="label | add-remove")],
    feature_norm: Annotated[float, typer.Option("--feature-norm", help="Largest ‖φ‖, > 0.")] = 1.0,
    pessimism: Annotated[float, typer.Option("--pessimism", help="β ≥ 0; the label notion does not need it.")] = 0.0,
    ridge: Annotated[float | None, typer.Option("--ridge", help="λ of Σ; sharpens the label notion.")] = None,
    tau: Tau = None,
    core: Core = None,
    reference_odds: Odds = None,
    separation: Apart = None,
    as_json: AsJson = False,
) -> None:
    """One response of a Gibbs policy on a constrained Bradley–Terry fit, frozen features. With --tau approximate."""
    print_guarantee(
        draws.rlhf_draw,
        kl_coef,
        lambda_min,
        parameter_norm,
        notion,
        feature_norm=feature_norm,
        pessimism=pessimism,
        ridge=ridge,
        thresholds=_thresholds(tau, core, reference_odds, separation),
        as_json=as_json,
    )


@app.command("rlhf-features")
def rlhf_features(
    kl_coef: KlCoef,
    parameter_norm: Annotated[float, typer.Option("--parameter-norm", help="B: the fit is over ‖θ‖ ≤ B, > 0.")],
    action_width: Annotated[float, typer.Option("--action-width", help="Largest ‖φ_a − φ_b‖ over Σ^½, of a prompt.")],
    pair_width: Annotated[float, typer.Option("--pair-width", help="Largest ‖x‖ over Σ^½, of the pairs in the data.")],
    feature_norm: Annotated[float, typer.Option("--feature-norm", help="Largest ‖φ‖, > 0.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """One response as by `rlhf`, label notion, for these features: never more than the worst case."""
    given = (kl_coef, parameter_norm, action_width, pair_width, feature_norm)
    print_guarantee(draws.rlhf_label_instance, *given, as_json=as_json)


@app.command()
def inexact(
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε of a draw from the exact policy.")],
    delta: Delta = 0.0,
    distance: Annotated[float | None, typer.Option("--distance", help="Total variation from it, in [0, 1].")] = None,
    log_error: Annotated[float | None, typer.Option("--log-error", help="Or |log π̂/π| everywhere, nats.")] = None,
    as_json: AsJson = False,
) -> None:
    """One draw from a policy that is near the exact one, for both neighbouring data sets."""
    if (distance is None) == (log_error is None):
        raise UserError("account inexact needs --distance or --log-error: pass one of them")
    if distance is not None:
        print_guarantee(composition.inexact_total_variation, epsilon, delta, distance, as_json=as_json)
    else:
        print_guarantee(composition.inexact_pointwise, epsilon, delta, log_error, as_json=as_json)


@app.command()
def combined(
    epsilon_draw: Annotated[float, typer.Option("--epsilon-draw", help="ε of the draw in each randomised label.")],
    epsilon_label: Annotated[float, typer.Option("--epsilon-label", help="ε of randomised response.")],
    as_json: AsJson = False,
) -> None:
    """One draw from a policy fitted to randomised labels, where nothing but the draw is released."""
    print_guarantee(composition.combined_draw, epsilon_draw, epsilon_label, as_json=as_json)


@app.command()
def repeated(
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε of one draw, by bandit, linear or rlhf.")],
    draws: Annotated[int, typer.Option("--draws", help="m ≥ 1, fixed in advance.")],
    target_delta: TargetDelta,
    delta: Delta = 0.0,
    as_json: AsJson = False,
) -> None:
    """m draws from one Gibbs policy."""
    print_guarantee(composition.repeated_draws, epsilon, delta, draws, target_delta, as_json=as_json)


@app.command()
def dptd(
    steps: Annotated[int, typer.Option("--steps", help="T ≥ 1.")],
    clip: Annotated[float, typer.Option("--clip", help="G: norm of each player's clipped gradient, > 0.")],
    sigma: Annotated[float, typer.Option("--sigma", help="Noise deviation per player, in the unit of G, > 0.")],
    target_delta: TargetDelta,
    neighbors: Annotated[str, typer.Option("--neighbors", help="transition | trajectory")],
    rows: Annotated[int | None, typer.Option("--rows", help="n: transitions; needed for transition.")] = None,
    trajectories: Annotated[int | None, typer.Option("--trajectories", help="m; needed for trajectory.")] = None,
    as_json: AsJson = False,
) -> None:
    """T steps of private primal-dual TD, both players jointly."""
    from private_rlhf_lab.accounting.dptd import dptd as accountant

    print_guarantee(accountant, rows, steps, clip, sigma, target_delta, neighbors, trajectories, as_json=as_json)


@app.command("private-rl")
def private_rl(
    updates: Annotated[int, typer.Option("--updates", help="M ≥ 1: updates that use data.")],
    epsilon_total: Annotated[float, typer.Option("--epsilon-total", help="ε of the whole sequence, > 0.")],
    delta: Delta,
    sensitivity: Annotated[
        float, typer.Option("--sensitivity", help="Largest change of a score under one replaced trajectory, > 0.")
    ],
    as_json: AsJson = False,
) -> None:
    """M exponential mechanisms: the exponent that a total ε allows, by exact, zCDP, advanced and basic composition."""
    from private_rlhf_lab.accounting.private_rl import private_rl as accountant

    print_guarantee(accountant, updates, epsilon_total, delta, sensitivity, as_json=as_json)


def _thresholds(
    tau: float | None, core: float | None, reference_odds: float | None, separation: float | None
) -> Thresholds | None:
    """The split of actions behind an approximate guarantee; None without --tau."""
    if tau is None or core is None or reference_odds is None:
        if (tau, core, reference_odds, separation) != (None, None, None, None):
            raise UserError("an approximate guarantee needs --tau, --core and --reference-odds: pass all of them")
        return None
    return Thresholds(tau, core, reference_odds, separation)
