"""`private-rlhf compare`: finished runs on one page, paired by held-out prompt, corrected for how many are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import FEWEST, is_public, withheld
from private_rlhf.core.stats import Estimate, holm, paired_p, student_mean, win_rate
from private_rlhf.evaluation.judges import by_order
from private_rlhf.evaluation.rates import beats, decided_win_rate, length_controlled

MEASURES = {
    "win rate": ("win", ("judge", "sampling")),
    "J": ("objective_gain", ("kl_coef", "truth", "sampling")),
    "true reward": ("true_reward", ("truth",)),
    "KL": ("kl", ("sampling",)),
}
"""Measures to compare: the key in a run's rows, and the terms that two runs must share."""
Column = np.ndarray
"""A value by prompt (n,), NaN where the run has none."""


@dataclass(frozen=True)
class Run:
    """A run's evaluation by held-out prompt; the prompts' texts are the keys. terms: what its measures depend on beside
    its answers, by names that a message can show."""

    name: str
    epsilon: float
    aligner: str
    seed: int
    reference: str
    terms: dict[str, str]
    rows: dict[str, dict[str, Any]]

    def column(self, prompts: Sequence[str], key: str) -> Column:
        """Of these prompts."""
        values = [self.rows[prompt].get(key) for prompt in prompts]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def read_rows(folder: Path) -> tuple[dict[str, dict[str, Any]], str, str]:
    """(rows by prompt, digest of π_ref, description of the outside judge) of a run's folder `evaluate`. UserError: a
    file is damaged, or a prompt is repeated."""
    try:
        judged_file = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
        pairs, reference = judged_file["pairs"], str(judged_file["reference"]["sha256"])
        by_prompt = json.loads((folder / "by_prompt.json").read_text(encoding="utf-8"))
        measures = {row["index"]: row for row in by_prompt}
        rows = {}
        for pair in pairs:
            policy, other = pair["true_reward"]
            outcome = pair.get("outcome") if policy is None else float(beats(np.array(policy), np.array(other)))
            verdicts = by_order(pair) if policy is None and outcome is not None else [outcome]
            longer = len(str(pair["policy"]).split()) - len(str(pair["reference"]).split())
            row = {"win": outcome, "longer": longer, "true_reward": policy, "verdicts": verdicts}
            rows[json.dumps(pair["prompt"], ensure_ascii=False)] = measures[pair["index"]] | row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder.parent} must hold a whole evaluation, got {error}: run again with --from evaluate"
        ) from None
    if len(rows) < len(pairs):
        raise UserError(f"{folder.parent} must hold each prompt once: run again with --from evaluate")
    judge = judged_file.get("judge")
    return rows, reference, "none" if judge is None else ", ".join(f"{name} {judge[name]}" for name in sorted(judge))


def compare_runs(runs: Sequence[Run]) -> str:
    """The page in Markdown. UserError for fewer than two runs, or for runs with fewer than FEWEST prompts in common."""
    return "\n".join(page(runs, common_prompts(runs))) + "\n"


def common_prompts(runs: Sequence[Run]) -> list[str]:
    """The prompts that all runs have. UserError as of `compare_runs`."""
    if len(runs) < 2:
        raise UserError("runs must be two or more: the first is what the others are compared with")
    prompts = [prompt for prompt in runs[0].rows if all(prompt in run.rows for run in runs)]
    if len(prompts) < FEWEST:
        raise UserError(f"runs must have {FEWEST} held-out prompts in common, got {len(prompts)}: use the same ones")
    return prompts


