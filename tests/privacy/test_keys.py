"""Key files and the owner-only state folder."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.keys import HEADER, Lock, PrivacyKey, insecure_seed_key, keygen, load_key
from private_rlhf.privacy.mechanism import Coins, RandomizedResponse
from private_rlhf.privacy.prf import frame


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def secret_of(path: Path) -> str:
    return path.read_text().splitlines()[1]


def test_keygen_writes_an_owner_only_key_in_an_owner_only_folder(tmp_path: Path) -> None:
    old = os.umask(0o000)
    try:
        path = keygen(tmp_path / "new" / "label.key")
    finally:
        os.umask(old)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    header, secret = path.read_text().splitlines()
    assert header == HEADER
    assert len(bytes.fromhex(secret)) == 32
    assert secret_of(keygen(tmp_path / "second.key")) != secret


def test_keygen_does_not_overwrite(tmp_path: Path) -> None:
    path = keygen(tmp_path / "label.key")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"label\.key: exists and is not overwritten.*choose another --output$"):
        keygen(path)
    assert path.read_bytes() == before


def test_keygen_names_the_reason_when_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write a key here \(.+\); choose another --output$"):
        keygen(tmp_path / "file" / "label.key")


def test_a_loaded_key_gives_the_bits_of_its_file(tmp_path: Path) -> None:
    path = keygen(tmp_path / "label.key")
    key = load_key(path)
    assert key.mode == "keyed"
    direct = PrivacyKey(bytes.fromhex(secret_of(path)))
    mechanism = RandomizedResponse(0.1)
    assert [mechanism.release(key.prf, bytes([i]), 1) for i in range(64)] == [
        mechanism.release(direct.prf, bytes([i]), 1) for i in range(64)
    ]


def test_missing_key_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such key file; make one with `private-rlhf keygen --output .*none\.key`$"):
        load_key(tmp_path / "none.key")


def test_a_lost_key_is_not_replaced_by_a_new_one(tmp_path: Path) -> None:
    """Its state lies where the new key's would: a fresh key there would draw new flips for labels already released."""
    path = keygen(tmp_path / "label.key")
    load_key(path).state.remember_input("train", "d")
    path.unlink()
    with pytest.raises(UserError, match=r"label\.key: the key is lost; restore it from a backup; a new key"):
        load_key(path)
    with pytest.raises(UserError, match=r"label\.key\.state is the state of a lost one; restore it from a backup"):
        keygen(path)
    assert not path.exists()


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o611])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, bits: int) -> None:
    path = keygen(tmp_path / "label.key")
    path.chmod(bits)
    with pytest.raises(UserError, match=r"can be read by others; run `chmod 600 .*label\.key`$"):
        load_key(path)


def test_a_folder_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must be a file; --key takes one"):
        load_key(tmp_path)


def test_neither_repr_nor_pickle_shows_the_secret(tmp_path: Path) -> None:
    path = keygen(tmp_path / "label.key")
    key = load_key(path)
    assert secret_of(path) not in repr(key) + str(key) + repr(key.prf)
    for holder in (key, key.prf, Coins(key.prf, b"event")):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(holder)


def test_insecure_seed_is_marked_and_repeatable() -> None:
    assert insecure_seed_key(3).mode == "insecure_seed"
    digests = {insecure_seed_key(seed).keyed_digest([b"x"]) for seed in (3, 3, 4)}
    assert len(digests) == 2
    with pytest.raises(UserError, match="has no file, so it keeps no state"):
        _ = insecure_seed_key(3).state


def test_keyed_digest_is_a_domain_separated_mac_of_the_stream() -> None:
    secret = bytes(range(32))
    message = frame(b"private-rlhf/input-digest/v1") + b"raw labels"
    expected = hashlib.blake2b(message, key=secret, digest_size=32, person=b"digest/v2").hexdigest()
    assert PrivacyKey(secret).keyed_digest([b"raw ", b"labels"]) == expected
    assert PrivacyKey(bytes(32)).keyed_digest([b"raw labels"]) != expected


def test_state_remembers_inputs_in_owner_only_files(tmp_path: Path) -> None:
    path = keygen(tmp_path / "label.key")
    state = load_key(path).state
    assert state.recall_input("train") is None
    state.remember_input("train", "d1")
    state.remember_input("eval/../x", "d2")
    state.remember_input("train", "d3")
    again = load_key(path).state
    assert (again.recall_input("train"), again.recall_input("eval/../x")) == ("d3", "d2")
    folder = tmp_path / "label.key.state"
    for entry in (folder, *folder.rglob("*")):
        assert mode(entry) == (0o700 if entry.is_dir() else 0o600)
    assert len([entry for entry in folder.rglob("*") if entry.is_file()]) == 3  # and the ledger's lock


def test_damaged_state_is_reported(tmp_path: Path) -> None:
    state = load_key(keygen(tmp_path / "label.key")).state
    state.remember_input("train", "d")
    (file,) = (tmp_path / "label.key.state").rglob("*.json")
    file.write_text("{")
    with pytest.raises(UserError, match="the state file is damaged; delete it and run again"):
        state.recall_input("train")


def test_a_lock_is_on_the_file_that_has_the_name(tmp_path: Path) -> None:
    """Not on one that was replaced or removed while the process waited: another holds the new one."""
    path, first, second, waiting = tmp_path / "lock", *(Lock(tmp_path / "lock") for _ in range(3))
    assert first.acquire(0.0)
    with ThreadPoolExecutor(1) as threads:
        acquired = threads.submit(waiting.acquire, 0.5)
        time.sleep(0.1)
        path.unlink()
        assert second.acquire(0.0)
        first.release()
        assert not acquired.result()
    second.release()
    assert waiting.acquire(0.0)
