"""The recipe: all that a user can set, one module per section. `private_rlhf.recipe.load` reads it from YAML."""

from private_rlhf.recipe.data_section import BUILT_IN, OF_RELEASE, SUFFIXES, DataConfig, has_hub_form
from private_rlhf.recipe.dpo_section import DpoConfig
from private_rlhf.recipe.evaluate_section import LOOPBACK, EvaluateConfig, JudgeSettings
from private_rlhf.recipe.group_section import GroupConfig
from private_rlhf.recipe.model_section import ModelConfig
from private_rlhf.recipe.online_section import CrowdSettings, OnlineConfig
from private_rlhf.recipe.ppo_section import ExtraRewardSettings, PpoConfig
from private_rlhf.recipe.privatize_section import PrivatizeConfig
from private_rlhf.recipe.recipe import ALIGNERS, ON_PROMPTS, Recipe
from private_rlhf.recipe.reward_section import (
    EarlyStoppingSettings,
    ExternalRewardSettings,
    RewardConfig,
    UncertaintySettings,
)
from private_rlhf.recipe.sft_section import SftConfig
from private_rlhf.recipe.shared_settings import STRICT, LoraSettings, OptimizerName

__all__ = [
    "ALIGNERS",
    "BUILT_IN",
    "LOOPBACK",
    "OF_RELEASE",
    "ON_PROMPTS",
    "STRICT",
    "SUFFIXES",
    "CrowdSettings",
    "DataConfig",
    "DpoConfig",
    "EarlyStoppingSettings",
    "EvaluateConfig",
    "ExternalRewardSettings",
    "ExtraRewardSettings",
    "GroupConfig",
    "JudgeSettings",
    "LoraSettings",
    "ModelConfig",
    "OnlineConfig",
    "OptimizerName",
    "PpoConfig",
    "PrivatizeConfig",
    "Recipe",
    "RewardConfig",
    "SftConfig",
    "UncertaintySettings",
    "has_hub_form",
]