def utility_by_epsilon(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By run: ε, win rate and J gain; something false where one is not known, or not on the first run's terms."""
    prompts = common_prompts(runs)
    rows = []
    for run in runs:
        known = {"win rate": outcome_rate(run.column(prompts, "win")), "J": mean(run.column(prompts, "objective_gain"))}
        same = {what: each and on_same_terms(run, runs[0], what) and each.as_dict() for what, each in known.items()}
        rows.append({"epsilon": run.epsilon, **same})
    return rows


def page(runs: Sequence[Run], prompts: Sequence[str]) -> Iterator[str]:
    """Each run by itself, then against the first."""
    yield f"# {len(runs)} runs on {len(prompts)} held-out prompts that all of them have"
    yield ""
    yield "| run | aligner, ε, seed | win rate | at equal length | without ties | J gain | KL | true reward |"
    yield "|---|---|---|---|---|---|---|---|"
    for run in runs:
        epsilon = "∞" if is_public(run.epsilon) else f"{run.epsilon:g}"
        win, longer = run.column(prompts, "win"), run.column(prompts, "longer")
        has_outcome = ~np.isnan(win)
        rates = [outcome_rate(win), None, None]
        if has_outcome.any():
            verdicts = np.array(
                [run.rows[prompt]["verdicts"] for prompt, known in zip(prompts, has_outcome, strict=True) if known]
            )
            rates[1:] = [length_controlled(win[has_outcome], longer[has_outcome]), decided_win_rate(verdicts)]
        means = [mean(run.column(prompts, key)) for key in ("objective_gain", "kl", "true_reward")]
        cells = " | ".join([*map(shown_share, rates), *map(shown, means)])
        yield f"| {run.name} | {run.aligner}, {epsilon}, {run.seed} | {cells} |"
    yield ""
    yield f"Against {runs[0].name}, prompt by prompt; Holm over all these differences at 5 %. Only prompts vary here:"
    yield "another seed of the same recipe can differ too, so compare several runs before a method is called better."
    if len({run.reference for run in runs}) > 1:
        yield ""
        yield "The runs have different reference policies: their win rates are not against the same answers."
    for line in not_compared(runs):
        yield ""
        yield line
    yield ""
    yield "| run | difference of | mean [95 %] | p | by Holm |"
    yield "|---|---|---|---|---|"
    rows = list(differences(runs, prompts))
    for (name, what, apart, p), differs in zip(rows, holm([row[3] for row in rows]), strict=True):
        verdict = ("better" if (apart.value > 0) == (what != "KL") else "worse") if differs else "not told apart"
        yield f"| {name} | {what} | {shown(apart)} | {p:.2g} | {verdict} |"


def differences(runs: Sequence[Run], prompts: Sequence[str]) -> Iterator[tuple[str, str, Estimate, float]]:
    """(run, measure, paired difference from the first run, p), of what both know and measure on the same terms."""
    for run in runs[1:]:
        for what, (key, _) in MEASURES.items():
            if not on_same_terms(run, runs[0], what):
                continue
            apart = run.column(prompts, key) - runs[0].column(prompts, key)
            apart = apart[~np.isnan(apart)]
            if len(apart) >= FEWEST:
                yield run.name, what, student_mean(apart), paired_p(apart)


def on_same_terms(run: Run, other: Run, what: str) -> bool:
    """True where a measure means the same in both runs."""
    return all(run.terms[term] == other.terms[term] for term in MEASURES[what][1])


def not_compared(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each measure and term on which a run differs from the first."""
    for what, (_, terms) in MEASURES.items():
        for term in terms:
            first = runs[0].terms[term]
            others = [f"{run.terms[term]} in {run.name}" for run in runs[1:] if run.terms[term] != first]
            if others:
                yield f"{what}: not comparable, {term} is {first} in {runs[0].name}, {', '.join(others)}."


def outcome_rate(outcomes: Column) -> Estimate | None:
    """The win rate, ties counted half; None where nothing is known."""
    numbers = outcomes[~np.isnan(outcomes)]
    return win_rate(numbers, np.full(len(numbers), 0.5)) if len(numbers) else None


def mean(values: Column) -> Estimate | None:
    """With its interval; None where nothing is known."""
    numbers = values[~np.isnan(values)]
    return student_mean(numbers) if len(numbers) else None


def shown(estimate: Estimate | None) -> str:
    """A cell."""
    return "–" if estimate is None else f"{estimate.value:.3f} [{estimate.ci_low:.3f}, {estimate.ci_high:.3f}]"


def shown_share(share: Estimate | None) -> str:
    """A cell, which says so where the share rests on too few prompts."""
    return (withheld(share.as_dict()) if share else "") or shown(share)
