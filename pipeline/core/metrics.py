"""`runs/NAME/metrics.json`: one object per evaluated method, and what the run cost beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir

_BESIDE = ("ppo_over_gibbs", "best_of_four", "longer_answer_baseline")


def write_metrics(run: RunDir, stages: Sequence[str]) -> None:
    """Composes metrics.json from evaluate/evaluation.json and the stage manifests, atomically.

    Does nothing while `evaluate` has not completed. `stages` are those of the recipe; `seconds` counts completed ones;
    `wall_seconds` is their sum; `peak_rss_mb` is the largest of any stage, MiB.

    Raises:
        UserError: evaluate/evaluation.json is missing or damaged although the stage has completed.
    """
    if run.manifest("evaluate") is None:
        return
    all_manifests = {name: run.manifest(name) for name in stages}
    manifests = {name: manifest for name, manifest in all_manifests.items() if manifest is not None}
    evaluation = read_evaluation(run)
    seconds = {name: manifest["seconds"] for name, manifest in manifests.items() if "seconds" in manifest}
    peaks = [manifest["peak_rss_mb"] for manifest in manifests.values() if manifest.get("peak_rss_mb") is not None]
    metrics: dict[str, Any] = dict(evaluation.get("methods") or {})
    metrics |= {
        "seconds": seconds,
        "wall_seconds": round(sum(seconds.values()), 2),
        "peak_rss_mb": max(peaks, default=None),
        "world_size": manifests.get("ppo", manifests["evaluate"]).get("world_size"),
    }
    metrics |= {key: evaluation[key] for key in _BESIDE if evaluation.get(key) is not None}
    atomic.write_json(run.root / "metrics.json", metrics)


def read_evaluation(run: RunDir) -> dict[str, Any]:
    """evaluation.json, with the rates of stage count in the place of those from privatised labels where it has run."""
    content = _object(run, "evaluate", "evaluation.json")
    if run.manifest("count") is not None:
        counted = _object(run, "count", "rates.json")
        for name, metrics in content["methods"].items():
            if name in counted["likelihood_win_rate"]:
                metrics["likelihood_win_rate"] = counted["likelihood_win_rate"][name]
        content |= {name: counted[name] for name in ("longer_answer_baseline", "label_counts")}
    return content


def _object(run: RunDir, stage: str, name: str) -> dict[str, Any]:
    path = run.stage(stage) / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f"{path} is missing or damaged: run the stage again (--from {stage})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no object: run the stage again (--from {stage})")
    return content
