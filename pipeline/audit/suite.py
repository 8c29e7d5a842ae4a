"""All attacks on one or several releases or run directories, and the family-wise verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.audit import files, released, seeds, statistics
from private_rlhf.audit.canaries import Truth
from private_rlhf.audit.judge import (
    FAMILY_WISE,
    POWER,
    Guesses,
    Verdict,
    adjust,
    clopper_pearson,
    detectable_excess,
    judge_one,
)
from private_rlhf.audit.learn import distinguisher, frames, untried
from private_rlhf.audit.mechanism_bound import Audit, audit_outcomes
from private_rlhf.audit.statistics import Finding
from private_rlhf.audit.view import Answers, View, build_view
from private_rlhf.core.noise import LabelNoise

HALF = FAMILY_WISE / 2
NOT_EXAMINED = (
    "not looked at: what lies in a file beside its rows and texts (Parquet metadata and layout, low bits of weights),"
    " sizes, modes, times and extended attributes; `verify-release` and `verify-run` compare these"
)
Attack = Callable[[View], Iterator[Guesses]]


@dataclass(frozen=True)
class Spec:
    """An attack: the leaks of the design's section 3 that it looks for, and what to do if it finds one."""

    name: str
    leaks: tuple[int, ...]
    remedy: str

    def as_dict(self, leak: bool) -> dict[str, Any]:
        """JSON types, with the remedy where something leaked."""
        return {"leaks": list(self.leaks), "what_to_do": self.remedy if leak else None}


ATTACKS: tuple[Attack, ...] = (
    released.private_label, released.column_order, released.public_signs, released.several_releases, released.copies,
    seeds.recomputation, seeds.ids, released.row_order, released.sorted_rows, released.extra_columns,
    released.file_of_row, files.texts_in_files, files.checkpoints, distinguisher,
)  # fmt: skip
SPECS = {
    spec.name: spec
    for spec in (
        Spec("private label", (4,), "the mechanism keeps labels more often than it says: do not release; fix it"),
        Spec("column order", (1,), "put the two responses in an order that does not depend on the label"),
        Spec("public signs", (1, 5, 7), "let no id, place or order depend on the label"),
        Spec("distinguisher", (4, 5, 7), "something readable predicts labels: look at what the other attacks accuse"),
        Spec("several releases", (4,), "make all releases of an event with one key, so that they form a chain"),
        Spec("copies", (6,), "give each labelling event its own flip (labeller and event columns), or keep one copy"),
        Spec("recomputation", (2,), "draw flips from a secret key, not from a seed: make a new release with a new key"),
        Spec("ids", (5,), "make ids only from the unordered pair, or with a key"),
        Spec("row order", (7,), "write rows in the order of an id that does not depend on labels"),
        Spec("extra columns", (7,), "drop the column, or release it only for labels declared public"),
        Spec("files and sizes", (7,), "let neither files nor statements about the raw file depend on labels"),
        Spec("texts in files", (3, 7), "remove the file; fine-tune on demonstrations that do not depend on labels"),
        Spec("checkpoints", (3,), "train only on private labels; do not release this checkpoint"),
        Spec("statistics", (5, 8), "publish no exact statistic of true labels; debias the private ones instead"),
        Spec("absence", (7,), "let no rule that drops a row look at which response was preferred"),
        Spec("digests", (5, 7), "publish no plain digest of raw rows or files; key it and keep it with the key"),
    )
}


