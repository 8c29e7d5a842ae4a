"""`private-rlhf account KIND …`: an accountant on the command line, its guarantee in words or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from private_rlhf.commands.options import refuse_moved
from private_rlhf.core.errors import UserError, print_lines

if TYPE_CHECKING:
    from private_rlhf.accounting.epsilon_delta import Guarantee

app = typer.Typer(
    no_args_is_help=True,
    help="Compute (ε, δ) of a mechanism from its parameters: what is promised, in words, and what is assumed.",
)
IN_THE_LAB = ("bandit", "linear", "rlhf", "rlhf-features", "inexact", "combined", "repeated", "dptd", "private-rl")
for kind in IN_THE_LAB:
    refuse_moved(app, kind, f"account {kind}")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, not words.")]


@app.command("randomized-response")
def randomized_response(
    epsilon: Annotated[float, typer.Option("--epsilon", help="ε of one label, > 0.")],
    labels_per_person: Annotated[int, typer.Option("--labels-per-person", help="Most labels of one person, ≥ 1.")],
    target_delta: Annotated[float, typer.Option("--target-delta", help="δ of the exact (ε, δ) beside m·ε.")] = 1e-6,
    as_json: AsJson = False,
) -> None:
    """All labels of one person under randomised response."""
    from private_rlhf.accounting.people import randomized_response as accountant

    print_guarantee(accountant, epsilon, labels_per_person, target_delta, as_json=as_json)


@app.command()
def person(
    budget: Annotated[float, typer.Option("--budget", help="E: the most that one person may lose, > 0.")] = 0.0,
    questions: Annotated[int, typer.Option("--questions", help="n: the most that anyone is asked, ≥ 1.")] = 0,
    given: Annotated[str, typer.Option("--answers", help="Instead: how many were given at each ε, 0.5:10,4:2.")] = "",
    target_delta: Annotated[float, typer.Option("--target-delta", help="δ of the exact (ε, δ) beside E.")] = 1e-6,
    as_json: AsJson = False,
) -> None:
    """Print a table of answers per person and their ε within a budget, the best marked; or what answers cost."""
    from private_rlhf.accounting import people

    if given and (budget or questions):
        raise UserError("--answers must be given without --budget and --questions: leave them out")
    if given:
        print_guarantee(people.at_levels, _by_level(given), target_delta, as_json=as_json)
        return
    if as_json:
        print_guarantee(people.person, budget, questions, target_delta, as_json=True)
        return
    from private_rlhf.core.noise import upper_text

    best = guarantee_of(people.person, budget, questions, target_delta)
    print_lines(f"answers  ε of each  information  ε at δ = {target_delta:g}")
    for row in best.details["table"]:
        exact = "-" if row["epsilon_at_delta"] is None else upper_text(row["epsilon_at_delta"])
        line = f"{row['answers']:>7}  {row['epsilon']:>9.4g}  {row['information']:>11.4f}  {exact:>8}"
        print_lines(line + ("  <- best" if row["answers"] == best.details["answers"] else ""))
    print_lines(f"{best.statement}; information: of all answers together, relative to the best, at margin 0")


def _by_level(text: str) -> list[tuple[float, int]]:
    try:
        return [(float(epsilon), int(number)) for epsilon, number in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise UserError(f"--answers must be EPSILON:NUMBER, as in 0.5:10,4:2, got {text!r}: write it so") from None


def guarantee_of(accountant: Callable[..., Guarantee], *values: Any, **options: Any) -> Guarantee:
    """The accountant's guarantee; its refusals name the flag. UserError."""
    from private_rlhf.accounting.epsilon_delta import OutsideAssumptions

    try:
        return accountant(*values, **options)
    except OutsideAssumptions as refusal:
        raise UserError(f"--{refusal.name.replace('_', '-')} {refusal.problem}") from None


def print_guarantee(accountant: Callable[..., Guarantee], *values: Any, as_json: bool = False, **options: Any) -> None:
    """Print the accountant's guarantee in words, or as JSON. UserError: as `guarantee_of`."""
    from private_rlhf.core.noise import bound_of, upper_text

    promised = guarantee_of(accountant, *values, **options)
    if as_json:
        print_lines(json.dumps(promised.as_dict(), indent=2, allow_nan=False))
        return
    factor = bound_of(promised.epsilon)
    words = f"ε = {upper_text(promised.epsilon)}: the odds of any guess change by at most a factor of {factor}"
    words += f", but for δ = {promised.delta:g}" if promised.delta else ""
    lines = [f"{name}: {_plain(value, name)}" for name, value in promised.details.items()]
    print_lines(promised.statement, words, *lines, "if", *(f"  {each}" for each in promised.assumptions))


def _plain(value: Any, name: str = "") -> str:
    from private_rlhf.core.noise import upper_text

    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each, key)}" for key, each in value.items())
    if isinstance(value, float):
        return upper_text(value) if name.startswith("epsilon") else f"{value:.6g}"
    return str(value)
