"""The labelling page's server: hands out one page and each person's questions, and takes private labels in.

    GET  /           the page, the same bytes for everybody
    POST /claim      {"link":"<64 hex digits>","secret":"<64 hex digits>"}: a link opens in one browser, once
    POST /level      {"level":"1"}: the number of the ε that the person chooses, where the store has several
    GET  /questions  what the person has to answer; nothing before a level is chosen
    POST /answer     {"event":"<32 hex digits>","answer":"+"}: + prefers response_a, - response_b, 0 skips
    GET  /operator   a page for the operator, and what it shows: GET /progress and /summary, which are counts, /export
    POST /invite     {"name":"616e6e61"}, UTF-8 in hex, by the operator: a new person's link

What a page sends is of constant size; an answer is acknowledged in its own words, once it is on the disk. A person's or
the operator's secret goes in `Authorization: Bearer`; what a browser sends by itself (a cookie, say) counts for
nothing, so no other site can act for anybody. Other names than the declared ones are not answered for. Requests are not
logged. Plain HTTP: a proxy that ends TLS belongs in front of it (docs/how-to/labelling.md).
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from private_rlhf.core.documents import DocumentError, read_json
from private_rlhf.core.errors import UserError, is_name, print_lines
from private_rlhf.core.noise import LabelNoise, share_text
from private_rlhf.core.stats import wilson
from private_rlhf.labelling.address import bracketed, host_names
from private_rlhf.labelling.connections import MOST_CONNECTIONS, MOST_HEAD, SECONDS, Connection
from private_rlhf.labelling.questions import answer_lines
from private_rlhf.labelling.store import (
    EVENT_BYTES,
    SKIPPED,
    TOKEN_BYTES,
    AnswerConflict,
    AnswerStore,
    NotALevel,
    NotAsked,
)
from private_rlhf.privacy.records import fold_name
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

ANSWERS = {"+": 1, "-": -1, "0": SKIPPED}
_EVENT, _TOKEN = f"([0-9a-f]{{{2 * EVENT_BYTES}}})", f"([0-9a-f]{{{2 * TOKEN_BYTES}}})"
ANSWER = re.compile(rf'\{{"event":"{_EVENT}","answer":"([-+0])"\}}')
CLAIM = re.compile(rf'\{{"link":"{_TOKEN}","secret":"{_TOKEN}"\}}')
LEVEL = re.compile(r'\{"level":"([0-9a-f])"\}')
ANSWER_BYTES = len('{"event":"","answer":"+"}') + 2 * EVENT_BYTES
CLAIM_BYTES = len('{"link":"","secret":""}') + 4 * TOKEN_BYTES
LEVEL_BYTES = len('{"level":"0"}')
INVITE, INVITE_BYTES = re.compile(r'\{"name":"((?:[0-9a-f]{2})+)"\}'), 2048
REFUSALS = {
    NotALevel: (400, "a level must be one that this page offers: reload it and choose again"),
    NotAsked: (404, "this question is not yours"),
    AnswerConflict: (409, "this question has another answer already, which stays"),
    UserError: (503, "the server cannot store answers now; keep the page open, it tries again"),
    Exception: (500, "the server failed; keep the page open, it tries again"),
}
HEADERS = {
    "Server": "private-rlhf", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()", "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}  # fmt: skip


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
        data = resources.files("private_rlhf.labelling").joinpath(name).read_bytes()
        policy = re.search(rb'http-equiv="Content-Security-Policy"\s+content="([^"]+)"', data)
        assert policy
        return cls(data, sha256(data).hexdigest(), f"{policy[1].decode()}; frame-ancestors 'none'")


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


class LabelServer:
    """Serves a store from `serve_forever` until `shutdown`. host, port: where it listens; 0 is any free port. url:
    where people reach it, if that is another place; it answers for that name, for `host` and for the names of the
    loopback. history: what an online run says of its rounds, for the operator's page. guidelines: Markdown for people.

    Raises: UserError: it cannot listen, or the URL is none.
    """

    def __init__(
        self, store: AnswerStore, host: str = "127.0.0.1", port: int = 0, history: Path | None = None,
        url: str | None = None, guidelines: str = "",
    ) -> None:  # fmt: skip
        self.history, self._guidelines = history, {"guidelines": guidelines} if guidelines else {}
        self.store, self.page, self.operator_page = store, Page.load(), Page.load("operator.html")
        self.operator = secrets.token_bytes(TOKEN_BYTES).hex()
        self.of_person = Rate(per_second=20, burst=60)
        self.of_strangers = Rate(per_second=5, burst=50)  # all together: a right secret never waits for a wrong one
        names = set() if url is None else host_names(url)
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            why = str(error.strerror).partition(" (")[0]  # the rest repeats the address
            raise UserError(f"{host}:{port}: cannot listen here ({why}); choose another --port") from None
        # connections inherit it: head and body leave as two packets, and the second would wait 40 ms for the first
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = int(self._socket.getsockname()[1])
        local = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]", bracketed(host))}
        self._names = frozenset(names | local | {name.removesuffix(":80") for name in local})
        self.url = (url or f"http://{bracketed(host)}:{self.port}").rstrip("/") + "/"
        self._routes = Starlette(
            routes=[
                Route("/", _send_page(self.page)),
                Route("/operator", _send_page(self.operator_page)),
                Route("/questions", _send_json(self._questions)),
                Route("/progress", _send_json(self._progress)),
                Route("/summary", _send_json(self._summary)),
                Route("/export", _send_json(self._export)),
                Route("/invite", _send_json(self._invite, INVITE, INVITE_BYTES), methods=["POST"]),
                Route("/claim", _send_json(self._claim, CLAIM, CLAIM_BYTES), methods=["POST"]),
                Route("/level", _send_json(self._level, LEVEL, LEVEL_BYTES), methods=["POST"]),
                Route("/answer", _send_json(self._answer, ANSWER, ANSWER_BYTES), methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((HTTPException, *REFUSALS), _explain),
        )
        self._routes.router.redirect_slashes = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer_request, interface="asgi3", http=Connection, ws="none", loop="asyncio", lifespan="off",
                log_config=None, log_level="critical", access_log=False, proxy_headers=False, server_header=False,
                headers=list(HEADERS.items()), limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=SECONDS,
                h11_max_incomplete_event_size=MOST_HEAD, timeout_graceful_shutdown=5,
            )
        )  # fmt: skip

    def __enter__(self) -> LabelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def serve_forever(self) -> None:
        """Answers requests, in this thread and some of its own."""
        self._server.run(sockets=[self._socket])

    def shutdown(self) -> None:
        """Makes `serve_forever` end soon."""
        self._server.should_exit = True

    async def _answer_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses what is for no route: another name, another method, a body where none belongs."""
        headers = Headers(scope=scope)
        answer: ASGIApp = self._routes
        if headers.get("host", "").lower() not in self._names:
            answer = _json(421, {"error": "this server does not answer for that name: begin it with --url"})
        elif scope["method"] not in ("GET", "POST"):
            answer = _json(501, {"error": "this server takes no such request"})
        elif scope["method"] == "GET" and ("transfer-encoding" in headers or int(headers.get("content-length", 0))):
            answer = _json(400, {"error": "a body does not belong here"})
        await answer(scope, receive, send)

    def _claim(self, request: Request, link: str, secret: str) -> dict[str, Any]:
        if not self.store.claim(link, secret):
            self._strange("this link is unknown, or another browser has opened it: ask for a new one")
        return {}

    def _questions(self, request: Request) -> dict[str, Any]:
        store, person = self.store, self._person(request)
        waiting = store.open_questions(person)
        (counts,) = (each for each in store.persons() if each.name == person)
        return {
            "person": person, "given": counts.given, "skipped": counts.skipped,
            "epsilon": store.epsilon, "budget": store.budget, "page": self.page.sha256,
            "questions": [
                {"event": event} | question.as_json() | ({"epsilon": epsilon} if store.has_levels else {})
                for event, question, epsilon in waiting
            ],
        } | self._levels_of(person, store.answer_counts()) | self._guidelines  # fmt: skip

    def _levels_of(self, person: str, counts: Mapping[str, Mapping[float, int]]) -> dict[str, Any]:
        """A person's choice, and each level with the number of their answers at it; empty where there is one ε."""
        if not self.store.has_levels:
            return {}
        levels = [[level, counts.get(person, {}).get(level, 0)] for level in self.store.levels]
        return {"level": self.store.level_of(person), "levels": levels}

    def _level(self, request: Request, number: str) -> dict[str, Any]:
        self.store.choose_level(self._person(request), int(number, 16))
        return {"level": number}

    def _answer(self, request: Request, event: str, answer: str) -> dict[str, Any]:
        self.store.give(self._person(request), event, ANSWERS[answer])
        return {"event": event, "answer": answer}

    def _progress(self, request: Request) -> dict[str, Any]:
        self._check_operator(request)
        people, counts = self.store.persons(), self.store.answer_counts()
        return {
            "epsilon": self.store.epsilon, "budget": self.store.budget, "questions": self.store.asked(),
            "answered": sum(each.given for each in people), "skipped": sum(each.skipped for each in people),
            "held": sum(each.held for each in people),
            "people": [asdict(each) | self._levels_of(each.name, counts) for each in people],
            "rounds": self._rounds(),
        }  # fmt: skip

    def _summary(self, request: Request) -> dict[str, Any]:
        """Answers by day, and the share of shared pairs on which two people's own preferences agree."""
        self._check_operator(request)
        *epsilons, pairs, agreed = self.store.agreement() or (0, 0)
        share = wilson(agreed, pairs) if pairs else None
        for epsilon in epsilons:  # either draw shrinks an agreement by its factor
            share = share and LabelNoise.of(epsilon).debias(share)
        return {"days": self.store.days(), "agreement": share_text(share.as_dict()) if share else ""}

    def _export(self, request: Request) -> dict[str, Any]:
        self._check_operator(request)
        return {"lines": "".join(answer_lines(dict(sorted(self.store.answers().items())), self.store.epsilons()))}

    def _invite(self, request: Request, letters: str) -> dict[str, Any]:
        import segno

        self._check_operator(request)
        name = bytes.fromhex(letters).decode(errors="replace")
        if not is_name(name) or fold_name(name) in (fold_name(each.name) for each in self.store.persons()):
            raise HTTPException(409, "a person must have a new name of one line: `label invite` renews a link")
        link = f"{self.url}#{self.store.add_person(name)}"
        return {"link": link, "code": segno.make(link, micro=False).svg_data_uri(scale=4, border=2)}

    def _check_operator(self, request: Request) -> None:
        if not hmac.compare_digest(_secret(request).encode(), self.operator.encode()):
            self._strange("this link is unknown: the server prints a new one at each start")

    def _rounds(self) -> list[dict[str, Any]] | None:
        """The accuracy of r̄ on held-out private answers after each round, with its interval; None without a run."""
        if self.history is None:
            return None
        try:
            return [row["held_out_accuracy_debiased"] for row in read_json(self.history)]
        except FileNotFoundError:
            return []
        except (OSError, DocumentError, KeyError, TypeError):
            raise HTTPException(503, "the history of the run's rounds cannot be read") from None

    def _person(self, request: Request) -> str:
        person = self.store.person_of(_secret(request))
        if person is None:
            self._strange("this browser has no right to that: ask for a new link")
        if not self.of_person.allows(person):
            raise HTTPException(429, "too fast: wait a moment")
        return person

    def _strange(self, text: str) -> NoReturn:
        if not self.of_strangers.allows(""):
            raise HTTPException(429, "too fast: wait a moment")
        raise HTTPException(401, text)


