"""Two keys of one user: the same labels under both are refused, or charged the sum, and never go out unseen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.core.user import default_key
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.privacy.keys import keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger

pytestmark = pytest.mark.usefixtures("quick_disk")


def source(folder: Path, start: int, end: int) -> str:
    path = folder / f"{start}-{end}.jsonl"
    rows = [{"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(start, end)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def total(key: Path) -> float:
    return float(Ledger.open(load_key(key)).show()["epsilon_total"])


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    one, other = keygen(tmp_path / "one.key"), keygen(tmp_path / "other.key")
    privatize_source(Request(source(tmp_path, 0, 30), tmp_path / "first", 2.0, one))
    return one, other


def test_pairs_of_another_key_are_refused_or_charged_the_sum(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    """300 labels went out under two keys, truly at ε = 4, and both ledgers said 2."""
    one, other = keys
    data = source(tmp_path, 20, 60)
    with pytest.raises(UserError, match=rf"10 of these pairs were released before under another key of yours, {one}"):
        privatize_source(Request(data, tmp_path / "second", 2.0, other))
    assert not (tmp_path / "second").exists()
    assert total(other) == 0.0
    up = {"add_up_keys": True}
    with pytest.raises(UserError, match="over the budget of 3 per event"):
        privatize_source(Request(data, tmp_path / "second", 2.0, other, budget=Budget(3.0, "event"), **up))  # type: ignore[arg-type]
    privatize_source(Request(data, tmp_path / "second", 2.0, other, **up))  # type: ignore[arg-type]
    assert (total(one), total(other)) == (2.0, 4.0)
    privatize_source(Request(data, tmp_path / "second", 2.0, other))  # a re-run costs nothing and asks nothing
    privatize_source(Request(data, tmp_path / "third", 1.0, other, **up))  # type: ignore[arg-type]
    assert total(other) == 4.0  # the other key's part is charged once
    assert not [e for e in Ledger.open(load_key(other)).card_facts()["releases"] if "other" in e]  # it is public


def test_other_pairs_cost_nothing_more(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    privatize_source(Request(source(tmp_path, 30, 60), tmp_path / "second", 1.0, keys[1]))
    assert total(keys[1]) == 1.0


def test_a_key_that_is_gone_counts_in_full(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    one, other = keys
    one.unlink()
    data = source(tmp_path, 30, 60)
    with pytest.raises(UserError, match="another key of yours, released labels and cannot be read now"):
        privatize_source(Request(data, tmp_path / "second", 1.0, other))
    shutil.rmtree(tmp_path / "one.key.state")
    privatize_source(Request(data, tmp_path / "second", 1.0, other, add_up_keys=True))
    assert total(other) == 3.0


def test_a_release_of_another_key_meanwhile_is_noticed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    from support.ledger_releases import events_of, merge, plan

    one, other = keys
    ledger, events = Ledger.open(load_key(other)), events_of("ann", 3)
    with ledger.reserve(plan(events, 1.0)) as reservation:
        merge(ledger, events, 1.0, reservation.generation)
        reservation.add_up(ledger.other_keys(), {})
        privatize_source(Request(source(tmp_path, 40, 50), tmp_path / "meanwhile", 2.0, one))
        with pytest.raises(UserError, match="another key of yours released labels meanwhile; run again"):
            reservation.written()
    assert total(other) == 0.0


def test_one_default_key_for_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = source(tmp_path, 0, 8)
    release = ["privatize", f"--data={data}", f"--output={tmp_path / 'out'}", "--epsilon=1"]
    assert main(release) == 2  # it never makes a key
    assert "you have no key yet; make it with `private-rlhf keygen`" in capsys.readouterr().err
    assert main(["keygen"]) == 0
    assert f"{default_key()}.state" in capsys.readouterr().out
    assert main(release) == 0
    assert main(["ledger", "show"]) == 0
    assert "largest total of any one record: ε = 1 (8 events)" in capsys.readouterr().out
    assert main(["ledger", "verify"]) == 0
    assert main(["keygen"]) == 2
