"""`run --processes N`: what it starts, and the one line and the exit code that come back."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import launch
from private_rlhf import launcher
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.launcher import Launcher
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from support.pipeline_runs import TINY, Workspace, read_json
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

Start = Callable[[Any], None]


def in_place_of_accelerate(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr(launch, "launch_command", start)
    monkeypatch.setattr(launcher, "on_cpu", lambda: True)


def failing(*failures: tuple[int, str | None], folder: Path) -> Start:
    """Processes that end with an exit code, and leave a message or none."""

    def start(arguments: Any) -> None:
        found = {}
        for rank, (code, message) in enumerate(failures):
            path = folder / f"{rank}.json"
            if message is not None:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv(launcher.ERROR_FILE, str(path))
                    assert launcher.report(message)
            found[rank] = ProcessFailure(rank, 1000 + rank, code, str(path))
        raise ChildFailedError("sft", found)

    return start


@pytest.mark.parametrize(
    ("failures", "code", "line"),
    [
        ([(2, "model.source x: give another"), (2, "model.source x: give another")], 2, "model.source x: give another"),
        ([(1, "the other process is gone"), (2, "lora: name it")], 2, "lora: name it"),
        ([(1, "loss is not finite")], 1, "loss is not finite"),
        ([(3, "2 pairs wait for answers")], 3, "2 pairs wait for answers"),
        ([(-9, None)], 1, "sft: process 0 ended by SIGKILL; run the same command again to resume"),
        ([(1, None)], 1, "sft: process 0 ended with exit code 1; run the same command again to resume"),
        ([(130, "interrupted")], 130, "interrupted; run the same command again to resume"),
    ],
)
def test_a_failure_is_one_line_and_the_exit_code_of_the_stage(
    failures: list[tuple[int, str | None]], code: int, line: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    in_place_of_accelerate(monkeypatch, failing(*failures, folder=tmp_path))
    assert main(["run", "--config", str(TINY), "--processes", "2", "--only", "sft", "model.dtype=float32"]) == code
    lines = [each for each in capsys.readouterr().err.splitlines() if not each.startswith("[private-rlhf]")]
    assert lines == [f"private-rlhf: {line}"]


@pytest.mark.thorough
def test_stages_that_take_several_processes_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []

    def start(arguments: Any) -> None:
        started.append((arguments, dict(os.environ)))
        stage = arguments.training_script.removeprefix("private_rlhf.stages.")
        assert main([stage, *arguments.training_script_args]) == 0

    in_place_of_accelerate(monkeypatch, start)
    for name in ("privatize", "sft"):
        done = {"summary": "nothing learnt"}
        stage = importlib.import_module(f"private_rlhf.stages.{name}")
        monkeypatch.setattr(stage, "run", lambda context, done=done: done)
    options = ["--config", str(TINY), "--data", "embedded", "model.dtype=float32", "privatize.key_file=k.key"]
    for stage in ("privatize", "sft"):
        assert main(["run", "--processes", "2", "--only", stage, *options]) == 0
    ((arguments, environment),) = started
    assert arguments.training_script == "private_rlhf.stages.sft"
    assert (arguments.num_processes, arguments.multi_gpu, arguments.module) == (2, True, True)
    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert launcher.MARK not in os.environ
    before = read_json(Path("runs/tiny/sft/manifest.json"))
    assert main(["run", "--processes", "2", "--only", "sft", *options]) == 0  # asked for: it runs again
    assert len(started) == 2
    assert read_json(Path("runs/tiny/sft/manifest.json"))["fingerprint"] == before["fingerprint"]


def test_every_option_that_changes_the_recipe_reaches_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("private_rlhf.runner.execute", lambda *parts: given.extend(parts))
    options = ["--data", "a: b.jsonl #2", "--accept-reward", "seed=7"]
    assert main(["run", "--config", str(TINY), "--processes", "2", *options]) == 0
    recipe, started = given[0], given[-1]
    assert load_recipe(Recipe, TINY, started.options[4:]) == recipe
    assert (recipe.data.preferences, recipe.reward.accept_coin, recipe.seed) == ("a: b.jsonl #2", True, 7)


def test_one_process_needs_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_place_of_accelerate(monkeypatch, lambda arguments: pytest.fail("launched"))
    monkeypatch.setattr(importlib.import_module("private_rlhf.stages.sft"), "run", lambda context: {"summary": "none"})
    options = ["--config", str(TINY), "--only", "sft", "model.dtype=float32"]
    assert main(["run", "--processes", "1", *options]) == 0


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ([], {"WORLD_SIZE": "2", "RANK": "0"}, "leave out accelerate launch, or --processes"),
        (["sft.batch_size=5"], {}, "sft.batch_size 5 must be a multiple of 2 process"),
        (["sft.batch_size=5", "--dry-run"], {}, "sft.batch_size 5 must be a multiple of 2 process"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_runs(
    options: list[str], environment: dict[str, str], said: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--config", str(TINY), "--processes", "2", "model.dtype=float32", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_accelerate(monkeypatch, lambda arguments: pytest.fail("launched"))
    monkeypatch.setattr(launcher, "on_cpu", lambda: False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    with pytest.raises(UserError, match=r"--processes must be at most 2, the number of GPUs here, got 3: lower it"):
        Launcher(3, []).start("private_rlhf.stages.sft")


def test_an_interrupt_of_the_launcher_is_one_and_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(arguments: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise SignalException("interrupted", signal.SIGINT)

    in_place_of_accelerate(monkeypatch, start)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Launcher(2, []).start("private_rlhf.stages.sft")
    assert signal.getsignal(signal.SIGINT) == before


def test_a_stage_that_nobody_of_ours_launched_prints_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain `accelerate launch` names an error file as well."""
    monkeypatch.setenv(launcher.ERROR_FILE, str(tmp_path / "error.json"))
    assert main(["sft", "--config", "absent.yaml"]) == 2
    assert "absent.yaml" in capsys.readouterr().err
    monkeypatch.setenv(launcher.MARK, "1")
    assert main(["sft", "--config", "absent.yaml"]) == 2
    assert capsys.readouterr().err == ""
    assert "absent.yaml" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


