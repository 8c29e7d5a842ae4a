"""Stage online: rounds of questions about answers of π_ref, in the place of privatize where the recipe has `online`.

POKL Algorithm 2 on a language model, with resampling where it sums over all responses: to each prompt N answers are
drawn once, from π_ref or from the policy of the previous run (`online.after`), and π¹ ∝ π_ref·exp(r̄/kl_coef) is a
choice among them. Each round chooses pairs by the answers so far, gets private answers, and fits r̄ to all rounds again.
What follows is as in every run: the reward stage fits r̂ to the bundle of all answers, PPO follows it, the evaluation
compares.

A round is done when its answers are on the disk; a run that was killed reads those, and asks the next round's again.
The same question has the same id, and for an id there is one draw.

Reads:   sft/model (π_ref and backbone), training and evaluation prompts.
Writes:  online/release and online/evaluation (bundles: z and its ε), online/rounds/NNN.json (what was asked and
         answered), online/history.json, online/replay (the candidates of π_ref as token ids, for aligner gvpo).
Command: private-rlhf launch -m private_rlhf.stages.online --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError, say
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.noise_levels import LevelledNoise
from private_rlhf.core.world import World
from private_rlhf.data.answer_bundle import write_answers
from private_rlhf.data.inputs import named_prompts
from private_rlhf.data.publish import publish
from private_rlhf.data.release import read_release
from private_rlhf.data.render import Prompt, Renderer, evenly_spaced, keep_fitting, make_renderer
from private_rlhf.labelling.labellers import Labeller, busiest
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.online.pool import (
    AnsweredPairs,
    Candidates,
    CandidateSampler,
    OpenPairs,
    Pool,
    answered_pairs,
    candidate_basis,
    draw_blocks,
    load_blocks,
    make_pool,
    noise_at,
)
from private_rlhf.online.posterior import Learner
from private_rlhf.online.rounds import Interview, describe_questions, make_labeller, measure, round_line
from private_rlhf.online.strategies import DESIGNS, PAIRS_LOOKED_AT, by_information, choose
from private_rlhf.privacy.labelers import total_epsilon
from private_rlhf.privacy.person import DELTA, largest_person_epsilon
from private_rlhf.privacy.records import Text
from private_rlhf.recipe import OnlineConfig
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.rl.engines import connect
from private_rlhf.rl.replay import Answers
from private_rlhf.stages.context import PreviousRun, StageContext, previous_run
from private_rlhf.stages.on_prompts import replay_of


def run(context: StageContext) -> dict[str, Any]:
    """Draw candidates on every process; ask and fit on the main one."""
    recipe, settings, previous = context.recipe, context.recipe.online, previous_run(context.recipe)
    assert settings is not None
    runs = 1 if previous is None else 1 + previous.count
    accelerator = make_accelerator(context.world)

    # --- candidates, in coordinates that depend on no answer ----------------------------------------------------------
    sampler = make_sampler(context, previous, accelerator)
    train, evaluation = context.checkpoints / "train", context.checkpoints / "evaluation"
    prompts, held_out = fitting_prompts(context, settings, sampler.renderer)
    draw_blocks(sampler, prompts, settings.candidates, train, recipe.seed, context.world)
    if previous is None:
        draw_blocks(sampler, held_out, 2, evaluation, recipe.seed, context.world)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return {}
    drawn = load_blocks(prompts, train, sampler.renderer)
    keep_candidates(context, drawn, sampler.renderer)
    basis = candidate_basis(drawn, recipe.reward.num_components, recipe.reward.feature_blocks)
    pool = make_pool(drawn, basis, settings.simulated)

    # --- answers on held-out prompts, and those of previous runs ------------------------------------------------------
    labeller = make_labeller(settings, recipe.privatize, recipe.seed, context.checkpoints / "labeller")
    noise, reward = noise_at(labeller.mechanism), recipe.reward
    learner = Learner(pool.x.shape[-1], noise, reward.reward_bound, recipe.ppo.kl_coef, reward.loss)
    interview = Interview(labeller, context.folder / "rounds", f"{recipe.name}-{recipe.seed}-{runs}")
    if previous is None:
        tests = make_pool(load_blocks(held_out, evaluation, sampler.renderer), basis, settings.simulated)
        (checked, pairs), answered = ask_held_out(interview, tests, pool, settings), []
    else:
        checked, before = (answered_pairs(previous.answers(part), sampler, basis) for part in ("evaluation", "release"))
        learner.add(before.one, before.other, before.z, before.noise)
        answered = before.rows
        pairs = pool.open_pairs([*checked.rows, *answered])
        check_questions(settings, len(pairs))

    # --- rounds: choose, ask, fit -------------------------------------------------------------------------------------
    history: list[dict[str, Any]] = []
    for number in range(settings.rounds):
        generator = torch.Generator().manual_seed((recipe.seed * 1_000 + runs) * 1_000_000 + number)
        now = learner.posterior
        picked = choose(settings.strategy, now, pool.x, pairs, settings.questions, generator, kappa=settings.kappa,
                        mixture=settings.mixture, log_ratio=pool.log_ratio, asked=learner.worth)  # fmt: skip
        if isinstance(noise, LevelledNoise):
            picked = by_information(now, pool.x, picked)
        answers = interview.ask(f"{number:03d}", pool, picked)
        posterior = learner.add(answers.one, answers.other, answers.z, answers.noise)
        answered = answered + answers.rows
        history.append(measure(posterior, len(learner), pool, checked) | describe_questions(now, pool, picked))
        atomic.write_json(context.folder / "history.json", history)
        say(f"online: round {number + 1} of {settings.rounds}, {round_line(history[-1])}")

    # --- bundles, as every later stage reads them ---------------------------------------------------------------------
    persons = person_facts(labeller, len(answered) + len(checked.rows))
    publish_answers(context.folder / "evaluation", checked.rows, checked.noise, labeller, persons)
    publish_answers(context.folder / "release", answered, learner.noise, labeller, persons)
    manifest = read_release(context.run.released / "release").manifest
    return {
        "events": len(answered),
        "evaluation_events": len(checked.rows),
        "runs": runs,
        "rounds": settings.rounds,
        "strategy": settings.strategy,
        "epsilon": recipe.privatize.epsilon,
        "keep_prob": learner.posterior.noise.keep_prob,
        "mark": manifest.guarantee["mark"],
        "labeller": settings.labeller,
        "randomised_by": labeller.randomised_by,
        "ledger": persons,
        "history": history,
        **({} if sampler.engine is None else {"engine": sampler.engine.summary()}),
        "summary": f"{len(learner)} answers in {settings.rounds} rounds by {settings.strategy}, "
        f"ε = {manifest.epsilon_text} each; {round_line(history[-1])}",
    }


def make_sampler(context: StageContext, previous: PreviousRun | None, accelerator: Accelerator) -> CandidateSampler:
    """The sampler of candidates: π_ref, or the policy of the previous run, with the backbone of sft/model."""
    recipe, home, device = context.recipe, context.reference, accelerator.device
    renderer = make_renderer(recipe.model, load_tokenizer(home))
    policy = load_causal_lm(home if previous is None else previous.policy, recipe.model.dtype).to(device)
    reference = None if previous is None else load_causal_lm(home, recipe.model.dtype).to(device)
    layers = load_backbone(home, recipe.reward, recipe.model.dtype, renderer.tokenizer.pad_token_id)
    backbone = RewardModel(layers.to(device), reward_bound=recipe.reward.reward_bound)
    size, engine = recipe.evaluate.batch_size, None
    if recipe.rollout is not None:  # which goes without a previous run
        how = context.checkpoints / "adapters", recipe.model.dtype, recipe.ppo.temperature, size
        engine = connect(accelerator, recipe.rollout, policy, renderer, *how, reference=policy)
    draws = reference, context.world.main, engine, recipe.ppo.temperature, recipe.ppo.top_p
    return CandidateSampler(policy, backbone, renderer, size, *draws)


def fitting_prompts(
    context: StageContext, settings: OnlineConfig, renderer: Renderer
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts that are within their limit, at most so many as asked for, evenly spaced."""
    data, released, too_long = context.recipe.data, context.run.released, context.recipe.model.too_long
    train = named_prompts(data, "prompts", released)
    train = evenly_spaced([train[i] for i in keep_fitting(train, renderer, too_long)], settings.max_prompts)
    test = named_prompts(data, "evaluation_prompts", released)
    most = settings.evaluation_questions
    return train, evenly_spaced([test[i] for i in keep_fitting(test, renderer, too_long)], most)


