"""Behaviour policies: linear Sarsa on a Fourier basis (Cart Pole, Acrobot), a small DQN on six numbers (Pong).

Both take a short history of states, answer with action values, and are stored as safetensors of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from private_rlhf.core.atomic import new_file

from private_rlhf_lab.studies.dptd.environments import Array, Task

FOLDER = Path(__file__).parent / "behaviour"
# The policies are ε-greedy, as they were trained. Cart Pole's explores more: one that never drops the pole has the
# value 20 everywhere, and nothing is left to estimate.
EXPLORE = MappingProxyType({"cartpole": 0.3, "acrobot": 0.05, "pong": 0.05})
ORDER = 3
# RAM addresses of Pong: ball x and y, both paddles' y.
BALL_X, BALL_Y, OWN_Y, OTHER_Y = 49, 54, 51, 50


def fourier_frequencies(size: int) -> Array:
    """((ORDER + 1)^size, size): every vector of whole numbers 0..ORDER (Konidaris et al. 2011)."""
    return np.indices((ORDER + 1,) * size).reshape(size, -1).T.astype(np.float64)


def fourier_features(task: Task, state: Array, frequencies: Array) -> Array:
    """cos(π c·x), x in [0, 1]^4: Cart Pole's state, or Acrobot's two angles and two speeds, from [−1, 1]. (256,)."""
    if task.name == "acrobot":
        angles = np.arctan2(state[[1, 3]], state[[0, 2]]) / np.pi
        state = np.concatenate([angles, state[4:]])
    unit = np.clip((state + 1.0) / 2.0, 0.0, 1.0)
    return np.cos(np.pi * (frequencies @ unit))


def pong_features(before: Array, now: Array) -> Array:
    """(6,): ball x and y, its own y and the other's, all centred, and the ball's movement since the state before; in
    units in which they are of order 1.
    """
    places = now[[BALL_X, BALL_Y, OWN_Y, OTHER_Y]]
    return np.concatenate([4.0 * (places - 0.5), 20.0 * (places[:2] - before[[BALL_X, BALL_Y]])])


@dataclass(frozen=True)
class Policy:
    """task, and weights by name: `weight` (actions, 256) of Sarsa, or `w0, b0, w1, b1, …` of a ReLU network."""

    task: Task
    weights: Mapping[str, Array]

    def values(self, before: Array, now: Array) -> Array:
        """Action values (actions,) in the state `now`; `before` is the state one step earlier."""
        if self.task.name != "pong":
            frequencies = fourier_frequencies(4)
            return self.weights["weight"] @ fourier_features(self.task, now, frequencies)
        hidden = pong_features(before, now)
        layers = len(self.weights) // 2
        for layer in range(layers):
            hidden = self.weights[f"w{layer}"] @ hidden + self.weights[f"b{layer}"]
            hidden = hidden if layer == layers - 1 else np.maximum(hidden, 0.0)
        return hidden

    def act(self, before: Array, now: Array, generator: np.random.Generator) -> int:
        """Index of an action: the best of `values`, or any with the task's probability EXPLORE."""
        if generator.random() < EXPLORE[self.task.name]:
            return int(generator.integers(len(self.task.actions)))
        return int(np.argmax(self.values(before, now)))


def path_of(task: Task, folder: Path = FOLDER) -> Path:
    """Where the policy of `task` lies."""
    return folder / f"{task.name}.safetensors"


def load(task: Task, folder: Path = FOLDER) -> Policy:
    """The committed policy of `task`, as float64."""
    from safetensors.numpy import load_file

    stored = load_file(path_of(task, folder))
    return Policy(task, {name: value.astype(np.float64) for name, value in stored.items()})


def save(policy: Policy, folder: Path = FOLDER) -> Path:
    """Writes the policy as float32; returns the file."""
    from safetensors.numpy import save_file

    path = path_of(policy.task, folder)
    with new_file(path) as new:
        save_file({name: np.ascontiguousarray(value, dtype=np.float32) for name, value in policy.weights.items()}, new)
    return path
