"""Trains the behaviour policies: `python -m private_rlhf_lab.studies.dptd.train_behaviour [TASK …] [--output FOLDER]`.

Sarsa(λ) for Cart Pole and Acrobot, a double DQN for Pong from RAM; minutes on one core. Writes TASK.safetensors and
scores.json (mean return of 20 new episodes). Public data of a simulator: no privacy is claimed for the policies.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from private_rlhf.core import atomic

from private_rlhf_lab.studies.dptd.environments import TASKS, Array, Task, make, state
from private_rlhf_lab.studies.dptd.policies import (
    EXPLORE,
    FOLDER,
    Policy,
    fourier_features,
    fourier_frequencies,
    pong_features,
    save,
)

SARSA_EPISODES, SARSA_STEP = 400, {"cartpole": 2e-3, "acrobot": 1e-3}
# Training stops once the last ten episodes return this much on average.
ENOUGH = {"cartpole": 40.0, "acrobot": -130.0}
TRACE, SARSA_GAMMA = 0.9, 0.99
DQN_STEPS, BATCH, N_STEP, DQN_GAMMA = 40_000, 64, 8, 0.99


def sarsa(task: Task, seed: int) -> Policy:
    """Sarsa(λ) with accumulating traces; the step of a feature is divided by its frequency's norm."""
    frequencies = fourier_frequencies(4)
    norms = np.linalg.norm(frequencies, axis=1)
    step = SARSA_STEP[task.name] / np.where(norms == 0.0, 1.0, norms)
    weight = np.zeros((len(task.actions), len(frequencies)))
    generator, environment, explore = np.random.default_rng(seed), make(task), EXPLORE[task.name]

    def choose(features: Array) -> int:
        return int(generator.integers(len(weight)) if generator.random() < explore else np.argmax(weight @ features))

    recent: deque[float] = deque(maxlen=10)
    for episode in range(SARSA_EPISODES):
        if len(recent) == 10 and np.mean(recent) >= ENOUGH[task.name]:
            break
        recent.append(0.0)
        observed, _ = environment.reset(seed=seed + episode)
        features = fourier_features(task, state(task, observed), frequencies)
        action, trace, over = choose(features), np.zeros_like(weight), False
        while not over:
            observed, reward, terminated, truncated, _ = environment.step(task.actions[action])
            recent[-1] += float(reward)
            trace *= SARSA_GAMMA * TRACE
            trace[action] += features
            following = fourier_features(task, state(task, observed), frequencies)
            chosen = choose(following)
            bootstrap = 0.0 if terminated else SARSA_GAMMA * weight[chosen] @ following
            weight += step * (float(reward) + bootstrap - weight[action] @ features) * trace
            features, action, over = following, chosen, terminated or truncated
    return Policy(task, {"weight": weight})


class Replay:
    """Ring of N-step transitions: features, action, discounted reward, features after, discount of what follows."""

    def __init__(self, size: int, width: int) -> None:
        self.now, self.then = np.zeros((size, width), np.float32), np.zeros((size, width), np.float32)
        self.action, self.reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.discount = np.zeros(size, np.float32)
        self.count = 0
        self.recent: deque[tuple[Array, int, float]] = deque()

    def add(self, features: Array, action: int, reward: float, then: Array, over: bool) -> None:
        """One step; N-step rows are written as they complete, all of them at the end of an episode."""
        self.recent.append((features, action, reward))
        while len(self.recent) == N_STEP or (over and self.recent):
            place = self.count % len(self.now)
            self.now[place], self.action[place] = self.recent[0][0], self.recent[0][1]
            self.reward[place] = sum(DQN_GAMMA**k * row[2] for k, row in enumerate(self.recent))
            self.then[place], self.discount[place] = then, 0.0 if over else DQN_GAMMA ** len(self.recent)
            self.recent.popleft()
            self.count += 1

    def sample(self, generator: np.random.Generator) -> list[Any]:
        """BATCH rows, each of the five columns as a tensor."""
        import torch

        rows = generator.integers(0, min(self.count, len(self.now)), BATCH)
        columns = (self.now, self.action, self.reward, self.then, self.discount)
        return [torch.from_numpy(column[rows]) for column in columns]


def dqn(task: Task, seed: int, steps: int = DQN_STEPS) -> Policy:
    """Double DQN on `pong_features`; exploration falls from 1 to EXPLORE in the first sixth."""
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator, environment = np.random.default_rng(seed), make(task)
    online = torch.nn.Sequential(
        torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)
    )
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    replay = Replay(100_000, 6)
    before = now = state(task, environment.reset(seed=seed)[0])
    total, started = 0.0, time.monotonic()
    for step in range(steps):
        features = pong_features(before, now)
        if generator.random() < max(EXPLORE[task.name], 1.0 - 6.0 * step / steps):
            action = int(generator.integers(3))
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(features.astype(np.float32))).argmax())
        observed, reward, terminated, truncated, _ = environment.step(task.actions[action])
        before, now = now, state(task, observed)
        over = bool(terminated or truncated)
        # A point ends the rally: what follows does not depend on it, so rows end there.
        replay.add(features, action, float(reward), pong_features(before, now), over or reward != 0.0)
        total += float(reward)
        if over:
            print(f"{task.name}: step {step}, return {total:g}, {time.monotonic() - started:.0f} s", flush=True)
            before = now = state(task, environment.reset()[0])
            total = 0.0
        if step >= 2000 and step % 2 == 0:
            _learn(online, target, optimizer, replay.sample(generator))
        if step % 2000 == 0:
            target.load_state_dict(online.state_dict())
    layers = [layer for layer in online if isinstance(layer, torch.nn.Linear)]
    weights = {f"w{place}": layer.weight.detach().numpy() for place, layer in enumerate(layers)}
    return Policy(task, weights | {f"b{place}": layer.bias.detach().numpy() for place, layer in enumerate(layers)})


def _learn(online: Any, target: Any, optimizer: Any, batch: list[Any]) -> None:
    import torch

    now, action, reward, then, discount = batch
    with torch.no_grad():
        best = online(then).argmax(dim=1, keepdim=True)
        wanted = reward + discount * target(then).gather(1, best)[:, 0]
    loss = torch.nn.functional.smooth_l1_loss(online(now).gather(1, action[:, None])[:, 0], wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def score(policy: Policy, episodes: int, seed: int) -> float:
    """Mean undiscounted return of `episodes` new episodes."""
    from private_rlhf_lab.studies.dptd.trajectories import collect

    found = collect(policy, episodes, seed)
    return float(found.reward.sum() / episodes)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(description="Train the behaviour policies of the study dptd.")
    parser.add_argument("tasks", nargs="*", help=f"{', '.join(TASKS)}; default: all three")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if unknown := set(options.tasks) - set(TASKS):
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    for name in options.tasks or TASKS:
        started = time.monotonic()
        task = TASKS[name]
        policy = dqn(task, options.seed) if name == "pong" else sarsa(task, options.seed)
        save(policy, options.output)
        scores = options.output / "scores.json"
        known = json.loads(scores.read_text(encoding="utf-8")) if scores.is_file() else {}
        known[name] = round(score(policy, 20, 10_000), 2)
        atomic.write_json(scores, known)
        print(f"{name}: mean return {known[name]:g}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
