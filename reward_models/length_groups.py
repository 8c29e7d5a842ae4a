"""Batches of pairs of similar length, the same for any number of processes and after a resumption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

POOL = 50


class PairLengthSampler(Sampler[int]):
    """The order of an epoch: pools of `POOL` random global batches, sorted by length within, batches then shuffled.

    `lengths` (n,) in tokens of what is padded: the row of a pair, or its longer text where the two have rows of their
    own; `batch_size` is the global one, over processes and accumulation steps, so sharding changes no batch. The order
    is a function of `seed` and the epoch. A last, incomplete batch of the epoch stays last.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        whole = len(order) // self.batch_size * self.batch_size
        batches = [
            batch
            for pool in order[:whole].split(self.batch_size * POOL)
            for batch in pool[self.lengths[pool].argsort(stable=True)].split(self.batch_size)
        ]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield from batches[number].tolist()
        yield from order[whole:].tolist()
