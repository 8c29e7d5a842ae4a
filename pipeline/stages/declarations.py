"""The declarations of all stages in their order: inputs, settings that change a result, and checks before a run.

Runner, command line and launch scripts read this table, which loads without torch; a stage's module does its work.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from os import environ
from pathlib import Path
from typing import Any, ClassVar

from private_rlhf.core.environment import check_installed
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir, fingerprint
from private_rlhf.core.world import World, check_rows, global_batch
from private_rlhf.data.inputs import input_digest
from private_rlhf.data.release_import import names_bundle
from private_rlhf.data.row_counts import RowCounts
from private_rlhf.evaluation.truths import load_truth
from private_rlhf.lm.model_folders import check_checkpoint, extra_reward_digests, folder_digest, judge_digests
from private_rlhf.recipe import ALIGNERS, Recipe
from private_rlhf.stages.checks import (
    POSITIONS,
    check_backbone,
    check_base_model,
    check_bits,
    check_first_rows,
    check_judge,
    check_message_keys,
    check_model_folder,
    check_policy,
    check_reward_verdict,
    check_trackers,
    check_trainer_args,
)
from private_rlhf.stages.context import previous_run
from private_rlhf.stages.launch_strategies import check_strategy


class Stage:
    """The declaration of one step of a recipe: facts, and checks before it runs. The stage's module does the work.

    Attributes:
        name: of the stage, of its folder in a run, and of the command that starts it.
        help: of that command.
        reads: the stages whose results it reads.
        sections: of the recipe, those that change its result; `section.key` for a single key.
        texts: keys of `data` that name the label-free texts it reads.
        launched: several processes may share it, under `private-rlhf launch`.
        any_world: its resume state suits any number of processes with whole weights.
        releases: it reads raw labels and releases them anew.
        measures: its results are in metrics.json.
        prints: it only shows results; no other stage reads its own.
        extras: of the installation, that it needs.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[tuple[str, ...]] = ()
    texts: ClassVar[tuple[str, ...]] = ()
    launched: ClassVar[bool] = True
    any_world: ClassVar[bool] = False
    releases: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    prints: ClassVar[bool] = False
    extras: ClassVar[tuple[str, ...]] = ("train",)

    @property
    def module_name(self) -> str:
        """The module of `run(context)`."""
        return f"private_rlhf.stages.{self.name}"

    def sections_of(self, recipe: Recipe) -> tuple[str, ...]:
        """The sections that change its result under this recipe."""
        return self.sections

    def upstream(self, recipe: Recipe) -> tuple[str, ...]:
        """The stages that it reads under this recipe."""
        return tuple(name for name in self.reads if name not in recipe.absent_stages)

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        """Digests of the label-free inputs that it reads by path. Raw preferences are never among them."""
        return {str(getattr(recipe.data, key)): input_digest(key, recipe.data) for key in self.texts}

    def check_batches(self, recipe: Recipe, world: World) -> None:
        """Every global batch is a whole number of micro-batches per process. Raises: UserError."""

    def check_sources(self, recipe: Recipe, run: RunDir) -> None:
        """Check that what it reads by path is there, before torch is imported. Raises: UserError."""
        check_first_rows(recipe.data, self.texts)

    def check(self, recipe: Recipe, world: World) -> None:
        """Checks of the recipe that take a second or two, before any stage starts. Raises: UserError."""

    def check_rows(self, recipe: Recipe, run: RunDir, new_release: bool) -> None:
        """Checks of the data. new_release: labels are about to be released. Raises: UserError."""

    def check_read(self, recipe: Recipe, run: RunDir) -> None:
        """Check what the complete stages that it reads have measured. RunStopped: it must not start."""

    def changed(self, recipe: Recipe, run: RunDir) -> str | None:
        """The reason why a complete result is not up to date, beyond recipe and inputs; None where it is."""
        return None

    def load(self) -> Any:
        """The stage's module, imported."""
        return importlib.import_module(self.module_name)


def row_counts(recipe: Recipe, run: RunDir, new_release: bool) -> RowCounts:
    """Counts of the rows that the run will learn from."""
    several = bool(recipe.privatize.labeler_column or recipe.privatize.event_column)
    return RowCounts(recipe.data, run.stage("privatize"), new_release, recipe.online is not None, several)


class Privatize(Stage):
    """Reads raw labels, as does only Count, which asks for noisy answers."""

    name = "privatize"
    help = "randomised response on every label."
    sections = ("data", "privatize", "evaluation_labels")
    launched = False
    releases = True
    extras = ()

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        """Digest of a release that is imported, which is not secret."""
        source = recipe.data.preferences
        return {source: folder_digest(Path(source).expanduser())} if names_bundle(source) else {}

    def check_sources(self, recipe: Recipe, run: RunDir) -> None:
        source = self._raw_source(recipe, run)
        if source.in_files:
            source.open_sources()

    def check_rows(self, recipe: Recipe, run: RunDir, new_release: bool) -> None:
        source = self._raw_source(recipe, run)
        source.check_input(recipe.evaluation_labels)
        if recipe.data.message_keys and source.in_files:
            check_message_keys(recipe.model, source)

    def changed(self, recipe: Recipe, run: RunDir) -> str | None:
        """Compares a keyed digest of the raw input, which lies beside the key and never in the run directory."""
        return None if self._raw_source(recipe, run).input_unchanged() else "raw input changed"

    def _raw_source(self, recipe: Recipe, run: RunDir) -> Any:
        return self.load().RawSource(recipe.data, recipe.privatize, run.root)


