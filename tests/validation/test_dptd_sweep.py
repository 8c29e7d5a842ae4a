"""The sweep: equal numbers of tries, calibrated noise, chosen and reported apart, resumed from its files; its page."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.accounting.subset_sampling import composed_epsilon
from pipeline.validation.dptd import region, sweep
from pipeline.validation.dptd.sweep import CLIPS, DELTA, GAINS, STEPS, tries


def test_every_method_has_as_many_tries_and_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "EPSILONS", (4.0,))
    found = tries(500)
    assert set(Counter((each.method, each.epsilon) for each in found).values()) == {len(CLIPS) * len(GAINS["DPTD"])}
    plans = {"DPTD": (STEPS, 1), "DPGLD": (sweep.FULL_STEPS, 500), "DPSRM": (STEPS // (2 * sweep.BATCH), sweep.BATCH)}
    for each in {one.method: one for one in found if one.epsilon == 4.0}.values():
        steps, size = plans[each.method]
        assert composed_epsilon(500, [(each.noise, steps)], DELTA, size) <= 4.0


def test_a_small_sweep_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 60, "FULL_STEPS": 2, "ROWS": (40,), "NAMES": ("cartpole",), "EPSILONS": (1.0,),
                        "REPORT": 3}.items():  # fmt: skip
        monkeypatch.setattr(sweep, name, value)
    sweep.run_sweep(tmp_path)
    first = (tmp_path / "cartpole-40.json").read_bytes()
    monkeypatch.setattr(sweep, "_cell", lambda *_: pytest.fail("the cell was there"))
    sweep.run_sweep(tmp_path)
    assert (tmp_path / "cartpole-40.json").read_bytes() == first
    cells = json.loads(first)["results"]
    assert region.settings(cells) == [("cartpole", 40, 1.0)]
    assert len(region.reported(cells, "cartpole", 40, "SGD", 1.0)) == 3
    assert (tmp_path / "region.png").is_file()
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == len(cells) + 1


def test_the_table_shows_who_is_better() -> None:
    cells = []
    for method, level in (("DPTD", 5.0), ("noise alone", 9.0), ("SGD", 3.0), ("DPGLD", 5.0)):
        spread = level + np.array([0.1, -0.1, 0.05]) * (-1.0 if method == "DPGLD" else 1.0)
        epsilon = None if method == "SGD" else 1.0
        cells.append({"task": "cartpole", "rows": 40, "method": method, "epsilon": epsilon, "clip": 0.1, "gain": 2.0,
                      "noise": 0.5, "errors": spread.tolist(), "constant_error": 4.0})  # fmt: skip
    cells += [{**cells[1], "method": method} for method in ("untrained", "DPSRM")]
    line = region.table(cells).splitlines()[-1]
    errors = "5.05 | 9.05 − | 9.05 − | 3.05 + | 4.95 ± | 9.05 −"
    assert line == f"| Cart Pole | 40 | 1 | 0.1 | 2 | {errors} | 4.00 | 5.2, 7.3 |"
    assert len(region.draw(cells).axes) == 1
