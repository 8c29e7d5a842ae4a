"""The page's server for minutes at many people, with kills, slow clients and malformed requests: no answer is lost,
none is doubled, and memory stays.

    PRIVATE_RLHF_SOAK_SECONDS=1200 .venv/bin/python -m pytest -n 0 -s -m slow tests/labelling/test_soak.py
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from labelling.test_smuggling import FORMS, INNER, read
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.store import AnswerStore


class Soak:
    """A server process with its people. think: mean seconds between a person's answers."""

    def __init__(self, folder: Path, people: int, questions: int, think: float) -> None:
        self.folder, self.think, self.port = folder, think, 0
        self.over = threading.Event()
        self.seen: Counter[str] = Counter()
        self.memory: list[dict[str, str]] = [{} for _ in range(people)]  # what each browser drew, by event
        self.acknowledged: list[set[str]] = [set() for _ in range(people)]
        self.rss: list[float] = []
        store = AnswerStore(folder, 1.0)
        store.ask([make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(questions)])
        for place in range(people):
            assert store.claim(store.add_person(f"person {place}"), f"{place:064x}")
        store.close()
        self.begin()

    def begin(self) -> None:
        """Starts the server, on the port that it had."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "private_rlhf.cli", "label", "serve", "--store", str(self.folder), "--port",
             str(self.port), "--url", "https://label.example.org/"], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(4)]
        self.port = int(lines[3].split()[3])

    def kill(self) -> None:
        """SIGKILL, and the next server on the same store."""
        self.process.kill()
        self.process.wait()
        self.seen["kills"] += 1
        self.begin()

    def person(self, place: int) -> None:
        """A page in small: draws once, sends until the acknowledgement has the same words."""
        draw, memory, connection = random.Random(place), self.memory[place], None
        while not self.over.is_set() or (len(memory) > len(self.acknowledged[place]) and time.monotonic() < self.last):
            try:
                connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                unsent = [event for event in memory if event not in self.acknowledged[place]]
                if unsent:
                    self.send(connection, place, unsent[0])
                elif self.over.wait(draw.expovariate(1 / self.think)):
                    continue
                else:
                    status, found = self.call(connection, place, "GET", "/questions")
                    assert status == 200, found
                    if found["person"] != f"person {place}":
                        self.seen["answered as another"] += 1
                    new = [each["event"] for each in found["questions"] if each["event"] not in memory]
                    if new:
                        memory[new[0]] = draw.choice("+-0")
            except (OSError, http.client.HTTPException, AssertionError, ValueError):
                connection = None
                self.seen["tries again"] += 1
                time.sleep(0.2)

    def call(
        self, connection: http.client.HTTPConnection, place: int, method: str, path: str, body: str | None = None
    ) -> tuple[int, dict]:
        connection.request(method, path, body, {"Authorization": f"Bearer {place:064x}"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def send(self, connection: http.client.HTTPConnection, place: int, event: str) -> None:
        body = f'{{"event":"{event}","answer":"{self.memory[place][event]}"}}'
        status, value = self.call(connection, place, "POST", "/answer", body)
        self.seen[f"status {status}"] += status in (404, 409)
        assert (status, json.dumps(value, separators=(",", ":"))) == (200, body)
        self.acknowledged[place].add(event)

    def malformed(self, seed: int, pause: float) -> None:
        """Sends the forms that two servers may read differently."""
        choose = random.Random(seed)
        while not self.over.wait(pause):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(FORMS[choose.choice(list(FORMS))](INNER[choose.choice(list(INNER))]))
                self.seen["malformed"] += 1
                read(connection)

    def slow(self, pause: float) -> None:
        """Sends a head byte by byte, for ever, and reads nothing."""
        while not self.over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                self.seen["slow"] += 1
                for byte in b"GET /questions HTTP/1.1\r\nX: " + b"y" * 4000:
                    connection.sendall(bytes([byte]))
                    if self.over.wait(pause):
                        break

    def run(self, seconds: float, kills: int, slow: int) -> None:
        """Kills in the first half; the second half is one server's, whose memory is measured."""
        crowd = [threading.Thread(target=self.person, args=(place,)) for place in range(len(self.memory))]
        crowd += [threading.Thread(target=self.slow, args=(1.0,)) for _ in range(slow)]
        crowd += [threading.Thread(target=self.malformed, args=(seed, 0.2)) for seed in range(2)]
        for thread in crowd:
            thread.start()
        try:
            for _ in range(kills):
                time.sleep(seconds / 2 / kills)
                self.kill()
            until = time.monotonic() + seconds / 2
            while time.monotonic() < until:
                time.sleep(seconds / 100)
                status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
                self.rss.append(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024)
        finally:
            self.last = time.monotonic() + 60
            self.over.set()
            for thread in crowd:
                thread.join()
            self.process.kill()
            self.process.wait()

    def check(self) -> None:
        """The store holds what the browsers drew, each once, and all that was acknowledged."""
        store = AnswerStore.open(self.folder)
        with store._transaction() as base:
            rows = base.execute("SELECT person, event, answer FROM events WHERE answer IS NOT NULL").fetchall()
        stored = {(person, event): {1: "+", -1: "-", 0: "0"}[answer] for person, event, answer in rows}
        drawn = {(f"person {place}", event): z for place, own in enumerate(self.memory) for event, z in own.items()}
        assert stored == drawn
        assert sum(map(len, self.acknowledged)) == len(drawn)
        assert {name: self.seen[name] for name in ("answered as another", "status 404", "status 409")} == {
            "answered as another": 0, "status 404": 0, "status 409": 0
        }  # fmt: skip
        print(f"{len(drawn)} answers of {len(self.memory)} people; {dict(self.seen)}")


def test_nothing_is_lost_in_a_few_seconds(tmp_path: Path) -> None:
    soak = Soak(tmp_path / "store", people=8, questions=2000, think=0.05)
    soak.run(seconds=3, kills=1, slow=4)
    soak.check()
    assert sum(map(len, soak.memory)) >= 8


@pytest.mark.slow
def test_nothing_is_lost_and_memory_stays(tmp_path: Path) -> None:
    seconds = float(os.environ.get("PRIVATE_RLHF_SOAK_SECONDS", "120"))
    soak = Soak(tmp_path / "store", people=100, questions=int(60 * seconds), think=4.0)
    soak.run(seconds, kills=20, slow=20)
    soak.check()
    begin, end = (sorted(part)[len(part) // 2] for part in (soak.rss[5:15], soak.rss[-10:]))
    print(f"memory of the server in the second half: {begin:.1f} MiB at its begin, {end:.1f} MiB at its end")
    assert end < 1.1 * begin
