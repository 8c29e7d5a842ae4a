"""The online stage on the tiny recipe: a whole run, killed and resumed, on two processes, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from private_rlhf import runner
from private_rlhf.audit.twins import verify
from private_rlhf.cli import main
from private_rlhf.core.errors import RunStopped, RunWaits, UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.core.rundir import RunDir
from private_rlhf.data.release import read_release
from private_rlhf.labelling import labellers
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.store import AnswerStore
from private_rlhf.lm.generate import Sampling
from private_rlhf.lm.models import load_causal_lm, load_tokenizer
from private_rlhf.online import rounds as rounds_of_stage
from private_rlhf.recipe import OnlineConfig, Recipe
from private_rlhf.recipe.load import load_recipe
from private_rlhf.rl.replay import Answers
from private_rlhf.stages import online as stage
from private_rlhf.stages.context import previous_run
from support.fake_vllm import FakeVllm
from support.pipeline_runs import TINY, Workspace, read_json
from support.recipes import recipe_of
from support.twin_recipes import run_all

ONLINE = (
    "data.limit=null",
    "data.public_labels=true",  # a simulated labeller has nobody to protect
    "online.rounds=3",
    "online.questions=20",
    "online.evaluation_questions=20",
    "online.candidates=4",
    "online.max_prompts=20",
    "sft.max_steps=4",
    "ppo.iterations=2",
    "evaluate.num_prompts=8",
    "evaluate.max_pairs=8",
)


@pytest.fixture(scope="module")
def online_run(workspace: Workspace) -> Path:
    run = workspace.root / "online"
    workspace.run(run, *ONLINE)
    return run


def rounds(run: Path) -> dict[str, Any]:
    return {path.name: read_json(path) for path in sorted((run / "online" / "rounds").iterdir())}


def answered(row: dict[str, Any], question: dict[str, str]) -> tuple[str, str, str]:
    """(prompt, preferred by z, other) of a question of a round's file."""
    label = row["answers"][question["id"]]
    assert label in (1, -1)
    sides = (question["response_a"], question["response_b"])
    return question["prompt"], *sides[::label]


def test_a_whole_run_from_questions_to_the_report(online_run: Path) -> None:
    found = rounds(online_run)
    assert sorted(found) == ["000.json", "001.json", "002.json", "evaluation.json"]
    learnt = [row for name, row in found.items() if name != "evaluation.json"]
    asked = [answered(row, each) for row in learnt for each in row["questions"]]
    ids = [each["id"] for row in found.values() for each in row["questions"]]
    assert len(set(ids)) == len(ids)
    release = read_release(online_run / "online" / "release")
    assert sorted((row.prompt, row.chosen, row.rejected) for row in release) == sorted(asked)
    assert release.manifest.noise.epsilon == 2.0
    assert len({row.record_id for row in release}) == len(release), "each pair once"
    assert release.manifest.totals == {"record": 2.0, "person": None}
    assert release.manifest.guarantee["mark"] == "NOT PRIVATE"  # a seed's answers
    held_out = read_release(online_run / "online" / "evaluation")
    assert len(held_out) == len(found["evaluation.json"]["questions"])
    stored = Answers.load([online_run / "online" / "replay" / "online-00000-0-of-1.safetensors"])
    assert len(stored) > len(release)
    assert max(map(len, stored.responses)) == 12, "no end of turn behind an answer that was cut"
    assert len(stored.learnable) == 0  # no reward was fitted yet
    history = read_json(online_run / "online" / "history.json")
    assert [row["labels"] for row in history] == [20, 40, 60]
    page = re.sub("</?abbr[^>]*>", "", (online_run / "report" / "report.html").read_text(encoding="utf-8"))
    assert all(title in page for title in ("J by answers", "Which pairs were asked"))
    assert set(read_json(online_run / "metrics.json")["seconds"]) >= {"sft", "online", "reward", "ppo", "evaluate"}
    assert not (online_run / "privatize" / "release").exists()
    assert "NOT PRIVATE" in (online_run / "report" / "report.html").read_text(encoding="utf-8")


