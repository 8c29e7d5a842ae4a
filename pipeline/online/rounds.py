"""Rounds of questions: each is put once, its answers are kept, and the reward after it is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import RunWaits
from private_rlhf.core.stats import wilson
from private_rlhf.labelling.labellers import Labeller
from private_rlhf.labelling.questions import Question
from private_rlhf.online.answered_pairs import AnsweredPairs
from private_rlhf.online.pool import Pool
from private_rlhf.online.posterior import Posterior


@dataclass(frozen=True)
class Interview:
    """Questions put to a labeller. folder: of a file for each round. prefix: of question ids."""

    labeller: Labeller
    folder: Path
    prefix: str

    def ask(self, name: str, pool: Pool, picked: torch.Tensor) -> AnsweredPairs:
        """The answers to picked pairs of the pool, (n, 3) as `Pool.questions` takes them, without skips.

        Raises:
            RunWaits: see `ask_round`.
        """
        questions = pool.questions(picked, f"{self.prefix}-{name}")
        answers = ask_round(self.folder / f"{name}.json", questions, self.labeller)
        z = torch.tensor([answers[question.id] or 0 for question in questions], dtype=torch.float64)
        rows = [
            (each.prompt, each.response_a, each.response_b, label)
            for each in questions
            if (label := answers[each.id])
        ]
        prompt, one, other = picked[z != 0].T
        signs = (z * pool.signs(picked, questions))[z != 0]
        return AnsweredPairs(rows, pool.x[prompt, one], pool.x[prompt, other], signs)


def ask_round(path: Path, questions: Sequence[Question], labeller: Labeller) -> dict[str, int | None]:
    """The private answers of a round by question id, None for a skip; from `path` if the round is done, or kept there.

    Raises:
        RunWaits: the labeller has not answered all of them yet. Nothing is lost: the same command looks again.
    """
    as_json = [question.as_json() for question in questions]
    atomic.sweep_temporaries(path.parent, path.name)
    if path.is_file():
        stored = read_json(path)
        if stored["questions"] == as_json:
            answers: dict[str, int | None] = stored["answers"]
            return answers
    labeller.ask(questions)
    received = labeller.answers()
    if missing := sum(question.id not in received for question in questions):
        raise RunWaits(
            f"online: {missing} of {len(questions)} questions of round {path.stem} wait for an answer; run the same"
            " command again when they are there"
        )
    answers = {question.id: received[question.id] for question in questions}
    atomic.write_json(path, {"questions": as_json, "answers": answers})
    return answers


def measure(posterior: Posterior, labels: int, pool: Pool, checked: AnsweredPairs, regret: float) -> dict[str, Any]:
    """A row of the history: r̄ on the held-out answers (debiased), and J and regret where the truth is known."""
    right = (posterior.reward(checked.one) - posterior.reward(checked.other)) * checked.z
    share = wilson(float((right > 0).sum() + 0.5 * (right == 0).sum()), len(right))
    row: dict[str, Any] = {
        "labels": labels,
        "ridge": posterior.ridge,
        "held_out_accuracy_debiased": posterior.noise.debias(share).as_dict(),
    }
    if pool.truth is not None:
        row["gibbs_objective_gain"] = pool.gain(posterior.policy(pool.x, pool.log_ratio), posterior.kl_coef)
        row["regret"] = regret
    return row


def regret_of(posterior: Posterior, pool: Pool, questions: int) -> float:
    """Regret of so many questions under this posterior: each costs J(π*) − J(π¹) among the candidates; 0 where the
    truth is not known. Misspecification of r̄ counts.
    """
    if pool.truth is None:
        return 0.0
    kl_coef = posterior.kl_coef
    return questions * (pool.best(kl_coef) - pool.gain(posterior.policy(pool.x, pool.log_ratio), kl_coef))


def describe_questions(posterior: Posterior, pool: Pool, picked: torch.Tensor) -> dict[str, float]:
    """Means over a round's pairs (n, 3) under the r̄ before it, nats: how far their answers lie above the candidates of
    the same prompts, and |Δr̄| of the two.
    """
    reward = posterior.reward(pool.x)
    prompt, one, other = picked.T
    above = (reward[prompt, one] + reward[prompt, other]) / 2 - reward[prompt].mean(dim=1)
    return {
        "asked_above": float(above.mean()),
        "asked_margin": float((reward[prompt, one] - reward[prompt, other]).abs().mean()),
    }


def round_line(row: Mapping[str, Any]) -> str:
    """One line about a row of the history."""
    accuracy = row["held_out_accuracy_debiased"]
    gain = f", J of the Gibbs policy {row['gibbs_objective_gain']:+.3f}" if "gibbs_objective_gain" in row else ""
    return (
        f"{row['labels']} labels: held-out debiased accuracy {accuracy['value']:.3f} "
        f"[{accuracy['ci_low']:.3f}, {accuracy['ci_high']:.3f}]{gain}"
    )
