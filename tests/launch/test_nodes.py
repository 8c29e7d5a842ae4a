"""A stage shared by two nodes, each a launcher of its own on this machine, joined by gloo."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.pipeline_runs import ROOT, TIMEOUT, Workspace, clean_environment, history, read_json
from support.slurm import job

TOLERANCE = 1e-4


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def on_two_nodes(workspace: Workspace, *programs: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """`launch/node.sh` as each of two nodes, which may run different programs."""
    place = {"NODES": "2", "MAIN_PROCESS_IP": "127.0.0.1", "MAIN_PROCESS_PORT": free_port(), "PYTHON": sys.executable}
    launch = ["bash", str(ROOT / "launch" / "node.sh"), "--config_file", str(ROOT / "launch" / "cpu2.yaml")]
    started = [
        workspace.start([*launch, "--num_processes", "2", *program], **place, SLURM_NODEID=str(node))
        for node, program in enumerate(programs)
    ]
    try:
        ends = [process.communicate(timeout=TIMEOUT) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(each.args, each.returncode, *end)
            for each, end in zip(started, ends, strict=True)]  # fmt: skip


def share(workspace: Workspace, stage: str, run: Path) -> None:
    program = ["-m", f"private_rlhf.stages.{stage}", *workspace.options(run)]
    for done in on_two_nodes(workspace, program, program):
        assert done.returncode == 0, done.stderr[-3000:]
    assert read_json(run / stage / "manifest.json")["world_size"] == 2


def without(finished_run: Path, run: Path, stage: str) -> Path:
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / stage)
    return run


def test_two_launchers_learn_what_one_does(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    """One of two processes, which is what one process learns as well (tests/stages/test_two_processes.py)."""
    runs = [without(finished_run, tmp_path / name, "sft") for name in ("one", "two")]
    workspace.launch("sft", runs[0])
    share(workspace, "sft", runs[1])
    expected, found = (read_json(run / "sft" / "manifest.json")["report"]["loss"] for run in runs)
    assert len(expected) == 12
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_a_node_that_is_killed_ends_the_stage_and_both_resume(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    run = without(finished_run, tmp_path / "run", "ppo")
    state, options = run / "checkpoints" / "ppo" / "step-2", workspace.options(run)
    dies = [str(ROOT / "tests" / "support" / "signalled.py"), str(state), str(int(signal.SIGKILL)), "ppo", *options]
    ends = on_two_nodes(workspace, ["-m", "private_rlhf.stages.ppo", *options], dies)
    assert state.exists()
    assert all(done.returncode != 0 for done in ends)
    assert not (run / "ppo" / "manifest.json").exists()
    lines = [done.stderr.splitlines()[-1] for done in ends]
    assert lines[1].endswith("process 1 ended by SIGKILL; run the same command again to resume")
    assert lines[0].startswith("private-rlhf: ")
    share(workspace, "ppo", run)
    for name in ("policy_loss", "value_loss"):
        expected = [entry[name] for entry in history(finished_run)]
        assert [entry[name] for entry in history(run)] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
def test_a_job_of_two_nodes_that_gets_sigterm_is_queued_again_and_ends_the_same(
    workspace: Workspace, finished_run: Path, tmp_path: Path
) -> None:
    """The whole recipe through `slurm.sbatch`, with stand-ins for Slurm's commands; ended while PPO learns."""
    run = tmp_path / "run"
    environment = job(tmp_path, 2) | {"MAIN_PROCESS_PORT": free_port(), "PYTHON": sys.executable}
    environment |= {"SLURM_JOB_NODELIST": "127.0.0.1,localhost", "SLURM_SUBMIT_DIR": str(ROOT)}
    environment |= {"ACCELERATE_CONFIG": "launch/cpu2.yaml"}
    _, config, _, _, *overrides = workspace.options(run)
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), config, str(run), *overrides]
    process = workspace.start(command, **environment)
    state = run / "checkpoints" / "ppo" / "step-2"
    while process.poll() is None and not state.exists():
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=TIMEOUT)
    assert time.monotonic() - started < 30
    assert process.returncode != 0
    assert "[run_pipeline] ppo was stopped by SIGTERM: run the same command again to resume" in error
    assert "the job is queued again and resumes" in error.splitlines()[-1]
    assert "scontrol requeue 1234" in (tmp_path / "slurm.log").read_text(encoding="utf-8")
    done = workspace.finish(command, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    worlds = {name: read_json(run / name / "manifest.json")["world_size"] for name in ("privatize", "sft", "ppo")}
    assert worlds == {"privatize": 1, "sft": 2, "ppo": 2}
    for name in ("policy_loss", "value_loss"):
        expected = [entry[name] for entry in history(finished_run)]
        assert [entry[name] for entry in history(run)] == pytest.approx(expected, abs=TOLERANCE)
    assert "MAIN_PROCESS_PORT" not in clean_environment()
