"""What a reward learns of people from whole responses, beside responses that are cut to a cap and ended there.

    python -m private_rlhf_lab.benches.uncut_accuracy FOLDER... [--recipe configs/hh_rlhf_smollm2.yaml] [--seeds 5]

FOLDER holds train.jsonl and eval.jsonl (or .gz) with `prompt`, `chosen`, `rejected`, whose labels must be public: test
pairs keep theirs. Training labels are randomised at each epsilon, once per seed. The head is fitted as stage `reward`
does on frozen float32 features of the base model. Accuracy is that of the sign of the margin on the test pairs' true
labels, with a tie as half a hit; ± is the 95 % interval over seeds (Student's t), which share pairs and folds.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from private_rlhf.core.noise import LabelNoise
from private_rlhf.data.render import Renderer
from private_rlhf.lm.base_models import smollm2_checkpoint
from private_rlhf.lm.features import extract_features
from private_rlhf.lm.models import load_tokenizer
from private_rlhf.privacy.keys import insecure_seed_key
from private_rlhf.privacy.mechanism import RandomizedResponse
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.backbone import build_reward_backbone
from private_rlhf.reward_models.head import PairFeatures, fit_head
from private_rlhf.reward_models.losses import bounded_reward
from private_rlhf.reward_models.model import RewardModel

from private_rlhf_lab.benches.epsilon_tables import interval
from private_rlhf_lab.benches.text_lengths import read_pairs

EPSILONS = (0.5, 2.0, math.inf)
Pair = tuple[list[int], list[int]]


def main() -> None:
    """Prints how many pairs are used and a table of accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--recipe", type=Path, default=Path("configs/hh_rlhf_smollm2.yaml"))
    parser.add_argument("--cap", type=int, default=64, help="tokens of a response, end of turn included")
    parser.add_argument("--layers", type=int, help="of the backbone; the recipe's unless given")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    recipe = load_recipe(Recipe, given.recipe)
    training, testing = (
        [row for folder in given.folders for row in read_pairs(folder, name)] for name in ("train", "eval")
    )
    with tempfile.TemporaryDirectory() as cache:
        checkpoint = smollm2_checkpoint(Path(cache))
        renderer = Renderer(load_tokenizer(checkpoint), 10**9, 10**9, system_prompt=recipe.model.system_prompt)
        layers = given.layers or recipe.reward.num_layers
        pad = renderer.tokenizer.pad_token_id
        backbone = build_reward_backbone(checkpoint, layers, torch.float32, pad_token_id=pad)
        model = RewardModel(backbone)
        limit = recipe.model.max_text_tokens
        fitting = [[row for row in rows if longest(renderer, row) <= limit] for rows in (training, testing)]
        print(f"pairs within {limit} tokens: {len(fitting[0])} of {len(training)}, {len(fitting[1])} of {len(testing)}")
        for name, cap in (("whole", None), (f"cut at {given.cap}", given.cap)):
            learnt, judged = (features(model, renderer, rows, cap) for rows in fitting)
            prompts = [repr(row["prompt"]) for row in fitting[0]]
            for epsilon in EPSILONS:
                hits = [accuracy(learnt, judged, prompts, epsilon, seed, recipe) for seed in range(given.seeds)]
                mean, half = interval(hits)
                each = " ".join(f"{value:.3f}" for value in hits)
                print(f"{name}, ε {epsilon:g}: accuracy {mean:.3f} ± {half:.3f} ({each})", flush=True)


def ids(renderer: Renderer, row: dict, side: str, cap: int | None) -> list[int]:
    """A prompt with a response, which a cap ends early."""
    response = renderer.response_ids(row[side])
    if cap is not None and len(response) > cap:
        response = [*response[: cap - 1], response[-1]]
    return renderer.prompt_ids(row["prompt"]) + response


def longest(renderer: Renderer, row: dict) -> int:
    """Tokens of a prompt with its longer response."""
    return max(len(ids(renderer, row, side, None)) for side in ("chosen", "rejected"))


def features(model: RewardModel, renderer: Renderer, rows: Sequence[dict], cap: int | None) -> PairFeatures:
    """Of the responses that people chose and of the others."""
    texts = [ids(renderer, row, side, cap) for row in rows for side in ("chosen", "rejected")]
    pad, device = renderer.tokenizer.pad_token_id, model.weight.device
    found = extract_features(model, texts, pad_token_id=pad, batch_size=16, device=device, progress="features")
    return PairFeatures(found[0::2], found[1::2])


def accuracy(
    learnt: PairFeatures, judged: PairFeatures, prompts: Sequence[str], epsilon: float, seed: int, recipe: Recipe
) -> float:
    """Of the head that learns from labels randomised with this seed; at ε = ∞ every seed has the same."""
    keep = torch.ones(len(learnt), dtype=torch.bool)
    if not math.isinf(epsilon):
        mechanism, prf = RandomizedResponse(epsilon), insecure_seed_key(seed).prf
        keep = torch.tensor([mechanism.release(prf, str(index).encode(), 1) == 1 for index in range(len(learnt))])
    first = torch.where(keep[:, None], learnt.chosen, learnt.rejected)
    second = torch.where(keep[:, None], learnt.rejected, learnt.chosen)
    pairs, noise = PairFeatures(first, second), LabelNoise.of(epsilon)
    fit, _ = fit_head(pairs, noise, recipe.reward, prompts=prompts, seed=recipe.seed)
    bound = recipe.reward.reward_bound
    raw = [side.double() @ fit.weight for side in (judged.chosen, judged.rejected)]
    margin = bounded_reward(raw[0], bound) - bounded_reward(raw[1], bound)
    return float((margin > 0).double().mean() + 0.5 * (margin == 0).double().mean())


if __name__ == "__main__":
    main()
