"""Pairs spread over processes: what a fit to all of them has to be told by the other processes.

Each process holds the features of some pairs, and none those of all. Sums over pairs are added up over the processes.
What is solved or decided from such sums comes from the first process: machines that round in other ways would part.
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
        """(m, …) on the CPU, m being each process's own -> those of all processes, one process after another."""
        return values


class OverProcesses(Spread):
    """The processes of an accelerator. Each of them makes the same calls."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def sum(self, value: Tensor) -> Tensor:
        total: Tensor = self._accelerator.reduce(self._sent(value), "sum")
        return total.cpu()

    def first(self, value: Tensor) -> Tensor:
        told: Tensor = broadcast(self._sent(value))
        return told.cpu()

    def all(self, values: Tensor) -> Tensor:
        return torch.cat(gather_object([values.clone()]))  # a view, pickled, takes the whole storage under it along

    def _sent(self, value: Tensor) -> Tensor:
        """A copy where the processes meet."""
        return value.to(self._accelerator.device, copy=True).contiguous()


ALONE = Spread()
