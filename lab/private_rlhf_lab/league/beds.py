"""Beds: prompts with answers of π_ref, their features and their true reward, and labels drawn about pairs of them.

A bed is asked about M prompts and judged on M′ others. Methods see coordinates and labels; the truth only judges.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise
from private_rlhf.reward_models.basis import pair_basis
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

COMPONENTS = 128


@dataclass(frozen=True)
class Bed:
    """Coordinates x (M, N, k) and true reward (M, N), float64, of N answers to each prompt; the same of held-out ones.

    kl_coef of J. source: what all of this is made of, the same on every machine.
    """

    x: Tensor
    truth: Tensor
    held_x: Tensor
    held_truth: Tensor
    kl_coef: float
    source: str

    @property
    def identity(self) -> str:
        """By which what was measured on it is told apart."""
        return f"{self.source}, kl_coef {self.kl_coef:g}"

    @property
    def most_pairs(self) -> int:
        """Distinct pairs of answers to one prompt."""
        return len(self.x) * math.comb(self.x.shape[1], 2)

    def gain(self, policy: Tensor) -> float:
        """J = E[r*] − kl_coef·KL of a policy (M′, N′) over the held-out draws, less π_ref's."""
        count = policy.shape[1]
        kl = (torch.xlogy(policy, policy) + policy * math.log(count)).sum(dim=1)
        return float((((policy - 1.0 / count) * self.held_truth).sum(dim=1) - self.kl_coef * kl).mean())

    @cached_property
    def best(self) -> float:
        """J of the truth's own Gibbs policy."""
        return self.gain(torch.softmax(self.held_truth / self.kl_coef, dim=1))


def linear_bed(seed: int, *, dimension: int = 32, prompts: int = 1000, answers: int = 16) -> Bed:
    """Bradley–Terry with a reward linear in Gaussian features, of standard deviation 1 over answers, and kl_coef 0.5;
    200 held-out prompts of 64 answers.
    """
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(dimension, generator=generator, dtype=torch.float64)
    theta /= torch.linalg.vector_norm(theta)
    x = torch.randn(prompts, answers, dimension, generator=generator, dtype=torch.float64)
    held = torch.randn(200, 64, dimension, generator=generator, dtype=torch.float64)
    scale = 1.0 / math.sqrt(2.0)  # of a `pair_basis`: differences have second moment 1
    source = f"linear, seed {seed}, {dimension} features, {prompts} prompts, {answers} answers"
    return Bed(x * scale, x @ theta, held * scale, held @ theta, 0.5, source)


def pool_bed(path: Path, kl_coef: float) -> Bed:
    """A pool of a language model's answers: train_features (M, N, d), train_truth (M, N), eval_features, eval_truth.

    The basis is made of the asked prompts' features alone. UserError for another file.
    """
    try:
        tensors = load_file(path)
        drawn, truth = tensors["train_features"], tensors["train_truth"].double()
        held, held_truth = tensors["eval_features"], tensors["eval_truth"].double()
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path}: is no pool of answers: {error}; give --run, or a pool that was made so") from None
    even = drawn.shape[1] // 2 * 2
    sides = (drawn[:, place:even:2].flatten(0, 1) for place in (0, 1))
    basis = pair_basis(*sides, num_components=min(COMPONENTS, drawn.shape[-1]), whiten=False)
    source = f"pool {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}, {COMPONENTS} directions"
    return Bed(basis.coordinates(drawn), truth, basis.coordinates(held), held_truth, kl_coef, source)


@dataclass(frozen=True)
class Labels:
    """n labels of distinct pairs: x (n, k) the difference of both answers' coordinates, the prompt of each (n,),
    y and z (n,) ±1. fits: of arms that begin alike, so that they are made once.
    """

    x: Tensor
    prompt: Tensor
    y: Tensor
    z: Tensor
    noise: LabelNoise
    seed: int
    fits: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def rows(self, picked: Tensor) -> Labels:
        """Some of them, (n,) bool or numbers."""
        return Labels(self.x[picked], self.prompt[picked], self.y[picked], self.z[picked], self.noise, self.seed)

    def relabelled(self, z: Tensor) -> Labels:
        """The same pairs with other labels."""
        return Labels(self.x, self.prompt, self.y, z, self.noise, self.seed)


def draw_private(bed: Bed, count: int, epsilon: float, seed: int) -> Labels:
    """Bradley–Terry labels of `count` pairs, never one twice, through randomised response.

    One seed's pairs and labels are the same at every ε, the first of them at every count; flips rise as ε falls.
    UserError for more than there are pairs.
    """
    if count > bed.most_pairs:
        raise UserError(f"{count} labels of distinct pairs, but the bed has {bed.most_pairs}; draw more answers")
    generator, noise = torch.Generator().manual_seed(seed), LabelNoise.of(epsilon)
    upper = torch.triu_indices(bed.x.shape[1], bed.x.shape[1], offset=1)
    order = torch.randperm(bed.most_pairs, generator=generator)
    coins = torch.rand(bed.most_pairs, 2, generator=generator, dtype=torch.float64)[:count]
    picked = order[:count]
    prompt, pair = picked // upper.shape[1], picked % upper.shape[1]
    first, second = upper[:, pair]
    margin = bed.truth[prompt, first] - bed.truth[prompt, second]
    y = torch.where(coins[:, 0] < torch.sigmoid(margin), 1.0, -1.0).double()
    z = torch.where(coins[:, 1] < noise.keep_prob, y, -y)
    return Labels(bed.x[prompt, first] - bed.x[prompt, second], prompt, y, z, noise, seed)
