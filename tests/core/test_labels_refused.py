"""Every public function that takes labels refuses what is not -1 or +1, in one line that says so."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from private_rlhf.core.errors import UserError
from private_rlhf.core.noise import LabelNoise, check_label
from private_rlhf.labelling.labellers import Command
from private_rlhf.online.posterior import Learner
from private_rlhf.privacy.batches import KEYS, Columns, canonicalize, release_labels
from private_rlhf.privacy.label_lists import privatize
from private_rlhf.privacy.local import DrawStore, privatize_label
from private_rlhf.privacy.mechanism import Coins, RandomizedResponse, last_coin
from private_rlhf.privacy.prf import Prf
from private_rlhf.privacy.records import TEXT
from private_rlhf.reward_models.bonus_fit import fit_ensemble
from private_rlhf.reward_models.linear import PairProblem, fit_linear
from private_rlhf.reward_models.losses import LOSSES, get_loss
from private_rlhf.reward_models.ridge import ridge_by_evidence, select_ridge

PRF, NOISE = Prf(bytes(range(32))), LabelNoise.of(1.0)
DRAWN = torch.Generator().manual_seed(0)
ROWS = 40
A, B = (torch.randn(ROWS, 3, dtype=torch.float64, generator=DRAWN) for _ in range(2))
FIT, MARGIN = fit_linear(A, B, torch.ones(ROWS), NOISE, ridge=1.0), A[:, 0]


def columns(labels: np.ndarray) -> Columns:
    texts = [pa.array([f"{side} {row}" for row in range(ROWS)]) for side in ("prompt", "first", "second")]
    return Columns(*texts, labels.astype(np.int8), TEXT, np.zeros(ROWS, bool))


def keys(labels: np.ndarray) -> np.ndarray:
    made = np.zeros(ROWS, KEYS)
    made["label"] = labels
    return made


OF_ONE: dict[str, Callable[[Any], Any]] = {
    "noise": check_label,
    "mechanism": lambda label: RandomizedResponse(1.0).release(PRF, b"event", label),
    "last coin": lambda label: last_coin(label, 1 << 127, Coins(PRF, b"event")),
    "local mode": lambda label: privatize_label(label, 1.0),
    "list": lambda label: privatize([label], 1.0)[0],
}
OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"{name} loss": lambda z, name=name: get_loss(name).value(MARGIN, z, NOISE) for name in LOSSES},  # type: ignore[misc]
    **{f"{name} slope": lambda z, name=name: get_loss(name).slope(MARGIN, z, NOISE) for name in LOSSES},  # type: ignore[misc]
    "public loss": lambda z: get_loss("private_likelihood").value(MARGIN, z, float("inf")),
    "pair problem": lambda z: PairProblem(A, B, z, NOISE, None, get_loss("private_likelihood")),
    "linear fit": lambda z: fit_linear(A, B, z, NOISE, ridge=1.0),
    "ridge": lambda z: select_ridge(A, B, z, NOISE, ridges=(1.0, 2.0), folds=torch.arange(len(z)) % 2),
    "evidence": lambda z: ridge_by_evidence(A, B, z, NOISE, None),
    "ensemble": lambda z: fit_ensemble(FIT, A, B, z),
    "online": lambda z: Learner(3, NOISE, None, 1.0).add(A, B, z),
}
OF_ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "batch": lambda labels: canonicalize(columns(labels), 0, PRF),
    "release": lambda labels: release_labels(RandomizedResponse(1.0), PRF, keys(labels)),
}


def refused(act: Callable[[], Any]) -> None:
    with pytest.raises((UserError, ValueError), match=r"must be (\d+ of )?-1 or \+1") as caught:
        act()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "label", [0, 3, -2, 0.5, False, True, float("nan"), np.True_, torch.tensor(1), np.ones(2), "1", None]
)
@pytest.mark.parametrize("name", OF_ONE)
def test_a_label(name: str, label: Any) -> None:
    refused(lambda: OF_ONE[name](label))


@pytest.mark.parametrize("kind", [int, float, np.int8, np.float32, Fraction])
@pytest.mark.parametrize("name", OF_ONE)
def test_a_good_label(name: str, kind: Callable[[int], Any]) -> None:
    """Whatever number it comes as, an int comes back: the kind of a label that was kept is not told from a coin's."""
    found = [OF_ONE[name](kind(good)) for good in (-1, 1) * 20]
    assert {type(label) for label in found} == {int}
    assert set(found) <= {-1, 1}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors(name: str) -> None:
    """One wrong label among good ones is enough, and labels of 0 and 1 are not read in another way."""
    good = torch.ones(ROWS, dtype=torch.float64)
    good[::3] = -1
    for wrong in (0.0, 3.0, 0.5):
        labels = good.clone()
        labels[7] = wrong
        refused(lambda labels=labels: OF_TENSORS[name](labels))  # type: ignore[misc]
    refused(lambda: OF_TENSORS[name]((good + 1) / 2))
    refused(lambda: OF_TENSORS[name](torch.ones(ROWS, dtype=torch.bool)))
    with pytest.raises(ValueError, match="must be") as caught:
        OF_TENSORS[name](torch.where(good > 0, good, torch.nan))
    assert "\n" not in str(caught.value)
    OF_TENSORS[name](good)


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_arrays(name: str) -> None:
    good = np.where(np.arange(ROWS) % 3, 1, -1)
    for wrong in (0, 3):
        labels = good.copy()
        labels[7] = wrong
        refused(lambda labels=labels: OF_ARRAYS[name](labels))  # type: ignore[misc]
    OF_ARRAYS[name](good)


def test_a_belief_stays_as_it_was() -> None:
    learner = Learner(3, NOISE, None, 1.0)
    refused(lambda: learner.add(A, B, torch.zeros(ROWS)))
    assert len(learner) == 0


def test_labels_of_a_program_and_places_in_the_store(tmp_path: Path) -> None:
    """The store of local mode counts places, 0 and 1, where labels are -1 and +1."""
    labeller = Command(tmp_path / "command", 1.0, "true")
    refused(lambda: list(labeller.draw({"one": 0})))
    store = DrawStore(tmp_path / "draws.db", (1, -1))
    with pytest.raises(UserError, match="place of a label must be 0 or 1"):
        store.answer([("one", -1)], 1.0)
    assert store.answer([("one", 0)], 1.0)[0] in (0, 1)
