"""How many tokens each stage samples, reads and learns from, and how long texts are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from private_rlhf.core.recipe import PpoConfig, Recipe
from private_rlhf.core.recipe_aligners import ON_PROMPTS, GroupConfig
from private_rlhf.core.rundir import RunDir
from private_rlhf.data import inputs
from private_rlhf.data.render import Prompt, Renderer
from private_rlhf.embedded import task
from private_rlhf.evaluation.likelihood import LIKELIHOOD_TEXTS
from private_rlhf.evaluation.samples import KL_TEXTS, LEAST_CENTRING
from private_rlhf.privacy.records import Text
from private_rlhf.rl.trainer import EVALUATED


@dataclass(frozen=True)
class Lengths:
    """Tokens of texts of one kind: how many there are (None: unknown), their mean, deviation and longest."""

    count: int | None
    mean: float
    deviation: float
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        """Of texts that were read."""
        return cls(len(lengths), fmean(lengths), pstdev(lengths), max(lengths))

    @classmethod
    def at_most(cls, longest: int, count: int | None = None) -> Lengths:
        """Of texts that are not known yet."""
        return cls(count, longest, 0.0, longest)

    def batch(self, size: int) -> float:
        """Tokens of a large batch of `size` texts: two deviations above the mean one, all of them longest at most."""
        return min(size * self.longest, size * self.mean + 2 * self.deviation * math.sqrt(size))


@dataclass(frozen=True)
class Texts:
    """Lengths of what a recipe reads. `sampled` responses are at most as long as the recipe's cap; where demonstrations
    were read their mean is that of those, which π_ref imitates."""

    demonstrated: Lengths
    demonstrations: Lengths
    prompts: Lengths
    pair_prompts: Lengths
    pair_responses: Lengths
    evaluation_prompts: Lengths
    evaluation_pairs: int | None
    sampled: Lengths
    read: bool


@dataclass(frozen=True)
class Work:
    """Tokens of one stage over all processes; None where the number of texts is unknown.

    Attributes:
        sampled: decoded one by one.
        read: by the language model without gradients, passes over one text counted each.
        scored: by the reward model.
        trained: forward and backward, in micro-batches.
        responses: how many are sampled.
    """

    sampled: float | None = 0
    read: float | None = 0
    scored: float | None = 0
    trained: float | None = 0
    responses: float = 0


def texts_of(recipe: Recipe, run: RunDir, renderer: Renderer | None) -> Texts:
    """Lengths of the recipe's texts, read where they carry no label and are here; else the limits of the recipe.

    Of preferences, the embedded ones without labels and released ones are read, raw ones never.
    """
    data, model = recipe.data, recipe.model
    released = (run.released / "release").is_dir()
    prompt, cap = Lengths.at_most(model.max_prompt_tokens), Lengths.at_most(model.max_response_tokens)
    given = Lengths.at_most(max(1, model.max_text_tokens - model.max_prompt_tokens))

    def known(key: str) -> bool:
        source: str = getattr(data, key)
        here = released if data.from_release(key) else data.built_in(key) or Path(source).expanduser().exists()
        return renderer is not None and here

    def prompt_lengths(prompts: Sequence[Prompt]) -> Lengths:
        assert renderer is not None
        found = [renderer.prompt_size(each) for each in prompts]
        return Lengths.of([length for length in found if length <= model.max_prompt_tokens] or [1])

    def response_lengths(responses: Sequence[Text]) -> Lengths:
        assert renderer is not None
        return Lengths.of([len(renderer.response_ids(each)) for each in responses])

    demonstrated, demonstrations, sampled = prompt, given, cap
    if known("demonstrations"):
        assert renderer is not None
        everything = inputs.demonstrations(data.demonstrations, run.released)
        rows = [row for row in everything if renderer.fits(row.prompt, row.response)]
        demonstrated = prompt_lengths([row.prompt for row in rows])
        demonstrations = response_lengths([row.response for row in rows])
        sampled = Lengths(None, min(demonstrations.mean, cap.longest), 0.0, cap.longest)
    prompts = prompt_lengths(inputs.training_prompts(data.prompts, run.released)) if known("prompts") else prompt
    held_out = prompt
    if known("evaluation_prompts"):
        held_out = prompt_lengths(inputs.evaluation_prompts(data.evaluation_prompts, run.released))
    pairs, evaluation_pairs = _pairs(recipe, run, released) if renderer is not None else (None, None)
    if pairs is None:
        pair_prompts, pair_responses = Lengths.at_most(prompt.longest, data.limit), given
    else:
        assert renderer is not None
        pairs = [each for each in pairs if renderer.fits(*each)]
        pair_prompts = prompt_lengths([each[0] for each in pairs])
        pair_responses = response_lengths([text for each in pairs for text in each[1:]])
    whole = known("demonstrations") and known("prompts") and pairs is not None
    return Texts(
        demonstrated, demonstrations, prompts, pair_prompts, pair_responses, held_out, evaluation_pairs, sampled, whole
    )


def _pairs(recipe: Recipe, run: RunDir, released: bool) -> tuple[list[Any] | None, int | None]:
    """(prompt, response, response) of training pairs in no order that tells a label, and how many held-out pairs."""
    if released:
        rows = inputs.release(run.released).rows
        held_out = len(inputs.evaluation_release(run.released).rows)
        return [(row.prompt, row.chosen, row.rejected) for row in rows], held_out
    if recipe.data.preferences == "embedded":
        return list(task.load_pairs("train"))[: recipe.data.limit], len(task.load_pairs("eval"))
    return None, None


def work_of(recipe: Recipe, texts: Texts) -> dict[str, Work]:
    """The tokens of every stage of the recipe that runs a model."""
    found = {"sft": _sft(recipe, texts)}
    if recipe.reward.external is None:
        found["reward"] = _reward(recipe, texts)
    found[recipe.aligner] = _dpo(recipe, texts) if recipe.aligner == "dpo" else _on_prompts(recipe, texts)
    return found | {"evaluate": _evaluate(recipe, texts)}


def rows_trained(settings: Any, count: int | None) -> float | None:
    """Rows that a trainer's section learns from, counted in every epoch; None if their number is unknown."""
    if settings.max_steps > 0:
        return float(settings.max_steps * settings.batch_size)
    return None if count is None else settings.epochs * (count // settings.batch_size) * settings.batch_size


def times(count: float | None, tokens: float) -> float | None:
    """count · tokens; None for an unknown count."""
    return None if count is None else count * tokens


def _sft(recipe: Recipe, texts: Texts) -> Work:
    length = texts.demonstrated.mean + texts.demonstrations.mean
    return Work(trained=times(rows_trained(recipe.sft, texts.demonstrations.count), length))


def _reward(recipe: Recipe, texts: Texts) -> Work:
    settings, count = recipe.reward, texts.pair_prompts.count
    length = texts.pair_prompts.mean + 2 * texts.pair_responses.mean  # the prompt of a pair is read once
    frozen = settings.mode == "head"
    passes = 1 if frozen else 1 + int(settings.head_warmup)
    trained = None if count is None else int(count * (1 - settings.validation_fraction))
    learnt = 0.0 if frozen else times(rows_trained(settings, trained), length)
    return Work(scored=times(count, passes * length), trained=learnt)


def _on_prompts(recipe: Recipe, texts: Texts) -> Work:
    settings, ppo, response = getattr(recipe, recipe.aligner), recipe.ppo, texts.sampled.mean
    rollouts = settings.iterations * settings.rollouts
    available = min(texts.prompts.count or rollouts, ppo.max_prompts or rollouts)
    seen = min(available, rollouts // settings.samples_per_prompt or 1)
    references = seen * ppo.reference_samples if recipe.draws_references else 0
    length = texts.prompts.mean + response
    return Work(
        sampled=(rollouts + references) * response,
        read=2 * rollouts * length,
        scored=(rollouts + references) * length,
        trained=settings.epochs * rollouts * length,
        responses=rollouts + references,
    )


def _dpo(recipe: Recipe, texts: Texts) -> Work:
    length = texts.pair_prompts.mean + 2 * texts.pair_responses.mean
    tokens = times(rows_trained(recipe.dpo, texts.pair_prompts.count), length)
    return Work(read=tokens, trained=tokens)


def _evaluate(recipe: Recipe, texts: Texts) -> Work:
    settings = recipe.evaluate
    prompts = min(settings.num_prompts, texts.evaluation_prompts.count or settings.num_prompts)
    least = LEAST_CENTRING if recipe.reward.kappa > 0 else 1
    candidates = max(settings.gibbs_candidates, least)
    answers = prompts * (candidates + 2 * settings.samples_per_prompt)
    length = texts.evaluation_prompts.mean + texts.sampled.mean
    known = [each for each in (settings.max_pairs, texts.evaluation_pairs) if each is not None]
    pairs = min(known) if known else None
    likelihood = times(pairs, 2 * (texts.pair_prompts.mean + 2 * texts.pair_responses.mean))
    divergence = 2 * prompts * settings.samples_per_prompt * length
    return Work(
        sampled=answers * texts.sampled.mean,
        read=None if likelihood is None else likelihood + divergence,
        scored=(answers + prompts * candidates) * length,  # candidates are read once more, to centre Γ
        responses=answers,
    )


def passes_of(recipe: Recipe, texts: Texts, processes: int) -> dict[str, tuple[float, float]]:
    """(forward passes, micro-batches learnt from) of one process, by stage; infinite where counts are unknown.

    Every one has a shape of its own, for which kernels are kept (`memory.kernels`).
    """
    unknown, evaluate = float("inf"), recipe.evaluate
    pairs = texts.pair_prompts.count or unknown

    def learnt(settings: Any, count: float) -> float:
        rows = rows_trained(settings, None if count == unknown else int(count))
        return unknown if rows is None else rows / (settings.micro_batch_size or settings.batch_size)

    texts_at_once = recipe.reward.feature_batch_size

    def sampling(settings: PpoConfig | GroupConfig) -> tuple[float, float]:
        minibatch = settings.micro_batch_size or max(1, settings.batch_size // processes)
        reads = 2 * math.ceil(settings.rollouts / minibatch / EVALUATED) + math.ceil(settings.rollouts / texts_at_once)
        return settings.iterations * reads, settings.iterations * settings.epochs * settings.rollouts / minibatch

    answers = work_of(recipe, texts)["evaluate"].responses
    compared = evaluate.num_prompts * (1 + 2 * evaluate.samples_per_prompt / KL_TEXTS)
    likelihood = 4 * (min(evaluate.max_pairs or unknown, texts.evaluation_pairs or unknown)) / LIKELIHOOD_TEXTS
    frozen = recipe.reward.mode == "head"
    everything = {
        "sft": (0.0, learnt(recipe.sft, texts.demonstrations.count or unknown)),
        "reward": (2 * pairs / texts_at_once * (1 if frozen else 2), 0.0 if frozen else learnt(recipe.reward, pairs)),
        **{name: sampling(getattr(recipe, name)) for name in ON_PROMPTS},
        "dpo": (learnt(recipe.dpo, pairs), learnt(recipe.dpo, pairs)),
        "evaluate": (answers / texts_at_once + compared + likelihood, 0.0),
    }
    return {stage: (passes / processes, steps / processes) for stage, (passes, steps) in everything.items()}
