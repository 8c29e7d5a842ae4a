"""The `sample` command: answers of a policy on the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from private_rlhf.core.errors import printable


def sample(
    policy: Annotated[str, typer.Option("--policy", help="Checkpoint folder, e.g. runs/demo/ppo/model.")],
    prompt: Annotated[list[str], typer.Argument(help="Prompts to answer.")],
    count: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    max_response_tokens: Annotated[
        int | None, typer.Option(min=2, help="Cap on a response; default: the policy's own.")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message; default: the policy's own.")] = None,
) -> None:
    """Print sampled answers of a policy."""
    from private_rlhf.evaluation.checkpoint_comparison import sample_text

    for text, answers in zip(
        prompt, sample_text(policy, prompt, count, seed, max_response_tokens, system_prompt), strict=True
    ):
        print(printable(f"> {text}"))
        for answer in answers:
            print(printable(f"  {answer}"))
