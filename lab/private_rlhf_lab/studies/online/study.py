"""The experiments of the study online and the claims that they decide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from private_rlhf.core.stats import bootstrap, ratio_of_means, wilson
from private_rlhf.validation.bandits import Array, factor, private_labels
from private_rlhf.validation.lab import Claim, within, worst
from private_rlhf.validation.regret import (
    CONFIDENCE,
    EPSILONS,
    NONE,
    OPTIMISM,
    REFRESH,
    World,
    confidence_radius,
    grid_world,
    law,
    privacy_claims,
)

from private_rlhf_lab.studies.online import late_growth
from private_rlhf_lab.studies.online.arms import Arm, Learner, Trace, proof_constant, simulate

WEAK = "optimism, c = 0.1"
MIXTURE = "uniform mixture, m = 100"
REFERENCE = "second from pi_ref"
LIKELIHOOD = "private_likelihood"
MLE = " (MLE)"
HALVED = "clip 2B, half of Gamma_T"
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


def study(worlds: int, horizon: int, seed: int, arms: Sequence[Arm] = ARMS) -> Study:
    """Everything, bit-reproducible. arms: of ARMS, for `traces`; the claims of `short` need the first alone."""
    world = _grid(worlds, seed)
    traces = {(arm.name, epsilon): simulate(world, arm, epsilon, horizon, seed) for epsilon in EPSILONS for arm in arms}
    known = _grid(worlds, seed + 1, kl_coef=0.5, best_mass=None)
    covered = [simulate(known, arm, 1.0, horizon, seed) for arm in ARMS if arm.name in (OPTIMISM, NONE, MIXTURE)]
    proof = simulate(world, Arm("proof's c", "optimism", constant=proof_constant(1.0)), 1.0, horizon, seed)
    wide = _grid(worlds, seed + 2, bound=3.0)
    clips = [
        simulate(wide, Arm(name, "optimism", constant=share * proof_constant(3.0), clip=clip), 1.0, horizon // 10, seed)
        for name, share, clip in (("clip 1", 1.0, 1.0), ("clip 2B", 1.0, None), (HALVED, 0.5, None))
    ]
    many = _grid(5 * worlds, seed + 3)
    mixture = next(arm for arm in ARMS if arm.name == MIXTURE)
    fine = [simulate(many, mixture, 1.0, horizon // 100, seed, refresh) for refresh in (4 * REFRESH, REFRESH)]
    return Study(traces, covered, proof, clips, fine)


def _grid(worlds: int, seed: int, **options: float | None) -> World:
    return grid_world(np.random.default_rng(seed), worlds, **options)  # type: ignore[arg-type]


def prompt_shift(seed: int) -> Array:
    """|change of U| (R, S, A) in 4 worlds after 200 rounds when a random c_g(s) is added to every member g."""
    world, generator = _grid(4, seed), np.random.default_rng(seed)
    shift = generator.uniform(-1.0, 1.0, (*world.members.shape[:3], 1))
    shifted = replace(world, members=world.members + shift)
    learners = [Learner(each, Arm(OPTIMISM, "optimism"), 1.0, 200) for each in (world, shifted)]
    counts = private_labels(generator, np.full((4, len(world.pairs.context)), 10), world.pairs.difference(
        world.bandit.reward), 1.0)
    for learner in learners:
        learner.add(counts)
        learner.refresh(200)
    # The policies are of rewards, and so move with a function of the prompt in nothing but rounding.
    return np.abs(learners[0].uncertainty - learners[1].uncertainty)


def tilted(seed: int) -> Array:
    """E_{π²} b − E_{π¹} b of some worlds and prompts after 200 rounds of ready-made comparisons, (R, S)."""
    generator = np.random.default_rng(seed)
    world = grid_world(generator, 6)
    learner = Learner(world, ARMS[0], 1.0, 1000)
    compared = generator.multinomial(200, np.full(learner.margin.shape[2], 1.0 / learner.margin.shape[2]), size=6)
    truth = world.pairs.difference(world.bandit.reward)
    learner.add(private_labels(generator, compared, truth, 1.0))
    learner.refresh(200)
    return np.asarray(((np.exp(learner.explore) - np.exp(learner.exploit)) * learner.bonus).sum(axis=-1))


def radius_over_lemma(bound: float, epsilon: float, horizon: int = 1000, members: int = 64) -> float:
    """Γ_T²/2 with the proof's constant over the error bound of Lemma C.3, 8 (2 + e^B + e^−B)² log(TN/δ)/(2α−1)²."""
    steep = (1.0 + math.exp(-bound)) * (1.0 + math.exp(bound))  # 1/σ'(B)
    lemma = 8.0 * steep**2 * math.log(horizon * members / CONFIDENCE) / factor(epsilon) ** 2
    return confidence_radius(proof_constant(bound), bound, horizon, members, epsilon) ** 2 / 2.0 / lemma


