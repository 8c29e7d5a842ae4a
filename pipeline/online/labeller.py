"""The labeller that a recipe names."""

from __future__ import annotations

from pathlib import Path

from private_rlhf.core.errors import UserError
from private_rlhf.embedded.truth import true_reward
from private_rlhf.labelling.labellers import Command, Crowd, FileDrop, Labeller, Simulated, Terminal
from private_rlhf.labelling.questions import Question
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.privacy.person_budget import split_budget
from private_rlhf.recipe import OnlineConfig, Recipe


def make_labeller(recipe: Recipe, settings: OnlineConfig, own: Path) -> Labeller:
    """own: where a simulated labeller keeps its answers. UserError for a folder that was begun on other terms."""
    epsilon, folder = recipe.privatize.epsilon, settings.folder
    if folder is None:
        if settings.crowd is None:
            return Simulated(own, epsilon, margin, recipe.seed)
        crowd = settings.crowd
        return Crowd(
            own, epsilon, margin, crowd.persons, crowd.most, recipe.seed, crowd.temperature, crowd.laziness
        )
    folder = folder.expanduser()
    if settings.labeller == "page":
        return _within_budget(AnswerStore.open(folder, epsilon), recipe)
    if settings.labeller == "command":
        assert settings.command is not None
        return Command(folder, epsilon, settings.command)
    return Terminal(folder, epsilon) if settings.labeller == "terminal" else FileDrop(folder, epsilon)


def _within_budget(store: AnswerStore, recipe: Recipe) -> AnswerStore:
    """UserError for a store that asks a person more than privatize.person_budget allows."""
    total = recipe.privatize.person_budget
    if total is None:
        return store
    most, _ = split_budget(total, recipe.privatize.person_questions)
    if store.most is None or store.most > most:
        store.close()
        raise UserError(
            f"{recipe.online and recipe.online.folder}: its people may give more than the {most} answers of"
            f" privatize.person_budget {total:g}: begin a store with --budget-per-person {most * store.epsilon!r}"
        )
    return store


def margin(question: Question) -> float:
    """r*(response_a) - r*(response_b) of the embedded task."""
    prompt = str(question.prompt)
    return true_reward(prompt, str(question.response_a)) - true_reward(prompt, str(question.response_b))
