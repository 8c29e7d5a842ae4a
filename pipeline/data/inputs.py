"""Inputs of the stages without raw labels: demonstrations, prompts, released preferences.

`released` is the folder of the stage that released the labels, with `release` and `evaluation` in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from private_rlhf.core.errors import UserError
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.formats import Demonstration, read_demonstrations, read_prompts
from private_rlhf.data.release import Release, read_release
from private_rlhf.data.render import Prompt, Renderer, keep_fitting, keep_fitting_pairs, prompt_key
from private_rlhf.embedded import task
from private_rlhf.embedded.task import Split
from private_rlhf.recipe import OF_RELEASE, DataConfig, ModelConfig

T = TypeVar("T")


def make_renderer(model: ModelConfig, tokenizer: Any) -> Renderer:
    """The recipe's one renderer for `tokenizer`, whose model may take less than model.max_text_tokens."""
    limits = (model.max_prompt_tokens, model.max_response_tokens)
    longest = min(model.max_text_tokens, tokenizer.model_max_length)
    return Renderer(tokenizer, *limits, model.system_prompt, model.chat_template_kwargs, longest)


def demonstrations(source: str, released: Path, options: Options | None = None) -> list[Demonstration]:
    """The demonstrations that data.demonstrations names, for SFT. options: of message keys and special tokens in files,
    as everywhere here.

    Of every released pair, `release` takes the response with the smaller digest and `release_both` both in the order of
    their digests: rules symmetric in the two responses, so that π_ref depends on no label, private or not.
    `release_preferred` takes what the private label prefers, and π_ref is then as private as that label.
    """
    if source == "embedded":
        return [Demonstration(*answer) for answer in task.load_demonstrations()]
    if source == "release_preferred":
        return [Demonstration(row.prompt, row.chosen) for row in release(released)]
    if source in OF_RELEASE:
        count = 2 if source == "release_both" else 1
        return [
            Demonstration(row.prompt, response)
            for row in release(released)
            for response in in_own_order([row.chosen, row.rejected])[:count]
        ]
    return in_own_order(list(read_demonstrations(source, None, options)))


def keep_demonstrations(
    source: str, released: Path, renderer: Renderer, too_long: str, options: Options | None = None
) -> tuple[list[Demonstration], int]:
    """(The demonstrations within the limits, count of those left out). UserError: see `keep_fitting`."""
    rows = demonstrations(source, released, options)
    prompts, responses = [row.prompt for row in rows], [row.response for row in rows]
    places = keep_fitting(prompts, renderer, too_long, responses)
    return [rows[place] for place in places], len(rows) - len(places)


def training_prompts(source: str, released: Path, options: Options | None = None) -> list[Prompt]:
    """Distinct prompts for PPO rollouts that data.prompts names, in a fixed order."""
    return _prompts(source, "train", lambda: release(released), options)


def evaluation_prompts(source: str, released: Path, options: Options | None = None) -> list[Prompt]:
    """Distinct held-out prompts that data.evaluation_prompts names, in a fixed order."""
    return _prompts(source, "eval", lambda: evaluation_release(released), options)


def _prompts(
    source: str, split: Split, read_rows: Callable[[], Release], options: Options | None
) -> list[Prompt]:
    if source == "embedded":
        return list(task.load_prompts(split))
    if source in ("release", "evaluation"):
        return distinct([row.prompt for row in read_rows().rows])
    return in_own_order(distinct(list(read_prompts(source, None, options))))


def check_lengths(data: DataConfig, released: Path, renderer: Renderer, too_long: str) -> None:
    """Check the lengths of all prompts and texts that later stages read, before the first one trains.

    Raises:
        UserError: names the data key, the source and the prompt; with model.too_long: drop, only when all of a
            source's texts are over a limit.
    """

    def check_prompts(prompts: Sequence[Prompt]) -> None:
        keep_fitting(prompts, renderer, too_long)

    def check_demonstrations() -> None:
        keep_demonstrations(data.demonstrations, released, renderer, too_long, options)

    def check_pairs(bundle: Release) -> None:
        keep_fitting_pairs(bundle.rows, renderer, too_long)

    options = Options.of(data)
    shared = (released, options)
    checks: list[tuple[str, str, Callable[[], Any]]] = [
        ("demonstrations", "", check_demonstrations),
        ("preferences", "", lambda: check_pairs(release(released))),
        ("prompts", "", lambda: check_prompts(training_prompts(data.prompts, *shared))),
        ("evaluation_prompts", "", lambda: check_prompts(evaluation_prompts(data.evaluation_prompts, *shared))),
        ("preferences", " (evaluation)", lambda: check_pairs(evaluation_release(released))),
    ]
    has_release = (released / "release").is_dir()  # `--only sft` on other demonstrations does without
    for key, part, check in checks:
        if not has_release and (key == "preferences" or data.from_release(key)):
            continue
        try:
            check()
        except UserError as error:
            raise UserError(f"data.{key}={getattr(data, key)}{part}: {error}") from None


def release(released: Path) -> Release:
    """The released training preferences of a run."""
    return read_release(released / "release")


def evaluation_release(released: Path) -> Release:
    """The released evaluation preferences of a run (raw labels only where they are declared public)."""
    return read_release(released / "evaluation")


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
    """SHA-256 of the parsed rows of a label-free input, to notice a change; the name itself for built-in sources.

    The parsed prompts or demonstrations are hashed, in the order in which stages read them, never the file: prompts may
    be read from a preference file, and an unkeyed digest of its bytes would let anyone test guesses of its labels.

    Args:
        key: `demonstrations`, `prompts` or `evaluation_prompts`.
    """
    source: str = getattr(data, key)
    if data.built_in(key) or not Path(source).expanduser().exists():
        return source
    read = read_demonstrations if key == "demonstrations" else read_prompts
    rows = read(source, None, Options.of(data))
    return hashlib.sha256(b"".join(sorted(map(row_digest, rows)))).hexdigest()
