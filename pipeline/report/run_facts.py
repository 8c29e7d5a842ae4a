"""The input of the report: released JSON of one run directory, and nothing beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from private_rlhf.core.documents import MANIFESTS
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir, read_evaluation, releasing_stage

REFERENCE = "sft"
GIBBS = "gibbs"


@dataclass(frozen=True)
class RunFacts:
    """One run as the report sees it; every part but `release`, the manifest of the released labels, may be empty.

    recipe_text, recipe: recipe.yaml as saved and parsed. environment: versions, commit, hardware. manifests: by stage,
    completed ones only, in pipeline order. sft_loss: rows of step, loss (nats). reward_fit: facts of the reward
    fit. ppo_history: one object per iteration of PPO, RLOO or GRPO. evaluation: "methods", "frontier" and so on.
    samples: one object per shown prompt.
    """

    name: str
    release: dict[str, Any]
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    sft_loss: list[dict[str, Any]] = field(default_factory=list)
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
        methods, place = self.evaluation.get("methods") or {}, {REFERENCE: 0, GIBBS: 2}
        order = sorted(methods, key=lambda name: (place.get(name, 1), name))
        return {name: methods[name] for name in order if methods[name]}

    @property
    def synthetic_labels(self) -> bool:
        """True where this program draws the labels of the embedded task; an online run's are its labeller's."""
        return (self.recipe.get("data") or {}).get("preferences") == "embedded" and not self.recipe.get("online")

    @property
    def policy(self) -> str | None:
        """Name of the trained policy's method ("private", "nonprivate", "uncorrected", …), or None."""
        return next((name for name in self.methods if name not in (REFERENCE, GIBBS)), None)


def read_run(run: RunDir, stages: Sequence[str]) -> RunFacts:
    """The facts of `run`, which has these `stages`, in order. UserError: there is no manifest of the released labels (a
    report without a privacy statement is refused), or a file is damaged."""
    recipe_text = _read(run.root / "recipe.yaml", str) or ""
    recipe = loaded if isinstance(loaded := _read(run.root / "recipe.yaml", yaml.safe_load), dict) else {}
    releasing = releasing_stage(recipe)
    release = next(filter(None, (_read(run.stage(releasing) / "release" / name) for name in MANIFESTS)), None)
    if not release:
        raise UserError(f"{run.root} holds no {releasing}/release/{MANIFESTS[0]}: run it first (--only {releasing})")
    aligner = recipe.get("aligner", "ppo")
    manifests = {name: run.manifest(name) for name in stages}  # others may lie there from an earlier recipe
    history = _read(run.stage("sft") / "history.json")
    return RunFacts(
        name=str(recipe.get("name") or run.root.name),
        release=release,
        recipe_text=recipe_text,
        recipe=recipe,
        environment=_read(run.root / "environment.json") or {},
        manifests={name: manifest for name, manifest in manifests.items() if manifest is not None},
        sft_loss=[{"step": step, "loss": loss} for step, loss in (history or {}).get("loss", [])],
        reward_fit=_read(run.stage("reward") / "fit.json") or {},
        ppo_history=_read(run.stage(aligner) / "history.jsonl", _lines) or [],
        evaluation=read_evaluation(run) if (run.stage("evaluate") / "evaluation.json").is_file() else {},
        samples=_read(run.stage("evaluate") / "samples.json") or [],
    )


def _read(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """The content of a file, or None when there is none. UserError where it is damaged."""
    if not path.is_file():
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        raise UserError(f"{path} is damaged: run the stage that writes it again (--from {path.parent.name})") from None


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]
