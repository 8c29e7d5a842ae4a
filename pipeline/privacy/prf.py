"""The keyed pseudo-random function: keyed BLAKE2b (RFC 7693, section 2.9) over an injective encoding of its arguments.

BLAKE2b takes a key and is a pseudo-random function by design, in one pass. Uses that differ in their domain (the
`person` field of the parameter block, 16 bytes) never share an input. Within a domain every message is an injective
encoding: `frame` puts the length before the bytes, or all fields but one have a fixed width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NoReturn

KEY_BYTES = 32
BLOCK_BYTES = 48  # three 128-bit words
DIGEST_DOMAIN = b"digest/v2"


def frame(field: bytes) -> bytes:
    """The field after its length in 8 big-endian bytes: a self-delimiting (prefix-free) encoding."""
    return len(field).to_bytes(8, "big") + field


class Prf:
    """Keyed BLAKE2b under one 256-bit key. Raises ValueError if the key does not have 32 bytes."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {8 * len(key)} bits; it must have {8 * KEY_BYTES}")
        self._key = bytes(key)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Prf is not pickled, as it holds the key: load the key from its file where it is needed")

    def digest(self, chunks: Iterable[bytes]) -> bytes:
        """32 bytes for the concatenated chunks; framing them is the caller's business."""
        digest = hashlib.blake2b(key=self._key, digest_size=32, person=DIGEST_DOMAIN)
        for chunk in chunks:
            digest.update(chunk)
        return digest.digest()

    def block(self, domain: bytes, message: bytes) -> bytes:
        """48 bytes for a message whose encoding is injective within its domain (at most 16 bytes)."""
        return hashlib.blake2b(message, key=self._key, digest_size=BLOCK_BYTES, person=domain).digest()

    def blocks(self, domain: bytes, messages: Iterable[bytes]) -> bytes:
        """`block` of every message, joined. The fast path: the key and the domain are set up once."""
        copy = hashlib.blake2b(key=self._key, digest_size=BLOCK_BYTES, person=domain).copy
        out = []
        for message in messages:
            digest = copy()
            digest.update(message)
            out.append(digest.digest())
        return b"".join(out)
