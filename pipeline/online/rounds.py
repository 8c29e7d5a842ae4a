"""Rounds of questions: who answers, answers that are kept, and measures after each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import RunWaits, UserError
from private_rlhf.core.noise import share_text
from private_rlhf.core.noise_levels import true_share
from private_rlhf.embedded.truth import true_reward
from private_rlhf.labelling.labellers import Command, Crowd, FileDrop, Labeller, Simulated, Terminal
from private_rlhf.labelling.questions import Question
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.online.pool import AnsweredPairs, Pool, noise_at
from private_rlhf.online.posterior import Posterior
from private_rlhf.privacy.person import split_budget
from private_rlhf.recipe import OnlineConfig, PrivatizeConfig
from torch import Tensor


@dataclass(frozen=True)
class Interview:
    """Questions put to a labeller. folder: of a file for each round. prefix: of question ids."""

    labeller: Labeller
    folder: Path
    prefix: str

    def ask(self, name: str, pool: Pool, picked: Tensor) -> AnsweredPairs:
        """The answers to picked pairs (n, 3) of the pool, without skips. RunWaits as `ask_round`."""
        questions = pool.questions(picked, f"{self.prefix}-{name}")
        stored = ask_round(self.folder / f"{name}.json", questions, self.labeller)
        z = torch.tensor([stored["answers"][each.id] or 0 for each in questions], dtype=torch.float64)
        answered = [each for each in questions if stored["answers"][each.id]]
        rows = [(each.prompt, each.response_a, each.response_b, stored["answers"][each.id]) for each in answered]
        prompt, one, other = picked[z != 0].T
        signs = (z * pool.signs(picked, questions))[z != 0]
        noise = noise_at(self.labeller.mechanism, [stored.get("epsilons", {}).get(each.id) for each in answered])
        return AnsweredPairs(rows, pool.x[prompt, one], pool.x[prompt, other], signs, noise)


def ask_round(path: Path, questions: Sequence[Question], labeller: Labeller) -> dict[str, Any]:
    """The private `answers` of a round by question id, None for a skip, and their `epsilons` where each has its own;
    kept at `path`, and read from there if these questions were put on these terms: an answer that was drawn at another
    ε must not be released as if at this one. RunWaits: some are not there yet; the same command looks again."""
    terms: dict[str, Any] = labeller.terms() if isinstance(labeller, Simulated) else {}
    terms |= {"labeller": type(labeller).__name__, "levels": [level.epsilon for level in labeller.mechanism.levels]}
    asked = {"questions": [each.as_json() for each in questions]} | terms
    atomic.sweep_temporaries(path.parent, path.name)
    if path.is_file():
        stored: dict[str, Any] = read_json(path)
        if stored.items() >= asked.items():
            return stored
    labeller.ask(questions)
    received = labeller.answers()
    if missing := sum(question.id not in received for question in questions):
        raise RunWaits(
            f"online: {missing} of {len(questions)} questions of round {path.stem} wait for an answer; run the same"
            " command again when they are there"
        )
    facts: dict[str, Mapping[str, Any]] = {"answers": received, "epsilons": labeller.epsilons()}
    row = {name: {each.id: values.get(each.id) for each in questions} for name, values in facts.items() if values}
    atomic.write_json(path, asked | row)
    return row


def measure(posterior: Posterior, labels: int, pool: Pool, checked: AnsweredPairs) -> dict[str, Any]:
    """A row of the history: r̄ on the held-out answers (debiased), and J where the truth is known."""
    right = (posterior.reward(checked.one) - posterior.reward(checked.other)) * checked.z
    share = true_share(((right > 0) + 0.5 * (right == 0)).numpy(), checked.noise)
    row: dict[str, Any] = {
        "labels": labels,
        "ridge": posterior.ridge,
        "held_out_accuracy_debiased": share.as_dict(),
    }
    if pool.truth is not None:
        row["gibbs_objective_gain"] = pool.gain(posterior.policy(pool.x, pool.log_ratio), posterior.kl_coef)
    return row


def describe_questions(posterior: Posterior, pool: Pool, picked: Tensor) -> dict[str, float]:
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
    accuracy = share_text(row["held_out_accuracy_debiased"])
    gain = f", J of the Gibbs policy {row['gibbs_objective_gain']:+.3f}" if "gibbs_objective_gain" in row else ""
    return f"{row['labels']} labels: held-out debiased accuracy {accuracy}{gain}"


def make_labeller(settings: OnlineConfig, privatize: PrivatizeConfig, seed: int, folder: Path) -> Labeller:
    """The labeller of a recipe's sections; a simulated one has the seed, and its answers in `folder`. UserError for a
    folder that was begun on other terms."""
    epsilon = privatize.epsilon
    if settings.folder is None:
        crowd = settings.crowd
        if crowd is None:
            return Simulated(folder, epsilon, margin, seed)
        return Crowd(folder, epsilon, margin, crowd.persons, crowd.most, seed, crowd.temperature, crowd.laziness)
    folder = settings.folder.expanduser()
    if settings.labeller == "page":
        store = AnswerStore.open(folder, epsilon)
        check_person_budget(store, privatize, settings.folder)
        return store
    if settings.labeller == "command":
        assert settings.command is not None
        return Command(folder, epsilon, settings.command)
    if settings.labeller == "terminal":
        return Terminal(folder, privatize.epsilon_levels or epsilon)
    return FileDrop(folder, epsilon)


def check_person_budget(store: AnswerStore, privatize: PrivatizeConfig, folder: Path) -> None:
    """Refuse (UserError) and close a store that asks a person for more answers than privatize.person_budget allows."""
    total = privatize.person_budget
    if total is None:
        return
    most, _ = split_budget(total, privatize.person_questions)
    if store.most is None or store.most > most or (store.has_levels and (store.budget or 0.0) > total):
        store.close()
        raise UserError(
            f"{folder} must allow at most {most} answers a person, by privatize.person_budget {total:g}: begin a store"
            f" with --budget-per-person {most * store.epsilon!r}"
        )


def margin(question: Question) -> float:
    """r*(response_a) - r*(response_b) of the embedded task."""
    prompt = str(question.prompt)
    return true_reward(prompt, str(question.response_a)) - true_reward(prompt, str(question.response_b))
