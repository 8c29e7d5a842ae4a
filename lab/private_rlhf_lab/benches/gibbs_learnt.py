"""The Gibbs policy's gain in J: the part that regressions on stored answers of π_ref reach, and the cause of the rest.

An adapter as PPO's learns from draws of π_ref that were made once (`gibbs_losses`); the rate falls to 0. Three gains
over π_ref, each as a share of the Gibbs policy's on the same prompts, tell three causes apart: J of r̂ on training
prompts (optimisation), J of r̂ on held-out prompts (generalisation), J of r* on held-out prompts (the reward).

Needs a run of the embedded task whose stage `reward` is done; a finished stage `ppo` gives a row too.
Run:  python -m private_rlhf_lab.benches.gibbs_learnt --run RUN [--only NAME …]   (minutes a row; resumes)
Writes OUTPUT/draws-*.safetensors (tokens and r̂), rows.jsonl (per prompt) and table.csv
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import declared_world
from private_rlhf.data import inputs
from private_rlhf.embedded.truth import true_reward
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.kernels.token_terms import token_kl
from private_rlhf.lm.logprobs import PolicyWithValue, response_forward, token_batch
from private_rlhf.lm.models import add_lora, end_ids, load_causal_lm, load_tokenizer
from private_rlhf.lm.rows import batches, sharing_of
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from private_rlhf.reward_models.scorer import load_scorer
from private_rlhf.rl.reader import PolicyReader
from private_rlhf.rl.rollout import evenly_spaced
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.benches.embedded_topics import REQUEST_FORMS
from private_rlhf_lab.benches.epsilon_tables import share_of
from private_rlhf_lab.benches.gibbs_losses import LOSSES, utilities

BATCH, READ = 16, 32
"""Answers to a step, and to a forward pass without a gradient."""
JUDGED = {"training": 40, "held-out": 80}
"""Prompts on which policies are measured."""
ANSWERS, CANDIDATES = 4, 16
"""Of a policy to each judged prompt, and of π_ref for the Gibbs policy there."""
ADJECTIVES = ("lovely", "cheerful", "colorful", "large", "plain", "wooden", "noisy", "broken", "dirty")
NOUNS = ("bakery", "bench", "boat trip", "camera", "carpet", "ceiling fan", "fence", "ferry", "garage", "guitar",
         "lamp", "market stall", "playground", "suitcase", "table", "theater", "van", "window box")  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One row of the bench.

    Attributes:
        loss: of `LOSSES`, or `ppo` for the policy of the run.
        prompts: of which 270 are the recipe's and the others have further topics.
        answers: to each prompt.
        passes: over them.
        rate: of AdamW at the start.
        rank: of the adapter; None for that of ppo.lora.
        averaged: take the mean of the weights over the second half of the steps.
        seed: of the adapter and of the order of the prompts.
    """

    loss: str = "variance"
    prompts: int = 270
    answers: int = 8
    passes: int = 2
    rate: float = 7e-4
    rank: int | None = None
    averaged: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Draws:
    """K answers to each of M prompts: token ids, prompt by prompt; r̂ and r* (M, K) float64."""

    prompts: list[str]
    rows: list[list[int]]
    score: torch.Tensor
    truth: torch.Tensor

    def first(self, prompts: int, answers: int) -> Draws:
        """Return the first answers to the first prompts."""
        count = self.score.shape[1]
        rows = [self.rows[m * count + k] for m in range(prompts) for k in range(answers)]
        return Draws(self.prompts[:prompts], rows, self.score[:prompts, :answers], self.truth[:prompts, :answers])


