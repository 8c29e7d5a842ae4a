"""Runs the stages of a recipe in order: skips what is up to date, resumes what was interrupted.

A stage is up to date when its manifest's fingerprint is that of its config sections, its upstream stages and its
label-free inputs, and what the stage itself looks at. Where the code changed that a stage imports, the user decides.
The stages are those of `private_rlhf.stages.declarations`; none is known here by name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.code import digest_of, source_files
from private_rlhf.core.environment import commit, environment, peak_rss_mb
from private_rlhf.core.errors import UserError, say
from private_rlhf.core.rundir import RunDir, claim_checkpoints, fingerprint, write_metrics
from private_rlhf.core.world import World, barrier, join_world, peak_gpu_mb, release_memory
from private_rlhf.data.overlap import check_overlap
from private_rlhf.launcher import Launcher
from private_rlhf.privacy.guarantee import NOT_PRIVATE
from private_rlhf.privacy.keys import Lock
from private_rlhf.privacy.signatures import file_digest
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import effective, nearest, to_tree
from private_rlhf.recipe.recipe import changed_keys, shareable_yaml
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import NAMES, STAGES, Stage, preflight, stage_of, stages_of
from private_rlhf.stages.launch_strategies import WHOLE, strategy
from private_rlhf.stages.pace import rest_of


@dataclass(frozen=True)
class PlannedStage:
    """One line of the plan: whether the stage runs, and why."""

    stage: Stage
    runs: bool
    reason: str


@dataclass
class Selection:
    """The stages that the command line asked for."""

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


def stage_fingerprint(stage: Stage, recipe: Recipe, run: RunDir) -> str:
    """Identity of what the stage would compute; upstream stages enter through their results' own identities."""
    made_of = {"config": _settings(stage, recipe), "upstream": run.made(stage.upstream(recipe))}
    return fingerprint({"stage": stage.name, "inputs": stage.inputs(recipe)} | made_of)


def settings_fingerprint(stage: Stage, recipe: Recipe) -> str:
    """Identity of the recipe's settings for the stage."""
    return fingerprint(_settings(stage, recipe))


def _settings(stage: Stage, recipe: Recipe) -> dict[str, Any]:
    """The recipe's values in the stage's sections, or in single keys of them (`section.key`)."""
    tree = effective(Recipe, to_tree(recipe))
    sections = stage.sections_of(recipe)
    single = (name.partition(".") for name in sections)
    tree |= {f"{section}.{key}": tree[section][key] for section, _, key in single if key and key in tree[section]}
    return {section: tree[section] for section in sections if section in tree}


def plan(recipe: Recipe, run: RunDir, selection: Selection) -> list[PlannedStage]:
    """The plan of `execute`. A stage whose input runs again will run too."""
    lines: list[PlannedStage] = []
    dirty: set[str] = set()
    for stage in stages_of(recipe):
        if stage.name not in selection.names:
            lines.append(PlannedStage(stage, False, "not selected"))
            continue
        reason = _why_run(stage, recipe, run, dirty)
        if reason is None and stage.name in (selection.only, selection.start):
            reason = "asked for"
        if reason is not None:
            dirty.add(stage.name)
        lines.append(PlannedStage(stage, reason is not None, reason or _up_to_date(stage, run)))
    return lines


def _up_to_date(stage: Stage, run: RunDir) -> str:
    changed = run.changed_code(stage.name, source_files(stage.module_name))
    return f"up to date, made by other code ({named(changed)})" if changed else "up to date"


def named(files: Sequence[str]) -> str:
    """The first of some files, and how many more."""
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _why_run(stage: Stage, recipe: Recipe, run: RunDir, dirty: set[str]) -> str | None:
    """The reason for which the stage has to run; None when it is up to date. dirty: stages that will run."""
    if (manifest := run.manifest(stage.name)) is None:
        return "resumes" if run.checkpoints(stage.name).is_dir() else "not run yet"
    if changed := dirty.intersection(stage.upstream(recipe)):
        return f"its input '{sorted(changed)[0]}' runs again"
    if manifest.get("fingerprint") != stage_fingerprint(stage, recipe, run):
        return "recipe or input changed"
    return stage.changed(recipe, run)


