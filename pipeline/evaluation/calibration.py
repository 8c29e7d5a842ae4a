"""Calibration of the reward model: its preferences against held-out private labels, and r̄ ± κΓ against r*.

Both are checks, not inputs: nothing is tuned on them. The first reads only z; the second needs a known truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise, known_noise, rows_of, true_share

KAPPAS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
BINS = 5


def preference_calibration(
    margin: np.ndarray, noise: LabelNoise | LevelledNoise, groups: np.ndarray | None = None, bins: int = BINS
) -> list[dict[str, float]]:
    """Predicted against observed shares of pairs in which the response that r̄ prefers is the preferred one.

    margin: (n,) r̄(chosen) − r̄(rejected), `chosen` being what the private label prefers; ties are left out. Pairs are
    grouped by |margin| into `bins` groups. Rows: `predicted`, the mean of sigmoid(|margin|); `observed` with `ci_low`,
    `ci_high` (95 %), the share whose label agrees, debiased by `noise`, not clipped; and `n`; groups: of both, as
    `independent_labels`. ValueError: labels that carry nothing.
    """
    known_noise(noise, allow_zero=False)
    margin = np.asarray(margin, dtype=np.float64)
    decided = np.flatnonzero(margin)
    rows = []
    for places in np.array_split(decided[np.argsort(np.abs(margin[decided]), kind="stable")], bins):
        if not len(places):
            continue
        group = margin[places]
        share = true_share(group > 0, rows_of(noise, places), None if groups is None else groups[places])
        predicted = float((1 / (1 + np.exp(-np.abs(group)))).mean())
        facts = share.as_dict()
        rows.append({"predicted": predicted, "observed": facts.pop("value"), **facts})
    return rows


def coverage(
    reward: np.ndarray, bonus: np.ndarray, truth: np.ndarray, kappas: Sequence[float] = KAPPAS
) -> list[dict[str, Any]]:
    """Share of draws whose centred truth lies within κΓ of the centred estimate, both centred by prompt, as Γ is.

    reward, truth: (n, N) r̄ and r* of N ≥ 2 draws of π_ref for each prompt; bonus: (n, N) Γ at κ = 1. Rows: `kappa`,
    `coverage`, `ci_low`, `ci_high` (95 %, over prompts), `nominal` (of a normal error) and `n` (draws).
    """
    error = np.abs((reward - reward.mean(axis=1, keepdims=True)) - (truth - truth.mean(axis=1, keepdims=True)))
    rows = []
    for kappa in kappas:
        inside = (error <= kappa * bonus).mean(axis=1)  # draws of one prompt are not independent: prompts are
        spread = 1.96 * float(inside.std(ddof=1)) / np.sqrt(len(inside)) if len(inside) > 1 else 0.5
        value = float(inside.mean())
        share = {"coverage": value, "ci_low": max(0.0, value - spread), "ci_high": min(1.0, value + spread)}
        rows.append({"kappa": kappa, **share, "nominal": 2 * NormalDist().cdf(kappa) - 1, "n": int(error.size)})
    return rows
