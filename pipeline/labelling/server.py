"""The labelling page's server: hands out one page and each person's questions, and takes private labels in.

    GET  /           the page, the same bytes for everybody
    POST /claim      {"link":"<64 hex digits>","secret":"<64 hex digits>"}: a link opens in one browser, once
    GET  /questions  what the person has to answer
    POST /answer     {"event":"<32 hex digits>","answer":"+"}: + prefers response_a, - response_b, 0 skips
    GET  /operator   a page for the operator, and GET /progress what it shows: counts, never an answer

What a page sends is of constant size. Questions and answers go with the browser's secret in `Authorization: Bearer`,
the progress with the operator's; nothing that a browser sends by itself (a cookie, say) counts, so no other site can
act for a person. No request is logged. Plain HTTP: a proxy that ends TLS belongs in front of it
(docs/how-to/labelling.md).
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from pipeline.core.documents import DocumentError, read_json
from pipeline.core.errors import UserError
from pipeline.labelling.store import EVENT_BYTES, SKIPPED, TOKEN_BYTES, AnswerConflict, AnswerStore, NotAsked

ANSWERS = {b"+": 1, b"-": -1, b"0": SKIPPED}
ANSWER = re.compile(rb'\{"event":"([0-9a-f]{%d})","answer":"([-+0])"\}' % (2 * EVENT_BYTES))
CLAIM = re.compile(rb'\{"link":"([0-9a-f]{%d})","secret":"([0-9a-f]{%d})"\}' % (2 * TOKEN_BYTES, 2 * TOKEN_BYTES))
ANSWER_BYTES = len('{"event":"","answer":"+"}') + 2 * EVENT_BYTES
CLAIM_BYTES = len('{"link":"","secret":""}') + 4 * TOKEN_BYTES
MOST_CONNECTIONS = 512
IDLE_SECONDS = 20.0
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Page:
    """A page as it is sent. policy: the Content-Security-Policy that it states itself, which names its script and its
    style by their SHA-256; the header repeats it, and forbids frames, which only a header can."""

    data: bytes
    sha256: str
    policy: str

    @classmethod
    def load(cls, name: str = "page.html") -> Page:
        """A page of this package."""
        data = resources.files("pipeline.labelling").joinpath(name).read_bytes()
        stated = re.search(rb'http-equiv="Content-Security-Policy"\s+content="([^"]+)"', data)
        assert stated
        return cls(data, sha256(data).hexdigest(), f"{stated[1].decode()}; frame-ancestors 'none'")


@dataclass
class Rate:
    """At most `burst` at once and `per_second` in the long run, for each key apart."""

    per_second: float
    burst: int
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # key -> (how many, at what time)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def allows(self, key: str) -> bool:
        """Counts one more, if it may be."""
        with self._lock:
            now = time.monotonic()
            left, before = self._left.get(key, (float(self.burst), now))
            left = min(float(self.burst), left + (now - before) * self.per_second)
            self._left[key] = (left - 1 if left >= 1 else left, now)
            return left >= 1


class LabelServer(ThreadingHTTPServer):
    """Serves a store until `shutdown`. host, port: where it listens; 0 is any free port. history: what an online run
    says of its rounds, for the operator's page. UserError if it cannot listen."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, store: AnswerStore, host: str = "127.0.0.1", port: int = 0, history: Path | None = None
    ) -> None:
        self.history = history
        self.store, self.page, self.operator_page = store, Page.load(), Page.load("operator.html")
        self.operator = secrets.token_bytes(TOKEN_BYTES).hex()
        self.of_person = Rate(per_second=20, burst=60)
        self.of_strangers = Rate(per_second=5, burst=50)  # all together: a right secret never waits for a wrong one
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(f"{host}:{port}: cannot listen here ({error.strerror}); choose another --port") from None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread per connection, and no more than `MOST_CONNECTIONS`."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Gives the place free again."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line, without address and data; nothing where the other side only went away."""
        error = sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError | socket.timeout):
            print(f"label serve: {type(error).__name__} while answering a request", file=sys.stderr)


class _Refused(Exception):
    """An answer that is none: HTTP status and what to say."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    wbufsize = 1 << 16  # head and body leave together
    server: LabelServer

    def do_GET(self) -> None:
        page = {"/": self.server.page, "/operator": self.server.operator_page}.get(self.path)
        if page is not None:
            self._send(200, page.data, "text/html; charset=utf-8", {"Content-Security-Policy": page.policy})
        else:
            self._route({"/questions": self._questions, "/progress": self._progress})

    def do_POST(self) -> None:
        self._route({"/claim": self._claim, "/answer": self._answer})

    def _route(self, routes: dict[str, Callable[[], dict[str, Any]]]) -> None:
        try:
            if self.path not in routes:
                raise _Refused(404, "there is nothing here")
            self._json(200, routes[self.path]())
        except _Refused as refused:
            self.close_connection = True  # its body may be unread
            self._json(refused.status, {"error": str(refused)})
        except UserError as error:
            print(f"label serve: {error}", file=sys.stderr)
            self.close_connection = True
            self._json(503, {"error": "the server cannot store answers now; keep the page open, it tries again"})

    def _claim(self) -> dict[str, Any]:
        link, secret = self._body(CLAIM, CLAIM_BYTES)
        if not self.server.store.claim(link.decode(), secret.decode()):
            self._strange("this link is unknown, or another browser has opened it: ask for a new one")
        return {}

    def _questions(self) -> dict[str, Any]:
        store, person = self.server.store, self._person()
        waiting = store.open_questions(person)
        (own,) = (each for each in store.persons() if each.name == person)
        return {
            "person": person,
            "given": own.given,
            "skipped": own.skipped,
            "epsilon": store.epsilon,
            "budget": store.budget,
            "page": self.server.page.sha256,
            "questions": [{"event": event} | question.as_json() for event, question in waiting],
        }

    def _answer(self) -> dict[str, Any]:
        person = self._person()
        event, answer = self._body(ANSWER, ANSWER_BYTES)
        try:
            self.server.store.give(person, event.decode(), ANSWERS[answer])
        except NotAsked:
            raise _Refused(404, "this question is not yours") from None
        except AnswerConflict:
            raise _Refused(409, "this question has another answer already, which stays") from None
        return {}

    def _progress(self) -> dict[str, Any]:
        if not hmac.compare_digest(self._secret().encode(), self.server.operator.encode()):
            self._strange("this link is unknown: the server prints a new one at each start")
        store = self.server.store
        people = store.persons()
        return {
            "epsilon": store.epsilon,
            "budget": store.budget,
            "questions": store.asked(),
            "answered": sum(each.given for each in people),
            "skipped": sum(each.skipped for each in people),
            "held": sum(each.held for each in people),
            "people": [asdict(each) for each in people],
            "rounds": self._rounds(),
        }

    def _rounds(self) -> list[dict[str, Any]] | None:
        """The accuracy of r̄ on held-out private answers after each round, with its interval; None without a run."""
        if self.server.history is None:
            return None
        try:
            return [row["held_out_accuracy_debiased"] for row in read_json(self.server.history)]
        except FileNotFoundError:
            return []
        except (OSError, DocumentError, KeyError, TypeError):
            raise _Refused(503, "the history of the run's rounds cannot be read") from None

    def _secret(self) -> str:
        scheme, _, secret = self.headers.get("Authorization", "").partition(" ")
        return secret if scheme == "Bearer" else ""

    def _person(self) -> str:
        person = self.server.store.person_of(self._secret())
        if person is None:
            self._strange("this browser has no right to that: ask for a new link")
        if not self.server.of_person.allows(person):
            raise _Refused(429, "too fast: wait a moment")
        return person

    def _strange(self, said: str) -> NoReturn:
        if not self.server.of_strangers.allows(""):
            raise _Refused(429, "too fast: wait a moment")
        raise _Refused(401, said)

    def _body(self, form: re.Pattern[bytes], size: int) -> tuple[bytes, ...]:
        """The parts of a body that has exactly this size and form."""
        stated = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", stated) or "Transfer-Encoding" in self.headers:
            raise _Refused(411, f"a body of {size} bytes belongs here")
        if int(stated) > size:
            raise _Refused(413, f"a body of {size} bytes belongs here")
        found = form.fullmatch(self.rfile.read(int(stated)))
        if found is None:
            raise _Refused(400, "the body has not the form that belongs here")
        return found.groups()

    def _json(self, status: int, value: dict[str, Any]) -> None:
        policy = {"Content-Security-Policy": "default-src 'none'"}
        self._send(status, json.dumps(value).encode(), "application/json", policy)

    def _send(self, status: int, data: bytes, kind: str, further: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (HEADERS | further).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: requests that are none, and other methods."""
        self.close_connection = True
        self._json(int(code), {"error": "this server takes no such request"})

    def version_string(self) -> str:
        """Of the header `Server`."""
        return "private-rlhf"

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: who answered when is not kept."""