def claims(found: Study, seed: int) -> list[Claim]:
    """All verdicts."""
    parts = (_growth_claims, _regret_claims, _proof_claims)
    claims = [claim for part in parts for claim in part(found, seed)]
    return [*claims, *privacy_claims(found.traces, seed)]


def short(worlds: int, seed: int) -> list[Claim]:
    """Those of `claims` that need one arm: what `tests/mutations` plants errors against."""
    found = study(worlds, 1_000_000, seed, ARMS[:1])
    growing = islice(_growth_claims(found, seed), len(EPSILONS))
    return [*growing, *privacy_claims(found.traces, seed), *_proof_claims(found, seed)]


def _growth_claims(found: Study, seed: int) -> Iterator[Claim]:
    """No faster than log T, for the regret of π² and for Σ min(1, U²)."""

    for epsilon in EPSILONS:
        trace = found.traces[OPTIMISM, epsilon]
        name = f"Optimism (c = 0.2), epsilon = {epsilon:g}: regret of pi2"
        yield law(name, "POKL Theorem 5.2", trace.rounds, trace.regret, seed)
    for name in (NONE, MIXTURE, OPTIMISM + MLE):
        trace = found.traces[name, 1.0]
        what = f"{name[0].upper()}{name[1:]}, epsilon = 1: regret of pi2"
        yield law(what, "this project", trace.rounds, trace.regret, seed)
    trace = found.traces[OPTIMISM, 1.0]
    name = "Realised sum of min(1, U^2), epsilon = 1, c = 0.2:"
    yield law(name, "POKL Definition 3.5", trace.rounds, trace.eluder, seed)
    late = bootstrap(lambda values: late_growth.late_exponent(found.proof.rounds, values), found.proof.regret, seed)
    yield within(f"With the proof's constant c = {proof_constant(1.0):.3g} regret grows slower than sqrt T up to the"
                 " horizon (epsilon = 1)", "POKL Lemma C.3", late, high=0.5, kind="reading",
                 what="the exponent of T over the last decade")


def _final(trace: Trace, exploiting: bool = False) -> Array:
    """Cumulative regret at the horizon, (R,)."""
    return np.asarray((trace.regret_exploiting if exploiting else trace.regret)[-1])


