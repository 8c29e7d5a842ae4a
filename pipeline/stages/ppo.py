"""Stage ppo: KL-regularised PPO against the pessimistic private reward r̂ = r̄ − Γ (PPKL Algorithm 1, step 4).

The exact answer is the Gibbs policy π ∝ π_ref·exp(r̂/kl_coef) (Eq. 5); PPO approximates it with gradient steps. The
reference is the same weights with the adapter off, so no second copy is kept, and the KL starts at exactly 0.

Reads:   sft/model (π_ref), reward/model (r̄ and the statistics of Γ), training prompts.
Writes:  ppo/model (ordinary checkpoint, adapter merged), ppo/history.jsonl; under ppo.quantize ppo/reference (π_ref:
         sft/model in 4 bits, as an ordinary checkpoint of its dequantised weights); where the recipe asks for them,
         ppo/samples.jsonl and ppo/tracking; ppo/nonfinite.json when it stops on a number that is not finite.
Command: private-rlhf launch -m private_rlhf.stages.ppo --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.errors import RunStopped
from private_rlhf.data import inputs
from private_rlhf.data.declared_columns import Options
from private_rlhf.data.render import Renderer, keep_fitting, text_count
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.lm.model_card import Provenance, policy_text, trained_on
from private_rlhf.lm.models import add_lora, load_causal_lm, load_tokenizer, recompute_layers
from private_rlhf.lm.saving import QUANTISED_REFERENCE, REFERENCE, save_policy
from private_rlhf.recipe import Recipe
from private_rlhf.reward_models.external import load_extra_rewards
from private_rlhf.reward_models.scorer import load_scorer
from private_rlhf.rl import nonfinite, resume_state, tracking
from private_rlhf.rl.nonfinite import NonFiniteError
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.rollout import evenly_spaced, summary_of
from private_rlhf.stages.context import StageContext, previous_run
from tqdm import tqdm


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, settings, start = context.recipe, context.recipe.ppo, previous_run(context.recipe)
    if start is not None:  # π is not π_ref before the first iteration, so the draws of π_ref are not its own
        settings = replace(settings, reference_rollouts=False)
    logs = context.folder / "tracking" if settings.report_to else None
    accelerator = make_accelerator(context.world, settings.report_to, logs)

    # --- π_ref, r̂, prompts --------------------------------------------------------------------------------------------
    reference_path = context.run.stage("sft") / "model"
    renderer = inputs.make_renderer(recipe.model, load_tokenizer(reference_path))
    model, reference = policy_and_reference(reference_path, recipe, None if start is None else start.policy)
    how = {"use_bonus": recipe.reward.kappa > 0, "use_baseline": settings.baseline}
    scorer = load_scorer(context.run.stage("reward") / "model", recipe.model, recipe.reward.feature_batch_size, **how)
    scorer.place(accelerator)
    everything = inputs.training_prompts(recipe.data.prompts, context.run.released, Options.of(recipe.data))
    fitting = [everything[i] for i in keep_fitting(everything, renderer, recipe.model.too_long)]
    extra_rewards = load_extra_rewards(settings.extra_rewards, recipe.model, accelerator.device)
    for own in [reward.renderer for reward in extra_rewards if reward.renderer is not None]:
        fitting = [fitting[i] for i in keep_fitting(fitting, own, recipe.model.too_long)]
    prompts = evenly_spaced(fitting, settings.max_prompts)

    # --- PPO ----------------------------------------------------------------------------------------------------------
    trainer = PpoTrainer(accelerator, model, reference, scorer, renderer, prompts, settings, recipe.seed, extra_rewards)
    resume_state.install_hooks(accelerator)
    scorer.references.update(resume_state.latest_references(context.checkpoints))
    state = resume_state.load_latest(accelerator, context.checkpoints) or {"history": [], "kl_coef": settings.kl_coef}
    history: list[dict[str, Any]] = state["history"]
    trainer.controller.value = state["kl_coef"]
    if accelerator.is_main_process:  # what an earlier attempt left
        (context.folder / nonfinite.FILE).unlink(missing_ok=True)
        tracking.forget_samples(context.folder / tracking.SAMPLES, len(history))
    with tracking.run_trackers(accelerator, recipe.name, settings, context.folder / "tracking", len(history)):
        learn(trainer, history, context)

    # --- results ------------------------------------------------------------------------------------------------------
    facts = [reward.facts for reward in extra_rewards]
    quantised = settings.quantize is not None
    reference_fact = QUANTISED_REFERENCE if quantised else None
    dtype = recipe.model.dtype
    save_policy(accelerator, trainer.policy, renderer, context.folder, dtype, quantised, trainer.bare.read)
    if accelerator.is_main_process:
        lines = "".join(json.dumps(entry) + "\n" for entry in history)
        atomic.write_text(context.folder / "history.jsonl", lines)
        write_cards(context, renderer, len(prompts), facts, reference_fact)
    return {
        "iterations": len(history),
        "rollouts": sum(entry["rollouts"] for entry in history),
        "prompts": len(prompts),
        "texts": [text_count("prompts", len(everything), len(fitting), renderer)],
        "kl_coef": settings.kl_coef,
        "extra_rewards": facts,
        "reference_policy": reference_fact,
        "losses": [[entry["policy_loss"], entry["value_loss"]] for entry in history],
        "summary": summary_of(history),
    }


def write_cards(
    context: StageContext, renderer: Renderer, prompts: int, extra: list[dict[str, Any]], reference: str | None
) -> None:
    """Writes the card of the policy and, where the statement `reference` says that π_ref was saved too, of π_ref."""
    from private_rlhf.lm.model_card import write_beside
    from private_rlhf.privacy.guarantee import extra_rewards

    recipe = context.recipe
    manifest = inputs.release(context.run.released).manifest.as_dict()
    facts = {"extra_rewards": extra_rewards(extra), "reference_policy": reference}
    text = policy_text(trained_on(prompts, recipe.data.prompts), renderer, recipe.ppo, measured=True)
    origin = Provenance("ppo", recipe.name, recipe.model, recipe.data, recipe.override)
    used = {name: fact for name, fact in facts.items() if fact}
    write_beside(context.folder / "model", origin, renderer, manifest, text, used)
    if reference is not None:
        text = policy_text("what sft/model was; its linear layers are rounded to 4 bits", renderer, recipe.ppo)
        origin = replace(origin, stage="sft, in 4 bits")
        write_beside(context.folder / REFERENCE, origin, renderer, None, text)


def policy_and_reference(
    path: Path, recipe: Recipe, start: Path | None = None
) -> tuple[PolicyWithValue, Any | None]:
    """The policy with its value head, dropout off as everywhere in PPO, and π_ref.

    Under LoRA π_ref is the policy with its adapter off (None here), in 4 bits if the policy's base is; without LoRA, or
    where the policy starts from another checkpoint than π_ref's `path`, a frozen copy.
    """
    lora = recipe.ppo.lora
    dtype = recipe.model.dtype if lora else "float32"
    base = load_causal_lm(start or path, dtype, four_bit=recipe.ppo.quantize is not None)
    policy = add_lora(base, lora, recipe.seed) if lora else base
    if recipe.ppo.gradient_checkpointing:
        recompute_layers(base)
    reference = None if lora and start is None else load_causal_lm(path, dtype)  # KL 0 at first without `start`
    return PolicyWithValue(policy, base.config.hidden_size).eval(), reference


def learn(trainer: PpoTrainer, history: list[dict[str, Any]], context: StageContext) -> None:
    """The iterations still to do: each adds its line to `history`, and its samples, reports and checkpoint follow.

    Raises:
        RunStopped: see `improve_or_stop`.
    """
    settings, accelerator = trainer.config, trainer.accelerator
    bar = progress(len(history), settings.iterations, accelerator.is_main_process)
    for iteration in bar:
        entry, rows = improve_or_stop(trainer, iteration, context)
        history.append(entry)
        bar.set_postfix_str(f"r̂ {entry['score']:.2f} kl {entry['kl']:.2f}")
        sample = tracking.sample_line(rows[0]) if rows else None
        if accelerator.is_main_process:
            tracking.append_samples(context.folder / tracking.SAMPLES, rows)
            if sample is not None:
                bar.write(f"[private-rlhf] ppo, iteration {iteration}: {sample}", file=sys.stderr)
        tracking.report(accelerator, entry, sample if settings.report_samples else None)
        done = iteration + 1
        if done % settings.save_every == 0 and done < settings.iterations:
            kept = {"history": history, "kl_coef": trainer.controller.value}
            resume_state.save(accelerator, context.checkpoints, done, kept, trainer.scorer.references)


def progress(first: int, count: int, shown: bool) -> tqdm[int]:
    """The iterations still to do, with a bar over all of them."""
    return tqdm(range(first, count), initial=first, total=count, desc="ppo", unit="iteration", disable=not shown)


def improve_or_stop(
    trainer: PpoTrainer, iteration: int, context: StageContext
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One iteration of PPO: its line of the history and its rows of samples.

    Raises:
        RunStopped: the policy has run away from π_ref, or a number is not finite (what it was is then in
            ppo/nonfinite.json). The newest checkpoint stays as it is.
    """
    try:
        rollout, entry = trainer.improve(iteration, context.recipe.data.prompts == "embedded")
        return entry, tracking.sample_rows(trainer, rollout, iteration)
    except NonFiniteError as error:
        if trainer.accelerator.is_main_process:
            error.write(context.folder)
        raise RunStopped(
            f"{error}; see {context.folder / nonfinite.FILE}. {resume_state.kept(context.checkpoints)}"
        ) from error
    except RunStopped as error:
        raise RunStopped(f"{error}. {resume_state.kept(context.checkpoints)}") from None


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("ppo")
