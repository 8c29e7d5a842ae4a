"""Stage online: rounds of questions about answers of π_ref, in the place of privatize where the recipe has `online`.

POKL Algorithm 2 on a language model, with resampling where it sums over all responses: of each prompt N answers are
drawn from π_ref once, and π¹ ∝ π_ref·exp(r̄/kl_coef) is a choice among them. Each round chooses pairs by what is known
so far, gets private answers, and fits r̄ to all rounds again. What follows is as in every run: the reward stage fits r̂
to the bundle of all answers, PPO follows it, the evaluation compares.

A round is done when its answers are on the disk; a run that was killed reads those, and asks the next round's again.
The same question has the same id, and for an id there is one draw.

Reads:   sft/model (π_ref and backbone), training and evaluation prompts.
Writes:  online/release and online/evaluation (bundles: z and its ε), online/rounds/NNN.json (what was asked and
         answered), online/history.json.
Run alone: accelerate launch -m pipeline.stages.online --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline.core import atomic
from pipeline.core.errors import UserError
from pipeline.core.noise import LabelNoise
from pipeline.core.recipe import Recipe
from pipeline.core.recipe_online import OnlineConfig
from pipeline.core.stage import StageContext, say
from pipeline.data import inputs
from pipeline.data.answered import write_answers
from pipeline.data.publish import publish
from pipeline.data.render import Prompt, Renderer, keep_fitting
from pipeline.lm.distributed import make_accelerator
from pipeline.lm.models import load_causal_lm, load_tokenizer
from pipeline.online.belief import Learner
from pipeline.online.labeller import make_labeller
from pipeline.online.pool import Pool, draw_blocks, pools
from pipeline.online.rounds import ask_round, labels_of, measure, said
from pipeline.online.strategies import DESIGNS, choose, pairs_looked_at
from pipeline.privacy.records import Text
from pipeline.rl.rollout import evenly_spaced
from reward_models.backbone import load_backbone
from reward_models.model import RewardModel


def run(context: StageContext) -> dict[str, Any]:
    """Candidates are drawn on every process; the main one asks and fits."""
    recipe, settings = context.recipe, context.recipe.online
    assert settings is not None
    accelerator = make_accelerator(context.world)

    # --- candidates of π_ref, in coordinates that depend on no answer -------------------------------------------------
    home = context.run.stage("sft") / "model"
    renderer = inputs.make_renderer(recipe, load_tokenizer(home))
    policy = load_causal_lm(home, recipe.model.dtype).to(accelerator.device)
    first_layers = load_backbone(home, recipe, renderer).to(accelerator.device)
    backbone = RewardModel(first_layers, reward_bound=recipe.reward.reward_bound)
    asked = fitting(inputs.training_prompts(recipe, context.run), renderer, recipe, settings.max_prompts)
    held_out = fitting(inputs.evaluation_prompts(recipe, context.run), renderer, recipe, settings.evaluation_questions)
    for name, prompts, count in (("train", asked, settings.candidates), ("evaluation", held_out, 2)):
        draw_blocks(context, policy, backbone, renderer, name, prompts, count)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return {}
    pool, tests = pools(context, asked, held_out, recipe)
    check_questions(settings, len(asked))

    # --- rounds -------------------------------------------------------------------------------------------------------
    noise = LabelNoise.of(recipe.privatize.epsilon)
    labeller = make_labeller(recipe, settings, context.checkpoints / "labeller")
    answered: dict[str, list[tuple[Text, Text, Text, int]]] = {"evaluation": [], "release": []}

    def ask(part: str, name: str, pool: Pool, picked: torch.Tensor) -> torch.Tensor:
        """z of the picked pairs (n,): +1 for the first of each, 0 for a skip."""
        questions = pool.questions(picked, f"{recipe.name}-{recipe.seed}-{name}")
        z = labels_of(questions, ask_round(context.folder / "rounds" / f"{name}.json", questions, labeller))
        answered[part] += [
            (each.prompt, each.response_a, each.response_b, int(label))
            for each, label in zip(questions, z.tolist(), strict=True)
            if label
        ]
        return z * pool.signs(picked, questions)

    test_pairs = tests.different(tests.first_two())
    test_labels = ask("evaluation", "evaluation", tests, test_pairs)
    if not answered["evaluation"]:
        raise UserError("online: every question on held-out prompts was skipped; nothing would check the reward")
    learner = Learner(
        pool.x.shape[-1], noise, recipe.reward.reward_bound, recipe.ppo.kl_coef, recipe.reward.loss, seed=recipe.seed
    )
    history = []
    for number in range(settings.rounds):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + number)
        how: dict[str, Any] = {"asked": len(learner), "kappa": settings.kappa, "mixture": settings.mixture}
        picked = pool.different(choose(settings.strategy, learner.belief, pool.x, settings.questions, generator, **how))
        z = ask("release", f"{number:03d}", pool, picked)
        prompt, one, other = picked[z != 0].T
        belief = learner.add(pool.x[prompt, one], pool.x[prompt, other], z[z != 0], prompt.tolist())
        history.append(measure(belief, len(learner), pool, tests, test_pairs, test_labels))
        say(f"online: round {number + 1} of {settings.rounds}, {said(history[-1])}")

    # --- bundles, as every later stage reads them ---------------------------------------------------------------------
    mode = "insecure_seed" if settings.simulated else "local"
    for name, rows in answered.items():
        made = context.folder / f".{name}.new.tmp"
        shutil.rmtree(made, ignore_errors=True)
        write_answers(made, rows, recipe.privatize.epsilon, mode, "online rounds")
        shutil.rmtree(context.folder / name, ignore_errors=True)
        publish(made, context.folder / name, 0o755)
    atomic.write_json(context.folder / "history.json", history)
    manifest = inputs.release(context.run).manifest
    return {
        "events": len(answered["release"]),
        "evaluation_events": len(answered["evaluation"]),
        "rounds": settings.rounds,
        "strategy": settings.strategy,
        "epsilon": recipe.privatize.epsilon,
        "keep_prob": noise.keep_prob,
        "mark": manifest.guarantee["mark"],
        "labeller": settings.labeller,
        "ledger": person_facts(labeller.people(), recipe.privatize.epsilon, sum(map(len, answered.values()))),
        "history": history,
        "summary": f"{len(learner)} answers in {settings.rounds} rounds by {settings.strategy}, "
        f"ε = {recipe.privatize.epsilon:g} each; {said(history[-1])}",
    }


def check_questions(settings: OnlineConfig, prompts: int) -> None:
    """UserError for more questions in a round than a design finds pairs."""
    most = pairs_looked_at(prompts, settings.candidates)
    if settings.strategy in DESIGNS and settings.questions > most:
        raise UserError(
            f"online.questions={settings.questions}: {settings.strategy} chooses among {most} pairs of answers to"
            f" {prompts} prompts; ask fewer a round, or give more prompts or online.candidates"
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
    from pipeline.stages.entry import main_for

    main_for("online")
