"""The result of an accountant, and its refusal of arguments outside its theorem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import upper_text


class OutsideAssumptions(UserError):
    """An input that the theorem does not cover. `name` is the parameter, as in Python; the message starts with it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of what `statement` names, if every one of `assumptions` is true.

    epsilon: finite, >= 0, nats. delta: in [0, 1]; 1 promises nothing, and the statement says so. details: further
    numbers of JSON types, such as the same guarantee by another theorem.
    """

    epsilon: float
    delta: float
    statement: str
    assumptions: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON types: the four fields first, then the details."""
        stated = {"epsilon": self.epsilon, "delta": self.delta, "statement": self.statement}
        return {**stated, "assumptions": list(self.assumptions), **self.details}


def guarantee(epsilon: float, delta: float, what: str, assumptions: tuple[str, ...], **details: Any) -> Guarantee:
    """A `Guarantee` whose statement is `what` with the numbers; δ above 1 becomes 1 and is called vacuous.

    Raises UserError if ε is not finite: there is no guarantee to state.
    """
    if not math.isfinite(epsilon):
        raise UserError("the bound is infinite for these numbers: ask for more noise, a larger kl_coef or more data")
    if delta >= 1.0:
        text = f"{what}: VACUOUS, as delta = 1 promises nothing (the bound is {delta:.3g})"
    elif delta > 0.0:
        text = f"{what} is ({upper_text(epsilon)}, {delta:.6g})-differentially private"
    else:
        text = f"{what} is {upper_text(epsilon)}-differentially private (delta = 0)"
    return Guarantee(float(epsilon), float(min(delta, 1.0)), text, assumptions, details)


def positive(name: str, value: float) -> float:
    """`value` if it is a finite number above 0; OutsideAssumptions otherwise."""
    if not 0.0 < value < math.inf:
        raise OutsideAssumptions(name, f"must be a finite number above 0, got {value!r}; pass a positive number")
    return float(value)


def not_negative(name: str, value: float) -> float:
    """`value` if it is a finite number of at least 0; OutsideAssumptions otherwise."""
    if not 0.0 <= value < math.inf:
        raise OutsideAssumptions(name, f"must be a finite number of at least 0, got {value!r}; pass 0 for none")
    return float(value)


def probability(name: str, value: float, *, zero: bool = False, one: bool = False) -> float:
    """`value` if it lies in (0, 1), with the ends that `zero` and `one` allow; OutsideAssumptions otherwise."""
    if not (0.0 < value < 1.0 or (zero and value == 0.0) or (one and value == 1.0)):
        interval = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
        raise OutsideAssumptions(name, f"must lie in {interval}, got {value!r}; correct it")
    return float(value)


def count(name: str, value: int, least: int = 1) -> int:
    """`value` if it is a whole number of at least `least`; OutsideAssumptions otherwise."""
    if isinstance(value, bool) or not math.isfinite(value) or value != int(value) or value < least:
        raise OutsideAssumptions(name, f"must be a whole number of at least {least}, got {value!r}; correct it")
    return int(value)
