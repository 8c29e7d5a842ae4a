"""Whether a run is private, by what its released files say; any single sign against it is enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import UserError
from pipeline.report.inputs import RunFacts
from pipeline.report.text import known


@dataclass(frozen=True)
class PrivacyStatus:
    """What the report says about privacy.

    Attributes:
        epsilon: of one label; None for ∞.
        keep_prob: in [0.5, 1].
        reasons: why the run is NOT PRIVATE; empty when it is private.
        public_labels: their holder declared the labels public or synthetic, whatever was done to them.
    """

    epsilon: float | None
    keep_prob: float | None
    reasons: tuple[str, ...]
    public_labels: bool

    @property
    def private(self) -> bool:
        return not self.reasons


def guarantee_of(release: dict[str, Any]) -> dict[str, Any]:
    """The mechanism's guarantee in a release manifest; `UserError` when it states none."""
    guarantee = release.get("guarantee")
    if not isinstance(guarantee, dict) or "epsilon" not in guarantee or "keep_prob" not in guarantee:
        raise UserError("privatize/release/manifest.json states no guarantee: run that stage again (--from privatize)")
    return guarantee


def privacy_status(facts: RunFacts) -> PrivacyStatus:
    """The status of a run.

    Raises:
        UserError: the release states no guarantee, or the recipe has another ε.
    """
    guarantee = guarantee_of(facts.release)
    epsilon = guarantee["epsilon"] if known(guarantee["epsilon"]) else None
    recipe = facts.recipe.get("privatize") or {}
    _check_same_epsilon(epsilon, recipe.get("epsilon"))
    reasons = []
    mark = guarantee.get("mark") or facts.release.get("mark")
    if epsilon is None:
        reasons.append("ε is infinite: the labels were released as they are")
    elif recipe.get("insecure_seed") is not None or guarantee.get("key_mode") == "insecure_seed":
        reasons.append("the flips derive from a seed, so anyone who guesses the seed can undo them")
    elif mark:
        reasons.append(str(guarantee.get("mark_reason") or mark))
    reasons += sorted({str(stage["override"]) for stage in facts.manifests.values() if stage.get("override")})
    public = bool((facts.recipe.get("data") or {}).get("public_labels"))
    return PrivacyStatus(epsilon, guarantee["keep_prob"], tuple(reasons), public)


def _check_same_epsilon(released: float | None, wanted: Any) -> None:
    """The recipe in the run directory is that of the last start; the labels may be of an earlier one."""
    if wanted is None:
        return
    wanted = wanted if known(wanted) else None
    same = released is wanted if released is None or wanted is None else math.isclose(released, wanted, rel_tol=1e-9)
    if not same:
        raise UserError(
            f"privatize.epsilon is {wanted or 'inf'} in the recipe but {released or 'inf'} in the released labels: "
            "run the stages again (--from privatize)"
        )
