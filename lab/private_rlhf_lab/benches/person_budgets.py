"""How many answers of a person should count: J at one budget E for everything that a person answers.

Persons with a budget E each answer k questions at ε = E/k about answers of π_ref (passive asking, the pool and truth of
`online_strategies.py`); r̄ is fitted once, and the Gibbs policy π_ref·exp(r̄/kl_coef) evaluated on held-out prompts.
Beside J stands k·tanh²(E/2k), what the law of `private_rlhf.privacy.person` says that a person's answers carry.

Run:  python -m private_rlhf_lab.benches.person_budgets --run runs/online [--seeds 20]  (after online_strategies)
Writes RUN/online_strategies/persons.md (docs/results/online.md)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from private_rlhf.core import atomic
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.online.posterior import Learner
from private_rlhf.online.strategies import choose
from private_rlhf.privacy.person import epsilon_each, information, split_budget
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from tqdm import tqdm

from private_rlhf_lab.benches.epsilon_tables import interval
from private_rlhf_lab.benches.online_strategies import ASKED, COMPONENTS, HELD_OUT, Bed, answers_of
from private_rlhf_lab.league.pool import make_pool

BUDGETS, WAYS, PERSONS = (2.0, 8.0), (1, 2, 4, 10, 20), (100, 300, 1000)


def gain(bed: Bed, total: float, way: int, persons: int, seed: int) -> float:
    """J on held-out prompts after so many persons gave `way` answers each."""
    generator = torch.Generator().manual_seed(seed)
    noise = LabelNoise.of(epsilon_each(total, way))
    learner = Learner(COMPONENTS, noise, bed.reward_bound, bed.kl_coef)
    picked = choose("passive", learner.posterior, bed.x, bed.open_pairs(), persons * way, generator)
    prompt, one, other = picked.T
    z = answers_of(bed, picked, noise, generator)
    posterior = learner.add(bed.x[prompt, one], bed.x[prompt, other], z)
    return float(bed.objective(posterior.policy(bed.held_out[0]), bed.held_out[1]))


def lines_of(bed: Bed, seeds: int) -> Iterator[str]:
    """A table a budget, in Markdown."""
    yield f"J of the Gibbs policy, gain over π_ref on held-out prompts, ± 95 % over {seeds} seeds."
    for total in BUDGETS:
        chosen, _ = split_budget(total, max(WAYS))
        yield ""
        yield f"| E = {total:g}: answers a person | law | " + " | ".join(f"{count} persons" for count in PERSONS) + " |"
        yield "|---|---|" + "---|" * len(PERSONS)
        for way in WAYS:
            cells = []
            for persons in PERSONS:
                shown = tqdm(range(seeds), desc=f"E {total:g}, {way} x {persons}", leave=False)
                mean, half = interval([gain(bed, total, way, persons, seed) for seed in shown])
                cells.append(f"{mean:+.3f} ± {half:.3f}")
            name = f"**{way}**" if way == chosen else str(way)
            yield f"| {name} at ε = {total / way:g} | {information(total, way):.3f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    run = RunDir(options.run)
    recipe = load_recipe(Recipe, run.root / "recipe.yaml")
    tensors = make_pool(run, recipe, run.root / "online_strategies" / "pool.safetensors", ASKED, HELD_OUT)
    bed = Bed(tensors, recipe.ppo.kl_coef, recipe.reward.reward_bound)
    text = "\n".join(lines_of(bed, options.seeds)) + "\n"
    atomic.write_text(run.root / "online_strategies" / "persons.md", text)
    print(text)


if __name__ == "__main__":
    main()