def check(recipe: Recipe, run: RunDir, selection: Selection, world: World) -> list[PlannedStage]:
    """The plan, after every check that can be made before anything is written.

    UserError: a foreign run directory, a missing upstream stage, or as `preflight`. RunStopped: as `Stage.check_read`.
    """
    run.check(recipe.name)
    _check_stage(selection.only or selection.start, recipe)
    lines = plan(recipe, run, selection)
    _check_needs(recipe, run, [line.stage for line in lines if line.runs], world)
    return lines


def _check_stage(name: str | None, recipe: Recipe) -> None:
    """The stage is one of this recipe's."""
    if name is not None and (remedy := recipe.absent_stages.get(name)):
        raise UserError(f"stage {name} is not in this recipe: {remedy}")


def _check_needs(recipe: Recipe, run: RunDir, stages: Sequence[Stage], world: World) -> None:
    """Check that the inputs of `stages` are there, or made by one of them before, and fit."""
    names = {stage.name for stage in stages}
    new_release = any(stage.releases for stage in stages)
    for stage in stages:
        for name in stage.upstream(recipe):
            if name not in names:
                _check_made_by(recipe, run, name)
        if not names.intersection(stage.upstream(recipe)):
            stage.check_read(recipe, run)
    preflight(recipe, names, world)
    for stage in stages:
        if stage.releases:  # first, since the others count what it will release
            stage.check_rows(recipe, run, new_release)
    read = STAGES if new_release else stages
    if recipe.online is None:  # its pairs are not written yet
        keys = dict.fromkeys(key for stage in read for key in stage.texts)
        check_overlap(recipe.data, run.stage("privatize"), keys, new_release)
    for stage in stages:
        if not stage.releases:
            stage.check_rows(recipe, run, new_release)


def _check_made_by(recipe: Recipe, run: RunDir, name: str) -> None:
    """A stage that is read and does not run, and what it read itself, was made with this recipe's settings.

    Otherwise a result would carry a recipe that does not describe it. The code may be another: the user decides.
    """
    manifest = run.require(name)
    stage = stage_of(name)
    if manifest.get("settings") not in (None, settings_fingerprint(stage, recipe)):
        rule = f"stage '{name}' in {run.root} was made with other settings than this recipe's"
        raise UserError(f"{rule}: start there (--from {name}), or undo the change")
    for upstream in stage.upstream(recipe):
        _check_made_by(recipe, run, upstream)


def resolved(recipe: Recipe, run: RunDir, world: World, names: Collection[str]) -> Recipe:
    """The recipe with a stated `model.dtype` (`numerics.resolve_dtype`). UserError: it lacks preferences, the run
    directory is another recipe's, or what the stages `names` read is not there.
    """
    recipe.data.check_preferences()
    run.check(recipe.name)
    for stage in stages_of(recipe):
        if stage.name in names:
            stage.check_sources(recipe, run)
    from private_rlhf.lm.numerics import resolve_dtype

    model = resolve_dtype(recipe.model, run.saved("model", "dtype"), run.root, world)
    return replace(recipe, model=model)


def execute(
    recipe: Recipe, run: RunDir, selection: Selection, accept_code: bool = False, launcher: Launcher | None = None
) -> None:
    """Run the selected stages that are not up to date, in order.

    accept_code: results of other code stay. launcher: starts the processes of the stages that take several.
    """
    world = join_world()
    recipe = resolved(recipe, run, world, selection.names)
    lines = check(recipe, run, selection, world if launcher is None else World(0, launcher.processes))
    skipped = [line.stage for line in lines if not line.runs and line.stage.name in selection.names]
    accepted = _check_code(skipped, run, accept_code)
    with _claimed(recipe, run, world, accepted, launcher):
        for line in lines:
            if line.runs and launcher is not None and line.stage.launched:
                run.reopen(line.stage.name)  # it would skip a stage that is up to date, though asked for
                launcher.start(line.stage.module_name)
            elif line.runs:
                run_stage(line.stage, recipe, run, world)
            elif world.main and line.stage.name in selection.names:
                say(f"{line.stage.name}: {line.reason}, skipped")


