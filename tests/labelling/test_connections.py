"""Connections of the page's server: what is refused at once, and who has to wait for whom."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from labelling.test_page import serving
from labelling.test_smuggling import EVE, FORMS, INNER, House, house, of_vic, read
from private_rlhf.labelling import connections
from private_rlhf.labelling.server import HEADERS, LabelServer
from private_rlhf.labelling.store import AnswerStore
from support.proxies import HOST, proxy

GET = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
HALF_BODY = GET.replace(b"GET /", b"POST /claim")[:-2] + b"Content-Length: 147\r\n\r\n{"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LabelServer]:
    """Eight places, and a second for a request."""
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(connections, "SECONDS", 1)
    monkeypatch.setattr("private_rlhf.labelling.server.MOST_CONNECTIONS", 8)
    monkeypatch.setattr("private_rlhf.labelling.server.SECONDS", 2)
    with serving(AnswerStore(tmp_path / "store", 1.0)) as server:
        yield server


def connect(server: LabelServer, address: str = "127.0.0.1") -> socket.socket:
    """From an address of this machine."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=5, source_address=(address, 0))


def ended(connection: socket.socket) -> bool:
    """The server has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nX: ", HALF_BODY])
def test_half_requests_lock_nobody_out(server: LabelServer, half: bytes) -> None:
    """Whoever holds all places loses the oldest to the next, and a request has its time however slowly it comes."""
    crowd = [connect(server) for _ in range(40)]
    for each in crowd:
        each.sendall(half)
    statuses = []
    for _ in range(5):  # 503 while the work for the oldest is being ended: a page tries again
        with connect(server) as connection:
            connection.sendall(GET)
            statuses.append((read(connection) or (0,))[0])
    assert statuses[-1] == 200
    began = time.monotonic()
    while not all(map(ended, crowd)):
        assert time.monotonic() < began + 4
        time.sleep(0.2)
        for each in crowd:
            try:
                each.send(b"y")
            except OSError:
                continue


def test_the_address_that_has_most_makes_room(server: LabelServer) -> None:
    others = [connect(server, "127.0.0.2") for _ in range(2)]
    crowd = [connect(server, "127.0.0.3") for _ in range(30)]
    time.sleep(0.2)
    assert not any(map(ended, others))
    for each in others:
        each.setblocking(True)
        each.sendall(GET)
        assert (read(each) or (0,))[0] == 200
    for each in (*crowd, *others):
        each.close()


def test_whoever_leaves_in_the_middle_is_no_error(server: LabelServer, capfd: pytest.CaptureFixture[str]) -> None:
    for half in (b"", GET[:-2], HALF_BODY):
        with connect(server) as connection:
            connection.sendall(half)
            time.sleep(0.1)
    with connect(server) as connection:
        connection.sendall(GET)
        assert (read(connection) or (0,))[0] == 200
    assert capfd.readouterr() == ("", "")


def test_whoever_reads_nothing_is_ended(server: LabelServer) -> None:
    """Pages for a whole minute, none of them read: what is asked behind an answer is not."""
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.sendall(GET * 50)
        until = time.monotonic() + 5
        while server._server.server_state.connections:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_head_may_come_in_parts(tmp_path: Path) -> None:
    """Wherever it is split; so may a form that is refused."""
    whole = of_vic("/questions")
    with house(tmp_path, None) as found:
        for data, status in ((whole, 200), (FORMS["obs-fold"](b""), 400), (FORMS["lines that end in LF"](b""), 400)):
            for place in range(1, len(data), 5):
                with found.connect() as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.sendall(data[:place])
                    time.sleep(0.001)
                    connection.sendall(data[place:])
                    assert (read(connection) or (0,))[0] == status


@pytest.mark.parametrize(
    "form", ["CL.0", "TE.0", "obs-fold", "the same length twice", "lines that end in LF", "two Hosts"]
)
def test_a_refused_request_ends_its_connection(direct: House, form: str) -> None:
    with direct.connect() as connection:
        connection.sendall(FORMS[form](INNER["his request as a header"]))
        head = b""
        while b"\r\n\r\n" not in head and (more := connection.recv(1)):
            head += more
        assert head.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in head.lower()
        assert all(f"{name}: {value}".lower().encode() in head.lower() for name, value in HEADERS.items())
        rest = b""
        while more := connection.recv(1 << 16):
            rest += more
        assert set(json.loads(rest)) == {"error"}, "one response"


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("direct"), None) as found:
        yield found


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_proxy_shares_connections_among_people(tmp_path: Path, name: str) -> None:
    """Guards the tests of smuggling: behind a proxy with a connection for each person they would show nothing."""
    with house(tmp_path, None) as found, proxy(name, found.server.port) as path:
        for secret in [EVE, "f" * 64] * 10:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(path))
                connection.sendall(of_vic("/questions").replace(b"f" * 64, secret.encode()))
                assert (read(connection) or (0,))[0] == 200
        assert len(found.server._server.server_state.connections) <= 2
