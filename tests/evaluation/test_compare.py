"""Two checkpoints against each other, end to end on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import UserError
from pipeline.evaluation.compare import compare, load_prompts, sample_text, stored_dtype
from pipeline.lm.tiny import tiny_checkpoint

TEXTS = ["the quick brown fox jumps over the lazy dog", "write one kind sentence about rivers"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return tuple(str(tiny_checkpoint(folder / str(seed), TEXTS, seed)) for seed in (0, 1))  # type: ignore[return-value]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [f"the {word} dog" for word in ("quick", "brown", "lazy", "kind")] + ["the lazy dog " * 600]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return str(path)


def run(models: tuple[str, str], prompts: str, output: Path | None = None, **changes: Any) -> str:
    settings = {"judge": "truth", "output": output, "seed": 0, "limit": None, "max_response_tokens": 6, **changes}
    return compare(*models, prompts, **settings)


def test_the_result_is_printed_and_saved(models: tuple[str, str], prompts: str, tmp_path: Path) -> None:
    line = run(models, prompts, tmp_path / "result.json")
    saved = json.loads((tmp_path / "result.json").read_text())
    assert (saved["prompts"], saved["dropped_long_prompts"], saved["judge"]) == (4, 1, "truth")
    rate = saved["win_rate"]
    assert rate["n"] == 4
    assert rate["value"] == saved["mean_outcome"]["value"]
    assert 0 <= rate["ci_low"] <= rate["value"] <= rate["ci_high"] <= 1
    assert line.startswith(f"win rate by truth: {rate['value']:.3f} [")
    assert run(models, prompts) == line  # seeded
    assert run(models, prompts, limit=2) != line


def test_judges_and_inputs_that_cannot_be_used_are_user_errors(
    models: tuple[str, str], prompts: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--judge vibes: choose"):
        run(models, prompts, judge="vibes")
    for pair in ((str(tmp_path), models[1]), (models[0], str(tmp_path))):
        with pytest.raises(UserError, match=str(tmp_path)):
            run(pair, prompts)
    with pytest.raises(UserError):
        run(models, str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError):
        load_prompts(str(tmp_path / "empty.jsonl"))


def test_samples_are_seeded_and_differ_within_a_prompt(models: tuple[str, str]) -> None:
    first = sample_text(models[0], ["the dog", "the fox"], 3, 0, 6, None)
    assert [len(group) for group in first] == [3, 3]
    assert len(set(first[0])) == 3
    assert sample_text(models[0], ["the dog", "the fox"], 3, 0, 6, None) == first
    assert sample_text(models[0], ["the dog"], 3, 1, 6, None)[0] != first[0]


def test_the_stored_dtype_is_kept(models: tuple[str, str], tmp_path: Path) -> None:
    assert stored_dtype(models[0], "cpu") == "float32"
    with pytest.raises(UserError, match="holds no checkpoint"):
        stored_dtype(str(tmp_path), "cpu")
