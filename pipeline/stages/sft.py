"""Stage sft: supervised fine-tuning on demonstrations with TRL; the result is the reference policy π_ref.

Reads:   demonstrations (embedded, a file, or responses of the release), never a protected label.
Writes:  sft/model (ordinary checkpoint), sft/history.json.
Command: private-rlhf launch -m private_rlhf.stages.sft --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from private_rlhf.core import atomic
from private_rlhf.core.world import check_rows
from private_rlhf.data import inputs
from private_rlhf.data.release import read_release
from private_rlhf.data.render import (
    Demonstration,
    Renderer,
    evenly_spaced,
    left_out,
    make_renderer,
    part_of,
    text_count,
)
from private_rlhf.lm import base_models, hf_trainer
from private_rlhf.lm.hf_trainer import RowSftTrainer
from private_rlhf.lm.model_card import Provenance, policy_text, write_beside
from private_rlhf.lm.model_folders import check_positions, positions_of
from private_rlhf.lm.models import load_policy, load_tokenizer
from private_rlhf.recipe.data_section import bare_name
from private_rlhf.stages.context import StageContext
from trl import SFTConfig


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, settings = context.recipe, context.recipe.sft
    arguments = hf_trainer.trainer_config("sft", settings, SFTConfig, context.checkpoints, recipe.seed, context.world,
                                          max_length=None, dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip

    # --- data -------------------------------------------------------------------------------------------------------
    base = base_models.base_checkpoint(recipe.model)
    check_positions(recipe.model, positions_of(Path(base)))
    config = base_models.base_config(recipe.model, local=False)
    tokenizer = load_tokenizer(base, revision=recipe.model.revision)
    layers = recipe.reward.num_layers if recipe.reward.external is None else None
    base_models.check_architecture(recipe.model.source, config, recipe.adapters, layers, recipe.four_bit)
    base_models.check_tokens(tokenizer, config, recipe.model.source)
    renderer = make_renderer(recipe.model, tokenizer)
    inputs.check_lengths(recipe.data, context.run.released, renderer, recipe.model.too_long)
    release = context.run.released / "release"
    if recipe.aligner == "gvpo" and recipe.gvpo.released_answers and release.is_dir():  # before two stages are paid for
        prompts = inputs.named_prompts(recipe.data, "prompts", context.run.released)
        inputs.released_answers(read_release(release), renderer, prompts, recipe.gvpo.released_answers)
    fitting, dropped = inputs.keep_demonstrations(recipe.data, context.run.released, renderer, recipe.model.too_long)
    demonstrations = evenly_spaced(fitting, settings.max_demonstrations)
    check_rows(len(demonstrations), "sft", settings.batch_size)
    dataset = tokenized(demonstrations, renderer)

    # --- model ------------------------------------------------------------------------------------------------------
    dtype, revision = recipe.model.dtype, recipe.model.revision
    policy = load_policy(base, dtype, settings.lora, recipe.seed, revision=revision)
    if context.world.main and not Path(base).is_dir():  # the plan has read what the cache held before
        base_models.check_base_weights(recipe.model)

    # --- training ---------------------------------------------------------------------------------------------------
    trainer = RowSftTrainer(policy, arguments, train_dataset=dataset, processing_class=renderer.tokenizer)
    hf_trainer.train(trainer, context.checkpoints, context.track)

    # --- results ----------------------------------------------------------------------------------------------------
    hf_trainer.save_trained(trainer, renderer, context.folder / "model", dtype)
    history, source = hf_trainer.loss_history(trainer.state), bare_name(recipe.data.demonstrations)
    if context.world.main:
        atomic.write_json(context.folder / "history.json", {"loss": history})
        text = policy_text(f"{len(dataset)} demonstrations ({source})", renderer, recipe.ppo)
        origin = Provenance("sft", recipe.name, recipe.model, recipe.data, recipe.override)
        write_beside(context.folder / "model", origin, renderer, None, text)
    return {
        "demonstrations": len(dataset),
        "texts": [text_count("demonstrations", len(fitting) + dropped, len(fitting), renderer)],
        "source": source,
        "steps": trainer.state.global_step,
        "loss": [value for _, value in history],
        "lora": settings.lora is not None,
        "summary": f"{part_of(len(dataset), len(fitting))} demonstrations ({source}){left_out(dropped)}, "
        f"{trainer.state.global_step} steps, loss {history[0][1]:.3f} → {history[-1][1]:.3f}",
    }


def tokenized(demonstrations: list[Demonstration], renderer: Renderer) -> Dataset:
    """Token ids and labels; tokens that are not the assistant's carry label −100: only answers are learnt."""
    rows = []
    for row in demonstrations:
        prompt, response = renderer.prompt_ids(row.prompt), renderer.response_ids(row.response)
        labels = [token if token >= 0 else -100 for token in renderer.learnt_ids(row.response)]
        rows.append({"input_ids": prompt + response, "labels": [-100] * len(prompt) + labels})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("sft")
