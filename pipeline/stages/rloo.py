"""Stages rloo and grpo: PPO's task without a value model, in its place where the recipe says `aligner: rloo` or `grpo`.

TRL's trainers on the pessimistic reward r̂ = r̄ − Γ; several responses to a prompt are each other's baseline. How their
objectives relate to J stands in `rl.group`. The section is called as the stage; what makes the task (kl_coef,
temperature, prompts) is read from section ppo.

Reads:   sft/model (π_ref), reward/model (r̄ and the statistics of Γ), training prompts.
Writes:  rloo/model or grpo/model (ordinary checkpoint, adapter merged); history.jsonl, replay and (under rollout)
         adapter beside it.
Command: private-rlhf launch -m private_rlhf.stages.rloo (or grpo) --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

from typing import Any

from private_rlhf.data.render import evenly_spaced
from private_rlhf.lm import hf_trainer
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.models import load_policy
from private_rlhf.lm.saving import keep_adapter
from private_rlhf.reward_models.scorer import load_scorer
from private_rlhf.rl.group import TRAINERS, Task, history_of, prompt_dataset, trl_arguments
from private_rlhf.rl.rollout import summary_of
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.on_prompts import fitting_prompts, renderer_of, replay_of, vllm_engine, write_results


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, ppo, aligner = context.recipe, context.recipe.ppo, context.name
    settings = recipe.rloo if aligner == "rloo" else recipe.grpo

    # --- π_ref, r̂, prompts --------------------------------------------------------------------------------------------
    renderer = renderer_of(context)
    size, use_bonus = recipe.reward.feature_batch_size, recipe.reward.kappa > 0
    scorer = load_scorer(context.reward_model, recipe.model, size, use_bonus=use_bonus)
    fitting, count = fitting_prompts(context, renderer)
    prompts = evenly_spaced(fitting, ppo.max_prompts)
    sampling = Sampling(recipe.model.max_response_tokens, ppo.temperature, ppo.top_p)
    answers = replay_of(context, aligner)
    task = Task(scorer, renderer, prompts, sampling, settings.generate_batch_size, ppo.reference_samples,
                ppo.missing_eos_penalty, recipe.seed, recipe.data.prompts == "embedded",
                answers, ppo.gather_once)  # fmt: skip

    # --- RLOO or GRPO -------------------------------------------------------------------------------------------------
    kind, schema = TRAINERS[aligner]
    fixed = trl_arguments(aligner, settings, ppo, recipe.model.max_response_tokens)
    arguments = hf_trainer.trainer_config(
        aligner, settings, schema, context.checkpoints, recipe.seed, context.world, **fixed
    )
    dtype = recipe.model.dtype
    trainer = kind(
        # Without an adapter TRL loads π_ref itself.
        model=load_policy(context.reference, dtype, settings.lora, recipe.seed),
        args=arguments,
        train_dataset=prompt_dataset(len(prompts), settings, recipe.seed),
        processing_class=renderer.tokenizer,
        task=task,
    )
    if recipe.rollout is not None:
        accelerator, size = trainer.accelerator, settings.generate_batch_size
        split = accelerator.is_fsdp2  # the weights are, once training begins
        trainer.engine = vllm_engine(context, accelerator, trainer.model, renderer, size, together=split)
    scorer.place(trainer.accelerator)
    if context.world.main:
        answers.restart(hf_trainer.last_whole_step(context.checkpoints))
    trainer.accelerator.wait_for_everyone()
    trainer.draw_references()
    hf_trainer.train(trainer, context.checkpoints, context.track)

    # --- results ------------------------------------------------------------------------------------------------------
    hf_trainer.save_trained(trainer, renderer, context.folder / "model", dtype)
    keep_adapter(trainer.accelerator, trainer.model, context.folder, recipe.rollout is not None)
    history = history_of(trainer.state, settings.rollouts, fixed["beta"])
    if context.world.main:
        write_results(context, renderer, history, len(prompts))
    return {
        "iterations": len(history),
        "rollouts": len(history) * settings.rollouts,
        "prompts": len(prompts),
        "texts": [count],
        "kl_coef": fixed["beta"],
        "losses": [entry["policy_loss"] for entry in history],
        **({"engine": trainer.engine.summary(history)} if recipe.rollout is not None else {}),
        "summary": summary_of(history),
    }


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("rloo")
