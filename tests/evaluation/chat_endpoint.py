"""A local endpoint that speaks as much of OpenAI's chat protocol as a judge needs, and misbehaves when told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Endpoint:
    """Attributes:
    url: base address.
    answer: (answer_A, answer_B) to what the judge says.
    statuses: of the next requests, before they are answered as usual.
    delay: seconds before each answer.
    location: where a status of 307 leads to.
    body: said in place of a chat completion.
    finish: reason why the reply ended.
    seen: requests, with path and authorization.
    busiest: most requests that were under way at the same time.
    """

    url: str = ""
    answer: Callable[[str, str], str] = lambda first, second: "Verdict: tie"
    statuses: list[int] = field(default_factory=list)
    delay: float = 0.0
    location: str = ""
    body: str | None = None
    finish: str = "stop"
    seen: list[dict[str, Any]] = field(default_factory=list)
    busiest: int = 0
    busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, request: dict[str, Any]) -> tuple[int, str]:
        """(status, body) of one request."""
        with self.lock:
            self.seen.append(request)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
            status = self.statuses.pop(0) if self.statuses else 200
        time.sleep(self.delay)
        with self.lock:
            self.busy -= 1
        if status != 200:
            return status, "not now"
        if self.body is not None:
            return 200, self.body
        question = json.loads(request["messages"][-1]["content"])
        said = self.answer(question["answer_A"], question["answer_B"])
        message = {"role": "assistant", "content": said}
        return 200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": self.finish}]})


@contextmanager
def serving() -> Iterator[Endpoint]:
    """An endpoint on a free port of this machine."""
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = {"path": self.path, "authorization": self.headers.get("Authorization")}
            status, body = endpoint.reply({**request, **known})
            data = body.encode()
            self.send_response(status)
            if status == 307:
                self.send_header("Location", endpoint.location)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield endpoint
    server.shutdown()
    server.server_close()
    thread.join()
