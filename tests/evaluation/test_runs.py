"""Runs on one page: differences are paired by prompt, and only planted ones are called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from private_rlhf.commands.compare import names_of, read_run
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.stats import holm
from private_rlhf.evaluation.runs import MEASURES, Run, compare_runs, differences, page
from support.compared_runs import TERMS, a_run


def said(runs: list[Run]) -> dict[tuple[str, str], str]:
    prompts = [prompt for prompt in runs[0].rows if all(prompt in run.rows for run in runs)]
    lines = [line.strip("| ").split(" | ") for line in page(runs, prompts) if line.count("|") == 6]
    return {(cells[0], cells[1]): cells[-1] for cells in lines[2:]}


def test_a_planted_difference_is_called_and_an_equal_run_is_not() -> None:
    """The gain differs by a tenth of its standard deviation over prompts: plain where paired, invisible where not."""
    found = said([a_run("one", 0.0, 1), a_run("same", 0.0, 2), a_run("better", 0.3, 3), a_run("worse", -0.3, 4)])
    assert found["same", "J"] == "not told apart"
    assert found["better", "J"] == "better"
    assert found["worse", "J"] == "worse"
    assert found["same", "KL"] == "not told apart"


def test_each_run_has_a_row_with_its_rates_j_kl_and_true_reward() -> None:
    run = a_run("one", 0.0, 1)
    for row in run.rows.values():
        row["true_reward"] = 4.0
    lines = [line.strip("| ").split(" | ") for line in page([run, a_run("other", 0.3, 2)], list(run.rows))]
    header, _, row, *_ = [cells for cells in lines if len(cells) == 8 or cells[0].startswith("---")]
    assert header[-3:] == ["J gain", "KL", "true reward"]
    assert row[:2] == ["one", "ppo, 2, 1"]
    assert row[-2].startswith("0.50")
    assert row[-1] == "4.000 [4.000, 4.000]"


def test_a_rate_on_few_judged_prompts_is_withheld() -> None:
    """Eleven of 120 have a verdict: all three rates go, the means stay."""
    run = a_run("one", 0.0, 1)
    for prompt in list(run.rows)[11:]:
        run.rows[prompt]["win"] = None
    lines = page([run, a_run("other", 0.3, 2)], list(run.rows))
    (row,) = (line.strip("| ").split(" | ") for line in lines if line.startswith("| one |"))
    assert row[2] == "withheld: 11 of at least 12"
    assert all(cell.startswith("withheld: 11 of at least ") for cell in row[3:5] if cell != "–")
    assert row[-2].startswith("0.50")


def test_what_no_run_knows_is_left_out() -> None:
    runs = [a_run("one", 0.0, 1, known=False), a_run("other", 0.5, 2, known=False)]
    measures = {what for _, what, _, _ in differences(runs, list(runs[0].rows))}
    assert measures == {"win rate", "KL"}


def test_false_alarms_over_many_equal_runs_are_rare() -> None:
    """20 runs without a difference, 57 tests: a family-wise 5 % error, so 10 repetitions seldom have one call."""
    calls = 0
    for repetition in range(10):
        runs = [a_run(str(number), 0.0, 100 * repetition + number) for number in range(20)]
        calls += any(holm([p for *_, p in differences(runs, list(runs[0].rows))]))
    assert calls <= 3  # more has a chance of 1 in 100


def test_a_gain_that_is_the_same_on_every_prompt_is_called() -> None:
    """J higher by exactly 0.5 on 120 prompts: no spread for t, and no chance either."""
    one = a_run("one", 0.0, 1)
    rows = {prompt: row | {"objective_gain": row["objective_gain"] + 0.5} for prompt, row in one.rows.items()}
    found = said([one, replace(one, name="other", rows=rows)])
    assert found["other", "J"] == "better"
    assert found["other", "KL"] == "not told apart"  # the same, so nothing is said


def test_other_references_are_named() -> None:
    runs = [a_run("one", 0.0, 1), replace(a_run("other", 0.0, 2), reference="another")]
    assert "different reference policies" in "\n".join(page(runs, list(runs[0].rows)))
    assert "different reference policies" not in "\n".join(page(runs[:1] * 2, list(runs[0].rows)))


@pytest.mark.parametrize(
    ("term", "value", "measures"),
    [
        ("kl_coef", "0.1", {"J"}),
        ("truth", "hh_truth", {"J", "true reward"}),
        ("judge", "kind chat, model m", {"win rate"}),
        ("sampling", "temperature 0.7", {"win rate", "J", "KL"}),
    ],
)
def test_what_is_measured_on_other_terms_is_not_compared(term: str, value: str, measures: set[str]) -> None:
    """One line a measure; the rest of that run, and all of a run on the same terms, stays."""
    one, other, same = a_run("one", 0.0, 1), a_run("other", 0.3, 2), a_run("same", 0.3, 3)
    for run in (one, other, same):
        for row in run.rows.values():
            row["true_reward"] = row["objective_gain"]
    runs = [one, replace(other, terms=TERMS | {term: value}), same]
    lines = list(page(runs, list(one.rows)))
    said_so = [line for line in lines if "not comparable" in line]
    assert said_so == [
        f"{what}: not comparable, {term} is {TERMS[term]} in one, {value} in other."
        for what in MEASURES
        if what in measures
    ]
    compared = {(name, what) for name, what, _, _ in differences(runs, list(one.rows))}
    assert compared == {(name, what) for name in ("other", "same") for what in MEASURES} - {
        ("other", what) for what in measures
    }
    assert not any("not comparable" in line for line in page([one, same], list(one.rows)))


def test_the_terms_of_a_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the evaluation, not the recipe of a later start; by the truth where there is one, else the outside judge."""
    monkeypatch.setattr(RunDir, "require", lambda *_: None)
    demo = (Path(__file__).parents[2] / "configs" / "demo.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(demo)
    pair = {"index": 0, "prompt": "p", "policy": "a b", "reference": "a", "true_reward": [2.0, 1.0], "outcome": 0.0}
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "by_prompt.json").write_text(json.dumps([{"index": 0, "kl": 0.1, "objective_gain": 1.0}]))
    stated = {"sft": {"epsilon": 0.5, "kl_coef": 0.05}, "private_dpo": {"epsilon": 0.5, "kl_coef": 0.05}}
    (tmp_path / "evaluate" / "evaluation.json").write_text(json.dumps({"methods": stated}))
    judged = {"reference": {"sha256": "r"}, "judge": {"kind": "chat", "model": "m"}, "pairs": [pair]}
    (tmp_path / "evaluate" / "pairs.json").write_text(json.dumps(judged))
    known = read_run(tmp_path)
    assert known.terms == {
        "judge": "embedded", "truth": "embedded", "kl_coef": "0.05", "sampling": "temperature 1 and top_p 1"
    }  # fmt: skip
    assert (known.epsilon, known.aligner) == (0.5, "dpo")
    assert known.column(['"p"'], "win").tolist() == [1.0]
    judged["pairs"] = [pair | {"true_reward": [None, None]}]
    (tmp_path / "evaluate" / "pairs.json").write_text(json.dumps(judged))
    (tmp_path / "recipe.yaml").write_text(demo.replace("data:\n", "data:\n  evaluation_prompts: evaluation\n"))
    unknown = read_run(tmp_path)
    assert (unknown.terms["judge"], unknown.terms["truth"]) == ("kind chat, model m", "None")
    assert unknown.column(['"p"'], "win").tolist() == [0.0]
    (tmp_path / "evaluate" / "pairs.json").write_text(json.dumps(judged | {"pairs": [pair, pair]}))
    with pytest.raises(UserError, match="must hold each prompt once"):
        read_run(tmp_path)


def test_runs_have_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folders, names in (
        (["a/run", "b/other"], ["run", "other"]),
        (["a/run", "b/run"], ["a/run", "b/run"]),
        ([".", "x|y"], [tmp_path.name, r"x\|y"]),
        (["run", "run"], ["run", "run"]),
    ):
        assert names_of([Path(folder) for folder in folders]) == names


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be two or more"):
        compare_runs([a_run("one", 0.0, 0)])
    with pytest.raises(UserError, match="evaluate"):
        read_run(tmp_path)
