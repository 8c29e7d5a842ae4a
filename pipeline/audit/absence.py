"""Attack on what is not there: does which canaries a release leaves out depend on their labels? Leak 7.

Which pairs are released may depend on prompts and responses, never on a label. So among the canaries that are missing
the labels are fair coins, in every frame that the texts give: an exact binomial test, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from private_rlhf.audit.canaries import FRAMES, Truth
from private_rlhf.audit.judge import Verdict, clopper_pearson, upper_tail
from private_rlhf.audit.view import View

FAIR = 0.5


def absence(view: View, truth: Truth) -> Iterator[Verdict]:
    """One verdict per root and frame, on the planted pairs with one event that no table of the root holds."""
    for root, present in view.present.items():
        missing = [key for key, labels in truth.labels.items() if len(labels) == 1 and key not in present]
        if missing:
            yield from _verdicts(root, missing, truth)


def _verdicts(root: Path, missing: list[bytes], truth: Truth) -> Iterator[Verdict]:
    labels = np.array([truth.labels[key][0] for key in missing])
    frames = np.array([truth.frames.get(key, (0,) * len(FRAMES)) for key in missing])
    for name, signs in zip(("the lower response", *FRAMES), (np.ones(len(missing)), *frames.T), strict=True):
        known = signs != 0
        n, preferred = int(known.sum()), int((labels * signs > 0).sum())
        if n:
            larger = max(preferred, n - preferred)
            low, high = clopper_pearson(larger, n)
            variant = f"{root.name}: missing pairs, {name} {'' if larger == preferred else 'not '}preferred"
            p_value = min(1.0, 2 * upper_tail(larger, n, FAIR))
            yield Verdict("absence", variant, n, larger, FAIR, larger / n, low, high, p_value)