class Trained(Stage):
    """A stage that trains with TRL by the section of its name."""

    def check_batches(self, recipe: Recipe, world: World) -> None:
        settings = getattr(recipe, self.name)
        global_batch(self.name, settings.batch_size, settings.micro_batch_size, world)

    def check(self, recipe: Recipe, world: World) -> None:
        check_trainer_args(self.name, recipe, world)
        check_trackers(recipe.ppo.report_to)


class Sft(Trained):
    name = "sft"
    help = "supervised fine-tuning; gives the reference policy."
    reads = ("privatize",)
    sections = ("model", "data", "sft", "seed")
    texts = ("demonstrations",)
    any_world = True

    def upstream(self, recipe: Recipe) -> tuple[str, ...]:
        """The release only where its answers are the demonstrations."""
        return super().upstream(recipe) if recipe.data.from_release("demonstrations") else ()

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        source = recipe.model.source
        base = Path(source).expanduser()
        return super().inputs(recipe) | ({source: folder_digest(base)} if base.is_dir() else {})

    def check_sources(self, recipe: Recipe, run: RunDir) -> None:
        super().check_sources(recipe, run)
        if recipe.model.source not in POSITIONS:
            check_checkpoint(recipe.model.source, "model.source", ", 'smollm2' or 'tiny'")

    def check(self, recipe: Recipe, world: World) -> None:
        check_base_model(recipe)
        super().check(recipe, world)

    def check_rows(self, recipe: Recipe, run: RunDir, new_release: bool) -> None:
        count = row_counts(recipe, run, new_release).demonstrations(recipe.sft.batch_size)
        check_rows(count, self.name, recipe.sft.batch_size)


class Online(Stage):
    name = "online"
    help = "rounds of questions about answers of the reference policy, for recipes with `online`."
    reads = ("sft",)
    sections = ("name", "model", "data", "privatize", "online", "reward", "ppo", "rollout", "seed")
    texts = ("prompts", "evaluation_prompts")

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        """And the results that it goes on from; not those of an earlier version, whose labels have no digest."""
        after = None if recipe.online is None else recipe.online.after
        made = {} if after is None else RunDir(after.expanduser()).made(("online", "ppo"))
        return super().inputs(recipe) | ({str(after): fingerprint(made)} if len(made.get("online", ())) > 2 else {})

    def check_sources(self, recipe: Recipe, run: RunDir) -> None:
        super().check_sources(recipe, run)
        previous_run(recipe)


class Reward(Trained):
    name = "reward"
    help = "reward model from privatised labels, with its uncertainty."
    reads = ("privatize", "sft", "online")
    sections = ("model", "reward", "seed")
    any_world = True

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        external = recipe.reward.external
        return {} if external is None else {str(external.path): folder_digest(external.path)}

    def check_batches(self, recipe: Recipe, world: World) -> None:
        if recipe.reward.mode != "head":
            super().check_batches(recipe, world)

    def check(self, recipe: Recipe, world: World) -> None:
        settings = recipe.reward
        if settings.external is not None:
            check_model_folder("reward.external", settings.external.path, settings.external.public)
            return
        check_backbone(recipe)
        check_bits(self.name, settings)
        if settings.mode != "head":
            super().check(recipe, world)
        elif settings.trainer_args:
            raise UserError("reward.trainer_args is for reward.mode lora or full: remove it, or change the mode")

    def check_rows(self, recipe: Recipe, run: RunDir, new_release: bool) -> None:
        settings = recipe.reward
        if settings.external is not None:
            return
        counts = row_counts(recipe, run, new_release)
        if counts.has_one_prompt():
            raise UserError("all pairs have one prompt, and folds are by prompt: give preferences on several prompts")
        if settings.mode != "head":
            count = counts.pairs(settings.batch_size, settings.validation_fraction)
            check_rows(count, self.name, settings.batch_size)


class OnReward(Stage):
    """A stage that trains a policy on r̂."""

    def check_read(self, recipe: Recipe, run: RunDir) -> None:
        if not recipe.reward.accept_coin:
            check_reward_verdict(run, recipe.reward.max_pairs)


class ByPpo(OnReward):
    """A stage that draws, scores and steps with the trainer of section ppo."""

    texts = ("prompts",)
    any_world = True

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        return super().inputs(recipe) | extra_reward_digests(recipe.ppo.extra_rewards)

    def check(self, recipe: Recipe, world: World) -> None:
        check_policy(recipe.ppo)


