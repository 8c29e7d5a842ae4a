"""Judges: verdicts, position swapping against a local endpoint, and names that cannot be used."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.core.errors import UserError
from pipeline.data.render import Renderer
from pipeline.evaluation.judges import ChatJudge, RewardJudge, TruthJudge, make_judge, parse_verdict
from pipeline.lm.tiny import tiny_tokenizer
from pipeline.rl.scoring import Scores

Answering = Callable[[str, str], str]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("A", 1.0),
        ("b", 0.0),
        ("C", 0.5),
        ("**B**", 0.0),
        ("Answer: A.", 1.0),
        ("", 0.5),
        ("ABBA", 0.5),
        ("neither", 0.5),
    ],
)
def test_a_verdict_is_the_first_letter_that_stands_alone(text: str, verdict: float) -> None:
    assert parse_verdict(text) == verdict


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Answering]]]:
    """(url, requests seen, {"answer": how to answer (first, second)}) of a local OpenAI-style chat endpoint."""
    seen: list[dict[str, Any]] = []
    behaviour: dict[str, Answering] = {"answer": lambda first, second: "C"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, **body})
            question = body["messages"][-1]["content"]
            first = question.split("Answer A:\n")[1].split("\n\nAnswer B:")[0]
            second = question.split("Answer B:\n")[1].split("\n\nWhich")[0]
            message = {"role": "assistant", "content": behaviour["answer"](first, second)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            data = json.dumps({**reply, "usage": usage, "system_fingerprint": ""}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen, behaviour
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_preference_for_a_position_cancels(endpoint: Any) -> None:
    url, seen, behaviour = endpoint
    behaviour["answer"] = lambda first, second: "A"
    found = ChatJudge(url, "m").compare(["p", "q"], ["x", "y"], ["long answer", "z"])
    assert found.tolist() == [0.5, 0.5]
    assert len(seen) == 4
    assert {request["path"] for request in seen} == {"/v1/chat/completions"}


def test_a_consistent_judge_is_heard_whatever_the_order(endpoint: Any) -> None:
    url, seen, behaviour = endpoint
    behaviour["answer"] = lambda first, second: "A" if "good" in first else "B" if "good" in second else "C"
    talk = [{"role": "user", "content": "old"}, {"role": "user", "content": "new question"}]
    found = ChatJudge(url, "judge-7b").compare([talk, "q", "r"], ["good", "bad", "bad"], ["bad", "good", "bad"])
    assert found.tolist() == [1.0, 0.0, 0.5]
    assert {request["model"] for request in seen} == {"judge-7b"}
    assert {request["temperature"] for request in seen} == {0.0}
    assert "Message:\nnew question\n" in seen[0]["messages"][-1]["content"]


def test_a_half_biased_judge_keeps_half(endpoint: Any) -> None:
    """Prefers A, unless B is clearly better: the win shows in one order only."""
    url, _, behaviour = endpoint
    behaviour["answer"] = lambda first, second: "B" if second == "good" and first == "poor" else "A"
    assert ChatJudge(url, "m").compare(["p"], ["good"], ["poor"]).tolist() == [1.0]
    behaviour["answer"] = lambda first, second: "C" if second == "good" else "A"
    assert ChatJudge(url, "m").compare(["p"], ["good"], ["poor"]).tolist() == [0.75]


def test_an_endpoint_that_does_not_answer_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"--judge openai:http://127\.0\.0\.1:9/v1 did not answer"):
        ChatJudge("http://127.0.0.1:9/v1", "m").compare(["p"], ["x"], ["y"])


def test_names_are_read() -> None:
    renderer = Renderer(tiny_tokenizer(["x"]), 60, 8)
    assert isinstance(make_judge("truth", renderer), TruthJudge)
    assert make_judge("openai:http://h:1/v1", renderer) == ChatJudge("http://h:1/v1", "default")
    assert make_judge("openai:http://h:1/v1#gpt", renderer) == ChatJudge("http://h:1/v1", "gpt")


@pytest.mark.parametrize("name", ["", "truth:x", "rm:", "rm", "openai:", "gpt", "truths"])
def test_other_names_are_refused_with_the_choices(name: str) -> None:
    with pytest.raises(UserError, match="choose truth, rm:PATH or openai:URL"):
        make_judge(name, Renderer(tiny_tokenizer(["x"]), 60, 8))


def test_a_reward_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--judge rm:.*none: "):
        make_judge(f"rm:{tmp_path / 'none'}", Renderer(tiny_tokenizer(["x"]), 60, 8))


def test_the_truth_prefers_the_pleasant_sentence_and_ties_with_itself() -> None:
    good, bad = "What a lovely, happy and kind river this is.", "The river is horrible, ugly and sad today."
    assert TruthJudge().compare(["p"] * 3, [good, bad, good], [bad, good, good]).tolist() == [1.0, 0.0, 0.5]


def test_the_reward_judge_compares_rewards_not_bounds() -> None:
    def score(_: list[str], texts: list[str]) -> Scores:
        lengths = torch.tensor([float(len(t)) for t in texts])
        return Scores(lengths, torch.full((len(texts),), 100.0), torch.zeros(len(texts)))

    judge = RewardJudge(SimpleNamespace(score=score))
    assert judge.compare(["p"] * 3, ["aa", "a", "a"], ["a", "aa", "b"]).tolist() == [1.0, 0.0, 0.5]
