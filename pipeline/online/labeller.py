"""The labeller that a recipe names."""

from __future__ import annotations

from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.embedded.truth import true_reward
from private_rlhf.labelling.labellers import Command, Crowd, FileDrop, Labeller, Simulated, Terminal
from private_rlhf.labelling.questions import Question
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.privacy.person import split_budget
from private_rlhf.recipe import OnlineConfig, PrivatizeConfig


def make_labeller(settings: OnlineConfig, privatize: PrivatizeConfig, seed: int, folder: Path) -> Labeller:
    """The labeller of a recipe's sections. seed, folder: of a simulated one, and where it keeps its answers.

    UserError for a folder that was begun on other terms.
    """
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
    return Terminal(folder, epsilon) if settings.labeller == "terminal" else FileDrop(folder, epsilon)


def check_person_budget(store: AnswerStore, privatize: PrivatizeConfig, folder: Path) -> None:
    """Refuse (UserError) and close a store that asks a person for more answers than privatize.person_budget allows."""
    total = privatize.person_budget
    if total is None:
        return
    most, _ = split_budget(total, privatize.person_questions)
    if store.most is None or store.most > most:
        store.close()
        raise UserError(
            f"{folder}: its people may give more than the {most} answers of"
            f" privatize.person_budget {total:g}: begin a store with --budget-per-person {most * store.epsilon!r}"
        )


def margin(question: Question) -> float:
    """r*(response_a) - r*(response_b) of the embedded task."""
    prompt = str(question.prompt)
    return true_reward(prompt, str(question.response_a)) - true_reward(prompt, str(question.response_b))
