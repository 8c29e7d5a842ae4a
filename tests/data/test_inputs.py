"""What π_ref imitates does not depend on which answer was preferred."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.config import parse
from pipeline.core.recipe import Recipe
from pipeline.core.rundir import RunDir
from pipeline.data import inputs
from pipeline.data.inputs import canonical_response


@given(st.text(), st.text())
def test_the_imitated_answer_is_symmetric_in_the_pair(first: str, second: str) -> None:
    assert canonical_response(first, second) == canonical_response(second, first)
    assert canonical_response(first, second) in (first, second)


def test_either_place_is_picked_about_half_of_the_time() -> None:
    picked = sum(canonical_response(f"yes {i}", f"no {i}").startswith("yes") for i in range(1000))
    assert 420 < picked < 580  # five standard deviations of a fair coin; the texts are fixed, so it never flickers


@pytest.mark.parametrize("kind", ["demonstrations", "prompts", "evaluation_prompts"])
def test_the_order_of_a_file_tells_nothing(tmp_path: Path, kind: str) -> None:
    """Both answers of each pair, the preferred one first: what is read, and its digest, is the same the other way."""
    rows = [{"prompt": f"Say {i}.", "response": answer} for i in range(30) for answer in (f"yes {i}", f"no {i}")]
    file = tmp_path / "rows.jsonl"
    tree: dict[str, Any] = {"name": "x", "evaluation_labels": "private", "model": {"source": "tiny"}}
    recipe = parse(Recipe, {**tree, "privatize": {"epsilon": 1.0}, "data": {kind: str(file)}}, "r")
    read = {"demonstrations": inputs.demonstrations, "prompts": inputs.training_prompts,
            "evaluation_prompts": inputs.evaluation_prompts}[kind]
    seen = []
    for order in (rows, rows[::-1]):
        file.write_text("".join(json.dumps(row) + "\n" for row in order))
        seen.append((read(recipe, RunDir(tmp_path / "run")), inputs.input_digest(kind, str(file))))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == (60 if kind == "demonstrations" else 30)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert inputs.input_digest(kind, str(file)) != seen[0][1] or kind != "demonstrations"
