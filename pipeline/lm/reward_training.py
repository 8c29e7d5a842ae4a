"""Training a reward backbone (LoRA or full) on privatised pairs with TRL, and the statistics of Γ afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from trl import RewardConfig

from pipeline.core.recipe import Recipe
from pipeline.core.world import World
from pipeline.data.render import Renderer
from pipeline.lm import hf_trainer
from pipeline.lm.models import DTYPES, lora_config
from reward_models.losses import check_epsilon
from reward_models.model import RewardModel, merge_adapters, set_score_weight
from reward_models.trainer import PrivateRewardTrainer
from reward_models.uncertainty import FisherAccumulator, FisherBonus

Pairs = list[tuple[list[int], list[int]]]


def train_backbone(
    backbone: Any,
    pairs: Pairs,
    epsilon: float,
    renderer: Renderer,
    recipe: Recipe,
    checkpoints: Path,
    world: World,
    warm_weight: torch.Tensor | None,
) -> tuple[Any, list[list[float]]]:
    """(plain trained model, [[step, loss], …]) of the recipe's `lora` or `full` mode.

    Args:
        backbone: sequence-classification model with a zero head.
        pairs: (chosen, rejected) token ids, `chosen` being what z prefers.
        epsilon: of the labels; math.inf for public ones.
        renderer: its tokenizer pads.
        recipe: sections `reward` and `model`.
        checkpoints: where resume state is kept.
        world: the process group.
        warm_weight: (d,) head to start from, or None for zeros.
    """
    settings = recipe.reward
    arguments = hf_trainer.trainer_config(
        "reward",
        settings,
        RewardConfig,
        checkpoints,
        recipe.seed,
        world,
        max_length=None,
        remove_unused_columns=False,
    )
    if warm_weight is not None:
        set_score_weight(backbone, warm_weight)
    if settings.mode == "lora":
        config = lora_config(settings.lora, "SEQ_CLS", backbone)
        config.modules_to_save = ["score"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model: Any = get_peft_model(backbone, config, autocast_adapter_dtype=True)
    else:
        model = backbone.float()
    trainer = PrivateRewardTrainer(
        model,
        arguments,
        epsilon=check_epsilon(epsilon, allow_zero=False),
        loss=settings.loss,
        reward_bound=settings.reward_bound,
        train_dataset=Dataset.from_list(
            [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs]
        ),
        processing_class=renderer.tokenizer,
        callbacks=[hf_trainer.CompletionMarker(), hf_trainer.StopOnNonFinite()],
    )
    trainer.train(resume_from_checkpoint=hf_trainer.last_whole_checkpoint(checkpoints))
    trained = trainer.accelerator.unwrap_model(trainer.model)
    return merge_adapters(trained, DTYPES[recipe.model.dtype]).eval(), hf_trainer.loss_history(trainer.state)


def fisher_bonus(
    model: RewardModel, chosen: torch.Tensor, rejected: torch.Tensor, epsilon: float, recipe: Recipe
) -> FisherBonus:
    """Γ's statistics of a trained model on its training pairs, in the last layer's features (n, d).

    The ridge λ of the recipe acts on w itself here; directions that the pairs do not explore stay uncertain.
    """
    settings = recipe.reward
    assert settings.ridge is not None  # the recipe requires it for these modes
    accumulator = FisherAccumulator(
        model.weight.detach().cpu(), epsilon=epsilon, ridge=settings.ridge, reward_bound=settings.reward_bound
    )
    accumulator.update(chosen, rejected)
    return accumulator.bonus(settings.kappa)
