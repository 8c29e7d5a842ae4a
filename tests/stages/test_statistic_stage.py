"""Central label-DP in a run: the door to the one noisy sum, what it costs, what it tells, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_rlhf import runner
from private_rlhf.audit import twins
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World
from private_rlhf.data.release import read_release
from private_rlhf.privacy import counts as law
from private_rlhf.privacy.card import privacy_card, render_markdown
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Ledger
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe, parse
from private_rlhf.reward_models.basis import FeatureBasis
from private_rlhf.reward_models.central import GRID, load_statistic
from private_rlhf.stages import privatize
from private_rlhf.stages import statistic as stage
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import stage_of
from scipy.stats import binom
from support.pipeline_runs import TINY, Workspace, read_json, tree
from support.recipes import recipe_of

pytestmark = pytest.mark.usefixtures("quick_disk")
BASIS = FeatureBasis(torch.eye(3, dtype=torch.float64))
Make = Callable[..., StageContext]
Row = dict[str, Any]


def rows_of(first: int, count: int) -> list[Row]:
    return [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(first, first + count)]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own_recipe(data: Path, workspace: Workspace) -> Recipe:
    """Of a run that reads nothing but these preferences."""
    own = ("data.public_labels=false", "evaluation_labels=private", "data.demonstrations=release",
           "data.prompts=release", "data.evaluation_prompts=evaluation", "model.dtype=float32", "sft.max_steps=2",
           "sft.batch_size=4", "sft.save_steps=2", "privatize.epsilon=0.5", "privatize.trust=holder",
           f"data.preferences={data}", f"model.cache_dir={workspace.root / 'cache'}")  # fmt: skip
    return load_recipe(Recipe, TINY, own)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keygen(tmp_path / "owner.key")


@pytest.fixture
def context(tmp_path: Path, key: Path) -> Make:
    def make(data: Path, labels: str = "private", **own: Any) -> StageContext:
        given = {
            "name": "x",
            "evaluation_labels": labels,
            "model": {"source": "tiny"},
            "privatize": {"epsilon": 1.0, "key_file": str(key), "trust": "holder", **own},
            "data": {"preferences": str(data), "public_labels": labels == "public"},
        }
        return StageContext(parse(Recipe, given, "r"), RunDir(tmp_path / "run"), World(rank=0, size=1), "privatize")

    return make


def door(given: StageContext, matrix: np.ndarray, basis: FeatureBasis = BASIS) -> list[int]:
    """s̃ in integers, as the stage's file has it."""
    at = replace(given, name="statistic")
    stage.released_sum(at, matrix, 1.0, basis)
    statistic, _ = load_statistic(at.folder / "sum")
    return (statistic.value * GRID).round().long().tolist()


def matrix_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-GRID // 4, GRID // 4, (count, 3))


def said_yes(given: StageContext) -> np.ndarray:
    """Which released pairs have the label +1, by hand: every true label prefers `yes`."""
    return np.array([str(row.chosen).startswith("yes") for row in read_release(given.folder / "release")])


def total(key: Path) -> tuple[float, float, int]:
    facts = Ledger.open(load_key(key)).show()
    return facts["epsilon_total"], facts["delta_total"], len(facts["releases"])


