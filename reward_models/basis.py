"""A linear coordinate system for frozen features, folded back into one plain weight vector; and sums over processes.

A fit w = Vθ, V (d, k), has V ⟂ mean(φ), so that raw scores have mean zero without a bias; V spans the leading
directions of the pair differences; and it is scaled so that θ ~ N(0, I/λ) gives margins a variance k/λ. V reads no
label.

With several processes (`Spread`) process 0 decides and broadcasts: otherwise rounding would make processes diverge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor

FeatureArray = Tensor | np.ndarray


class Spread:
    """One process, which holds everything."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes of a CPU tensor that has one shape on all of them."""
        return value

    def first(self, value: Tensor) -> Tensor:
        """The CPU tensor of the first process; it has one shape on all of them."""
        return value

    def all(self, values: Tensor) -> Tensor:
        """The rows (m, …) of all processes on the CPU, one process after another; each has another m."""
        return values


class OverProcesses(Spread):
    """The processes of an accelerator. Each of them makes the same calls."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def sum(self, value: Tensor) -> Tensor:
        return self._accelerator.reduce(self._copy(value), "sum").cpu()

    def first(self, value: Tensor) -> Tensor:
        return broadcast(self._copy(value)).cpu()

    def all(self, values: Tensor) -> Tensor:
        return torch.cat(gather_object([values.clone()]))  # a view, pickled, takes the whole storage under it along

    def _copy(self, value: Tensor) -> Tensor:
        return value.to(self._accelerator.device, copy=True).contiguous()


ALONE = Spread()


def as_double(values: FeatureArray, name: str, ndim: int) -> Tensor:
    """A float64 CPU tensor of `ndim` dimensions, finite; ValueError names the array otherwise."""
    tensor = torch.as_tensor(values).detach().to(device="cpu", dtype=torch.float64)
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must be finite, got a value that is not: check the features or labels")
    return tensor


def count_pairs(phi_a: FeatureArray, phi_b: FeatureArray, spread: Spread) -> int:
    """The pairs of all processes together; ValueError for none, or for sides (m, d) that do not fit."""
    count = int(spread.sum(torch.tensor(float(len(phi_a)))))
    if phi_a.shape != phi_b.shape or count == 0:
        shapes = f"{tuple(phi_a.shape)} and {tuple(phi_b.shape)}"
        raise ValueError(f"phi_a and phi_b must have the same, non-empty shape, got {shapes}")
    return count


@dataclass(frozen=True)
class FeatureBasis:
    """`matrix` V (d, k) float64: coordinates of φ are φV, weights are w = Vθ."""

    matrix: Tensor

    @property
    def num_components(self) -> int:
        """k, the number of coordinates that are fitted."""
        return int(self.matrix.shape[1])

    def coordinates(self, features: Tensor) -> Tensor:
        """(..., d) of any float dtype -> (..., k) float64."""
        return features.to(torch.float64) @ self.matrix.to(features.device)

    def weight(self, theta: Tensor) -> Tensor:
        """θ (k,) -> w (d,)."""
        return self.matrix @ theta


def identity_basis(dim: int) -> FeatureBasis:
    """V = I: the ridge acts on w itself."""
    return FeatureBasis(torch.eye(dim, dtype=torch.float64))


def pair_basis(
    phi_a: FeatureArray,
    phi_b: FeatureArray,
    *,
    num_components: int | None = None,
    whiten: bool = True,
    centre: bool = True,
    blocks: int = 1,
    spread: Spread = ALONE,
) -> FeatureBasis:
    """Principal directions of the pair differences of phi_a, phi_b (n, d), orthogonal to the mean feature.

    `num_components` keeps the leading ones (None: all whose second moment exceeds 1e-10 times the largest). `whiten`
    gives every coordinate of φ_a − φ_b unit second moment; otherwise their mean second moment is 1. blocks: of d/blocks
    features each, whose differences first get the same mean square. ValueError when no direction is left.
    """
    first, second = as_double(phi_a, "phi_a", 2), as_double(phi_b, "phi_b", 2)
    num_pairs = count_pairs(first, second, spread)
    difference = first - second
    unit = torch.ones(first.shape[1], dtype=torch.float64)
    if blocks > 1:
        unit = _units(difference, blocks, num_pairs, spread)
        first, second, difference = first * unit, second * unit, difference * unit
    if centre:
        mean = spread.sum(first.sum(0) + second.sum(0)) / (2.0 * num_pairs)
        norm = torch.linalg.vector_norm(mean)
        if norm > 0:
            direction = mean / norm
            difference = difference - torch.outer(difference @ direction, direction)
    moments, vectors = torch.linalg.eigh(spread.sum(difference.T @ difference) / num_pairs)
    moments, vectors = spread.first(moments.flip(0)), spread.first(vectors.flip(1))
    usable = int((moments > 1e-10 * moments[0].clamp(min=0)).sum())
    if usable == 0 or moments[0] <= 0:
        raise ValueError("the features of the two responses never differ, so nothing can be fitted: check the features")
    count = usable if num_components is None else min(num_components, usable)
    if count < 1:
        raise ValueError(f"num_components must be at least 1, got {num_components}")
    scale = moments[:count] if whiten else moments[:count].mean().expand(count)
    return FeatureBasis((unit[:, None] * vectors[:, :count] / scale.sqrt()).contiguous())


def _units(difference: Tensor, blocks: int, num_pairs: int, spread: Spread) -> Tensor:
    """(d,) factors by which each block of features gets a mean square of 1; 1 for a block that never differs."""
    squares = spread.sum(difference.square().sum(0)).reshape(blocks, -1).sum(1) / num_pairs
    factor = torch.where(squares > 0, squares, 1.0).rsqrt()
    return spread.first(factor).repeat_interleave(difference.shape[1] // blocks)
