"""Stage dpo: the baseline without a reward model, in the place of ppo where the recipe says `aligner: dpo`.

DPO (TRL's trainer) on the released pairs, with the private likelihood of Eq. 8-9, the debiased or the uncorrected loss
on its margins. The reward stage still runs: the evaluation judges by it and by the Gibbs policy of the same r̂.

Reads:   privatize/release (z and its ε), sft/model (π_ref).
Writes:  dpo/model (ordinary checkpoint, adapter merged), dpo/history.json; dpo/adapter under rollout.
Command: private-rlhf launch -m private_rlhf.stages.dpo --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.world import check_rows
from private_rlhf.data.release import ReleasedPair, read_release
from private_rlhf.data.render import (
    Renderer,
    evenly_spaced,
    keep_fitting_pairs,
    left_out,
    make_renderer,
    part_of,
    text_count,
)
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.model_card import Provenance, policy_text, write_beside
from private_rlhf.lm.models import load_causal_lm, load_policy, load_tokenizer
from private_rlhf.lm.saving import keep_adapter
from private_rlhf.rl.dpo_trainer import PrivateDpoTrainer, pair_dataset
from private_rlhf.stages.context import StageContext
from trl import DPOConfig


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, settings = context.recipe, context.recipe.dpo
    reference_path, lora, dtype = context.reference, settings.lora, recipe.model.dtype
    renderer = make_renderer(recipe.model, load_tokenizer(reference_path))

    # --- z, its ε, and token ids --------------------------------------------------------------------------------------
    release = read_release(context.run.released / "release")
    rows = list(release)
    fitting = keep_fitting_pairs(rows, renderer, recipe.model.too_long)
    kept, dropped = evenly_spaced(fitting, settings.max_pairs), len(rows) - len(fitting)
    check_rows(len(kept), "dpo", settings.batch_size)
    noise = release.manifest.noise_of([rows[index] for index in kept])
    dataset = pair_dataset([token_ids(rows[index], renderer) for index in kept], noise)

    # --- π_ref and DPO ------------------------------------------------------------------------------------------------
    kl_coef = recipe.ppo.kl_coef if settings.kl_coef is None else settings.kl_coef
    arguments = hf_trainer.trainer_config("dpo", settings, DPOConfig, context.checkpoints, recipe.seed, context.world,
                                          beta=kl_coef, max_length=None)  # fmt: skip
    trainer = PrivateDpoTrainer(
        model=load_policy(reference_path, dtype, lora, recipe.seed),
        ref_model=None if lora else load_causal_lm(reference_path, "float32"),  # else the adapter is switched off
        args=arguments,
        loss=settings.loss,
        noise=noise,
        train_dataset=dataset,
        processing_class=renderer.tokenizer,
    )
    hf_trainer.train(trainer, context.checkpoints, context.track)

    # --- results ------------------------------------------------------------------------------------------------------
    hf_trainer.save_trained(trainer, renderer, context.folder / "model", dtype)
    keep_adapter(trainer.accelerator, trainer.model, context.folder, recipe.rollout is not None)
    history = hf_trainer.loss_history(trainer.state)
    if context.world.main:
        atomic.write_json(context.folder / "history.json", {"loss": history})
        text = policy_text(f"{len(dataset)} released preference pairs", renderer, recipe.ppo, measured=True)
        origin = Provenance("dpo", recipe.name, recipe.model, recipe.data, recipe.override)
        write_beside(context.folder / "model", origin, renderer, release.manifest.as_dict(), text)
    return {
        "pairs": len(dataset),
        "texts": [text_count("pairs", len(rows), len(fitting), renderer)],
        "steps": trainer.state.global_step,
        "loss": [value for _, value in history],
        "kl_coef": kl_coef,
        "summary": f"{part_of(len(dataset), len(fitting))} pairs{left_out(dropped)}, {settings.loss}, "
        f"{trainer.state.global_step} steps, loss {history[0][1]:.3f} → {history[-1][1]:.3f}",
    }


def token_ids(pair: ReleasedPair, renderer: Renderer) -> tuple[list[int], list[int], list[int]]:
    """(prompt, the response that z prefers, the other) as token ids, see `Renderer.learnt_ids`."""
    responses = (renderer.learnt_ids(pair.chosen), renderer.learnt_ids(pair.rejected))
    return (renderer.prompt_ids(pair.prompt), *responses)


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("dpo")
