"""Section `online` of the recipe: pairs are asked about round by round, instead of read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from private_rlhf.recipe.load import IF_SET, STRICT
from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CrowdSettings:
    """Simulated persons; see `private_rlhf.labelling.labellers.Crowd`."""

    persons: int = Field(gt=0)
    most: int = Field(gt=0)
    """Questions that a person answers."""
    temperature: float = Field(default=1.0, gt=0)
    """The margin is divided by it."""
    laziness: float = Field(default=0.0, ge=0, le=1)
    """Share of answers that are fair coins."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OnlineConfig:
    """Rounds of questions (POKL Algorithm 2): candidates of π_ref, a choice of pairs, private answers, a new r̄."""

    rounds: int = Field(default=10, gt=0)
    questions: int = Field(default=100, gt=0)
    """Of each round. Each pair of answers is asked once in a run and the runs it goes on from: rounds x questions may
    not exceed the pairs of the candidates."""
    evaluation_questions: int = Field(default=100, gt=1)
    """At most, one on each held-out prompt, about two answers of π_ref: what r̄ is checked by, never learnt from."""
    strategy: Literal["passive", "pokl", "mixture", "duel", "fisher", "policy"] = "pokl"
    """The choice of pairs to ask, see `private_rlhf.online.strategies`; it sees only released answers. `pokl` needed
    the fewest labels where they were compared (docs/results/online.md)."""
    candidates: int = Field(default=8, gt=1)
    """Answers of π_ref to each prompt, among which the policy ∝ π_ref·exp(r̄/kl_coef) and the questions choose."""
    max_prompts: int | None = Field(default=128, gt=0)
    """Prompts that questions are about, evenly from data.prompts; null: all."""
    after: Annotated[Path | None, IF_SET] = None
    """A finished run of the same recipe (`private-rlhf online --policies N` makes them): its answers count, its PPO
    policy gives the candidates, and PPO starts from it. The reference of KL and J stays π_ref."""
    kappa: float = Field(default=1.0, ge=0)
    """Of the bonus b of `pokl` and `duel`."""
    mixture: float = Field(default=100.0, ge=0)
    """m of `mixture`."""
    labeller: Literal["truth", "crowd", "files", "command", "terminal", "page"] = "truth"
    """Who answers. `truth`, `crowd`: the embedded task's known reward, through persons or not, by Bradley–Terry and a
    seed (nobody's secret: the run is NOT PRIVATE). `files`: questions.jsonl goes out and answers.jsonl comes in, with
    labels that were randomised at privatize.epsilon where they were given. `command`: a program, `terminal`: a person
    here; their answers are randomised before they are stored. `page`: people at web pages, which randomise; begin the
    store with `private-rlhf label serve`. Where people choose their ε, privatize.epsilon is the largest level."""
    folder: Path | None = None
    """Of `files`, `command`, `terminal` and `page`: what was asked and drawn. Keep it: nothing in it is drawn twice."""
    command: str | None = None
    """Of `command`: program and options."""
    crowd: CrowdSettings | None = None
    """Of `crowd`."""

    def __post_init__(self) -> None:
        if self.simulated == (self.folder is not None):
            raise ValueError(f"labeller: {self.labeller} {'needs no' if self.simulated else 'needs a'} folder")
        if (self.labeller == "command") != (self.command is not None):
            raise ValueError("command must be given for labeller: command, and only for it: name a program")
        if (self.labeller == "crowd") != (self.crowd is not None):
            raise ValueError("crowd must be given for labeller: crowd, and only for it: add the section, or remove it")

    @property
    def simulated(self) -> bool:
        """True where answers are made by a seed from a known truth, so that nothing is private."""
        return self.labeller in ("truth", "crowd")
