"""Transitions of a behaviour policy, DPTD's data, and the discounted returns that a value function aims at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from private_rlhf_lab.studies.dptd.environments import Array, make, state
from private_rlhf_lab.studies.dptd.policies import Policy

GAMMA = 0.95  # Appendix G


@dataclass(frozen=True)
class Transitions:
    """n transitions. state, following (n, p) float64; reward (n,); discount (n,): GAMMA, or 0 where `following` is
    terminal (an episode cut by its time limit goes on); trajectory (n,) int: which of the m trajectories, in order.
    """

    state: Array
    reward: Array
    following: Array
    discount: Array
    trajectory: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def trajectories(self) -> int:
        """m."""
        return int(self.trajectory[-1]) + 1

    def lengths(self) -> NDArray[np.int64]:
        """Transitions of each trajectory, (m,)."""
        return np.bincount(self.trajectory)

    def take(self, rows: NDArray[np.int64]) -> Transitions:
        """The transitions `rows`, any shape: it stands in front of every column's own."""
        return Transitions(
            self.state[rows], self.reward[rows], self.following[rows], self.discount[rows], self.trajectory[rows]
        )

    def cast(self, dtype: type[np.floating]) -> Transitions:
        """The same with columns of another float type."""
        state, reward, following, discount = (
            column.astype(dtype) for column in (self.state, self.reward, self.following, self.discount)
        )
        return Transitions(state, reward, following, discount, self.trajectory)

    def returns(self) -> Array:
        """(n,) discounted return from each state to the end of its episode; a cut episode counts what was seen."""
        found, ahead = np.zeros(len(self)), 0.0
        for row in range(len(self) - 1, -1, -1):
            if row + 1 == len(self) or self.trajectory[row + 1] != self.trajectory[row]:
                ahead = 0.0
            ahead = float(self.reward[row]) + GAMMA * ahead
            found[row] = ahead
        return found


def collect(policy: Policy, episodes: int, seed: int, limit: int | None = None) -> Transitions:
    """Whole episodes of `policy`, reproducible from `seed`; `limit` cuts each after that many steps."""
    task, generator, environment = policy.task, np.random.default_rng(seed), make(policy.task)
    states, rewards, followings, discounts, owners = [], [], [], [], []
    for episode in range(episodes):
        now = before = state(task, environment.reset(seed=seed + episode)[0])
        over, steps = False, 0
        while not over:
            action = policy.act(before, now, generator)
            observed, reward, terminated, truncated, _ = environment.step(task.actions[action])
            following, steps = state(task, observed), steps + 1
            states.append(now)
            rewards.append(float(reward))
            followings.append(following)
            discounts.append(0.0 if terminated else GAMMA)
            owners.append(episode)
            before, now = now, following
            over = terminated or truncated or steps == limit
    environment.close()
    return Transitions(
        np.array(states), np.array(rewards), np.array(followings), np.array(discounts), np.array(owners, dtype=np.int64)
    )
