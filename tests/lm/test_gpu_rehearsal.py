"""The GPU checks themselves: all but whole runs, in small on the CPU, so that they do not rot between two GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

from support.pipeline_runs import ROOT


def test_the_rehearsal_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "tests/gpu"]
    environment = {**os.environ, "PRIVATE_RLHF_GPU_REHEARSAL": "1"}
    skipped = "--ignore=tests/gpu/test_runs.py"
    done = subprocess.run([*command, skipped], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
