"""The privacy key: a 256-bit secret in an owner-only file, and the owner-only state folder beside it.

A key has one state, wherever it is reached from: links are followed to the file, and a key without its state is refused
(`ledger_file`), for what was released under it would be forgotten. Whoever holds the key can undo every flip, so the
key file is 0600, the folder `FILE.state` is 0700, `repr` and pickling never show the secret, and digests of raw labels
exist only keyed and only in that folder: an unkeyed digest of a raw file would let anyone test a guess of all labels
but one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
from private_rlhf.core.atomic import new_file, sync, write_json
from private_rlhf.core.documents import read_json
from private_rlhf.core.errors import UserError
from private_rlhf.core.outputs import KEY_MARK
from private_rlhf.core.user import default_key
from private_rlhf.privacy.prf import KEY_BYTES, Prf, frame

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


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
    try:
        os.pwrite(descriptor, b"%020d\n" % 0, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
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
        raise UserError(f"{source}: is not a file; --key takes a file made by `private-rlhf keygen --output FILE`")
    if info.st_mode & 0o077:
        raise UserError(f"{source}: the key can be read by others; run `chmod 600 {source}`")
    try:
        with source.open("rb") as file:
            text = file.read(MOST_BYTES).decode("ascii")
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise UserError(f"{source}: cannot read the key file ({error.strerror})") from error
    return PrivacyKey(_parse(text, source), path=source.resolve())


def insecure_seed_key(seed: int) -> PrivacyKey:
    """A key that anyone can recompute from a small number: for tests and demos; marks what it releases NOT PRIVATE."""
    digest = hashlib.sha256(frame(_SEED_DOMAIN) + frame(str(int(seed)).encode())).digest()
    return PrivacyKey(digest, mode="insecure_seed")


def _parse(text: str, source: Path) -> bytes:
    lines = text.splitlines()
    remedy = "restore it from a backup, or make a new one with `private-rlhf keygen --output FILE`"
    if len(lines) != 2 or not lines[0].startswith(KEY_MARK):
        raise UserError(f"{source}: is not a key file; {remedy}")
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


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """A 0600 file under its final name, durable when the block ends well and removed when it fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def replace_file(path: Path, rows: np.ndarray) -> None:
    """Writes a contiguous array's bytes to `path` (0600) by rename; not forced to the disk."""
    with new_file(path, 0o600, durable=False) as temporary, temporary.open("wb") as file:
        file.write(rows.data)


def read_rows(path: Path, dtype: np.dtype[Any], start: int = 0, end: int | None = None) -> np.ndarray:
    """Rows start to end (default: all) of a file of fixed-width rows. UserError if it is missing or too short."""
    count = -1 if end is None else end - start
    try:
        rows = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    except FileNotFoundError as error:
        raise UserError(f"{path}: is missing; restore the key's state folder from a backup") from error
    if end is not None and len(rows) != count:
        raise UserError(f"{path}: is cut short; restore the key's state folder from a backup")
    return rows


def check_rows(path: Path, dtype: np.dtype[Any], bounds: Sequence[int], digest: str) -> list[str]:
    """Problems of a file of rows that should have these bounds and this digest; reads it slice by slice."""
    actual, size = row_digest(), bounds[-1] * dtype.itemsize
    try:
        if path.stat().st_size != size:
            return [f"{path}: holds {path.stat().st_size} bytes where the ledger states {size}"]
        for start, end in pairwise(bounds):
            actual.update(read_rows(path, dtype, start, end).data)
    except OSError as error:
        return [f"{path}: cannot be read ({error.strerror})"]
    return [] if actual.hexdigest() == digest else [f"{path}: was changed or damaged: the ledger states another digest"]


def row_digest() -> Any:
    """A hash object for files of rows. Not keyed: the ledger that states the digest is, and so are the tags inside."""
    return hashlib.blake2b(digest_size=32)