def _check_code(stages: Sequence[Stage], run: RunDir, accept: bool) -> dict[str, dict[str, str]]:
    """The source files of those of `stages` whose results other code made. UserError: the user does not accept them."""
    files = {stage.name: source_files(stage.module_name) for stage in stages}
    changed = {name: run.changed_code(name, now) for name, now in files.items()}
    other = [name for name in files if changed[name]]
    if other and not accept:
        raise UserError(
            f"{', '.join(other)} in {run.root}: made by other code ({named(changed[other[0]])} changed since): "
            f"--accept-code keeps what is there, 'private-rlhf run --from {other[0]}' makes it anew"
        )
    return {name: files[name] for name in other}


def execute_one(name: str, recipe: Recipe, run: RunDir, accept_code: bool = False) -> None:
    """Runs one stage, as `python -m private_rlhf.stages.NAME` does; a complete one is skipped."""
    world = join_world()
    recipe = resolved(recipe, run, world, [name])
    _check_stage(name, recipe)
    stage = stage_of(name)
    reason = _why_run(stage, recipe, run, set())
    if reason is not None:
        _check_needs(recipe, run, [stage], world)
    accepted = _check_code([stage], run, accept_code) if reason is None else {}
    with _claimed(recipe, run, world, accepted):
        if reason is not None:
            run_stage(stage, recipe, run, world)
        elif world.main:
            say(f"{name}: up to date, skipped")


def run_stage(stage: Stage, recipe: Recipe, run: RunDir, world: World) -> None:
    """Runs one stage on every process and writes its manifest from the main one."""
    stages = tuple(each.name for each in stages_of(recipe))
    context = StageContext(recipe, run, world, stage.name, stages)
    for name in stage.upstream(recipe):
        run.require(name)
    stage.check_read(recipe, run)
    if world.main:
        run.reopen(stage.name)
        if not stage.prints:
            (run.root / "metrics.json").unlink(missing_ok=True)  # of other results than the run will hold
        place = f"stage {stages.index(stage.name) + 1} of {len(stages)}"
        say(f"{stage.name}: starts, {place}{rest_of(recipe, run, stages, stage.name)}")
        _claim_checkpoints(stage, context)
    barrier(world)
    started = time.monotonic()
    report: dict[str, Any] = stage.load().run(context)
    barrier(world)
    if world.main:
        seconds = round(time.monotonic() - started, 2)
        files, shards = source_files(stage.module_name), context.folder.glob("*/part-*.parquet")
        released = {f"{path.parent.name}/{path.name}": file_digest(path) for path in shards}
        manifest = {
            "stage": stage.name,
            "fingerprint": stage_fingerprint(stage, recipe, run),
            "settings": settings_fingerprint(stage, recipe),
            "code": digest_of(files),
            "code_files": files,
            "released": fingerprint(released) if released else None,
            "seconds": seconds,
            "peak_rss_mb": peak_rss_mb(),
            "peak_gpu_mb": peak_gpu_mb(),
            "world_size": world.size,
            "commit": commit(),
            "override": recipe.override,
            "declared_public": recipe.data.public_labels,
            "report": report,
        }
        run.complete(stage.name, manifest)
        if all(_is_complete(each, recipe, run) for each in stages_of(recipe) if each.measures):
            write_metrics(run, stages)
        run.stamp(stage.name)
        say(f"{stage.name}: done in {seconds:.0f} s — {report.get('summary', '')}")
    release_memory()
    barrier(world)


def _is_complete(stage: Stage, recipe: Recipe, run: RunDir) -> bool:
    """True for a stage that is complete under this recipe."""
    return (run.manifest(stage.name) or {}).get("fingerprint") == stage_fingerprint(stage, recipe, run)


