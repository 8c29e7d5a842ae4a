"""The recipe: all that a user can set, one module per section. `private_rlhf.recipe.load` reads it from YAML."""

# ruff: noqa: F401 (the names of the sections, for import from here)
from private_rlhf.recipe.data_section import BUILT_IN, OF_RELEASE, SUFFIXES, DataConfig, ModelConfig, is_hub_id
from private_rlhf.recipe.evaluate_section import LOOPBACK, EvaluateConfig, JudgeSettings
from private_rlhf.recipe.load import STRICT
from private_rlhf.recipe.online_section import CrowdSettings, OnlineConfig
from private_rlhf.recipe.ppo_section import ExtraRewardSettings, PpoConfig
from private_rlhf.recipe.privatize_section import PrivatizeConfig
from private_rlhf.recipe.recipe import ALIGNERS, ON_TRL, Recipe
from private_rlhf.recipe.reward_section import (
    EarlyStoppingSettings,
    ExternalRewardSettings,
    RewardConfig,
    UncertaintySettings,
)
from private_rlhf.recipe.rollout_section import RolloutConfig
from private_rlhf.recipe.training_sections import (
    DpoConfig,
    GroupConfig,
    GvpoConfig,
    LoraSettings,
    OptimizerName,
    SftConfig,
)
