"""Draws that each method needs to reach the Gibbs policy where J is an exact sum.

A problem has 8 prompts with 57 answers each: end-of-turn at once, or one of the other 7 tokens and then any of 8. The
policy is a table of token logits, π_ref one with random logits, and r̂ is standard normal; kl_coef is 0.5. The methods
of `gibbs_losses` learn from N draws of π_ref to each prompt, made once. `variance, own draws` draws N/4 at a time, from
the policy as it is, and keeps them all. PPO, RLOO and GRPO have the pipeline's losses, clipped, and 8 draws at a time.
Every step reads 8 answers to each prompt, and the rate falls to 0. `one pass` learns from each draw once, `equal steps`
takes 1,024 steps for any N. The rates are chosen on other problems, for each method, N and regime.

Run:  private-rlhf-lab benchmark gibbs [--seeds 10] [--output DIR]   (minutes)
Writes OUTPUT/bound-enumerable.csv, bound-enumerable-needed.csv and bound-enumerable.png
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from private_rlhf.core import atomic
from private_rlhf.core.atomic import appending
from torch import Tensor
from tqdm import tqdm

from private_rlhf_lab.bed_rows import rows_of
from private_rlhf_lab.benches.epsilon_tables import interval
from private_rlhf_lab.benches.gibbs_losses import LOSSES, utilities

PROMPTS, VOCABULARY, EOS, GROUP, STEPS, ROUNDS = 8, 8, 1, 8, 1024, 4
KL_COEF, CLIP, TUNING = 0.5, 0.2, 4
COUNTS = (16, 64, 256, 1024, 4096)
"""Draws to each prompt."""
RATES = (0.03, 0.1, 0.3, 1.0)
SHARES = (0.85, 0.95, 0.99)
OWN = "variance, own draws"
ON_POLICY = ("ppo", "rloo", "grpo", OWN)
METHODS = (*ON_POLICY, *LOSSES)
REGIMES = ("one pass", "equal steps")
FIRST = torch.tensor([EOS] + [a for a in range(VOCABULARY) if a != EOS for _ in range(VOCABULARY)])
"""(57,) the first token of each answer."""
SECOND = torch.tensor([0] + list(range(VOCABULARY)) * (VOCABULARY - 1))
"""(57,) the second; of the answer that ends at once, a place that `token_logprobs` masks."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Problems:
    """R problems: token logits of π_ref (R, P, 1 + V, V), log π_ref (R, P, 57) and r̂ (R, P, 57)."""

    logits: Tensor
    reference: Tensor
    reward: Tensor

    def objective(self, log_policy: Tensor) -> Tensor:
        """J (R,) of log π (R, P, 57), exactly, as a mean over the prompts."""
        return (log_policy.exp() * (self.reward - KL_COEF * (log_policy - self.reference))).sum(-1).mean(-1)

    def share(self, log_policy: Tensor) -> Tensor:
        """(J(π) − J(π_ref)) / (J(Gibbs) − J(π_ref)), (R,)."""
        best = (self.reference + self.reward / KL_COEF).log_softmax(-1)
        start = self.objective(self.reference)
        return (self.objective(log_policy) - start) / (self.objective(best) - start)


def token_logprobs(logits: Tensor) -> Tensor:
    """log π of both tokens of each answer (R, P, 57, 2) from logits (R, P, 1 + V, V): row 0 draws the first."""
    logs = logits.log_softmax(-1)
    second = logs[:, :, 1:].flatten(2)[:, :, FIRST * VOCABULARY + SECOND] * (FIRST != EOS)
    return torch.stack([logs[:, :, 0, FIRST], second], dim=-1)


def make_problems(seeds: Sequence[int]) -> Problems:
    """One problem for each seed."""
    logits, reward = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        shapes = (PROMPTS, 1 + VOCABULARY, VOCABULARY), (PROMPTS, len(FIRST))
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        logits.append(1.5 * drawn[0])
        reward.append(drawn[1])
    table = torch.stack(logits)
    return Problems(table, token_logprobs(table).sum(-1), torch.stack(reward))


