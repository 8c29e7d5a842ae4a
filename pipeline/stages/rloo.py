"""Stages rloo and grpo: PPO's task without a value model, in its place where the recipe says `aligner: rloo` or `grpo`.

TRL's trainers on the pessimistic reward r̂ = r̄ − Γ; several responses to a prompt are each other's baseline. How their
objectives relate to J stands in `rl.group`. The section is called as the stage; what makes the task (kl_coef,
temperature, prompts) is read from section ppo.

Reads:   sft/model (π_ref), reward/model (r̄ and the statistics of Γ), training prompts.
Writes:  rloo/model or grpo/model (ordinary checkpoint, adapter merged), and history.jsonl beside it.
Command: private-rlhf launch -m private_rlhf.stages.rloo (or grpo) --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import json
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.data import inputs
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.render import keep_fitting, text_count
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.model_card import Provenance, policy_text, trained_on, write_beside
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer
from private_rlhf.lm.templates import tokenizer_as_trained
from private_rlhf.reward_models.scorer import load_scorer
from private_rlhf.rl.group import TRAINERS, Task, history_of, prompt_dataset, trl_arguments
from private_rlhf.rl.rollout import evenly_spaced, summary_of
from private_rlhf.stages.context import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, ppo, aligner = context.recipe, context.recipe.ppo, context.name
    settings = recipe.rloo if aligner == "rloo" else recipe.grpo

    # --- π_ref, r̂, prompts --------------------------------------------------------------------------------------------
    reference_path = context.run.stage("sft") / "model"
    renderer = inputs.make_renderer(recipe.model, load_tokenizer(reference_path))
    size, use_bonus = recipe.reward.feature_batch_size, recipe.reward.kappa > 0
    scorer = load_scorer(context.run.stage("reward") / "model", recipe.model, size, use_bonus=use_bonus)
    everything = inputs.training_prompts(recipe.data.prompts, context.run.released, Options.of(recipe.data))
    fitting = [everything[i] for i in keep_fitting(everything, renderer, recipe.model.too_long)]
    prompts = evenly_spaced(fitting, ppo.max_prompts)
    sampling = Sampling(recipe.model.max_response_tokens, ppo.temperature, ppo.top_p)
    task = Task(scorer, renderer, prompts, sampling, settings.generate_batch_size, ppo.reference_samples,
                ppo.missing_eos_penalty, recipe.seed, has_truth=recipe.data.prompts == "embedded")  # fmt: skip

    # --- RLOO or GRPO -------------------------------------------------------------------------------------------------
    kind, schema = TRAINERS[aligner]
    fixed = trl_arguments(aligner, settings, ppo, recipe.model.max_response_tokens)
    arguments = hf_trainer.trainer_config(
        aligner, settings, schema, context.checkpoints, recipe.seed, context.world, **fixed
    )
    lora = settings.lora
    base = load_causal_lm(reference_path, recipe.model.dtype if lora else "float32")
    trainer = kind(
        model=add_lora(base, lora, recipe.seed) if lora else base,  # of all weights TRL loads π_ref itself
        args=arguments,
        train_dataset=prompt_dataset(len(prompts), settings, recipe.seed),
        processing_class=renderer.tokenizer,
        callbacks=[hf_trainer.CompletionMarker(), hf_trainer.StopOnNonFinite()],
        task=task,
    )
    scorer.checkpoint.model.model.to(trainer.accelerator.device)
    trainer.draw_references()
    hf_trainer.train(trainer, context.checkpoints)

    # --- results ------------------------------------------------------------------------------------------------------
    hf_trainer.save_trained(trainer, tokenizer_as_trained(renderer), context.folder / "model", recipe.model.dtype)
    history = history_of(trainer.state, settings.rollouts, fixed["beta"])
    if context.world.main:
        lines = "".join(json.dumps(entry) + "\n" for entry in history)
        atomic.write_text(context.folder / "history.jsonl", lines)
        manifest = inputs.release(context.run.released).manifest.as_dict()
        text = policy_text(trained_on(len(prompts), recipe.data.prompts), renderer, recipe.ppo, measured=True)
        origin = Provenance(aligner, recipe.name, recipe.model, recipe.data, recipe.override)
        write_beside(context.folder / "model", origin, renderer, manifest, text)
    return {
        "iterations": len(history),
        "rollouts": len(history) * settings.rollouts,
        "prompts": len(prompts),
        "texts": [text_count("prompts", len(everything), len(fitting), renderer)],
        "kl_coef": fixed["beta"],
        "losses": [entry["policy_loss"] for entry in history],
        "summary": summary_of(history),
    }


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("rloo")
