"""One key has one ledger, whatever path leads to it and whatever was copied, lost or put back; budgets on re-runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.core.user import user_folder
from private_rlhf.privacy.keys import PrivacyKey, keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from support.ledger_releases import events_of, merge, plan, release

pytestmark = pytest.mark.usefixtures("quick_disk")
ANN = events_of("ann", 3)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivacyKey:
    """A key that released three events of one person at ε = 1, on a machine of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    found = load_key(keygen(tmp_path / "label.key"))
    release(Ledger.open(found), ANN, 1.0, Budget(1.0, "event"))
    return found


def test_a_link_to_a_key_is_the_key(key: PrivacyKey, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "current.key"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "label.key")
    ledger = Ledger.open(load_key(link))
    assert ledger.show()["epsilon_total"] == 1.0
    with pytest.raises(UserError, match="over the budget of 1 per event"):
        release(ledger, ANN, 5.0)
    assert not (tmp_path / "elsewhere" / "current.key.state").exists()


def test_a_key_without_its_state_is_refused(key: PrivacyKey, tmp_path: Path) -> None:
    shutil.rmtree(key.state.folder)
    with pytest.raises(UserError, match=r"has no ledger beside it .* ledger init --key .* --i-know EPSILON"):
        Ledger.open(key)
    (problem,) = Ledger(key).verify()
    assert "has no ledger beside it" in problem
    key.state.folder.mkdir()  # as an `inputs` folder alone would leave it
    with pytest.raises(UserError, match="has no ledger beside it"):
        Ledger.open(key)


def test_ledger_and_lock_removed_together_are_missed(key: PrivacyKey) -> None:
    (key.state.folder / "ledger.json").unlink()
    (key.state.folder / "ledger.lock").write_text(f"{0:020d}\n")
    with pytest.raises(UserError, match="the ledger is missing"):
        Ledger.open(key)
    (key.state.folder / "ledger.lock").write_text("garbage")
    with pytest.raises(UserError, match=r"ledger.lock: is damaged"):
        Ledger.open(key)


def test_a_copied_key_is_refused_with_its_state_and_without(key: PrivacyKey, tmp_path: Path) -> None:
    copy = tmp_path / "backup" / "label.key"
    copy.parent.mkdir()
    shutil.copy2(tmp_path / "label.key", copy)
    with pytest.raises(UserError, match=rf"is a copy of a key whose ledger lies in .*use --key {tmp_path}/label.key"):
        Ledger.open(load_key(copy))
    with pytest.raises(UserError, match="is a copy"):
        Ledger.begin(load_key(copy), 0.0)
    shutil.copytree(key.state.folder, copy.with_name("label.key.state"))
    with pytest.raises(UserError, match="is a copy"):
        release(Ledger.open(load_key(copy)), ANN, 5.0)
    assert release(Ledger.open(key), ANN, 1.0)  # the first one goes on


def test_a_key_that_was_moved_takes_its_ledger_along(key: PrivacyKey, tmp_path: Path) -> None:
    new = tmp_path / "new" / "owner.key"
    new.parent.mkdir()
    shutil.move(tmp_path / "label.key", new)
    shutil.move(key.state.folder, new.with_name("owner.key.state"))
    assert release(Ledger.open(load_key(new)), ANN, 1.0)


