"""The privacy status of a run, from the files that the report reads (`private_rlhf.privacy.status` decides)."""

from __future__ import annotations

import math
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.privacy.status import PrivacyStatus, status_of
from private_rlhf.report.inputs import RunFacts
from private_rlhf.report.text import known


def privacy_status(facts: RunFacts) -> PrivacyStatus:
    """The status of a run.

    Raises:
        UserError: the release states no guarantee, or the recipe has another ε.
    """
    stages, recipe = facts.manifests.values(), facts.recipe.get("privatize") or {}
    declared = bool((facts.recipe.get("data") or {}).get("public_labels"))
    status = status_of(
        facts.release,
        overrides=[stage.get("override") for stage in stages],
        declared_public=declared or any(stage.get("declared_public") for stage in stages),
        seeded=recipe.get("insecure_seed") is not None,
    )
    _check_same_epsilon(status.epsilon, recipe.get("epsilon"))
    return status


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
