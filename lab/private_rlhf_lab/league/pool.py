"""The pool of a run: answers of its π_ref to prompts of the embedded task, with features and true reward."""

from __future__ import annotations

from pathlib import Path

import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.render import make_renderer
from private_rlhf.embedded import task
from private_rlhf.embedded.truth import true_reward
from private_rlhf.lm.model_folders import weights_digest
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.online.pool import CandidateSampler, candidate_key
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.model import RewardModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def make_pool(run: RunDir, recipe: Recipe, path: Path, asked: int, held_out: int) -> dict[str, torch.Tensor]:
    """What `private_rlhf_lab.league.beds.pool_bed` reads; from `path` if it is there, else drawn and put there.

    asked, held_out: answers to each of at most 400 training and 100 held-out prompts. Minutes; the run's sft is done.
    UserError where the pool that is there is another run's, or does not say whose.
    """
    run.require("sft")
    home = run.stage("sft") / "model"
    features = f"{recipe.reward.num_layers} layers, {recipe.reward.pooling}"
    draws = f"{asked}, {held_out}, seed {recipe.seed}"
    source = {"policy": weights_digest(home), "answers": draws, "features": features}
    if path.is_file():
        with safe_open(path, "pt") as file:
            if file.metadata() == source:
                return load_file(path)
        raise UserError(f"{path} was not drawn from {run.root}: choose another --output, or name it with --pool")
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    policy = load_causal_lm(home, recipe.model.dtype)
    layers = load_backbone(home, recipe.reward, recipe.model.dtype, renderer.tokenizer.pad_token_id)
    backbone = RewardModel(layers, reward_bound=recipe.reward.reward_bound)
    sampler = CandidateSampler(policy, backbone, renderer, recipe.evaluate.batch_size, progress=True)
    tensors = {}
    sizes = (("train", task.load_prompts("train"), 400, asked), ("eval", task.load_prompts("eval"), 100, held_out))
    for split, prompts, count, answers in sizes:
        prompts = prompts[:: max(1, len(prompts) // count)][:count]
        drawn = sampler.draw(prompts, answers, candidate_key(recipe.seed, split))
        tensors[f"{split}_features"] = drawn.features
        rows = [[true_reward(str(p), text) for text in texts] for p, texts in zip(prompts, drawn.texts, strict=True)]
        tensors[f"{split}_truth"] = torch.tensor(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.new_file(path) as temporary:
        save_file(tensors, temporary, source)
    return tensors
