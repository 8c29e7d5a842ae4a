"""The `design` command: what labels would bring, before anyone is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.noise import LabelNoise, check_epsilon
from private_rlhf.core.outputs import begins_with, output_file

if TYPE_CHECKING:
    from private_rlhf.evaluation.forecast import Answers, Forecast

PAGE, FIGURE = r"# \d+ labels at ε = ", r'<svg [^>]*aria-label="Retained gain'
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)  # ε, and times the labels that are asked about
NOTE = (
    "Median of simulated rewards, 5 % and 95 %. Retained: of the J gain of as many true labels. The policy is the "
    "Gibbs policy of the learnt reward; PPO reaches most of its gain."
)


def design(
    people: Annotated[int, typer.Option("--people", min=1, help="People who will be asked.")],
    answers: Annotated[int, typer.Option("--answers", min=1, help="Answers of each of them.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="ε of an answer; or give --budget.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="ε of all answers of a person: the best number of them is asked.")
    ] = None,
    agreement: Annotated[
        float, typer.Option("--agreement", help="Share of pairs on which two people would agree, in (0.5, 1).")
    ] = 0.65,
    kl_coef: Annotated[float, typer.Option("--kl-coef", min=1e-3, help="Of J.")] = 0.5,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Checkpoint whose answers are compared; without: normal features.")
    ] = None,
    prompts: Annotated[str, typer.Option("--prompts", help="With --policy: a file of prompts.")] = "embedded",
    rewards: Annotated[int, typer.Option("--rewards", min=8, help="Simulated rewards.")] = 20,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the page here too (Markdown), its figure beside it (SVG).")
    ] = None,
    force: Force = False,
) -> None:
    """Forecast what labels would bring at each ε, before anyone is asked; with a paragraph for a consent form."""
    check_installed("train", "report")
    if not 0.5 < agreement < 1.0:
        raise UserError(f"--agreement must lie between 0.5 and 1, got {agreement:g}: 0.65 is common, 0.5 is a coin")
    asked, each = terms(answers, epsilon, budget)
    figure = None
    if output is not None:
        if output.suffix == ".svg":
            raise UserError(f"--output must be a Markdown page, got {output}: its figure is the .svg beside it")
        output = output_file(output, "--output", rewrites=begins_with(PAGE), force=force)
        figure = output_file(output.with_suffix(".svg"), "--output", rewrites=begins_with(FIGURE), force=force)
    from private_rlhf.core import atomic
    from private_rlhf.evaluation.forecast import Answers, forecasts
    from private_rlhf.report.plots import retained_curve, svg_file

    labels = people * asked
    levels = sorted({*STEPS, each})
    counts = sorted({max(2, round(share * labels)) for share in STEPS})
    cells = [*((labels, level) for level in levels), *((count, each) for count in counts if count != labels)]
    features = Answers.normal() if policy is None else draw(policy, prompts)
    results = forecasts(features, cells, agreement, kl_coef, rewards)
    page = "\n".join([*head(people, asked, each), "", *table(cells, results), "", NOTE, "", consent(asked, each)])
    print_lines(*page.splitlines())
    if output is not None and figure is not None:
        drawing = retained_curve("retained", levels, [result.retained for result in results[: len(levels)]])
        atomic.write_text(figure, svg_file(drawing))
        atomic.write_page(output, f"{page}\n\n![Retained gain by ε]({figure.name})\n")


def terms(answers: int, epsilon: float | None, budget: float | None) -> tuple[int, float]:
    """(answers of a person that are asked, ε of each). UserError unless one of the two amounts is given."""
    from private_rlhf.privacy.person import split_budget

    if (epsilon is None) == (budget is None):
        raise UserError("--epsilon (of an answer) or --budget (of a person's answers) must be given: give one of them")
    if epsilon is not None:
        return answers, check_epsilon(epsilon, "--epsilon")
    return split_budget(check_epsilon(budget, "--budget"), answers)


def draw(policy: str, prompts: str) -> Answers:
    """8 answers of a checkpoint to each of at most 200 prompts, in the features that a reward head would read."""
    from private_rlhf.evaluation import checkpoint_comparison as checkpoints
    from private_rlhf.evaluation.forecast import Answers
    from private_rlhf.lm.model_folders import check_checkpoint
    from private_rlhf.lm.models import load_causal_lm
    from private_rlhf.online.pool import CandidateSampler, candidate_basis, candidate_key
    from private_rlhf.recipe import EvaluateConfig, RewardConfig
    from private_rlhf.reward_models.backbone import load_backbone
    from private_rlhf.reward_models.model import RewardModel

    home = check_checkpoint(policy, "--policy")
    renderer = checkpoints.renderer_of(home, None, None)
    dtype = checkpoints.stored_dtype(home, "cpu")
    layers = load_backbone(Path(home), RewardConfig(), dtype, renderer.tokenizer.pad_token_id)
    batch = EvaluateConfig().batch_size
    sampler = CandidateSampler(load_causal_lm(home, dtype), RewardModel(layers), renderer, batch, progress=True)
    fitting = checkpoints.fitting_both(checkpoints.load_prompts(prompts), [renderer])
    drawn = sampler.draw(fitting[:: max(1, len(fitting) // 200)][:200], 8, candidate_key(0, "design"))
    return Answers(candidate_basis(drawn, None, 1).coordinates(drawn.features))


def head(people: int, asked: int, epsilon: float) -> list[str]:
    """The title, and how many true labels these are worth."""
    labels, worth = people * asked, LabelNoise.of(epsilon).factor ** 2
    title = f"# {labels} labels at ε = {epsilon:g}: {asked} of each of {people} people"
    true = f"{worth * labels:.0f} true labels would, n·tanh²(ε/2): {1 / worth:.1f} are worth a true one."
    return [title, "", f"They carry what {true}"]


def table(cells: Sequence[tuple[int, float]], results: Sequence[Forecast]) -> list[str]:
    """A row for each number of labels and ε."""
    from private_rlhf.evaluation.forecast import middle

    rows = ["| labels | ε | answers in the right order | J gain | retained |", "|---|---|---|---|---|"]
    for (labels, epsilon), result in zip(cells, results, strict=True):
        cell = (f"{centre:.2f} [{low:.2f}, {high:.2f}]" for centre, low, high in
                map(middle, (result.right, result.gain, result.retained)))  # fmt: skip
        rows.append(f"| {labels} | {epsilon:g} | {' | '.join(cell)} |")
    return rows


def consent(asked: int, epsilon: float) -> str:
    """A paragraph for a consent form."""
    kept, total = 100 * LabelNoise.of(epsilon).keep_prob, asked * epsilon
    one, most = (f"{math.ceil(10 * math.exp(each)) / 10:,}" if each < 14 else f"e^{math.ceil(each)}"
                 for each in (epsilon, total))  # bounds, so rounded up
    together = "" if total < 5 else " So each answer is protected, and all of yours together hardly."
    return (
        f"For the consent form: “You will be asked which of two answers you prefer, at most {asked} times. Chance may "
        f"change your answer before anyone sees it: of 100 people who prefer A, {kept:.0f} reports say A. Whoever sees "
        f"one report can change the odds of what you prefer by a factor of at most {one}; whoever "
        f"sees all of yours, by {most}.{together}”"
    )