LAUNCH_FOLDER = TINY.parents[1] / "launch"


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["ddp", "single_gpu"])
def test_a_stage_without_the_one_before_it_is_one_line_under_a_file_of_launch(
    file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes; plain `accelerate launch` adds torch's report and a traceback."""
    monkeypatch.chdir(tmp_path)
    place = ["--config_file", str(LAUNCH_FOLDER / f"{file}.yaml"), *(["--num_processes", "2"] if file == "ddp" else [])]
    stage = ["-m", "private_rlhf.stages.ppo", "--config", str(TINY), "--run-dir", "absent", "model.dtype=float32"]
    assert main(["launch", *place, *stage]) == 2
    lines = [each for each in capfd.readouterr().err.splitlines() if not each.startswith("[private-rlhf]")]
    remedy = "run it first (private-rlhf run --only sft)"
    assert lines == [f"private-rlhf: absent has not completed stage 'sft': {remedy}"]


def test_a_file_for_cpus_reaches_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    in_place_of_accelerate(monkeypatch, lambda arguments: seen.append(os.environ.get("ACCELERATE_USE_CPU")))
    for file in ("cpu2", "ddp"):
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        place = ["--config_file", str(LAUNCH_FOLDER / f"{file}.yaml")]
        assert main(["launch", *place, "-m", "private_rlhf.stages.sft"]) == 0
    assert seen == ["true", None]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--config_file", "absent.yaml", "x.py"], "--config_file must be a file, got absent.yaml: give one such as"),
        (["--num_processes", "two", "x.py"], "argument --num_processes/--num-processes: invalid int value: 'two'"),
        (["--multi_gpu", "--tpu", "x.py"], "You can only use one of"),
    ],
)
def test_wrong_options_of_the_launcher_are_one_line(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"private-rlhf: launch: {line}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_two_real_processes(workspace: Workspace, tmp_path: Path) -> None:
    """From an empty cache; a refusal of a started stage is one line, and an interrupt resumes."""
    run, cache = tmp_path / "run", f"model.cache_dir={tmp_path / 'cache'}"
    options = ["--processes", "2", *workspace.options(run, cache)]
    refused = workspace.finish(workspace.command("run", *options, "sft.lora.target_modules=[nonsense]"))
    assert refused.returncode == 2
    assert refused.stderr.count("nonsense") == 1
    assert "Traceback" not in refused.stderr
    process = workspace.start(workspace.command("run", *options))
    stop = threading.Thread(target=interrupt_when, args=(run / "reward" / "manifest.json", process))
    stop.start()
    _, error = process.communicate()
    stop.join()
    assert process.returncode == 130, error[-2000:]
    assert "interrupted; run the same command again to resume" in error
    workspace.run(run, cache, "--processes", "2")
    stages = {name: read_json(run / name / "manifest.json")["world_size"] for name in ("privatize", "sft", "ppo")}
    assert stages == {"privatize": 1, "sft": 2, "ppo": 2}


def interrupt_when(path: Path, process: Any) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
