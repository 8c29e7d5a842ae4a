"""Section `privatize` of the recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from private_rlhf.core.noise import is_public
from private_rlhf.core.user import default_key
from private_rlhf.privacy.person import split_budget
from private_rlhf.recipe.load import IF_SET, NO_EFFECT, STRICT
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass


def refuse_holder(trust: Any) -> Any:
    """`holder` is refused with what to do instead, before the list of values is."""
    if trust == "holder":
        raise ValueError(
            "must be labeller or left out, since one noisy sum of the labels is a study of lab/"
            " (private_rlhf_lab.benches.central_against_local): remove it"
        )
    return trust


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrivatizeConfig:
    """Randomised response on the labels (PPKL Eq. 7)."""

    epsilon: float = Field(default=None, allow_inf_nan=True)  # type: ignore[assignment]
    """Label-LDP parameter of one released label; > 0. `.inf` needs data.public_labels and marks the run NOT PRIVATE.
    Required, but with person_budget."""
    person_budget: Annotated[float | None, IF_SET] = Field(default=None, gt=0)
    """E: what one person may lose by all their labels under the key. It sets epsilon, max_events_per_person, and budget
    per person: k labels at E/k each, with the whole number k that carries most information (`account person` prints the
    table). Needs labeler_column; with `online`, a labeller that knows persons."""
    person_questions: Annotated[int | None, IF_SET] = Field(default=None, gt=0)
    """With person_budget, the most labels that anyone gave, where that is known: k is not above it."""
    key_file: Path | None = None
    """Owner-only 256-bit key, made on first use; keep it outside every run directory. null: the user's own, in
    `~/.local/state/private-rlhf/owner.key`, whatever folder a run starts from."""
    insecure_seed: int | None = None
    """Replaces the key by a public seed, for experiments; marks the run NOT PRIVATE."""
    budget: float | None = Field(default=None, gt=0)
    """Refuse a release after which any event (or person) has lost more than this under the key. null: the last one
    that was stated for this key holds."""
    budget_per: Literal["event", "person"] = "event"
    """What the budget is for; `person` needs labeler_column."""
    labeler_column: str | None = None
    """Column that names who gave the label: two labellers of one pair are two events. Not released."""
    event_column: str | None = None
    """Column that tells several labels of one labeller on one pair apart; empty for none. Not released."""
    corrects_column: Annotated[str | None, NO_EFFECT] = None
    """Column that is empty but in rows whose label corrects an earlier one of the same pair: there it holds the
    pair's record id, as the release states it. Such a row is an event of its own; both draws are charged. Not
    released."""
    max_events_per_person: Annotated[int | None, IF_SET] = Field(default=None, gt=0)
    """Labels of one labeller that are ever released under the key; the others are left out for good, chosen by the key
    and not by their labels. Needs labeler_column. null: the last one that was stated for this key holds."""
    add_up_renamed: Annotated[bool, NO_EFFECT] = False
    """Pairs that were released before under other names or in another spelling are drawn again, and charged the sum,
    instead of refused."""
    add_up_keys: Annotated[bool, NO_EFFECT] = False
    """Pairs that another key of yours released before are drawn again under this one, and charged the sum, instead of
    refused."""
    epsilon_column: Annotated[str | None, IF_SET] = None
    """Column that holds the ε of each label, one of epsilon_levels, in place of one epsilon. Released, as `epsilon`."""
    epsilon_levels: Annotated[list[float] | None, IF_SET] = None
    """With epsilon_column: every ε that may stand in it, 2 to 16. For online.labeller: terminal, the choice there."""
    levels_before_labels: Annotated[bool, NO_EFFECT] = False
    """With epsilon_column: your word that every level was set before its label was given. Without it each person must
    have one level in a release, since a level that is chosen after the answer tells it. Not checked."""
    count_epsilon: float | None = Field(default=None, gt=0)
    """With evaluation_labels: laplace, what the noisy counts of one evaluation cost each evaluation label, all counts
    together and on top of epsilon."""
    trust: Annotated[Literal["labeller"] | None, IF_SET, BeforeValidator(refuse_holder)] = None
    """A key of earlier versions: with either value every label goes through randomised response."""
    delta: Annotated[None, IF_SET] = None
    """A key of earlier versions, always null: randomised response has δ = 0."""

    @property
    def private(self) -> bool:
        """True if labels go through a randomiser with a secret key."""
        return not is_public(self.epsilon) and self.insecure_seed is None

    @property
    def key_path(self) -> Path:
        """The path of the key file."""
        return default_key() if self.key_file is None else self.key_file.expanduser()

    def __post_init__(self) -> None:
        if self.person_budget is not None:
            self._share_out(self.person_budget)
        elif self.person_questions is not None:
            raise ValueError("person_questions must go with person_budget: give both, or remove it")
        self._take_levels()
        if getattr(self, "epsilon", None) is None:
            raise ValueError("key 'privatize.epsilon' is required")
        if self.budget is not None and self.budget_per == "person" and self.labeler_column is None:
            raise ValueError("labeler_column must be given for budget_per: person: name the column of the labeller")
        if self.budget is None and self.budget_per == "person":
            raise ValueError("budget must be given for budget_per: person: give one, or remove budget_per")
        if self.max_events_per_person is not None and self.labeler_column is None:
            raise ValueError("labeler_column must be given for max_events_per_person: name the column of the labeller")
        if math.isnan(self.epsilon) or self.epsilon <= 0:
            raise ValueError("epsilon must be a number > 0 (.inf for a non-private run on public labels)")

    def _take_levels(self) -> None:
        """Set epsilon to the largest level, and refuse what does not go with an ε for each label."""
        if self.epsilon_column is not None and self.epsilon_levels is None:
            raise ValueError("epsilon_column must go with epsilon_levels: give both, or remove it")
        if self.epsilon_levels is None:
            return
        if not all(0.0 < level < math.inf for level in self.epsilon_levels) or len(self.epsilon_levels) < 2:
            raise ValueError("epsilon_levels must be two or more finite numbers above 0")
        if self.person_budget is not None:
            raise ValueError("epsilon_column must go without person_budget: leave one of them out")
        largest = max(self.epsilon_levels)
        if getattr(self, "epsilon", None) not in (None, largest):
            raise ValueError(f"epsilon_levels make epsilon {largest:g}, the largest of them: leave it out")
        object.__setattr__(self, "epsilon", float(largest))

    def _share_out(self, total: float) -> None:
        """Set the keys that person_budget implies, and refuse other values of them."""
        labels, epsilon = split_budget(total, self.person_questions)
        implied: dict[str, Any] = {"epsilon": epsilon}
        if self.labeler_column is not None:
            implied |= {"max_events_per_person": labels, "budget": total, "budget_per": "person"}
        for name, value in implied.items():
            stated = getattr(self, name)
            if stated is not None and (name, stated) != ("budget_per", "event") and stated != value:
                raise ValueError(f"person_budget {total:g} makes {name} {value}, not {stated}: leave it out")
            object.__setattr__(self, name, value)
