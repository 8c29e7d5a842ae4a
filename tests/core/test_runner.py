"""What the runner would do on a directory of stages that look complete: skip, rerun, resume, refuse."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.core import code
from private_rlhf.core.errors import UserError
from private_rlhf.core.rundir import RunDir
from private_rlhf.core.world import World, declared_world
from private_rlhf.privacy.keys import Lock
from private_rlhf.recipe import Recipe
from private_rlhf.recipe.load import to_tree
from private_rlhf.recipe.recipe import shareable_yaml
from private_rlhf.runner import Selection, plan, stage_fingerprint
from private_rlhf.stages.context import StageContext
from private_rlhf.stages.declarations import STAGES, stage_of, stages_of
from support.recipes import recipe_of
from support.stub_stages import Body, stub_stages

ALONE = World(rank=0, size=1)
CODE = {"pipeline/one.py": "1", "pipeline/two.py": "2"}


def recipe(**sections: Any) -> Recipe:
    data = {"preferences": "embedded", **sections.get("data", {})}
    return recipe_of(**{"name": "one", "model": {"source": "tiny", "dtype": "float32"}, **sections, "data": data})


NAMES = tuple(stage.name for stage in stages_of(recipe()))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source files are constant here; their own test undoes this."""
    monkeypatch.setattr(runner, "source_files", lambda *_: CODE)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Every stage of `recipe()` complete."""
    directory = RunDir(tmp_path / "run")
    complete(directory, recipe())
    return directory


def complete(directory: RunDir, done: Recipe, names: tuple[str, ...] = NAMES) -> None:
    directory.claim(done.name, shareable_yaml(done), {})
    for name in names:
        fingerprint, files = stage_fingerprint(stage_of(name), done, directory), runner.source_files()
        said = {"stage": name, "fingerprint": fingerprint, "code": code.digest_of(files), "code_files": files}
        directory.complete(name, said)


def running(given: Recipe, directory: RunDir, **selection: str) -> list[str]:
    return [line.stage.name for line in plan(given, directory, Selection(**selection)) if line.runs]


# --- the stage table --------------------------------------------------------------------------------------------------


def test_stages_stand_after_what_they_read() -> None:
    for position, stage in enumerate(STAGES):
        assert set(stage.reads) <= set(runner.NAMES[:position])


def test_every_section_of_the_recipe_changes_some_stage() -> None:
    fields = set(Recipe.__dataclass_fields__) - {"effort"}  # which is in the sizes that it gave
    named = {section for stage in STAGES for section in stage.sections}
    assert {section for section in named if "." not in section} == fields
    tree = to_tree(recipe())
    assert all(key in tree[section] for section, _, key in (name.partition(".") for name in named) if key)


def test_a_recipe_has_the_stages_of_its_aligner() -> None:
    assert NAMES == ("privatize", "sft", "reward", "ppo", "evaluate", "report")
    for aligner in ("dpo", "rloo", "grpo", "gvpo"):
        given = recipe(aligner=aligner)
        names = [stage.name for stage in stages_of(given)]
        assert names == ["privatize", "sft", "reward", aligner, "evaluate", "report"]
        for stage in stages_of(given):
            assert "ppo" not in stage.upstream(given)


@pytest.mark.parametrize("aligner", ["dpo", "rloo", "grpo", "gvpo"])
def test_another_aligner_keeps_what_comes_before_it(run: RunDir, aligner: str) -> None:
    assert running(recipe(aligner=aligner), run) == [aligner, "evaluate", "report"]


@pytest.mark.parametrize(("aligner", "other"), [("ppo", "dpo"), ("dpo", "ppo"), ("rloo", "grpo")])
def test_the_other_aligner_is_no_stage(run: RunDir, aligner: str, other: str) -> None:
    given, line = recipe(aligner=aligner), f"stage {other} is not in this recipe: set aligner={other}"
    with pytest.raises(UserError, match=line):
        runner.check(given, run, Selection(only=other), ALONE)
    with pytest.raises(UserError, match=line):
        runner.execute_one(other, given, run)


# --- skip and rerun ---------------------------------------------------------------------------------------------------


def test_a_complete_run_does_nothing(run: RunDir) -> None:
    assert running(recipe(), run) == []
    assert {line.reason for line in plan(recipe(), run, Selection())} == {"up to date"}


def test_an_empty_directory_runs_everything(tmp_path: Path) -> None:
    lines = plan(recipe(), RunDir(tmp_path), Selection())
    assert [line.stage.name for line in lines if line.runs] == list(NAMES)
    assert {line.reason for line in lines} == {"not run yet"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"privatize": {"epsilon": 2.0}}, ("privatize", *NAMES[2:])),  # π_ref imitates nothing of the release here
        ({"privatize": {"epsilon": 2.0}, "data": {"demonstrations": "release"}}, NAMES),
        ({"privatize": {"epsilon": 2.0}, "data": {"demonstrations": "release_preferred"}}, NAMES),
        ({"sft": {"epochs": 2}}, NAMES[1:]),
        ({"reward": {"kappa": 2.0}}, NAMES[2:]),
        ({"ppo": {"kl_coef": 0.2}}, NAMES[3:]),
        ({"ppo": {"sample_every": 3, "sample_count": 2, "report_to": ["wandb"], "report_samples": True}}, ()),  # shown
        ({"evaluate": {"num_prompts": 3}}, NAMES[4:]),
        ({"seed": 1}, NAMES[1:]),  # the randomiser has its own key
        ({"data": {"limit": 5}}, NAMES),
        ({"model": {"source": "smollm2"}}, NAMES[1:]),
        ({"name": "two"}, NAMES[5:]),
    ],
)
def test_a_changed_section_reruns_its_stage_and_those_downstream(
    changed: dict[str, Any], expected: tuple[str, ...], run: RunDir
) -> None:
    assert running(recipe(**changed), run) == list(expected)


def test_reasons_tell_the_cause_from_the_consequence(run: RunDir) -> None:
    reasons = {line.stage.name: line.reason for line in plan(recipe(reward={"kappa": 2.0}), run, Selection())}
    assert reasons["sft"] == "up to date"
    assert reasons["reward"] == "recipe or input changed"
    assert reasons["ppo"] == "its input 'reward' runs again"


def test_changed_code_is_said_and_trains_nothing_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment in a plot's module once threw away SFT, the reward and half of PPO."""
    other = {**CODE, "pipeline/two.py": "3"}
    monkeypatch.setattr(runner, "source_files", lambda *_: other)
    assert running(recipe(), run) == []
    reasons = {line.stage.name: line.reason for line in plan(recipe(), run, Selection())}
    assert reasons["sft"] == "up to date, made by other code (pipeline/two.py)"
    complete(run, recipe(), ("sft",))  # what was made anew by other code is another input
    assert running(recipe(), run) == ["reward", "ppo", "evaluate", "report"]


