"""The sweep: equal numbers of tries, calibrated noise, chosen and reported apart, resumed from its files; its page."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from private_rlhf.accounting.subset_sampling import composed_epsilon
from private_rlhf_lab.studies.dptd import region, sweep
from private_rlhf_lab.studies.dptd.environments import TASKS
from private_rlhf_lab.studies.dptd.sweep import DELTA, METHODS, Try, plan, tries


def test_every_method_has_as_many_tries_and_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "EPSILONS", (4.0,))
    monkeypatch.setattr(sweep, "STEPS", (50, 100, 200))
    found = [each for method in METHODS for each in tries(method, 500)]
    assert len(set(Counter(each.method for each in found).values())) == 1
    for each in {(one.method, one.steps): one for one in found if one.epsilon == 4.0}.values():
        assert composed_epsilon(500, [(each.noise, each.steps)], DELTA, plan(each.method, 500)[1]) <= 4.0


def test_every_seed_has_its_own_data_and_every_task_its_episodes() -> None:
    choosing = sweep.bed(TASKS["cartpole"], 30, (0, 1), sweep.CHOOSING)
    reporting = sweep.bed(TASKS["cartpole"], 30, (2, 3), sweep.REPORTING)
    starts = {each.state[0].tobytes() for bed in (choosing, reporting) for each in bed.data}
    assert len(starts) == 4
    held = [{row.tobytes() for row in bed.held_out.state.astype(np.float32)} for bed in (choosing, reporting)]
    assert not held[0] & held[1]
    assert not any({row.tobytes() for row in each.state} & held[1] for each in (*choosing.data, *reporting.data))


@pytest.mark.parametrize("method", ["DPTD", "SGD", "DPGLD", "DPSRM"])
def test_a_seed_s_run_reads_its_own_data_alone(method: str) -> None:
    """Other data for the second seed: the first seed's error is what it was, the second's is not."""
    bed = sweep.bed(TASKS["cartpole"], 40, (0, 1), sweep.CHOOSING)
    steps = 3 if method == "DPGLD" else 30
    one = Try(method, None if method == "SGD" else 4.0, steps, None if method == "SGD" else 0.1, 0.3, 1e-3)
    other = sweep.Bed(bed.seeds, [bed.data[0], bed.data[1].take(np.arange(40)[::-1] // 2)], bed.held_out)
    before, after = sweep.errors(bed, [one]), sweep.errors(other, [one])
    assert before.shape == (1, 2)
    assert after[0, 0] == before[0, 0]
    assert after[0, 1] != before[0, 1]


def test_a_small_sweep_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": (50, 100, 150), "PASSES": (1, 2, 3), "ROWS": (40,), "NAMES": ("cartpole",),
                        "EPSILONS": (1.0,), "REPORT": 3}.items():  # fmt: skip
        monkeypatch.setattr(sweep, name, value)
    sweep.run_sweep(tmp_path)
    files = {method: tmp_path / f"cartpole-40-{method}.json" for method in METHODS}
    first = {method: path.read_bytes() for method, path in files.items()}
    monkeypatch.setattr(sweep, "_cell", lambda *_: pytest.fail("the cell was there"))
    sweep.run_sweep(tmp_path)
    assert {method: path.read_bytes() for method, path in files.items()} == first
    cells = [row for text in first.values() for row in json.loads(text)["results"]]
    assert region.settings(cells) == [("cartpole", 40, 1.0)]
    assert len(region.reported(cells, "cartpole", 40, "SGD", 1.0)) == 3
    assert (tmp_path / "region.png").is_file()
    assert "| Cart Pole | 40 | 1 |" in (tmp_path / "region.md").read_text()
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == len(cells) + 1


def made_up(level: float, method: str, epsilon: float | None) -> dict[str, object]:
    spread = level + 0.1 * np.sin(np.arange(10) + len(method))
    return {"task": "cartpole", "rows": 40, "method": method, "epsilon": epsilon, "steps": 100, "clip": 0.1,
            "gain": 2.0, "noise": 0.5, "errors": spread.tolist(), "constant_error": 4.0}  # fmt: skip


def test_the_table_shows_who_is_better() -> None:
    levels = {"DPTD": 5.0, "noise alone": 9.0, "DPGLD": 5.0, "DPSRM": 9.0}
    cells = [made_up(level, method, 1.0) for method, level in levels.items()]
    cells += [made_up(3.0, "SGD", None), made_up(9.0, "untrained", None)]
    found = region.signs(cells)
    assert [found["cartpole", 40, 1.0, rival] for rival in region.RIVALS] == ["−", "−", "+", "±", "−"]
    line = region.table(cells).splitlines()[-1]
    medians = "4.96 | 8.99 − | 8.96 − | 2.96 + | 5.01 ± | 9.01 −"
    assert line == f"| Cart Pole | 40 | 1 | 100, 0.1, 2 | 100 | {medians} | 4.00 | 0.4, 16.3 |"
    said = region.summary(cells)
    assert "*DPTD beats DPSRM*: Cart Pole n = 40, ε = 1." in said
    assert "*DPTD beats DPGLD*: nowhere." in said
    assert len(region.draw(cells).axes) == 1


def test_signs_are_corrected_for_the_whole_table() -> None:
    """One difference with p = .02 of one hundred comparisons is no sign; alone among five it is none either."""
    cells = [made_up(5.0, method, 1.0) for method in ("DPTD", "noise alone", "DPGLD", "DPSRM")]
    cells += [made_up(5.0, method, None) for method in ("SGD", "untrained")]
    shifted = np.array(cells[0]["errors"]) ** 2 + np.tile([0.0, 1.0], 5) + 0.22
    cells[1]["errors"] = np.sqrt(shifted).tolist()
    differences = np.array(cells[0]["errors"]) ** 2 - shifted
    assert region.paired_p(differences) > 1e-4
    assert (region.signs(cells)["cartpole", 40, 1.0, "noise alone"] == "−") == (region.paired_p(differences) <= 0.01)
