"""Arms that trust one party with the true labels: central label-DP at (ε, δ), δ = 1e-6. A simulation, not a release.

central: `noisy_sum_fit`: the sum of the features of preferred answers with discrete Gaussian
noise, and everything after it post-processing; here the noise follows from the seed. "pure" has δ = 0, "pessimism"
takes Γ off (κ = 1). clusters: what DPPrefSyn (arXiv 2605.30808) does for rewards, on public prompts: prompts in five
clusters (k-means of their mean features), a reward each from its own labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from private_rlhf.privacy.counts import Bits
from private_rlhf.privacy.prf import Prf
from scipy.cluster.vq import kmeans2, vq

from private_rlhf_lab.league.arms import Arm, Fit, Outcome, gibbs
from private_rlhf_lab.league.beds import Bed, Labels
from private_rlhf_lab.league.noisy_sum_fit import fit_statistic, release_statistic

DELTA = 1e-6
CLUSTERS = 5


def central_fit(labels: Labels, delta: float = DELTA, part: int = 0) -> Fit:
    """From one noisy sum over the true labels y. part: another number, other noise."""
    facts = (labels.seed, len(labels.x), labels.noise.epsilon, delta, part)
    if facts not in labels.fits:
        name = hashlib.sha256(" ".join(map(str, facts)).encode()).digest()
        bits = Bits(Prf(bytes(32)), name)  # no secret: a simulation that can be repeated
        made = fit_statistic(release_statistic(labels.x, labels.y, labels.noise.epsilon, delta, bits=bits))
        labels.fits[facts] = Fit(made.theta, made.information)
    found: Fit = labels.fits[facts]
    return found


def central(bed: Bed, labels: Labels, delta: float = DELTA, kappa: float = 0.0) -> Outcome:
    """One reward for all prompts."""
    return gibbs(bed, central_fit(labels, delta), kappa)


def clusters(bed: Bed, labels: Labels) -> Outcome:
    """One reward a cluster of prompts; their labels are disjoint, so each may spend all of ε."""
    means = bed.x.mean(dim=1).numpy()
    centres, own = kmeans2(means, CLUSTERS, seed=np.random.default_rng(labels.seed), minit="++")
    nearest, _ = vq(bed.held_x.mean(dim=1).numpy(), centres)
    reward = torch.zeros(bed.held_x.shape[:2], dtype=torch.float64)
    for number in range(CLUSTERS):
        mine = torch.from_numpy(own == number)[labels.prompt]
        if int(mine.sum()) > 1:
            theta = central_fit(labels.rows(mine), part=1 + number).theta
            held = torch.from_numpy(nearest == number)
            reward[held] = bed.held_x[held] @ theta
    return Outcome(reward, torch.softmax(reward / bed.kl_coef, dim=1))


CENTRAL: Mapping[str, Arm] = {
    "central": central,
    "central, pessimism": partial(central, kappa=1.0),
    "central, pure": partial(central, delta=0.0),
    "central, clusters": clusters,
}
"""The party that trains is trusted with the true labels; what it releases is (ε, δ)-private."""
