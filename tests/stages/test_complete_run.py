"""One complete tiny run from the command line: what it leaves behind, and what a second one does."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from private_rlhf.cli import main
from private_rlhf.embedded import task
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.reward_models.scorer import load_scorer
from private_rlhf.stages.declarations import NAMES
from support.other_machines import copy_key, move_to
from support.outside import imported, quick_start, run_outside
from support.pipeline_runs import STAGES, Workspace, read_json, stages_started, timeless, tree
from transformers import AutoTokenizer

INTERVALS = ("generation_win_rate_truth", "generation_win_rate_rm", "likelihood_win_rate")
PLAIN = ("kl", "true_reward", "objective", "keep_prob")
OF_A_METHOD = {
    "generation_win_rate_truth", "generation_win_rate_rm", "length_controlled_win_rate", "decided_win_rate",
    "agreement_rm", "likelihood_win_rate", "likelihood_win_rate_like_length", "likelihood_prefers_longer",
    "kl", "kl_ci", "reward", "reward_ci", "pessimistic_reward",
    "pessimistic_reward_ci", "true_reward", "true_reward_ci", "objective", "objective_ci", "objective_gain",
    "response_tokens", "distinct_1", "distinct_2", "kl_coef", "epsilon", "keep_prob",
}  # fmt: skip
OF_THE_RUN = {
    "sft", "private", "gibbs", "seconds", "wall_seconds", "peak_rss_mb", "world_size", "best_of_four",
    "longer_answer_baseline",
}  # fmt: skip


def copy_of(run: Path, target: Path) -> Path:
    shutil.copytree(run, target)
    return target


def test_every_stage_completes(finished_run: Path) -> None:
    for stage in STAGES:
        manifest = read_json(finished_run / stage / "manifest.json")
        assert manifest["stage"] == stage
        assert manifest["world_size"] == 1
        assert manifest["seconds"] >= 0
        assert manifest["peak_rss_mb"] > 0
    page = (finished_run / "report" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "ε = 2" in page


def test_metrics_have_the_promised_schema(finished_run: Path) -> None:
    metrics = read_json(finished_run / "metrics.json")
    for method in ("sft", "private"):
        for name in INTERVALS:
            value = metrics[method].get(name)
            assert set(value) == {"value", "ci_low", "ci_high", "n"}
            assert 0 <= value["ci_low"] <= value["value"] <= value["ci_high"] <= 1
            assert value["n"] in (24, 32)
        for name in PLAIN:
            assert isinstance(metrics[method][name], float)
        for name in ("kl", "true_reward", "objective"):
            low, high = metrics[method][f"{name}_ci"]
            assert low <= metrics[method][name] <= high
        assert metrics[method]["epsilon"] == 2.0
        assert metrics[method]["keep_prob"] == pytest.approx(0.8807970779)
    assert set(metrics) == OF_THE_RUN
    assert [set(metrics[method]) for method in ("sft", "private", "gibbs")] == [OF_A_METHOD] * 3
    assert metrics["sft"]["kl"] == 0
    assert set(metrics["seconds"]) == set(STAGES)
    assert metrics["wall_seconds"] == pytest.approx(sum(metrics["seconds"].values()), abs=0.01)
    assert metrics["peak_rss_mb"] > 100
    assert metrics["world_size"] == 1


def test_a_run_is_compared_with_itself(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(finished_run), str(finished_run)]) == 0
    page = capsys.readouterr().out
    assert page.count("not told apart") == 4
    assert "| win rate | 0.000 [0.000, 0.000] | 1 |" in page


def test_checkpoints_carry_their_card_and_their_rendering(finished_run: Path) -> None:
    sft, ppo = ((finished_run / stage / "model" / "README.md").read_text(encoding="utf-8") for stage in ("sft", "ppo"))
    assert "No preference label was read" in sft
    assert "| Epsilon per event | 2 |" in ppo
    for stage in ("sft", "reward", "ppo"):
        rendering = read_json(finished_run / stage / "model" / "rendering.json")
        assert rendering == {"system_prompt": None, "max_response_tokens": 12, "chat_template_kwargs": {}}
    weights = finished_run / "ppo" / "model" / "model.safetensors"
    assert weights.stat().st_mode & 0o777 == 0o644


@pytest.mark.thorough
def test_models_work_where_this_package_is_not(finished_run: Path) -> None:
    """Their cards' programs run; prompts are those of the stage; stage evaluate wrote its results."""
    folders = [finished_run / stage / "model" for stage in ("sft", "reward", "ppo")]
    assert {name for folder in folders for name in imported(quick_start(folder))} == {"torch", "transformers"}
    printed = run_outside(*folders)
    scorer = load_scorer(folders[1], load_recipe(Recipe, finished_run / "recipe.yaml", []).model, use_bonus=False)
    inside = scorer.score(["Name a river."] * 2, ["The Rhine is a lovely river.", "No."]).reward
    assert ast.literal_eval(printed[1]) == pytest.approx(inside.tolist(), abs=1e-5)
    for folder in (folders[0], folders[2]):
        plain = AutoTokenizer.from_pretrained(folder)
        turns = [{"role": "user", "content": "Name a river."}]
        ids = plain.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids == scorer.renderer.prompt_ids("Name a river.")
    card = (folders[2] / "README.md").read_text(encoding="utf-8")
    assert "win rate against sft/model by the truth, on held-out prompts: " in card
    places = [card.index(f"## {section}") for section in ("Quick start", "Results", "Files", "Privacy card")]
    assert places == sorted(places)
    assert "held-out pairs: accuracy" in (folders[1] / "README.md").read_text(encoding="utf-8")


