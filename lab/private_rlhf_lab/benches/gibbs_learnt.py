"""The Gibbs policy's gain in J: the part that regressions on stored answers of π_ref reach, and the cause of the rest.

Stage gvpo of a run has drawn answers of π_ref to training prompts and stored them with r̂. Every fourth prompt is held
out here. An adapter as the stage's learns from the answers to the others; the rate falls to 0. Nothing more is drawn:
a policy is measured as the one that picks among a prompt's stored answers with weights ∝ π/π_ref, and the Gibbs policy
picks among the same answers. Its shares of the Gibbs policy's gain tell three causes apart: J of r̂ on training prompts
(optimisation), J of r̂ on held-out prompts (generalisation), J of r* on held-out prompts (the reward).

Needs a run of the embedded task with `aligner: gvpo`, once stage gvpo has stored its draws.
Run:  python -m private_rlhf_lab.benches.gibbs_learnt --run RUN [--only NAME …]   (minutes a row; resumes)
Writes OUTPUT/candidates.csv (the yardstick), rows.jsonl (per prompt) and table.csv
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import declared_world
from private_rlhf.data.render import evenly_spaced, make_renderer
from private_rlhf.embedded.truth import true_reward
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from private_rlhf.rl.reader import PolicyReader
from private_rlhf.rl.replay import REFERENCE, Answers
from tqdm import tqdm

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.benches.epsilon_tables import share_of
from private_rlhf_lab.benches.gibbs_losses import LOSSES, huber, prefix_variance, utilities
from private_rlhf_lab.benches.human_features import digest

BATCH, GROUP, READ = 16, 8, 64
"""Answers to a step, at most of one prompt in a step's loss, and to a forward pass without a gradient."""
CHOICES = 100
"""At most so many choices of candidates are averaged: eight stored answers have 70 of four."""
SPLITS = ("held-out", "training")
"""Prompts on which policies are measured: every fourth one, and up to `TRAINING` of those that are learnt from.

The policy picks among at most `MEASURED` answers to each."""
TRAINING, MEASURED = 24, 32
WHOLE = {**LOSSES, "huber": huber}
"""Losses of whole answers."""


@dataclass(frozen=True)
class Setting:
    """One row of the bench.

    Attributes:
        loss: of `WHOLE`, or `prefixes` (`prefix_variance`).
        prompts: to learn from, at even distances; None: all that are not held out.
        answers: to each prompt; more than `GROUP` are shared out over the steps of a pass.
        passes: over them.
        steps: after which learning stops; None: at the end of the passes.
        rate: of AdamW at the start.
        rank, layers: of the adapter; None for those of gvpo.lora.
        averaged: take the mean of the weights over the second half of the steps.
        seed: of the adapter and of the order of the prompts.
        target: `score` (r̂), or `truth` (r*), which is then both learnt from and measured as r̂.
    """

    loss: str = "variance"
    prompts: int | None = None
    answers: int = 8
    passes: int = 1
    rate: float = 7e-4
    rank: int | None = None
    averaged: bool = False
    seed: int = 0
    steps: int | None = None
    layers: int | None = None
    target: str = "score"


