"""Which of several processes reports what all of them have met."""

from __future__ import annotations

import pytest
from private_rlhf import cli
from private_rlhf.core import world


@pytest.mark.parametrize(("local_rank", "waits"), [(None, []), ("0", []), ("1", [10.0])])
def test_the_first_process_of_a_machine_reports_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local_rank: str | None, waits: list[float]
) -> None:
    """The launcher ends the others meanwhile; one that is still there then says it as well."""
    waited: list[float] = []
    monkeypatch.setattr(world.time, "sleep", waited.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert cli.main(["print-config", "--config", "nowhere.yaml"]) == 2
    assert waited == waits
    assert capsys.readouterr().err.count("nowhere.yaml does not exist") == 1
