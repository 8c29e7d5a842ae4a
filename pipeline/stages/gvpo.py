"""Stage gvpo: regression of log(π/π_ref) on r̂/kl_coef over stored answers, in PPO's place under `aligner: gvpo`.

The optimum is the Gibbs policy π ∝ π_ref·exp(r̂/kl_coef) whoever drew the answers (`rl.regression`). So answers are
drawn once and learnt from in several passes. Round 0 learns from the completions of π_ref that centre Γ; in each
further round the policy answers every prompt anew, and all answers are kept. J of r̂ on held-out training prompts is
estimated as it goes, and the best step is restored.

Reads:   sft/model (π_ref), reward/model (r̂), training prompts; online/replay where the recipe has `online`; the answers
         of the released pairs, not their labels, with gvpo.released_answers.
Writes:  gvpo/model (ordinary checkpoint, adapter merged), gvpo/history.jsonl (one line per estimate on held-out
         prompts), gvpo/replay (all answers, as token ids with scores); gvpo/adapter under rollout;
         gvpo/nonfinite.json when it stops on a number that is not finite.
Command: private-rlhf launch -m private_rlhf.stages.gvpo --config RECIPE [--run-dir DIR]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from private_rlhf.data.inputs import released_answers
from private_rlhf.data.release import read_release
from private_rlhf.data.render import Prompt, evenly_spaced
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.lm.generate import sample_key
from private_rlhf.lm.saving import keep_adapter, save_policy
from private_rlhf.privacy.guarantee import extra_rewards as card_facts
from private_rlhf.recipe import GvpoConfig, PpoConfig, Recipe
from private_rlhf.rl import resume_state, tracking
from private_rlhf.rl.answer_learner import AnswerLearner, best_step, held_out_gains, split_prompts
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.replay import HELD_OUT, REFERENCE, RELEASE, Answers, Replay
from private_rlhf.rl.rollout import Rollout
from private_rlhf.stages import on_prompts
from private_rlhf.stages.context import StageContext
from tqdm import tqdm


def run(context: StageContext) -> dict[str, Any]:
    """Trains on every process; saves from the main one."""
    recipe, settings = context.recipe, context.recipe.gvpo
    accelerator, logs = make_accelerator(context.world), context.folder / "tracking"

    # --- π_ref, r̂, prompts --------------------------------------------------------------------------------------------
    renderer = on_prompts.renderer_of(context)
    extra_rewards, others = on_prompts.load_extras(context, accelerator)
    fitting, count = on_prompts.fitting_prompts(context, renderer, others)
    learnt, held_out = split_prompts(fitting, settings.held_out_prompts)
    prompts = evenly_spaced(learnt, settings.max_prompts)
    trainer = on_prompts.make_trainer(context, accelerator, trainer_settings(recipe), renderer, prompts, extra_rewards)

    # --- regression ---------------------------------------------------------------------------------------------------
    kl_coef = recipe.ppo.kl_coef if settings.kl_coef is None else settings.kl_coef
    learner, replay = AnswerLearner(trainer, settings, kl_coef), on_prompts.replay_of(context, "gvpo")
    stored = {"online": on_prompts.replay_of(context, "online").read()}
    if settings.released_answers:
        release = read_release(context.run.released / "release")
        stored[RELEASE] = Answers.unscored(*released_answers(release, renderer, prompts, settings.released_answers), 0)
    training = Training(trainer, learner, settings, replay, context.checkpoints, held_out, stored)
    with on_prompts.stopping_cleanly(context):
        training.resume()
        first = len(training.history)
        with tracking.run_trackers(accelerator, recipe.ppo.report_to, recipe.name, settings, logs, first):
            training.train()
    best = training.restore_best()

    # --- results ------------------------------------------------------------------------------------------------------
    facts = [reward.facts for reward in extra_rewards]
    save_policy(accelerator, trainer.policy, renderer, context.folder, recipe.model.dtype, False, trainer.bare.read)
    keep_adapter(accelerator, trainer.policy, context.folder, recipe.rollout is not None)
    history = training.history
    if accelerator.is_main_process:
        used = {"extra_rewards": card_facts(facts)} if facts else {}
        on_prompts.write_results(context, renderer, history, len(prompts), used)
    released = len(training.answers.read(RELEASE))
    also = f" and {released} of the release" if released else ""
    steps, gain, error = history[best]["step"], history[best]["objective_gain"], history[best]["objective_gain_error"]
    return {
        "iterations": len(history),
        "rollouts": training.drawn,
        **({"released_answers": released} if released else {}),
        "prompts": len(prompts),
        "held_out_prompts": len(held_out),
        "texts": [count],
        "kl_coef": kl_coef,
        "extra_rewards": facts,
        "steps": history[-1]["step"],
        "restored_step": steps,
        "losses": [entry["policy_loss"] for entry in history[1:]],
        **({"engine": trainer.engine.summary(history)} if recipe.rollout is not None else {}),
        "summary": f"{training.drawn} answers{also} to {len(prompts)} prompts, step {steps} of {history[-1]['step']}, "
        f"J of r̂ on {len(held_out)} held-out prompts {gain:+.2f} ± {error:.2f}, KL {history[best]['kl']:.2f} nats",
    }


def trainer_settings(recipe: Recipe) -> PpoConfig:
    """Section ppo with the sizes and the adapter of section gvpo, for the trainer that draws, scores and steps."""
    own = recipe.gvpo
    return replace(
        recipe.ppo,
        lora=own.lora,
        rollouts=own.batch_size,
        minibatch_size=own.batch_size,
        samples_per_prompt=1,
        micro_batch_size=own.micro_batch_size,
        generate_batch_size=own.generate_batch_size,
        learning_rate=own.learning_rate,
        baseline=True,
        reference_rollouts=False,
        warm_start=None,
        polish=None,
    )


@dataclass
class Training:
    """Rounds of the regression, with their answers, estimates and checkpoints.

    Attributes:
        trainer, learner, settings: as prepared.
        answers: the stage's replay.
        checkpoints: folder of the resume state; `best` below it holds the best step.
        held_out: prompts that nothing learns from.
        others: answers that stages before this one had, by name; those to its prompts are learnt from in every round.
        history: one line per estimate of J on them; the first is of π_ref.
        gains: by estimate and held-out prompt, J of r̂ less that of π_ref.
        reference: by held-out prompt, J of π_ref, by answers with the same noise.
        place: the next step, as (round, step of the round, steps made in all).
    """

    trainer: PpoTrainer
    learner: AnswerLearner
    settings: GvpoConfig
    answers: Replay
    checkpoints: Path
    held_out: list[Prompt]
    others: Mapping[str, Answers]

    def __post_init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.gains: list[list[float]] = []
        self.reference: list[float] = []
        self.place = (0, 0, 0)

    @property
    def drawn(self) -> int:
        """Answers that were drawn to be learnt from, in all rounds."""
        return len(self.answers.read(REFERENCE, "online", "gvpo"))

    def resume(self) -> None:
        """Go on from the newest checkpoint, or draw the completions of π_ref and start."""
        accelerator = self.trainer.accelerator
        state = resume_state.load_latest(accelerator, self.checkpoints)
        if state is not None:
            self.history, self.gains, self.reference = state["history"], state["gains"], state["reference"]
            self.place = tuple(state["place"])
        accelerator.wait_for_everyone()  # no process reads any longer what goes
        if accelerator.is_main_process:
            number, step, _ = self.place
            self.answers.restart(0 if state is None else max(1, number + (step > 0)))
        accelerator.wait_for_everyone()
        if state is None:
            self._start()

    def _start(self) -> None:
        """The completions of π_ref for every prompt, and its line of the history."""
        count = self.trainer.config.reference_samples
        rollout, _ = self.trainer.draw_references([*self.trainer.prompts, *self.held_out])
        whole = Answers.of(rollout, 0)
        learnt = len(self.trainer.prompts) * count
        for name, rows in ((REFERENCE, range(learnt)), (HELD_OUT, range(learnt, len(whole)))):
            self.answers.write(name, 0, whole.take(rows[self.answers.world.rank :: self.answers.world.size]))
        self._measure_others()
        rollout, self.reference = self._held_out([0.0] * len(self.held_out))
        self._record(rollout, [0.0] * len(self.held_out), {"policy_loss": None, "grad_norm": None})
        self._save()

    def _measure_others(self) -> None:
        """Scores of the answers of `others` to the prompts that are learnt from."""
        ids = self.trainer.renderer.prompt_ids
        prompts = {tuple(ids(prompt)): prompt for prompt in self.trainer.prompts}
        for name, others in self.others.items():
            rows = [row for row, prompt in enumerate(others.prompts) if tuple(prompt) in prompts]
            if rows:
                picked = others.take(rows)
                known = [prompts[tuple(prompt)] for prompt in picked.prompts]
                self.answers.write_rollout(name, 0, self.trainer.measure(known, picked.responses))

    def train(self) -> None:
        """The steps still to do."""
        accelerator, rounds = self.trainer.accelerator, self.settings.rounds + 1
        shown = accelerator.is_main_process
        for number in range(self.place[0], rounds):
            first = self.place[1] if number == self.place[0] else 0
            if number and not first:
                self._draw_round(number)
            accelerator.wait_for_everyone()  # every share is on the disk
            answers = self.answers.read(REFERENCE, "online", RELEASE, "gvpo").learnable
            steps = self.learner.steps(answers, number)
            bar = tqdm(range(first, len(steps)), initial=first, total=len(steps), desc=f"gvpo, round {number}",
                       unit="step", disable=not shown)  # fmt: skip
            metrics: list[dict[str, float]] = []
            for step in bar:
                done = (number + step / len(steps)) / rounds
                metrics.append(self.learner.step(answers, steps[step], number, done))
                last = step + 1 == len(steps)
                self.place = (number + 1, 0, self.place[2] + 1) if last else (number, step + 1, self.place[2] + 1)
                bar.set_postfix_str(f"loss {metrics[-1]['policy_loss']:.3f}", refresh=False)
                if last or self.place[2] % self.settings.evaluate_every == 0:
                    self._estimate(metrics)
                    line = f"[private-rlhf] gvpo, step {self.place[2]}: {line_of(self.history[-1])}"
                    bar.write(line, file=sys.stderr) if shown else None
                    metrics = []
                    self._save()

    def restore_best(self) -> int:
        """Go back to the best step, see `best_step`; returns its place in the history."""
        best = best_step(self.gains)
        if best != len(self.gains) - 1:
            resume_state.load_latest(self.trainer.accelerator, self.checkpoints / "best")
        return best

    def _draw_round(self, number: int) -> None:
        count, trainer = self.settings.samples_per_prompt, self.trainer
        prompts = [prompt for prompt in trainer.prompts for _ in range(count)]
        keys = [sample_key(trainer.seed, "round", number, row) for row in range(len(prompts))]
        self.answers.write_rollout("gvpo", number, trainer.draw(prompts, keys)[0])
        trainer.proofs = {f"round {number}": proof for proof in trainer.proofs.values()}

    def _estimate(self, metrics: list[dict[str, float]]) -> None:
        measured = self._held_out(self.reference)
        means = {name: sum(row[name] for row in metrics) / len(metrics) for name in ("policy_loss", "grad_norm")}
        self._record(*measured, means)

    def _held_out(self, reference: list[float]) -> tuple[Rollout, list[float]]:
        samples, kl_coef = self.settings.held_out_samples, self.learner.kl_coef
        return held_out_gains(self.trainer, self.held_out, samples, kl_coef, reference)

    def _record(self, rollout: Rollout, gains: list[float], means: dict[str, Any]) -> None:
        """A line of the history, for the trackers too."""
        mean = sum(gains) / len(gains)
        spread = sum((gain - mean) ** 2 for gain in gains) / max(1, len(gains) - 1)
        entry = {
            "iteration": len(self.history),
            "step": self.place[2],
            "rollouts": len(rollout.responses),
            **self.trainer.describe(rollout),
            "objective_gain": mean,
            "objective_gain_error": (spread / len(gains)) ** 0.5,
            "kl_coef": self.learner.kl_coef,
            **means,
            **({"engine": self.trainer.proofs} if self.trainer.proofs else {}),
        }
        self.trainer.proofs = {}
        self.history.append(entry)
        self.gains.append(gains)
        tracking.report(self.trainer.accelerator, entry)

    def _save(self) -> None:
        """A checkpoint, and one of the best step so far."""
        state = {"history": self.history, "gains": self.gains, "reference": self.reference, "place": self.place}
        accelerator, references = self.trainer.accelerator, self.trainer.scorer.references
        means = [entry["objective_gain"] for entry in self.history]
        if means[-1] > max(means[:-1], default=-math.inf):
            resume_state.save(accelerator, self.checkpoints / "best", self.place[2], state)
        resume_state.save(accelerator, self.checkpoints, self.place[2], state, references)


def line_of(entry: dict[str, Any]) -> str:
    """An estimate as one line for the log."""
    return (
        f"J of r̂ on held-out prompts {entry['objective_gain']:+.3f} ± {entry['objective_gain_error']:.3f} over π_ref, "
        f"KL {entry['kl']:.2f} nats, loss {entry['policy_loss']:.3f}"
    )


if __name__ == "__main__":
    from private_rlhf.stages.entry import main_for

    main_for("gvpo")