def test_killed_after_a_round_asks_nothing_twice_and_ends_the_same(
    workspace: Workspace, online_run: Path, tmp_path: Path
) -> None:
    """Candidates and one round are there; what follows is as if nothing had happened, and the round's file is not
    written anew."""
    run = tmp_path / "run"
    shutil.copytree(online_run, run)
    expected = rounds(run)
    for path in (run / "online").iterdir():
        if path.name != "rounds":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("001.json", "002.json"):
        (run / "online" / "rounds" / name).unlink()
    kept = (run / "online" / "rounds" / "000.json").stat().st_ino
    workspace.run(run, "--only", "online", *ONLINE)
    assert rounds(run) == expected
    assert (run / "online" / "rounds" / "000.json").stat().st_ino == kept
    assert read_json(run / "online" / "history.json") == read_json(online_run / "online" / "history.json")


@pytest.mark.parametrize(("earlier", "total"), [(0, 3.0), (2, None)])
def test_a_person_s_total_is_not_known_where_others_answered_elsewhere(
    tmp_path: Path, earlier: int, total: float | None
) -> None:
    """A run that goes on from another one with a folder of its own: who answered there is not in it."""
    crowd = labellers.Crowd(tmp_path / "crowd", 1.0, lambda question: 0.0, persons=2, most=9)
    asked = [make_question(f"q{i}", "p", f"yes {i}", f"no {i}") for i in range(6 + earlier)]
    crowd.ask(asked[:6])
    rows = [(each.prompt, each.response_a, each.response_b, 1) for each in asked]
    stage.publish_answers(tmp_path / "out", rows, LabelNoise.of(1.0), crowd, stage.person_facts(crowd, len(rows)))
    assert read_release(tmp_path / "out").manifest.totals == {"record": 1.0, "person": total}


