"""The checkpoints of PPO: its policy and, where the base was quantised, its π_ref.

An adapter that was trained on a 4-bit base corrects the 4-bit weights, not those of sft/model. So the policy is saved
as dequantised weights + adapter, and the base without it as ppo/reference: the KL penalty was measured against that
checkpoint, and the evaluation compares with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_rlhf.data.render import Renderer
from private_rlhf.lm.saving import Read, save_merged
from private_rlhf.lm.templates import tokenizer_as_trained

if TYPE_CHECKING:
    from accelerate import Accelerator

REFERENCE = "reference"
QUANTISED_REFERENCE = (
    "sft/model quantised to 4 bits (NF4), which the adapter was trained on; the KL penalty, KL and J are measured"
    f" against it, not against sft/model; its dequantised weights are in ppo/{REFERENCE}"
)
"""Statement for cards and reports about a π_ref that is not sft/model itself."""


def save(
    accelerator: Accelerator,
    policy: Any,
    renderer: Renderer,
    folder: Path,
    dtype: str,
    quantised: bool,
    read: Read | None = None,
) -> None:
    """Write `folder`/model and, of a 4-bit base, `folder`/reference. Every process calls it.

    Args:
        accelerator: of the run.
        policy: the bare causal LM (or PEFT model).
        renderer: its tokenizer goes with the weights.
        folder: of the stage.
        dtype: of the saved weights.
        quantised: the base is in 4 bits.
        read: calls the policy where its weights are split over processes.

    Raises:
        RunStopped: see `save_merged`.
    """
    tokenizer = tokenizer_as_trained(renderer)
    save_merged(accelerator, policy, tokenizer, folder / "model", dtype, read=read)
    if quantised:
        with policy.disable_adapter():
            save_merged(accelerator, policy, tokenizer, folder / REFERENCE, dtype, read=read)
    elif accelerator.is_main_process:
        shutil.rmtree(folder / REFERENCE, ignore_errors=True)  # of an earlier recipe
