"""A number is its digits: 1_0 is refused, which Python and YAML 1.1 read as 10."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from private_rlhf.cli import main

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny.yaml"


@pytest.mark.parametrize(
    "arguments",
    [
        ["privatize", "--data=x", "--output=y", "--epsilon=0_5"],
        ["privatize", "--data=x", "--output=y", "--epsilon", "1", "--workers", "1_0"],
        ["ledger", "init", "--i-know=1_0"],
        ["label-filter", "--epsilon=1_0", "--store=s"],
        ["label", "serve", "--store=s", "--port=8_0"],
        ["print-config", f"--config={TINY}", "privatize.epsilon=1_0"],
        ["print-config", f"--config={TINY}", "privatize.epsilon=1_0.5"],
        ["print-config", f"--config={TINY}", "sft.max_steps=1_0"],
    ],
)
def test_digit_groups_are_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert "underscore" in capsys.readouterr().err


def test_a_recipe_that_is_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    assert main(["plan", f"--config={tmp_path / 'recipe.yaml'}"]) == 2
    assert "is a pipe" in capsys.readouterr().err
