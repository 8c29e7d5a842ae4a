"""The `design` command: what labels would bring, before anyone is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from private_rlhf.commands.options import Force
from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError, print_lines
from private_rlhf.core.noise import HARDLY, LabelNoise, bound_of, check_epsilon
from private_rlhf.core.noise_levels import mean_factor
from private_rlhf.core.outputs import begins_with, output_file
from private_rlhf.privacy.mechanism import LevelledResponse

if TYPE_CHECKING:
    from private_rlhf.data.release import Release
    from private_rlhf.evaluation.forecast import Answers, Forecast, Terms

PAGE, FIGURE = r"# \d+ labels at ε = ", r'<svg [^>]*aria-label="Retained gain'
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)  # ε, and times the labels that are asked about
NOTE = (
    "Median of simulated rewards, 5 % and 95 %. Retained: of the J gain of as many true labels. The policy is the "
    "Gibbs policy of the learnt reward; PPO reaches most of its gain."
)
TRUST = (
    "Whom people must trust: nobody where their own device changes answers, and who holds the key where `privatize` "
    "does. In the last row one party sees every true answer. Only the sum that it publishes is private, at ε = "
    "{epsilon:g} and δ = {delta:g}, and carries what {true} true labels would. The program does not offer that."
)


def design(
    people: Annotated[int, typer.Option("--people", min=1, help="People who will be asked.")],
    answers: Annotated[int, typer.Option("--answers", min=1, help="Answers of each of them.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="ε of an answer; or --budget, or --mix.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="ε of all answers of a person: the best number of them is asked.")
    ] = None,
    mix: Annotated[str | None, typer.Option("--mix", help="Share of people by ε of an answer: 0.5:0.3,2:0.7")] = None,
    agreement: Annotated[float | None, typer.Option("--agreement", help="How often two people agree (0.65).")] = None,
    pilot: Annotated[Path | None, typer.Option("--pilot", help="A release, to estimate --agreement from.")] = None,
    kl_coef: Annotated[float, typer.Option("--kl-coef", min=1e-3, max=1e6, help="Of J.")] = 0.5,
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
    check_installed("report")
    if agreement is not None and (pilot is not None or not 0.5 < agreement < 1.0):
        rule = "lie between 0.5 and 1" if pilot is None else "be left out with --pilot, which estimates it"
        raise UserError(f"--agreement must {rule}, got {agreement:g}: 0.65 is common, 0.5 is a coin")
    asked, each = terms(answers, epsilon, budget, mix)
    figure = None
    if output is not None:
        if output.suffix == ".svg":
            raise UserError(f"--output must be a Markdown page, got {output}: its figure is the .svg beside it")
        allowed: dict[str, Any] = {"inputs": (policy, prompts, pilot), "force": force}
        output = output_file(output, "--output", rewrites=begins_with(PAGE), **allowed)
        figure = output_file(output.with_suffix(".svg"), "--output", rewrites=begins_with(FIGURE), **allowed)
    from private_rlhf.core import atomic
    from private_rlhf.data.verify import verify_release
    from private_rlhf.lm.model_folders import check_given

    check_given({"--policy": policy} if policy else {}, prompts)
    judged = None if pilot is None else verify_release(pilot).release
    from private_rlhf.evaluation.forecast import DELTA, Answers, Forecast, central_worth, forecasts, margin_scale
    from private_rlhf.report.plots import retained_curve, svg_file

    features, told = draw(policy, prompts, judged, rewards) if policy or pilot else (Answers.normal(), [])
    scales = told[3:] or [margin_scale(agreement or 0.65)] * rewards
    labels, chosen = people * asked, [level for level, _ in each] if isinstance(each, tuple) else [each]
    levels = sorted({*STEPS, *chosen})
    counts = sorted({max(2, round(share * labels)) for share in STEPS})
    cells: list[tuple[int, Terms]] = [(labels, level) for level in levels]
    cells += [(count, each) for count in counts if (count, each) not in cells]
    true = central_worth(features, labels, chosen[0])
    *results, central = forecasts(features, [*cells, (true, math.inf)], scales, kl_coef)
    results.append(Forecast(central.gain, results[levels.index(chosen[0])].public_gain, central.right))
    rows = table([*cells, (f"{labels}, seen by one party", chosen[0])], results)
    texts = (NOTE, "", TRUST.format(epsilon=chosen[0], delta=DELTA, true=true), "", consent(asked, chosen))
    page = "\n".join([*head(people, asked, each, told), "", *rows, "", *texts])
    print_lines(*page.splitlines())
    if output is not None and figure is not None:
        drawing = retained_curve("retained", levels, [result.retained for result in results[: len(levels)]])
        atomic.write_text(figure, svg_file(drawing))
        atomic.write_page(output, f"{page}\n\n![Retained gain by ε]({figure.name})\n")


def terms(answers: int, epsilon: float | None, budget: float | None, mix: str | None = None) -> tuple[int, Terms]:
    """(answers of a person that are asked, ε of each). UserError unless one of the three amounts is given."""
    from private_rlhf.privacy.person import split_budget

    if (epsilon, budget, mix).count(None) != 2:
        raise UserError("--epsilon (of an answer), --budget (of a person's answers) or --mix must be given: give one")
    if mix is not None:
        return answers, shares_of(mix)
    if epsilon is not None:
        return answers, check_epsilon(epsilon, "--epsilon")
    return split_budget(check_epsilon(budget, "--budget"), answers)


def shares_of(text: str) -> tuple[tuple[float, float], ...]:
    """(ε, share of people) of 0.5:0.3,2:0.7, by rising ε. UserError for anything that is no such list."""
    try:
        epsilons, shares = zip(*(map(float, part.split(":")) for part in text.split(",")), strict=True)
    except ValueError:
        epsilons, shares = (), ()
    if not abs(sum(shares) - 1.0) < 1e-6 or min(shares) <= 0.0:
        raise UserError(f"--mix must be EPSILON:SHARE, where shares add up to 1, got {text!r}: write 0.5:0.3,2:0.7")
    LevelledResponse.of(epsilons, "--mix")
    return tuple(sorted(zip(epsilons, shares, strict=True)))


def draw(
    policy: str | None, prompts: str, release: Release | None = None, rewards: int = 0
) -> tuple[Answers, list[float]]:
    """8 answers to each of at most 200 prompts, in the features that a reward head would read, and the `pilot_scales`
    there. Without a checkpoint `policy` features are SmolLM2's, and answers are normal with the release's moments."""
    from private_rlhf.evaluation import checkpoint_comparison as checkpoints
    from private_rlhf.evaluation.forecast import Answers, pilot_scales
    from private_rlhf.lm import base_models, model_folders, models
    from private_rlhf.online.pool import Candidates, CandidateSampler, candidate_basis, candidate_key
    from private_rlhf.recipe import EvaluateConfig, ModelConfig, RewardConfig
    from private_rlhf.reward_models.backbone import load_backbone
    from private_rlhf.reward_models.model import RewardModel
    from private_rlhf.reward_models.pairs import rendered_pairs

    smollm2 = ModelConfig(source="smollm2")
    home = model_folders.check_checkpoint(policy, "--policy") if policy else base_models.base_checkpoint(smollm2)
    renderer, dtype = checkpoints.renderer_of(home, None, None), checkpoints.stored_dtype(home, "cpu")
    layers = RewardModel(load_backbone(Path(home), RewardConfig(), dtype, renderer.tokenizer.pad_token_id))
    model, batch = models.load_causal_lm(home, dtype) if policy else None, EvaluateConfig().batch_size
    sampler = CandidateSampler(model, layers, renderer, batch, progress=True)
    if release is not None:
        rendered = rendered_pairs(release.rows, renderer, "drop")
        tokens = [text for pair in rendered.pairs for text in pair]
        texts = sampler.features(tokens, "pilot pairs").reshape(len(rendered.rows), 2, -1)
    if policy:
        fitting = checkpoints.fitting_both(checkpoints.load_prompts(prompts), [renderer])
        drawn = sampler.draw(fitting[:: max(1, len(fitting) // 200)][:200], 8, candidate_key(0, "design"))
    else:
        drawn = Candidates([], [], [], texts, texts)
    basis = candidate_basis(drawn, None, 1)
    if release is None:
        return Answers(basis.coordinates(drawn.features)), []
    pairs = basis.coordinates(texts[:, 0]) - basis.coordinates(texts[:, 1])
    answers = Answers(basis.coordinates(drawn.features)) if policy else Answers.normal(pairs.square().mean(dim=0))
    return answers, pilot_scales(answers, pairs, release.manifest.noise_of(rendered.rows), rewards)


def head(people: int, asked: int, each: Terms, told: Sequence[float] = ()) -> list[str]:
    """The title, how many true labels these are worth, and what a pilot told, as `pilot_scales` has it."""
    from private_rlhf.evaluation.forecast import agreement_of, noise_of

    labels = people * asked
    worth = mean_factor(noise_of(each, labels)) ** 2
    title = f"# {labels} labels at ε = {text_of(each)}: {asked} of each of {people} people"
    true = f"{worth * labels:.0f} true labels would, Σ tanh²(ε/2): {1 / worth:.1f} are worth a true one."
    if told:
        low, mid, high = (f"{100 * agreement_of(scale):.0f}" for scale in told[:3])
        true += f" By the pilot two people agree on {mid} % of pairs (95 %: {low} to {high}), as far as features tell."
    return [title, "", f"They carry what {true}"]


def text_of(each: Terms) -> str:
    """ε, or each ε with its share."""
    if isinstance(each, tuple):
        return ", ".join(f"{epsilon:g} ({100 * share:g} %)" for epsilon, share in each)
    return f"{each:g}"


def table(cells: Sequence[tuple[object, Terms]], results: Sequence[Forecast]) -> list[str]:
    """A row for each number of labels and ε."""
    from private_rlhf.evaluation.forecast import middle

    rows = ["| labels | ε | answers in the right order | J gain | retained |", "|---|---|---|---|---|"]
    for (labels, each), result in zip(cells, results, strict=True):
        cell = (f"{centre:z.2f} [{low:z.2f}, {high:z.2f}]" for centre, low, high in
                map(middle, (result.right, result.gain, result.retained)))  # fmt: skip
        rows.append(f"| {labels} | {text_of(each)} | {' | '.join(cell)} |")
    return rows


def consent(asked: int, epsilons: Sequence[float]) -> str:
    """A paragraph for a consent form; of several ε a person chooses one."""
    several = len(epsilons) > 1
    text = ". You choose how often, before the first question; your choice is not hidden" if several else ""
    for epsilon in epsilons:
        kept, total = LabelNoise.of(epsilon).kept_of_100, asked * epsilon
        one, most = map(bound_of, (epsilon, total))
        together = f"; whoever sees all of yours, by {most}" if asked > 1 else ""
        if epsilon >= HARDLY:
            together += ". So your answers are hardly protected"
        elif total >= HARDLY:
            together += ". So each answer is protected, and all of yours together hardly"
        text += f". At ε = {epsilon:g}, of" if several else ": of"
        text += (
            f" 100 people who prefer A, {kept} reports say A. Whoever sees one report can change the odds of what "
            f"you prefer by a factor of at most {one}{together}"
        )
    times = f"{asked} times" if asked > 1 else "once"
    return (
        "For the consent form, where people's own device changes answers: “You will be asked which of two answers you "
        f"prefer, at most {times}. Chance may change your answer before anyone sees it{text}.”"
    )
