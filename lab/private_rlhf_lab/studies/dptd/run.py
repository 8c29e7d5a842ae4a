"""The study dptd: what Theorem 5.1's noise certifies, both figures, Eq. 4 and its scaling."""

from __future__ import annotations

import json
from types import MappingProxyType

from private_rlhf.validation.lab import Claim, Report, within

from private_rlhf_lab.studies.dptd import audit, inside, outcomes, scaling, theory
from private_rlhf_lab.studies.dptd.environments import TASKS
from private_rlhf_lab.studies.dptd.noise import Kind
from private_rlhf_lab.studies.dptd.policies import FOLDER, load
from private_rlhf_lab.studies.dptd.study import EPSILON, EPSILONS, FIGURE_1, QUICK_EPSILONS, Problem, prepare
from private_rlhf_lab.studies.dptd.trajectories import collect

EPOCHS = {"cartpole": 10.0, "acrobot": 10.0, "pong": 1.0}
QUICK_EPOCHS = {"cartpole": 2.0, "acrobot": 2.0, "pong": 0.5}
LIMIT = MappingProxyType({True: 100, False: 500})  # transitions of a trajectory: 500 cuts Pong's alone
GRID = ((250, 1.0), (500, 2.0), (1000, 4.0), (2000, 8.0), (4000, 16.0), (8000, 32.0))
KINDS: tuple[Kind, ...] = ("paper", "accountant")


def run(quick: bool) -> Report:
    """Deterministic. `quick` takes 3 runs for 10, fewer epochs and moments, and cuts Pong's trajectories short."""
    runs, epochs = (3, QUICK_EPOCHS) if quick else (10, EPOCHS)
    problems = [prepare(task, epochs[name], runs, LIMIT[quick]) for name, task in TASKS.items()]
    _print_scores(problems)
    rows = [theory.calibrations(problem) for problem in (problems[:1] if quick else problems)]
    claims = [each for problem, own in zip(problems, rows, strict=False)
              for each in theory.privacy_claims(problem, own, 10 if quick else 60)]
    claims += audit.claims(problems[0], problems[0].budget(EPSILON))
    claims.append(audit.direction(problems[0]))
    claims += theory.assumption_claims(problems[0])
    claims.append(_behaviour())
    found, epsilons = [], QUICK_EPSILONS if quick else EPSILONS
    for problem in problems:
        measured, start = outcomes.measure(problem, epsilons)
        claims += outcomes.claims(problem, measured, start, epsilons)
        found.append(measured)
    points, within_theorem, more = _scaling(quick)
    shown = {name: name for name in (*FIGURE_1, *outcomes.PUBLISHED)}
    figures = {"figure_1": outcomes.draw(problems, found, shown, f"Figure 1, ε = {EPSILON:g}")}
    for kind in KINDS:
        arms = {outcomes.second_figure(kind, each): f"ε = {each:g}" for each in epsilons}
        figures[f"figure_2_{kind}"] = outcomes.draw(problems, found, arms, f"Figure 2, noise: {kind}")
    both = list(zip(problems, found, strict=True))
    return Report(
        name="dptd",
        claims=[*claims, *more],
        tables={
            "calibration": [row for each in rows for row in each],
            "outcomes": [row for problem, one in both for row in outcomes.summary(problem, one)],
            "curves": [row for problem, one in both for row in outcomes.curves(problem, one)],
            "scaling": [row for kind, one in points.items() for row in scaling.rows(one, kind)],
            "inside": [row for kind, one in within_theorem.items() for row in inside.rows(one, kind)],
        },
        figures=figures | {"scaling": outcomes.draw_scaling(points, within_theorem)},
    )


def _scaling(
    quick: bool,
) -> tuple[dict[Kind, list[scaling.Point]], dict[Kind, list[inside.Point]], list[Claim]]:
    """Eq. 4 over GRID: the paper's network and step sizes, and inside Theorem 5.2."""
    grid = GRID[:3] if quick else GRID
    pool = collect(load(TASKS["cartpole"]), 15 if quick else 120, 500)
    largest = max(rows for rows, _ in grid)
    if len(pool) < largest:
        raise RuntimeError(f"the pool holds {len(pool)} transitions, {largest} are needed: collect more episodes")
    points = {kind: scaling.measure(pool, grid, kind, 3 if quick else 10, 1.0) for kind in KINDS}
    within_theorem = {kind: inside.measure(pool, grid, kind, 3 if quick else 10) for kind in KINDS}
    claims = [scaling.claim(one, kind) for kind, one in points.items()]
    return points, within_theorem, [*claims, *inside.claims(within_theorem)]


def _scores() -> dict[str, float]:
    found: dict[str, float] = json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))
    return found


def _behaviour() -> Claim:
    return within("Pong's data come from a policy of good quality: it plays even, at least", "DPTD Section 6.1",
                  _scores()["pong"], low=0.0, what="mean return of 20 episodes of our DQN (-21 to 21)",
                  kind="assumption", paper="generated trajectories are of good quality")


def _print_scores(problems: list[Problem]) -> None:
    scores = _scores()
    for problem in problems:
        name, lengths = problem.task.name, problem.data.lengths().tolist()
        kind = "DQN" if name == "pong" else "Sarsa"
        score = "not measured" if scores[name] is None else f"{scores[name]:g} of 20 episodes"
        print(f"{problem.task.title}: {kind}, mean return {score}; five trajectories of {lengths} steps")
