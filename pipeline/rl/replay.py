"""Answers that a stage has drawn, kept in its folder: later passes over them, and other stages, learn from them again.

STAGE/replay/index.json                       whose answers these are: fingerprint of sft, seed, sampling
STAGE/replay/BY-NNNNN-P-of-Q.safetensors      the share of process P in one draw; a draw is whole with all Q of them

Token ids and numbers only: no text and no label.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from private_rlhf.core import atomic
from private_rlhf.core.documents import DocumentError, read_json
from private_rlhf.core.world import World
from private_rlhf.rl.rollout import Rollout
from safetensors.torch import load_file, save_file

REFERENCE, HELD_OUT = "reference", "held_out"
"""Draws of π_ref: answers to learn from, and those to prompts that nothing learns from."""
RELEASE = "release"
"""Answers of the released pairs, whoever wrote them."""
NUMBERS = ("score", "bonus", "reference_logprob", "logprob", "iteration")
SHARD = re.compile(r"(?P<by>\w+)-(?P<iteration>\d{5})-(?P<process>\d+)-of-(?P<processes>\d+)\.safetensors")


@dataclass(frozen=True)
class Answers:
    """N answers. The numbers are (N,) float32 on the CPU, NaN where they are not known.

    Attributes:
        prompts, responses: token ids.
        score: r̂ with the penalty for a cut answer and the weighted extra rewards: what is learnt from.
        bonus: Γ.
        reference_logprob, logprob: of the whole answer under π_ref and under the policy that drew it, nats.
        iteration: at which it was drawn.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    score: torch.Tensor
    bonus: torch.Tensor
    reference_logprob: torch.Tensor
    logprob: torch.Tensor
    iteration: torch.Tensor

    def __len__(self) -> int:
        return len(self.responses)

    @classmethod
    def of(cls, rollout: Rollout, iteration: int) -> Answers:
        """The responses of a rollout."""
        drawn = torch.full_like(rollout.scores, float(iteration))
        sums = rollout.reference_logprobs.sum(dim=1), rollout.logprobs.sum(dim=1)
        numbers = [column.float().cpu() for column in (rollout.scores, rollout.bonus, *sums, drawn)]
        return cls(rollout.prompts, rollout.responses, *numbers)

    @classmethod
    def unscored(
        cls, prompts: Sequence[list[int]], responses: Sequence[list[int]], iteration: int, score: Sequence[float] = ()
    ) -> Answers:
        """Answers of which the token ids, and perhaps the scores, are known."""
        unknown = torch.full((len(responses),), torch.nan)
        known = torch.tensor(score, dtype=torch.float32) if len(score) else unknown
        drawn = torch.full_like(unknown, float(iteration))
        return cls(list(prompts), list(responses), known, unknown, unknown, unknown, drawn)

    def take(self, rows: Sequence[int]) -> Answers:
        """The answers at these places."""
        numbers = [getattr(self, name)[list(rows)] for name in NUMBERS]
        return Answers([self.prompts[i] for i in rows], [self.responses[i] for i in rows], *numbers)

    def sorted(self) -> Answers:
        """In an order that does not depend on who drew which of them: by iteration, then by their token ids."""
        return self.take(
            sorted(range(len(self)), key=lambda i: (float(self.iteration[i]), self.prompts[i], self.responses[i]))
        )

    @property
    def by_prompt(self) -> Answers:
        """Those to a prompt beside each other, whenever they were drawn."""
        return self.take(sorted(range(len(self)), key=self.prompts.__getitem__))

    @property
    def learnable(self) -> Answers:
        """Those whose score and log-probabilities are known."""
        known = torch.stack([self.score, self.reference_logprob, self.logprob]).isfinite().all(dim=0)
        return self.take(known.nonzero().flatten().tolist())

    def save(self, path: Path) -> None:
        """Write a shard, whole or not at all."""
        tensors = {name: getattr(self, name).clone() for name in NUMBERS}
        for name, rows in (("prompt", self.prompts), ("response", self.responses)):
            tensors[f"{name}_lengths"] = torch.tensor([len(row) for row in rows], dtype=torch.int32)
            tensors[f"{name}_tokens"] = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        with atomic.new_file(path) as temporary:
            save_file(tensors, temporary)

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Answers:
        """All answers of some shards, in their order."""
        shards = [load_file(path) for path in paths]
        rows = {
            name: [row.tolist() for shard in shards
                   for row in shard[f"{name}_tokens"].split(shard[f"{name}_lengths"].tolist())]
            for name in ("prompt", "response")
        }  # fmt: skip
        numbers = [torch.cat([torch.empty(0), *(shard[name] for shard in shards)]) for name in NUMBERS]
        return cls(rows["prompt"], rows["response"], *numbers)


