"""The commands beside `run`: keys, releases, samples, the standalone evaluation, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from evaluation.chat_endpoint import serving
from private_rlhf.cli import PANELS, command_line, main
from private_rlhf.commands import doctor
from support.pipeline_runs import TINY, Workspace, read_json, tree

ROWS = [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(60)]
Capture = pytest.CaptureFixture[str]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_the_help_has_every_command_in_a_panel_and_loses_nothing_to_markup(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group = command_line()
    shown = {name for name, command in group.commands.items() if not command.hidden}
    assert shown == {name for names in PANELS.values() for name in names}
    assert main([]) == 2
    bare = capsys.readouterr()
    assert bare.err == ""
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.strip() == bare.out.strip()
    inside = ("─ Start ─", "│ run ", "│ privatize ", "─ Stages ─", "│ sft ", "─ Evidence ─")
    places = [bare.out.index(text) for text in inside]
    assert places == sorted(places)
    assert main(["evaluate", "--help"]) == 0
    assert "openai:URL[#MODEL]" in capsys.readouterr().out


def test_the_version_is_the_distribution_s(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"private-rlhf {version('private-rlhf')}\n"


def test_the_package_is_the_program(tmp_path: Path) -> None:
    """With its exit codes; from another folder than the checkout."""
    for arguments, code, shown in ((["--version"], 0, "private-rlhf "), (["run", "--config", "no.yaml"], 2, "no.yaml")):
        command = [sys.executable, "-m", "private_rlhf", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, shown in done.stdout + done.stderr) == (code, True), done.stderr


def test_a_shell_completes_commands() -> None:
    completing = {"_PRIVATE_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": "private-rlhf ver", "COMP_CWORD": "1"}
    line = [sys.executable, "-c", "import sys; from private_rlhf.cli import main; sys.exit(main())"]
    done = subprocess.run(line, env=os.environ | completing, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["verify-release", "verify-run"]


def test_doctor_names_what_would_go_wrong(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(doctor, "MEMORY_GIB", 0.0)
    monkeypatch.setattr(doctor, "DISK_GIB", 0.0)
    monkeypatch.setattr(doctor, "find_spec", lambda name: importlib.util.find_spec("json"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    names = ["processor", "libraries", "dtype", "threads", "GPU", "key", "disk", "model"]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert not any(" — " in line for line in lines)
    monkeypatch.setattr(doctor, "DISK_GIB", math.inf)
    assert main(["keygen"]) == 0
    assert main(["doctor"]) == 2
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " — " in line] == ["disk"]
    shutil.rmtree(next(tmp_path.rglob("*.state")))
    assert main(["doctor"]) == 2
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " — " in line] == ["key", "disk"]


@pytest.mark.parametrize("data", ["mine.jsonl", "mine.jsonl #2.jsonl", "my/a: b.jsonl", "2024", "a\u200bb 🙂"])
def test_print_config_writes_every_key_out(data: str, capsys: Capture) -> None:
    """A path is taken as it stands, and read back from what is printed."""
    assert main(["print-config", "--config", str(TINY), "--data", data, "ppo.iterations=7"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["ppo"]["iterations"] == 7
    assert printed["ppo"]["clip_range"] == 0.2
    assert printed["data"]["preferences"] == data


def test_privatize_gives_the_same_bytes_again_and_for_every_format(tmp_path: Path, capsys: Capture) -> None:
    key = tmp_path / "owner.key"
    main(["keygen", "--output", str(key)])
    releases = []
    for name, kind in (("first", "jsonl"), ("second", "jsonl"), ("third", "parquet")):
        output = tmp_path / name
        source = write(tmp_path, kind)
        given = ["--data", str(source), "--output", str(output), "--epsilon", "1", "--key", str(key)]
        assert main(["privatize", *given]) == 0
        releases.append(tree(output))
    assert "60 labels released at ε = 1" in capsys.readouterr().out
    assert releases[0] == releases[1]
    rows = [pq.read_table(tmp_path / name / "part-00000.parquet").to_pylist() for name in ("first", "third")]
    assert rows[0] == rows[1]
    assert set(rows[0][0]) == {"prompt", "chosen", "rejected", "record_id"}
    flipped = sum(row["chosen"].startswith("no") for row in rows[0])
    assert 3 <= flipped <= 32  # 60 fair draws at 0.269: outside with probability below 2e-5
    assert main(["privatize", *given]) == 0  # over the same folder, for nothing
    assert tree(tmp_path / "third") == releases[2]
    other = ["--data", str(source), "--output", str(tmp_path / "first"), "--epsilon", "2", "--key", str(key)]
    capsys.readouterr()
    assert main(["privatize", *other]) == 2  # another release is never overwritten
    assert "choose another output folder" in capsys.readouterr().err


@pytest.mark.thorough
def test_answers_have_the_form_that_training_gave_them(finished_run: Path) -> None:
    from private_rlhf.evaluation.checkpoint_comparison import renderer_of

    policy = str(finished_run / "ppo" / "model")
    assert renderer_of(policy, None, None).max_response_tokens == 12
    assert renderer_of(policy, 5, "Be brief.").max_response_tokens == 5
    assert renderer_of(policy, 5, "Be brief.").system_prompt == "Be brief."


def test_sample_prints_answers(finished_run: Path, capsys: Capture) -> None:
    policy = str(finished_run / "ppo" / "model")
    arguments = ["sample", "--policy", policy, "--count", "2", "--max-response-tokens", "4", "Hello there"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith("> Hello there\n  ")
    assert main(arguments) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("kind", ["truth", "rm"])
def test_evaluate_judges_two_checkpoints(finished_run: Path, tmp_path: Path, capsys: Capture, kind: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(6)))
    judge = "truth" if kind == "truth" else f"rm:{finished_run / 'reward' / 'model'}"
    arguments = ["--policy", str(finished_run / "ppo" / "model"), "--reference", str(finished_run / "sft" / "model")]
    arguments += ["--prompts", str(prompts), "--judge", judge, "--max-response-tokens", "6"]
    assert main(["evaluate", *arguments, "--output", str(tmp_path / "result.json")]) == 0
    assert f"win rate by {judge}" in capsys.readouterr().out
    result = read_json(tmp_path / "result.json")
    assert result["prompts"] == 6
    assert set(result["win_rate"]) == {"value", "ci_low", "ci_high", "n"}
    assert 0 <= result["win_rate"]["ci_low"] <= result["win_rate"]["value"] <= result["win_rate"]["ci_high"] <= 1


def test_evaluate_asks_a_chat_model(finished_run: Path, tmp_path: Path, capsys: Capture) -> None:
    model = str(finished_run / "sft" / "model")
    arguments = ["evaluate", "--policy", model, "--reference", model, "--prompts", "embedded", "--limit", "3"]
    arguments += ["--max-response-tokens", "6", "--temperature", "0.7", "--max-prompt-tokens", "200", "--judge-http"]
    with serving() as endpoint:
        judge = f"openai:{endpoint.url}#their-model"
        assert main([*arguments, "--judge", judge, "--output", str(tmp_path / "result.json")]) == 0
    assert f"win rate by {judge}: withheld: 3 of at least 12" in capsys.readouterr().out
    assert {request["model"] for request in endpoint.seen} == {"their-model"}
    result = read_json(tmp_path / "result.json")
    assert (result["temperature"], result["win_rate"]["value"]) == (0.7, 0.5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--judge": "nonsense"}, "--judge must be truth, rm:PATH, lm:PATH, embedding or openai:URL"),
        ({"--judge": "rm:nowhere"}, "--judge rm: must name a checkpoint folder, got nowhere"),
        ({"--judge": "openai:http://judge.example/v1"}, "url must be https for another machine"),
        ({"--temperature": "0"}, "--temperature must be a finite number > 0, got 0"),
        ({"--prompts": "nowhere.jsonl"}, "--prompts must be `embedded` or a file with prompts, got nowhere.jsonl"),
        ({"--reference": "./nowhere"}, "--reference must be a checkpoint folder, a hub id owner/name, got './nowhere'"),
        ({"--output": "/dev/null/result.json"}, "--output must be a file that can be written"),
    ],
)
def test_evaluate_refuses(finished_run: Path, capsys: Capture, changed: dict[str, str], said: str) -> None:
    model = str(finished_run / "sft" / "model")
    options = {"--policy": model, "--reference": model, "--prompts": "embedded", "--judge": "truth", **changed}
    capsys.readouterr()
    assert main(["evaluate", *(part for option in options.items() for part in option)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]


# --- broken files in a run directory ----------------------------------------------------------------------------------


def refused(run: Path, workspace: Workspace, capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["run", *workspace.options(run, *arguments)]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("private-rlhf: ")]
    assert len(said) == 1
    return said[0]


def test_broken_checkpoints_are_named(
    finished_run: Path, workspace: Workspace, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    weights = run / "sft" / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    line = refused(run, workspace, capsys, "--only", "reward")
    assert f"{run / 'sft' / 'model'}" in line
    assert not (run / "reward" / "manifest.json").exists()

    weights.write_bytes(whole)
    shutil.copytree(finished_run / "reward", run / "reward", dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / "reward" / "model" / name).unlink()
    line = refused(run, workspace, capsys, "--only", "ppo")
    assert f"{run / 'reward' / 'model'} must hold a tokenizer" in line

    shutil.copytree(finished_run / "reward", run / "reward", dirs_exist_ok=True)
    (run / "reward" / "model" / "reward_metadata.json").unlink()
    line = refused(run, workspace, capsys, "--only", "ppo")
    assert "reward_metadata.json" in line


def test_a_prompt_over_the_limit_is_named_before_training(
    finished_run: Path, workspace: Workspace, tmp_path: Path, capsys: Capture
) -> None:
    """In the prompts of the last stage, or prompts without a released answer; sft has not started to train."""
    run = tmp_path / "run"
    shutil.copytree(finished_run / "privatize", run / "privatize")
    shutil.copy(finished_run / "recipe.yaml", run)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "word " * 300}) + "\n")
    line = refused(run, workspace, capsys, "--only", "sft", f"data.evaluation_prompts={prompts}")
    assert f"data.evaluation_prompts={prompts}" in line
    assert "over model.max_prompt_tokens = 96" in line
    assert "raise the limit or set model.too_long: drop" in line
    assert not (run / "checkpoints" / "sft" / "checkpoint-4").exists()

    prompts.write_text(json.dumps({"prompt": "Which word did nobody ask for?"}) + "\n")
    keys = (f"data.prompts={prompts}", "aligner=gvpo", "gvpo.released_answers=2")
    line = refused(run, workspace, capsys, "--only", "sft", *keys)
    assert "gvpo.released_answers must be 0 where no released answer to the training prompts is within" in line
    assert not (run / "checkpoints" / "sft" / "checkpoint-4").exists()