def test_an_older_state_folder_put_back_is_refused_until_its_holder_says_what_is_missing(
    key: PrivacyKey, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(key.state.folder, backup)
    release(Ledger.open(key), ANN, 3.0, Budget(9.0, "event"))
    shutil.rmtree(key.state.folder)
    shutil.copytree(backup, key.state.folder)
    with pytest.raises(UserError, match=r"is older \(revision 3\) than what was recorded here \(6\)"):
        Ledger.open(key)
    restored = Ledger.restore(key, backup, 3.0)
    shown = Ledger.open(key).show()
    assert (shown["epsilon_total"], shown["epsilon_stated"], shown["labelers"]["max_epsilon"]) == (4.0, 3.0, 12.0)
    assert restored.verify() == []
    assert [entry["source"] for entry in shown["releases"]] == ["s", "stated by the holder"]
    (aside,) = tmp_path.glob("label.key.state.replaced-*")
    assert (aside / "ledger.json").exists()
    with pytest.raises(UserError, match="the largest total of any one record under this key is 4"):
        release(Ledger.open(key), ANN, 2.0, Budget(4.5, "event"))


def test_no_copy_is_put_back_while_a_release_is_under_way(key: PrivacyKey, tmp_path: Path) -> None:
    """The copy would take the release's entry without its events, so that other labels of them could follow."""
    backup = tmp_path / "backup"
    shutil.copytree(key.state.folder, backup)
    ledger, bob = Ledger.open(key), events_of("bob", 3)
    with ledger.reserve(plan(bob, 1.0)) as reservation:
        merge(ledger, bob, 1.0, reservation.generation)
        with pytest.raises(UserError, match="another release under this key is under way"):
            Ledger.restore(key, backup, 0.0)
        reservation.commit()
    assert Ledger.open(key).show()["events"] == 6


@pytest.mark.parametrize("stated", [0.0, 2.5])
def test_a_ledger_begins_again_with_what_was_released(key: PrivacyKey, stated: float) -> None:
    shutil.rmtree(key.state.folder)
    Ledger.begin(key, stated)
    with pytest.raises(UserError, match="holds a ledger"):
        Ledger.begin(key, 0.0)
    release(Ledger.open(key), ANN, 0.5)
    shown = Ledger.open(key).show()
    assert shown["epsilon_total"] == stated + 0.5
    assert shown["labelers"]["max_epsilon"] == 3 * (stated + 0.5)


@pytest.mark.parametrize("stated", [-1.0, float("inf"), float("nan")])
def test_nonsense_is_not_stated(key: PrivacyKey, stated: float) -> None:
    shutil.rmtree(key.state.folder)
    with pytest.raises(UserError, match="--i-know must be a finite number of at least 0"):
        Ledger.begin(key, stated)


def test_what_is_no_copy_of_the_state_is_not_restored(key: PrivacyKey, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a copy of a state folder"):
        Ledger.restore(key, tmp_path / "nothing", 0.0)
    other = load_key(keygen(tmp_path / "other.key"))
    release(Ledger.open(other), ANN, 1.0)
    with pytest.raises(UserError, match="belongs to another key"):
        Ledger.restore(key, other.state.folder, 0.0)
    shutil.copytree(key.state.folder, tmp_path / "damaged")
    (rows,) = (tmp_path / "damaged").glob("events/*.events")
    rows.write_bytes(bytes(len(rows.read_bytes())))
    with pytest.raises(UserError, match=r"was changed or damaged: .*; give another copy"):
        Ledger.restore(key, tmp_path / "damaged", 0.0)
    assert Ledger.open(key).show()["epsilon_total"] == 1.0


def test_the_anchor_is_the_users_alone_and_tells_no_secret(key: PrivacyKey) -> None:
    (anchor,) = (user_folder() / "ledgers").iterdir()
    assert anchor.stat().st_mode & 0o777 == 0o600
    assert anchor.parent.stat().st_mode & 0o777 == 0o700
    secret = (key.path or Path()).read_text().splitlines()[1]
    assert secret not in anchor.read_text() + anchor.name
    anchor.write_text("{")
    with pytest.raises(UserError, match="is damaged; it keeps the place of this key's ledger"):
        Ledger.open(key)


def test_a_home_that_cannot_be_written_stops_no_release(key: PrivacyKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    assert not release(Ledger.open(key), ANN, 0.5)


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_stated_with_a_finished_release_is_checked_and_kept(key: PrivacyKey) -> None:
    with pytest.raises(UserError, match=r"over the budget of 0\.5 per event"):
        release(Ledger.open(key), ANN, 1.0, Budget(0.5, "event"))
    assert Ledger.open(key).show()["budgets"]["event"] == 1.0
    assert release(Ledger.open(key), ANN, 1.0, Budget(4.0, "person"))
    assert Ledger.open(key).show()["budgets"] == {"event": 1.0, "person": 4.0}
    with pytest.raises(UserError, match="over the budget of 4 per person"):
        release(Ledger.open(key), ANN, 2.0, Budget(2.0, "event"))
