"""PRL Appendix C: a design matrix kept private by tree noise is not monotone, so the determinant trick fails.

Linear MDPs, rare switching: Λ_k = λI + Σ φφᵀ is released with symmetric Gaussian noise from a binary tree and a shift
that keeps it positive definite, and the policy is renewed when its determinant has doubled at some stage. The control
arm is the same data without noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from private_rlhf.accounting.conversions import zcdp_rho
from private_rlhf.core.stats import student_mean
from private_rlhf.validation.lab import Claim, within

from private_rlhf_lab.studies.private_rl.updates import DELTA, PAPER, Array

STAGES, DIMENSION = 3, 4
RIDGE = 1.0


def features(episodes: int, rng: np.random.Generator) -> Array:
    """Unit vectors (K, H, d) whose first coordinate dominates: the other directions are seldom seen, as in practice."""
    raw = rng.normal(size=(episodes, STAGES, DIMENSION)) * np.array([1.0, 0.5, 0.2, 0.05])
    return np.asarray(raw / np.linalg.norm(raw, axis=2, keepdims=True))


def tree_noise(episodes: int, epsilon: float, rng: np.random.Generator) -> Array:
    """Noise of the released prefix sums, (K, H, d, d), symmetric; (ε, 1e-5)-DP for one replaced episode.

    Every prefix is a sum of at most L = ⌊log₂K⌋ + 1 tree nodes, and an episode is in at most L nodes; in each it moves
    the H sums by at most √(2H) in Frobenius norm. A node's noise has independent entries on and above the diagonal;
    those above are scaled by 1/√2, since their change counts twice in the norm. ρ = L·2H/(2σ²).
    """
    levels = int(math.log2(episodes)) + 1
    deviation = math.sqrt(levels * STAGES / zcdp_rho(epsilon, DELTA))
    nodes: dict[int, Array] = {}
    total = np.zeros((episodes, STAGES, DIMENSION, DIMENSION))
    for k in range(1, episodes + 1):
        level = (k & -k).bit_length() - 1  # the node that ends at k and replaces those below it
        for below in [each for each in nodes if each < level]:
            del nodes[below]
        raw = rng.normal(scale=deviation, size=(STAGES, DIMENSION, DIMENSION))
        upper = np.triu(raw, 1) / math.sqrt(2.0)
        diagonal = raw * np.eye(DIMENSION)
        nodes[level] = diagonal + upper + upper.transpose(0, 2, 1)
        total[k - 1] = sum(nodes.values())
    return total


@dataclass(frozen=True)
class Switches:
    """What the determinant rule does on sequences of matrices, (runs, K, H, d, d).

    shrinking: (runs,) share of steps after which some direction is smaller, over k and h. counts: (runs,) switches.
    products: of each run, ∏_h det at every switch over that at the one before. ratios: (runs, K) the largest over h
    and directions φ of φᵀΛ_last⁻¹φ / φᵀΛ_k⁻¹φ while no determinant has doubled.
    """

    shrinking: Array
    counts: Array
    products: Sequence[Array]
    ratios: Array

    @property
    def smallest_products(self) -> Array:
        """Of each run that switched."""
        return np.array([each.min() for each in self.products if len(each)])


def follow(matrices: Array) -> Switches:
    """Runs the rule "renew once det Λ_h > 2 det Λ_h at the last switch, for some h" on each run."""
    smallest = np.linalg.eigvalsh(matrices[:, 1:] - matrices[:, :-1])[..., 0]
    counts, products, ratios = [], [], []
    for run in matrices:
        own = []
        logs = np.linalg.slogdet(run)[1]
        # The ratio's supremum over φ is the largest eigenvalue of Λ_last^{-1/2} Λ_k Λ_last^{-1/2}.
        last, count, factor = 0, 0, np.linalg.inv(np.linalg.cholesky(run[0]))
        for k in range(len(run)):
            if (logs[k] - logs[last]).max() > math.log(2.0):
                own.append(math.exp((logs[k] - logs[last]).sum()))
                last, count, factor = k, count + 1, np.linalg.inv(np.linalg.cholesky(run[k]))
            ratios.append(np.linalg.eigvalsh(factor @ run[k] @ factor.transpose(0, 2, 1))[:, -1].max())
        counts.append(count)
        products.append(np.array(own))
    shrinking = (smallest < -1e-9).mean(axis=(1, 2))
    return Switches(shrinking, np.array(counts), products, np.reshape(ratios, matrices.shape[:2]))


def measure(episodes: int, runs: int, epsilon: float = 1.0) -> dict[str, Switches]:
    """The private arm and its control. The shift is the least that keeps every matrix of a run above λI."""
    rng = np.random.default_rng(41)
    plain, private = [], []
    for _ in range(runs):
        phi = features(episodes, rng)
        sums = np.cumsum(phi[..., :, None] * phi[..., None, :], axis=0) + RIDGE * np.eye(DIMENSION)
        noisy = sums + tree_noise(episodes, epsilon, rng)
        least = np.linalg.eigvalsh(noisy)[..., 0].min()
        plain.append(sums)
        private.append(noisy + max(0.0, RIDGE - least) * np.eye(DIMENSION))
    return {"no noise": follow(np.stack(plain)), "private": follow(np.stack(private))}


def claims(found: dict[str, Switches], episodes: int) -> list[Claim]:
    """Monotonicity and its two consequences, for the private matrices, and the two for the control."""
    private, control = found["private"], found["no noise"]
    limit = STAGES * DIMENSION * math.log(1.0 + episodes / (RIDGE * DIMENSION)) / math.log(2.0)
    bound = "while no determinant has doubled, every direction's norm stays within a factor 2"
    source = f"{PAPER} Appendix C"
    least = private.smallest_products
    # A bound on every run is one on the mean over runs of each run's worst.
    mean = f"mean over {len(private.counts)} runs of"
    return [
        within("Private design matrices grow monotonically", f"{source}: assumed by the works it corrects",
               student_mean(private.shrinking), high=0.0, kind="critique",
               what=f"{mean} the share of steps at which some direction shrinks"),
        within(f"Private: {bound}", f"{source}: Eq. 20 of Ngo et al.", student_mean(private.ratios.max(axis=1)),
               high=2.0, kind="critique", what=f"{mean} the largest ratio of squared norms"),
        within(f"Without noise: {bound}", "Abbasi-Yadkori et al. 2011, Lemma 12",
               student_mean(control.ratios.max(axis=1)), high=2.0, kind="control",
               what=f"{mean} the largest ratio of squared norms"),
        within("Private: every switch at least doubles the product of the determinants over stages",
               f"{source}: Lemma 31 of Ngo et al.", student_mean(least) if len(least) else math.nan, low=2.0,
               kind="critique", what=f"{mean} the smallest ratio of products at a switch"),
        within("Without noise: at most dH log2(1 + K/(d lambda)) switches", "Abbasi-Yadkori et al. 2011",
               student_mean(control.counts), high=limit, kind="control",
               what=f"{mean} the number of switches"),
    ]


def rows(found: dict[str, Switches]) -> list[dict[str, object]]:
    """For a CSV."""
    return [
        {"arm": name, "share_of_shrinking_steps": float(each.shrinking.mean()), "runs": len(each.counts),
         "mean_switches": float(each.counts.mean()),
         "smallest_product_ratio": float(each.smallest_products.min()) if each.counts.any() else None,
         "switches_without_doubled_product": sum(int((own < 2.0).sum()) for own in each.products),
         "largest_norm_ratio": float(each.ratios.max()), "share_of_episodes_above_2": float((each.ratios > 2.0).mean())}
        for name, each in found.items()
    ]