def test_the_release_holds_no_label_and_the_sum_is_that_of_the_true_ones(
    tmp_path: Path, key: Path, context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With draws of 0 in place of the noise, which has variance 1 even at the largest ε."""
    monkeypatch.setattr(law.DiscreteGaussian, "draw", lambda noise, bits: 0)
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 60)), epsilon=1e16)
    privatize.run(given)
    release, matrix = read_release(given.folder / "release"), matrix_of(54)
    assert (release.manifest.labelled, release.manifest.noise.factor) == (False, 0.0)
    assert 10 < said_yes(given).sum() < 44
    assert door(given, matrix) == matrix[said_yes(given)].sum(axis=0).tolist()
    assert read_json(given.run.stage("statistic") / "sum" / "statistic.json")["delta"] == 1e-6


def test_the_release_is_the_same_bytes_whatever_the_labels(tmp_path: Path, context: Make) -> None:
    rows, found = rows_of(0, 60), []
    for turned in (0, 1):
        data = write(tmp_path / "raw.jsonl", [
            {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if turned and i % 2 else row
            for i, row in enumerate(rows)])  # fmt: skip
        given = context(data, labels="public")
        privatize.run(given)
        found.append(tree(given.folder / "release"))
    assert found[0] == found[1]


def test_a_sum_is_paid_once_and_adds_to_randomised_response(tmp_path: Path, key: Path, context: Make) -> None:
    data = write(tmp_path / "raw.jsonl", rows_of(0, 60))
    given, matrix = context(data, labels="public"), matrix_of(54)
    privatize.run(given)
    assert total(key) == (0.0, 0.0, 0)  # pairs without labels cost nothing
    first = door(given, matrix)
    assert door(given, matrix) == first
    assert total(key) == (1.0, 1e-6, 1)
    assert door(given, matrix + 1) != first  # another question, other noise
    assert total(key) == (2.0, 2e-6, 2)
    privatize.run(context(data, trust=None, epsilon=0.5))  # the same labels by randomised response
    assert total(key) == (2.5, 2e-6, 3)
    with pytest.raises(UserError, match=r"over the budget of 3 per event: .* 2\.5 and this release would make it 3\.5"):
        door(context(data, labels="public", budget=3.0), matrix_of(54, seed=2))
    assert total(key) == (2.5, 2e-6, 3)


def test_a_label_never_changes(tmp_path: Path, key: Path, context: Make) -> None:
    rows = rows_of(0, 60)
    given = context(write(tmp_path / "raw.jsonl", rows), labels="public")
    privatize.run(given)
    door(given, matrix_of(54))
    for row in rows:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    given = context(write(tmp_path / "raw.jsonl", rows), labels="public")
    with pytest.raises(UserError, match="run again with --from privatize"):
        door(given, matrix_of(54))
    privatize.run(given)
    with pytest.raises(UserError, match="are not those that were released before under this key"):
        door(given, matrix_of(54))
    assert total(key) == (1.0, 1e-6, 1)


def test_a_run_that_dies_after_it_paid_gives_the_same_sum(
    tmp_path: Path, key: Path, context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 60)), labels="public")
    privatize.run(given)
    drawn: list[list[int]] = []

    def dies(statistic: Any, *_: Any) -> None:
        drawn.append((statistic.value * GRID).round().long().tolist())
        raise RuntimeError("dies")

    with monkeypatch.context() as patched:
        patched.setattr(stage, "save_statistic", lambda folder, *given: dies(*given))
        with pytest.raises(RuntimeError, match="dies"):
            door(given, matrix_of(54))
    assert not (given.run.stage("statistic") / "sum").exists()
    assert total(key) == (1.0, 1e-6, 1)
    assert door(given, matrix_of(54)) == drawn[0]
    assert total(key) == (1.0, 1e-6, 1)


# --- attack -----------------------------------------------------------------------------------------------------------


def hits(given: StageContext, count: int) -> int:
    """Canaries, each alone in a coordinate of its own, whose coin the best guess from s̃ finds. The labels of
    `rows_of` are coins: which response is response_a is a bit of a hash.
    """
    matrix = np.eye(count, dtype=np.int64) * GRID
    found = np.array(door(given, matrix, FeatureBasis(torch.eye(count, dtype=torch.float64))))
    return int(((found > GRID / 2) == said_yes(given)).sum())


def test_no_canary_is_found_more_often_than_epsilon_allows(
    tmp_path: Path, context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 canaries, one-sided, 0.1 % false alarms; at half the noise they are found too often."""
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 1000)), labels="public", delta=0)
    privatize.run(given)
    most = int(binom.isf(1e-3, 900, LabelNoise.of(1.0).keep_prob))
    assert 540 < hits(given, 900) <= most  # the guess is right 1 - e^(-1/2)/2 = .70 of the time, at most .73
    monkeypatch.setattr(law, "l1_sensitivity", lambda rows: GRID // 2)
    assert hits(given, 900) > most


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privatize": {"epsilon": math.inf}, "data": {"public_labels": True}}, "needs a finite epsilon and a key"),
        ({"privatize": {"insecure_seed": 1}}, "needs a finite epsilon and a key"),
        ({"privatize": {"trust": None, "delta": 1e-6}}, "delta must go with trust: holder"),
        ({"privatize": {"delta": 1.0}}, "less than 1"),
        ({"privatize": {"trust": "nobody"}}, "'labeller' or 'holder'"),
        ({"privatize": {"max_events_per_person": 2, "labeler_column": "who"}}, "keeps no account per person"),
        ({"privatize": {"labeler_column": "who"}}, "needs delta: 0"),
        ({"privatize": {"budget": 1.5}}, "must be at least 2, got 1.5"),
        ({"aligner": "dpo"}, "DPO learns from labels"),
        ({"reward": {"mode": "lora"}}, r"fitted by reward\.mode head"),
        ({"reward": {"loss": "debiased"}}, r"fitted by reward\.mode head"),
        ({"reward": {"uncertainty": {"kind": "ensemble"}}}, r"uncertainty\.kind must be fisher"),
        ({"data": {"demonstrations": "release_preferred"}}, "so none is preferred"),
        ({"online": {"labeller": "page", "folder": "x"}}, "online learns from answers"),
    ],
)
def test_what_a_recipe_may_not_ask_for(changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"privatize": {"epsilon": 1.0, "trust": "holder"}}
    for name, value in changes.items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=said):
        recipe_of(**given)


