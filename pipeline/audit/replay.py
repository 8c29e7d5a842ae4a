"""Canaries without the owner's help: the texts of a release, fair coins for labels, privatised anew and attacked.

This tests the program as it is installed, on the texts at hand and at the same epsilons in a random order, under a key
that is thrown away. It says nothing about how the given release was made: that takes canaries planted before
(`canaries.plant`). Of the release itself it checks what needs no label: ids that are digests of the ordered pair.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from private_rlhf.audit import ids
from private_rlhf.audit.canaries import Truth, pair_key
from private_rlhf.audit.statistics import Finding
from private_rlhf.audit.suite import Outcome, run_attacks
from private_rlhf.audit.view import View, unlabelled_view
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import is_public
from private_rlhf.core.user import another_user
from private_rlhf.privacy.keys import keygen
from private_rlhf.privacy.records import is_blank

MOST_EPSILONS = 6

Privatize = Callable[[str, Path, float, Path], object]  # source, output folder, epsilon, key file


@dataclass(frozen=True)
class Replay:
    """The outcome on replayed canaries, and what the given release itself shows."""

    outcome: Outcome
    findings: list[Finding]


def replay(roots: Sequence[Path], count: int, privatize: Privatize, epsilon: float | None = None) -> Replay:
    """Runs the attacks on `count` replayed canaries at every finite epsilon of the given releases.

    privatize: makes a release, as `private-rlhf privatize` does.

    Raises:
        UserError: no release, fewer than `count` pairs, or no epsilon to be held to.
    """
    view = unlabelled_view(roots, count, epsilon)
    pairs = [
        texts
        for texts in zip(view.prompts, view.first, view.second, strict=True)
        if not any(is_blank(text) for text in texts)
    ]
    if len(pairs) < count:
        raise UserError(f"{roots[0]}: holds {len(pairs)} pairs, fewer than --canaries {count}; ask for less")
    stated = {table.epsilon for table in view.tables if table.epsilon is not None and not is_public(table.epsilon)}
    epsilons = sorted(stated)[-MOST_EPSILONS:] if epsilon is None else [epsilon]
    with tempfile.TemporaryDirectory(prefix="canaries-") as name:  # 0700
        home = Path(name)
        labels: dict[bytes, tuple[int, ...]] = {}
        with os.fdopen(os.open(home / "raw.jsonl", os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            for prompt, first, second in pairs:
                label = 1 - 2 * secrets.randbits(1)
                labels[pair_key(prompt, first, second)[0]] = (label,)
                ordered = (first, second) if label > 0 else (second, first)
                row = {"prompt": prompt, "chosen": ordered[0], "rejected": ordered[1]}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        secrets.SystemRandom().shuffle(epsilons)
        released = [home / f"release-{place}" for place in range(len(epsilons))]
        with another_user(home / "user"):
            key = keygen(home / "throwaway.key")
            for folder, value in zip(released, epsilons, strict=True):
                privatize(str(home / "raw.jsonl"), folder, value, key)
        outcome = run_attacks(released, Truth(labels, coins=True), epsilon)
    return Replay(outcome, layout_findings(view))


def layout_findings(view: View) -> list[Finding]:
    """Ids of the given release that are plain digests of the ordered pair: the order needs no label to be read off."""
    return [
        Finding("ids", guess.variant, f"the order of the responses can be read off {len(guess.events)} ids")
        for guess in ids.ids(view)
        if len(guess.events)
    ]