@contextmanager
def _claimed(
    recipe: Recipe, run: RunDir, world: World, accepted: Mapping[str, dict[str, str]], launcher: Launcher | None = None
) -> Iterator[None]:
    """Hold the run directory for this recipe and this run; the processes of one launcher share it. A refusal in the
    block leaves nothing behind, not even an empty new run. accepted: by stage, files of code that the user accepts."""
    fresh = not run.root.exists()
    barrier(world)  # every process has read the same state before any changes it
    with ExitStack() as held:
        if world.main:
            _lock(run, held)
            _claim(recipe, run)
            for name, files in accepted.items():
                run.accept_code(name, files)
        if launcher is not None:
            held.close()
        barrier(world)
        try:
            yield
        except UserError:
            if fresh and world.main and not any(run.manifest(name) for name in NAMES):
                shutil.rmtree(run.root, ignore_errors=True)
            raise


def _lock(run: RunDir, held: ExitStack) -> None:
    """Lock the directory while `held` is open. UserError: another run works there."""
    with suppress(OSError):  # no locks in this file system; a directory that cannot be made is refused when claimed
        run.root.mkdir(parents=True, exist_ok=True)
        lock = Lock(run.root.resolve())
        if not lock.acquire(0):
            raise UserError(f"--run-dir must be free, got {run.root}, in use: wait for its run or choose another")
        held.callback(lock.release)


def _claim(recipe: Recipe, run: RunDir) -> None:
    from private_rlhf.lm.numerics import numeric_facts

    if changed := changed_keys(recipe, run.recipe()):
        say(f"{run.root} was last started with another {', '.join(changed)}: what depends on it is made anew")
    run.claim(recipe.name, shareable_yaml(recipe), environment() | numeric_facts(recipe.model.dtype))
    if recipe.override:
        say(f"{NOT_PRIVATE}: {recipe.override}")
    for folder in (run.root, *(run.stage(name) for name in NAMES)):
        atomic.sweep_temporaries(folder)


def _claim_checkpoints(stage: Stage, context: StageContext) -> None:
    """Resume state is of this recipe, input and number of processes (where that matters), or set aside."""
    sharing = strategy(os.environ)
    identity = {
        "recipe or input": stage_fingerprint(stage, context.recipe, context.run),
        "number of processes": sharing if stage.any_world and sharing == WHOLE else f"{sharing}, {context.world.size}",
    }
    if notice := claim_checkpoints(context.checkpoints, identity, digest_of(source_files(stage.module_name))):
        say(f"{stage.name}: {notice}")


def run_policies(recipe: Recipe, root: Path, policies: int, accept_code: bool = False) -> RunDir:
    """Run the recipe in `root`, or `policies` > 1 times in root/1, root/2, …; returns the last run.

    Each run asks about answers of the policy before, learns from all answers so far, and starts PPO from that policy;
    π_ref is the same in all. Complete stages stay, and interrupted ones resume. UserError: a recipe without `online`.
    """
    if recipe.online is None:
        raise UserError("the recipe must have a section online, got none: use `private-rlhf run`")
    if policies == 1:
        execute(recipe, RunDir(root), Selection(), accept_code)
        return RunDir(root)
    world, before = join_world(), None
    for number in range(1, policies + 1):
        run, run_recipe = RunDir(root / str(number)), recipe
        if before is not None:
            run_recipe = replace(recipe, online=replace(recipe.online, after=before.root))
            if world.main:
                _share_sft(run_recipe, before, run)
            barrier(world)
        execute(run_recipe, run, Selection(), accept_code)
        before = run
    return run


def _share_sft(recipe: Recipe, before: RunDir, run: RunDir) -> None:
    """The reference policy is the one of the run before: the same files under other names, where the disk allows it."""
    if run.made(("sft",)) == before.made(("sft",)):
        return
    if not (run.root / "recipe.yaml").is_file():  # the dtype that a run began with stands there
        run.claim(recipe.name, shareable_yaml(recipe), environment())
    temporary = run.stage(f".sft.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(before.stage("sft"), temporary, copy_function=_link)
    shutil.rmtree(run.stage("sft"), ignore_errors=True)
    temporary.rename(run.stage("sft"))
    atomic.sync_folder(run.root)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