def _regret_claims(found: Study, seed: int) -> Iterator[Claim]:
    """Who has less regret in the same worlds: explorers, estimators, and π¹ against π²."""

    def ratio(claim: str, source: str, first: Array, second: Array, high: float = 1.0, of: str = " of pi2") -> Claim:
        estimate = bootstrap(ratio_of_means, np.stack([first, second]), seed)
        return within(claim, source, estimate, high=high, what=f"ratio of regrets{of}")

    for epsilon in EPSILONS:
        optimism = _final(found.traces[OPTIMISM, epsilon])
        of = f" of pi2 at the horizon over {len(optimism)} paired worlds"
        for other, source in ((NONE, "POKL section 5"), (MIXTURE, "this project")):
            yield ratio(f"Optimism (c = 0.2) has less regret than {other}, epsilon = {epsilon:g}", source,
                        optimism, _final(found.traces[other, epsilon]), of=of)
    optimism, none, _ = (_final(trace) for trace in found.covered)
    at = " at the horizon"
    yield ratio("Optimism has less regret than no exploration where pi_ref is uniform and kl_coef 0.5 (epsilon = 1)",
                "POKL section 5", optimism, none, of=f" of pi2{at}")
    for name in (OPTIMISM, MIXTURE):
        yield ratio(f"Private least squares does as well as the private MLE within 10 % ({name}, epsilon = 1)",
                    "this project", _final(found.traces[name, 1.0]), _final(found.traces[name + MLE, 1.0]), 1.1,
                    f" of pi2{at}")
    trace = found.traces[OPTIMISM, 1.0]
    deployed = _final(trace, exploiting=True)
    yield ratio("pi1, the policy one would deploy, has no more regret than pi2, which the theorem bounds (epsilon = 1)",
                "this project", deployed, _final(trace), of=at)
    yield ratio("A second response from pi_ref gives pi1 less regret than optimism does (epsilon = 1)", "this project",
                _final(found.traces[REFERENCE, 1.0], exploiting=True), deployed, of=f" of pi1{at}")
    fine, usual = (_final(each) for each in found.fine)
    yield ratio(f"Refreshing every t/{REFRESH} rounds costs at most 10 % against every t/{4 * REFRESH}",
                "this project", usual, fine, 1.1, f" of pi2 at a hundredth of the horizon over {len(fine)} worlds")


def _proof_claims(found: Study, seed: int) -> Iterator[Claim]:
    """The steps of the proof."""
    for trace in found.clips:
        share = wilson(float((trace.failed > 0).sum()), len(trace.failed))
        what = f"the share of {len(trace.failed)} worlds in which it fails"
        if trace.arm.name == HALVED:
            # The noise of z in {-1, 1} is sub-Gaussian with constant 1 (Hoeffding), not 2: a quarter of Gamma_T^2.
            yield within("Optimism holds at every refresh with half of Gamma_T, B = 3, as the noise of a label is"
                         " 1-sub-Gaussian", "POKL Lemmas C.3 and C.4, corrected", share, high=CONFIDENCE, what=what,
                         kind="corrected", paper="sub-Gaussian constant 2")
            continue
        yield within(f"Optimism holds at every refresh, B = 3, proof's constant, bonus with {trace.arm.name}",
                     "POKL Lemma C.4, Eq. 13", share, high=CONFIDENCE, what=what, paper="probability 1 - delta")
    safe = [trace for trace in (*found.clips, found.proof) if trace.arm.clip is None]
    ratios = np.concatenate([(trace.regret[-1] / trace.promised[-1])[trace.failed == 0.0] for trace in safe])
    yield within("Regret is at most 4 sum of E_{pi2} b^2 / kl_coef where optimism held", "POKL proof of Theorem 5.2",
                 worst(ratios.ravel()), high=1.0, what=f"largest regret / bound over {len(ratios)} worlds")
    yield within("U is blind to a function of the prompt, which no comparison shows", "POKL Definition 3.5",
                 worst(prompt_shift(seed).ravel()), high=1e-9, kind="control",
                 what="largest change of U when every member moves by its own function of the prompt")
    yield within("pi2 looks where the bonus is: E_{pi2} b >= E_{pi1} b", "POKL Algorithm 2, step 10",
                 float(tilted(seed).min()), low=0.0, kind="control",
                 what="the least difference over worlds and prompts")
    ratio = [radius_over_lemma(bound, epsilon) for bound in (1.0, 3.0) for epsilon in (0.5, 2.0)]
    yield within("Gamma_T^2 / 2 with the proof's constant is the error bound of Lemma C.3", "POKL Lemma C.3",
                 max(ratio, key=lambda each: abs(math.log(each))), low=1.0 - 1e-9, high=1.0 + 1e-9, kind="control",
                 what="their ratio, farthest from 1 over B and epsilon")
    failed = bootstrap(lambda values: float(values.mean()), found.traces[OPTIMISM, 1.0].failed, seed)
    yield within("With c = 0.2 the optimism of Lemma C.4 holds in 95 % of the rounds (epsilon = 1)", "this project",
                 failed, high=0.05, what="the share of rounds in which it fails somewhere")