@contextmanager
def held(directory: RunDir) -> Iterator[None]:
    """Another run works in the directory."""
    lock = Lock(directory.root.resolve())
    assert lock.acquire(0)
    try:
        yield
    finally:
        lock.release()


def test_changed_code_asks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage that imports it; then the user says whether the results stay, once."""
    ran = stub_stages(monkeypatch)
    other = {**CODE, "pipeline/two.py": "3"}
    monkeypatch.setattr(runner, "source_files", lambda name: other if name.endswith(".sft") else CODE)
    line = r"^sft in .*: made by other code \(pipeline/two.py changed since\): --accept-code keeps .* --from sft' makes"
    with pytest.raises(UserError, match=line):
        runner.execute(recipe(), run, Selection())
    with pytest.raises(UserError, match=line):
        runner.execute_one("sft", recipe(), run)
    runner.execute_one("reward", recipe(), run)  # its own code is the same, and that of others is their own affair
    with held(run), pytest.raises(UserError, match="in use"):  # a refused run accepts nothing
        runner.execute(recipe(), run, Selection(), accept_code=True)
    with held(run), pytest.raises(UserError, match="in use"):
        runner.execute_one("sft", recipe(), run, accept_code=True)
    with pytest.raises(UserError, match=line):
        runner.execute(recipe(), run, Selection())
    runner.execute(recipe(), run, Selection(), accept_code=True)
    runner.execute(recipe(), run, Selection())
    assert ran == []
    runner.execute(recipe(), run, Selection(start="sft"))
    assert ran == list(NAMES[1:])
    runner.execute(recipe(), run, Selection())


def test_results_of_earlier_versions_stay(run: RunDir) -> None:
    """They say nothing of the files they were made of."""
    for name in NAMES:
        fingerprint = stage_fingerprint(stage_of(name), recipe(), run)
        run.complete(name, {"stage": name, "fingerprint": fingerprint, "code": "of all files"})
    assert {line.reason for line in plan(recipe(), run, Selection())} == {"up to date"}


def test_a_rerun_stage_reruns_what_reads_it_even_when_the_recipe_is_the_same(run: RunDir) -> None:
    """A stage that was completed again under another recipe carries another fingerprint."""
    complete(run, recipe(sft={"epochs": 2}), ("sft",))
    assert running(recipe(sft={"epochs": 2}), run) == ["reward", "ppo", "evaluate", "report"]


def test_an_incomplete_stage_resumes(run: RunDir) -> None:
    run.reopen("ppo")
    run.checkpoints("ppo").mkdir(parents=True)
    lines = {line.stage.name: line for line in plan(recipe(), run, Selection())}
    assert (lines["ppo"].runs, lines["ppo"].reason) == (True, "resumes")
    assert lines["evaluate"].reason == "its input 'ppo' runs again"
    assert not lines["reward"].runs


def test_a_changed_prompt_file_reruns_ppo(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    given = recipe(data={"prompts": str(prompts)})
    directory = RunDir(tmp_path / "run")
    complete(directory, given)
    assert running(given, directory) == []
    prompts.write_text('{"prompt": "two"}\n')
    assert running(given, directory) == ["ppo", "evaluate", "report"]


def test_changed_raw_preferences_rerun_privatize_and_leave_no_digest_in_the_run(tmp_path: Path) -> None:
    from private_rlhf.data.raw_source import RawSource
    from private_rlhf.privacy.keys import keygen

    raw, key = tmp_path / "raw.jsonl", tmp_path / "keys" / "k"
    raw.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    keygen(key)
    data = {"preferences": str(raw), "demonstrations": "embedded"}
    given = recipe(data=data, privatize={"epsilon": 1.0, "key_file": str(key)})
    directory = RunDir(tmp_path / "run")
    complete(directory, given)
    RawSource(given.data, given.privatize, directory.root).remember_input()
    assert running(given, directory) == []
    raw.write_text('{"prompt": "p", "chosen": "b", "rejected": "a"}\n')
    lines = plan(given, directory, Selection())
    assert lines[0].reason == "raw input changed"
    assert [line.stage.name for line in lines if not line.runs] == ["sft"]


def test_labels_that_were_released_anew_rerun_what_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run was killed in between: by the recipe alone the reward of the old labels is up to date."""
    labels = ["old"]

    def release(context: StageContext) -> dict[str, Any]:
        if context.name == "privatize":
            (context.folder / "release").mkdir(parents=True, exist_ok=True)
            (context.folder / "release" / "part-00000.parquet").write_text(labels[0])
        return {}

    stub_stages(monkeypatch, release)
    directory = RunDir(tmp_path / "run")
    runner.execute(recipe(), directory, Selection())
    for labels[0], rerun in (("old", []), ("new", ["reward", "ppo", "evaluate", "report"])):
        runner.execute(recipe(), directory, Selection(only="privatize"))
        assert running(recipe(), directory) == rerun


