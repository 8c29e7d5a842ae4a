"""A GPU that is not there (`support.pretended_gpu`): its checks, in a process that believes in it."""

from __future__ import annotations

import subprocess
import sys

from support.pipeline_runs import ROOT


def test_the_checks_pass() -> None:
    checks = "tests/rl/pretended_checks.py"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", checks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "9 passed" in done.stdout


def test_the_bench_prints_its_row() -> None:
    command = [sys.executable, "tests/benchmarks/pretended_ppo.py", "--model", "tiny", "--minibatch", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| tiny  | 2 " in done.stdout