def test_another_pooling_is_another_sum() -> None:
    recipes = (load_recipe(Recipe, TINY, own) for own in ((), ("reward.pooling=last_sum",)))
    plain, pooled = (runner._settings(stage_of("statistic"), recipe) for recipe in recipes)
    assert pooled == plain | {"reward.pooling": "last_sum"}


def test_what_the_stages_refuse(
    tmp_path: Path, key: Path, context: Make, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "raw.jsonl", [{**row, "who": "ann"} for row in rows_of(0, 60)])
    given = context(data)
    privatize.run(given)
    with pytest.raises(UserError, match="is not what the privatise stage released"):
        door(given, matrix_of(53))
    for adopting in (context(given.folder / "release"), context(given.folder / "release", trust=None)):
        with pytest.raises(UserError, match="is a released bundle, and a noisy sum"):
            privatize.run(adopting)
    capsys.readouterr()
    assert main(["attack", str(given.folder / "release")]) == 2
    assert "holds pairs without labels, so there is none to attack" in capsys.readouterr().err
    assert main(["verify-release", str(given.folder / "release")]) == 0
    assert "54 pairs without labels, of which one noisy sum is released at ε = 1 and" in capsys.readouterr().out
    with pytest.raises(UserError, match="verify-run compares runs whose released labels are the same"):
        twins.check_twins(own_recipe(data, workspace), tmp_path / "twins")
    manifest = given.folder / "release" / "_manifest"
    stated = json.loads(manifest.read_text())
    (given.folder / "release" / "_signature").unlink()
    for wrong in ({"delta": 2}, {"keep_prob": 0.7, "flip_prob": 0.3}):
        manifest.write_text(json.dumps(stated | {"guarantee": stated["guarantee"] | wrong}))
        with pytest.raises(UserError, match="states a noisy sum without delta"):
            read_release(given.folder / "release")
    others = write(tmp_path / "others.jsonl", [{**row, "who": "ann"} for row in rows_of(100, 60)])
    capped = context(others, labels="private", trust=None, labeler_column="who", max_events_per_person=60)
    other = replace(capped, run=RunDir(tmp_path / "capped"))
    privatize.run(other)
    with pytest.raises(UserError, match="releases at most 60 labels of a person"):
        privatize.run(context(data))


