"""Runs the stages of a recipe in order: skips what is up to date, resumes what was interrupted.

A stage is up to date when its manifest's fingerprint is that of its config sections, its upstream stages and its
label-free inputs; that other code made it is said. The privatize stage additionally compares a keyed digest of its raw
input, kept beside the key and never in the run directory.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.core import atomic, resume, rundir
from pipeline.core.checkpoints import extra_reward_digests, folder_digest, judge_digests
from pipeline.core.config import effective, nearest, to_tree
from pipeline.core.errors import UserError
from pipeline.core.metrics import write_metrics
from pipeline.core.recipe import Recipe
from pipeline.core.recipe_aligners import ALIGNERS, ON_PROMPTS
from pipeline.core.rundir import RunDir
from pipeline.core.strategies import WHOLE, strategy
from pipeline.core.world import World, barrier, join_world, peak_gpu_mb, release_memory
from pipeline.data.adopted import is_adopted
from pipeline.data.enough import check_enough
from pipeline.data.overlap import check_overlap
from pipeline.preflight import preflight
from pipeline.privacy.privatize import NOT_PRIVATE


@dataclass(frozen=True)
class StageSpec:
    """What a stage depends on.

    Attributes:
        name: stage and module name (`pipeline.stages.NAME`).
        upstream: stages whose results it reads.
        sections: recipe sections that change its result.
        module: in `pipeline.stages`, where that has another name.
    """

    name: str
    upstream: tuple[str, ...]
    sections: tuple[str, ...]
    module: str | None = None


STAGES: tuple[StageSpec, ...] = (
    StageSpec("privatize", (), ("data", "privatize", "evaluation_labels")),
    StageSpec("sft", ("privatize",), ("model", "data", "sft", "seed")),
    StageSpec("reward", ("privatize", "sft"), ("model", "reward", "seed")),
    StageSpec("ppo", ("sft", "reward"), ("model", "data", "reward", "ppo", "seed")),
    StageSpec("dpo", ("privatize", "sft"), ("model", "ppo", "dpo", "seed")),
    StageSpec("rloo", ("sft", "reward"), ("model", "data", "reward", "ppo", "rloo", "seed")),
    StageSpec("grpo", ("sft", "reward"), ("model", "data", "reward", "ppo", "grpo", "seed"), "rloo"),
    StageSpec(
        "evaluate",
        ("privatize", "sft", "reward", *ALIGNERS),
        ("model", "data", "privatize", "reward", "aligner", *ALIGNERS, "evaluate", "evaluation_labels", "seed"),
    ),
    StageSpec("report", ("privatize", "sft", "reward", *ALIGNERS, "evaluate"), ("name",)),
)
NAMES = tuple(stage.name for stage in STAGES)


@dataclass(frozen=True)
class StageContext:
    """What a stage's `run(context)` gets."""

    recipe: Recipe
    run: RunDir
    world: World
    spec: StageSpec

    @property
    def folder(self) -> Path:
        """Where the stage releases its results."""
        return self.run.stage(self.spec.name)

    @property
    def checkpoints(self) -> Path:
        """Where the stage keeps resume state."""
        return self.run.checkpoints(self.spec.name)

    def noisy_counts(self, decisions: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Asks the privatise stage how often rules are right about the true evaluation labels. What comes back is
        differentially private and in the ledger. decisions: see `pipeline.stages.privatize.noisy_counts`."""
        spec = spec_of("privatize")
        answer: dict[str, Any] = _module(spec).noisy_counts(replace(self, spec=spec), decisions)
        return answer


@dataclass(frozen=True)
class PlannedStage:
    """One line of the plan: whether the stage runs, and why."""

    spec: StageSpec
    runs: bool
    reason: str


@dataclass
class Selection:
    """Which stages the command line asked for."""

    start: str | None = None
    only: str | None = None
    names: tuple[str, ...] = field(default=NAMES)

    def __post_init__(self) -> None:
        if self.start and self.only:
            raise UserError("--from and --only exclude each other: give one of them")
        for option, value in (("--from", self.start), ("--only", self.only)):
            if value is not None and value not in NAMES:
                raise UserError(f"{option} {value}: no such stage{nearest(value, NAMES)}")
        if self.only:
            self.names = (self.only,)
        elif self.start:
            self.names = NAMES[NAMES.index(self.start) :]


def spec_of(name: str) -> StageSpec:
    """The specification of stage `name`."""
    return next(stage for stage in STAGES if stage.name == name)


def stages_of(recipe: Recipe) -> tuple[StageSpec, ...]:
    """The stages of this recipe in order: those of the aligner it names, and of no other."""
    return tuple(stage for stage in STAGES if stage.name not in recipe.other_aligners)


def upstream_of(spec: StageSpec, recipe: Recipe) -> tuple[str, ...]:
    """The stages that `spec` reads under this recipe: sft reads the release only where it imitates its answers."""
    if spec.name == "sft" and not recipe.data.from_release("demonstrations"):
        return ()
    return tuple(name for name in spec.upstream if name not in recipe.other_aligners)


def stage_fingerprint(spec: StageSpec, recipe: Recipe, run: RunDir) -> str:
    """Identity of what the stage would compute; upstream stages enter through their own fingerprints and code."""
    tree = effective(Recipe, to_tree(recipe))
    made = {name: run.manifest(name) or {} for name in upstream_of(spec, recipe)}
    upstream = {name: [manifest.get("fingerprint"), manifest.get("code")] for name, manifest in made.items()}
    return rundir.fingerprint(
        {
            "stage": spec.name,
            "config": {section: tree[section] for section in spec.sections},
            "upstream": upstream,
            "inputs": input_digests(spec, recipe),
        }
    )


def settings_fingerprint(spec: StageSpec, recipe: Recipe) -> str:
    """Identity of what the recipe alone says about the stage."""
    tree = effective(Recipe, to_tree(recipe))
    return rundir.fingerprint({section: tree[section] for section in spec.sections})


def input_digests(spec: StageSpec, recipe: Recipe) -> dict[str, str]:
    """Digests of the label-free inputs a stage reads by path. Preferences are never among them."""
    from pipeline.data.inputs import input_digest

    data, external = recipe.data, recipe.reward.external
    if spec.name == "reward":
        return {} if external is None else {str(external.path): folder_digest(external.path)}
    if spec.name == "privatize":  # a release is nobody's secret
        bundle = Path(data.preferences).expanduser()
        return {data.preferences: folder_digest(bundle)} if is_adopted(data.preferences) else {}
    keys = {"sft": "demonstrations", **dict.fromkeys(ON_PROMPTS, "prompts"), "evaluate": "evaluation_prompts"}
    key = keys.get(spec.name)
    digests = {} if key is None else {str(getattr(data, key)): input_digest(key, data)}
    if spec.name == "ppo":
        digests |= extra_reward_digests(recipe.ppo.extra_rewards)
    if spec.name == "evaluate":
        digests |= judge_digests(recipe.evaluate.judge)
    base = Path(recipe.model.source).expanduser()
    if spec.name == "sft" and base.is_dir():
        digests[recipe.model.source] = folder_digest(base)
    return digests


def plan(recipe: Recipe, run: RunDir, selection: Selection) -> list[PlannedStage]:
    """What `execute` would do now. Stages after one that runs will run as well, as their input changes."""
    lines: list[PlannedStage] = []
    dirty: set[str] = set()
    for spec in stages_of(recipe):
        manifest = run.manifest(spec.name)
        if spec.name not in selection.names:
            lines.append(PlannedStage(spec, False, "not selected"))
            continue
        reason = _why_run(spec, recipe, run, manifest, dirty)
        if reason is None and spec.name in (selection.only, selection.start):
            reason = "asked for"
        if reason is not None:
            dirty.add(spec.name)
        lines.append(PlannedStage(spec, reason is not None, reason or run.up_to_date(spec.name)))
    return lines


def _why_run(
    spec: StageSpec, recipe: Recipe, run: RunDir, manifest: dict[str, Any] | None, dirty: set[str]
) -> str | None:
    """Why the stage has to run, or None when it is up to date."""
    if manifest is None:
        return "resumes" if run.checkpoints(spec.name).is_dir() else "not run yet"
    changed = dirty.intersection(upstream_of(spec, recipe))
    if changed:
        return f"its input '{sorted(changed)[0]}' runs again"
    if manifest.get("fingerprint") != stage_fingerprint(spec, recipe, run):
        return "recipe or input changed"
    if spec.name == "privatize" and not _module(spec).input_unchanged(recipe, run):
        return "raw input changed"
    return None


def check(recipe: Recipe, run: RunDir, selection: Selection, world: World) -> list[PlannedStage]:
    """The plan, after every check that can be made before anything is written.

    Raises:
        UserError: a foreign run directory, a missing upstream stage, or something `preflight` finds.
    """
    run.check(recipe)
    _check_stage(selection.only or selection.start, recipe)
    lines = plan(recipe, run, selection)
    _check_needs(recipe, run, [line.spec for line in lines if line.runs], world)
    return lines


def _check_stage(name: str | None, recipe: Recipe) -> None:
    """The stage is one of this recipe's."""
    if name is not None and name in recipe.other_aligners:
        raise UserError(f"the recipe has no stage {name}: set aligner={name}, or run {recipe.aligner}")


def _check_needs(recipe: Recipe, run: RunDir, specs: Sequence[StageSpec], world: World) -> None:
    """What the stages `specs` read is there, or made by one of them before."""
    names = {spec.name for spec in specs}
    for spec in specs:
        for name in upstream_of(spec, recipe):
            if name not in names:
                _check_made_by(recipe, run, name)
    preflight(recipe, names, world)
    if "privatize" in names:
        _module(spec_of("privatize")).check_input(recipe, run)
    check_overlap(recipe, run, names)
    check_enough(recipe, run, names)


def _check_made_by(recipe: Recipe, run: RunDir, name: str) -> None:
    """A stage that is read and does not run, and what it read itself, was made with this recipe's settings.

    A result would else carry a recipe that does not describe it. The code may be another: that is the user's choice.
    """
    manifest = run.require(name)
    spec = spec_of(name)
    if manifest.get("settings") not in (None, settings_fingerprint(spec, recipe)):
        raise UserError(
            f"stage '{name}' in {run.root} was made with other settings than this recipe's: "
            f"start there (--from {name}), or undo the change"
        )
    for upstream in upstream_of(spec, recipe):
        _check_made_by(recipe, run, upstream)


def resolved(recipe: Recipe, run: RunDir, world: World) -> Recipe:
    """The recipe with a stated `model.dtype`; the run directory is this recipe's. See `numerics.resolve_dtype`."""
    from pipeline.lm.numerics import resolve_dtype

    run.check(recipe)
    return resolve_dtype(recipe, run, world)


def execute(recipe: Recipe, run: RunDir, selection: Selection) -> None:
    """Runs the selected stages that are not up to date, in order."""
    world = join_world()
    recipe = resolved(recipe, run, world)
    lines = check(recipe, run, selection, world)
    with _claimed(recipe, run, world):
        for line in lines:
            if line.runs:
                run_stage(StageContext(recipe, run, world, line.spec))
            elif world.main and line.spec.name in selection.names:
                say(f"{line.spec.name}: {line.reason}, skipped")


def execute_one(name: str, recipe: Recipe, run: RunDir) -> None:
    """Runs one stage, as `accelerate launch -m pipeline.stages.NAME` does; a complete one is skipped."""
    world = join_world()
    recipe = resolved(recipe, run, world)
    _check_stage(name, recipe)
    spec = spec_of(name)
    reason = _why_run(spec, recipe, run, run.manifest(name), set())
    if reason is not None:
        _check_needs(recipe, run, [spec], world)
    with _claimed(recipe, run, world):
        if reason is not None:
            run_stage(StageContext(recipe, run, world, spec))
        elif world.main:
            say(f"{name}: {run.up_to_date(name)}, skipped")


def run_stage(context: StageContext) -> None:
    """Runs one stage on every process and writes its manifest from the main one."""
    spec, run, world = context.spec, context.run, context.world
    for name in upstream_of(spec, context.recipe):
        run.require(name)
    if world.main:
        run.reopen(spec.name)
        if spec.name != "report":
            (run.root / "metrics.json").unlink(missing_ok=True)  # of other results than the run will hold
        say(f"{spec.name}: starts")
        _claim_checkpoints(context)
    barrier(world)
    started = time.monotonic()
    module = _module(spec)
    report: dict[str, Any] = module.run(context)
    barrier(world)
    if world.main:
        seconds = round(time.monotonic() - started, 2)
        run.complete(
            spec.name,
            {
                "stage": spec.name,
                "fingerprint": stage_fingerprint(spec, context.recipe, run),
                "settings": settings_fingerprint(spec, context.recipe),
                "code": rundir.code_digest(),
                "seconds": seconds,
                "peak_rss_mb": rundir.peak_rss_mb(),
                "peak_gpu_mb": peak_gpu_mb(),
                "world_size": world.size,
                "commit": rundir.commit(),
                "override": context.recipe.override,
                "report": report,
            },
        )
        evaluated = run.manifest("evaluate") or {}
        if evaluated.get("fingerprint") == stage_fingerprint(spec_of("evaluate"), context.recipe, run):
            write_metrics(run, [stage.name for stage in stages_of(context.recipe)])
        say(f"{spec.name}: done in {seconds:.0f} s — {report.get('summary', '')}")
    release_memory()
    barrier(world)


def _module(spec: StageSpec) -> Any:
    """The stage's module, imported when it is needed."""
    return importlib.import_module(f"pipeline.stages.{spec.module or spec.name}")


def say(line: str) -> None:
    """One progress line on stderr."""
    print(f"[private-rlhf] {line}", file=sys.stderr, flush=True)


@contextmanager
def _claimed(recipe: Recipe, run: RunDir, world: World) -> Iterator[None]:
    """The run directory is this recipe's; a refusal in the block leaves nothing behind, not even an empty new run."""
    fresh = not run.root.exists()
    barrier(world)  # every process has read the same state before any changes it
    _claim(recipe, run, world)
    try:
        yield
    except UserError:
        if fresh and world.main and not any(run.manifest(name) for name in NAMES):
            shutil.rmtree(run.root, ignore_errors=True)
        raise


def _claim(recipe: Recipe, run: RunDir, world: World) -> None:
    if world.main:
        changed = run.changed_keys(recipe)
        if changed:
            say(f"{run.root} was last started with another {', '.join(changed)}: what depends on it is made anew")
        from pipeline.lm.numerics import described

        run.claim(recipe, described(recipe))
        if recipe.override:
            say(f"{NOT_PRIVATE}: {recipe.override}")
        for folder in (run.root, *(run.stage(name) for name in NAMES)):
            atomic.sweep_temporaries(folder)
    barrier(world)


def _claim_checkpoints(context: StageContext) -> None:
    """Resume state is of this recipe, input and number of processes, or set aside; PPO's suits any number under DDP."""
    asked, stage = strategy(os.environ), context.spec.name
    identity = {
        "recipe or input": stage_fingerprint(context.spec, context.recipe, context.run),
        "number of processes": asked if (stage, asked) == ("ppo", WHOLE) else f"{asked}, {context.world.size}",
    }
    if said := resume.claim(context.checkpoints, identity, rundir.code_digest()):
        say(f"{stage}: {said}")
