"""The labelling page's server and store: who may do what, how often, and what survives a kill."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from private_rlhf.cli import main
from private_rlhf.core.errors import UserError
from private_rlhf.labelling.questions import make_question, write_questions
from private_rlhf.labelling.server import ANSWER_BYTES, CLAIM_BYTES, HEADERS, LabelServer, Page, Rate
from private_rlhf.labelling.store import AHEAD, FILE, AnswerStore

QUESTIONS = [make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(40)]
SECRETS = ["a" * 64, "b" * 64]


class Client:
    """A browser in small. secret: what it says it is."""

    def __init__(self, port: int, secret: str = "") -> None:
        self.port, self.secret = port, secret

    def __call__(self, method: str, path: str, body: bytes | str | None = None, **headers: str) -> tuple[int, Any]:
        """(status, body as JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, body, {"Authorization": f"Bearer {self.secret}"} | headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        return answer.status, text.decode() if answer.headers["Content-Type"].startswith("text") else json.loads(text)

    def give(self, event: str, sign: str) -> tuple[int, Any]:
        """Sends z."""
        body = f'{{"event":"{event}","answer":"{sign}"}}'
        assert len(body) == ANSWER_BYTES
        return self("POST", "/answer", body)


def claim(link: str, secret: str) -> str:
    body = f'{{"link":"{link}","secret":"{secret}"}}'
    assert len(body) == CLAIM_BYTES
    return body


@pytest.fixture
def store(tmp_path: Path) -> AnswerStore:
    """Forty questions, and a budget of six answers."""
    store = AnswerStore(tmp_path / "store", 1.0, 6.0)
    store.ask(QUESTIONS)
    return store


def test_an_answer_is_kept_once(anna: Client, store: AnswerStore) -> None:
    status, asked = anna("GET", "/questions")
    assert status == 200
    assert [each["prompt"] for each in asked["questions"]] == [f"prompt {i}" for i in range(AHEAD)]
    event = asked["questions"][0]["event"]
    for _ in "again, as after a lost confirmation", "":
        assert anna.give(event, "-") == (200, {"event": event, "answer": "-"})
    assert anna.give(event, "+")[0] == 409
    assert anna.give(event, "0")[0] == 409
    assert anna.give(other := asked["questions"][1]["event"], "0") == (200, {"event": other, "answer": "0"})
    assert store.answers() == {"q0": -1, "q1": None}
    assert store.answer_counts() == {"anna": {1.0: 1}}


def test_a_person_is_asked_what_the_budget_holds(anna: Client, store: AnswerStore) -> None:
    signs = iter("0+0+++" + "+" * 99)
    while waiting := anna("GET", "/questions")[1]["questions"]:
        assert anna.give(waiting[0]["event"], next(signs))[0] == 200
    assert store.persons()[0].given == 6
    assert store.persons()[0].skipped == 2


def test_a_link_opens_in_one_browser(server: LabelServer) -> None:
    link = server.store.add_person("anna")
    one, other = Client(server.port, SECRETS[0]), Client(server.port, SECRETS[1])
    assert one("POST", "/claim", claim(link, one.secret))[0] == 200
    assert one("POST", "/claim", claim(link, one.secret))[0] == 200, "a reload"
    assert other("POST", "/claim", claim(link, other.secret))[0] == 401
    assert other("GET", "/questions")[0] == 401
    assert Client(server.port, link)("GET", "/questions")[0] == 401
    renewed = server.store.add_person("anna")
    assert one("GET", "/questions")[0] == 401, "the older link has ended"
    assert other("POST", "/claim", claim(renewed, other.secret))[0] == 200
    server.store.remove_person("anna")
    assert other("GET", "/questions")[0] == 401


def test_a_question_is_one_person_s(anna: Client, server: LabelServer) -> None:
    ben = Client(server.port, SECRETS[1])
    ben("POST", "/claim", claim(server.store.add_person("ben"), ben.secret))
    hers, his = ({each["event"] for each in who("GET", "/questions")[1]["questions"]} for who in (anna, ben))
    assert not hers & his
    assert ben.give(next(iter(hers)), "+")[0] == 404
    server.store.remove_person("anna")
    for event in his:
        ben.give(event, "0")
    assert {each["event"] for each in ben("GET", "/questions")[1]["questions"]} == hers


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("x" * (ANSWER_BYTES + 1), 413),
        ("x" * ANSWER_BYTES, 400),
        ("", 400),
        ('{"event":"' + "A" * 32 + '","answer":"+"}', 400),
        ('{"event":"' + "0" * 32 + '","answer":"1"}', 400),
        ('{"event":"' + "0" * 32 + '","answer":"+"}', 404),
    ],
)
def test_other_bodies_are_refused(anna: Client, store: AnswerStore, body: str, status: int) -> None:
    anna("GET", "/questions")
    assert anna("POST", "/answer", body)[0] == status
    assert store.answers() == {}


