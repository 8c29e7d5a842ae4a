"""Decided before PyTorch and tqdm are loaded: waiting threads sleep soon, and bars in files are calm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from private_rlhf.core.environment import WAITING, wait_briefly
from support.pipeline_runs import clean_environment

NAMES = ("OMP_WAIT_POLICY", *WAITING)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "7")
    wait_briefly()
    import os

    assert {each: os.environ.get(each) for each in NAMES} == {each: "7" if each == name else None for each in NAMES}


@pytest.mark.parametrize("start", ["import private_rlhf.stages", "from private_rlhf import cli; cli.main(['--help'])"])
def test_both_ways_to_start_a_stage_set_it_before_pytorch(start: str) -> None:
    code = f"{start}\nimport os, sys\nassert 'torch' not in sys.modules\nprint(os.environ['GOMP_SPINCOUNT'])"
    environment = {name: value for name, value in clean_environment().items() if name not in NAMES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split()[-1] == WAITING["GOMP_SPINCOUNT"]


def test_a_bar_that_goes_to_a_file_prints_its_start_and_its_end() -> None:
    code = (
        "import private_rlhf.stages, time; from tqdm import tqdm\nfor _ in tqdm(range(40)):\n"
        "    for _ in tqdm(range(2), leave=False): time.sleep(0.01)"
    )
    environment = {name: value for name, value in clean_environment().items() if not name.startswith("TQDM_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    outer = [line for line in done.stderr.split("\r") if "/40" in line]
    assert len(outer) <= 3  # without: ten a second
    assert "40/40" in outer[-1]
    assert "\x1b" not in done.stderr


@pytest.mark.thorough
def test_a_stage_bar_in_a_file_has_no_line_for_each_step(tmp_path: Path) -> None:
    """Stage sft of the tiny recipe: a loss at each step, and a bar that shows its start, its end and little between."""
    recipe = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"
    options = ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--only", "sft"]
    environment = {name: value for name, value in clean_environment().items() if name != "TQDM_MININTERVAL"}
    command = [sys.executable, "-m", "private_rlhf.cli", "run", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert 1 <= done.stderr.count("loss=") <= 3
