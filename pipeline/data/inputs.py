"""Inputs of the stages without raw labels: demonstrations, prompts, released preferences.

`released` is the folder of the stage that released the labels, with `release` and `evaluation` in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from private_rlhf.core.errors import UserError
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.data.render import Demonstration, Prompt, Renderer, keep_fitting, keep_fitting_pairs, prompt_key
from private_rlhf.embedded import task
from private_rlhf.recipe import OF_RELEASE, DataConfig

T = TypeVar("T")


def demonstrations(data: DataConfig, released: Path) -> list[Demonstration]:
    """The demonstrations that data.demonstrations names, for SFT.

    Of every released pair, `release` takes the response with the smaller digest and `release_both` both in the order of
    their digests: rules symmetric in the two responses, so that π_ref depends on no label, private or not.
    `release_preferred` takes what the private label prefers, and π_ref is then as private as that label.
    """
    source = data.demonstrations
    if source == "embedded":
        return [Demonstration(*answer) for answer in task.load_demonstrations()]
    if source == "release_preferred":
        return [Demonstration(row.prompt, row.chosen) for row in read_release(released / "release")]
    if source in OF_RELEASE:
        count = 2 if source == "release_both" else 1
        return [
            Demonstration(row.prompt, response)
            for row in read_release(released / "release")
            for response in in_own_order([row.chosen, row.rejected])[:count]
        ]
    return in_own_order(list(rows_of_file(data, "demonstrations")))


def keep_demonstrations(
    data: DataConfig, released: Path, renderer: Renderer, too_long: str
) -> tuple[list[Demonstration], int]:
    """(The demonstrations within the limits, count of those left out). UserError: see `keep_fitting`."""
    rows = demonstrations(data, released)
    prompts, responses = [row.prompt for row in rows], [row.response for row in rows]
    places = keep_fitting(prompts, renderer, too_long, responses)
    return [rows[place] for place in places], len(rows) - len(places)


def released_answers(
    pairs: Iterable[ReleasedPair], renderer: Renderer, prompts: Sequence[Prompt], count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and answers: up to `count` different answers of the released pairs to each of these prompts,
    of those that a policy could draw. Which ones they are depends on the texts and on no label. UserError: none is.
    """
    by_prompt: dict[str, list[Any]] = {prompt_key(prompt): [] for prompt in prompts}
    for pair in pairs:
        by_prompt.get(prompt_key(pair.prompt), []).extend((pair.chosen, pair.rejected))
    rows: list[tuple[list[int], list[int]]] = []
    for prompt in prompts:
        ids = [renderer.learnt_ids(each) for each in in_own_order(distinct(by_prompt[prompt_key(prompt)]))]
        drawable = [each for each in ids if min(each) >= 0 and len(each) <= renderer.max_response_tokens]
        rows += [(renderer.prompt_ids(prompt), each) for each in drawable[:count]]
    if not rows:
        limit = f"model.max_response_tokens = {renderer.max_response_tokens}"
        rule = f"0 where no released answer to the training prompts is within {limit}"
        raise UserError(f"gvpo.released_answers must be {rule}, got {count}: raise the limit or set it to 0")
    return [prompt for prompt, _ in rows], [answer for _, answer in rows]


def named_prompts(data: DataConfig, key: Literal["prompts", "evaluation_prompts"], released: Path) -> list[Prompt]:
    """Distinct prompts that data.prompts (for rollouts) or data.evaluation_prompts (held-out ones) names, in a fixed
    order."""
    source = getattr(data, key)
    if source == "embedded":
        return list(task.load_prompts("train" if key == "prompts" else "eval"))
    if source in ("release", "evaluation"):
        return distinct([row.prompt for row in read_release(released / source)])
    return in_own_order(distinct(list(rows_of_file(data, key))))


def rows_of_file(data: DataConfig, key: str) -> Iterator[Any]:
    """The demonstrations or prompts in the file that a data key names."""
    from private_rlhf.data.declared_columns import Options
    from private_rlhf.data.formats import read_demonstrations, read_prompts

    read = read_demonstrations if key == "demonstrations" else read_prompts
    return read(getattr(data, key), None, Options.of(data))


def check_lengths(data: DataConfig, released: Path, renderer: Renderer, too_long: str) -> None:
    """Check the lengths of all prompts and texts that later stages read, before the first one trains. UserError, which
    names the data key, the source and the prompt; with model.too_long: drop, only when all of a source's texts are over
    a limit."""
    limits, train, test = (renderer, too_long), released / "release", released / "evaluation"
    checks: list[tuple[str, str, Callable[[], Any]]] = [
        ("demonstrations", "", lambda: keep_demonstrations(data, released, *limits)),
        ("preferences", "", lambda: keep_fitting_pairs(read_release(train).rows, *limits)),
        ("prompts", "", lambda: keep_fitting(named_prompts(data, "prompts", released), *limits)),
        ("evaluation_prompts", "", lambda: keep_fitting(named_prompts(data, "evaluation_prompts", released), *limits)),
        ("preferences", " (evaluation)", lambda: keep_fitting_pairs(read_release(test).rows, *limits)),
    ]
    has_release = train.is_dir()  # `--only sft` on other demonstrations does without
    for key, part, check in checks:
        if not has_release and (key == "preferences" or data.from_release(key)):
            continue
        try:
            check()
        except UserError as error:
            raise UserError(f"data.{key}={getattr(data, key)}{part}: {error}") from None


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
    """
    source: str = getattr(data, key)
    if data.built_in(key) or not Path(source).expanduser().exists():
        return source
    return hashlib.sha256(b"".join(sorted(map(row_digest, rows_of_file(data, key))))).hexdigest()