# --- pages ------------------------------------------------------------------------------------------------------------


def test_the_card_says_who_must_be_trusted(tmp_path: Path, key: Path, context: Make) -> None:
    given = context(write(tmp_path / "raw.jsonl", rows_of(0, 60)))
    privatize.run(given)
    door(given, matrix_of(54))
    facts = Ledger.open(load_key(key)).card_facts()
    text = render_markdown(privacy_card(read_release(given.folder / "release").manifest.as_dict(), ledger=facts))
    assert "| Who must be trusted | the holder of the labels and the key, and the machine that adds up" in text
    assert "| Epsilon per event | 1 at delta 1e-06 |" in text
    assert "| Largest total of any event under this key | 2 at delta 1e-06 |" in text  # a bound: with evaluation labels
    assert "54 events at 1 at delta 1e-06 (one noisy sum, on top)" in text
    assert "Realised alpha" not in text
    privatize.run(context(write(tmp_path / "raw.jsonl", rows_of(0, 60)), trust="labeller"))
    text = render_markdown(privacy_card(read_release(given.folder / "release").manifest.as_dict(), ledger=facts))
    assert "| Who must be trusted | whoever holds the raw labels or the key, until each label is randomised" in text


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_else_of_a_run_depends_on_a_label(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twins with other labels, whose one noisy sum is made the same: every file is, up to the reward."""
    monkeypatch.setattr(twins, "check_twins", lambda *_: None)
    monkeypatch.setattr(stage, "sum_of_labels", lambda rows, matrix, *_: [GRID // 2] * matrix.shape[1])

    def execute(recipe: Recipe, run: RunDir) -> None:
        for name in ("privatize", "sft", "statistic", "reward"):
            runner.execute(recipe, run, runner.Selection(only=name))

    recipe = own_recipe(write(tmp_path / "mine.jsonl", rows_of(0, 120)), workspace)
    found = twins.verify(recipe, tmp_path / "twins", execute, runner.NAMES)
    assert found is not None
    assert found.comparison.leaks == ()
    assert found.turned >= 60
    assert found.comparison.compared > 20


@pytest.mark.slow
def test_a_whole_run_pays_once_on_one_process_or_two(workspace: Workspace, tmp_path: Path) -> None:
    own = ("privatize.trust=holder", f"privatize.key_file={tmp_path / 'owner.key'}", "data.public_labels=false")
    own += ("evaluation_labels=private", "sft.max_steps=2", "ppo.iterations=1", "ppo.rollouts=4")
    one, two = tmp_path / "one", tmp_path / "two"
    workspace.run(one, *own)
    card = read_json(one / "report" / "card.json")
    assert (card["epsilon_total_per_event"], card["delta_total"]) == (4.0, 1e-6)  # with the evaluation labels'
    assert "Who must be trusted: the holder of the labels" in (one / "report" / "report.html").read_text()
    assert "Who must be trusted" in (one / "ppo" / "model" / "README.md").read_text()
    before = tree(one / "reward" / "model")
    workspace.run(one, "--from", "statistic", *own)
    assert tree(one / "reward" / "model") == before
    assert read_json(one / "report" / "card.json")["epsilon_total_per_event"] == 4.0
    for name in ("privatize", "sft"):
        workspace.run(two, "--only", name, *own)
    for name in ("statistic", "reward"):
        workspace.launch(name, two, *own)
    rows = [load_statistic(run / "statistic" / "sum")[0].x for run in (one, two)]
    norms = [torch.linalg.vector_norm(x, dim=1) for x in rows]  # a basis is one up to signs
    assert torch.allclose(*norms, rtol=1e-3)
    assert read_json(two / "reward" / "fit.json")["num_pairs"] == 200