class Bench:
    """The run's π_ref, r̂ and prompts, and policies learnt and measured with them."""

    def __init__(self, run: RunDir, output: Path) -> None:
        self.run, self.output = run, output
        self.recipe = load_recipe(Recipe, run.root / "recipe.yaml", [])
        self.home = run.stage("sft") / "model"
        self.renderer = inputs.make_renderer(self.recipe.model, load_tokenizer(self.home))
        self.accelerator = make_accelerator(declared_world())
        ppo = self.recipe.ppo
        self.sampling = Sampling(self.renderer.max_response_tokens, ppo.temperature, ppo.top_p)
        how = {"use_bonus": self.recipe.reward.kappa > 0, "use_baseline": False}
        size = self.recipe.reward.feature_batch_size
        self.scorer = load_scorer(run.stage("reward") / "model", self.recipe.model, size, **how)
        self.identity = str(run.require("reward")["fingerprint"])

    # --- draws --------------------------------------------------------------------------------------------------------

    def prompts(self, split: str) -> list[str]:
        """Return prompts of `split`: training, held-out, or further ones (810) that are in neither."""
        if split == "further":
            made = itertools.product(NOUNS, ADJECTIVES, REQUEST_FORMS)
            return [form.format(f"a {adjective} {noun}") for noun, adjective, form in made]
        read = inputs.training_prompts if split == "training" else inputs.evaluation_prompts
        return [str(prompt) for prompt in read("embedded", self.run.released)]

    def draw(self, name: str, prompts: list[str], count: int) -> Draws:
        """Draw `count` answers of π_ref to each prompt; kept in OUTPUT/draws-NAME.safetensors."""
        path, source = self.output / f"draws-{name}.safetensors", {"reward": self.identity, "count": str(count)}
        if path.is_file():
            with safe_open(path, "pt") as file:
                if file.metadata() == source:
                    lengths, tokens, score, truth = map(file.get_tensor, ("lengths", "tokens", "score", "truth"))
                    return Draws(prompts, [row.tolist() for row in tokens.split(lengths.tolist())], score, truth)
        model = load_causal_lm(self.home, self.recipe.model.dtype)
        rows = self.sample(model, prompts, count, name)
        features = self.scorer.features(*self.texts(prompts, rows))
        for m, prompt in enumerate(prompts):
            self.scorer.add_reference(prompt, features[m * count : (m + 1) * count])
        draws = self.scored(prompts, rows, features)
        tokens = torch.tensor([token for row in rows for token in row])
        kept = {"lengths": torch.tensor([len(row) for row in rows]), "tokens": tokens}
        with atomic.new_file(path) as temporary:
            save_file({**kept, "score": draws.score, "truth": draws.truth}, temporary, source)
        return draws

    def sample(self, model: Any, prompts: Sequence[str], count: int, purpose: str) -> list[list[int]]:
        """Return `count` answers of `model` to each prompt, as token ids."""
        return sample_responses(
            model,
            [self.renderer.prompt_ids(prompt) for prompt in prompts for _ in range(count)],
            [sample_key(self.recipe.seed, "learnt", purpose, prompt, k) for prompt in prompts for k in range(count)],
            self.sampling,
            pad_token_id=self.renderer.tokenizer.pad_token_id,
            eos_token_id=end_ids(model, self.renderer.tokenizer),
            batch_size=self.recipe.ppo.generate_batch_size,
            progress=purpose,
        )

    def texts(self, prompts: Sequence[str], rows: Sequence[list[int]]) -> tuple[list[str], list[str]]:
        """Return the prompt and the text of each row."""
        count = len(rows) // len(prompts)
        return [prompt for prompt in prompts for _ in range(count)], [self.renderer.text(row) for row in rows]

    def scored(self, prompts: list[str], rows: list[list[int]], features: torch.Tensor) -> Draws:
        """Return the answers with r̂ and r*; Γ is centred already."""
        repeated, texts = self.texts(prompts, rows)
        score = self.scorer.score_features(repeated, features).pessimistic.double().reshape(len(prompts), -1)
        truth = torch.tensor([true_reward("", text) for text in texts]).double().reshape(score.shape)
        return Draws(prompts, rows, score, truth)

    def judged(self, split: str) -> Draws:
        """Return π_ref's draws to the prompts of `split` on which policies are measured; they centre Γ there."""
        prompts = [str(prompt) for prompt in evenly_spaced(self.prompts(split), JUDGED[split])]
        draws = self.draw(f"judged-{split}", prompts, CANDIDATES)
        features = self.output / f"references-{split}.safetensors"
        if not features.is_file():
            found = self.scorer.features(*self.texts(prompts, draws.rows)).reshape(len(prompts), CANDIDATES, -1)
            save_file({"features": found.contiguous()}, features)
        with safe_open(features, "pt") as file:
            for prompt, each in zip(prompts, file.get_tensor("features"), strict=True):
                self.scorer.add_reference(prompt, each)
        return draws

    def stored(self, setting: Setting) -> list[Draws]:
        """Return the draws to learn from; those of the recipe's prompts come first."""
        further = self.prompts("further")
        found, left = [], setting.prompts
        for name, prompts, count in (
            ("training", self.prompts("training"), 8),
            ("further", further[:270], 4),
            ("more", further[270:], 2),
        ):
            if left > 0:
                found.append(self.draw(name, prompts, count).first(min(left, len(prompts)), setting.answers))
                left -= len(prompts)
        return found

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(self, setting: Setting, draws: Sequence[Draws]) -> tuple[Any, dict[str, Any]]:
        """Return the policy with its value head, and the steps, seconds and loss of each pass."""
        ppo, started = self.recipe.ppo, time.monotonic()
        assert ppo.lora is not None
        lora = ppo.lora if setting.rank is None else replace(ppo.lora, rank=setting.rank)
        base = load_causal_lm(self.home, self.recipe.model.dtype)
        model = PolicyWithValue(add_lora(base, lora, setting.seed), base.config.hidden_size).eval()
        learnt = [parameter for parameter in model.policy.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learnt, weight_decay=0.0)
        reader = PolicyReader(self.accelerator, model, None, self.renderer.tokenizer, ppo.temperature, False)
        count = setting.answers
        rows = [row for each in draws for row in each.rows]
        ids = [self.renderer.prompt_ids(prompt) for each in draws for prompt in each.prompts for _ in range(count)]
        utility = utilities(torch.cat([each.score for each in draws]).float(), ppo.kl_coef)
        reference = torch.tensor([sum(values) for values in reader.read(ids, rows, READ, at_reference=True)[1]])
        steps = setting.passes * (len(utility) * count // BATCH)
        losses: list[float] = []
        mean: list[torch.Tensor] = []
        bar = tqdm(self.groups(setting, len(utility), steps), total=steps, desc=setting.loss)
        for step, picked in enumerate(bar):
            flat = [m * count + k for m in picked for k in range(count)]
            batch = reader.batch([ids[i] for i in flat], [rows[i] for i in flat], flat)
            logprobs = model(batch, ppo.temperature)[0].sum(dim=1)
            loss = LOSSES[setting.loss]((logprobs - reference[flat]).reshape(len(picked), count), utility[picked])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learnt, ppo.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = setting.rate * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if setting.averaged and step >= steps // 2:
                share = 1 / (step - steps // 2 + 1)
                mean = mean or [copy.deepcopy(parameter.detach()) for parameter in learnt]
                for value, parameter in zip(mean, learnt, strict=True):
                    value.lerp_(parameter.detach(), share)
        for value, parameter in zip(mean, learnt, strict=False):
            parameter.data.copy_(value)
        by_pass = [float(np.mean(part)) for part in np.array_split(losses, setting.passes)]
        facts = {"steps": steps, "seconds": round(time.monotonic() - started), "losses": by_pass}
        return model, facts

    def groups(self, setting: Setting, prompts: int, steps: int) -> Iterator[list[int]]:
        """Yield the prompts of each step; a pass is a permutation of all of them."""
        generator = torch.Generator().manual_seed(setting.seed)
        size = BATCH // setting.answers
        order: list[int] = []
        for _ in range(steps):
            if len(order) < size:
                order += torch.randperm(prompts, generator=generator).tolist()
            yield order[:size]
            order = order[size:]

    # --- measuring ----------------------------------------------------------------------------------------------------

    def measure(self, policy: Any, split: str) -> dict[str, list[float]]:
        """Return per judged prompt the gains over π_ref in r̂ and r*, the KL, and the Gibbs policy's gains in J."""
        base, kl_coef = self.judged(split), self.recipe.ppo.kl_coef
        rows = self.sample(policy.eval(), base.prompts, ANSWERS, f"policy, {split}")
        drawn = self.scored(base.prompts, rows, self.scorer.features(*self.texts(base.prompts, rows)))
        kl = np.array(self.kl(policy, base.prompts, rows)).reshape(-1, ANSWERS).mean(axis=1)
        found = gains(gibbs_weights(base.score.numpy(), kl_coef), base, kl_coef) | {"kl": kl.tolist()}
        for name in ("score", "truth"):
            found[name] = (getattr(drawn, name).mean(dim=1) - getattr(base, name).mean(dim=1)).tolist()
        return found

    @torch.no_grad()
    def kl(self, policy: Any, prompts: Sequence[str], rows: Sequence[list[int]]) -> list[float]:
        """Return Σ_t KL(π ‖ π_ref) along each answer, nats."""
        reference = load_causal_lm(self.home, self.recipe.model.dtype)
        ids = [self.renderer.prompt_ids(prompt) for prompt in self.texts(prompts, rows)[0]]
        pad, sharing, found = self.renderer.tokenizer.pad_token_id, sharing_of(policy, reference), [0.0] * len(rows)
        joined = [[*prompt, *row] for prompt, row in zip(ids, rows, strict=True)]
        for picked in batches(joined, sharing, BATCH):
            parts = [ids[i] for i in picked], [rows[i] for i in picked]
            batch = token_batch(*parts, pad, torch.device("cpu"), sharing=sharing)
            logits, others = response_forward(policy, batch)[0], response_forward(reference, batch)[0]
            for i, value in zip(picked, batch.spread(token_kl(logits, others)).sum(dim=1).tolist(), strict=True):
                found[i] = value
        return found

    def resampled(self, model: PolicyWithValue, split: str) -> dict[str, list[float]]:
        """Return the same as `measure` for the policy that picks among π_ref's draws with weights ∝ π/π_ref.

        The Gibbs policy of the same draws is its upper bound in J of r̂. It needs no answers of the policy, and draws no
        new noise; what the policy says beyond these draws it does not see.
        """
        base, kl_coef, ppo = self.judged(split), self.recipe.ppo.kl_coef, self.recipe.ppo
        reader = PolicyReader(self.accelerator, model, None, self.renderer.tokenizer, ppo.temperature, False)
        ids = [self.renderer.prompt_ids(prompt) for prompt in self.texts(base.prompts, base.rows)[0]]
        mine, theirs, _ = reader.read(ids, base.rows, READ)
        ratio = np.array([sum(a) - sum(b) for a, b in zip(mine, theirs, strict=True)]).reshape(base.score.shape)
        return gains(gibbs_weights(ratio, 1.0), base, kl_coef)

    def row(self, setting: Setting, sampled: bool) -> dict[str, Any]:
        """Return the row of `setting`: the policy learnt and measured on both splits."""
        row: dict[str, Any] = {"setting": asdict(setting)}
        policy: Any
        if setting.loss == "ppo":
            report = self.run.require("ppo")["report"]
            policy = load_causal_lm(self.run.stage("ppo") / "model", self.recipe.model.dtype)
            row |= {"steps": report["iterations"], "seconds": 0, "losses": []}
        else:
            model, facts = self.learn(setting, self.stored(setting))
            row |= {**facts, "resampled": {split: self.resampled(model, split) for split in JUDGED}}
            policy = model.policy.merge_and_unload() if sampled else None
        if policy is not None:
            row["sampled"] = {split: self.measure(policy, split) for split in JUDGED}
        return row


def gains(weight: np.ndarray, base: Draws, kl_coef: float) -> dict[str, list[float]]:
    """Return per prompt the gains in r̂ and r* of `weight` (M, K) on π_ref's draws, its KL, and Gibbs' gains in J."""
    best = gibbs_weights(base.score.numpy(), kl_coef)
    cost = kl_coef * kl_from_uniform(best)
    found = {"kl": kl_from_uniform(weight)}
    for name in ("score", "truth"):
        excess = getattr(base, name).numpy() - getattr(base, name).numpy().mean(axis=1, keepdims=True)
        found[name] = (weight * excess).sum(axis=1)
        found[f"gibbs {name}"] = (best * excess).sum(axis=1) - cost
    return {name: np.round(values, 4).tolist() for name, values in found.items()}


SETTINGS: dict[str, list[Setting]] = {
    "ppo": [Setting(loss="ppo")],
    "passes": [Setting(seed=seed) for seed in range(3)] + [Setting(passes=passes) for passes in (1, 4)],
    "listwise": [Setting(loss="listwise", seed=seed) for seed in range(3)],
    "weighted": [Setting(loss="weighted", answers=4, passes=passes) for passes in (4, 1)],
    "prompts": [
        Setting(prompts=prompts, answers=answers, seed=seed)
        for seed in range(3)
        for prompts, answers in ((540, 4), (1080, 2))
    ],
    "rates": [Setting(rate=rate) for rate in (3.5e-4, 1.4e-3)],
    "ranks": [Setting(rank=rank) for rank in (4, 64)],
    "averaged": [Setting(averaged=True), Setting(averaged=True, passes=4)],
    "centred": [Setting(loss="centred")],
}
"""By the question that each answers."""


def shares(row: dict[str, Any], kl_coef: float) -> dict[str, float | str]:
    """Return each gain in J as a share of the Gibbs policy's, with 95 % over prompts, and the KL."""
    found: dict[str, float | str] = {}
    for how, split, name in itertools.product(("resampled", "sampled"), JUDGED, ("score", "truth")):
        label = f"{how} {split} {'r̂' if name == 'score' else 'r*'}"
        names = (label, f"{label} low", f"{label} high", f"{how} {split} KL")
        found |= dict.fromkeys(names, "")
        if how not in row:
            continue
        values = {key: np.array(each)[None] for key, each in row[how][split].items()}
        share = share_of(values[name] - kl_coef * values["kl"], values[f"gibbs {name}"])
        if share is not None:
            numbers = (share.value, *share.prompts, float(values["kl"].mean()))
            found |= {each: round(number, 3) for each, number in zip(names, numbers, strict=True)}
    return found


def write_table(rows: Sequence[dict[str, Any]], kl_coef: float, path: Path) -> None:
    """Write a line for each row: the setting, steps, seconds, and shares."""
    lines = [
        {**row["setting"], "steps": row["steps"], "seconds": row["seconds"], **shares(row, kl_coef)} for row in rows
    ]
    with atomic.new_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="of the questions")
    parser.add_argument("--setting", type=json.loads, action="append", default=[], help="JSON of one more row")
    parser.add_argument("--sampled", action="store_true", help="also draw 4 answers of the policy to each prompt")
    parser.add_argument("--draw", nargs="+", choices=["270", "540", "1080", *JUDGED], help="draw for these, and stop")
    parser.add_argument("--output", type=Path, default=Path("runs/learnt"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    bench = Bench(RunDir(options.run), options.output)
    if options.draw is not None:
        for name in options.draw:
            _ = bench.judged(name) if name in JUDGED else bench.stored(Setting(prompts=int(name), answers=2))
        return
    wanted = [Setting(**each) for each in options.setting]
    wanted = wanted or [setting for name in options.only for setting in SETTINGS[name]]
    path = options.output / "rows.jsonl"
    for setting in wanted:
        if any(row["setting"] == asdict(setting) for row in rows_of(path, lambda _: bench.identity)):
            continue
        row = bench.row(setting, options.sampled)
        with appending(path) as keep:
            keep({"bed": bench.identity, **row})
        print(setting, shares(row, bench.recipe.ppo.kl_coef), flush=True)
    rows = rows_of(path, lambda _: bench.identity)
    write_table(rows, bench.recipe.ppo.kl_coef, options.output / "table.csv")


if __name__ == "__main__":
    main()
