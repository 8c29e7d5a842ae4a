"""A GPU that is not there (`support.pretended_gpu`): its checks, in a process that believes in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.pipeline_runs import ROOT
from support.two_processes import run_two


@pytest.mark.parametrize(("checks", "count"), [("pretended_checks.py", 9), ("pretended_aligners.py", 5)])
def test_the_checks_pass(checks: str, count: int) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"tests/rl/{checks}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{count} passed" in done.stdout


def test_two_processes_wait_and_share_as_often_for_many_answers(tmp_path: Path) -> None:
    """PPO and GVPO: the GPUs share gradients, once a step, and the numbers that are logged; answers go by the hosts."""
    folder = run_two("pretended_pair", tmp_path)
    found, other = (json.loads((folder / f"found-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert found == other
    assert found["few"] == found["more"]
    few = found["few"]
    assert few["ppo"]["talks"] == {"elsewhere": few["trained"], "rl.ppo_trainer._step": 1}
    assert few["step"]["talks"] == {"elsewhere": few["trained"], "rl.answer_learner.step": 1}
    assert few["step"]["waits"] == {"rl.answer_learner.step": 1, "lm.distributed.as_number": 1}
    assert few["held out"]["talks"] == {}


def test_the_bench_prints_its_row() -> None:
    command = [sys.executable, "tests/benchmarks/pretended_ppo.py", "--model", "tiny", "--minibatch", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| tiny  | 2 " in done.stdout
