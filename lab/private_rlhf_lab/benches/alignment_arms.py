"""The runs behind `alignment_cost.py` and `human_policies.py`: one run directory for each method, ε and seed, made side
by side in lanes.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from private_rlhf.core import atomic
from private_rlhf.core.rundir import RunDir
from private_rlhf.lm.base_models import base_checkpoint
from private_rlhf.privacy.keys import keygen
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.stages.declarations import stage_of


@dataclass(frozen=True)
class Arm:
    """One run. loss: of DPO; None: the recipe's."""

    method: str
    epsilon: float
    seed: int
    loss: str | None = None

    @property
    def name(self) -> str:
        """Of its run directory."""
        loss = f"-{self.loss}" if self.loss else ""
        return f"{self.method}{loss}-eps{self.epsilon:g}-seed{self.seed}"


@dataclass(frozen=True)
class Workshop:
    """Where and how arms are made.

    Attributes:
        home: folder of the run directories, with their keys and logs.
        recipe: that all arms follow.
        overrides: of every arm, before its own.
        lanes: runs at a time; each gets an equal share of the cores.
        commands: what makes an arm of a method, in order; `run`, all its stages, where none are given.
    """

    home: Path
    recipe: Path
    overrides: tuple[str, ...]
    lanes: int
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def run_dir(self, arm: Arm) -> RunDir:
        """Of one arm."""
        return RunDir(self.home / arm.name)

    def make(self, arms: Sequence[Arm]) -> list[str]:
        """Brings every arm to its end: finished ones stay, unfinished ones go on. Returns the names of those that fail.

        π_ref is the same for all arms of a seed: it is trained once and its folder copied.
        """
        recipe, seeds = load_recipe(Recipe, self.recipe, self.overrides), sorted({arm.seed for arm in arms})
        for key in map(self._key, seeds):  # what the first arm would make and others would find half made
            if not key.exists():
                keygen(key)
        base_checkpoint(recipe.model)
        failed = []
        if not stage_of("sft").upstream(recipe):  # π_ref reads nothing that ε changes
            failed = self._in_lanes({f"sft-seed{seed}": partial(self._train_reference, seed) for seed in seeds})
        return failed + self._in_lanes({arm.name: partial(self._align, arm) for arm in arms})

    def arm_overrides(self, arm: Arm) -> list[str]:
        """What makes the recipe that of one arm; at equal seeds labels, flips and prompts are the same."""
        epsilon = ".inf" if math.isinf(arm.epsilon) else repr(arm.epsilon)
        loss = [f"{arm.method}.loss={arm.loss}"] if arm.loss else []
        return [*self._seeded(arm.seed), f"privatize.epsilon={epsilon}", f"aligner={arm.method}", *loss]

    def _key(self, seed: int) -> Path:
        return self.home / "keys" / f"seed{seed}.key"

    def _seeded(self, seed: int) -> list[str]:
        own = [f"seed={seed}", f"data.label_seed={seed}", f"privatize.key_file={self._key(seed)}"]
        # The arms are compared, coins among them; the non-private one reads the labels as they are.
        own += ["reward.accept_coin=true", "data.public_labels=true"]
        return [*self.overrides, *own]

    def _train_reference(self, seed: int) -> int:
        return self._command("sft", f"sft-seed{seed}", self._seeded(seed))

    def _align(self, arm: Arm) -> int:
        adopt_reference(RunDir(self.home / f"sft-seed{arm.seed}"), self.run_dir(arm))
        commands, overrides = self.commands.get(arm.method, ["run"]), self.arm_overrides(arm)
        return next((code for command in commands if (code := self._command(command, arm.name, overrides))), 0)

    def _command(self, command: str, name: str, overrides: Sequence[str]) -> int:
        """`private-rlhf COMMAND` on the run directory `name`: its exit code. What it prints goes to logs/NAME.log."""
        log = self.home / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        options = ["--config", str(self.recipe), "--run-dir", str(self.home / name)]
        threads = str(max(1, (os.cpu_count() or 1) // self.lanes))
        with log.open("a", encoding="utf-8") as file:
            return subprocess.run(
                [sys.executable, "-m", "private_rlhf.cli", command, *options, *overrides],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": threads},
                check=False,
            ).returncode

    def _in_lanes(self, jobs: dict[str, Callable[[], int]]) -> list[str]:
        """Runs the jobs, as many at a time as there are lanes; returns the names of those that fail."""
        failed = []
        with ThreadPoolExecutor(self.lanes) as pool:
            waiting = {pool.submit(job): name for name, job in jobs.items()}
            try:
                for future in as_completed(waiting):
                    name, code = waiting[future], future.result()
                    if code:
                        failed.append(name)
                    outcome = f"exit code {code}, see {self.home / 'logs' / f'{name}.log'}" if code else "done"
                    print(f"{name}: {outcome}", file=sys.stderr, flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # runs that have started end, or resume next time
                raise
        return failed


def adopt_reference(source: RunDir, run: RunDir) -> None:
    """Copies a finished stage sft into `run` unless it has that one; the runner decides whether it fits the recipe."""
    made, own = source.manifest("sft"), run.manifest("sft")
    if made is None or (own is not None and own.get("fingerprint") == made.get("fingerprint")):
        return
    run.root.mkdir(parents=True, exist_ok=True)
    if not (run.root / "recipe.yaml").is_file():  # a run directory is known by it
        shutil.copy(source.root / "recipe.yaml", run.root / "recipe.yaml")
    with atomic.new_folder(run.stage("sft")) as folder:
        shutil.copytree(source.stage("sft"), folder, dirs_exist_ok=True)
