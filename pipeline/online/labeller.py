"""The labeller that a recipe names."""

from __future__ import annotations

from pathlib import Path

from pipeline.core.recipe import Recipe
from pipeline.core.recipe_online import OnlineConfig
from pipeline.embedded.truth import true_reward
from pipeline.labelling.labellers import Command, Crowd, FileDrop, Labeller, Simulated, Terminal
from pipeline.labelling.questions import Question
from pipeline.labelling.store import AnswerStore


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
        return AnswerStore.open(folder, epsilon)
    if settings.labeller == "command":
        assert settings.command is not None
        return Command(folder, epsilon, settings.command)
    return Terminal(folder, epsilon) if settings.labeller == "terminal" else FileDrop(folder, epsilon)


def margin(question: Question) -> float:
    """r*(response_a) - r*(response_b) of the embedded task."""
    prompt = str(question.prompt)
    return true_reward(prompt, str(question.response_a)) - true_reward(prompt, str(question.response_b))
