"""Requests that two servers in a row may read differently. On a connection that a proxy shares among people, the next
person is never answered as somebody else, and an answer that is acknowledged is stored."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from labelling.test_page import serving
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.server import LabelServer
from private_rlhf.labelling.store import AnswerStore
from support.proxies import HOST, proxy

EVE, VIC = "e" * 64, "f" * 64
HEAD = f"Host: {HOST}\r\nAuthorization: Bearer {EVE}\r\n".encode()
INNER = {
    "her own questions for him": b"GET /questions HTTP/1.1\r\n" + HEAD + b"X: ",
    "his request as a header": b"GET /questions HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\nX: ",
    "the page for his answer": b"GET / HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\nX: ",
    "his request as a body": b"POST /answer HTTP/1.1\r\n" + HEAD + b"Content-Length: 57\r\n\r\n",
}


def chunked(data: bytes, size: str = "%x", end: bytes = b"\r\n") -> bytes:
    """A body of one chunk, and its end."""
    return (size % len(data)).encode() + end + data + end + b"0" + end + end


def request(line: str, *headers: str, body: bytes = b"", end: str = "\r\n") -> bytes:
    """Eve's request. headers: in place of `{}` the body's length is put in."""
    lines = [line, f"Host: {HOST}", f"Authorization: Bearer {EVE}", *headers]
    return (end.join(lines).replace("{}", str(len(body))) + 2 * end).encode() + body


GET, POST = "GET / HTTP/1.1", "POST /answer HTTP/1.1"
FOUR, CHUNKED = "Content-Length: 4", "Transfer-Encoding: chunked"
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "CL.0": lambda x: request(GET, "Content-Length: {}", body=x),
    "CL.0 of the questions": lambda x: request("GET /questions HTTP/1.1", "Content-Length: {}", body=x),
    "CL.0 of nothing": lambda x: request("GET /none HTTP/1.1", "Content-Length: {}", body=x),
    "CL.0 of a HEAD": lambda x: request("HEAD / HTTP/1.1", "Content-Length: {}", body=x),
    "CL.0 of a DELETE": lambda x: request("DELETE / HTTP/1.1", "Content-Length: {}", body=x),
    "CL.0 of a refused POST": lambda x: request(POST, "Content-Length: {}", body=x),
    "CL.0 that waits": lambda x: request(GET, "Expect: 100-continue", "Content-Length: {}", body=x),
    "CL.0 of HTTP/1.0": lambda x: request("GET / HTTP/1.0", "Connection: keep-alive", "Content-Length: {}", body=x),
    "TE.0": lambda x: request(GET, CHUNKED, body=chunked(x)),
    "TE.0 of the questions": lambda x: request("GET /questions HTTP/1.1", CHUNKED, body=chunked(x)),
    "CL.TE": lambda x: request(POST, "Content-Length: {}", CHUNKED, body=b"0\r\n\r\n" + x),
    "CL.TE of a GET": lambda x: request(GET, "Content-Length: {}", CHUNKED, body=b"0\r\n\r\n" + x),
    "TE.CL": lambda x: request(POST, CHUNKED, FOUR, body=chunked(x)),
    "TE.CL of a GET": lambda x: request(GET, CHUNKED, "Content-Length: 0", body=chunked(x)),
    "another coding": lambda x: request(POST, "Transfer-Encoding: xchunked", "Content-Length: {}", body=x),
    "two codings": lambda x: request(POST, CHUNKED, "Transfer-Encoding: identity", body=chunked(x)),
    "a list of codings": lambda x: request(POST, "Transfer-Encoding: gzip, chunked", body=chunked(x)),
    "tab before the coding": lambda x: request(POST, "Transfer-Encoding:\tchunked", FOUR, body=chunked(x)),
    "obs-fold": lambda x: request(GET, "X: y\r\n Content-Length: 0", "Content-Length: {}", body=x),
    "obs-fold of the coding": lambda x: request(POST, "Transfer-Encoding:\r\n chunked", FOUR, body=chunked(x)),
    "obs-fold by a tab": lambda x: request(GET, "Content-Length:\r\n\t{}", body=x),
    "two lengths": lambda x: request(GET, "Content-Length: 0", "Content-Length: {}", body=x),
    "two lengths, turned": lambda x: request(GET, "Content-Length: {}", "Content-Length: 0", body=x),
    "the same length twice": lambda x: request(POST, "Content-Length: {}", "content-length: {}", body=x),
    "a list of lengths": lambda x: request(GET, "Content-Length: {}, {}", body=x),
    "a list of unlike lengths": lambda x: request(GET, "Content-Length: 0, {}", body=x),
    "a length with a sign": lambda x: request(GET, "Content-Length: +{}", body=x),
    "a length below zero": lambda x: request(GET, "Content-Length: -{}", body=x),
    "a length with a point": lambda x: request(GET, "Content-Length: {}.0", body=x),
    "a length in hexadecimal": lambda x: request(GET, "Content-Length: 0x{}", body=x),
    "a length with zeros": lambda x: request(GET, "Content-Length: 000{}", body=x),
    "a length with a low line": lambda x: request(GET, "Content_Length: {}", body=x),
    "a length that is empty": lambda x: request(GET, "Content-Length: ", body=x),
    "a length over all bounds": lambda x: request(GET, f"Content-Length: {1 << 64}", body=x),
    "space before the colon": lambda x: request(GET, "Content-Length : {}", body=x),
    "tab before the colon": lambda x: request(POST, "Transfer-Encoding\t: chunked", FOUR, body=chunked(x)),
    "space before the name": lambda x: request(GET + "\r\n Content-Length: {}", body=x),
    "NUL in a header": lambda x: request(GET, "X: \x00", "Content-Length: {}", body=x),
    "chunk size with a sign": lambda x: request(POST, CHUNKED, body=chunked(x, "+%x")),
    "chunk size with 0x": lambda x: request(POST, CHUNKED, body=chunked(x, "0x%x")),
    "chunk size over all bounds": lambda x: request(POST, CHUNKED, body=chunked(x, "1" + "0" * 16 + "%x")),
    "chunk size that is none": lambda x: request(POST, CHUNKED, body=chunked(x, "g%x")),
    "chunk extension with LF": lambda x: request(POST, CHUNKED, body=b"1;\nx\r\n0\r\n\r\n" + x),
    "chunks that end in LF": lambda x: request(POST, CHUNKED, body=chunked(x, end=b"\n")),
    "a trailer": lambda x: request(POST, CHUNKED, body=b"0\r\nContent-Length: 9\r\n\r\n" + x),
    "lines that end in LF": lambda x: request(GET, "Content-Length: {}", body=x, end="\n"),
    "one line that ends in LF": lambda x: request(GET, "X: y\nContent-Length: {}", body=x),
    "one line that ends in CR": lambda x: request(GET, "X: y\rContent-Length: {}", body=x),
    "a head that ends in LF": lambda x: request(GET, "X: y\n\nGET /questions HTTP/1.1", body=x),
    "an empty line before": lambda x: b"\r\n" + request(GET, "Content-Length: {}", body=x),
    "an absolute URI": lambda x: request("GET http://other/questions HTTP/1.1", "Content-Length: {}", body=x),
    "a target with a space": lambda x: request("GET / HTTP/1.1 HTTP/1.1", "Content-Length: {}", body=x),
    "two Hosts": lambda x: request(GET, "Host: other", "Content-Length: {}", body=x),
    "no version": lambda x: request("GET /", "Content-Length: {}", body=x),
    "another version": lambda x: request("GET / HTTP/1.9", "Content-Length: {}", body=x),
    "an upgrade": lambda x: request(GET, "Connection: Upgrade", "Upgrade: websocket", "Content-Length: {}", body=x),
    "an upgrade to HTTP/2": lambda x: request(GET, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", body=x),
    "HTTP/2": lambda x: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + x,
    "the length is hop-by-hop": lambda x: request(GET, "Connection: Content-Length", "Content-Length: {}", body=x),
    "pipelined": lambda x: request(GET) + x,
    "pipelined behind an answer": lambda x: request(POST, "Content-Length: 57", body=b"x" * 57) + x,
    "a body of another length": lambda x: request(POST, "Content-Length: 57", body=b"x" * 60 + x),
    "a header over all bounds": lambda x: request(GET, "X: " + "y" * 70_000, "Content-Length: {}", body=x),
}  # fmt: skip


@dataclass
class House:
    """A server with two people; `connect` opens a connection to it or to what stands before it."""

    server: LabelServer
    connect: Callable[[], socket.socket]

    def next_event(self) -> str:
        """One of Vic's, which waits for an answer."""
        return self.server.store.open_questions("vic")[0][0]

    def stored(self, event: str) -> int | None:
        with self.server.store._transaction() as base:
            (answer,) = base.execute("SELECT answer FROM events WHERE event = ?", (event,)).fetchone()
        return answer


