"""Is it PPO that falls short of the Gibbs policy, or what a few thousand draws can teach? The same policy without PPO.

The Gibbs policy of r̂ is known on draws of π_ref: weights exp(r̂/kl_coef). Here an adapter as PPO's learns those weights
by maximum likelihood, one pass over N draws of π_ref for each training prompt (those of a weight below a tenth of the
mean are left out), the rate falling to 0. No policy gradient, no advantages, no value head: if it stops where PPO does,
PPO is not what stops it. J by r* on held-out prompts, beside the run's PPO policy and the Gibbs policy of held-out
draws; the same keys of sampling noise for all.

Needs a run of the embedded task whose stage `ppo` is done (one of alignment_cost.py, say).
Run:  python -m private_rlhf_lab.benches.gibbs_distilled --run runs/ppo/ppo-eps2-seed0 [--draws 4 16] [--output DIR]
      (half an hour beside other work for these; the draws and finished rows are kept)
Writes OUTPUT/draws.safetensors, rows.jsonl and table.md; brackets are 95 % over prompts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import declared_world
from private_rlhf.data import inputs
from private_rlhf.data.render import Prompt, Renderer, keep_fitting, prompt_key
from private_rlhf.embedded.truth import true_reward
from private_rlhf.evaluation.evaluation_sampler import Sampler
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
from private_rlhf.lm.kernels.token_terms import token_logprobs
from private_rlhf.lm.logprobs import response_forward, token_batch
from private_rlhf.lm.models import add_lora, end_ids, load_causal_lm, load_tokenizer
from private_rlhf.lm.rows import batches, sharing_of
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.gibbs import gibbs_weights, kl_from_uniform
from private_rlhf.reward_models.scorer import load_scorer
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.benches.alignment_cost import bounded, percent
from private_rlhf_lab.benches.epsilon_tables import over_prompts, share_of

BATCH, MICRO = 32, 16
LEAST = 0.1  # of the mean weight
ANSWERS, CANDIDATES = 4, 8
"""To each held-out prompt, and draws of π_ref for its Gibbs policy."""


@dataclass(frozen=True)
class Draws:
    """N draws of π_ref to each of M prompts, token ids prompt by prompt, and r̂ of them (M, N)."""

    prompts: list[Prompt]
    rows: list[list[int]]
    score: torch.Tensor

    def first(self, count: int) -> Draws:
        """The first `count` of each prompt."""
        each = self.score.shape[1]
        rows = [self.rows[m * each + k] for m in range(len(self.prompts)) for k in range(count)]
        return Draws(self.prompts, rows, self.score[:, :count])


def fitting(run: RunDir, recipe: Recipe, renderer: Renderer) -> list[Prompt]:
    """The training prompts within the recipe's limit."""
    everything = inputs.training_prompts(recipe.data.prompts, run.released)
    return [everything[i] for i in keep_fitting(everything, renderer, recipe.model.too_long)]


def draw(run: RunDir, recipe: Recipe, renderer: Renderer, prompts: list[Prompt], count: int, path: Path) -> Draws:
    """`count` for every prompt; kept in `path`."""
    home = run.stage("sft") / "model"
    source = {"reward": str(run.require("reward")["fingerprint"]), "draws": f"{len(prompts)} x {count}"}
    if path.is_file():
        with safe_open(path, "pt") as file:
            if file.metadata() == source:
                lengths, tokens, score = (file.get_tensor(name) for name in ("lengths", "tokens", "score"))
                return Draws(prompts, [each.tolist() for each in tokens.split(lengths.tolist())], score)
    model, repeated = load_causal_lm(home, recipe.model.dtype), [p for p in prompts for _ in range(count)]
    rows = sample_responses(
        model,
        [renderer.prompt_ids(prompt) for prompt in repeated],
        [sample_key(recipe.seed, "distilled", prompt_key(p), k) for p in prompts for k in range(count)],
        Sampling(renderer.max_response_tokens, recipe.ppo.temperature, recipe.ppo.top_p),
        pad_token_id=renderer.tokenizer.pad_token_id,
        eos_token_id=end_ids(model, renderer.tokenizer),
        batch_size=recipe.ppo.generate_batch_size,
        progress="draws of π_ref",
    )
    how = {"use_bonus": recipe.reward.kappa > 0, "use_baseline": False}
    scorer = load_scorer(run.stage("reward") / "model", recipe.model, recipe.reward.feature_batch_size, **how)
    features = scorer.features(repeated, [renderer.text(row) for row in rows])
    for m, prompt in enumerate(prompts):
        scorer.add_reference(prompt, features[m * count : (m + 1) * count])
    score = scorer.score_features(repeated, features).pessimistic.reshape(len(prompts), count).double()
    tokens = torch.tensor([token for row in rows for token in row])
    with atomic.new_file(path) as temporary:
        lengths = torch.tensor([len(row) for row in rows])
        save_file({"lengths": lengths, "tokens": tokens, "score": score}, temporary, source)
    return Draws(prompts, rows, score)