def test_nothing_that_can_run_code_is_released(finished_run: Path) -> None:
    files = [path for path in finished_run.rglob("*") if path.is_file()]
    suffixes = {path.suffix for path in files if path.name not in {"_manifest", "_signature"}}  # both are JSON
    assert suffixes <= {".json", ".jsonl", ".yaml", ".safetensors", ".jinja", ".parquet", ".md", ".html"}
    checkpoints = finished_run / "checkpoints"
    assert not checkpoints.exists() or not any(checkpoints.iterdir())
    assert not list(finished_run.rglob(".*"))


def test_the_environment_and_the_resolved_recipe_are_saved(finished_run: Path) -> None:
    environment = read_json(finished_run / "environment.json")
    assert {"commit", "dirty", "code_digest", "versions", "python", "cpu_count"} <= set(environment)
    assert environment["versions"]["trl"]
    assert "clip_range: 0.2" in (finished_run / "recipe.yaml").read_text()  # defaults are written out


def test_a_second_run_skips_everything(workspace: Workspace, finished_run: Path) -> None:
    before = tree(finished_run)
    done = workspace.run_here(finished_run)
    assert stages_started(done) == []
    after = tree(finished_run)
    assert {name for name in before if before[name] != after.get(name)} <= {"environment.json", "recipe.yaml"}