def test_other_requests_are_refused(anna: Client) -> None:
    assert anna("POST", "/answer", None, **{"Content-Length": "x"})[0] == 400
    assert anna("POST", "/answer", iter(()), **{"Transfer-Encoding": "chunked"})[0] == 411
    assert anna("GET", "/questions", "x")[0] == 400
    assert anna("GET", "/", None, **{"Transfer-Encoding": "chunked"})[0] == 400
    assert anna("POST", "/answer", None, **{"Transfer-Encoding": "chunked"})[0] == 411
    assert anna("GET", "/answers.db")[0] == 404
    assert anna("GET", "/../answers.db")[0] == 404
    assert anna("DELETE", "/answer")[0] == 501
    assert anna("GET", "/questions", None, Authorization="")[0] == 401
    assert anna("GET", "/questions", None, Authorization=f"Basic {anna.secret}")[0] == 401


def test_wrong_tokens_wait_and_right_ones_do_not(anna: Client, server: LabelServer) -> None:
    server.of_strangers = Rate(per_second=0, burst=3)
    stranger = Client(server.port, "c" * 64)
    assert [stranger("GET", "/questions")[0] for _ in range(5)] == [401] * 3 + [429] * 2
    assert anna("GET", "/questions")[0] == 200
    server.of_person = Rate(per_second=0, burst=2)
    assert [anna("GET", "/questions")[0] for _ in range(4)] == [200] * 2 + [429] * 2


def test_the_page_is_the_same_for_all_and_reaches_nobody_else(server: LabelServer) -> None:
    page = Page.load()
    status, text = Client(server.port)("GET", "/")
    assert (status, text.encode()) == (200, page.data)
    assert "default-src 'none'" in page.policy
    assert "connect-src 'self'" in page.policy
    assert "unsafe" not in page.policy
    assert page.policy.endswith("frame-ancestors 'none'")
    assert not re.search(rb"(?:src|href)=.(?!data:,|#)|https?://", page.data.split(b"<script>")[0])
    assert not re.search(rb"innerHTML|eval\(|https?://", page.data)


def test_the_operator_sees_counts_alone(anna: Client, server: LabelServer, tmp_path: Path) -> None:
    events = [each["event"] for each in anna("GET", "/questions")[1]["questions"]]
    for event, sign in zip(events, "+-0", strict=False):
        anna.give(event, sign)
    status, found = Client(server.port, server.operator)("GET", "/progress")
    assert (status, found["people"]) == (200, [{"name": "anna", "given": 2, "skipped": 1, "held": 2}])
    assert (found["questions"], found["answered"], found["skipped"], found["held"]) == (40, 2, 1, 2)
    assert found["rounds"] is None
    accuracy = {"value": 0.6, "ci_low": 0.5, "ci_high": 0.7, "n": 100}
    operator, server.history = Client(server.port, server.operator), tmp_path / "history.json"
    assert operator("GET", "/progress")[1]["rounds"] == []
    server.history.write_text(json.dumps([{"labels": 40, "held_out_accuracy_debiased": accuracy}]))
    assert operator("GET", "/progress")[1]["rounds"] == [accuracy]
    server.history.write_text("[{}]")
    assert operator("GET", "/progress")[0] == 503
    assert anna("GET", "/progress")[0] == Client(server.port)("GET", "/progress")[0] == 401
    assert Client(server.port)("GET", "/operator")[1].encode() == server.operator_page.data


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:PORT", 200), ("localhost:PORT", 200), ("LocalHost:PORT", 200), ("label.example.org", 200),
        ("rebound.example.org:PORT", 421), ("127.0.0.1", 421), ("127.0.0.1:PORT@label.example.org", 421),
        ("label.example.org.", 421), ("", 421),
    ],
)  # fmt: skip
def test_other_names_are_not_answered_for(anna: Client, host: str, status: int) -> None:
    """A site whose name was turned to this machine's address sends its own name."""
    host = host.replace("PORT", str(anna.port))
    for path in ("/", "/questions", "/operator"):
        assert anna("GET", path, None, Host=host)[0] == status
    assert anna("POST", "/claim", "x" * CLAIM_BYTES, Host=host)[0] == (400 if status == 200 else 421)


