"""Proof, in every iteration, that an engine draws from the weights that the trainer has.

δ is the engine's log-probability of a sampled token less the trainer's, nats. Its size on a server is compared with a
bound, and with what other weights would give: those of the version before, and π_ref. So a server that serves them is
found as soon as the weights have moved by more than rounding. A server may also tell right numbers and draw other
tokens: the place of each token in its distribution, the mass of likelier tokens plus a random part of its own, is
uniform on [0, 1) exactly if it was drawn from it, which a χ² test checks on all places so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from private_rlhf.core.errors import RunStopped
from private_rlhf.lm.distributed import turns
from private_rlhf.lm.generate import noise_of, sample_key
from private_rlhf.lm.kernels.token_terms import row_chunks, token_logprobs
from private_rlhf.lm.logprobs import TokenBatch, response_forward, token_batch
from private_rlhf.lm.numerics import precision
from private_rlhf.lm.rows import batches, sharing_of
from scipy.optimize import minimize_scalar
from scipy.stats import chisquare

NEARER = 6.0
"""Standard errors by which a server must be nearer to other weights to have them: chance 1e-9, by the normal law."""
PROBED = 16, 512
"""Responses of each process, and tokens, that are read again under these and other weights: as many at least."""
PASS = 16
"""Of them in a forward pass."""
BINS = 10
"""Of the places of tokens."""
CHANCE = 1e-9
"""Of the χ² test to stop a run whose sampler is right."""

CAUSES = {
    "base": "the base model without the adapter",
    "previous": "the adapter of the version before (stale)",
}
"""By name of the weights that a server may have instead."""

Weights = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Draws:
    """This process's responses, the engine's log-probabilities of their tokens, and the server of each."""

    prompts: Sequence[list[int]]
    responses: Sequence[list[int]]
    logprobs: Sequence[list[float]]
    replicas: Sequence[str]

    def spread(self, count: int, tokens: int) -> list[int]:
        """The first rows with so many responses and tokens, or all, by turns from one server after another."""
        turns = [self.replicas[:row].count(replica) for row, replica in enumerate(self.replicas)]
        rows = sorted(range(len(turns)), key=turns.__getitem__)
        sums = np.cumsum([len(self.responses[row]) for row in rows])
        return rows[: max(count, int(np.searchsorted(sums, tokens)) + 1)]

    def rows(self, picked: Sequence[int]) -> Draws:
        """Those rows."""
        return Draws(*([column[row] for row in picked] for column in vars(self).values()))


@dataclass(frozen=True)
class Gap:
    """δ of some tokens: their number, the sums of |δ| and of e^δ − δ − 1, the largest |δ| and the least δ."""

    tokens: int = 0
    total: float = 0.0
    divergence: float = 0.0
    largest: float = 0.0
    least: float = 0.0

    @classmethod
    def of(cls, engine: Sequence[float], trainer: Sequence[float]) -> Gap:
        """Of one response."""
        delta = np.array(engine) - np.array(trainer)
        with np.errstate(over="ignore"):
            divergence = float((np.exp(delta) - delta - 1).sum())
        return cls(len(delta), float(np.abs(delta).sum()), divergence, float(np.abs(delta).max()), float(delta.min()))

    def __add__(self, other: Gap) -> Gap:
        sums = self.tokens + other.tokens, self.total + other.total, self.divergence + other.divergence
        return Gap(*sums, float(np.maximum(self.largest, other.largest)), min(self.least, other.least))  # keeps NaN

    @property
    def mean(self) -> float:
        """Of |δ|."""
        return self.total / max(1, self.tokens)

    @property
    def facts(self) -> dict[str, float]:
        """For the history: largest and mean |δ|, mismatch KL per token, nats."""
        return {"largest": self.largest, "mean": self.mean, "kl": self.divergence / max(1, self.tokens)}


class SyncProof:
    """Compares what engines tell with what `policy` computes.

    Args:
        accelerator: of the run.
        policy: the bare causal LM or PEFT model.
        tokenizer: has `eos_token_id` and `pad_token_id`.
        temperature: of sampling.
        bounds: nats that δ may reach, on average and of one token.
        call: what calls the policy, where its weights are split; itself by default.
        together: each forward pass needs every process.
        joint: every process calls `check`, which compares the draws of all; each its own by itself otherwise.
    """

    def __init__(self, accelerator: Accelerator, policy: Any, tokenizer: Any, temperature: float,
                 bounds: tuple[float, float], call: Callable[..., Any] | None = None, together: bool = False,
                 joint: bool = True) -> None:
        self.accelerator, self.policy, self.tokenizer = accelerator, policy, tokenizer
        self.call, self.together, self.joint = call, together, joint
        self.temperature, self.bounds = temperature, bounds
        self.places = np.zeros(BINS)  # of all tokens read so far, on all processes
        self.checks = 0

    def check(
        self, draws: Draws, logprobs: Sequence[Sequence[float]] | None, others: Mapping[str, Weights]
    ) -> dict[str, float]:
        """Facts of the comparison for the history.

        logprobs: the trainer's, by row; None to read all rows here. others: weights that a server may have instead.

        Raises:
            RunStopped: a server draws from other weights, or in another way; it names the likely cause.
        """
        if logprobs is None:
            logprobs = self.read(draws)
        gaps = self._gaps(draws, logprobs)
        some = draws.rows(draws.spread(*PROBED))
        here = self.read(some, places=True)
        near, nearer = {"": self._gaps(some, here)}, {}
        for name, weights in others.items():
            with weights():
                there = self.read(some)
            near[name], nearer[name] = self._gaps(some, there), self._nearer(some, here, there)
        for replica, gap in sorted(gaps.items()):
            means = {name: each.get(replica, Gap()).mean for name, each in near.items()}
            mean, floor = means.pop(""), self.bounds[0] / 10
            closer = [name for name in means if nearer[name].get(replica, 0.0) > NEARER]
            closer = closer or [name for name in means if means[name] < mean / 2 and mean > floor]
            if closer or not (gap.mean <= self.bounds[0] and gap.largest <= self.bounds[1]):
                causes = [CAUSES[name] for name in closer if means[name] <= 2 * min(means.values())]
                raise RunStopped(self._sentence(replica, gap, " or ".join(causes) or self._cause(some, replica, gap)))
        whole = sum(gaps.values(), Gap())
        moved = {f"from_{name}": sum(near[name].values(), Gap()).mean for name in others}
        return {"tokens": whole.tokens, **whole.facts, **moved, "sampler_p": self._sampler(gaps)}

    def gather(self, rows: list[Any]) -> list[Any]:
        """The rows of all processes that go together."""
        return gather_object(rows) if self.joint else rows

    # --- reading ------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        """Within, another model is read in the policy's place."""
        policy, self.policy = self.policy, model
        try:
            yield
        finally:
            self.policy = policy

    def read(self, draws: Draws, temperature: float | None = None, places: bool = False) -> list[list[float]]:
        """The policy's log-probabilities, by row; places: counts those of the tokens too."""
        rows: dict[int, list[float]] = {}
        counts = np.zeros(BINS)
        for picked, batch, logits in self._logits(draws):
            terms = batch.spread(token_logprobs(logits, batch.tokens, temperature or self.temperature)).tolist()
            rows |= {row: terms[place][: len(draws.responses[row])] for place, row in enumerate(picked)}
            if places:
                key = sample_key("places", self.checks, self.accelerator.process_index, *picked)
                found = _places(logits, batch.tokens, self.temperature, key)
                counts += np.histogram(found, BINS, (0.0, 1.0))[0]
        if places:
            self.checks += 1
            self.places += sum(self.gather([counts]))
        return [rows[row] for row in range(len(draws.responses))]

    @torch.no_grad()
    def _logits(self, draws: Draws) -> Iterator[tuple[Sequence[int], TokenBatch, torch.Tensor]]:
        """(rows, batch, logits) of one forward pass after another."""
        sharing, device = sharing_of(self.policy), self.accelerator.device
        joined = [[*prompt, *response] for prompt, response in zip(draws.prompts, draws.responses, strict=True)]
        stand_in, pad = [[self.tokenizer.eos_token_id]], self.tokenizer.pad_token_id
        for picked in turns(batches(joined, sharing, PASS), device, self.together):
            texts = [draws.prompts[row] for row in picked], [draws.responses[row] for row in picked]
            batch = token_batch(texts[0] or stand_in, texts[1] or stand_in, pad, device, sharing=sharing)
            with precision(self.accelerator):
                logits, _ = response_forward(self.policy, batch, self.call)
            if picked:
                yield picked, batch, logits

    def _gaps(self, draws: Draws, logprobs: Sequence[Sequence[float]]) -> dict[str, Gap]:
        """By server, of all processes."""
        found: dict[str, Gap] = {}
        mine = [(name, Gap.of(*pair)) for name, *pair in zip(draws.replicas, draws.logprobs, logprobs, strict=True)]
        for name, gap in self.gather(mine):
            found[name] = found.get(name, Gap()) + gap
        return found

    def _nearer(
        self, draws: Draws, here: Sequence[Sequence[float]], there: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """By server, standard errors by which it is nearer to the log-probabilities `there` than to those `here`."""
        sums: dict[str, np.ndarray] = {}
        for name, *rows in self.gather(list(zip(draws.replicas, draws.logprobs, here, there, strict=True))):
            engine, one, other = (np.array(row) for row in rows)
            gain = np.abs(engine - one) - np.abs(engine - other)
            sums[name] = sums.get(name, np.zeros(2)) + np.array([gain.sum(), (gain**2).sum()])
        return {name: float(total / np.sqrt(max(squares, 1e-300))) for name, (total, squares) in sums.items()}

    # --- causes -------------------------------------------------------------------------------------------------------

    def _cause(self, draws: Draws, replica: str, gap: Gap) -> str:
        """The likely cause of a difference that no other weights explain."""
        rows = draws.rows([row for row, name in enumerate(draws.replicas) if name == replica])

        def distance(log_temperature: float) -> float:
            found = self._gaps(rows, self.read(rows, temperature=math.exp(log_temperature)))
            return found.get(replica, Gap()).mean

        span = math.log(0.1), math.log(10)
        best = minimize_scalar(distance, bounds=span, method="bounded", options={"maxiter": 20})
        if best.fun < distance(math.log(self.temperature)) / 4:
            other = f"temperature {math.exp(best.x):.2g} in place of {self.temperature:g}"
            return f"{other}, or numbers from before it (--logprobs-mode processed_logprobs)"
        if gap.least > -self.bounds[0] * 10:
            return f"a cut tail (top-p, top-k or min-p), which keeps {math.exp(-gap.largest):.2g} of the mass or more"
        if gap.mean < 0.1:
            return "another precision (--dtype), or another version of the base model"
        return "log-probabilities of other tokens or prompts, another adapter or another base model"

    def _sampler(self, gaps: Mapping[str, Gap]) -> float:
        """The p-value of all places so far. RunStopped: the tokens were not drawn from the distributions."""
        tokens = int(self.places.sum())
        value = float(chisquare(self.places).pvalue) if tokens >= 5 * BINS else 1.0
        if value < CHANCE:
            raise RunStopped(
                f"the engine at {', '.join(sorted(gaps))} tells the right log-probabilities and draws other tokens (χ² "
                f"of {tokens} tokens, p = {value:.1g}); likely cause: a biased sampler, or a temperature or top-p after"
                " them. Nothing was learnt from them: restart that server, then this run"
            )
        return value

    def _sentence(self, replica: str, gap: Gap, cause: str) -> str:
        mean, largest = self.bounds
        return (
            f"the engine at {replica} does not draw from this policy: log-probabilities of {gap.tokens} tokens differ "
            f"by {gap.mean:.2g} nats on average (bound {mean:g}), at most {gap.largest:.2g} (bound {largest:g}); "
            f"likely cause: {cause}. Nothing was learnt from them: restart that server, then this run"
        )


def _places(logits: torch.Tensor, tokens: torch.Tensor, temperature: float, key: int) -> np.ndarray:
    """(N,) place of each token in [0, 1): the mass of likelier tokens, plus a random part of that of equal ones."""
    noise = noise_of([key], len(tokens))[0].to(logits.device)
    found = torch.empty(len(tokens), device=logits.device)
    for rows in row_chunks(logits):
        mass = (logits[rows].float() / temperature).softmax(dim=-1)
        chosen = mass.gather(-1, tokens[rows, None])
        above, equal = ((mass * which).sum(dim=-1) for which in (mass > chosen, mass == chosen))
        found[rows] = above + noise[rows] * equal
    return found.cpu().numpy().clip(0, 1)
