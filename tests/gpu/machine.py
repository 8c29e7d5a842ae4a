"""Where the GPU checks run, and what several of them are made of: texts, a policy's trainer, a clean accelerate."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peer_ppo_loops import reward_checkpoint
from private_rlhf.data.render import Renderer
from private_rlhf.embedded.task import load_pairs
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.recipe import LoraSettings, PpoConfig
from private_rlhf.reward_models.scorer import RewardScorer
from private_rlhf.rl.ppo_trainer import PpoTrainer

REHEARSAL = "PRIVATE_RLHF_GPU_REHEARSAL"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def rehearsal() -> bool:
    """Whether the checks run on the CPU, in small, to be checked themselves."""
    return os.environ.get(REHEARSAL, "") == "1"


def device_or_none() -> torch.device | None:
    """The GPU, or the CPU of a rehearsal; None where there is neither."""
    if rehearsal():
        return torch.device("cpu")
    return torch.device("cuda") if torch.cuda.is_available() else None


def accelerator_on(device: torch.device, mixed_precision: str = "no") -> Accelerator:
    """A fresh accelerator; accelerate keeps one state per process, so those made before are at an end."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=device.type == "cpu", mixed_precision=mixed_precision)


def renderer_of(path: Path) -> Renderer:
    """A renderer with short limits for a checkpoint's tokenizer."""
    return Renderer(load_tokenizer(path), 96, 8 if rehearsal() else 32, "")


def some_pairs(renderer: Renderer, count: int = 8) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of `count` prompts, each twice, and of both responses to each."""
    rows = load_pairs("eval")[:count]
    prompts = [renderer.prompt_ids(row.prompt) for row in rows for _ in range(2)]
    responses = [renderer.response_ids(text) for row in rows for text in (row.response_a, row.response_b)]
    return prompts, responses


def some_prompts(count: int = 4) -> list[str]:
    """The first distinct prompts of the embedded task."""
    return list(dict.fromkeys(row.prompt for row in load_pairs("eval")))[:count]


def make_trainer(path: Path, device: torch.device, dtype: str, precision: str = "no", **settings: object) -> PpoTrainer:
    """PPO with a fresh LoRA adapter, as the stage makes it, and a random reward head with statistics of Γ.

    Args:
        path: of the policy's checkpoint, whose weights the reward model has too.
        device: where it learns.
        dtype: of the frozen weights.
        precision: accelerate's mixed precision.
        settings: of the recipe's `ppo` section.
    """
    accelerator = accelerator_on(device, precision)
    own = {"rollouts": 8, "minibatch_size": 4, "reference_samples": 2, "lora": LoraSettings(rank=4), **settings}
    config = PpoConfig(**own)
    assert config.lora is not None
    renderer = renderer_of(path)
    base = load_causal_lm(path, dtype)
    model = PolicyWithValue(add_lora(base, config.lora, 0), base.config.hidden_size).eval()
    reward = reward_checkpoint({"path": path, "dtype": SHORT[dtype], "mc_dropout": True})
    reward.model.model.to(device)
    return PpoTrainer(
        accelerator, model, None, RewardScorer(reward, renderer), renderer, some_prompts(), config, seed=0
    )
