"""The cost of the labels' privacy to a trained policy: PPO, regression and private DPO of one recipe by ε and seed.

Each arm is a whole run of the recipe in a directory of its own, DIR/METHOD-epsE-seedS. A seed has its own labels, key
and flips, its own π_ref and its own sampling noise; at equal seeds all arms have the same labels (flips at falling ε
are a chain), π_ref, held-out prompts and answers of π_ref, so gains are compared prompt by prompt. DPO has the private
likelihood and the coefficient of PPO's KL unless the recipe says otherwise.

Stated: mean ± standard deviation over seeds; [95 % bootstrap over held-out prompts, the same ones in numerator and
denominator], which is for the seeds that were run and leaves out what other seeds would bring; and, for the retained
gain = J gain(ε) / J gain(∞) of the same seeds, ± half the 95 % interval over seeds (delta method, Student's t), which
leaves nothing out but rests on as few numbers as there are seeds.

Run:  python -m private_rlhf_lab.benches.alignment_cost --directory runs/alignment [--lanes 2] [--set KEY=VALUE]
      (finished arms are skipped and unfinished ones resumed; --report-only makes the table of what is there)
Writes DIR: a run directory per arm, keys/, logs/, results.json, table.md, gains.png
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe

from private_rlhf_lab.benches.alignment_arms import Arm, Workshop
from private_rlhf_lab.benches.epsilon_tables import Share, mean_sd, name_of, over_prompts, share_of

LABELS = {"ppo": "PPO", "gvpo": "regression", "dpo": "private DPO"}
COLOURS = dict(zip(LABELS, ("tab:blue", "tab:green", "tab:orange"), strict=True))
NOT_METHODS = {"sft", "gibbs"}
MEASURED = ("generation_win_rate_truth", "kl", "kl_ci", "true_reward", "objective_gain")


# --- one arm ----------------------------------------------------------------------------------------------------------


def read_arm(arm: Arm, run: RunDir) -> dict[str, Any] | None:
    """What a finished arm found, with its rows by prompt; None while it is unfinished.

    Raises:
        UserError: the directory holds another arm, or no true reward is known there.
    """
    if not (run.root / "metrics.json").is_file():  # there exactly while the evaluation fits the run
        return None
    recipe = load_recipe(Recipe, run.root / "recipe.yaml")
    if Arm(recipe.aligner, recipe.privatize.epsilon, recipe.seed) != arm:
        raise UserError(f"{run.root} holds another arm than its name says: choose another --directory")
    metrics = json.loads((run.root / "metrics.json").read_text(encoding="utf-8"))
    (method,) = [value for name, value in metrics.items() if name not in NOT_METHODS and is_method(value)]
    if method["objective_gain"] is None:
        raise UserError(f"{run.root}: this task has no known true reward, so J cannot be measured")
    return {
        "arm": arm.name,
        "method": arm.method,
        "epsilon": arm.epsilon,
        "seed": arm.seed,
        "loss": (recipe.dpo if arm.method == "dpo" else recipe.reward).loss,
        **{name: method[name] for name in MEASURED},
        "of_gibbs": metrics.get("ppo_over_gibbs"),
        "reward_share": reward_share(method, metrics),
        "seconds": metrics["seconds"],
        "commit": (run.manifest(arm.method) or {}).get("commit"),
        "by_prompt": json.loads((run.stage("evaluate") / "by_prompt.json").read_text(encoding="utf-8")),
    }


def reward_share(method: Mapping[str, Any], metrics: Mapping[str, Any]) -> float | None:
    """The gain of `method` over π_ref in J of r̂ as a share of the Gibbs policy's, with r̂ in the place of r*; None where
    no Gibbs policy was drawn."""
    if "gibbs" not in metrics:
        return None
    policies = (metrics["sft"], method, metrics["gibbs"])
    reference, own, gibbs = (each["pessimistic_reward"] - method["kl_coef"] * each["kl"] for each in policies)
    return float((own - reference) / (gibbs - reference))


def is_method(value: Any) -> bool:
    """Whether an entry of metrics.json is an evaluated method."""
    return isinstance(value, dict) and "objective_gain" in value


def gains(rows: Sequence[dict[str, Any]], name: str = "objective_gain") -> np.ndarray | None:
    """(rows, prompts) of a column of `by_prompt`; None where a row lacks it.

    Raises:
        UserError: the rows were evaluated on different prompts.
    """
    if len({tuple(each["index"] for each in row["by_prompt"]) for row in rows}) > 1:
        raise UserError("arms were evaluated on different prompts: run without --report-only to evaluate them alike")
    values = np.array([[each[name] for each in row["by_prompt"]] for row in rows], dtype=np.float64)
    return None if np.isnan(values).any() else values


# --- many arms --------------------------------------------------------------------------------------------------------


def select(rows: Sequence[dict[str, Any]], method: str, epsilon: float) -> list[dict[str, Any]]:
    """The rows of a method at an ε, by seed."""
    found = [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]
    return sorted(found, key=lambda row: row["seed"])


def paired(
    left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the seeds that both sides have."""
    common = {row["seed"] for row in left} & {row["seed"] for row in right}
    return [row for row in left if row["seed"] in common], [row for row in right if row["seed"] in common]


