"""Stage ppo: KL-regularised PPO against the pessimistic private reward r̂ = r̄ − Γ (PPKL Algorithm 1, step 4).

The exact answer is the Gibbs policy π ∝ π_ref·exp(r̂/kl_coef) (Eq. 5); PPO approximates it with gradient steps. The
reference is the same weights with the adapter off, so no second copy is kept, and the KL starts at exactly 0.

Reads:   sft/model (π_ref), reward/model (r̄ and the statistics of Γ), training prompts.
Writes:  ppo/model (ordinary checkpoint, adapter merged), ppo/history.jsonl, ppo/replay (what it drew, as token ids with
         scores); ppo/adapter where the recipe has servers that draw (rollout); under ppo.quantize ppo/reference (π_ref:
         sft/model in 4 bits, as an ordinary checkpoint of its dequantised weights); where the recipe asks for them,
         ppo/samples.jsonl and ppo/tracking; ppo/nonfinite.json when it stops on a number that is not finite.
Command: private-rlhf launch -m private_rlhf.stages.ppo --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from private_rlhf.data.render import evenly_spaced
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.model_card import Provenance, policy_text, write_beside
from private_rlhf.lm.saving import QUANTISED_REFERENCE, REFERENCE, keep_adapter, save_policy
from private_rlhf.privacy.guarantee import extra_rewards as card_facts
from private_rlhf.rl import replay, resume_state, tracking
from private_rlhf.rl.answer_learner import AnswerLearner
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.replay import Answers, Replay
from private_rlhf.rl.rollout import Rollout, summary_of
from private_rlhf.stages import on_prompts
from private_rlhf.stages.context import StageContext, previous_run
from tqdm import tqdm


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, settings, start = context.recipe, context.recipe.ppo, previous_run(context.recipe)
    if start is not None:  # π is not π_ref before the first iteration, so the draws of π_ref are not its own
        settings = replace(settings, reference_rollouts=False, warm_start=None)
    accelerator = make_accelerator(context.world)

    # --- π_ref, r̂, prompts --------------------------------------------------------------------------------------------
    renderer = on_prompts.renderer_of(context)
    extra_rewards, others = on_prompts.load_extras(context, accelerator)
    fitting, count = on_prompts.fitting_prompts(context, renderer, others)
    prompts = evenly_spaced(fitting, settings.max_prompts)
    path = None if start is None else start.policy
    trainer = on_prompts.make_trainer(context, accelerator, settings, renderer, prompts, extra_rewards, path)

    # --- PPO ----------------------------------------------------------------------------------------------------------
    state = resume_state.load_latest(accelerator, context.checkpoints) or {"history": [], "kl_coef": settings.kl_coef}
    history: list[dict[str, Any]] = state["history"]
    trainer.controller.value = state["kl_coef"]
    answers, learner = on_prompts.replay_of(context, "ppo"), AnswerLearner(trainer, recipe.gvpo, settings.kl_coef)
    if settings.warm_start is not None:
        trainer.warm_start = lambda rollout: learner.learn(Answers.of(rollout, 0).sorted(), 0)
    accelerator.wait_for_everyone()  # no process reads any longer what goes
    if accelerator.is_main_process:  # what an earlier attempt left
        answers.restart(len(history))
        tracking.forget_samples(context.folder / tracking.SAMPLES, len(history))
    accelerator.wait_for_everyone()
    logs = context.folder / "tracking"
    with tracking.run_trackers(accelerator, settings.report_to, recipe.name, settings, logs, len(history)):
        learn(trainer, history, context, answers)
    polish = {}
    if settings.polish is not None:
        accelerator.wait_for_everyone()  # every share is on the disk
        with on_prompts.stopping_cleanly(context):
            polish = learner.learn(answers.read().learnable.by_prompt, settings.iterations)

    # --- results ------------------------------------------------------------------------------------------------------
    facts = [reward.facts for reward in extra_rewards]
    quantised = settings.quantize is not None
    reference_fact = QUANTISED_REFERENCE if quantised else None
    save_policy(accelerator, trainer.policy, renderer, context.folder, recipe.model.dtype, quantised, trainer.bare.read)
    keep_adapter(accelerator, trainer.policy, context.folder, recipe.rollout is not None)
    if accelerator.is_main_process:
        used = {"extra_rewards": card_facts(facts), "reference_policy": reference_fact}
        used = {name: fact for name, fact in used.items() if fact}
        on_prompts.write_results(context, renderer, history, len(prompts), used)
        if quantised:
            text = policy_text("what sft/model was; its linear layers are rounded to 4 bits", renderer, recipe.ppo)
            origin = Provenance("sft, in 4 bits", recipe.name, recipe.model, recipe.data, recipe.override)
            write_beside(context.folder / REFERENCE, origin, renderer, None, text)
    return {
        "iterations": len(history),
        "rollouts": sum(entry["rollouts"] for entry in history),
        "prompts": len(prompts),
        "texts": [count],
        "kl_coef": settings.kl_coef,
        "extra_rewards": facts,
        "reference_policy": reference_fact,
        "losses": [[entry["policy_loss"], entry["value_loss"]] for entry in history],
        **({"polish": polish} if settings.polish is not None else {}),
        **({"engine": trainer.engine.summary(history)} if recipe.rollout is not None else {}),
        "summary": summary_of(history),
    }


def learn(
    trainer: PpoTrainer, history: list[dict[str, Any]], context: StageContext, answers: Replay | None = None
) -> None:
    """The iterations still to do: each adds its line to `history`, and its samples, reports and checkpoint follow.

    answers: keeps what is drawn.

    Raises:
        RunStopped: see `improve_or_stop`.
    """
    settings, accelerator = trainer.config, trainer.accelerator
    first, count, shown = len(history), settings.iterations, accelerator.is_main_process
    bar = tqdm(range(first, count), desc="ppo", total=count, initial=first, unit="iteration", disable=not shown)
    for iteration in bar:
        rollout, entry, rows = improve_or_stop(trainer, iteration, context)
        history.append(entry)
        bar.set_postfix_str(f"r̂ {entry['score']:.2f} kl {entry['kl']:.2f}", refresh=False)
        sample = tracking.sample_line(rows[0]) if rows else None
        if accelerator.is_main_process:
            tracking.append_samples(context.folder / tracking.SAMPLES, rows)
            if sample is not None:
                bar.write(f"[private-rlhf] ppo, iteration {iteration}: {sample}", file=sys.stderr)
        tracking.report(accelerator, entry, sample if settings.report_samples else None)
        if answers is not None:
            learnt_references = trainer.learns_references(iteration)
            answers.write_rollout(replay.REFERENCE if learnt_references else "ppo", iteration, rollout)
            if trainer.new_references is not None and not learnt_references:
                answers.write(replay.REFERENCE, iteration, Answers.unscored(*trainer.new_references, iteration))
            trainer.new_references = None
        done = iteration + 1
        if done % settings.save_every == 0 and (done < settings.iterations or settings.polish is not None):
            kept = {"history": history, "kl_coef": trainer.controller.value}
            resume_state.save(accelerator, context.checkpoints, done, kept, trainer.scorer.references)


def improve_or_stop(
    trainer: PpoTrainer, iteration: int, context: StageContext
) -> tuple[Rollout, dict[str, Any], list[dict[str, Any]]]:
    """One iteration of PPO: its rollout, its line of the history and its rows of samples.

    Raises:
        RunStopped: the policy has run away from π_ref, or a number is not finite (what it was is then in
            ppo/nonfinite.json). The newest checkpoint stays as it is.
    """
    with on_prompts.stopping_cleanly(context):
        rollout, entry = trainer.improve(iteration, context.recipe.data.prompts == "embedded")
        return rollout, entry, tracking.sample_rows(trainer, rollout, iteration)


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("ppo")
