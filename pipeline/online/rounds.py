"""A round: its questions are put once, its answers are kept, and what is known after it is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import RunWaits
from private_rlhf.core.stats import wilson
from private_rlhf.labelling.labellers import Labeller
from private_rlhf.labelling.questions import Question
from private_rlhf.online.belief import Belief
from private_rlhf.online.earlier import Known
from private_rlhf.online.pool import Pool


def ask_round(path: Path, questions: Sequence[Question], labeller: Labeller) -> dict[str, int | None]:
    """The private answers of a round by question id, None for a skip; from `path` if the round is done, else put there.

    Raises:
        RunWaits: the labeller has not answered all of them yet. Nothing is lost: the same command looks again.
    """
    asked = [question.as_json() for question in questions]
    atomic.sweep_temporaries(path.parent, path.name)
    if path.is_file():
        stored = read_json(path)
        if stored["questions"] == asked:
            answers: dict[str, int | None] = stored["answers"]
            return answers
    labeller.ask(questions)
    given = labeller.answers()
    if missing := sum(question.id not in given for question in questions):
        raise RunWaits(
            f"online: {missing} of {len(questions)} questions of round {path.stem} wait for an answer; run the same"
            " command again when they are there"
        )
    answers = {question.id: given[question.id] for question in questions}
    atomic.write_json(path, {"questions": asked, "answers": answers})
    return answers


def labels_of(questions: Sequence[Question], answers: Mapping[str, int | None]) -> torch.Tensor:
    """z of each question, (n,) float64: +1 for response_a, -1 for response_b, 0 for a skip."""
    return torch.tensor([answers[question.id] or 0 for question in questions], dtype=torch.float64)


def measure(belief: Belief, labels: int, pool: Pool, checked: Known, regret: float) -> dict[str, Any]:
    """What is known after a round: r̄ on the held-out answers (debiased), and J and regret where the truth is known."""
    right = (belief.reward(checked.one) - belief.reward(checked.other)) * checked.z
    share = wilson(float((right > 0).sum() + 0.5 * (right == 0).sum()), len(right))
    found: dict[str, Any] = {
        "labels": labels,
        "ridge": belief.ridge,
        "held_out_accuracy_debiased": belief.noise.debias(share).as_dict(),
    }
    if pool.truth is not None:
        found["gibbs_objective_gain"] = pool.gain(belief.policy(pool.x, pool.log_ratio), belief.kl_coef)
        found["regret"] = regret
    return found


def regret_of(belief: Belief, pool: Pool, questions: int) -> float:
    """What so many questions cost that are asked under this belief: each J(π*) − J(π¹), among the candidates; 0 where
    the truth is not known. Misspecification of r̄ counts.
    """
    if pool.truth is None:
        return 0.0
    return questions * (pool.best(belief.kl_coef) - pool.gain(belief.policy(pool.x, pool.log_ratio), belief.kl_coef))


def asked_about(belief: Belief, pool: Pool, picked: torch.Tensor) -> dict[str, float]:
    """Of a round's pairs (n, 3), by what was known before it: how far their answers lie above the candidates of the
    same prompts, and |Δr̄| of the two, both means in nats.
    """
    reward = belief.reward(pool.x)
    prompt, one, other = picked.T
    above = (reward[prompt, one] + reward[prompt, other]) / 2 - reward[prompt].mean(dim=1)
    return {
        "asked_above": float(above.mean()),
        "asked_margin": float((reward[prompt, one] - reward[prompt, other]).abs().mean()),
    }


def said(row: Mapping[str, Any]) -> str:
    """One line of a round."""
    accuracy = row["held_out_accuracy_debiased"]
    gain = f", J of the Gibbs policy {row['gibbs_objective_gain']:+.3f}" if "gibbs_objective_gain" in row else ""
    return (
        f"{row['labels']} labels: held-out debiased accuracy {accuracy['value']:.3f} "
        f"[{accuracy['ci_low']:.3f}, {accuracy['ci_high']:.3f}]{gain}"
    )
