"""Many people at once."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from private_rlhf.labelling.questions import make_question
from private_rlhf.labelling.store import AnswerStore

PEOPLE, EACH = 100, 50


@pytest.mark.slow
def test_a_hundred_people_at_once_on_one_core(tmp_path: Path) -> None:
    """At least fifty answers a second, none lost and none turned; the server has one core, which the people share."""
    store = AnswerStore(tmp_path / "store", 1.0, float(EACH))
    store.ask([make_question(f"q{i}", f"prompt {i}", f"yes {i}", f"no {i}") for i in range(PEOPLE * EACH)])
    links = [store.add_person(f"person {i}") for i in range(PEOPLE)]
    command = [sys.executable, "-m", "private_rlhf.cli", "label", "serve", "--store", str(tmp_path / "store")]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int([process.stdout.readline() for _ in range(4)][-1].rpartition(":")[2].strip("/\n"))
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(process.pid, {core})
    sent: list[dict[str, str]] = [{} for _ in range(PEOPLE)]
    took: list[float] = []

    def label(place: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        secret = f"{place:064x}"

        def call(method: str, path: str, body: str | None = None) -> dict[str, list[dict[str, str]]]:
            connection.request(method, path, body, {"Authorization": f"Bearer {secret}"})
            answer = connection.getresponse()
            assert answer.status == 200, (answer.status, answer.read())
            found: dict[str, list[dict[str, str]]] = json.loads(answer.read())
            return found

        call("POST", "/claim", f'{{"link":"{links[place]}","secret":"{secret}"}}')
        while waiting := call("GET", "/questions")["questions"]:
            for each in waiting:
                sign = "+-"[int(each["event"][0], 16) % 2]
                began = time.perf_counter()
                call("POST", "/answer", f'{{"event":"{each["event"]}","answer":"{sign}"}}')
                took.append(time.perf_counter() - began)
                sent[place][each["prompt"].replace("prompt ", "q")] = sign
        connection.close()

    threads = [threading.Thread(target=label, args=(place,)) for place in range(PEOPLE)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    took.sort()
    half, most = (1e3 * took[int(len(took) * share)] for share in (0.5, 0.99))
    print(f"{len(took)} answers of {PEOPLE} people in {seconds:.1f} s: {len(took) / seconds:.0f} a second")
    print(f"half of them took under {half:.0f} ms, 99 % under {most:.0f} ms")
    expected = {id: {"+": 1, "-": -1}[sign] for own in sent for id, sign in own.items()}
    assert len(expected) == PEOPLE * EACH
    assert AnswerStore.open(tmp_path / "store").answers() == expected
    assert len(took) / seconds >= 50
