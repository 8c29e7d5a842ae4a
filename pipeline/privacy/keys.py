"""The privacy key: a 256-bit secret in an owner-only file, and the owner-only state folder beside it.

A key has one state, wherever it is reached from: links are followed to the file, and a key without its state is refused
(`ledger_file`). Whoever holds the key can undo every flip, so the key file is 0600, the folder `FILE.state` is 0700,
`repr` and pickling never show the secret, and digests of raw labels are keyed and stay in that folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from private_rlhf.core.atomic import sync, write_json
from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import KEY_MARK
from private_rlhf.core.user import default_key
from private_rlhf.privacy.prf import KEY_BYTES, Prf, frame

HEADER = f"{KEY_MARK}v1"
MOST_BYTES = 4096
DISTINCT_BYTES = 16  # of 32; of random keys 3 in 10^17 have fewer
_DIGEST_DOMAIN = b"private-rlhf/input-digest/v1"
_LOST = (
    "restore it from a backup; a new key (choose another file) draws new flips, and what it releases of the same labels"
    " adds to what was released before, outside any ledger's sight"
)
_SEED_DOMAIN = b"private-rlhf/insecure-seed/v1"


class PrivacyKey:
    """A key in memory. `mode`: "keyed" for a key file, "insecure_seed" for a seed (NOT PRIVATE). `path`: its file."""

    __slots__ = ("_prf", "mode", "path")

    def __init__(self, secret: bytes, path: Path | None = None, mode: str = "keyed") -> None:
        self._prf = Prf(secret)
        self.path = path
        self.mode = mode

    @property
    def prf(self) -> Prf:
        """The keyed function; only the privatise stage and the state folder use it."""
        return self._prf

    def __repr__(self) -> str:
        return f"PrivacyKey(mode={self.mode!r}, secret=hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivacyKey is not pickled: load it from its file where it is needed")

    def keyed_digest(self, chunks: Iterable[bytes], domain: bytes = _DIGEST_DOMAIN) -> str:
        """Keyed BLAKE2b (hex) of a byte stream under this key, however it is chunked; every use has its own domain."""

        def message() -> Iterable[bytes]:
            yield frame(domain)
            yield from chunks

        return self._prf.digest(message()).hex()

    @property
    def state(self) -> KeyState:
        """The owner-only folder beside the key file; whether it is there is the ledger's question.

        UserError for a key that has no file.
        """
        if self.path is None:
            raise UserError("this key has no file, so it keeps no state; use a key from `private-rlhf keygen`")
        return KeyState(state_folder(self.path))


class KeyState:
    """Owner-only facts about raw inputs, kept beside the key: `FILE.state/`, 0700, one 0600 JSON file per fact."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, name: str) -> Path:
        return self.folder / "inputs" / (hashlib.sha256(name.encode()).hexdigest()[:32] + ".json")

    def remember_input(self, name: str, digest: str) -> None:
        """Store the keyed digest of the input called `name`, durably and in one step."""
        path = self._path(name)
        make_private_folder(self.folder)
        make_private_folder(path.parent)
        write_json(path, {"name": name, "digest": digest}, mode=0o600)
        sync(path.parent)

    def recall_input(self, name: str) -> str | None:
        """The digest stored for `name`, or None. UserError if the state file was damaged."""
        path = self._path(name)
        try:
            entry = read_json(path)
            return str(entry["digest"]) if entry["name"] == name else None
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: the state file is damaged; delete it and run again") from error
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); check the owner of the key's folder"
            ) from error


def state_folder(path: Path) -> Path:
    """The folder that holds the state of the key in `path`; beside the file itself where `path` is a link."""
    try:
        real = path.resolve()
    except RuntimeError:
        raise UserError(f"{path}: is a link that leads back to itself; give the key file") from None
    return real.with_name(real.name + ".state")


def lock_file(state: Path) -> Path:
    """The file in a key's state folder that says that there is a ledger, and which revision of it is the last."""
    return state / "ledger.lock"


def keygen(path: str | Path) -> Path:
    """Write a new random key to `path` (0600; its folder is made 0700 if missing), with the state of a new ledger.

    UserError if the file exists, or the state of another key lies where this one's would.
    """
    target = Path(path)
    if not target.exists() and state_folder(target).exists():
        raise UserError(f"{target}: cannot make a key here, {state_folder(target)} is the state of a lost one; {_LOST}")
    missing = [folder for folder in target.parents if not folder.exists()]
    text = f"{HEADER}\n{secrets.token_bytes(KEY_BYTES).hex()}\n"
    try:
        if not target.parent.exists():
            target.parent.parent.mkdir(parents=True, exist_ok=True)
            make_private_folder(target.parent)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except FileExistsError as error:
        raise UserError(
            f"{target}: exists and is not overwritten, since a lost key cannot be replaced; choose another --output"
        ) from error
    except OSError as error:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise UserError(f"{target}: cannot write a key here ({error.strerror}); choose another --output") from error
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        begin_state(state_folder(target))
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    sync(target.parent)
    return target