def distil(draws: Draws, recipe: Recipe, renderer: Renderer, home: Path) -> Any:
    """The policy after one pass over the draws, weighted as the Gibbs policy has them; merged."""
    weight = torch.from_numpy(gibbs_weights(draws.score.numpy(), recipe.ppo.kl_coef)).flatten() * draws.score.shape[1]
    kept = [i for i in range(len(weight)) if weight[i] > LEAST]
    order = [kept[i] for i in torch.randperm(len(kept), generator=torch.Generator().manual_seed(recipe.seed)).tolist()]
    if recipe.ppo.lora is None:
        raise UserError("the run's PPO has no adapter: ppo.lora is null")
    policy = add_lora(load_causal_lm(home, recipe.model.dtype), recipe.ppo.lora, recipe.seed)
    learnt = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer, sharing = torch.optim.AdamW(learnt, weight_decay=0.0), sharing_of(policy)
    each, pad, device = draws.score.shape[1], renderer.tokenizer.pad_token_id, learnt[0].device
    steps = len(order) // BATCH
    for step in tqdm(range(steps), desc=f"{each} draws a prompt", unit="step"):
        picked = order[step * BATCH : (step + 1) * BATCH]
        prompts = [renderer.prompt_ids(draws.prompts[i // each]) for i in picked]
        rows = [draws.rows[i] for i in picked]
        for part in batches([[*a, *b] for a, b in zip(prompts, rows, strict=True)], sharing, MICRO):
            batch = token_batch([prompts[j] for j in part], [rows[j] for j in part], pad, device, sharing=sharing)
            logits, _ = response_forward(policy, batch)
            logprobs = batch.spread(token_logprobs(logits, batch.tokens, recipe.ppo.temperature)).sum(dim=1)
            (-(weight[[picked[j] for j in part]].float() * logprobs).sum() / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(learnt, recipe.ppo.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.ppo.learning_rate * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    return policy.merge_and_unload()


def judged(sampler: Sampler, prompts: Sequence[tuple[int, Prompt]], kl_coef: float) -> dict[str, list[float]]:
    """Per prompt: the gain of `sampler.policy` over π_ref in r* and in J, its KL, and the Gibbs policy's gain in J."""
    found: dict[str, list[float]] = {"true": [], "kl": [], "j": [], "gibbs": []}
    for result in sampler.measure(prompts, ANSWERS, CANDIDATES):
        own, base = ([float(a.true_reward or 0.0) for a in group] for group in (result.policy, result.reference))
        kl = float(np.mean([answer.kl for answer in result.policy]))
        gain = float(np.mean(own) - np.mean(base))
        truth = np.array([float(a.true_reward or 0.0) for a in result.candidates])
        weight = gibbs_weights(np.array([a.pessimistic_reward for a in result.candidates])[None], kl_coef)
        best = float((weight[0] - 1 / len(truth)) @ truth - kl_coef * kl_from_uniform(weight)[0])
        for name, value in (("true", gain), ("kl", kl), ("j", gain - kl_coef * kl), ("gibbs", best)):
            found[name].append(value)
    return found


def gain(values: np.ndarray) -> str:
    """The mean of (1, prompts) with its interval."""
    return bounded(over_prompts(values).as_dict(), "+.2f")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: each policy's gain in J less PPO's, and as a share of the Gibbs policy's, paired by prompt."""
    lines = ["| policy | draws or rollouts | KL, nats | gain in r* | gain in J | less PPO | of Gibbs' gain |"]
    lines += ["|---" * 7 + "|"]
    ppo = next(np.array(row["j"]) for row in rows if row["policy"] == "PPO")
    for row in rows:
        true, j, gibbs = (np.array(row[name])[None] for name in ("true", "j", "gibbs"))
        less = "–" if row["policy"] == "PPO" else gain(j - ppo)
        cells = [gain(true), gain(j), less, percent(share_of(j, gibbs))]
        count, kl = row["count"], float(np.mean(row["kl"]))
        lines.append(f"| {row['policy']} | {count:,} | {kl:.2f} | {' | '.join(cells)} |")
    best = gain(np.array(rows[0]["gibbs"])[None])
    lines += [
        "",
        f"The Gibbs policy of {CANDIDATES} draws to each of the {len(rows[0]['gibbs'])} prompts gains {best} in J.",
    ]
    return "\n".join(lines) + "\n"


def measured(run: RunDir, counts: Sequence[int], judges: int, output: Path) -> list[dict[str, Any]]:
    """A row for PPO, then one for each number of draws."""
    recipe, home = load_recipe(Recipe, run.root / "recipe.yaml", []), run.stage("sft") / "model"
    ppo = run.require("ppo")
    renderer = inputs.make_renderer(recipe.model, load_tokenizer(home))
    reference, accelerator = load_causal_lm(home, recipe.model.dtype), make_accelerator(declared_world())
    how = {"use_bonus": recipe.reward.kappa > 0, "use_baseline": False}
    scorer = load_scorer(run.stage("reward") / "model", recipe.model, recipe.reward.feature_batch_size, **how)
    sampling = Sampling(renderer.max_response_tokens, recipe.ppo.temperature, recipe.ppo.top_p)
    prompts = list(enumerate(inputs.evaluation_prompts(recipe.data.evaluation_prompts, run.released)[:judges]))
    learnt_from = fitting(run, recipe, renderer)
    identity = f"{ppo['fingerprint']}, {len(prompts)} prompts"
    rows = rows_of(output / "rows.jsonl", lambda _: identity)
    done = {(row["policy"], row["count"]) for row in rows}
    learnt = [("weighted likelihood", len(learnt_from) * count, count) for count in counts]
    wanted = [("PPO", int(ppo["report"]["rollouts"]), 0), *learnt]
    with appending(output / "rows.jsonl") as keep:
        for name, total, count in wanted:
            if (name, total) in done:
                continue
            if name == "PPO":
                model = load_causal_lm(run.stage("ppo") / "model", recipe.model.dtype)
            else:
                draws = draw(run, recipe, renderer, learnt_from, max(counts), output / "draws.safetensors")
                model = distil(draws.first(count), recipe, renderer, home)
            given = (accelerator, model.eval(), reference, renderer, scorer, true_reward, sampling, recipe.seed)
            found = judged(Sampler(*given, recipe.evaluate.batch_size), prompts, recipe.ppo.kl_coef)
            rows.append({"bed": identity, "policy": name, "count": total, **found})
            keep(rows[-1])
    return sorted(rows, key=lambda row: (row["policy"] != "PPO", row["count"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--draws", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--prompts", type=int, default=210, help="held-out ones, to judge by")
    parser.add_argument("--output", type=Path, default=Path("runs/distilled"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        text = table(measured(RunDir(options.run), options.draws, options.prompts, options.output))
    except UserError as error:
        print(f"gibbs_distilled: {error}", file=sys.stderr)
        return 2
    atomic.write_text(options.output / "table.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