def keep_candidates(context: StageContext, drawn: Candidates, renderer: Renderer) -> None:
    """Write the candidates to online/replay, where they are draws of π_ref; the main process does."""
    if previous_run(context.recipe) is not None:
        return
    pairs = zip(map(renderer.prompt_ids, drawn.prompts), drawn.tokens, strict=True)
    prompts, responses = zip(*((prompt, row) for prompt, answers in pairs for row in answers), strict=True)
    replay = replay_of(context, "online", World(0, 1))
    replay.restart(0)
    replay.write("online", 0, Answers.unscored(prompts, responses, 0))


def publish_answers(
    target: Path, rows: Iterable[tuple[Text, Text, Text, int]], noise: LabelNoise | LevelledNoise, labeller: Labeller,
    persons: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Write rows (prompt, response, other, z) with this noise as a bundle, in the place of an older one. persons: from
    `person_facts`; where somebody outside of the labeller's folder answered too, no total of a person is known."""
    levels = [noise.levels[level].epsilon for level in noise.level] if isinstance(noise, LevelledNoise) else None
    known = (persons or {}).get("labelers", {})
    total = None if known.get("unattributed_events") else known.get("max_epsilon")
    partial = target.with_name(f".{target.name}.new.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    write_answers(partial, rows, labeller.mechanism, "online rounds", labeller.randomised_by, total, levels)
    shutil.rmtree(target, ignore_errors=True)
    publish(partial, target)


def ask_held_out(
    interview: Interview, tests: Pool, pool: Pool, settings: OnlineConfig
) -> tuple[AnsweredPairs, OpenPairs]:
    """The answers to all pairs of `tests`, and the pairs of the pool that are still open; UserError where those are too
    few for the rounds, before anything is asked.
    """
    picked = tests.open_pairs().listed()
    questions = tests.questions(picked, "evaluation")
    pairs = pool.open_pairs((each.prompt, each.response_a, each.response_b) for each in questions)
    check_questions(settings, len(pairs))
    answers = interview.ask("evaluation", tests, picked)
    if not answers.rows:
        raise UserError("online: every question on held-out prompts was skipped; nothing would check the reward")
    return answers, pairs


def check_questions(settings: OnlineConfig, pairs: int) -> None:
    """UserError for rounds that would ask for more pairs than are open, or one round for more than a design finds."""
    if settings.rounds * settings.questions > pairs:
        raise UserError(
            f"online.rounds x online.questions must be at most {pairs}, got {settings.rounds} x {settings.questions}:"
            f" each pair of answers is asked once, and {pairs} are open; ask fewer, or raise online.max_prompts or"
            " online.candidates"
        )
    if settings.strategy in DESIGNS and settings.questions > (most := min(pairs, PAIRS_LOOKED_AT)):
        raise UserError(
            f"online.questions must be at most {most} for {settings.strategy}, got {settings.questions}: ask fewer in"
            " each of more rounds"
        )


def person_facts(labeller: Labeller, answers: int) -> dict[str, Any] | None:
    """The card's facts about persons, in the ledger's words; None where persons are not known."""
    most = busiest(labeller)
    if not most:
        return None
    everyone = labeller.answer_counts().values()
    events = [sum(draws.values()) for draws in everyone]
    facts = {
        "busiest": [{"epsilon": epsilon, "events": count} for epsilon, count in most],
        "max_epsilon": total_epsilon(most),
        "max_epsilon_at_delta": largest_person_epsilon([sorted(draws.items()) for draws in everyone], DELTA),
        "most_events": max(events),
        "unattributed_events": max(0, answers - sum(events)),
    }
    return {"labelers": facts}


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("online")
