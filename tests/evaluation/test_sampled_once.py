"""Answers that an interrupted evaluation left are read again, unless a process that is needed has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_rlhf.evaluation import evaluation_sampler
from private_rlhf.evaluation.evaluation_sampler import Answer, PromptResult, once

ANSWER = Answer("Yes.", 2, None, 0.5, 0.25, 0.0)
RESULTS = [PromptResult(3, "Well?", [ANSWER], [ANSWER], [ANSWER, ANSWER])]


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    assert once(path, lambda: RESULTS) == RESULTS
    assert once(path, list) == RESULTS


@pytest.mark.parametrize("another_has_none", [False, True])
def test_processes_that_go_together_measure_or_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_has_none: bool
) -> None:
    path, told = tmp_path / "answers.json", []

    def largest(missing: int, _: torch.device) -> int:
        told.append(missing)
        return max(missing, int(another_has_none))

    monkeypatch.setattr(evaluation_sampler, "largest", largest)
    once(path, lambda: RESULTS, torch.device("cpu"))
    assert once(path, list, torch.device("cpu")) == ([] if another_has_none else RESULTS)
    assert told == [1, 0]