class Bench:
    """The run's π_ref and its stored answers, and policies learnt from and measured on them.

    Attributes:
        rows: by prompt, the places of its K answers.
        score, truth: (M, K) float64, r̂ and r* by prompt.
        once: take log π_ref from the store and keep no states, which pays where few answers are asked again. Losses of
            prefixes need it False.
    """

    def __init__(self, recipe: Recipe, home: Path, answers: Answers, once: bool = False) -> None:
        self.recipe, self.home, self.answers, self.once = recipe, home, answers, once
        self.renderer = make_renderer(recipe.model, load_tokenizer(home))
        self.kl_coef = recipe.ppo.kl_coef
        places: dict[tuple[int, ...], list[int]] = {}
        for place, prompt in enumerate(answers.prompts):
            places.setdefault(tuple(prompt), []).append(place)
        self.rows = list(places.values())
        truth = [true_reward("", self.renderer.text(response)) for response in answers.responses]
        by_prompt = torch.tensor(self.rows)
        self.score, self.truth = answers.score.double()[by_prompt], torch.tensor(truth).double()[by_prompt]

    @classmethod
    def of(cls, run: RunDir, most: float = math.inf, once: bool = False) -> Bench:
        """Read the run, at most so many answers to a prompt. UserError where stage gvpo has stored nothing."""
        shards = sorted((run.stage("gvpo") / "replay").glob(f"{REFERENCE}-*.safetensors"))
        if not shards:
            raise UserError(f"{run.root} must hold gvpo/replay: run its recipe with aligner=gvpo first")
        answers, places = Answers.load(shards), defaultdict[tuple[int, ...], Iterator[int]](itertools.count)
        kept = [i for i, prompt in enumerate(answers.prompts) if next(places[tuple(prompt)]) < most]
        recipe = load_recipe(Recipe, run.root / "recipe.yaml", [])
        return cls(recipe, run.stage("sft") / "model", answers.take(kept), once)

    @property
    def identity(self) -> str:
        """Of the answers on which policies are measured and of the adapter, whose rows stand beside each other."""
        measured = [rewards[:, :MEASURED].tolist() for rewards in (self.score, self.truth)]
        return digest([*measured, self.kl_coef, str(self.recipe.gvpo.lora)])

    def target(self, setting: Setting) -> torch.Tensor:
        """Return the rewards that the policy learns from, (M, K) float64."""
        return self.truth if setting.target == "truth" else self.score

    def prompts(self, setting: Setting, split: str) -> list[int]:
        """Return the prompts on which the policy is measured."""
        if split == "held-out":
            return list(range(0, len(self.rows), 4))
        return evenly_spaced(self.learnt(setting), TRAINING)

    @property
    def shown(self) -> list[int]:
        """The prompts that may be learnt from."""
        return [prompt for prompt in range(len(self.rows)) if prompt % 4]

    def learnt(self, setting: Setting) -> list[int]:
        """Return the prompts that the policy learns from."""
        return evenly_spaced(self.shown, setting.prompts)

    @functools.cache  # noqa: B019 - one bench a process
    def reader(self, rank: int | None, layers: int | None) -> tuple[PolicyReader, list[torch.Tensor]]:
        """Return a policy with a new adapter, which keeps the states of all answers; log π_ref by answer and token."""
        lora = self.recipe.gvpo.lora
        assert lora is not None
        base = load_causal_lm(self.home, self.recipe.model.dtype)
        lora = replace(lora, rank=rank or lora.rank, last_layers=layers or lora.last_layers)
        adapted = add_lora(base, lora, 0)
        model = PolicyWithValue(adapted, base.config.hidden_size).eval()
        reader = PolicyReader(
            make_accelerator(declared_world()), model, None, self.renderer.tokenizer, self.recipe.ppo.temperature, False
        )
        if self.once:
            return reader, []
        read = reader.read(self.answers.prompts, self.answers.responses, READ, at_reference=True)[1]
        return reader, [torch.tensor(values) for values in read]

    def log_ratios(self, setting: Setting, rows: Sequence[int]) -> torch.Tensor:
        """Return log(π/π_ref) by answer and token, (B, C), 0 at padding; with `once` its sum, (B, 1)."""
        reader, reference = self.reader(setting.rank, setting.layers)
        answers = self.answers
        batch = reader.batch([answers.prompts[i] for i in rows], [answers.responses[i] for i in rows], rows)
        logprobs: torch.Tensor = reader.bare(batch, self.recipe.ppo.temperature)[0]
        if self.once:
            return (logprobs.sum(dim=1) - answers.reference_logprob[rows])[:, None]
        return logprobs - torch.nn.utils.rnn.pad_sequence([reference[i] for i in rows], batch_first=True)

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(self, setting: Setting) -> dict[str, Any]:
        """Learn with a new adapter; return the steps, the seconds of this process and the loss of each pass."""
        policy = self.reader(setting.rank, setting.layers)[0].bare.policy
        generator = torch.Generator().manual_seed(setting.seed)
        learnt = {name: each for name, each in policy.named_parameters() if each.requires_grad}
        for name, parameter in sorted(learnt.items()):
            spread = parameter.shape[1] ** -0.5 if "lora_A" in name else 0.0
            parameter.data.uniform_(-spread, spread, generator=generator)
        optimizer = torch.optim.AdamW(learnt.values(), weight_decay=0.0)
        values = self.prefix_values() if setting.loss == "prefixes" else []
        utility = utilities(self.target(setting), self.kl_coef).float()
        losses: list[float] = []
        mean: list[torch.Tensor] = []
        steps = list(self.groups(setting, generator))[: setting.steps]
        started = time.process_time()
        for step, groups in enumerate(tqdm(steps, desc=setting.loss)):
            rows = [self.rows[prompt][column] for prompt, columns in groups for column in columns]
            ratio = self.log_ratios(setting, rows)
            if values:
                loss = prefix_variance(ratio, [values[row] for row in rows], len(groups[0][1]))
            else:
                wanted = torch.stack([utility[prompt, columns.start : columns.stop] for prompt, columns in groups])
                loss = WHOLE[setting.loss](ratio.sum(dim=1).reshape(wanted.shape), wanted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt.values(), self.recipe.ppo.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = setting.rate * (1 - step / len(steps))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if setting.averaged and step >= len(steps) // 2:
                share = 1 / (step - len(steps) // 2 + 1)
                mean = mean or [copy.deepcopy(parameter.detach()) for parameter in learnt.values()]
                for value, parameter in zip(mean, learnt.values(), strict=True):
                    value.lerp_(parameter.detach(), share)
        for value, parameter in zip(mean, learnt.values(), strict=False):
            parameter.data.copy_(value)
        by_pass = [float(np.mean(part)) for part in np.array_split(losses, setting.passes)]
        return {"steps": len(steps), "seconds": round(time.process_time() - started), "losses": by_pass}

    def groups(self, setting: Setting, generator: torch.Generator) -> Iterator[list[tuple[int, range]]]:
        """Yield the groups of each step, as a prompt and the columns of its answers.

        A pass is a permutation of all groups, of which the rest of a last step is left out. So is the rest of a
        prompt's last group.
        """
        count = min(setting.answers, GROUP)
        columns = [range(start, start + count) for start in range(0, setting.answers - count + 1, count)]
        groups = list(itertools.product(self.learnt(setting), columns))
        size = BATCH // count
        for _ in range(setting.passes):
            order = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
            yield from (order[start : start + size] for start in range(0, len(order) - size + 1, size))

    def prefix_values(self, ridge: float = 300.0) -> list[torch.Tensor]:
        """Return, by answer, the expected r̂/β after each of its tokens, and r̂/β after the last, less the prompt's mean.

        A ridge regression reads the expectation from the states of π_ref below its first adapted layer. Those of a
        prompt are predicted by the answers to four fifths of the others; held-out prompts take no part.
        """
        reader, answers = self.reader(None, None)[0], self.answers
        centred = (self.score - self.score.mean(dim=1, keepdim=True)) / self.kl_coef
        states, target, fold = [], [], []
        for prompt, (k, row) in itertools.product(self.shown, enumerate(range(self.score.shape[1]))):
            place = self.rows[prompt][row]
            kept = reader._states[place][len(answers.prompts[place]) : -1]  # what its updates start from
            states.append(kept.double())
            target.append(centred[prompt, k].expand(len(kept)))
            fold.append(torch.full((len(kept),), prompt % 5))
        features, wanted, folds = torch.cat(states), torch.cat(target), torch.cat(fold)
        features = ((features - features.mean(0)) / features.std(0).clamp_min(1e-6)).clamp(-6, 6)
        features = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
        predicted = torch.zeros_like(wanted)
        for number in range(5):
            known, new = features[folds != number], features[folds == number]
            normal = known.T @ known + ridge * torch.eye(known.shape[1], dtype=torch.float64)
            predicted[folds == number] = new @ torch.linalg.solve(normal, known.T @ wanted[folds != number])
        found = [torch.empty(0)] * len(answers)
        parts = iter(predicted.float().split([len(each) for each in states]))
        for prompt, k in itertools.product(self.shown, range(self.score.shape[1])):
            found[self.rows[prompt][k]] = torch.cat([next(parts), centred[prompt, k : k + 1].float()])
        return found

    # --- measuring ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, setting: Setting, split: str) -> dict[str, list[float]]:
        """Return per prompt the gains over π_ref in r̂ and r*, the KL, and the Gibbs policy's gains in J."""
        prompts = self.prompts(setting, split)
        count = min(self.score.shape[1], MEASURED)
        rows = [row for prompt in prompts for row in self.rows[prompt][:count]]
        parts = [rows[start : start + READ] for start in range(0, len(rows), READ)]
        ratio = torch.cat([self.log_ratios(setting, part).sum(dim=1) for part in parts]).double()
        score, truth = self.target(setting)[prompts, :count], self.truth[prompts, :count]
        return gains(ratio.reshape(len(prompts), count).numpy(), score, truth, self.kl_coef)

    def row(self, setting: Setting) -> dict[str, Any]:
        """Return the row of `setting`: the policy learnt, and measured on both splits."""
        return {"setting": asdict(setting), **self.learn(setting), **{s: self.measure(setting, s) for s in SPLITS}}


def gains(ratio: np.ndarray, score: torch.Tensor, truth: torch.Tensor, kl_coef: float) -> dict[str, list[float]]:
    """Return per prompt the gains in r̂ and r* of picking among its answers, the KL, and Gibbs' gains in J.

    Also the variances of r̂/β and of what log(π/π_ref) leaves of it, over π_ref's draws and by the Gibbs weights.

    Args:
        ratio: (M, K) log(π/π_ref), nats.
        score, truth: (M, K) float64, r̂ and r*.
    """
    weight, best = gibbs_weights(ratio, 1.0), gibbs_weights(score.numpy(), kl_coef)
    cost, utility = kl_coef * kl_from_uniform(best), score.numpy() / kl_coef
    found = {"kl": kl_from_uniform(weight)}
    for name, column in (("score", score.numpy()), ("truth", truth.numpy())):
        excess = column - column.mean(axis=1, keepdims=True)
        found[name] = (weight * excess).sum(axis=1)
        found[f"gibbs {name}"] = (best * excess).sum(axis=1) - cost
    for name, share in (("π_ref", np.full_like(best, 1 / best.shape[1])), ("Gibbs", best)):
        for part, column in (("variance", utility), ("residual", utility - ratio)):
            centred = column - (share * column).sum(axis=1, keepdims=True)
            found[f"{part} {name}"] = (share * centred**2).sum(axis=1)
    return {name: np.round(values, 4).tolist() for name, values in found.items()}


def candidates(score: torch.Tensor, truth: torch.Tensor, kl_coef: float) -> list[dict[str, float]]:
    """Return the Gibbs policy's mean gains in J by the number of answers that it picks among.

    The mean is over all choices of them, or over `CHOICES` drawn ones where there are more. Also ± 95 % over prompts.
    What it gains among all answers there are is the row without an end (`candidates` inf), by r̂ and as if r̂ were
    normal: then the gain is half the variance of r̂ over kl_coef.
    """
    rows, stored = [], score.shape[1]
    for count in (count for count in (2, 4, 8, 16, 32, 64) if count <= stored):
        if math.comb(stored, count) <= CHOICES:
            choices = [list(picked) for picked in itertools.combinations(range(stored), count)]
        else:
            draws = np.random.default_rng(count)
            choices = [draws.choice(stored, count, replace=False).tolist() for _ in range(CHOICES)]
        parts = [
            gains(score[:, picked].numpy() / kl_coef, score[:, picked], truth[:, picked], kl_coef)
            for picked in choices
        ]
        row = {"candidates": float(count)}
        for name, key in (("r̂", "gibbs score"), ("r*", "gibbs truth"), ("KL", "kl")):
            values = np.mean([part[key] for part in parts], axis=0)
            row |= {name: float(values.mean()), f"{name} ±": 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5}
        rows.append({name: round(value, 3) for name, value in row.items()})
    normal = score.var(dim=1).numpy() / (2 * kl_coef)
    error = 1.96 * float(normal.std(ddof=1)) / len(normal) ** 0.5
    return [*rows, {"candidates": np.inf, "r̂": round(float(normal.mean()), 3), "r̂ ±": round(error, 3)}]


SETTINGS: dict[str, list[Setting]] = {
    "loss": [Setting(loss=loss) for loss in ("variance", "huber", "prefixes", "weighted", "listwise")],
    "rates": [Setting(rate=rate) for rate in (2e-3, 3.5e-4)],
    "passes": [Setting(passes=passes) for passes in (2, 4)],
    "prompts": [Setting(prompts=95, passes=2), Setting(answers=4), Setting(answers=4, passes=2)],
    "seeds": [Setting(seed=seed) for seed in (1, 2)],
    "ranks": [Setting(rank=rank) for rank in (4, 64)],
    "averaged": [Setting(averaged=True), Setting(averaged=True, passes=4)],
}
"""By the question that each answers."""


def shares(row: dict[str, Any], kl_coef: float) -> dict[str, float]:
    """Return each gain in J as a share of the Gibbs policy's, with 95 % over prompts, and the KL.

    Also the share of the variance of r̂/β that log(π/π_ref) explains among π_ref's draws and among the Gibbs policy's.
    """
    found: dict[str, float] = {}
    for split, name in itertools.product(SPLITS, ("π_ref", "Gibbs")):
        residual, variance = (np.mean(row[split][f"{part} {name}"]) for part in ("residual", "variance"))
        found[f"{split} explained, {name}"] = round(float(1 - residual / variance), 3)
    for split, name in itertools.product(SPLITS, ("score", "truth")):
        values = {key: np.array(each)[None] for key, each in row[split].items()}
        share = share_of(values[name] - kl_coef * values["kl"], values[f"gibbs {name}"])
        if share is not None:
            label = f"{split} {'r̂' if name == 'score' else 'r*'}"
            names = (label, f"{label} low", f"{label} high", f"{split} KL")
            numbers = (share.value, *share.prompts, float(values["kl"].mean()))
            found |= {each: round(number, 3) for each, number in zip(names, numbers, strict=True)}
    return found


def lines_of(rows: Sequence[dict[str, Any]], kl_coef: float) -> list[dict[str, Any]]:
    """Return a line for each row: the setting, steps, seconds, and shares."""
    return [
        {**row["setting"], "steps": row["steps"], "seconds": row["seconds"], **shares(row, kl_coef)} for row in rows
    ]


def write_table(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a CSV."""
    with atomic.new_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="of the questions")
    parser.add_argument("--setting", type=json.loads, action="append", default=[], help="JSON of one more row")
    parser.add_argument("--answers", type=int, default=math.inf, help="at most so many to a prompt")
    parser.add_argument("--once", action="store_true", help="keep no states: for many answers, asked once each")
    parser.add_argument("--output", type=Path, default=Path("runs/learnt"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    run = RunDir(options.run)
    bench = Bench.of(run, options.answers, options.once)
    bed = f"{run.require('reward')['fingerprint']}, answers {bench.identity}"
    wanted = [Setting(**each) for each in options.setting]
    wanted = wanted or [setting for name in options.only for setting in SETTINGS[name]]
    path = options.output / "rows.jsonl"
    done = [Setting(**row["setting"]) for row in rows_of(path, lambda _: bed)]
    write_table(candidates(bench.score, bench.truth, bench.kl_coef), options.output / "candidates.csv")
    for setting in dict.fromkeys(each for each in wanted if each not in done):
        row = bench.row(setting)
        with appending(path) as keep:
            keep({"bed": bed, **row})
        print(setting, shares(row, bench.kl_coef), flush=True)
        write_table(lines_of(rows_of(path, lambda _: bed), bench.kl_coef), options.output / "table.csv")


if __name__ == "__main__":
    main()
