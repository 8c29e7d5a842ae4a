"""The evaluate stage with a chat model as judge: what is saved, what a failure costs, what the report says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from evaluation.chat_endpoint import serving
from private_rlhf.cli import main
from private_rlhf.evaluation.evaluation_sampler import Sampler
from private_rlhf.lm.model_folders import weights_digest
from support.pipeline_runs import Workspace, read_json

KEY = "sk-not-to-be-found"


def test_a_chat_model_judges_the_evaluation(
    finished_run: Path,
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    before = read_json(run / "evaluate" / "evaluation.json")["methods"]["private"]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving() as endpoint:
        judge = {"url": endpoint.url, "model": "m", "public": "true", "allow_http": "true", "retries": 0}
        keys = [f"evaluate.judge.{name}={value}" for name, value in judge.items()]
        command = ["run", *workspace.options(run, "--from", "evaluate", *keys, "evaluate.judge.concurrency=1")]
        endpoint.statuses = [200] * 7 + [503] * 99
        assert main(command) == 1
        assert "status 503 for all retries: wait, then run the same command again" in capsys.readouterr().err

        # Neither the answers nor the seven verdicts are lost; more requests at a time are no other evaluation.
        endpoint.statuses.clear()
        endpoint.seen.clear()
        endpoint.answer = lambda first, second: "Verdict: A" if len(first) > len(second) else "Hm."
        command[-1] = "evaluate.judge.concurrency=4"
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "measure", lambda *_: pytest.fail("sampled again"))
            assert main(command) == 0

    pairs = read_json(run / "evaluate" / "pairs.json")
    assert len(endpoint.seen) == 2 * len(pairs["pairs"]) - 7
    for name, folder in (("policy", "ppo/model"), ("reference", "sft/model")):
        assert pairs[name] == {"path": folder, "sha256": weights_digest(run / folder)}
    row = pairs["pairs"][-1]
    assert row["index"] == len(pairs["pairs"]) - 1
    assert {row[order]["verdict"] for order in ("policy_first", "reference_first")} >= {"unclear"}
    assert {"prompt", "policy", "reference", "outcome", "true_reward", "reward"} < set(row)

    evaluation = read_json(run / "evaluate" / "evaluation.json")
    rates = evaluation["judge"]["rates"]
    found = read_json(run / "metrics.json")["private"]
    assert found["generation_win_rate_judge"] == rates["win_rate"]
    assert rates["win_rate"]["n"] + rates["unclear_pairs"] == len(pairs["pairs"])
    assert rates["unclear_pairs"] > 0
    assert {key: found[key] for key in before} == before  # as without a judge, after the answers went through a file

    markdown, page = ((run / "report" / name).read_text() for name in ("report.md", "report.html"))
    said = f"{rates['unclear_pairs']} of the {len(pairs['pairs'])} pairs are left out"
    for text in (markdown, page):
        assert said in text
        assert "Generation win rate by the outside judge" in text
        assert "to which prompts and answers were sent" in text
    for path in run.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()


def test_without_a_judge_the_answers_are_saved_all_the_same(finished_run: Path) -> None:
    saved = read_json(finished_run / "evaluate" / "pairs.json")
    assert saved["judge"] is None
    assert len(saved["pairs"]) == 24
    assert saved["pairs"][0]["policy"]
    assert "outside judge" not in (finished_run / "report" / "report.md").read_text()