@pytest.mark.thorough
def test_a_changed_ppo_key_runs_ppo_and_what_follows(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    done = workspace.run_here(run, "ppo.iterations=2")
    assert stages_started(done) == ["ppo", "evaluate", "report"]
    assert "ppo: starts, stage 4 of 6 [#" in done.stderr
    assert len((run / "ppo" / "history.jsonl").read_text().splitlines()) == 2
    for stage in ("privatize", "sft", "reward"):
        assert tree(run / stage) == tree(finished_run / stage)


def plan_of(capsys: pytest.CaptureFixture[str], workspace: Workspace, run: Path, *arguments: str) -> dict[str, str]:
    assert main(["run", *workspace.options(run, "--dry-run", *arguments)]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[1:]]
    return {line[0]: f"{line[1]}: {line[2]}" for line in lines if line and line[0] in NAMES}


def test_dry_run_prints_the_plan_and_writes_nothing(
    workspace: Workspace, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    before = tree(tmp_path)
    assert all(line == "skip: up to date" for line in plan_of(capsys, workspace, run).values())
    plan = plan_of(capsys, workspace, run, "reward.kappa=0.5")
    assert [name for name, line in plan.items() if line.startswith("run")] == ["reward", "ppo", "evaluate", "report"]
    assert "'reward' runs again; up to " in plan["ppo"]
    seconds = read_json(run / "ppo" / "manifest.json")["seconds"]
    assert plan["ppo"].endswith(f" GiB, its last run here took {seconds:.0f} s")
    plan = plan_of(capsys, workspace, run, "--from", "evaluate")
    assert plan["ppo"] == "skip: not selected"
    assert [name for name, line in plan.items() if line.startswith("run")] == ["evaluate", "report"]
    assert all(line.startswith("run: not run yet; ") for line in plan_of(capsys, workspace, tmp_path / "new").values())
    assert tree(tmp_path) == before


def test_only_runs_one_stage(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "run")
    done = workspace.run_here(run, "--only", "report")
    assert stages_started(done) == ["report"]
    changed = {name for name, content in tree(finished_run).items() if tree(run).get(name) != content}
    assert all(name.split("/")[0] in {"report", "metrics.json", "environment.json", "recipe.yaml"} for name in changed)


# --- labels ----------------------------------------------------------------------------------------------------------


def released_rows(run: Path) -> list[dict[str, str]]:
    shards = sorted((run / "privatize" / "release").glob("*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def test_the_release_has_the_promised_columns_and_no_other(finished_run: Path) -> None:
    for name in ("release", "evaluation"):
        for shard in (finished_run / "privatize" / name).glob("*.parquet"):
            assert pq.read_schema(shard).names == ["prompt", "chosen", "rejected", "record_id"]


def test_released_labels_are_flipped_as_often_as_promised(finished_run: Path) -> None:
    """False alarm below 1e-5 (five standard errors of a share of about 0.12)."""
    pairs = task.load_pairs("train")
    true_choice = {
        (pair.prompt, frozenset((pair.response_a, pair.response_b))): pair.response_a if label > 0 else pair.response_b
        for pair, label in zip(pairs, task.draw_labels(pairs, 0), strict=True)
    }
    rows = released_rows(finished_run)
    flipped = sum(
        true_choice[row["prompt"], frozenset((row["chosen"], row["rejected"]))] != row["chosen"] for row in rows
    )
    share, expected = flipped / len(rows), 1 - 0.8807970779
    assert flipped > 0
    assert abs(share - expected) < 5 * (expected * (1 - expected) / len(rows)) ** 0.5


def test_the_ledger_has_the_release_and_refuses_changed_labels(
    workspace: Workspace, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = read_json(finished_run / "privatize" / "manifest.json")["report"]["ledger"]
    assert ledger["epsilon_total"] == 2.0
    assert "embedded" in {entry["source"] for entry in ledger["releases"]}  # other tests share the key
    assert {entry["status"] for entry in ledger["releases"]} == {"released"}
    code = main(["run", *workspace.options(tmp_path / "run", "data.label_seed=1"), "--only", "privatize"])
    assert code == 2
    assert "another label" in capsys.readouterr().err
    assert not (tmp_path / "run" / "privatize" / "release").exists()


@pytest.mark.thorough
def test_sft_does_not_depend_on_the_labels(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    """Other true labels, same everything else: the release differs in z alone, and π_ref not in one byte."""
    run, key = tmp_path / "run", tmp_path / "copy.key"
    copy_key(workspace.root / "owner.key", key)  # without its ledger, which would refuse changed labels
    move_to(tmp_path)
    other = ("data.label_seed=1", f"privatize.key_file={key}")
    workspace.run_here(run, "--only", "privatize", *other)
    workspace.run(run, "--only", "sft", *other)  # as the other one was: its bytes are compared
    ours, theirs = released_rows(run), released_rows(finished_run)
    assert [row["record_id"] for row in ours] == [row["record_id"] for row in theirs]
    swapped = [mine["chosen"] != other["chosen"] for mine, other in zip(ours, theirs, strict=True)]
    assert any(swapped)
    assert not all(swapped)
    for mine, other in zip(ours, theirs, strict=True):
        assert {mine["chosen"], mine["rejected"]} == {other["chosen"], other["rejected"]}
    ours_sft, theirs_sft = tree(run / "sft"), tree(finished_run / "sft")
    for files in (ours_sft, theirs_sft):
        files.pop("manifest.json")
    assert ours_sft == theirs_sft
    manifests = [timeless(read_json(folder / "sft" / "manifest.json")) for folder in (run, finished_run)]
    for manifest in manifests:
        del manifest["fingerprint"], manifest["settings"]  # of the recipe, which names the label seed
    assert manifests[0] == manifests[1]
    releases = [read_json(folder / "privatize" / "release" / "_manifest") for folder in (run, finished_run)]
    for release in releases:
        release.pop("files", None)
        release.pop("shards", None)
    assert releases[0] == releases[1]


def test_the_key_is_in_no_released_file(workspace: Workspace, finished_run: Path) -> None:
    secret = (workspace.root / "owner.key").read_text().split()[-1]
    assert re.fullmatch("[0-9a-f]{64}", secret)
    texts = [content for content in tree(finished_run).values() if content is not None]
    assert not [content for content in texts if secret.encode() in content or bytes.fromhex(secret) in content]
    beside = {path.name for path in (workspace.root / "owner.key.state").rglob("*")} | {"owner.key"}
    assert len(beside) > 1
    assert not beside & {path.name for path in finished_run.rglob("*")}
