"""Pairs spread over processes: each holds the features of some, and sums over pairs are added up over processes.

Process 0 makes every decision that depends on a sum and broadcasts it; otherwise rounding differences would make
processes diverge.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor


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
        total: Tensor = self._accelerator.reduce(self._sent(value), "sum")
        return total.cpu()

    def first(self, value: Tensor) -> Tensor:
        of_first: Tensor = broadcast(self._sent(value))
        return of_first.cpu()

    def all(self, values: Tensor) -> Tensor:
        return torch.cat(gather_object([values.clone()]))  # a view, pickled, takes the whole storage under it along

    def _sent(self, value: Tensor) -> Tensor:
        """A copy where the processes meet."""
        return value.to(self._accelerator.device, copy=True).contiguous()


ALONE = Spread()
