"""Stage online: rounds of questions about answers of π_ref, in the place of privatize where the recipe has `online`.

POKL Algorithm 2 on a language model, with resampling where it sums over all responses: to each prompt N answers are
drawn once, from π_ref or from the policy of the run before (`online.after`), and π¹ ∝ π_ref·exp(r̄/kl_coef) is a choice
among them. Each round chooses pairs by what is known
so far, gets private answers, and fits r̄ to all rounds again. What follows is as in every run: the reward stage fits r̂
to the bundle of all answers, PPO follows it, the evaluation compares.

A round is done when its answers are on the disk; a run that was killed reads those, and asks the next round's again.
The same question has the same id, and for an id there is one draw.

Reads:   sft/model (π_ref and backbone), training and evaluation prompts.
Writes:  online/release and online/evaluation (bundles: z and its ε), online/rounds/NNN.json (what was asked and
         answered), online/history.json.
Run alone: accelerate launch -m private_rlhf.stages.online --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.progress import say
from private_rlhf.data import inputs
from private_rlhf.data.answer_bundle import write_answers
from private_rlhf.data.publish import publish
from private_rlhf.data.render import Prompt, Renderer, keep_fitting
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.online.arms import beside
from private_rlhf.online.belief import Learner
from private_rlhf.online.earlier import Known, earlier_run, known_pairs
from private_rlhf.online.labeller import make_labeller
from private_rlhf.online.pool import Pool, draw_blocks, load_pool
from private_rlhf.online.rounds import ask_round, asked_about, labels_of, measure, regret_of, said
from private_rlhf.online.strategies import DESIGNS, choose, pairs_looked_at
from private_rlhf.recipe import OnlineConfig, Recipe
from private_rlhf.reward_models.backbone import load_backbone
from private_rlhf.reward_models.model import RewardModel
from private_rlhf.rl.rollout import evenly_spaced
from private_rlhf.stages.context import StageContext


def run(context: StageContext) -> dict[str, Any]:
    """Candidates are drawn on every process; the main one asks and fits."""
    recipe, settings = context.recipe, context.recipe.online
    assert settings is not None
    accelerator = make_accelerator(context.world)

    # --- candidates, in coordinates that depend on no answer ----------------------------------------------------------
    home, earlier = context.run.stage("sft") / "model", earlier_run(recipe)
    renderer = inputs.make_renderer(recipe.model, load_tokenizer(home))
    policy = load_causal_lm(home if earlier is None else earlier.policy, recipe.model.dtype).to(accelerator.device)
    reference = None if earlier is None else load_causal_lm(home, recipe.model.dtype).to(accelerator.device)
    layers = load_backbone(home, recipe.reward, recipe.model.dtype, renderer.tokenizer.pad_token_id)
    backbone = RewardModel(layers.to(accelerator.device), reward_bound=recipe.reward.reward_bound)
    prompts = inputs.training_prompts(recipe.data.prompts, context.run.released)
    asked = fitting(prompts, renderer, recipe, settings.max_prompts)
    prompts = inputs.evaluation_prompts(recipe.data.evaluation_prompts, context.run.released)
    held_out = fitting(prompts, renderer, recipe, settings.evaluation_questions)
    draw_blocks(context, policy, reference, backbone, renderer, "train", asked, settings.candidates)
    if earlier is None:
        draw_blocks(context, policy, reference, backbone, renderer, "evaluation", held_out, 2)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return {}
    pool, basis = load_pool(context, "train", asked)

    # --- what is known before -----------------------------------------------------------------------------------------
    noise, runs = LabelNoise.of(recipe.privatize.epsilon), 1 if earlier is None else 1 + earlier.count
    labeller = make_labeller(recipe, settings, context.checkpoints / "labeller")
    of_recipe = (recipe.reward.reward_bound, recipe.ppo.kl_coef, recipe.reward.loss)
    learner = Learner(pool.x.shape[-1], noise, *of_recipe)

    def ask(name: str, pool: Pool, picked: torch.Tensor) -> Known:
        """The answers to the picked pairs, without skips."""
        questions = pool.questions(picked, f"{recipe.name}-{recipe.seed}-{runs}-{name}")
        z = labels_of(questions, ask_round(context.folder / "rounds" / f"{name}.json", questions, labeller))
        rows = [
            (each.prompt, each.response_a, each.response_b, int(label))
            for each, label in zip(questions, z.tolist(), strict=True)
            if label
        ]
        prompt, one, other = picked[z != 0].T
        return Known(rows, pool.x[prompt, one], pool.x[prompt, other], (z * pool.signs(picked, questions))[z != 0])

    if earlier is None:
        tests, _ = load_pool(context, "evaluation", held_out, basis)
        picked, answered = tests.open_pairs().listed(), []
        pairs = pool.open_pairs(
            (each.prompt, each.response_a, each.response_b) for each in tests.questions(picked, "evaluation")
        )
        check_questions(settings, len(pairs))
        checked = ask("evaluation", tests, picked)
    else:
        how_known = (renderer, backbone, basis, recipe.evaluate.batch_size)
        checked, before = (known_pairs(earlier.pairs(part), *how_known) for part in ("evaluation", "release"))
        learner.add(before.one, before.other, before.z)
        answered = before.rows
        pairs = pool.open_pairs([*checked.rows, *answered])
        check_questions(settings, len(pairs))
    if not checked.rows:
        raise UserError("online: every question on held-out prompts was skipped; nothing would check the reward")

    # --- rounds -------------------------------------------------------------------------------------------------------
    history, regret = [], 0.0
    for number in range(settings.rounds):
        generator = torch.Generator().manual_seed((recipe.seed * 1_000 + runs) * 1_000_000 + number)
        how: dict[str, Any] = {"asked": len(learner), "kappa": settings.kappa, "mixture": settings.mixture}
        how["log_ratio"] = pool.log_ratio
        picked = choose(settings.strategy, learner.belief, pool.x, pairs, settings.questions, generator, **how)
        regret, about = regret + regret_of(learner.belief, pool, len(picked)), asked_about(learner.belief, pool, picked)
        found = ask(f"{number:03d}", pool, picked)
        belief = learner.add(found.one, found.other, found.z)
        answered = answered + found.rows
        history.append(measure(belief, len(learner), pool, checked, regret) | about)
        atomic.write_json(context.folder / "history.json", history)
        say(f"online: round {number + 1} of {settings.rounds}, {said(history[-1])}")

    arms = {}
    if pool.truth is not None and earlier is None:
        generator = torch.Generator().manual_seed(recipe.seed)
        arms = beside(pool, Learner(pool.x.shape[-1], noise, *of_recipe), settings, generator)

    # --- bundles, as every later stage reads them ---------------------------------------------------------------------
    people = labeller.people()
    most = max(people.values(), default=None)
    for name, rows in {"evaluation": checked.rows, "release": answered}.items():
        made = context.folder / f".{name}.new.tmp"
        shutil.rmtree(made, ignore_errors=True)
        write_answers(made, rows, recipe.privatize.epsilon, "online rounds", labeller.randomised_by, most or None)
        shutil.rmtree(context.folder / name, ignore_errors=True)
        publish(made, context.folder / name)
    manifest = inputs.release(context.run.released).manifest
    return {
        "events": len(answered),
        "evaluation_events": len(checked.rows),
        "runs": runs,
        "rounds": settings.rounds,
        "strategy": settings.strategy,
        "epsilon": recipe.privatize.epsilon,
        "keep_prob": noise.keep_prob,
        "mark": manifest.guarantee["mark"],
        "labeller": settings.labeller,
        "randomised_by": labeller.randomised_by,
        "ledger": person_facts(people, recipe.privatize.epsilon, len(answered) + len(checked.rows)),
        "history": history,
        "arms": arms,
        "summary": f"{len(learner)} answers in {settings.rounds} rounds by {settings.strategy}, "
        f"ε = {recipe.privatize.epsilon:g} each; {said(history[-1])}",
    }


def check_questions(settings: OnlineConfig, pairs: int) -> None:
    """UserError where the rounds would ask for more pairs than are open, or one round for more than a design finds."""
    wanted = settings.rounds * settings.questions
    if wanted > pairs:
        raise UserError(
            f"online.rounds x online.questions must be at most {pairs}, got {settings.rounds} x {settings.questions}:"
            f" each pair of answers is asked once, and {pairs} are open; ask fewer, or raise online.max_prompts or"
            " online.candidates"
        )
    most = pairs_looked_at(pairs)
    if settings.strategy in DESIGNS and settings.questions > most:
        raise UserError(
            f"online.questions must be at most {most} for {settings.strategy}, got {settings.questions}: ask fewer in"
            " each of more rounds"
        )


def person_facts(people: Mapping[str, int], epsilon: float, answers: int) -> dict[str, Any] | None:
    """What the card says of persons, in the ledger's words; None where persons are not known."""
    if not people:
        return None
    most = max(people.values())
    busiest = [{"epsilon": epsilon, "events": most}]
    unnamed = max(0, answers - sum(people.values()))
    return {"labelers": {"busiest": busiest, "max_epsilon": most * epsilon, "unattributed_events": unnamed}}


def fitting(prompts: Sequence[Prompt], renderer: Renderer, recipe: Recipe, most: int | None) -> list[Prompt]:
    """At most so many of the prompts that are within their limit, evenly spaced."""
    return evenly_spaced([prompts[i] for i in keep_fitting(prompts, renderer, recipe.model.too_long)], most)


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("online")