def named_or_default(path: Path | None) -> Path:
    """The key file that a command uses: the one named, or the user's default. UserError if that was never made."""
    if path is not None:
        return path.expanduser()
    if not (place := default_key()).exists() and not state_folder(place).exists():
        raise UserError(f"{place}: you have no key yet; make it with `private-rlhf keygen`, or name one with --key")
    return place


def begin_state(folder: Path) -> None:
    """The state of a ledger in which nothing stands yet, durably."""
    make_private_folder(folder)
    descriptor = os.open(lock_file(folder), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"%020d\n" % 0)
    sync(lock_file(folder))
    sync(folder)


def load_key(path: str | Path) -> PrivacyKey:
    """Read a key file. UserError, with the remedy, if it is missing, readable by others, or not a key."""
    source = Path(path)
    try:
        info = source.stat()
    except FileNotFoundError as error:
        if state_folder(source).exists():
            raise UserError(f"{source}: the key is lost; {_LOST}") from error
        raise UserError(f"{source}: no such key file; make one with `private-rlhf keygen --output {source}`") from error
    except OSError as error:
        raise UserError(f"{source}: cannot read the key file ({error.strerror})") from error
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{source}: must be a file; --key takes one made by `private-rlhf keygen --output FILE`")
    if info.st_mode & 0o077:
        raise UserError(f"{source}: the key can be read by others; run `chmod 600 {source}`")
    try:
        with source.open("rb") as file:
            text = file.read(MOST_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise UserError(f"{source}: cannot read the key file ({error.strerror})") from error
    return PrivacyKey(_parse(text, source), path=source.resolve())


def as_key(key: PrivacyKey | str | Path) -> PrivacyKey:
    """The key itself, or that of a file. UserError for anything else, and as of `load_key`."""
    if isinstance(key, PrivacyKey):
        return key
    if not isinstance(key, str | Path):
        raise UserError(f"key must be the path of a key file, or a PrivacyKey, got {type(key).__name__}: give either")
    return load_key(key)


def insecure_seed_key(seed: int) -> PrivacyKey:
    """A key that anyone can recompute from a small number: for tests and demos; marks what it releases NOT PRIVATE."""
    digest = hashlib.sha256(frame(_SEED_DOMAIN) + frame(str(int(seed)).encode())).digest()
    return PrivacyKey(digest, mode="insecure_seed")


def _parse(text: str, source: Path) -> bytes:
    lines = text.splitlines()
    remedy = "restore it from a backup, or make a new one with `private-rlhf keygen --output FILE`"
    if len(lines) != 2 or not lines[0].startswith(KEY_MARK):
        raise UserError(f"{source}: must be a key file; {remedy}")
    if lines[0] != HEADER:
        raise UserError(f"{source}: this version reads `{HEADER}` files only; {remedy}")
    try:
        secret = bytes.fromhex(lines[1])
    except ValueError as error:
        raise UserError(f"{source}: the key is damaged (not hexadecimal); {remedy}") from error
    if len(secret) != KEY_BYTES:
        raise UserError(f"{source}: the key has {8 * len(secret)} bits, not {8 * KEY_BYTES}; {remedy}")
    if len(set(secret)) < DISTINCT_BYTES:
        raise UserError(f"{source}: the key was not drawn at random (few different bytes); {remedy}")
    return secret


def make_private_folder(folder: Path) -> None:
    """mkdir with mode 0700, also when the folder is there already."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        folder.chmod(0o700)


POLL_SECONDS = 0.02


class Lock:
    """A lock between processes on a folder, or a small file that also keeps a number: exclusive, or shared by some.

    flock belongs to the open file, which forked workers inherit and could hold on to after the death of the process
    that locked it; so they close it at birth. The system releases the lock of a process that dies.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        access = os.O_RDONLY if path.is_dir() else os.O_RDWR | (os.O_CREAT if create else 0)
        self._flags = access | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor: int | None = None

    def acquire(self, seconds: float, shared: bool = False) -> bool:
        """True if the lock was free within `seconds`, and is on the file that has the name now. OSError if its file
        cannot be opened for writing, or is missing and not to be created."""
        deadline = time.monotonic() + seconds
        while True:
            descriptor = os.open(self.path, self._flags, 0o600)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                    break
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=partial(_release, weakref.ref(self)))
        return True

    def release(self) -> None:
        """Lets go; in a forked child it closes the child's copy and the parent keeps the lock. Harmless if not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """True while this object holds the lock."""
        return self._descriptor is not None

    def write_number(self, number: int) -> None:
        """Keep a number >= 0 in the file. The lock must be held."""
        assert self._descriptor is not None
        os.pwrite(self._descriptor, b"%020d\n" % number, 0)


def _release(lock: weakref.ref[Lock]) -> None:
    held = lock()
    if held is not None:
        held.release()


def read_number(path: Path) -> int:
    """The number in a lock file. FileNotFoundError if there is none, UserError if it holds something else."""
    with path.open("rb") as file:
        digits = file.read(21).strip()
    if digits and not (digits.isascii() and digits.isdigit()):
        raise UserError(f"{path}: is damaged; restore the key's state folder from a backup")
    return int(digits or 0)