class Adam:
    """Adam over tables (R, …) with a rate for each of the R runs."""

    def __init__(self, table: Tensor, rates: Tensor) -> None:
        self.table, self.rates = table, rates.reshape(-1, *[1] * (table.dim() - 1))
        self.first, self.second, self.steps = torch.zeros_like(table), torch.zeros_like(table), 0

    def step(self, gradient: Tensor, scale: float) -> None:
        """Take one step at `scale` times the rates."""
        self.steps += 1
        self.first.lerp_(gradient, 0.1)
        self.second.lerp_(gradient.square(), 0.001)
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        self.table -= scale * self.rates * first / (second.sqrt() + 1e-8)


def passes(count: int, shape: tuple[int, int], generator: torch.Generator) -> Iterator[Tensor]:
    """Yield places (R, P, 8) among `count` stored draws; each pass is a permutation of them."""
    while True:
        order = torch.rand((*shape, count), generator=generator).argsort(-1)
        yield from order.split(GROUP, dim=-1)


def sample(log_policy: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` answers (R, P, count) from log π (R, P, 57)."""
    return torch.multinomial(log_policy.exp().flatten(0, 1), count, True, generator=generator).reshape(
        *log_policy.shape[:2], count
    )


def learn(method: str, problems: Problems, rates: Tensor, count: int, steps: int, seed: int = 0) -> Tensor:
    """log π (R, P, 57) after `steps` steps on `count` draws to each prompt. rates: (R,)."""
    problems = Problems(problems.logits.float(), problems.reference.float(), problems.reward.float())  # for speed
    table = problems.logits.clone().requires_grad_()
    optimizer = Adam(table.detach(), rates)
    shape = (len(rates), PROMPTS)
    value = torch.zeros(*shape, 1 + VOCABULARY)
    critic = Adam(value, torch.full((len(rates),), 0.1))
    generator = torch.Generator().manual_seed(seed)
    gradient_method = method in ("ppo", "rloo", "grpo")
    size = GROUP if gradient_method else max(GROUP, count // ROUNDS) if method == OWN else count
    rounds = count // size
    stored = torch.empty(*shape, 0, dtype=torch.int64)
    for step in range(steps):
        logs = token_logprobs(table)
        if step * rounds // steps >= stored.shape[-1] // size:  # the first of a round; π is π_ref at step 0
            old = logs.detach()
            fresh = sample(old.sum(-1), size, generator)
            stored = torch.cat([stored, fresh], dim=-1)
            utility = utilities(problems.reward.gather(-1, stored), KL_COEF)
            order = passes(stored.shape[-1], shape, generator)
        if gradient_method:
            loss = policy_gradient(method, problems, logs, old, fresh, value, critic, 1 - step / steps)
        else:
            places = next(order)
            ratio = (logs.sum(-1) - problems.reference).gather(-1, stored.gather(-1, places))
            parts = ratio.flatten(0, 1), utility.gather(-1, places).flatten(0, 1)
            loss = LOSSES["variance" if method == OWN else method](*parts) * len(rates)
        (gradient,) = torch.autograd.grad(loss, table)
        optimizer.step(gradient, 1 - step / steps)
    return token_logprobs(table.detach().double()).sum(-1)


def policy_gradient(
    method: str,
    problems: Problems,
    logs: Tensor,
    old: Tensor,
    picked: Tensor,
    value: Tensor,
    critic: Adam,
    scale: float,
) -> Tensor:
    """The clipped loss of PPO, RLOO or GRPO on `picked` (R, P, K), drawn at `old`; PPO's value table takes a step."""
    reference = token_logprobs(problems.logits)
    place = picked[..., None].expand(*picked.shape, 2)
    now, then, base = (each.gather(2, place) for each in (logs, old, reference))
    reward, mask = problems.reward.gather(-1, picked), torch.stack([torch.ones(len(FIRST)), FIRST != EOS], -1)[picked]
    cost = KL_COEF * (then - base)
    if method == "ppo":
        returns = torch.stack([reward - cost.sum(-1), reward - cost[..., 1]], -1)  # λ = 1
        states = torch.stack([torch.zeros_like(picked), 1 + FIRST[picked]], -1)
        known = value.gather(2, states.flatten(2)).reshape(returns.shape)
        error = ((known - returns) * mask).flatten(2)
        critic.step(torch.zeros_like(value).scatter_add_(2, states.flatten(2), error) / picked.shape[-1], scale)
        advantage = returns - known
    else:
        total = reward - cost.sum(-1) if method == "rloo" else reward
        count = picked.shape[-1]
        advantage = ((total - total.mean(-1, keepdim=True)) * count / (count - 1))[..., None]
    ratio = (now - then).exp() if method != "rloo" else (now - then).sum(-1, keepdim=True).exp()
    gained = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    gained = gained * mask if method != "rloo" else gained
    if method == "grpo":  # k3 of each token, weighted by its ratio (TRL's use_bias_correction_kl)
        gained = gained - KL_COEF * ratio * ((base - now).exp() - 1 - (base - now)) * mask
    return -gained.sum() / (PROMPTS * picked.shape[-1])


def cell(method: str, regime: str, count: int, seeds: int) -> Row:
    """One row: the rate that is best on other problems, and the share of Gibbs' gain on problems 0 to `seeds` − 1."""
    steps = STEPS if regime == "equal steps" else count // GROUP
    both = [*range(seeds), *(1000 + seed for seed in range(TUNING))]
    problems = make_problems(both * len(RATES))
    rates = torch.tensor(RATES).repeat_interleave(len(both))
    found = problems.share(learn(method, problems, rates, count, steps)).reshape(len(RATES), len(both))
    best = int(found[:, seeds:].mean(1).argmax())
    rate, shares = RATES[best], found[best, :seeds].tolist()
    mean, half = interval(shares)
    return {"method": method, "regime": regime, "draws_per_prompt": count, "steps": steps, "rate": rate,
            "share": round(mean, 4), "half_width_95": round(half, 4), "lowest": round(min(shares), 4)}  # fmt: skip


def needed(rows: Sequence[Row], share: float) -> str:
    """Draws to each prompt from which on the mean share is at least `share`, between two counts by their logarithms."""
    counts, shares = ([float(row[name]) for row in rows] for name in ("draws_per_prompt", "share"))
    below = [place for place, value in enumerate(shares) if value < share]
    if not below:
        return f"≤ {counts[0]:.0f}"
    last = below[-1]
    if last + 1 == len(counts):
        return f"> {counts[-1]:.0f}"
    part = (share - shares[last]) / (shares[last + 1] - shares[last])
    return f"{counts[last] * (counts[last + 1] / counts[last]) ** part:.0f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Shares by draws, a panel for each regime; bars are 95 % over problems."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for place, regime in zip(axes, REGIMES, strict=True):
        for number, method in enumerate(METHODS):
            part = [row for row in rows if (row["method"], row["regime"]) == (method, regime)]
            names = ("draws_per_prompt", "share", "half_width_95")
            columns = [np.array([float(row[name]) for row in part]) for name in names]
            style = {"marker": "osD^v<>PXh"[number], "ms": 4, "ls": "--" if method in ON_POLICY else "-"}
            place.errorbar(*columns, label=method, **style)
        place.axhline(0.99, color="grey", lw=0.5)
        place.set(title=regime, xlabel="draws to each prompt", xscale="log", ylim=(0, 1.02))
    axes[0].set(ylabel="share of the Gibbs policy's gain in J")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows that have the same keys."""
    with atomic.new_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(output: Path, seeds: int, counts: Sequence[int] = COUNTS) -> str:
    """Measure every method and write the files; returns the draws needed, as Markdown. Finished rows are kept."""
    bed = f"{seeds} problems"
    rows = rows_of(output / "rows.jsonl", lambda _: bed)
    done = {(row["method"], row["regime"], row["draws_per_prompt"]): row for row in rows}
    cells = [(method, regime, count) for method in METHODS for regime in REGIMES for count in counts]
    with appending(output / "rows.jsonl") as keep:
        for each in tqdm([each for each in cells if each not in done], desc="method × regime × draws"):
            done[each] = cell(*each, seeds)
            keep({"bed": bed, **done[each]})
    rows = [{name: value for name, value in done[each].items() if name != "bed"} for each in cells]
    write_csv(output / "bound-enumerable.csv", rows)
    table = []
    for method, regime in itertools.product(METHODS, REGIMES):
        part = [row for row in rows if (row["method"], row["regime"]) == (method, regime)]
        draws = {f"draws_for_{share:.0%}": needed(part, share) for share in SHARES}
        best = max(float(row["share"]) for row in part)
        table.append({"method": method, "regime": regime, **draws, "highest_share": best})
    write_csv(output / "bound-enumerable-needed.csv", table)
    draw(rows, output / "bound-enumerable.png")
    lines = ["| " + " | ".join(table[0]) + " |", "|---" * len(table[0]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(value) for value in row.values()) + " |" for row in table)])