def in_order(arm: tuple[str, float]) -> tuple[int, float]:
    """Sort key of (method, ε): as in `LABELS`, then by ε."""
    return list(LABELS).index(arm[0]), arm[1]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per method and ε, the largest ε last."""
    found = []
    for method, epsilon in sorted({(row["method"], row["epsilon"]) for row in rows}, key=in_order):
        own = select(rows, method, epsilon)
        gain, gibbs = gains(own), gains(own, "gibbs_objective_gain")
        assert gain is not None
        found.append(
            {
                "method": method,
                "epsilon": epsilon,
                "seeds": [row["seed"] for row in own],
                "win_rate": [row["generation_win_rate_truth"]["value"] for row in own],
                "kl": [row["kl"] for row in own],
                "gain": [row["objective_gain"]["value"] for row in own],
                "gain_over_prompts": over_prompts(gain).as_dict(),
                "of_gibbs": None if gibbs is None else share_of(gain, gibbs),
                "reward_share": [100 * row["reward_share"] for row in own if row["reward_share"] is not None],
                "retained": share_between(own, select(rows, method, math.inf)),
            }
        )
    return found


def share_between(own: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]]) -> Share | None:
    """The J gain of one arm as a share of another's, at the seeds that both have."""
    own, whole = paired(own, whole)
    both = gains([*own, *whole]) if own else None
    return None if both is None else share_of(both[: len(own)], both[len(own) :])


def contrasts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """PPO's J gain less that of each other method at equal ε and seeds, [95 % over prompts]."""
    found = []
    others = {(row["method"], row["epsilon"]) for row in rows if row["method"] != "ppo"}
    for method, epsilon in sorted(others, key=in_order):
        ppo, other = paired(select(rows, "ppo", epsilon), select(rows, method, epsilon))
        if not ppo:
            continue
        both = gains([*ppo, *other])
        assert both is not None
        difference = over_prompts(both[: len(ppo)] - both[len(ppo) :])
        seeds = [row["seed"] for row in ppo]
        found.append({"method": method, "epsilon": epsilon, "seeds": seeds, **difference.as_dict()})
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def percent(share: Share | None) -> str:
    """A share with its intervals; a dash where none is stated."""
    if share is None:
        return "–"
    low, high = share.prompts
    seeds = "" if math.isnan(share.seeds) else f", seeds ± {100 * share.seeds:.0f}"
    return f"{100 * share.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]{seeds}"


def bounded(estimate: dict[str, Any], form: str) -> str:
    """A value with its interval."""
    return f"{estimate['value']:{form}} [{estimate['ci_low']:{form}}, {estimate['ci_high']:{form}}]"


