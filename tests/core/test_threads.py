"""Waiting threads sleep soon, unless the user says otherwise; decided before PyTorch is loaded."""

from __future__ import annotations

import subprocess
import sys

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