class Ppo(ByPpo):
    name = "ppo"
    help = "KL-regularised PPO against the pessimistic reward."
    reads = ("sft", "reward")
    sections = ("model", "data", "reward", "ppo", "rollout", "online", "seed")

    def sections_of(self, recipe: Recipe) -> tuple[str, ...]:
        return (*self.sections, *(["gvpo"] if recipe.ppo.warm_start or recipe.ppo.polish else []))

    def check_batches(self, recipe: Recipe, world: World) -> None:
        settings = recipe.ppo
        if settings.rollouts < world.size:
            raise UserError(
                f"ppo.rollouts must be at least {world.size}, one for each process, got {settings.rollouts}: raise it "
                "or start fewer processes"
            )


class Dpo(Trained):
    name = "dpo"
    help = "the DPO baseline, for recipes with `aligner: dpo`."
    reads = ("privatize", "sft", "online")
    sections = ("model", "ppo", "dpo", "seed")
    any_world = True

    def check_rows(self, recipe: Recipe, run: RunDir, new_release: bool) -> None:
        size = recipe.dpo.batch_size
        check_rows(row_counts(recipe, run, new_release).pairs(size), self.name, size)


class Rloo(Trained, OnReward):
    name = "rloo"
    help = "RLOO against the pessimistic reward, for recipes with `aligner: rloo`."
    reads = ("sft", "reward")
    sections = ("model", "data", "reward", "ppo", "rollout", "rloo", "seed")
    texts = ("prompts",)


class Grpo(Rloo):
    name = "grpo"
    help = "GRPO against the pessimistic reward, for recipes with `aligner: grpo`."
    sections = ("model", "data", "reward", "ppo", "rollout", "grpo", "seed")


class Gvpo(ByPpo):
    name = "gvpo"
    help = "regression to the Gibbs policy on stored answers, for recipes with `aligner: gvpo`."
    reads = ("sft", "online", "reward")
    sections = ("model", "data", "reward", "ppo", "rollout", "gvpo", "online", "seed")

    def check_batches(self, recipe: Recipe, world: World) -> None:
        settings = recipe.gvpo
        groups = settings.batch_size // settings.samples_per_prompt
        if groups < world.size:
            raise UserError(
                f"gvpo.batch_size must be at least {settings.samples_per_prompt * world.size}, one group of "
                f"samples_per_prompt for each process, got {settings.batch_size}: raise it or start fewer processes"
            )


class Evaluate(Stage):
    name = "evaluate"
    help = "the policy against the reference, with intervals."
    reads = ("privatize", "sft", "online", "reward", *ALIGNERS)
    sections = ("model", "data", "privatize", "reward", "aligner", *ALIGNERS, "rollout", "evaluate",
                "evaluation_labels", "seed")  # fmt: skip
    texts = ("evaluation_prompts",)
    measures = True

    def inputs(self, recipe: Recipe) -> dict[str, str]:
        return super().inputs(recipe) | judge_digests(recipe.evaluate.judge)

    def check(self, recipe: Recipe, world: World) -> None:
        if (judge := recipe.evaluate.judge) is not None:
            check_judge(judge)


class Count(Stage):
    """Reads raw labels; its answers are noisy, and charged in the ledger."""

    name = "count"
    help = "noisy counts of true labels, for recipes with `evaluation_labels: laplace`."
    reads = ("privatize", "evaluate")
    sections = ("data", "privatize", "evaluation_labels")
    extras = ()
    launched = False
    measures = True


class Report(Stage):
    name = "report"
    help = "the one-page HTML report with the privacy card."
    reads = ("privatize", "sft", "online", "reward", *ALIGNERS, "evaluate", "count")
    sections = ("name",)
    launched = False
    prints = True
    extras = ("report",)


STAGES: tuple[Stage, ...] = (Privatize(), Sft(), Online(), Reward(), Ppo(), Dpo(), Rloo(), Grpo(), Gvpo(),
                             Evaluate(), Count(), Report())  # fmt: skip
NAMES = tuple(stage.name for stage in STAGES)


def stage_of(name: str) -> Stage:
    """The stage `name`."""
    return next(stage for stage in STAGES if stage.name == name)


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of this recipe in order."""
    return tuple(stage for stage in STAGES if stage.name not in recipe.absent_stages)


def preflight(recipe: Recipe, names: Collection[str], world: World) -> None:
    """Check what the stages `names` need, so that a problem of the fourth is reported now and not an hour from now.

    Raw preferences are not read here. UserError: the launcher's strategy was not tested with a stage, or its `check`
    refuses the recipe.
    """
    check_strategy(recipe, names, environ)
    about_to_run = [stage for stage in STAGES if stage.name in names]
    check_installed(*(extra for stage in about_to_run for extra in stage.extras))
    if "embedded" in (recipe.data.preferences, recipe.data.prompts, recipe.data.evaluation_prompts):
        check_installed("demo")  # r* of the built-in task
    if recipe.evaluate.truth is not None:
        load_truth(recipe.evaluate.truth)
    for stage in about_to_run:
        stage.check_batches(recipe, world)
    for stage in about_to_run:
        stage.check(recipe, world)