def test_a_run_goes_on_from_the_results_of_the_run_before(tmp_path: Path) -> None:
    """Its candidates are answers of that policy, and its reward is fitted to those labels too."""
    before, run = RunDir(tmp_path / "1"), RunDir(tmp_path / "2")
    data, online = {"public_labels": True}, {"after": str(before.root)}
    given, stage = recipe_of(name="one", data=data, online=online), stage_of("online")
    with pytest.raises(UserError, match="has not completed stage 'ppo'"):  # before sft is trained
        stage.check_sources(given, run)
    made = []
    for released, code_of_ppo in ((None, "a"), ("1", "a"), ("2", "a"), ("2", "b")):
        facts = {"epsilon": 1.0, "labeller": "truth"}
        before.complete("online", {"fingerprint": "a", "report": facts, "released": released})
        before.complete("ppo", {"fingerprint": "a", "code": code_of_ppo})
        stage.check_sources(given, run)
        made.append(stage_fingerprint(stage, given, run))
    assert len(set(made)) == 4
    assert stage.inputs(given).keys() == {*stage.inputs(replace(given, online=None)), str(before.root)}


def test_the_reference_of_a_chain_is_that_of_its_first_run(tmp_path: Path) -> None:
    """Also after the recipe changed: trained anew in each run, it may differ in each."""
    first, second = RunDir(tmp_path / "1"), RunDir(tmp_path / "2")
    for epochs in (1, 2):
        given = recipe(sft={"epochs": epochs})
        complete(first, given, ("sft",))
        (first.stage("sft") / "weights").write_text(str(epochs))
        runner._share_sft(given, first, second)
        assert second.made(("sft",)) == first.made(("sft",))
        assert (second.stage("sft") / "weights").read_text() == str(epochs)
        (first.stage("sft") / "weights").unlink()