@dataclass(frozen=True)
class Replay:
    """The answers of one stage.

    Attributes:
        folder: STAGE/replay.
        identity: JSON; answers of another identity are not read, and `restart` removes them.
        world: this process and their number.
    """

    folder: Path
    identity: Mapping[str, Any]
    world: World

    def restart(self, iteration: int) -> None:
        """Forget what was drawn from `iteration` on, which is done again. The main process calls it."""
        if not self._mine():
            shutil.rmtree(self.folder, ignore_errors=True)
            atomic.write_json(self.folder / "index.json", dict(self.identity))
        atomic.sweep_temporaries(self.folder)
        for path, shard in self._shards():
            if int(shard["iteration"]) >= iteration:
                path.unlink()

    def write(self, by: str, iteration: int, share: Answers) -> None:
        """Keep this process's share of the draw number `iteration` of the policy `by`; every process writes one."""
        share.save(self.folder / f"{by}-{iteration:05d}-{self.world.rank}-of-{self.world.size}.safetensors")

    def write_rollout(self, by: str, iteration: int, rollout: Rollout) -> None:
        """As `write`, of a rollout that every process holds whole."""
        rows = range(self.world.rank, len(rollout.responses), self.world.size)
        self.write(by, iteration, Answers.of(rollout, iteration).take(rows))

    def read(self, *by: str) -> Answers:
        """All whole draws of the policies `by`, sorted; of every one but `held_out` without names."""
        return Answers.load([path for paths in self._draws(*by) for path in paths]).sorted()

    def completions(self) -> dict[tuple[int, ...], list[list[int]]]:
        """The draws of π_ref by prompt, all as token ids, in the order in which they were drawn."""
        found: dict[tuple[int, ...], list[list[int]]] = {}
        for paths in self._draws(REFERENCE, HELD_OUT):
            shares = [Answers.load([path]) for path in paths]  # each has every Q-th row, or whole prompts
            rows = zip_longest(*(zip(share.prompts, share.responses, strict=True) for share in shares))
            for prompt, response in filter(None, chain.from_iterable(rows)):
                found.setdefault(tuple(prompt), []).append(response)
        return found

    def _draws(self, *by: str) -> list[list[Path]]:
        """The shards of each whole draw, by process."""
        draws: dict[tuple[str, str, int], list[tuple[int, Path]]] = {}
        for path, shard in self._shards() if self._mine() else []:
            if shard["by"] in by or (not by and shard["by"] != HELD_OUT):
                draw = shard["by"], shard["iteration"], int(shard["processes"])
                draws.setdefault(draw, []).append((int(shard["process"]), path))
        whole = [sorted(parts) for (_, _, count), parts in sorted(draws.items()) if len(parts) == count]
        return [[path for _, path in parts] for parts in whole]

    def _mine(self) -> bool:
        try:
            return read_json(self.folder / "index.json") == dict(self.identity)
        except (OSError, DocumentError):
            return False

    def _shards(self) -> list[tuple[Path, re.Match[str]]]:
        named = [(path, SHARD.fullmatch(path.name)) for path in sorted(self.folder.glob("*.safetensors"))]
        return [(path, shard) for path, shard in named if shard is not None]