def test_candidates_are_drawn_at_the_recipe_s_temperature(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("ppo.temperature=1.5", "ppo.top_p=0.9", "evaluate.gibbs_candidates=0")
    given, run, seen = online_recipe(workspace, *own), RunDir(tmp_path), []
    runner.execute(given, run, runner.Selection(only="sft"))

    def stop(model: Any, prompts: Any, keys: Any, sampling: Sampling, **_: Any) -> None:
        seen.append(sampling)
        raise RunStopped("drawn")

    monkeypatch.setattr("private_rlhf.lm.drawing.sample_responses", stop)
    with pytest.raises(RunStopped, match="drawn"):
        runner.execute(given, run, runner.Selection(only="online"))
    assert seen == [Sampling(12, 1.5, 0.9)]


def test_two_processes_ask_what_one_asks(workspace: Workspace, online_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(online_run, run)
    shutil.rmtree(run / "online")
    workspace.launch("online", run, *ONLINE)
    assert read_json(run / "online" / "manifest.json")["world_size"] == 2
    assert rounds(run)["000.json"] == rounds(online_run)["000.json"]


def test_two_processes_ask_about_what_a_server_draws(
    workspace: Workspace, online_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 prompts are a block of 16 for one process and one of 4 for the other. A server with a cut tail is stopped."""
    run, home = tmp_path / "run", online_run / "sft" / "model"
    shutil.copytree(online_run, run)
    shutil.rmtree(run / "online")
    with FakeVllm(load_causal_lm(home, "float32"), load_tokenizer(home).pad_token_id, "top_p").running() as fake:
        fake.max_model_len = 96 + 12
        served = "rollout.engine=vllm", f"rollout.urls=[{fake.url}]", "rollout.patience=20"
        only = ["run", "--only", "online", *workspace.options(run, *ONLINE, *served)]
        workspace.launch_command(*only, processes=2)
        assert read_json(run / "online" / "manifest.json")["world_size"] == 2
        assert rounds(run)["000.json"] == rounds(online_run)["000.json"]
        assert {name for path, name in fake.log} == {"base"}
        assert len(fake.log) == 4 * (20 + 2 * 5)
        assert read_json(run / "online" / "manifest.json")["report"]["engine"]["largest"] < 1e-4
        fake.from_version = 0
        assert main(only) == 1
    assert "likely cause: a cut tail (top-p, top-k or min-p)" in capsys.readouterr().err.splitlines()[-1]


# --- twins ------------------------------------------------------------------------------------------------------------

SMALL = (*ONLINE, "online.rounds=2", "online.questions=12", "ppo.iterations=1", "ppo.rollouts=4", "sft.max_steps=2")


def online_recipe(workspace: Workspace, *overrides: str) -> Recipe:
    own = (f"model.cache_dir={workspace.root / 'cache'}", "model.dtype=float32", "privatize.epsilon=0.5")
    return load_recipe(Recipe, TINY, [*own, *SMALL, *overrides])


def test_no_true_answer_reaches_a_file(workspace: Workspace, tmp_path: Path) -> None:
    verdict = verify(online_recipe(workspace), tmp_path / "twins", run_all, runner.NAMES)
    assert verdict is not None
    assert verdict.comparison.leaks == ()
    assert verdict.turned == verdict.labels > 30
    assert verdict.comparison.compared > 30


def test_a_true_answer_that_reaches_a_file_shows(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the labeller counts true answers, and the stage's history tells."""
    seen: list[int | None] = []
    drawn = labellers.Command.draw

    def counting(self: labellers.Command, labels: Mapping[str, int | None]) -> Iterator[tuple[str, int | None]]:
        seen.extend(labels.values())
        return drawn(self, labels)

    monkeypatch.setattr(labellers.Command, "draw", counting)
    known = rounds_of_stage.measure
    monkeypatch.setattr(stage, "measure", lambda *given: known(*given) | {"up": seen.count(1)})

    def execute(recipe: Recipe, run: RunDir) -> None:
        seen.clear()
        for name in ("sft", "online"):
            runner.execute(recipe, run, runner.Selection(only=name))

    verdict = verify(online_recipe(workspace), tmp_path / "twins", execute, runner.NAMES)
    assert verdict is not None
    assert any(leak.startswith("online/history.json") for leak in verdict.comparison.leaks)


# --- recipes ----------------------------------------------------------------------------------------------------------


def recipe(**changes: Any) -> Recipe:
    return recipe_of(**{"data": {"public_labels": True}, "online": {}, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluation_labels": "public"}, "evaluation_labels must be private"),
        ({"privatize": {"epsilon": float("inf")}}, "privatize.epsilon must be finite"),
        ({"data": {"public_labels": False}}, "set data.public_labels: true"),
        ({"data": {"public_labels": True, "demonstrations": "release"}}, "before online asks"),
        ({"data": {"public_labels": True, "limit": 5}}, "online.rounds"),
        ({"data": {"public_labels": True, "message_keys": ["name"]}}, "data.message_keys must be null with online"),
        ({"online": {"candidates": 1}}, "candidates"),
        ({"privatize": {"epsilon_levels": [0.5, 4.0]}}, "epsilon_levels must go with epsilon_column"),
        ({"online": {"strategy": "clever"}}, "strategy"),
    ],
)
def test_what_a_recipe_cannot_say(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe(**changes)


def test_a_terminal_s_levels_are_the_recipe_s(tmp_path: Path) -> None:
    given = recipe(privatize={"epsilon_levels": [4.0, 0.5]}, online={"labeller": "terminal", "folder": str(tmp_path)})
    assert (given.privatize.epsilon, given.online is None) == (4.0, False)
    assert given.online is not None
    labeller = rounds_of_stage.make_labeller(given.online, given.privatize, 0, tmp_path)
    assert [level.epsilon for level in labeller.mechanism.levels] == [0.5, 4.0]


def test_more_questions_than_pairs_are_refused() -> None:
    """Before anything is asked, with the number that is there."""
    settings = OnlineConfig(rounds=4, questions=20, candidates=3)
    stage.check_questions(settings, 80)
    with pytest.raises(UserError, match="must be at most 79, got 4 x 20: each pair of answers is asked once"):
        stage.check_questions(settings, 79)
    with pytest.raises(UserError, match="at most 8192 for fisher"):
        stage.check_questions(OnlineConfig(rounds=1, questions=9000, strategy="fisher"), 9000)


def test_the_stages_of_an_online_recipe() -> None:
    assert "privatize" in recipe().absent_stages
    assert "online" not in recipe().absent_stages
    assert "online" in recipe(online=None).absent_stages


# --- one policy after another -----------------------------------------------------------------------------------------


def test_a_second_policy_goes_on_from_the_first(workspace: Workspace, tmp_path: Path) -> None:
    """Two runs: the second has the first one's answers and its own, π_ref is the same file, PPO starts elsewhere."""
    root = tmp_path / "chain"
    done = workspace.finish(workspace.command("online", *workspace.options(root, *SMALL), "--policies", "2"))
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (RunDir(root / name) for name in "12")
    one, other = (run.stage("sft") / "model" / "model.safetensors" for run in (first, second))
    assert one.samefile(other)
    before, after = (read_release(run.stage("online") / "release") for run in (first, second))
    texts = [sorted((row.prompt, row.chosen, row.rejected) for row in release) for release in (before, after)]
    assert len(texts[1]) == 2 * len(texts[0])
    assert not set(texts[0]) - set(texts[1])
    assert len({row.record_id for row in after}) == len(after), "the second run asks no pair of the first"
    held_out = [read_release(run.stage("online") / "evaluation").manifest.rows for run in (first, second)]
    assert held_out[0] == held_out[1]
    facts = [run.require("online")["report"] for run in (first, second)]
    assert [each["runs"] for each in facts] == [1, 2]
    assert facts[1]["history"][-1]["labels"] == 2 * facts[0]["history"][-1]["labels"]
    kl = [json.loads((run.stage("ppo") / "history.jsonl").read_text().splitlines()[0])["kl"] for run in (first, second)]
    assert kl[0] == 0.0 != kl[1]  # π of the second starts where π of the first ended
    again = workspace.finish(workspace.command("online", *workspace.options(root, *SMALL), "--policies", "2"))
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stderr.count("up to date, skipped") >= 10


def test_a_run_that_did_not_end_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has not completed stage 'ppo'"):
        previous_run(recipe(online={"after": str(tmp_path)}))


def test_a_file_drop_is_waited_for_and_skips_are_left_out(workspace: Workspace, tmp_path: Path) -> None:
    """Three stops: the held-out questions and two rounds. Each time the questions are those before and new ones."""
    drop, run, seen = tmp_path / "drop", RunDir(tmp_path / "run"), 0
    given = online_recipe(workspace, "online.labeller=files", f"online.folder={drop}")
    runner.execute(given, run, runner.Selection(only="sft"))
    for part in range(3):
        with pytest.raises(RunWaits, match="wait for an answer"):
            runner.execute(given, run, runner.Selection(only="online"))
        ids = [json.loads(line)["id"] for line in (drop / "questions.jsonl").read_text().splitlines()]
        assert len(ids) == len(set(ids)) > seen
        labels = [None if number % 5 == 4 else 1 - 2 * (number % 2) for number in range(len(ids))]
        answers = [{"id": id, "label": label} for id, label in zip(ids, labels, strict=True)]
        (drop / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers[: len(ids) - part]))
        if part:
            with pytest.raises(RunWaits, match=f"online: {part} of"):
                runner.execute(given, run, runner.Selection(only="online"))
            (drop / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        seen = len(ids)
    runner.execute(given, run, runner.Selection(only="online"))
    bundles = [read_release(run.stage("online") / name) for name in ("release", "evaluation")]
    assert sum(bundle.manifest.rows for bundle in bundles) == sum(label is not None for label in labels)
    assert {bundle.manifest.guarantee["randomised_by"] for bundle in bundles} == {"files"}
    facts = run.require("online")["report"]
    assert "gibbs_objective_gain" not in facts["history"][-1]
    assert facts["history"][-1]["labels"] == facts["events"]


def test_people_at_pages_answer_a_run_each_at_their_own_epsilon(workspace: Workspace, tmp_path: Path) -> None:
    """Anna at 4 and ben at .5, who raises it between rounds: the bundles have each answer at the ε of its question,
    the most informative ones went to anna, and what a person spent is stated."""
    store = AnswerStore(tmp_path / "store", (0.5, 1.0, 4.0))
    for person, number in {"anna": 2, "ben": 0}.items():
        store.add_person(person)
        store.choose_level(person, number)
    page = ("online.labeller=page", f"online.folder={tmp_path / 'store'}", "privatize.epsilon=4")
    run, given = RunDir(tmp_path / "run"), online_recipe(workspace, *page)
    runner.execute(given, run, runner.Selection(only="sft"))
    first: list[tuple[str, ...]] = []
    for _ in range(3):
        with pytest.raises(RunWaits, match="wait for an answer"):
            runner.execute(given, run, runner.Selection(only="online"))
        first.append(tuple(question.id[-5:] for _, question, _ in store.open_questions("anna")))
        while any(waiting := {person: store.open_questions(person) for person in ("ben", "anna")}.values()):
            for person, questions in zip(("ben", "anna"), waiting, strict=True):
                for number, (event, *_) in enumerate(questions):
                    store.give(person, event, 1 if number % 3 else -1)
        store.choose_level("ben", 1)
    assert set(first) == {tuple(f"{number:05d}" for number in range(5))}
    runner.execute(given, run, runner.Selection(only="online"))
    answers, epsilons, asked = store.answers(), store.epsilons(), {each.id: each for each in store.questions()}
    expected = sorted((asked[id].prompt, asked[id].response_a if z == 1 else asked[id].response_b, epsilons[id])
                      for id, z in answers.items())  # fmt: skip
    bundles = [read_release(run.stage("online") / name) for name in ("release", "evaluation")]
    assert sorted((row.prompt, row.chosen, row.epsilon) for bundle in bundles for row in bundle) == expected
    assert len(set(epsilons.values())) == 3
    counts = store.answer_counts()
    largest = max(sum(level * count for level, count in draws.items()) for draws in counts.values())
    assert [bundle.manifest.totals["person"] for bundle in bundles] == [largest] * 2
    facts = run.require("online")["report"]["ledger"]["labelers"]
    assert facts["busiest"] == [{"epsilon": 4.0, "events": counts["anna"][4.0]}]
    assert (facts["max_epsilon"], facts["unattributed_events"]) == (largest, 0)
    kept = [read_json(path) for path in (run.stage("online") / "rounds").iterdir()]
    assert {id: epsilon for row in kept for id, epsilon in row["epsilons"].items()} == epsilons
    for only in ("reward", "ppo", "evaluate"):
        runner.execute(given, run, runner.Selection(only=only))
    fitted = read_json(run.stage("reward") / "fit.json")["levels"]
    assert [level for level, _ in fitted] == [0.5, 1.0, 4.0]


@pytest.mark.slow
def test_people_at_pages_answer_a_run(workspace: Workspace, tmp_path: Path) -> None:
    """The run stops where it waits, shows the operator its rounds, asks nothing twice, and ends with their z."""
    store = AnswerStore(tmp_path / "store", 2.0)
    store.add_person("anna")
    run, page = tmp_path / "run", (f"online.folder={tmp_path / 'store'}", "online.labeller=page")
    options = workspace.options(run, "--only", "online", *ONLINE, *page)
    workspace.run(run, "--only", "sft", *ONLINE, *page)
    for part in range(4):
        done = workspace.finish(workspace.command("run", *options))
        assert done.returncode == 3, done.stderr[-3000:]
        assert "wait for an answer" in done.stderr
        history = run / "online" / "history.json"
        assert (len(read_json(history)) if history.exists() else 0) == max(0, part - 1)
        while waiting := store.open_questions("anna"):
            for number, (event, *_) in enumerate(waiting):
                store.give("anna", event, 1 if number % 3 else -1)
    workspace.run(run, "--only", "online", *ONLINE, *page)
    bundles = [read_release(run / "online" / name) for name in ("release", "evaluation")]
    assert sum(map(len, bundles)) == len(store.answers())
    assert {bundle.manifest.guarantee["key_mode"] for bundle in bundles} == {"local"}
