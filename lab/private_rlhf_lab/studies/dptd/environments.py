"""The three tasks of DPTD's Section 6: how they are made, and which public scaling makes a state out of what they show.

Scalings are fixed numbers of the task, never statistics of the data: those would be releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import gymnasium

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """name: short. gym_id: of Gymnasium. title: for figures. size: p, the length of a state. actions: the action
    numbers of Gymnasium that the policies choose from.
    """

    name: str
    gym_id: str
    title: str
    size: int
    actions: tuple[int, ...]


TASKS = MappingProxyType(
    {
        "cartpole": Task("cartpole", "CartPole-v1", "Cart Pole", 4, (0, 1)),
        "acrobot": Task("acrobot", "Acrobot-v1", "Acrobot", 6, (0, 1, 2)),
        # 0 stays, 2 moves the paddle up, 3 down; the other three add a fire button that does nothing in play.
        "pong": Task("pong", "ALE/Pong-v5", "Atari 2600 Pong", 128, (0, 2, 3)),
    }
)
CARTPOLE_SCALE = np.array([2.4, 3.0, 0.2095, 3.5])  # position, speed, angle, angular speed: the ends of an episode
ACROBOT_SCALE = np.array([1.0, 1.0, 1.0, 1.0, 4 * np.pi, 9 * np.pi])  # two cosines and sines, two limited speeds


def make(task: Task) -> gymnasium.Env[Any, Any]:
    """The environment; Pong shows its 128 bytes of RAM, skips 4 frames an action and never repeats one by chance."""
    import gymnasium

    if task.name != "pong":
        return gymnasium.make(task.gym_id)
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    return gymnasium.make(task.gym_id, obs_type="ram", frameskip=4, repeat_action_probability=0.0)


def state(task: Task, observed: Any) -> Array:
    """Observation to state (p,) float64: RAM bytes to [0, 1], speeds and angles by the task's own limits."""
    scale = {"cartpole": CARTPOLE_SCALE, "acrobot": ACROBOT_SCALE}.get(task.name, 255.0)
    return np.asarray(observed, dtype=np.float64) / scale
