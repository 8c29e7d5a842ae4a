"""The experiments of `validate online` and the claims that they decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.core.stats import wilson
from pipeline.validation.bandits import Array, bootstrap, factor, ratio_of_means
from pipeline.validation.claims import Claim, within
from pipeline.validation.online import growth
from pipeline.validation.online.simulate import (
    CONFIDENCE,
    REFRESH,
    Arm,
    Trace,
    World,
    grid_world,
    proof_constant,
    simulate,
)

EPSILONS = (0.5, 1.0, 2.0, math.inf)
OPTIMISM = "optimism, c = 0.2"
WEAK = "optimism, c = 0.1"
NONE = "no exploration (both from pi1)"
MIXTURE = "uniform mixture, m = 100"
REFERENCE = "second from pi_ref"
LIKELIHOOD = "private_likelihood"
MLE = " (MLE)"
ARMS = (
    Arm(OPTIMISM, "optimism"),
    Arm(WEAK, "optimism", constant=0.1),
    Arm(NONE, "none"),
    Arm("uniform mixture, m = 20", "uniform", mixture=20.0),
    Arm(MIXTURE, "uniform", mixture=100.0),
    Arm(REFERENCE, "reference"),
    Arm(OPTIMISM + MLE, "optimism", LIKELIHOOD),
    Arm(NONE + MLE, "none", LIKELIHOOD),
    Arm(MIXTURE + MLE, "uniform", LIKELIHOOD, mixture=100.0),
)


@dataclass(frozen=True)
class Study:
    """traces: of ARMS at EPSILONS in the same worlds. covered: three arms where π_ref is uniform and kl_coef 0.5, at
    ε = 1. proof: optimism with the proof's constant at ε = 1. clips: the proof's constant at B = 3 with the bonus
    clipped at 1 and at 2B. fine: the mixture at ε = 1 refreshed four times as often, and as usual, over a
    hundredth of the horizon.
    """

    traces: dict[tuple[str, float], Trace]
    covered: list[Trace]
    proof: Trace
    clips: list[Trace]
    fine: list[Trace]


def study(worlds: int, horizon: int, seed: int) -> Study:
    """Everything, bit-reproducible."""
    world = _grid(worlds, seed)
    traces = {(arm.name, epsilon): simulate(world, arm, epsilon, horizon, seed) for epsilon in EPSILONS for arm in ARMS}
    known = _grid(worlds, seed + 1, kl_coef=0.5, best_mass=None)
    covered = [simulate(known, arm, 1.0, horizon, seed) for arm in ARMS if arm.name in (OPTIMISM, NONE, MIXTURE)]
    proof = simulate(world, Arm("proof's c", "optimism", constant=proof_constant(1.0)), 1.0, horizon, seed)
    wide = _grid(worlds, seed + 2, bound=3.0)
    clips = [
        simulate(
            wide, Arm(f"clip {name}", "optimism", constant=proof_constant(3.0), clip=clip), 1.0, horizon // 10, seed
        )
        for name, clip in (("1", 1.0), ("2B", None))
    ]
    many = _grid(5 * worlds, seed + 3)
    mixture = next(arm for arm in ARMS if arm.name == MIXTURE)
    fine = [simulate(many, mixture, 1.0, horizon // 100, seed, refresh) for refresh in (4 * REFRESH, REFRESH)]
    return Study(traces, covered, proof, clips, fine)


def _grid(worlds: int, seed: int, **options: float | None) -> World:
    return grid_world(np.random.default_rng(seed), worlds, **options)  # type: ignore[arg-type]


def claims(found: Study, seed: int) -> list[Claim]:
    """All verdicts."""
    return [
        *_growth_claims(found, seed),
        *_paired_claims(found, seed),
        *_policy_claims(found, seed),
        *_privacy_claims(found, seed),
        *_proof_claims(found, seed),
    ]


def _growth_claims(found: Study, seed: int) -> list[Claim]:
    """log T against √T, for the regret of π² and for Σ min(1, U²)."""

    def law(claim: str, source: str, trace: Trace, curves: Array) -> Claim:
        value = bootstrap(lambda values: growth.log_over_root(trace.rounds, values), curves, seed)
        return within(
            claim,
            source,
            value.value,
            low=0.0,
            interval=value.interval,
            what="log(residual of a + b sqrt T / residual of a + b log T) over the last two decades",
        )

    made = []
    for epsilon in EPSILONS:
        trace = found.traces[OPTIMISM, epsilon]
        claim = f"Optimism (c = 0.2), epsilon = {epsilon:g}: regret of pi2 grows like log T, not sqrt T"
        made.append(law(claim, "POKL Theorem 5.2", trace, trace.regret))
    for name in (NONE, MIXTURE, OPTIMISM + MLE):
        trace = found.traces[name, 1.0]
        claim = f"{name[0].upper()}{name[1:]}, epsilon = 1: regret of pi2 grows like log T, not sqrt T"
        made.append(law(claim, "this project", trace, trace.regret))
    trace = found.traces[OPTIMISM, 1.0]
    claim = "Realised sum of min(1, U^2), epsilon = 1, c = 0.2: grows like log T, not sqrt T"
    made.append(law(claim, "POKL Definition 3.5", trace, trace.eluder))
    late = bootstrap(lambda values: growth.late_exponent(found.proof.rounds, values), found.proof.regret, seed)
    made.append(
        within(
            f"With the proof's constant c = {proof_constant(1.0):.3g} regret grows slower than sqrt T up to the horizon"
            " (epsilon = 1)",
            "POKL Lemma C.3",
            late.value,
            high=0.5,
            interval=late.interval,
            what="the exponent of T over the last decade",
        )
    )
    return made


def _final(trace: Trace, exploiting: bool = False) -> Array:
    """Cumulative regret at the horizon, (R,)."""
    return np.asarray((trace.regret_exploiting if exploiting else trace.regret)[-1])


def _ratio(first: Array, second: Array, seed: int) -> tuple[float, tuple[float, float]]:
    """Ratio of means, paired over worlds, with its interval."""
    value = bootstrap(ratio_of_means, np.stack([first, second]), seed)
    return value.value, value.interval


def _paired_claims(found: Study, seed: int) -> list[Claim]:
    """Who has less regret, in the same worlds."""
    made = []
    for epsilon in EPSILONS:
        optimism = _final(found.traces[OPTIMISM, epsilon])
        for other, source in ((NONE, "POKL section 5"), (MIXTURE, "this project")):
            ratio, interval = _ratio(optimism, _final(found.traces[other, epsilon]), seed)
            made.append(
                within(
                    f"Optimism (c = 0.2) has less regret than {other}, epsilon = {epsilon:g}",
                    source,
                    ratio,
                    high=1.0,
                    interval=interval,
                    what=f"ratio of regrets of pi2 at the horizon over {len(optimism)} paired worlds",
                )
            )
    optimism, none, _ = (_final(trace) for trace in found.covered)
    ratio, interval = _ratio(optimism, none, seed)
    made.append(
        within(
            "Optimism has less regret than no exploration where pi_ref is uniform and kl_coef 0.5 (epsilon = 1)",
            "POKL section 5",
            ratio,
            high=1.0,
            interval=interval,
            what="ratio of regrets of pi2 at the horizon",
        )
    )
    return made


def _policy_claims(found: Study, seed: int) -> list[Claim]:
    """Estimators against each other, and π¹ against π²; ε = 1."""
    made = []
    for name in (OPTIMISM, MIXTURE):
        ratio, interval = _ratio(_final(found.traces[name, 1.0]), _final(found.traces[name + MLE, 1.0]), seed)
        made.append(
            within(
                f"Private least squares does as well as the private MLE within 10 % ({name}, epsilon = 1)",
                "this project",
                ratio,
                high=1.1,
                interval=interval,
                what="ratio of regrets of pi2 at the horizon",
            )
        )
    trace = found.traces[OPTIMISM, 1.0]
    ratio, interval = _ratio(_final(trace, exploiting=True), _final(trace), seed)
    made.append(
        within(
            "pi1, the policy one would deploy, has no more regret than pi2, which the theorem bounds (epsilon = 1)",
            "this project",
            ratio,
            high=1.0,
            interval=interval,
            what="ratio of regrets at the horizon",
        )
    )
    reference = _final(found.traces[REFERENCE, 1.0], exploiting=True)
    ratio, interval = _ratio(reference, _final(trace, exploiting=True), seed)
    made.append(
        within(
            "A second response from pi_ref gives pi1 less regret than optimism does (epsilon = 1)",
            "this project",
            ratio,
            high=1.0,
            interval=interval,
            what="ratio of regrets of pi1 at the horizon",
        )
    )
    return made


def _privacy_claims(found: Study, seed: int) -> list[Claim]:
    """How regret depends on ε: largest over smallest of regret in the unit that a theorem names."""
    curves = np.stack([_final(found.traces[OPTIMISM, epsilon]) for epsilon in EPSILONS[:3]])

    def growth_of(unit: Callable[[float], float]) -> tuple[float, tuple[float, float]]:
        scale = np.array([unit(epsilon) for epsilon in EPSILONS[:3]])
        value = bootstrap(lambda values: float(np.ptp(np.log(values.mean(axis=1) / scale))), curves, seed)
        return math.exp(value.value), (math.exp(value.interval[0]), math.exp(value.interval[1]))

    made = []
    for text, source, unit in (
        ("(2 alpha - 1)^-2", "POKL Theorem 5.2", lambda epsilon: factor(epsilon) ** -2),
        ("(e^epsilon - 1)^-2", "POKL abstract", lambda epsilon: math.expm1(epsilon) ** -2),
    ):
        ratio, interval = growth_of(unit)
        made.append(
            within(
                f"Regret at the horizon is proportional to {text} from epsilon = 0.5 to 2",
                source,
                ratio,
                high=2.0,
                interval=interval,
                what="largest / smallest over epsilon of regret in that unit",
            )
        )
    return made


def _proof_claims(found: Study, seed: int) -> list[Claim]:
    """The steps of the proof, and what this module assumes."""
    made = []
    for trace in found.clips:
        share = wilson(float((trace.failed > 0).sum()), len(trace.failed))
        made.append(
            within(
                f"Optimism holds at every refresh, B = 3, proof's constant, bonus with {trace.arm.name}",
                "POKL Lemma C.4, Eq. 13",
                share.value,
                high=CONFIDENCE,
                interval=(share.ci_low, share.ci_high),
                what=f"the share of {len(trace.failed)} worlds in which it fails",
            )
        )
    safe = [trace for trace in (*found.clips, found.proof) if trace.arm.clip is None]
    ratios = np.concatenate([(trace.regret[-1] / trace.promised[-1])[trace.failed == 0.0] for trace in safe])
    made.append(
        within(
            "Regret is at most 4 sum of E_{pi2} b^2 / kl_coef where optimism held",
            "POKL proof of Theorem 5.2",
            float(ratios.max()),
            high=1.0,
            what=f"largest regret / bound over {len(ratios)} worlds",
        )
    )
    failed = bootstrap(lambda values: float(values.mean()), found.traces[OPTIMISM, 1.0].failed, seed)
    made.append(
        within(
            "With c = 0.2 the optimism of Lemma C.4 holds in 95 % of the rounds (epsilon = 1)",
            "this project",
            failed.value,
            high=0.05,
            interval=failed.interval,
            what="the share of rounds in which it fails somewhere",
        )
    )
    ratio, interval = _ratio(_final(found.fine[1]), _final(found.fine[0]), seed)
    made.append(
        within(
            f"Refreshing every t/{REFRESH} rounds costs at most 10 % against every t/{4 * REFRESH}",
            "this project",
            ratio,
            high=1.1,
            interval=interval,
            what=f"ratio of regrets of pi2 at a hundredth of the horizon over {found.fine[0].regret.shape[1]} worlds",
        )
    )
    return made