class Lock:
    """An exclusive lock between processes on a small file, which also keeps a number.

    flock belongs to the open file, which forked workers inherit and could hold on to after the death of the process
    that locked it; so they close it at birth. The system releases the lock of a process that dies.
    """

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._descriptor: int | None = None

    def acquire(self, seconds: float) -> bool:
        """True if the lock was free within `seconds`. OSError if its file cannot be opened for writing, or
        is missing and not to be created."""
        descriptor = os.open(self.path, self._flags, 0o600)
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(POLL_SECONDS)
            except BaseException:
                os.close(descriptor)
                raise
            else:
                break
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


VERSION = 1
_SIGNING_DOMAIN = b"private-rlhf/signing-key/v1"
_MESSAGE = b"private-rlhf/release-signature/v1\n"
_PRIME = 2**255 - 19
_PUBLIC, _SIGNATURE = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{128}")


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_public_key(text: str) -> bool:
    """True for a text of 64 hexadecimal digits, the form of a public key."""
    return _PUBLIC.fullmatch(text) is not None


def public_key(key: PrivacyKey) -> str | None:
    """The key (hex) by which a reader checks signatures. None for a seed's key: anyone could sign with it."""
    return None if key.mode != "keyed" else _signing_key(key).public_key().public_bytes_raw().hex()


def sign(key: PrivacyKey, files: Mapping[str, str]) -> dict[str, Any]:
    """The content of a bundle's signature file. files: name -> `file_digest`, of all other files."""
    signature = _signing_key(key).sign(_message(files)).hex()
    return _document(public_key(key), files, signature)


def verify(stated: Any, files: Mapping[str, str]) -> str:
    """The public key (hex) under which `stated`, from `sign`, is a signature of these files.

    Raises ValueError, in words that follow the file's name: another version, a malformed document, files that are not
    those that were signed, or a signature that is none.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not isinstance(stated, dict) or stated.get("schema_version") != VERSION or stated.get("algorithm") != "Ed25519":
        raise ValueError(f"is no Ed25519 signature of version {VERSION}")
    public, signature, signed = (stated.get(name) for name in ("public_key", "signature", "files"))
    if not isinstance(public, str) or not is_public_key(public):
        raise ValueError("states no public key")
    if _has_small_order(bytes.fromhex(public)):
        raise ValueError("states a public key of small order, under which anyone can sign anything")
    if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature) or not isinstance(signed, dict):
        raise ValueError("is not a whole signature")
    if other := sorted(name for name in {*signed, *files} if signed.get(name) != files.get(name)):
        raise ValueError(f"{other[0]!r} is not what was signed: the bundle was edited or damaged")
    if json.dumps(stated) != json.dumps(_document(public, files, signature)):
        raise ValueError("has fields or an order that no signature has")
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), _message(files))
    except (InvalidSignature, ValueError):
        raise ValueError("does not verify: the bundle was edited, or signed by nobody who holds that key") from None
    return public


def _document(public: str | None, files: Mapping[str, str], signature: str) -> dict[str, Any]:
    facts = {"schema_version": VERSION, "algorithm": "Ed25519", "public_key": public}
    return facts | {"files": dict(sorted(files.items())), "signature": signature}


def _has_small_order(public: bytes) -> bool:
    """True if eight times the point is the identity, by its y on -x² + y² = 1 + d x² y², d = -121665/121666.

    Order 1 or 2: y² = 1. Order 4: y = 0. Order 8: twice the point has y = 0, so y² = -x², and d y⁴ + 2y² - 1 = 0.
    """
    y = int.from_bytes(public, "little") & (1 << 255) - 1
    eighth = -121665 * y**4 + 2 * 121666 * y**2 - 121666
    return y * (y * y - 1) * eighth % _PRIME == 0


def _message(files: Mapping[str, str]) -> bytes:
    return _MESSAGE + json.dumps(dict(files), sort_keys=True, separators=(",", ":")).encode()


def _signing_key(key: PrivacyKey) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key.keyed_digest((), _SIGNING_DOMAIN)))