def _send_page(page: Page) -> Callable[[Request], Response]:
    return lambda request: Response(page.data, media_type="text/html", headers={"Content-Security-Policy": page.policy})


def _send_json(
    work: Callable[..., dict[str, Any]], form: re.Pattern[str] | None = None, size: int = 0
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint. work: of the request and the parts of its body, in a thread: it may wait for the disk."""

    async def answer(request: Request) -> Response:
        parts = () if form is None else await _body(request, form, size)
        return _json(200, await run_in_threadpool(work, request, *parts))

    return answer


async def _body(request: Request, form: re.Pattern[str], size: int) -> tuple[str, ...]:
    """The parts of a body that has exactly this size and form."""
    length = request.headers.get("content-length")
    if length is None or "transfer-encoding" in request.headers:
        raise HTTPException(411, f"a body of {size} bytes belongs here")
    if int(length) > size:
        raise HTTPException(413, f"a body of {size} bytes belongs here")
    match = form.fullmatch((await request.body()).decode("latin-1"))
    if match is None:
        raise HTTPException(400, "the body has not the form that belongs here")
    return match.groups()


def _secret(request: Request) -> str:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret if scheme == "Bearer" else ""


def _json(status: int, value: dict[str, Any]) -> Response:
    """A refusal ends its connection: its body may be unread."""
    headers = {"Content-Security-Policy": "default-src 'none'"} | ({} if status == 200 else {"Connection": "close"})
    return JSONResponse(value, status, headers)


async def _explain(request: Request, error: Exception) -> Response:
    """A refusal; for what is the server's fault, one line on stderr without address and data."""
    if isinstance(error, HTTPException):
        return _json(error.status_code, {"error": error.detail})
    status, text = next(refusal for kind, refusal in REFUSALS.items() if isinstance(error, kind))
    if status >= 500 and not isinstance(error, ClientDisconnect):
        reason = error if status == 503 else f"{type(error).__name__} while answering a request"
        print_lines(f"label serve: {reason}", file=sys.stderr)
    return _json(status, {"error": text})
