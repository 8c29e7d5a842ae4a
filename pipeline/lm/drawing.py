"""Engines that draw responses by one protocol: a model's own forward passes, or servers (`private_rlhf.rl.engines`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from private_rlhf.lm.generate import Sampling, sample_responses
from private_rlhf.lm.models import end_ids
from private_rlhf.lm.numerics import precision

if TYPE_CHECKING:
    from accelerate import Accelerator

Rows = Sequence[list[int]]
Numbers = Sequence[list[float]]
Drawn = tuple[list[list[int]], list[list[float]] | None]
"""Responses, and the engine's log-probability of each of their tokens where it tells."""


class Engine(ABC):
    """A sampler of responses under π, or under π_ref."""

    def publish(self, weights: Any) -> None:  # noqa: B027 - an engine on the policy itself has nothing to do
        """Make `weights`, a policy or the folder of its adapter, those that `sample` draws from. Every process calls
        it."""

    @abstractmethod
    def sample(self, model: Any, prompts: Rows, keys: Sequence[int], sampling: Sampling, at_reference: bool = False,
               progress: str | None = None) -> Drawn:
        """One response to each of this process's prompts, with the noise of its key.

        model: π or π_ref, as this process holds it. at_reference: it is π_ref. progress: label of a bar, or None.
        """

    def prove(self, prompts: Rows, responses: Rows, logprobs: Numbers, read: Numbers | None = None,
              at_reference: bool = False) -> dict[str, float]:
        """Facts, for the history, of what `sample` has just drawn.

        logprobs: the engine's. read: the trainer's, of all rows; None to read some here. at_reference: under π_ref.
        RunStopped: it was not drawn from the weights that were asked for.
        """
        return {}

    def draw(self, model: Any, prompts: Rows, keys: Sequence[int], sampling: Sampling, at_reference: bool = False,
             progress: str | None = None) -> list[list[int]]:
        """The responses of `sample`, proven on a part of them, for whoever does not read them all. Arguments and errors
        of `sample` and `prove`."""
        return self.sample(model, prompts, keys, sampling, at_reference, progress)[0]

    def summary(self, history: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """For the manifest: who the servers are, and the proof over all of a `history` and of `draw`."""
        return {}


@dataclass
class TransformersEngine(Engine):
    """The model's own forward passes: what is drawn depends on keys, not on batches or processes.

    accelerator: gives the numeric context of training; None for that of the weights.
    """

    accelerator: Accelerator | None
    tokenizer: Any
    batch_size: int

    def sample(self, model: Any, prompts: Rows, keys: Sequence[int], sampling: Sampling, at_reference: bool = False,
               progress: str | None = None) -> Drawn:
        """See `Engine`."""
        with nullcontext() if self.accelerator is None else precision(self.accelerator):
            return sample_responses(model, prompts, keys, sampling, pad_token_id=self.tokenizer.pad_token_id,
                                    eos_token_id=end_ids(model, self.tokenizer), batch_size=self.batch_size,
                                    progress=progress), None
