"""Win rates from noisy counts of the true evaluation labels (`evaluation_labels: laplace`).

Every rule (a policy that finds one response likelier, "the longer answer wins") is a choice of one response per pair.
Stage count counts how often each is right, adds discrete Laplace noise (`privacy.counts`) and enters the cost
into the ledger; nothing here sees a label.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.core.atomic import write_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.stats import Estimate
from private_rlhf.privacy.counts import DiscreteLaplace

LONGER = "longer_answer"  # the rule that prints beside the policies' rates


def write_decisions(folder: Path, choices: Mapping[str, np.ndarray], places: list[int], rows: int) -> None:
    """Writes `decisions.json`: the choices (n,) of every rule, the rows they are on, and how many rows there are."""
    content = {"rows": rows, "places": places, "choices": {name: choice.tolist() for name, choice in choices.items()}}
    write_json(folder / "decisions.json", content)


def read_decisions(folder: Path) -> tuple[dict[str, np.ndarray], list[int], int]:
    """(choices, places, rows) as `write_decisions` wrote them."""
    path = folder / "decisions.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{path} is missing or damaged: run the stage again (--from evaluate)") from None
    return {name: np.array(choice) for name, choice in content["choices"].items()}, content["places"], content["rows"]


def spread(choices: Mapping[str, np.ndarray], places: list[int], rows: int) -> dict[str, list[int]]:
    """Choices (n,) in {-1, 0, +1} on the rows at `places` as choices on all rows: 0 elsewhere."""
    decisions = {}
    for name, choice in choices.items():
        everywhere = np.zeros(rows, np.int8)
        everywhere[places] = choice
        decisions[name] = everywhere.tolist()
    return decisions


def counted_rates(choices: Mapping[str, np.ndarray], counted: Mapping[str, Any]) -> dict[str, Estimate]:
    """The win rate of every rule, ties counted half. counted: `epsilon` of all counts, the noisy `counts` by rule."""
    noise = DiscreteLaplace.shared(counted["epsilon"], len(choices))
    rates = {}
    for name, choice in choices.items():
        ties = 0.5 * int((choice == 0).sum())
        rates[name] = counted_share(counted["counts"][name] + ties, len(choice), noise)
    return rates


def counted_share(count: float, n: int, noise: DiscreteLaplace) -> Estimate:
    """The share of n pairs a rule is right about, from a noisy count.

    The 95 % half-widths of sampling (normal) and of the noise (exact) are added in squares, which is right where one of
    them dominates. Not clipped to [0, 1], which would bias it.
    """
    share = count / n
    inside = min(1.0, max(0.0, share))
    sampling = 1.96**2 * max(inside * (1 - inside), 0.25 / n) / n
    half = math.sqrt(sampling + (noise.half_width() / n) ** 2)
    return Estimate(share, share - half, share + half, n)
