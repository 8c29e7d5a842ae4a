"""The input of the report: released JSON of one run directory, and nothing beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import MANIFESTS
from private_rlhf.core.rundir import RunDir, read_evaluation

REFERENCE = "sft"
GIBBS = "gibbs"


@dataclass(frozen=True)
class RunFacts:
    """One run as the report sees it; every part but `release` may be empty.

    Attributes:
        name: of the run.
        recipe_text: recipe.yaml as saved.
        recipe: the same, parsed.
        environment: versions, commit, hardware.
        manifests: stage name -> manifest, completed stages only, in pipeline order.
        release: manifest of the released labels.
        sft_loss: (step, loss in nats per token).
        reward_fit: free-form facts of the reward fit.
        ppo_history: one object per iteration of PPO, RLOO or GRPO.
        evaluation: "methods", "frontier" and so on.
        samples: one object per shown prompt.
    """

    name: str
    release: dict[str, Any]
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    sft_loss: list[tuple[float, float]] = field(default_factory=list)
    reward_fit: dict[str, Any] = field(default_factory=dict)
    ppo_history: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def aligner(self) -> str:
        """Name of the method that trained the policy, in capitals."""
        return str(self.recipe.get("aligner", "ppo")).upper()

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The evaluated methods, π_ref first and the Gibbs yardstick last."""
        methods = self.evaluation.get("methods") or {}
        return {name: methods[name] for name in sorted(methods, key=_method_order) if methods[name]}

    @property
    def policy(self) -> str | None:
        """Name of the trained policy's method ("private", "nonprivate", "uncorrected", …), or None."""
        return next((name for name in self.methods if name not in (REFERENCE, GIBBS)), None)


def _method_order(name: str) -> tuple[int, str]:
    return ({REFERENCE: 0, GIBBS: 2}.get(name, 1), name)


def read_run(run: RunDir, stages: Sequence[str]) -> RunFacts:
    """The facts of `run`, which has these `stages`, in order.

    Raises:
        UserError: there is no manifest of the released labels (a report without a privacy statement is refused), or a
            file is damaged.
    """
    release = next(filter(None, (_json(run.released / "release" / name) for name in MANIFESTS)), None)
    if not release:
        raise UserError(f"{run.root} holds no privatize/release/{MANIFESTS[0]}: run it first (--only privatize)")
    recipe_path = run.root / "recipe.yaml"
    recipe_text = recipe_path.read_text(encoding="utf-8") if recipe_path.is_file() else ""
    recipe = _mapping(recipe_text, recipe_path)
    aligner = recipe.get("aligner", "ppo")
    manifests = {name: run.manifest(name) for name in stages}  # others may lie there from an earlier recipe
    history = _json(run.stage("sft") / "history.json")
    return RunFacts(
        name=str(recipe.get("name") or run.root.name),
        release=release,
        recipe_text=recipe_text,
        recipe=recipe,
        environment=_json(run.root / "environment.json") or {},
        manifests={name: manifest for name, manifest in manifests.items() if manifest is not None},
        sft_loss=[(float(step), float(loss)) for step, loss in (history or {}).get("loss", [])],
        reward_fit=_json(run.stage("reward") / "fit.json") or {},
        ppo_history=_json_lines(run.stage(aligner) / "history.jsonl"),
        evaluation=read_evaluation(run) if (run.stage("evaluate") / "evaluation.json").is_file() else {},
        samples=_json(run.stage("evaluate") / "samples.json") or [],
    )


def _json(path: Path) -> Any:
    """The content of a JSON file, or None when there is none."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise _damaged(path) from None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, or none when there is no file."""
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise _damaged(path) from None


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        raise _damaged(path) from None
    return content if isinstance(content, dict) else {}


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged: run the stage that writes it again (--from {path.parent.name})")