def table(rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> str:
    """Markdown: methods by ε, PPO against the others, every run."""
    lines = ["Mean ± sd over seeds, [95 % over prompts, for these seeds]; ‘seeds’: 95 % over seeds (t)", ""]
    heads = ["method", "ε", "seeds", "win rate by r*", "KL, nats", "J gain over π_ref", "of Gibbs' gain"]
    heads += ["the same in J of r̂, %", "retained"]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in summarise(rows):
        gain = entry["gain_over_prompts"]
        cells = [
            LABELS[entry["method"]],
            name_of(entry["epsilon"]),
            str(len(entry["seeds"])),
            mean_sd(entry["win_rate"], ".3f"),
            mean_sd(entry["kl"]),
            f"{mean_sd(entry['gain'], '+.2f')} [{gain['ci_low']:+.2f}, {gain['ci_high']:+.2f}]",
            percent(entry["of_gibbs"]),
            mean_sd(entry["reward_share"], ".0f") if entry["reward_share"] else "–",
            "100 %" if math.isinf(entry["epsilon"]) else percent(entry["retained"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    against = contrasts(rows)
    if against:
        lines += ["", "J gain of PPO less that of another method at equal seeds [95 % over prompts]", ""]
        lines += [
            f"- {LABELS[one['method']]}, ε = {name_of(one['epsilon'])}, {len(one['seeds'])} seeds: "
            f"{bounded(one, '+.2f')}"
            for one in against
        ]
    lines += ["", "| run | win rate by r* | KL | J gain | of Gibbs' gain | minutes |", "|---" * 6 + "|"]
    for row in sorted(rows, key=lambda row: (*in_order((row["method"], row["epsilon"])), row["seed"])):
        share = row["of_gibbs"]
        cells = [
            row["arm"],
            bounded(row["generation_win_rate_truth"], ".3f"),
            f"{row['kl']:.2f} [{row['kl_ci'][0]:.2f}, {row['kl_ci'][1]:.2f}]",
            bounded(row["objective_gain"], "+.2f"),
            bounded(share, ".2f") if share else "–",
            f"{sum(row['seconds'].values()) / 60:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if missing:
        lines += ["", f"Not there yet: {', '.join(missing)}"]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """J gain by ε: means with their intervals over prompts, and every run as a small dot beside them."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = summarise(rows)
    places = {epsilon: place for place, epsilon in enumerate(sorted({entry["epsilon"] for entry in entries}))}
    figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    for shift, (method, colour) in zip((-0.1, 0.0, 0.1), COLOURS.items(), strict=True):
        own = [entry for entry in entries if entry["method"] == method]
        if not own:
            continue
        across = [places[entry["epsilon"]] + shift for entry in own]
        ends = np.array([[entry["gain_over_prompts"][key] for key in ("value", "ci_low", "ci_high")] for entry in own])
        beyond = np.abs(ends[:, 1:] - ends[:, :1]).T
        axes.errorbar(across, ends[:, 0], yerr=beyond, fmt="o", color=colour, capsize=3, label=LABELS[method])
        for place, entry in zip(across, own, strict=True):
            axes.plot([place + shift] * len(entry["gain"]), entry["gain"], ".", color=colour, alpha=0.45, markersize=4)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xticks(list(places.values()), [name_of(epsilon) for epsilon in places])
    axes.set(xlabel="ε of each label", ylabel="J gain over π_ref", xlim=(-0.5, len(places) - 0.5))
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# --- the command ------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """As JSON holds it: ε = ∞ and an interval that does not exist are null."""
    if isinstance(value, Share):
        return plain({"value": value.value, "over_prompts": value.prompts, "half_width_over_seeds": value.seeds})
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(workshop: Workshop, arms: Sequence[Arm], settings: dict[str, Any]) -> str:
    """Reads the arms that are finished and writes results.json, table.md and gains.png; returns the table."""
    found = {arm.name: read_arm(arm, workshop.run_dir(arm)) for arm in arms}
    rows = [row for row in found.values() if row is not None]
    if not rows:
        raise UserError(f"{workshop.home} holds no finished arm: run without --report-only")
    missing = [name for name, row in found.items() if row is None]
    text = table(rows, missing)
    results = {"settings": settings, "table": summarise(rows), "ppo_minus_others": contrasts(rows), "runs": rows}
    atomic.write_json(workshop.home / "results.json", plain({**results, "missing": missing}))
    atomic.write_text(workshop.home / "table.md", text)
    draw(rows, workshop.home / "gains.png")
    return text


def arms_of(options: argparse.Namespace) -> list[Arm]:
    """Every arm that is asked for, seed by seed."""
    wanted = {"ppo": options.seeds, "gvpo": options.gvpo_seeds, "dpo": options.dpo_seeds}
    every = [Arm(method, epsilon, seed) for method in wanted for epsilon in options.epsilons for seed in wanted[method]]
    return sorted(every, key=lambda arm: arm.seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 2.0, math.inf])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of PPO")
    parser.add_argument("--gvpo-seeds", type=int, nargs="*", default=[])
    parser.add_argument("--dpo-seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time, each with its share of the cores")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override of every arm")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    if options.lanes < 1 or not all(epsilon > 0 for epsilon in options.epsilons):
        parser.error("--lanes and --epsilons are above 0")
    arms = arms_of(options)
    workshop = Workshop(options.directory, options.recipe, tuple(options.set), options.lanes)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    try:
        failed = [] if options.report_only else workshop.make(arms)
        print(write_report(workshop, arms, settings))
    except UserError as error:
        print(f"alignment_cost: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"written": str(options.directory), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
