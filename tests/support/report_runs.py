"""A run directory as the stages would leave it, with settings for what is missing or marked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.release import ReleaseManifest
from private_rlhf.privacy.guarantee import guarantee
from private_rlhf.privacy.keys import PrivacyKey, insecure_seed_key
from private_rlhf.privacy.mechanism import make_mechanism

MakeRun = Callable[..., RunDir]


def estimate(value: float, half: float, n: int = 240) -> dict[str, Any]:
    return {"value": value, "ci_low": round(value - half, 4), "ci_high": round(value + half, 4), "n": n}


def method(win: float | None, kl: float, truth: float, epsilon: float | None, keep: float) -> dict[str, Any]:
    return {
        "generation_win_rate_truth": None if win is None else estimate(win, 0.058),
        "generation_win_rate_rm": None if win is None else estimate(win + 0.06, 0.05),
        "length_controlled_win_rate": None if win is None else estimate(win - 0.02, 0.066),
        "likelihood_win_rate": estimate(0.53 + 0.07 * kl, 0.031, 1000),
        "kl": kl,
        "kl_ci": [0.9 * kl, 1.1 * kl],
        "true_reward": truth,
        "true_reward_ci": [truth - 0.16, truth + 0.16],
        "reward": 0.8 * (truth - 5.1),
        "reward_ci": [0.8 * (truth - 5.1) - 0.1, 0.8 * (truth - 5.1) + 0.1],
        "pessimistic_reward": 0.8 * (truth - 5.1) - 0.3,
        "objective": truth - kl,
        "objective_ci": [truth - kl - 0.2, truth - kl + 0.2],
        "objective_gain": None if win is None else estimate(truth - kl - 5.1, 0.21),
        "response_tokens": 27.4 + kl,
        "distinct_1": 0.212 - 0.03 * kl,
        "distinct_2": 0.61 - 0.07 * kl,
        "epsilon": epsilon,
        "keep_prob": keep,
    }


def history(iterations: int, truth: bool) -> list[dict[str, Any]]:
    noise = np.random.default_rng(0).normal(size=(iterations, 4))
    rows = []
    for step in range(iterations):
        gain = 1 - math.exp(-3 * step / iterations)
        reward = 1.5 * gain + 0.12 * noise[step, 0]
        rows.append(
            {
                "iteration": step + 1,
                "reward": reward,
                "bonus": 0.25 + 0.1 * gain,
                "score": reward - 0.25 - 0.1 * gain,
                "true_reward": 5.1 + 1.4 * gain + 0.15 * noise[step, 1] if truth else None,
                "kl": max(0.0, 0.9 * gain + 0.04 * noise[step, 2]),
                "kl_coef": 0.5 + 0.3 * step / iterations,
                "entropy": 2.1 - 0.3 * gain,
                "policy_loss": -0.01,
                "value_loss": 0.3,
                "clip_fraction": 0.06,
                "approx_kl": 0.01,
                "response_tokens": 27 + 2 * gain + 0.5 * noise[step, 3],
                "finished": 0.9,
                "seconds": {"generate": 4.1, "score": 1.2, "update": 5.6},
                "tokens_per_second": 410.0,
            }
        )
    return rows


def evaluation(name: str, epsilon: float | None, keep: float, gibbs: bool) -> dict[str, Any]:
    methods = {"sft": method(None, 0.0, 5.1, None, 1.0), name: method(0.712, 0.87, 6.42, epsilon, keep)}
    content: dict[str, Any] = {
        "methods": methods,
        "evaluation_labels": "public",
        "longer_answer_baseline": estimate(0.591, 0.031, 1000),
        "judge_notes": ["The truth is VADER sentiment mapped to [0, 8]."],
    }
    if gibbs:
        methods["gibbs"] = method(0.74, 0.61, 6.5, epsilon, keep)
        content["frontier"] = [
            {"kl_coef": c, "kl": kl, "reward": r, "true_reward": 5.1 + 1.2 * r, "objective": 5.1 + 1.2 * r - kl}
            for c, kl, r in (
                (4.0, 0.06, 0.35),
                (2.0, 0.22, 0.72),
                (1.0, 0.61, 1.15),
                (0.5, 1.25, 1.48),
                (0.25, 1.9, 1.66),
            )
        ]
        content["ppo_over_gibbs"] = {"value": 0.82, "ci_low": 0.7, "ci_high": 0.95, "n": 240}
    return content


def samples(name: str) -> list[dict[str, Any]]:
    before = "I went to the market. There were many people, and it was a long day. I did not find what I wanted, but"
    after = (
        "What a wonderful morning at the market! The fruit was fresh, the sellers kind, and we sang on the way home."
    )
    rows = [
        ("Write a sentence about a market.", before, after),
        (
            "Describe a rainy day in two sentences.",
            "Rain falls on the roof. The street is grey and empty, and the bus is late.",
            "The rain sings softly on the roof. Inside, we share warm tea and good stories, happy to be together.",
        ),
        (
            "Tell me about <b>bold</b> plans.",
            "Plans can fail.",
            "<script>alert('reward')</script> & a great, lovely plan!",
        ),
    ]
    return [
        {
            "prompt": prompt,
            "sft": {"text": a, "true_reward": 4.6, "reward": -0.4},
            name: {"text": b, "true_reward": 7.3, "reward": 1.7},
            "gibbs": {"text": b, "true_reward": 7.1, "reward": 1.6},
        }
        for prompt, a, b in rows
    ]


def recipe(epsilon: float, seed: int | None) -> dict[str, Any]:
    return {
        "name": "demo",
        "seed": 0,
        "evaluation_labels": "private",
        "model": {"source": "smollm2", "dtype": "bfloat16"},
        "data": {"preferences": "embedded", "demonstrations": "embedded", "public_labels": math.isinf(epsilon)},
        "privatize": {"epsilon": epsilon, "key_file": "keys/demo.key", "insecure_seed": seed},
        "ppo": {"kl_coef": 0.5},
    }


def reward_fit(epsilon: float | None, keep: float) -> dict[str, Any]:
    return {
        "kappa": 1.0,
        "mode": "head",
        "loss": "private_likelihood",
        "epsilon": epsilon,
        "keep_prob": keep,
        "reward_bound": 8.0,
        "ridge": 10.0,
        "num_pairs": 3900,
        "validation_pairs": 390,
        "validation_log_likelihood": -0.6421,
        "validation_accuracy_debiased": estimate(0.692, 0.024, 390),
        "ridge_path": [
            [0.1, -0.671, 0.006],
            [1.0, -0.655, 0.005],
            [10.0, -0.642, 0.005],
            [100.0, -0.649, 0.004],
            [1000.0, -0.676, 0.003],
        ],
        "calibration": [
            {"predicted": p, "observed": p + d, "ci_low": p + d - 0.08, "ci_high": p + d + 0.08, "n": 65}
            for p, d in ((0.1, 0.03), (0.3, -0.02), (0.5, 0.01), (0.7, 0.02), (0.9, -0.04))
        ],
    }


def write_run(
    root: Path,
    *,
    epsilon: float = 2.0,
    name: str = "private",
    insecure_seed: int | None = None,
    ppo: bool = True,
    truth: bool = True,
    gibbs: bool = True,
    iterations: int = 40,
) -> RunDir:
    mechanism = make_mechanism(epsilon, public=True)
    key = PrivacyKey(bytes(range(32))) if insecure_seed is None else insecure_seed_key(insecure_seed)
    facts = guarantee(mechanism, None if math.isinf(epsilon) else key)
    release = ReleaseManifest(
        "standard", 3900, "embedded", facts, {"identical": 12, "empty": 0, "duplicates": 3}
    ).as_dict()
    content = evaluation(name, facts["epsilon"], facts["keep_prob"], gibbs)
    if not truth:
        for result in content["methods"].values():
            result |= {"generation_win_rate_truth": None, "true_reward": None, "true_reward_ci": None}
        for point in content.get("frontier", []):
            point["true_reward"] = None
    files: dict[str, Any] = {
        "environment.json": {
            "commit": "0123abcd" * 5,
            "dirty": False,
            "code_digest": "ab" * 32,
            "python": "3.11.9",
            "platform": "Linux",
            "cpu_count": 2,
            "versions": {"torch": "2.13.0", "trl": "1.16.0"},
        },
        "privatize/release/_manifest": release,
        "sft/history.json": {"loss": [[10 * step, 1.1 + 1.6 * math.exp(-step / 4)] for step in range(1, 21)]},
        "reward/fit.json": reward_fit(facts["epsilon"], facts["keep_prob"]),
        "evaluate/evaluation.json": content,
        "evaluate/samples.json": samples(name),
    }
    spent = {"privatize": 1.9, "sft": 84.0, "reward": 131.0, "ppo": 470.0, "evaluate": 92.0}
    for stage, seconds in spent.items():
        files[f"{stage}/manifest.json"] = {
            "stage": stage,
            "fingerprint": "f",
            "seconds": seconds,
            "peak_rss_mb": 1000.0 + seconds,
            "world_size": 1,
            "commit": None,
            "report": {"summary": f"{stage} went well"},
        }
    read = {"what": "demonstrations", "read": 560, "too_long": 26, "max_prompt_tokens": 96, "max_text_tokens": 512}
    files["sft/manifest.json"]["report"]["texts"] = [read]
    for path, value in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe(epsilon, insecure_seed), sort_keys=False), encoding="utf-8")
    if ppo:
        (root / "ppo/history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history(iterations, truth)))
    return RunDir(root)
