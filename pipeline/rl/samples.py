"""Samples of what the policy says while it learns: ppo/samples.jsonl, and one of them to look at."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from private_rlhf.core import atomic
from private_rlhf.data.render import preview
from private_rlhf.rl.ppo_trainer import PpoTrainer
from private_rlhf.rl.rollout import Rollout

FILE = "samples.jsonl"
SHOWN_WIDTH = 80  # characters


def sample_rows(trainer: PpoTrainer, rollout: Rollout, iteration: int) -> list[dict[str, Any]]:
    """Evenly spaced responses of an iteration as JSON types; none where ppo.sample_every leaves it out.

    A row is {iteration, prompt, response, reward (r̄), bonus (Γ), kl (nats), tokens}, and `extra_rewards` by name where
    there are any. It is a function of the rollout alone, so that an iteration that is repeated gives the same rows.
    """
    settings, total = trainer.config, len(rollout.responses)
    if not settings.sample_every or iteration % settings.sample_every:
        return []
    count = min(settings.sample_count, total)
    return [_row(trainer, rollout, iteration, place * total // count) for place in range(count)]


def _row(trainer: PpoTrainer, rollout: Rollout, iteration: int, row: int) -> dict[str, Any]:
    extra = {reward.name: float(rollout.extra[row, k]) for k, reward in enumerate(trainer.extra_rewards)}
    return {
        "iteration": iteration,
        "prompt": trainer.prompt_of(iteration, row),
        "response": trainer.renderer.text(rollout.responses[row]),
        "reward": float(rollout.reward[row]),
        "bonus": float(rollout.bonus[row]),
        "kl": float(rollout.kl[row]),
        "tokens": len(rollout.responses[row]),
        **({"extra_rewards": extra} if extra else {}),
    }


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Adds rows to a JSON Lines file and forces them to the disk."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def forget_from(path: Path, iteration: int) -> None:
    """Drops the rows from `iteration` on, which is done again, and a last line that a kill cut short.

    The file goes when nothing is left of it.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = [line for line in lines if _before(line, iteration)]
    if kept:
        atomic.write_text(path, "".join(line + "\n" for line in kept))
    else:
        path.unlink()


def _before(line: str, iteration: int) -> bool:
    """Whether a whole line holds a row of an earlier iteration."""
    try:
        return int(json.loads(line)["iteration"]) < iteration
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return False


def shown(row: dict[str, Any]) -> str:
    """A row as one line for the log."""
    return (
        f"{preview(row['prompt'])} → {preview(row['response'], SHOWN_WIDTH)} "
        f"(r̄ {row['reward']:.2f}, Γ {row['bonus']:.2f}, KL {row['kl']:.2f}, {row['tokens']} tokens)"
    )
