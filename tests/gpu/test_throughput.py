"""`throughput.py` finishes at a small size and prints its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.pipeline_runs import ROOT, numbers

pytestmark = pytest.mark.gpu


def test_small_models(tmp_path: Path) -> None:
    script, target = ROOT / "tests" / "gpu" / "throughput.py", tmp_path / "figures.json"
    models = ["--model", "tiny", "--shape", "llama", "qwen", "--json", str(target)]
    sizes = ["--rollouts", "4", "--minibatch", "2", "--prompt", "24", "--response", "8", "--iterations", "1"]
    command = [sys.executable, str(script), *models, *sizes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TFLOP/s" in done.stdout
    found = json.loads(target.read_text())["models"]
    assert set(found) == {"llama tiny", "qwen tiny"}
    for model in found.values():
        assert set(model["loops"]) == {"ours, LoRA", "published loop"}
        for name, figures in model["loops"].items():
            assert set(figures["phases"]) == {"generate", "score", "update"}
            assert all(value > 0 for value in numbers(figures["phases"]).values())
            assert name in done.stdout
