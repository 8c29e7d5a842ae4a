"""A whole run whose evaluation asks for noisy counts of the true labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from private_rlhf.embedded import task
from support.pipeline_runs import Workspace, read_json


@pytest.mark.slow
def test_the_evaluation_reads_noisy_counts_and_the_card_adds_them_up(workspace: Workspace, tmp_path: Path) -> None:
    pairs = list(dict.fromkeys(task.load_pairs("train")))[:400]
    rows = [{"prompt": pair.prompt, "chosen": pair.response_a, "rejected": pair.response_b} for pair in pairs]
    data = tmp_path / "raw.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (
        "data.public_labels=false",
        "data.demonstrations=release",
        f"data.preferences={data}",
        f"privatize.key_file={tmp_path / 'owner.key'}",  # the workspace's has released other labels
        "privatize.epsilon=1",
        "privatize.count_epsilon=0.75",
        "evaluation_labels=laplace",
        "sft.max_steps=2",
        "ppo.iterations=1",
    )
    run = tmp_path / "run"
    workspace.run(run, *own)
    counted = read_json(run / "count" / "rates.json")["label_counts"]
    assert set(counted["counts"]) == {"sft", "private", "longer_answer"}
    assert counted["epsilon_per_count"] == 0.25
    assert read_json(run / "count" / "counts.json")["counts"] == counted["counts"]
    metrics = read_json(run / "metrics.json")
    for method in ("sft", "private"):
        rate = metrics[method]["likelihood_win_rate"]
        assert rate["n"] == 32
        assert metrics[method]["likelihood_win_rate_like_length"] is None  # would ask the labels once more
        assert metrics[method]["likelihood_prefers_longer"]["n"] == 32
        assert abs(rate["value"] * 32 - counted["counts"][method]) <= 16  # ties count half
    longer = metrics["longer_answer_baseline"]["value"] * 32 - counted["counts"]["longer_answer"]
    assert 0 <= longer <= 16  # equally long ones count half
    card = read_json(run / "report" / "card.json")
    assert card["epsilon_total_per_event"] == 1.75
    assert [release.get("kind") for release in card["releases"]] == [None, "counts"]
    workspace.run(run, "--from", "evaluate", *own)  # the same question again
    assert read_json(run / "report" / "card.json")["epsilon_total_per_event"] == 1.75
