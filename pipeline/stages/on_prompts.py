"""The shared part of the stages that train a policy on r̂ over prompts: ppo, gvpo, rloo and grpo."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from private_rlhf.core import atomic
from private_rlhf.core.errors import RunStopped
from private_rlhf.core.world import World
from private_rlhf.data.inputs import named_prompts
from private_rlhf.data.release import read_release
from private_rlhf.data.render import Prompt, Renderer, keep_fitting, make_renderer, text_count
from private_rlhf.lm.logprobs import PolicyWithValue
from private_rlhf.lm.model_card import Provenance, policy_text, trained_on, write_beside
from private_rlhf.lm.models import load_causal_lm, load_policy, load_tokenizer, recompute_layers, unwrap
from private_rlhf.recipe import PpoConfig
from private_rlhf.reward_models.external import ExtraReward, load_extra_rewards
from private_rlhf.reward_models.scorer import load_scorer
from private_rlhf.rl import nonfinite, resume_state
from private_rlhf.rl.engines import VllmEngine, connect
from private_rlhf.rl.nonfinite import NonFiniteError
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.replay import Replay
from private_rlhf.stages.context import StageContext


def renderer_of(context: StageContext) -> Renderer:
    """The renderer of π_ref's tokenizer."""
    return make_renderer(context.recipe.model, load_tokenizer(context.reference))


def fitting_prompts(
    context: StageContext, renderer: Renderer, others: Sequence[Renderer] = ()
) -> tuple[list[Prompt], Any]:
    """The training prompts within the limit of every renderer, and the count of all for the manifest."""
    recipe = context.recipe
    everything = named_prompts(recipe.data, "prompts", context.run.released)
    prompts = list(everything)
    for each in (renderer, *others):
        prompts = [prompts[i] for i in keep_fitting(prompts, each, recipe.model.too_long)]
    return prompts, text_count("prompts", len(everything), len(prompts), renderer)


def replay_of(context: StageContext, stage: str, world: World | None = None) -> Replay:
    """The answers that `stage` has stored in this run, as far as they are of the same π_ref, seed and sampling.

    world: of the processes that write; those of the context by default.
    """
    recipe = context.recipe
    identity = {
        "reference": context.run.require("sft")["fingerprint"],
        "seed": recipe.seed,
        "temperature": recipe.ppo.temperature,
        "top_p": recipe.ppo.top_p,
        "max_response_tokens": recipe.model.max_response_tokens,
    }
    return Replay(context.run.stage(stage) / "replay", identity, world or context.world)


def stored_completions(context: StageContext) -> dict[tuple[int, ...], list[list[int]]]:
    """Draws of π_ref that stages of this run have stored, by prompt; those of this stage before those of others.

    They are what this stage would draw itself: their noise is a function of seed and prompt.
    """
    completions: dict[tuple[int, ...], list[list[int]]] = {}
    for stage in ("ppo", "gvpo", "rloo", "grpo", context.name):
        completions |= replay_of(context, stage).completions()
    return completions


def make_trainer(
    context: StageContext,
    accelerator: Accelerator,
    settings: PpoConfig,
    renderer: Renderer,
    prompts: Sequence[Prompt],
    extra_rewards: Sequence[ExtraReward],
    start: Path | None = None,
) -> PpoTrainer:
    """A trainer on r̂ of this run, with its weights from π_ref or from the checkpoint `start`."""
    recipe = context.recipe
    model, reference = policy_and_reference(context.reference, settings, recipe.model.dtype, recipe.seed, start)
    how = {"use_bonus": recipe.reward.kappa > 0, "use_baseline": settings.baseline}
    scorer = load_scorer(context.reward_model, recipe.model, recipe.reward.feature_batch_size, **how)
    scorer.place(accelerator)
    trainer = PpoTrainer(accelerator, model, reference, scorer, renderer, prompts, settings, recipe.seed, extra_rewards)
    if recipe.rollout is not None:
        served = trainer.policy, renderer, settings.generate_batch_size
        split = {"call": trainer.bare.read, "together": trainer.together}
        trainer.engine = vllm_engine(context, accelerator, *served, **split)
    trainer.completions = stored_completions(context)
    resume_state.install_hooks(accelerator)
    scorer.references.update(resume_state.latest_references(context.checkpoints))
    return trainer


def vllm_engine(
    context: StageContext, accelerator: Accelerator, policy: Any, renderer: Renderer, batch_size: int, **more: Any
) -> VllmEngine:
    """The recipe's vLLM servers for the adapter of `policy`; arguments and errors of `connect`."""
    recipe, folder = context.recipe, context.checkpoints / "adapters"
    assert recipe.rollout is not None
    how = recipe.model.dtype, recipe.ppo.temperature, batch_size
    return connect(accelerator, recipe.rollout, policy, renderer, folder, *how, **more)


def load_extras(context: StageContext, accelerator: Accelerator) -> tuple[list[ExtraReward], list[Renderer]]:
    """The recipe's extra rewards, and the renderers of those that have one."""
    rewards = load_extra_rewards(context.recipe.ppo.extra_rewards, context.recipe.model, accelerator.device)
    return list(rewards), [reward.renderer for reward in rewards if reward.renderer is not None]


def policy_and_reference(
    path: Path, settings: PpoConfig, dtype: str, seed: int, start: Path | None = None
) -> tuple[PolicyWithValue, Any | None]:
    """The policy with its value head, dropout off as everywhere in PPO, and π_ref.

    Under LoRA π_ref is the policy with its adapter off (None here), in 4 bits if the policy's base is; without LoRA, or
    where the policy starts from another checkpoint than π_ref's `path`, a frozen copy.
    """
    lora, four_bit = settings.lora, settings.quantize is not None
    policy = load_policy(start or path, dtype, lora, seed, four_bit=four_bit)
    if settings.gradient_checkpointing:
        recompute_layers(unwrap(policy))
    shared = lora and start is None
    reference = None if shared else load_causal_lm(path, dtype if lora else "float32")  # KL 0 at first without `start`
    return PolicyWithValue(policy, policy.config.hidden_size).eval(), reference


@contextlib.contextmanager
def stopping_cleanly(context: StageContext) -> Iterator[None]:
    """Within, a number that is not finite goes to nonfinite.json, and every stop names the newest checkpoint.

    Raises:
        RunStopped: in the place of NonFiniteError too.
    """
    path = context.folder / nonfinite.FILE
    if context.world.main:
        path.unlink(missing_ok=True)  # what an earlier attempt left
    try:
        yield
    except NonFiniteError as error:
        if context.world.main:
            error.write(context.folder)
        raise RunStopped(f"{error}; see {path}. {resume_state.kept(context.checkpoints)}") from error
    except RunStopped as error:
        raise RunStopped(f"{error}. {resume_state.kept(context.checkpoints)}") from None


def write_results(
    context: StageContext,
    renderer: Renderer,
    history: Sequence[Mapping[str, Any]],
    prompts: int,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write history.jsonl and the card of STAGE/model; the main process calls it."""
    recipe = context.recipe
    atomic.write_text(context.folder / "history.jsonl", "".join(json.dumps(entry) + "\n" for entry in history))
    manifest = read_release(context.run.released / "release").manifest.as_dict()
    text = policy_text(trained_on(prompts, recipe.data.prompts), renderer, recipe.ppo, measured=True)
    origin = Provenance(context.name, recipe.name, recipe.model, recipe.data, recipe.override)
    used = {**context.outside_reward, **(facts or {})}
    write_beside(context.folder / "model", origin, renderer, manifest, text, used)
