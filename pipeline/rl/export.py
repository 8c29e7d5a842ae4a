"""What PPO leaves behind: its policy and, where the base was quantised, its π_ref, as ordinary checkpoints.

An adapter that was trained on a 4-bit base corrects the 4-bit weights, not those of sft/model. So the policy is saved
as dequantised weights + adapter, and the base alone as ppo/reference: that is what the KL penalty was measured
against, and what the evaluation compares with.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_rlhf.core.rundir import RunDir
from private_rlhf.data.render import Renderer
from private_rlhf.lm.model_card import Provenance, policy_text
from private_rlhf.lm.released import write_beside
from private_rlhf.lm.saving import Read, save_merged
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

REFERENCE = "reference"


def quantised_reference(recipe: Recipe) -> bool:
    """Whether PPO's π_ref is sft/model in 4 bits."""
    return recipe.aligner == "ppo" and recipe.ppo.quantize is not None


def reference_fact(recipe: Recipe) -> str | None:
    """What cards and reports say of π_ref; None where it is sft/model itself."""
    if not quantised_reference(recipe):
        return None
    return (
        "sft/model quantised to 4 bits (NF4), which the adapter was trained on; the KL penalty, KL and J are measured"
        f" against it, not against sft/model; its dequantised weights are in ppo/{REFERENCE}"
    )


def reference_folder(run: RunDir, recipe: Recipe) -> Path:
    """The checkpoint of the π_ref that the policy was trained against."""
    return run.stage("ppo") / REFERENCE if quantised_reference(recipe) else run.stage("sft") / "model"


def save(
    accelerator: Accelerator, policy: Any, renderer: Renderer, folder: Path, recipe: Recipe, read: Read | None = None
) -> None:
    """Writes `folder`/model and, of a 4-bit base, `folder`/reference with its card. Every process calls it.

    Args:
        accelerator: of the run.
        policy: the bare causal LM (or PEFT model).
        renderer: its tokenizer goes with the weights.
        folder: of the stage.
        recipe: dtype and quantisation.
        read: calls the policy where its weights are split over processes.

    Raises:
        RunStopped: see `save_merged`.
    """
    dtype, reference, tokenizer = recipe.model.dtype, folder / REFERENCE, tokenizer_as_trained(renderer)
    save_merged(accelerator, policy, tokenizer, folder / "model", dtype, read=read)
    if quantised_reference(recipe):
        with policy.disable_adapter():
            save_merged(accelerator, policy, tokenizer, reference, dtype, read=read)
        if accelerator.is_main_process:
            text = policy_text("what sft/model was; its linear layers are rounded to 4 bits", renderer, recipe.ppo)
            origin = Provenance("sft, in 4 bits", recipe.name, recipe.model, recipe.data, recipe.override)
            write_beside(reference, origin, renderer, None, text)
    elif accelerator.is_main_process:
        shutil.rmtree(reference, ignore_errors=True)  # of an earlier recipe
