"""Known rewards r*: the embedded task's, and those that installed distributions add by an entry point of the group
`private_rlhf.truths`: a class as `Truth` says, by the name that `evaluate.truth` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from private_rlhf.core.errors import MOST_NAME, UserError, one_line

GROUP = "private_rlhf.truths"
HUMAN = "hh_truth"
"""The truth behind `evaluate.judge.embedding`."""


class Truth(Protocol):
    """A known reward.

    Attributes:
        description: a noun phrase for the notes of a report.
    """

    description: str

    def __init__(self) -> None: ...

    @staticmethod
    def check() -> None:
        """Checks without loading weights that all it needs is installed. Raises: UserError: it is not."""
        ...

    def rewards(self, prompts: Sequence[str], answers: Sequence[str]) -> Any:
        """(n,) float64 tensor of r*."""
        ...


def truth_name(truth: str | None, evaluation_prompts: str) -> str | None:
    """The name of the known reward of a run, from `evaluate.truth` and `data.evaluation_prompts`; None without one."""
    return truth or ("embedded" if evaluation_prompts == "embedded" else None)


def load_truth(name: str, key: str = "evaluate.truth") -> type[Truth]:
    """The class behind a name, with all it needs. key: what messages call the setting. UserError: it, or what it needs,
    is not installed."""
    places = tuple(entry_points(group=GROUP, name=name))
    if not places:
        raise UserError(
            f"{key} must be the name of an installed truth, got {one_line(name, MOST_NAME)}: install the package that"
            f" brings it (private-rlhf-lab brings {HUMAN})"
        )
    try:
        truth: type[Truth] = places[0].load()
    except ImportError as error:
        raise UserError(f"{key} {name} cannot be loaded ({error}): install its package again") from None
    truth.check()
    return truth


def reward_function(name: str) -> Callable[[str, str], float]:
    """r*(prompt, response) of a known truth. UserError: it is not installed."""
    if name == "embedded":
        from private_rlhf.embedded.truth import true_reward

        return true_reward
    truth = load_truth(name)()
    return lambda prompt, response: float(truth.rewards([prompt], [response])[0])
