"""The address at which people reach the labelling page."""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import urlsplit

from private_rlhf.core.errors import UserError, is_name, one_line


def host_names(url: str) -> set[str]:
    """The values of `Host` by which people reach a URL. UserError if it is not the URL of a server's root."""
    with suppress(ValueError):
        parts = urlsplit(url)
        root = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and root and is_name(url):
            return {parts.netloc.lower(), bracketed(parts.hostname)}
    raise UserError(f"--url must be http(s)://NAME[:PORT]/, got {one_line(url)!r}: give the address that people open")


def bracketed(host: str) -> str:
    """A host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
