"""Connections of the labelling page's server: uvicorn's, over h11, which refuses what two servers may read differently.

A request of which some other server might say that it ends elsewhere is refused, and ends its connection: h11 allows
lines that end in LF, folded lines and the same length twice. One request is read at a time; bytes that came before its
answer are never read. A whole request with its answer has `SECONDS`, and so has a connection that waits. Where all
places are taken, the connection that has waited longest, of the address that has most, makes room for a new one.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
MOST_HEAD = 1 << 13
"""Bytes of a request's first line and headers."""
SECONDS = 20
AMBIGUOUS = re.compile(
    rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|\n(?i:content-length)[ \t]*:[^\n]*(?:,|\n(?:[^\n]*\n)*?(?i:content-length)[ \t]*:)"
)
REFUSAL = b'{"error":"this server takes no such request"}'


class Connection(H11Protocol):
    """One person's browser, or a proxy."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = bytearray()
        self._since = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(SECONDS, transport.abort)
        if len(self.connections) >= MOST_CONNECTIONS:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(SECONDS, self.transport.abort)
        if self.conn.their_state is h11.IDLE:
            self._head += data
            if (b"\n\r\n" in self._head or b"\n\n" in self._head) and AMBIGUOUS.search(self._head):
                return self.send_400_response("")
        super().data_received(data)
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False
        return None

    def on_response_complete(self) -> None:
        self._head.clear()
        self._since = self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # `close` would wait for whoever does not read

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is not h11.IDLE:  # the answer to an earlier request is on its way
            return self.transport.abort()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(REFUSAL)),
                   (b"connection", b"close")]  # fmt: skip
        response = h11.Response(status_code=400, headers=self.server_state.default_headers + headers, reason=b"")
        for event in (response, h11.Data(data=REFUSAL), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        return self.transport.close()

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        held = Counter(each.client and each.client[0] for each in others)
        waiting = [each for each in others if each.conn.their_state in (h11.IDLE, h11.SEND_BODY)]
        if waiting:
            last = max(waiting, key=lambda each: (held[each.client and each.client[0]], -each._since))
            self.connections.discard(last)
            last.transport.abort()