@contextmanager
def house(folder: Path, through: str | None) -> Iterator[House]:
    store = AnswerStore(folder / "store", 1.0)
    store.ask([make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(900)])
    store._base.execute("PRAGMA synchronous = OFF")  # a thousand answers: the disk is not what is tried here
    for name, secret in (("eve", EVE), ("vic", VIC)):
        assert store.claim(store.add_person(name), secret)
    with serving(store) as server:
        server.of_person.per_second = server.of_strangers.per_second = server.of_person.burst = 1 << 20
        server.of_strangers.burst = 1 << 20
        if through is None:
            yield House(server, lambda: socket.create_connection(("127.0.0.1", server.port), timeout=5))
            return
        with proxy(through, server.port) as path:

            def connect() -> socket.socket:
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(5)
                connection.connect(str(path))
                return connection

            yield House(server, connect)


def read(connection: socket.socket) -> tuple[int, bytes] | None:
    """The next response: status and body; None if the connection ended before."""
    with suppress(ConnectionError):
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := connection.recv(1)):
                return None
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            return read(connection)
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        while len(body) < (int(length[1]) if length else 1 << 20):
            if not (more := connection.recv(1 << 16)):
                break
            body += more
        return int(head.split()[1]), body
    return None


def of_vic(path: str, body: bytes = b"") -> bytes:
    """Vic's request, as his page sends it."""
    head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {VIC}\r\n"
    return head.encode() + (f"Content-Length: {len(body)}\r\n".encode() if body else b"") + b"\r\n" + body


