"""The chat judge against a local endpoint that is slow, fails, talks nonsense or redirects; nothing is asked twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluation.chat_endpoint import Endpoint, serving
from private_rlhf.core.errors import RunStopped, UserError
from private_rlhf.evaluation.chat_judge import LONGEST_WAIT, ChatJudge, _Retry, check_key_host, read_log
from private_rlhf.evaluation.judges import judged_rates
from private_rlhf.recipe import JudgeSettings
from private_rlhf.stages.checks import check_judge
from urllib3 import HTTPResponse

PROMPTS = [f"p{place}" for place in range(6)]
GOOD, BAD = [f"good {place}" for place in range(6)], [f"bad {place}" for place in range(6)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as found:
        yield found


def judge(endpoint: Endpoint, log: Path | None = None, backoff: float = 0.01, **changes: Any) -> ChatJudge:
    settings = {"url": endpoint.url, "model": "m", "public": True, "allow_http": True, "retries": 2, **changes}
    return ChatJudge(JudgeSettings(**settings), log, backoff=backoff)


def consistent(first: str, second: str) -> str:
    return "Verdict: " + ("A" if "good" in first else "B" if "good" in second else "tie")


def outcomes(rows: list[dict[str, Any]]) -> list[float | None]:
    return [row["outcome"] for row in rows]


def test_a_preference_for_a_position_cancels(endpoint: Endpoint) -> None:
    endpoint.answer = lambda first, second: "Verdict: A"
    rows = judge(endpoint).compare(["p", "q"], ["x", "y"], ["long answer", "z"])
    assert outcomes(rows) == [0.5, 0.5]
    assert [(row["policy_first"]["verdict"], row["reference_first"]["verdict"]) for row in rows] == [
        ("policy", "reference")
    ] * 2
    assert len(endpoint.seen) == 4
    assert {request["path"] for request in endpoint.seen} == {"/v1/chat/completions"}


def test_a_consistent_judge_is_heard_whatever_the_order(endpoint: Endpoint) -> None:
    endpoint.answer = consistent
    found = judge(endpoint, model="judge-7b", request={"seed": 1}).compare(
        ["p", "q", "r"], ["good", "bad", "bad"], ["bad", "good", "bad"]
    )
    assert outcomes(found) == [1.0, 0.0, 0.5]
    assert {(request["model"], request["seed"]) for request in endpoint.seen} == {("judge-7b", 1)}
    assert {(request["temperature"], request["max_tokens"]) for request in endpoint.seen} == {(0.0, 1024)}


def test_fields_of_a_request_can_be_set_and_left_out(endpoint: Endpoint) -> None:
    """Some endpoints refuse a temperature, or want the cap under another name."""
    asked = judge(endpoint, request={"temperature": None, "max_tokens": None, "max_completion_tokens": 9})
    asked.compare(["p"], ["x"], ["y"])
    assert asked.facts["request"] == {"max_completion_tokens": 9}
    known = {"model", "messages", "max_completion_tokens", "path", "authorization"}
    assert all(set(request) == known for request in endpoint.seen)


def test_a_half_biased_judge_keeps_half(endpoint: Endpoint) -> None:
    """Prefers A, unless B is clearly better: the win shows in one order only."""
    endpoint.answer = lambda first, second: "B" if second == "good" and first == "poor" else "A"
    assert outcomes(judge(endpoint).compare(["p"], ["good"], ["poor"])) == [1.0]
    endpoint.answer = lambda first, second: "tie" if second == "good" else "A"
    assert outcomes(judge(endpoint).compare(["p"], ["good"], ["poor"])) == [0.75]


def test_unclear_verdicts_are_counted_and_left_out(endpoint: Endpoint) -> None:
    """Nonsense in one order is enough: the other order alone would bring the preference for a position back."""
    endpoint.answer = lambda first, second: "A matter of taste." if second == "good 0" else consistent(first, second)
    rows = judge(endpoint).compare(PROMPTS, GOOD, BAD)
    assert outcomes(rows) == [None, 1, 1, 1, 1, 1]
    assert (rows[0]["policy_first"]["verdict"], rows[0]["reference_first"]["verdict"]) == ("policy", "unclear")
    assert rows[0]["reference_first"]["text"] == "A matter of taste."
    rates = judged_rates(rows, [0] * 6, 0)
    assert (rates["win_rate"]["value"], rates["win_rate"]["n"]) == (1.0, 5)
    assert (rates["unclear_pairs"], rates["unclear_verdicts"]) == (1, 1)
    endpoint.answer = lambda first, second: ""
    rates = judged_rates(judge(endpoint).compare(PROMPTS, GOOD, BAD), [0] * 6, 0)
    assert rates["win_rate"] is rates["mean_outcome"] is rates["length_controlled_win_rate"] is None
    assert (rates["unclear_pairs"], rates["unclear_verdicts"]) == (6, 12)


def test_a_verdict_that_was_cut_is_unclear(endpoint: Endpoint) -> None:
    """ "A" may have been about to say "A better answer is B"."""
    endpoint.answer, endpoint.finish = lambda first, second: "A", "length"
    assert outcomes(judge(endpoint).compare(["p"], ["x"], ["y"])) == [None]


def test_requests_run_side_by_side_up_to_the_bound(endpoint: Endpoint) -> None:
    endpoint.answer, endpoint.delay = consistent, 0.05
    rows = judge(endpoint, concurrency=3).compare(PROMPTS, GOOD, BAD)
    assert outcomes(rows) == [1.0] * 6  # whichever answer came first
    assert endpoint.busiest == 3
    assert ChatJudge(JudgeSettings(url="https://h/v1", model="m", public=True), share=3).workers == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_failures_are_retried(endpoint: Endpoint, status: int) -> None:
    endpoint.answer, endpoint.statuses = consistent, [status, status]
    assert outcomes(judge(endpoint, concurrency=1).compare(["p"], ["good"], ["bad"])) == [1.0]
    assert len(endpoint.seen) == 4


def test_an_endpoint_cannot_ask_for_an_hour() -> None:
    for asked, waited in (("3600", LONGEST_WAIT), ("3", 3.0)):
        response = HTTPResponse(headers={"Retry-After": asked})
        assert _Retry().get_retry_after(response) == waited
    assert _Retry().get_retry_after(HTTPResponse()) is None


def test_an_endpoint_that_hangs_is_given_up(endpoint: Endpoint) -> None:
    endpoint.delay = 0.4
    with pytest.raises(RunStopped, match=rf"the judge at {endpoint.url} did not answer"):
        judge(endpoint, timeout=0.05, retries=1, concurrency=1).compare(["p"], ["x"], ["y"])


def test_a_failed_run_goes_on_where_it_stopped(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.answer, log = consistent, tmp_path / "new" / "verdicts.jsonl"
    endpoint.statuses = [200] * 5 + [500] * 99
    with pytest.raises(RunStopped, match="status 500 for all retries: wait, then run the same command again"):
        judge(endpoint, log, concurrency=1).compare(PROMPTS, GOOD, BAD)
    assert len(read_log(log)) == 5
    log.write_text(log.read_text() + '{"key": "torn')
    endpoint.seen.clear()
    endpoint.statuses.clear()
    rows = judge(endpoint, log, concurrency=1).compare(PROMPTS, GOOD, BAD)
    assert outcomes(rows) == [1.0] * 6
    assert len(endpoint.seen) == 12 - 5
    endpoint.seen.clear()
    assert judge(endpoint, log).compare(PROMPTS, GOOD, BAD) == rows
    assert endpoint.seen == []
    judge(endpoint, log, model="another").compare(["p0"], ["good 0"], ["bad 0"])  # nobody else's verdict
    assert len(endpoint.seen) == 2


def test_a_refused_request_is_unclear_and_asked_again_another_time(endpoint: Endpoint, tmp_path: Path) -> None:
    """Content rules and length limits are about one request; a refusal of all of them is about the set-up."""
    endpoint.answer, endpoint.statuses, log = consistent, [400], tmp_path / "log"
    rows = judge(endpoint, log, concurrency=1).compare(PROMPTS, GOOD, BAD)
    assert outcomes(rows) == [None, 1, 1, 1, 1, 1]
    assert rows[0]["policy_first"] == {"verdict": "unclear", "refused": "status 400: not now"}
    assert outcomes(judge(endpoint, log).compare(PROMPTS, GOOD, BAD)) == [1.0] * 6
    assert len(endpoint.seen) == 13
    endpoint.statuses = [400] * 12
    with pytest.raises(UserError, match="refused every request: status 400: not now"):
        judge(endpoint).compare(PROMPTS, GOOD, BAD)


@pytest.mark.parametrize(("status", "said"), [(401, "check OPENAI_API_KEY"), (404, "check address and model")])
def test_what_no_retry_can_mend_stops_at_once(endpoint: Endpoint, status: int, said: str) -> None:
    endpoint.statuses = [status] * 20
    with pytest.raises(UserError, match=f"answered with status {status}: {said}"):
        judge(endpoint, concurrency=1).compare(PROMPTS, GOOD, BAD)
    assert len(endpoint.seen) < 12


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"message": null}]}', "3"])
def test_another_language_is_named(endpoint: Endpoint, body: str) -> None:
    endpoint.body = body
    with pytest.raises(UserError, match="did not answer with a chat completion: check the address"):
        judge(endpoint).compare(["p"], ["x"], ["y"])


def test_no_redirect_is_followed(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    with serving() as other:
        endpoint.statuses, endpoint.location = [307] * 4, f"{other.url}/chat/completions"
        with pytest.raises(UserError, match="redirects, which is not followed"):
            judge(endpoint).compare(["p"], ["x"], ["y"])
        assert other.seen == []


def test_the_key_of_the_environment_is_sent_and_kept_nowhere(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    judged = judge(endpoint, tmp_path / "log")
    rows = judged.compare(["p"], ["x"], ["y"])
    assert {request["authorization"] for request in endpoint.seen} == {"Bearer s3cret"}
    assert "s3cret" not in json.dumps([rows, judged.facts]) + (tmp_path / "log").read_text()
    monkeypatch.delenv("OPENAI_API_KEY")
    judge(endpoint).compare(["p"], ["x"], ["z"])
    assert endpoint.seen[-1]["authorization"] is None


@pytest.mark.parametrize(
    ("url", "key", "warned"),
    [
        ("http://judge.example/v1", "s3cret", True), ("http://judge.example/v1", "", False),
        ("https://judge.example/v1", "s3cret", False), ("http://localhost:8000/v1", "s3cret", False),
        ("http://127.0.0.1/v1", "s3cret", False), ("http://[::1]:8000/v1", "s3cret", False),
        ("http://localhost.example/v1", "s3cret", True),
    ],
)
def test_a_key_on_its_way_without_encryption_is_said(
    url: str, key: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setenv("PRIVATE_RLHF_JUDGE_HOSTS", "judge.example,localhost.example")
    judge(Endpoint(url=url))
    assert ("is asked without encryption: OPENAI_API_KEY" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("url", "hosts", "allowed"),
    [
        ("https://spy.example/v1", "", False), ("https://spy.example/v1", "other.example", False),
        ("https://spy.example/v1", "example", False), ("https://api.openai.com.spy.example/v1", "", False),
        ("https://api.openai.com@spy.example/v1", "", False), ("https://spy.example/v1", "a, Spy.example", True),
        ("https://api.openai.com/v1", "", True), ("http://localhost:8000/v1", "", True), ("http://[::1]/v1", "", True),
    ],
)
def test_the_key_goes_to_no_host_that_only_a_recipe_names(
    url: str, hosts: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    monkeypatch.setenv("PRIVATE_RLHF_JUDGE_HOSTS", hosts)
    if allowed:
        return check_key_host(url)
    with pytest.raises(UserError, match=r"got \S*spy\.example: set PRIVATE_RLHF_JUDGE_HOSTS=") as caught:
        check_key_host(url)
    assert "s3cret" not in str(caught.value)
    monkeypatch.delenv("OPENAI_API_KEY")
    check_key_host(url)  # without a key there is nothing to lose
    return None


def test_a_host_on_the_command_line_gets_the_key_and_one_in_a_recipe_does_not(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    settings = JudgeSettings(url="https://spy.example/v1", model="m", public=True)
    with pytest.raises(UserError, match="must name a host that may see OPENAI_API_KEY, got spy"):
        ChatJudge(settings)
    with pytest.raises(UserError, match="must name a host that may see OPENAI_API_KEY, got spy"):
        check_judge(settings)  # before anything of a run begins
    ChatJudge(settings, own_host=True)


def test_an_endpoint_that_is_not_there_is_named() -> None:
    nobody = Endpoint(url="http://127.0.0.1:9/v1")
    with pytest.raises(RunStopped, match=r"the judge at http://127\.0\.0\.1:9/v1 did not answer \(ConnectionError\)"):
        judge(nobody).compare(["p"], ["x"], ["y"])
