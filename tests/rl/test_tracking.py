"""Trackers get numbers from the main process, texts only where the recipe says so, and stay on the machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from private_rlhf.core.errors import UserError
from private_rlhf.core.world import World
from private_rlhf.lm.distributed import make_accelerator
from private_rlhf.recipe import PpoConfig
from private_rlhf.rl.tracking import (
    configuration,
    hand_over,
    local_mlflow,
    numbers,
    offline_settings,
    report,
    run_trackers,
)
from private_rlhf.stages.checks import check_trackers
from private_rlhf.stages.declarations import preflight
from private_rlhf.stages.ppo import learn
from support.fake_mlflow import pretend_mlflow
from support.recipes import recipe_of

SMALL = {"rollouts": 8, "minibatch_size": 4, "ppo_epochs": 1, "iterations": 2, "report_to": ["tensorboard"]}


class Recorder(GeneralTracker):
    """Keeps what it is given."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self

    def start(self) -> None:
        self.calls.append(("start", None))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))

    @property
    def logged(self) -> list[tuple[int, dict[str, Any]]]:
        return [value for name, value in self.calls if name == "log"]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def run(problem: Any, recorder: Recorder, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Two iterations with the recorder as the tracker; their history."""

    def learn_two(**settings: Any) -> list[dict[str, Any]]:
        trainer = problem.trainer(**SMALL, **settings)
        recipe = SimpleNamespace(data=SimpleNamespace(prompts="file"))
        places = {"folder": tmp_path, "checkpoints": tmp_path / "checkpoints"}
        where: Any = SimpleNamespace(**places, recipe=recipe, world=World(0, 1))
        history: list[dict[str, Any]] = []
        with run_trackers(trainer.accelerator, [recorder], "x", trainer.config, tmp_path / "tracking", 0):
            learn(trainer, history, where)
        return history

    return learn_two


def test_every_iteration_s_numbers_arrive_and_no_text(run: Any, recorder: Recorder) -> None:
    history = run(sample_every=1)
    assert [name for name, _ in recorder.calls] == ["start", "config", "log", "log", "finish"]
    assert [step for step, _ in recorder.logged] == [0, 1]
    for entry, (_, values) in zip(history, recorder.logged, strict=True):
        assert values["kl"] == entry["kl"]
        assert values["seconds/update"] == entry["seconds"]["update"]
        assert all(isinstance(value, int | float) for value in values.values())
    assert recorder.calls[1][1]["learning_rate"] == 1e-6


def test_samples_arrive_only_when_the_recipe_says_so(run: Any, recorder: Recorder) -> None:
    run(sample_every=2, report_samples=True)
    (_, first), (_, second) = recorder.logged
    assert "→" in first["sample"]
    assert "sample" not in second


def test_trackers_end_however_the_run_ends(recorder: Recorder, problem: Any, tmp_path: Path) -> None:
    accelerator, names = problem.trainer(**SMALL).accelerator, [recorder]
    with pytest.raises(RuntimeError, match="stop"), run_trackers(accelerator, names, "x", PpoConfig(), tmp_path, 0):
        raise RuntimeError("stop")
    assert recorder.calls[-1] == ("finish", None)


def test_other_processes_neither_start_nor_log(recorder: Recorder, tmp_path: Path) -> None:
    other: Any = SimpleNamespace(is_main_process=False, trackers=[recorder])
    with run_trackers(other, [recorder], "x", PpoConfig(), tmp_path / "logs", 0):
        report(other, {"iteration": 0, "kl": 1.0})
    assert recorder.calls == []
    assert not (tmp_path / "logs").exists()


def test_off_by_default(problem: Any, tmp_path: Path) -> None:
    assert PpoConfig().report_to == []
    accelerator = problem.trainer().accelerator
    with run_trackers(accelerator, [], "x", PpoConfig(), tmp_path / "logs", 0):
        report(accelerator, {"iteration": 0, "kl": 1.0}, "text")
    assert accelerator.trackers == []
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_one_that_is_not_installed_is_refused_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def absent(wanted: str, *more: Any, **named: Any) -> Any:
        return None if wanted == name else real(wanted, *more, **named)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    recipe = recipe_of(ppo={"report_to": [name]})
    message = rf"ppo\.report_to {name} needs {name}: install it with pip install {name}"
    with pytest.raises(UserError, match=message):
        preflight(recipe, ["ppo"], World(0, 1))
    with pytest.raises(UserError, match=message):
        preflight(recipe, ["sft"], World(0, 1))
    preflight(recipe, ["evaluate"], World(0, 1))


def test_unknown_trackers_and_samples_to_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match="report_to"):
        PpoConfig(report_to=["aim"])  # type: ignore[list-item]
    for settings in ({"report_to": ["wandb"]}, {"sample_every": 1}):
        with pytest.raises(ValueError, match="report_samples must go with report_to and sample_every"):
            PpoConfig(report_samples=True, **settings)  # type: ignore[arg-type]


def test_nothing_leaves_the_machine_unless_its_user_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    wandb = offline_settings(tmp_path, 0)["wandb"]
    assert (wandb["mode"], wandb["dir"], wandb["settings"]) == ("offline", str(tmp_path), {"console": "off"})
    monkeypatch.setenv("WANDB_MODE", "online")
    assert offline_settings(tmp_path, 0)["wandb"]["mode"] == "online"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")  # whose server knows where it keeps files
    assert offline_settings(tmp_path, 0)["mlflow"] == {}
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with local_mlflow(tmp_path):
        assert offline_settings(tmp_path, 0)["mlflow"] == {"logging_dir": str(tmp_path / "artifacts")}
    assert offline_settings(tmp_path, 7)["tensorboard"] == {"purge_step": 7}  # a resumed run writes no step twice


def test_trackers_get_files_in_their_own_ways(tmp_path: Path) -> None:
    """wandb copies of files; trackers that keep none the text of Markdown."""
    page, data = tmp_path / "card.md", tmp_path / "card.json"
    page.write_text("ε = 2")
    data.write_text("{}")
    saved: list[tuple[str, str, str]] = []
    run = SimpleNamespace(save=lambda path, base_path, policy: saved.append((path, base_path, policy)))
    wandb = SimpleNamespace(name="wandb", tracker=run)
    other = Recorder()
    hand_over(SimpleNamespace(trackers=[wandb, other]), [page, data])  # type: ignore[arg-type]
    assert saved == [(str(path), str(tmp_path), "now") for path in (page, data)]
    assert other.calls == [("log", (0, {"card": "ε = 2"}))]


def test_values_are_plain() -> None:
    entry = {"iteration": 3, "true_reward": None, "kl": 0.5, "seconds": {"score": 1}, "ok": True, "text": "t", "l": [1]}
    assert numbers(entry) == {"iteration": 3, "kl": 0.5, "seconds/score": 1}
    found = configuration(PpoConfig(rollouts=8))
    assert found["rollouts"] == 8
    assert "lora" not in found
    assert "extra_rewards" not in found
    assert all(isinstance(value, int | float | str) for value in found.values())


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_writes_its_files(tmp_path: Path) -> None:
    check_trackers(["tensorboard"])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = make_accelerator(World(0, 1))
    with run_trackers(accelerator, ["tensorboard"], "x", PpoConfig(), tmp_path, 0):
        report(accelerator, {"iteration": 0, "kl": 1.0})
    assert list((tmp_path / "x").glob("events*"))


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="mlflow is installed: the next test uses it")
def test_mlflow_gets_numbers_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate calls it, on a stand-in."""
    told = pretend_mlflow(tmp_path, monkeypatch)
    send_one(tmp_path, monkeypatch)
    local = [f"sqlite:///{tmp_path}/logs/mlflow.db", "true"]
    assert told == [*local, "x", "start", configuration(PpoConfig()), (0, {"iteration": 0, "kl": 1.0}), "end"]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_writes_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send_one(tmp_path, monkeypatch)
    assert (tmp_path / "logs" / "mlflow.db").is_file()


def send_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number and a text, of which only the number may arrive."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = make_accelerator(World(0, 1))
    with run_trackers(accelerator, ["mlflow"], "x", PpoConfig(), folder / "logs", 0):
        report(accelerator, {"iteration": 0, "kl": 1.0}, "text")
    assert not [name for name in os.environ if name.startswith("MLFLOW")]


def test_mlflow_goes_where_its_own_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    with local_mlflow(tmp_path):
        assert os.environ["MLFLOW_TRACKING_URI"] == "http://mlflow.example"
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://mlflow.example"
