"""RLHF alignment training under label local differential privacy.

The names below are the public Python API (docs/reference/python.md). Each is imported when it is first used.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from private_rlhf.api import load_recipe, run
    from private_rlhf.core.noise import LabelNoise
    from private_rlhf.data.release import read_release
    from private_rlhf.data.tables import canonicalize, release
    from private_rlhf.data.verify import verify_release
    from private_rlhf.lm.generate import Sampling, sample_key, sample_responses
    from private_rlhf.privacy.label_lists import privatize
    from private_rlhf.privacy.mechanism import RandomizedResponse
    from private_rlhf.reward_models.gibbs import gibbs_weights
    from private_rlhf.reward_models.head import fit_head
    from private_rlhf.reward_models.losses import private_likelihood_loss
    from private_rlhf.reward_models.scorer import RewardScorer
    from private_rlhf.reward_models.trainer import PrivateRewardTrainer
    from private_rlhf.rl.ppo_trainer import PpoConfig, PpoTrainer

_MODULES = {
    "LabelNoise": "core.noise",
    "PpoConfig": "rl.ppo_trainer",
    "PpoTrainer": "rl.ppo_trainer",
    "PrivateRewardTrainer": "reward_models.trainer",
    "RandomizedResponse": "privacy.mechanism",
    "RewardScorer": "reward_models.scorer",
    "Sampling": "lm.generate",
    "canonicalize": "data.tables",
    "fit_head": "reward_models.head",
    "gibbs_weights": "reward_models.gibbs",
    "load_recipe": "api",
    "private_likelihood_loss": "reward_models.losses",
    "privatize": "privacy.label_lists",
    "read_release": "data.release",
    "release": "data.tables",
    "run": "api",
    "sample_key": "lm.generate",
    "sample_responses": "lm.generate",
    "verify_release": "data.verify",
}
__all__ = [
    "LabelNoise", "PpoConfig", "PpoTrainer", "PrivateRewardTrainer", "RandomizedResponse", "RewardScorer",
    "Sampling", "canonicalize", "fit_head", "gibbs_weights", "load_recipe", "private_likelihood_loss",
    "privatize", "read_release", "release", "run", "sample_key", "sample_responses", "verify_release",
]  # fmt: skip

# Where bitsandbytes is installed peft imports it, and on some CPUs every process would begin with its advice to install
# a 4-bit kernel: one without a gradient, which is not used here (`private_rlhf.lm.models.keep_differentiable`).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# peft and TRL ask every model for the old name of a property, which none of this package's calls can prevent.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
