"""Two checkpoints against each other, end to end on tiny models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation.chat_endpoint import serving
from private_rlhf.core.atomic import read_rows
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.core.world import World
from private_rlhf.evaluation import checkpoint_comparison as module
from private_rlhf.evaluation.checkpoint_comparison import (
    compare,
    load_prompts,
    load_sampler,
    renderer_of,
    sample_text,
    stored_dtype,
)
from private_rlhf.lm.base_models import tiny_checkpoint
from private_rlhf.recipe import JudgeSettings

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
    settings = {"judge": None, "output": output, "seed": 0, "limit": None, "max_response_tokens": 6, **changes}
    return compare(*models, prompts, **settings)


def test_the_result_is_printed_and_saved(models: tuple[str, str], prompts: str, tmp_path: Path) -> None:
    line = run(models, prompts, tmp_path / "result.json")
    saved = json.loads((tmp_path / "result.json").read_text())
    assert (saved["prompts"], saved["dropped_long_prompts"], saved["judge"]) == (4, 1, {"kind": "truth"})
    rate = saved["win_rate"]
    assert rate["n"] == 4
    assert rate["value"] == saved["mean_outcome"]["value"]
    assert 0 <= rate["ci_low"] <= rate["value"] <= rate["ci_high"] <= 1
    assert line.startswith("withheld: 4 of at least 12; ")
    assert run(models, prompts) == line  # seeded
    assert run(models, prompts, limit=2) != line


def test_the_result_holds_who_was_compared_and_every_answer(
    models: tuple[str, str], prompts: str, tmp_path: Path
) -> None:
    run(models, prompts, tmp_path / "result.json", temperature=0.5)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert [saved[name]["path"] for name in ("policy", "reference")] == list(models)
    assert len({saved[name]["sha256"] for name in ("policy", "reference")}) == 2
    assert (saved["temperature"], saved["seed"], saved["max_response_tokens"]) == (0.5, 0, 6)
    assert [pair["prompt"] for pair in saved["pairs"]] == [f"the {w} dog" for w in ("quick", "brown", "lazy", "kind")]
    assert all({"policy", "reference", "outcome", "policy_score", "reference_score"} <= set(p) for p in saved["pairs"])
    run(models, prompts, tmp_path / "warmer.json", temperature=2.0)
    warmer = json.loads((tmp_path / "warmer.json").read_text())
    assert [p["policy"] for p in warmer["pairs"]] != [p["policy"] for p in saved["pairs"]]
    run(models, prompts, tmp_path / "longer.json", max_prompt_tokens=4096)
    assert json.loads((tmp_path / "longer.json").read_text())["dropped_long_prompts"] == 0


def test_a_judge_that_fails_costs_no_answer_and_no_verdict(
    models: tuple[str, str], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, partial = tmp_path / "result.json", tmp_path / "result.json.partial"
    with serving() as endpoint:
        judge = JudgeSettings(
            url=endpoint.url,
            model="m",
            public=True,
            allow_http=True,
            retries=0,
            concurrency=1,
            request={"temperature": None, "max_tokens": 4},
        )
        endpoint.statuses = [200] * 3 + [500] * 9
        with pytest.raises(RunStopped, match="run the same command again to ask for what is missing"):
            run(models, prompts, output, judge=judge)
        assert {path.name for path in partial.iterdir()} == {"answers-0.jsonl", "verdicts.jsonl"}
        assert not output.exists()

        endpoint.statuses.clear()
        endpoint.seen.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, "load_sampler", lambda *_: pytest.fail("sampled again"))
            line = run(models, prompts, output, judge=judge)
        assert len(endpoint.seen) == 5
        assert not partial.exists()
        saved = json.loads(output.read_text())
        assert saved["judge"] == {"kind": "chat", "url": endpoint.url, "model": "m", "request": {"max_tokens": 4}}
        assert {pair["policy_first"]["text"] for pair in saved["pairs"]} == {"Verdict: tie"}
        assert saved["win_rate"]["value"] == 0.5
        assert line.startswith("withheld: 4 of at least 12; ")

        endpoint.answer = lambda first, second: "Hard to say."
        assert run(models, prompts, judge=judge) == ("no win rate: 4 of 4 pairs left out, their verdicts were unclear")


def test_a_folder_of_somebody_else_is_not_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "result.json.partial" / "thesis.tex"
    theirs.parent.mkdir()
    theirs.touch()
    with pytest.raises(UserError, match=r"partial must hold answers and verdicts only, got thesis\.tex: choose"):
        module.check_output(tmp_path / "result.json")
    theirs.rename(theirs.with_name("answers-3.jsonl"))
    assert module.check_output(tmp_path / "result.json") == theirs.parent


def test_answers_of_another_model_or_seed_are_not_taken(models: tuple[str, str], prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    nobody = JudgeSettings(url="http://127.0.0.1:9/v1", model="m", public=True, allow_http=True, retries=0)
    for changes in ({}, {"seed": 1}, {"temperature": 0.5}, {"models": models[::-1]}):
        with pytest.raises(RunStopped):
            run(**{"models": models, "prompts": prompts, "output": output, "judge": nobody, **changes})
    rows = read_rows(tmp_path / "result.json.partial" / "answers-0.jsonl")
    assert len(rows) == 4 * 8
    policies = {row["of"]: [] for row in rows[::8]}
    for row in rows:
        policies.get(row["of"], []).append(row["answer"])
    assert len({json.dumps(each) for each in policies.values()}) == 4


class Killed(BaseException):
    """What nothing catches."""


def killed_after(count: int) -> Callable[..., Any]:
    """A `load_sampler` whose samplers are killed after so many batches in all."""
    made = iter(range(count))

    def load(*given: Any) -> Callable[..., list[str]]:
        sample = load_sampler(*given)

        def one(*batch: Any) -> list[str]:
            if next(made, None) is None:
                raise Killed
            return sample(*batch)

        return one

    return load


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_killed_comparison_goes_on_at_its_batch_under_any_number_of_processes(
    models: tuple[str, str], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Two batches of two for each policy. What a process other than this one left is taken too, half a line is not, and
    the result has the same bytes as one that nobody killed."""
    monkeypatch.setattr(module, "BATCH", 2)
    run(models, prompts, tmp_path / "whole.json")
    output, partial = tmp_path / "result.json", tmp_path / "result.json.partial"
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_sampler", killed_after(before))
        with pytest.raises(Killed):
            run(models, prompts, output)
    assert sum(len(read_rows(path)) for path in partial.glob("answers-*")) == 2 * before
    if before:
        (partial / "answers-0.jsonl").rename(partial / "answers-7.jsonl")
        with (partial / "answers-7.jsonl").open("a") as file:
            file.write('{"of": "')
    with monkeypatch.context() as patch:
        patch.setattr(module, "load_sampler", killed_after(4 - before))
        run(models, prompts, output)
    assert output.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_two_processes_share_the_batches_that_are_missing(
    models: tuple[str, str], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its turn: together they make every answer once, and those of one process."""
    monkeypatch.setattr(module, "BATCH", 1)
    monkeypatch.setattr(module, "barrier", lambda _: None)
    texts, renderer = load_prompts(prompts)[:4], renderer_of(models[0], 6, None)
    given = (models[0], texts, renderer, "policy", {"seed": 0, "temperature": 1.0})
    alone = module.shared_answers(*given, None, World(0, 1))
    taken = {}
    for rank in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(module, "gather_object", lambda own, rank=rank: taken.setdefault(rank, own) and all_of(alone))
            patch.setattr(module, "kept_answers", lambda *_: {2: alone[2]})
            assert module.shared_answers(*given, tmp_path, World(rank, 2)) == alone
    assert sorted([*taken[0], *taken[1]]) == [(index, alone[index]) for index in (0, 1, 3)]
    assert len(taken[0]) == 2


def all_of(answers: list[str]) -> list[tuple[int, str]]:
    """As every process gets them."""
    return list(enumerate(answers))


def test_a_prompt_that_a_file_repeats_counts_once(models: tuple[str, str], prompts: str, tmp_path: Path) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text(Path(prompts).read_text() * 2)
    run(models, str(twice), tmp_path / "twice.json")
    run(models, prompts, tmp_path / "once.json")
    assert (tmp_path / "twice.json").read_bytes() == (tmp_path / "once.json").read_bytes()


def test_a_prompt_that_one_of_the_two_cannot_take_is_left_out(
    models: tuple[str, str], prompts: str, tmp_path: Path
) -> None:
    """Each checkpoint has its own tokenizer and system message: here the reference's is long."""
    wordy = tmp_path / "wordy"
    shutil.copytree(models[1], wordy)
    (wordy / "rendering.json").write_text(json.dumps({"system_prompt": "the lazy dog " * 20}))
    with pytest.raises(UserError, match="must hold one within 40 tokens for both, got none: raise --max-prompt-tokens"):
        run((models[0], str(wordy)), prompts, max_prompt_tokens=40)
    run((models[0], str(wordy)), prompts, tmp_path / "result.json", max_prompt_tokens=400)
    assert json.loads((tmp_path / "result.json").read_text())["dropped_long_prompts"] == 1


def test_judges_and_inputs_that_cannot_be_used_are_user_errors(
    models: tuple[str, str], prompts: str, tmp_path: Path
) -> None:
    for pair in ((str(tmp_path), models[1]), (models[0], str(tmp_path))):
        with pytest.raises(UserError, match=str(tmp_path)):
            run(pair, prompts)
    with pytest.raises(UserError):
        run(models, str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError):
        load_prompts(str(tmp_path / "empty.jsonl"))


def test_a_prompt_that_is_too_long_to_sample_is_told_without_a_recipe(models: tuple[str, str]) -> None:
    """The remedies were keys of a recipe, which `sample` does not read."""
    with pytest.raises(UserError, match=r"^PROMPT must be within 9 tokens, got one of \d+: shorten it$"):
        sample_text(models[0], ["dog", "the dog " * 20], 1, 0, 6, None, max_prompt_tokens=9)


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