@dataclass(frozen=True)
class Outcome:
    """Result of the suite. alpha: the ceiling. events: judged ones in the tables. attacks: one verdict per guess.

    findings: evidence that is not a matter of chance.
    without: rate of the text-only guess on the same events, by "attack/variant", for real labels only. epsilon_low: the
    largest bound on epsilon, for canaries only (`epsilon_bound`, `released_epsilon`, which shares the error of 0.1 %
    with Holm's procedure by halves). parts: (table, judged events in it, excess over alpha found with power 0.9).
    untried: the attacks that were skipped, in a line.
    """

    alpha: float
    events: int
    coins: bool
    attacks: list[Verdict]
    findings: list[Finding]
    without: dict[str, float] = field(default_factory=dict)
    audit: Audit | None = None
    epsilon_low: float | None = None
    parts: tuple[tuple[str, int, float], ...] = ()
    untried: str | None = None

    @property
    def leak(self) -> bool:
        """True if a bound on epsilon is above the claim (an attack beat its ceiling), or for other evidence."""
        caught = self.audit is not None and self.audit.caught
        return caught or bool(self.findings) or any(verdict.leak for verdict in self.attacks)

    @property
    def power_excess(self) -> float:
        """The smallest rate over alpha that all events together find with power 0.9."""
        return detectable_excess(self.events, self.alpha, max(1, len(self.attacks)), HALF)

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        rows = [
            row.as_dict()
            | SPECS[row.attack].as_dict(row.leak)
            | ({} if self.coins else {"rate_without_bundle": self.without.get(f"{row.attack}/{row.variant}")})
            for row in self.attacks
        ]
        return {
            "verdict": "leak" if self.leak else "no leak found",
            "judged_on": "canary events (fair-coin labels)" if self.coins else "real labels: OWNER ONLY",
            "owner_only": not self.coins,
            "alpha": self.alpha,
            "events": self.events,
            "family_wise_level": FAMILY_WISE,
            "epsilon_lower_bound": self.epsilon_low,
            "power": {"excess_over_alpha": self.power_excess, "power": POWER},
            "parts": [
                {"table": name, "events": events, "excess_over_alpha": excess} for name, events, excess in self.parts
            ],
            "untried": self.untried,
            "not_examined": NOT_EXAMINED,
            "attacks": rows,
            "findings": [asdict(row) | SPECS[row.attack].as_dict(True) for row in self.findings],
        }


def run_attacks(
    roots: Sequence[Path], truth: Truth, epsilon: float | None = None, attacks: Sequence[Attack] = ATTACKS
) -> Outcome:
    """Run every attack (or those given) on `roots` against the truth, and search for findings. Canaries (`truth.coins`)
    are judged against alpha, real labels against `real_ceiling`. UserError: as `build_view`."""
    view, answers = build_view(roots, truth, epsilon)
    guesses = [guess for attack in attacks for guess in attack(view) if len(guess.events)]
    verdicts, without = [], {}
    for guess in guesses:
        target = answers.products if guess.target == "product" else answers.labels
        ceiling = view.alpha
        if not truth.coins:
            rate, high = text_prior(view, answers, guess)
            without[f"{guess.attack}/{guess.variant}"] = rate
            ceiling = real_ceiling(guess, view.alpha, high)
        verdicts.append(judge_one(_unseen(guess, view), target, ceiling))
        if truth.coins and guess.target == "label":
            verdicts += [judge_one(part, target, alpha) for part, alpha in _by_level(_unseen(guess, view), view)]
    findings = statistics.statistics(view, answers)
    findings += statistics.digests_and_sizes(view) + statistics.row_digests(view, answers)
    audit, bound = None, None
    if truth.coins:
        verdicts += released.absence(view, truth)
        audit = released_epsilon(view, answers)
    judged = adjust(verdicts, HALF)
    if truth.coins:
        bound = max(epsilon_bound(judged, view.alpha), audit.epsilon_low if audit else 0.0)
    held = {table.name: int(np.count_nonzero(answers.labels[table.event])) for table in view.tables}
    family = max(1, len(judged))
    skipped = [*view.untried, *filter(None, [untried() if distinguisher in attacks else None])]
    parts = [(name, n, detectable_excess(n, view.alpha, family, HALF)) for name, n in held.items() if n]
    return Outcome(
        view.alpha, int(np.count_nonzero(answers.labels)), truth.coins, judged, list(dict.fromkeys(findings)),
        without, audit, bound, tuple(parts), f"not tried: {'; '.join(skipped)}" if skipped else None,
    )  # fmt: skip


def epsilon_bound(verdicts: Sequence[Verdict], alpha: float) -> float:
    """The largest lower bound on epsilon that guesses of labels prove, all of them simultaneously (Bonferroni).

    The one-run audit of Steinke, Nasr and Jagielski (2023), theorem 5.2 with delta = 0: of r guesses of independent
    fair coins, the rest abstained from, at most Binomial(r, e^eps/(1+e^eps)) are right, whatever the attacker saw. So
    the logit of a Clopper-Pearson bound on the rate is a bound on epsilon. It is above the claim where the p-value is
    below the level over the number of attacks, which Holm's procedure accuses too.
    """
    best = 0.5
    for row in verdicts:
        if row.n and row.ceiling == alpha:
            best = max(best, clopper_pearson(row.correct, row.n, 1 - 2 * HALF / len(verdicts))[0])
    return math.log(best / (1 - best))