# --- selections -------------------------------------------------------------------------------------------------------


def test_from_runs_the_stage_and_what_follows(run: RunDir) -> None:
    assert running(recipe(), run, start="reward") == ["reward", "ppo", "evaluate", "report"]
    assert running(recipe(sft={"epochs": 2}), run, start="ppo") == ["ppo", "evaluate", "report"]


def test_a_stage_that_is_read_must_be_of_this_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation would else call an uncorrected policy private, or give J at another coefficient."""
    stub_stages(monkeypatch)
    directory = RunDir(tmp_path / "run")
    runner.execute(recipe(), directory, Selection())
    for changed, stage in (
        ({"reward": {"loss": "uncorrected"}}, "reward"),
        ({"ppo": {"kl_coef": 9.0}}, "ppo"),
        ({"privatize": {"epsilon": 3.0}}, "privatize"),
    ):
        with pytest.raises(UserError, match=r"stage '\w+' in .* other settings than this recipe's.*--from"):
            runner.check(recipe(**changed), directory, Selection(only="evaluate"), ALONE)
        with pytest.raises(UserError, match="other settings"):
            runner.execute_one("evaluate", recipe(**changed), directory)
        assert runner.check(recipe(**changed), directory, Selection(start=stage), ALONE)
        assert "evaluate" in running(recipe(**changed), directory)  # and a plain run does not take it for up to date
    assert runner.check(recipe(evaluate={"num_prompts": 3}), directory, Selection(only="evaluate"), ALONE)


def test_metrics_vanish_with_the_results_they_describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_stages(monkeypatch)
    directory = RunDir(tmp_path / "run")
    runner.execute(recipe(), directory, Selection())
    stub_stages(monkeypatch, failing("ppo"))
    with pytest.raises(RuntimeError):
        runner.execute(recipe(ppo={"kl_coef": 0.2}), directory, Selection())
    assert not (directory.root / "metrics.json").exists()
    stub_stages(monkeypatch)
    runner.execute(recipe(ppo={"kl_coef": 0.2}), directory, Selection(only="ppo"))
    assert not (directory.root / "metrics.json").exists()  # the evaluation is still that of the earlier policy
    runner.execute(recipe(ppo={"kl_coef": 0.2}), directory, Selection())
    assert (directory.root / "metrics.json").is_file()


def test_only_runs_one_stage_even_when_it_is_up_to_date(run: RunDir) -> None:
    assert running(recipe(), run, only="ppo") == ["ppo"]
    assert {line.reason for line in plan(recipe(), run, Selection(only="ppo"))} == {"asked for", "not selected"}


# --- running ----------------------------------------------------------------------------------------------------------


def failing(name: str) -> Body:
    """The body of stages of which one runs out of memory."""

    def body(context: StageContext) -> dict[str, Any]:
        if context.name == name:
            raise RuntimeError("out of memory")
        return {}

    return body


def test_execute_runs_once_and_then_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = stub_stages(monkeypatch, lambda _: {"summary": "fine"})
    directory = RunDir(tmp_path / "run")
    runner.execute(recipe(), directory, Selection())
    assert ran == list(NAMES)
    manifest = directory.require("ppo")
    assert manifest["report"] == {"summary": "fine"}
    assert manifest["world_size"] == 1
    assert manifest["seconds"] >= 0
    assert (directory.root / "metrics.json").is_file()
    runner.execute(recipe(), directory, Selection())
    assert ran == list(NAMES)
    runner.execute_one("ppo", recipe(), directory)
    assert ran == list(NAMES)
    runner.execute_one("ppo", recipe(ppo={"kl_coef": 0.2}), directory)
    assert ran == [*NAMES, "ppo"]


def test_what_changed_since_the_last_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_stages(monkeypatch)
    directory = RunDir(tmp_path / "run")
    runner.execute(recipe(), directory, Selection())
    runner.execute(recipe(ppo={"sample_every": 2}), directory, Selection())
    assert "another" not in capsys.readouterr().err
    runner.execute(recipe(ppo={"kl_coef": 0.2}, privatize={"epsilon": 3.0}), directory, Selection())
    assert "last started with another ppo.kl_coef, privatize.epsilon: what depends" in capsys.readouterr().err


@pytest.mark.thorough
def test_an_override_is_said_and_written_into_every_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And taking it back runs every stage again that may have read what it let pass."""
    ran = stub_stages(monkeypatch)
    directory = RunDir(tmp_path / "run")
    runner.execute(recipe(data={"allow_label_overlap": True}), directory, Selection())
    assert "[private-rlhf] NOT PRIVATE: data.allow_label_overlap overrules" in capsys.readouterr().err
    assert {str(directory.require(name)["override"]).split()[0] for name in NAMES} == {"data.allow_label_overlap"}
    ran.clear()
    runner.execute(recipe(), directory, Selection())
    assert ran == list(NAMES)
    assert {directory.require(name)["override"] for name in NAMES} == {None}
    assert "NOT PRIVATE" not in capsys.readouterr().err