def test_at_port_80_names_without_a_port_are_answered_for(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers leave :80 out of Host."""
    listening = SimpleNamespace(setsockopt=lambda *_: None, getsockname=lambda: ("127.0.0.1", 80))
    monkeypatch.setattr("socket.create_server", lambda *_, **__: listening)
    names = LabelServer(store, port=80)._names
    assert {"127.0.0.1", "127.0.0.1:80", "localhost", "[::1]"} <= names


def test_an_answer_is_acknowledged_once_it_is_on_the_disk(
    anna: Client, server: LabelServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = anna("GET", "/questions")[1]["questions"][0]["event"]
    begun, may_end = threading.Event(), threading.Event()

    def give(*_: object) -> None:
        begun.set()
        assert may_end.wait(10)

    def fail(*_: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(server.store, "give", give)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(anna.give(event, "+")))
    thread.start()
    assert begun.wait(10)
    thread.join(0.2)
    assert answers == [], "nothing is acknowledged while the store writes"
    assert Client(server.port)("GET", "/")[0] == 200, "others do not wait for it"
    may_end.set()
    thread.join(10)
    assert answers == [(200, {"event": event, "answer": "+"})]
    monkeypatch.setattr(server.store, "give", fail)
    assert anna.give(event, "+")[0] == 503
    monkeypatch.setattr(server.store, "give", lambda *_: 1 / 0)
    assert anna.give(event, "+")[0] == 500
    assert capsys.readouterr().err.splitlines() == [
        "label serve: the disk is full", "label serve: ZeroDivisionError while answering a request"
    ]  # fmt: skip


def test_a_second_invitation_asks_nothing_again(anna: Client, server: LabelServer) -> None:
    """The earlier browser may have drawn what it held, and still sends it: 401, but the machine has seen the bytes."""
    store = server.store
    before = [each["event"] for each in anna("GET", "/questions")[1]["questions"]]
    assert anna.give(before[0], "+")[0] == 200
    again = Client(server.port, SECRETS[1])
    assert again("POST", "/claim", claim(store.add_person("anna"), again.secret))[0] == 200
    assert anna.give(before[1], "+")[0] == 401
    after = [each["event"] for each in again("GET", "/questions")[1]["questions"]]
    assert not set(before) & set(after)
    assert len(after) == 1, "of a budget of six, one is answered and four may be drawn"
    assert again.give(before[1], "-")[0] == 404
    store.remove_person("anna")
    store.claim(store.add_person("anna"), again.secret)
    assert again("GET", "/questions")[1]["questions"] == []
    ben = Client(server.port, "c" * 64)
    store.claim(store.add_person("ben"), ben.secret)
    assert {each["event"] for each in ben("GET", "/questions")[1]["questions"]} == {*before[1:], *after}


def test_no_token_and_no_time_is_in_the_file(anna: Client, store: AnswerStore) -> None:
    link = store.add_person("ben")
    folder = store._folder
    assert all(secret.encode() not in (folder / FILE).read_bytes() for secret in (link, anna.secret))
    assert all(secret.encode() not in (folder / f"{FILE}-wal").read_bytes() for secret in (link, anna.secret))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600


def test_a_store_keeps_its_terms(store: AnswerStore) -> None:
    assert AnswerStore(store._folder, 1.0, 6.0).most == AnswerStore.open(store._folder).most == 6
    for terms in ((2.0, 6.0), (1.0, None)):
        with pytest.raises(UserError, match="other --store"):
            AnswerStore(store._folder, *terms)
    with pytest.raises(UserError, match="new id"):
        store.ask([make_question("q1", "another prompt", "x", "y")])
    with pytest.raises(UserError, match="must be a store"):
        AnswerStore.open(store._folder / "none")
    with pytest.raises(UserError, match="no answer"):
        AnswerStore(store._folder / "none", 1.0, 0.5)
    assert AnswerStore(store._folder / "tenths", 0.1, 0.3).most == 3


def test_answers_survive_a_kill(tmp_path: Path) -> None:
    """The command line, killed without warning after its confirmations, and begun again on what lies there."""
    write_questions(tmp_path / "q.jsonl", QUESTIONS)
    program = [sys.executable, "-m", "private_rlhf.cli", "label"]
    begin = [*program, "serve", "--store", str(tmp_path / "s"), "--port", "0"]
    given: dict[str, str] = {}
    for terms in (["--epsilon", "1", "--pairs", str(tmp_path / "q.jsonl")], []):
        with subprocess.Popen([*begin, *terms], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                said = "".join(process.stdout.readline() for _ in range(4))
                assert Page.load().sha256 in said
                client = Client(int(said.rpartition(":")[2].strip("/\n")), SECRETS[0])
                if not given:
                    invited = subprocess.run([*program, "invite", "--store", str(tmp_path / "s"), "anna"], check=True,
                                             capture_output=True, text=True)  # fmt: skip
                    assert client("POST", "/claim", claim(invited.stdout.strip()[-64:], client.secret))[0] == 200
                for each in client("GET", "/questions")[1]["questions"]:
                    assert each["event"] not in given
                    given[each["event"]] = each["prompt"]
                    assert client.give(each["event"], "+")[0] == 200
            finally:
                os.kill(process.pid, signal.SIGKILL)
    assert AnswerStore.open(tmp_path / "s").answers() == {f"q{i}": 1 for i in range(2 * AHEAD)}


@pytest.mark.parametrize("url", ["label.example.org", "https://label.example.org/page/", "https://x:99999", "ftp://x"])
def test_a_wrong_url_makes_no_store_and_ends_no_link(
    tmp_path: Path, server: LabelServer, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    folder = tmp_path / "new"
    assert main(["label", "serve", "--store", str(folder), "--epsilon", "1", "--url", url]) == 2
    assert not folder.exists()
    link = server.store.add_person("anna")
    assert main(["label", "invite", "--store", str(server.store._folder), "--url", url, "anna"]) == 2
    assert capsys.readouterr().err.count("--url must be http(s)://NAME[:PORT]/") == 2
    client = Client(server.port, SECRETS[0])
    assert client("POST", "/claim", claim(link, client.secret))[0] == 200


def test_a_name_given_twice_gets_one_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two, the first would be void."""
    AnswerStore(tmp_path / "s", 1.0).close()
    assert main(["label", "invite", "--store", str(tmp_path / "s"), "anna", "ben", "anna"]) == 0
    assert [each.partition(":")[0] for each in capsys.readouterr().out.splitlines()] == ["anna", "ben"]


def test_links_have_the_server_s_address_and_no_request_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "s")
    write_questions(tmp_path / "q.jsonl", QUESTIONS)
    begin = [sys.executable, "-m", "private_rlhf.cli", "label", "serve", "--store", folder, "--port", "0"]
    new = ["--epsilon", "1", "--pairs", str(tmp_path / "q.jsonl")]
    for options, address in ((new, None), (["--url", "https://label.example.org"], "https://label.example.org/")):
        with subprocess.Popen(
            [*begin, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                assert process.stdout is not None
                lines = [process.stdout.readline() for _ in range(4)]
                port = int(lines[3].split()[3])
                url = address or f"http://127.0.0.1:{port}/"
                assert lines[2].startswith(f"progress: {url}operator#")
                assert lines[3] == f"listening on port {port} of 127.0.0.1 for {url}\n"
                assert main(["label", "invite", "--store", folder, "anna"]) == 0
                invited = capsys.readouterr()
                assert re.fullmatch(f"anna: {re.escape(url)}#[0-9a-f]{{64}}\n", invited.out)
                assert ("link and its browser are void" in invited.err) == (address is not None)
                assert main(["label", "remove", "--store", folder, "anna"]) == 0
                assert capsys.readouterr().out == "anna: the link has ended\n"
                client = Client(port)
                for path in ("/", "/questions", "/none"):
                    client("GET", path)
                client("GET", "/", "a body")
                client("POST", "/answer", None, **{"Content-Length": "x"})
            finally:
                process.terminate()
            assert process.stdout.read() == ""
