"""Behaviour policies: files, action values, what is collected; a short training run goes through."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from private_rlhf_lab.studies.dptd import environments, policies, train_behaviour
from private_rlhf_lab.studies.dptd.environments import TASKS
from private_rlhf_lab.studies.dptd.trajectories import GAMMA, collect


@pytest.mark.parametrize("name", TASKS)
def test_committed_policies_act(name: str) -> None:
    """Two short trajectories, the same every time, chained, of states in their range."""
    policy = policies.load(TASKS[name])
    first, second = (collect(policy, 2, 7, limit=30) for _ in range(2))
    assert (first.state == second.state).all()
    assert first.state.shape[1] == TASKS[name].size
    inside = first.trajectory[1:] == first.trajectory[:-1]
    assert (first.following[:-1][inside] == first.state[1:][inside]).all()
    assert np.abs(first.state).max() <= 2.0
    assert first.trajectories == 2
    assert set(first.discount) <= {0.0, GAMMA}


def test_checkpoints_are_small_and_scored() -> None:
    files = [policies.path_of(task) for task in TASKS.values()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert set(json.loads((policies.FOLDER / "scores.json").read_text())) == set(TASKS)


def test_fourier_features() -> None:
    frequencies = policies.fourier_frequencies(4)
    assert frequencies.shape == (256, 4)
    assert len(np.unique(frequencies, axis=0)) == 256
    centre = policies.fourier_features(TASKS["cartpole"], np.zeros(4), frequencies)
    assert centre == pytest.approx(np.cos(np.pi * frequencies.sum(axis=1) / 2))
    # Acrobot: cosine, sine of two angles. Hanging straight down is the middle of the angles' range.
    down = policies.fourier_features(TASKS["acrobot"], np.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), frequencies)
    assert down == pytest.approx(centre)


def test_states_use_public_scales() -> None:
    assert environments.state(TASKS["cartpole"], [2.4, 3.0, 0.2095, 3.5]) == pytest.approx(np.ones(4))
    assert environments.state(TASKS["pong"], np.full(128, 255, np.uint8)) == pytest.approx(np.ones(128))


def test_a_policy_survives_its_file(tmp_path: Path) -> None:
    weights = {"weight": np.arange(512, dtype=np.float64).reshape(2, 256)}
    policies.save(policies.Policy(TASKS["cartpole"], weights), tmp_path)
    assert (policies.load(TASKS["cartpole"], tmp_path).weights["weight"] == weights["weight"]).all()


def test_greedy_and_exploring_actions() -> None:
    weight = np.zeros((2, 256))
    weight[1] = np.where(np.arange(256) == 0, 1.0, 0.0)  # the constant feature
    policy = policies.Policy(TASKS["cartpole"], {"weight": weight})
    generator = np.random.default_rng(0)
    actions = [policy.act(np.zeros(4), np.zeros(4), generator) for _ in range(1000)]
    # P(action 0) = EXPLORE/2 = 0.15; five standard deviations.
    assert abs(actions.count(0) / 1000 - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 1000)


def test_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_behaviour, "SARSA_EPISODES", 2)
    train_behaviour.main(["cartpole", "--output", str(tmp_path)])
    assert "cartpole: mean return" in capsys.readouterr().out
    assert (policies.load(TASKS["cartpole"], tmp_path).weights["weight"] != 0.0).any()
    network = train_behaviour.dqn(TASKS["pong"], 1, steps=30)
    values = network.values(np.zeros(128), np.zeros(128))
    assert values.shape == (3,)


def test_replay_sums_n_rewards_and_stops_at_the_end() -> None:
    replay = train_behaviour.Replay(20, 1)
    for step in range(10):
        replay.add(np.array([step]), step % 3, 1.0, np.array([step + 1]), over=step == 9)
    n, gamma = train_behaviour.N_STEP, train_behaviour.DQN_GAMMA
    assert replay.count == 10
    assert replay.reward[0] == pytest.approx(sum(gamma**k for k in range(n)))
    assert replay.then[0] == [n]
    assert replay.discount[0] == pytest.approx(gamma**n)
    assert replay.reward[9] == 1.0
    assert replay.discount[9] == 0.0