def test_a_failed_stage_is_incomplete_keeps_its_state_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = stub_stages(monkeypatch, failing("reward"))
    directory = RunDir(tmp_path / "run")
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute(recipe(), directory, Selection())
    assert ran == ["privatize", "sft", "reward"]
    assert directory.manifest("reward") is None
    (directory.checkpoints("reward") / "step-1").touch()
    reason = {line.stage.name: line.reason for line in plan(recipe(), directory, Selection())}
    assert reason["sft"] == "up to date"
    assert reason["reward"] == "resumes"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_refusal_leaves_nothing_behind(
    claimed: bool, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether `run` or only the stage was started; a run directory that was there stays."""

    def refuse(context: StageContext) -> dict[str, Any]:
        assert context.run.root.is_dir()
        raise UserError("row 3 has no label")

    stub_stages(monkeypatch, refuse)
    directory = RunDir(tmp_path / "run")
    if claimed:
        directory.claim("one", shareable_yaml(recipe()), {})
    start = partial(runner.execute_one, "privatize") if alone else partial(runner.execute, selection=Selection())
    with pytest.raises(UserError, match="row 3"):
        start(recipe(), directory)
    assert (directory.root / "recipe.yaml").is_file() == claimed
    assert claimed or not list(tmp_path.iterdir())


def test_two_runs_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused before it writes anything, and runs when the first has ended."""
    directory, other = RunDir(tmp_path / "run"), recipe(seed=1)

    def start_another(context: StageContext) -> dict[str, Any]:
        if context.recipe != other:
            with pytest.raises(UserError, match=r"--run-dir must be free, got .*/run, in use"):
                runner.execute(other, directory, Selection())
            assert directory.recipe()["seed"] == recipe().seed
        return {}

    ran = stub_stages(monkeypatch, start_another)
    runner.execute(recipe(), directory, Selection())
    runner.execute(other, directory, Selection())
    assert ran.count("sft") == 2
    assert directory.recipe()["seed"] == 1
    assert not list(directory.root.glob(".*"))


def test_a_file_system_without_locks_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    ran = stub_stages(monkeypatch)
    monkeypatch.setattr("fcntl.flock", refuse)
    runner.execute(recipe(), RunDir(tmp_path / "run"), Selection())
    assert ran == list(NAMES)


def test_a_start_sweeps_the_debris_of_a_killed_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_stages(monkeypatch)
    debris = run.stage("ppo") / ".model.0123.tmp"
    debris.mkdir(parents=True)
    runner.execute(recipe(), run, Selection(only="evaluate"))
    assert not debris.exists()


def test_the_launcher_s_environment_is_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert declared_world() == ALONE
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert declared_world() == World(rank=1, size=4)
    assert not declared_world().main
    monkeypatch.delenv("WORLD_SIZE")  # the process would do nothing in silence
    with pytest.raises(UserError, match="RANK must be below WORLD_SIZE 1, got 1: unset RANK"):
        declared_world()


def test_a_start_looks_at_the_labels_of_its_own_recipe(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last start asked for its labels: demonstrations were compared with its pairs, not with the protected ones."""
    asking, folders = recipe(online={}, data={"public_labels": True}), []
    run.claim(asking.name, shareable_yaml(asking), {})
    monkeypatch.setattr(runner, "check_overlap", lambda _, folder, *others: folders.append(folder))
    runner.check(recipe(), run, Selection(only="evaluate"), ALONE)
    assert folders == [run.stage("privatize")]


def test_a_run_of_a_chain_keeps_the_dtype_that_it_began_with(run: RunDir, tmp_path: Path) -> None:
    later, now = RunDir(tmp_path / "later"), recipe(model={"source": "tiny", "dtype": "auto"})
    (run.stage("sft") / "model").mkdir()
    complete(later, recipe(seed=1))
    runner._share_sft(now, run, later)
    assert later.made(("sft",)) == run.made(("sft",))
    assert later.saved("model", "dtype") == "float32"