def check_questions(response: tuple[int, bytes] | None) -> None:
    """Vic is answered as Vic, or not at all."""
    if response is not None and response[0] == 200:
        assert re.match(rb'{"person": ?"vic"', response[1]), response[1][:60]


def check_answer(house: House, event: str, response: tuple[int, bytes] | None) -> None:
    """What the page takes for an acknowledgement is one."""
    if response is not None and response[0] == 200:
        assert acknowledges(response[1], event)
        assert house.stored(event) == 1


def acknowledges(body: bytes, event: str) -> bool:
    try:
        return bool(json.loads(body) == {"event": event, "answer": "+"})
    except ValueError:
        return False


def sent(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except ConnectionError:
        return False
    return True


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("direct"), None) as found:
        yield found


@pytest.mark.parametrize("form", FORMS)
def test_on_one_connection_the_next_request_is_its_sender_s(direct: House, form: str) -> None:
    """As behind a proxy that shares the connection: the first response is Eve's, the second Vic's."""
    for inner in INNER.values():
        event = direct.next_event()
        body = f'{{"event":"{event}","answer":"+"}}'.encode()
        for path, given in (("/questions", b""), ("/answer", body)):
            with direct.connect() as connection:
                if not sent(connection, FORMS[form](inner)) or read(connection) is None:
                    continue
                if not sent(connection, of_vic(path, given)):
                    continue
                response = read(connection)
                check_answer(direct, event, response) if given else check_questions(response)


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_behind_a_real_proxy_everybody_is_answered_as_themselves(tmp_path: Path, name: str) -> None:
    """Every form, then Vic on connections of his own: the proxy has few to the server, which they share."""
    wrong, answered = [], 0
    with house(tmp_path, name) as found:
        for form, make in FORMS.items():
            for title, inner in INNER.items():
                with found.connect() as eve:
                    eve.settimeout(0.02)  # a proxy may wait for what is missing
                    with suppress(TimeoutError):
                        if sent(eve, make(inner)):
                            read(eve)
                event = found.next_event()
                for path, given in (("/questions", b""), ("/answer", f'{{"event":"{event}","answer":"+"}}'.encode())):
                    with found.connect() as vic:
                        sent(vic, of_vic(path, given))
                        response = read(vic)
                    answered += response is not None and response[0] == 200
                    try:
                        check_answer(found, event, response) if given else check_questions(response)
                    except AssertionError:
                        wrong.append((form, title, path, response))
    assert not wrong
    assert answered == 2 * len(FORMS) * len(INNER)
