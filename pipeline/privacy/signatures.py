"""The signature of a release: Ed25519 under a key that derives from the privacy key, over the digests of all files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from private_rlhf.privacy.keys import PrivacyKey

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
        raise ValueError(f"is not an Ed25519 signature of version {VERSION}")
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
        raise ValueError("has other fields, or another order of them, than a signature")
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