def released_epsilon(view: View, answers: Answers) -> Audit | None:
    """The audit of the joint outcomes of the tables that hold the events of the largest one, relative to the lower text
    and to the id; the best bound, simultaneous over both."""
    stated = [view.own_z(table) for table in released.private_tables(view)]
    stated.sort(key=lambda z: -int((z != 0).sum()))
    if not stated:
        return None
    held = (stated[0] != 0) & (answers.labels != 0)
    joint = np.stack([z for z in stated if (z[held] != 0).all()])[:, held]
    audits, signs = [], list(_id_signs(view))
    for sign in signs:
        outcomes = list(zip(map(tuple, (joint * sign[held]).T.tolist()), (answers.labels * sign)[held], strict=True))
        plus, minus = [z for z, label in outcomes if label > 0], [z for z, label in outcomes if label < 0]
        if plus and minus:
            claim = math.log(view.alpha / (1 - view.alpha))
            audits.append(audit_outcomes(plus, minus, claim, HALF / len(signs)))
    return max(audits, key=lambda audit: audit.epsilon_low, default=None)


def _id_signs(view: View) -> Iterator[np.ndarray]:
    """(n,) int8: ones, then for the largest table the sign of each id's lowest bit (+1 for events outside it)."""
    yield np.ones(view.size, dtype=np.int8)
    largest = max(released.private_tables(view), key=lambda table: len(table.event))
    for name, sign in frames(view, largest).items():
        if name.startswith("bit 0 of the last"):
            yield view.spread(largest, sign, elsewhere=1)


def _unseen(guess: Guesses, view: View) -> Guesses:
    """The guesses that count: of a fitted attack, those of events whose labels it was not shown."""
    if not guess.learned:
        return guess
    hidden = view.known[guess.events] == 0
    return replace(guess, events=guess.events[hidden], labels=guess.labels[hidden])


def _by_level(guess: Guesses, view: View) -> Iterator[tuple[Guesses, float]]:
    """The guesses of events at each level below the largest claim, with their ceiling: no guess of a label beats the α
    of its own level, unless the level depends on the label."""
    for level in np.unique(view.levels):
        alpha = LabelNoise.of(float(level)).keep_prob
        here = view.levels[guess.events] == level
        if alpha < view.alpha and here.any():
            variant = f"{guess.variant}, of events at ε = {level:g}"
            yield replace(guess, variant=variant, events=guess.events[here], labels=guess.labels[here]), alpha


def real_ceiling(guess: Guesses, alpha: float, prior: float) -> float:
    """The rate that a guess of real labels may reach without a leak. prior: of a reader of the text, in [0.5, 1].

    max(alpha, p) for a guess that does not look at the text. A fitted guess may use the text and z together: the odds
    p/(1-p) times e^epsilon. A checkpoint's guess is utility and is not judged (1), nor is that of a
    distinguisher, which reads of the text more than `prior` does.
    """
    if guess.attack in ("checkpoints", "distinguisher"):
        return 1.0
    if guess.learned:
        return alpha * prior / (alpha * prior + (1 - alpha) * (1 - prior))
    return max(alpha, prior)


def text_prior(view: View, answers: Answers, guess: Guesses) -> tuple[float, float]:
    """(rate, 99.9 % upper bound) of the best text-only rule on the guessed events: max(p, 1 - p) of "the longer
    response was preferred" and "the first one was".
    """
    if guess.target == "product" or not len(guess.events):
        return 0.5, 0.5
    labels = answers.labels[guess.events]
    _, one, two = view.lengths[guess.events].T
    best, high = 0.5, 0.5
    for rule in (np.where(one < two, -1, 1), np.ones(len(labels))):
        right = int((labels == rule).sum())
        right = max(right, len(labels) - right)
        best = max(best, right / len(labels))
        high = max(high, clopper_pearson(right, len(labels), 0.999)[1])
    return best, high
