"""What a recipe's data keys name: demonstrations, prompts, released preferences. No raw label passes through here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from private_rlhf.core.errors import UserError
from private_rlhf.core.recipe import Recipe
from private_rlhf.core.recipe_inputs import DataConfig, ModelConfig
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.formats import Demonstration, read_demonstrations, read_prompts
from private_rlhf.data.release import Release, read_release
from private_rlhf.data.render import Prompt, Renderer, keep_fitting, keep_fitting_pairs, prompt_key
from private_rlhf.embedded import task
from private_rlhf.embedded.topics import Split

T = TypeVar("T")


def make_renderer(model: ModelConfig, tokenizer: Any) -> Renderer:
    """The recipe's one renderer for `tokenizer`, whose model may take less than model.max_text_tokens."""
    limits = (model.max_prompt_tokens, model.max_response_tokens)
    longest = min(model.max_text_tokens, tokenizer.model_max_length)
    return Renderer(tokenizer, *limits, model.system_prompt, model.chat_template_kwargs, longest)


def demonstrations(recipe: Recipe, run: RunDir) -> list[Demonstration]:
    """What SFT imitates.

    Of every released pair, `release` takes the response with the smaller digest and `release_both` both in the order of
    their digests: rules symmetric in the two responses, so that π_ref depends on no label, private or not.
    `release_preferred` takes what the private label prefers, and π_ref is then as private as that label.
    """
    source = recipe.data.demonstrations
    if source == "embedded":
        return [Demonstration(*answer) for answer in task.load_demonstrations()]
    if source == "release_preferred":
        return [Demonstration(row.prompt, row.chosen) for row in release(run)]
    if recipe.data.from_release("demonstrations"):
        count = 2 if source == "release_both" else 1
        return [
            Demonstration(row.prompt, response)
            for row in release(run)
            for response in in_own_order([row.chosen, row.rejected])[:count]
        ]
    return in_own_order(list(read_demonstrations(source)))


def keep_demonstrations(recipe: Recipe, run: RunDir, renderer: Renderer) -> tuple[list[Demonstration], int]:
    """(The demonstrations within the limits, how many were left out). UserError: see `keep_fitting`."""
    rows = demonstrations(recipe, run)
    prompts, responses = [row.prompt for row in rows], [row.response for row in rows]
    kept = keep_fitting(prompts, renderer, recipe.model.too_long, responses)
    return [rows[index] for index in kept], len(rows) - len(kept)


def training_prompts(recipe: Recipe, run: RunDir) -> list[Prompt]:
    """Distinct prompts for PPO rollouts, in a fixed order."""
    return _prompts(recipe.data.prompts, "train", lambda: release(run))


def evaluation_prompts(recipe: Recipe, run: RunDir) -> list[Prompt]:
    """Distinct held-out prompts, in a fixed order."""
    return _prompts(recipe.data.evaluation_prompts, "eval", lambda: evaluation_release(run))


def _prompts(source: str, split: Split, released: Callable[[], Release]) -> list[Prompt]:
    if source == "embedded":
        return list(task.load_prompts(split))
    if source in ("release", "evaluation"):
        return distinct([row.prompt for row in released().rows])
    return in_own_order(distinct(list(read_prompts(source))))


def check_lengths(recipe: Recipe, run: RunDir, renderer: Renderer) -> None:
    """Looks for prompts and texts over their limits in everything that later stages read, before the first one trains.

    Raises:
        UserError: names the data key, the source and the prompt; with model.too_long: drop, only when all of a
            source's texts are over a limit.
    """
    data, too_long = recipe.data, recipe.model.too_long

    def of_prompts(read: Callable[[Recipe, RunDir], Sequence[Prompt]]) -> Callable[[], Any]:
        return lambda: keep_fitting(read(recipe, run), renderer, too_long)

    def of_pairs(read: Callable[[RunDir], Release]) -> Callable[[], Any]:
        return lambda: keep_fitting_pairs(read(run).rows, renderer, too_long)

    sources: list[tuple[str, str, Callable[[], Any]]] = [
        ("demonstrations", "", lambda: keep_demonstrations(recipe, run, renderer)),
        ("preferences", "", of_pairs(release)),
        ("prompts", "", of_prompts(training_prompts)),
        ("evaluation_prompts", "", of_prompts(evaluation_prompts)),
        ("preferences", " (evaluation)", of_pairs(evaluation_release)),
    ]
    released = (run.released / "release").is_dir()  # `--only sft` on other demonstrations does without
    for key, part, read in sources:
        if not released and (key == "preferences" or data.from_release(key)):
            continue
        try:
            read()
        except UserError as error:
            raise UserError(f"data.{key}={getattr(data, key)}{part}: {error}") from None


def release(run: RunDir) -> Release:
    """The released training preferences of a run."""
    return read_release(run.released / "release")


def evaluation_release(run: RunDir) -> Release:
    """The released evaluation preferences of a run (raw labels only where they are declared public)."""
    return read_release(run.released / "evaluation")


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """`prompts` without repetitions, first ones kept."""
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        seen.setdefault(prompt_key(prompt), prompt)
    return list(seen.values())


def in_own_order(rows: list[T]) -> list[T]:
    """Rows of a file sorted by a digest of their own: how a file is sorted may tell which answers were preferred."""
    return sorted(rows, key=row_digest)


def row_digest(row: Any) -> bytes:
    """SHA-256 of a parsed row."""
    return hashlib.sha256(repr(row).encode()).digest()


def input_digest(key: str, data: DataConfig) -> str:
    """SHA-256 of what a label-free input *parses to*, to notice that it changed; the name itself for built-in sources.

    The parsed prompts or demonstrations are hashed, in the order in which stages read them, never the file: prompts may
    be read from a preference file, and an unkeyed digest of its bytes would let anyone test guesses of its labels.

    Args:
        key: `demonstrations`, `prompts` or `evaluation_prompts`.
    """
    source: str = getattr(data, key)
    if data.built_in(key) or not Path(source).expanduser().exists():
        return source
    rows = read_demonstrations(source) if key == "demonstrations" else read_prompts(source)
    return hashlib.sha256(b"".join(sorted(map(row_digest, rows)))).hexdigest()
