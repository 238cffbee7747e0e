"""The simulated engine over HTTP, in a process of its own."""

from __future__ import annotations

import hashlib
import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from extproc.demo.engine_process import EngineProcess

WAIT_S_MAX = 10.0
MESSAGES = [{"role": "user", "content": "12345678"}]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def document(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON documents of a stream that ends as it must."""
        events = self.body.decode().split("\n\n")
        assert ["data: [DONE]", ""] == events[-2:]
        assert all(event.startswith("data: ") for event in events[:-1])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.fixture(scope="module")
def instant() -> Iterator[EngineProcess]:
    """An engine whose tokens take no time."""
    with EngineProcess("instant", model=["qwen3", "alias"], context_tokens_max=100_000) as engine:
        yield engine


@pytest.fixture
def slow() -> Iterator[EngineProcess]:
    """An engine of its own for one test: a first token at once, each later one after a second."""
    with EngineProcess("slow", decode_tokens_per_s=1, requests_max=3) as engine:
        yield engine


def send(
    engine: EngineProcess, path: str, fields: object, headers: dict[str, str] | None = None
) -> http.client.HTTPConnection:
    """A connection on which a request has been sent and nothing read."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=WAIT_S_MAX)
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    connection.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
    return connection


def receive(connection: http.client.HTTPConnection) -> Reply:
    """The whole response to what was sent."""
    with closing(connection):
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, answer.read())


def chat(engine: EngineProcess, headers: dict[str, str] | None = None, **fields: object) -> Reply:
    """The response to a chat request."""
    return receive(send(engine, "/v1/chat/completions", {"messages": MESSAGES, **fields}, headers))


def complete(engine: EngineProcess, **fields: object) -> Reply:
    """The response to a completion request."""
    return receive(send(engine, "/v1/completions", fields))


def get(engine: EngineProcess, path: str) -> Reply:
    """The response to a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=WAIT_S_MAX)
    connection.request("GET", path)
    return receive(connection)


def wait_for(engine: EngineProcess, **expected: int) -> dict[str, Any]:
    """The engine's state once it holds `expected`; asks again until then."""
    deadline_s = time.monotonic() + WAIT_S_MAX
    while True:
        state = engine.state()
        if expected.items() <= state.items():
            return state
        assert time.monotonic() < deadline_s, f"{expected} never came: {state}"


def test_chat(instant: EngineProcess) -> None:
    """A chat answer has one word a token for each choice, and says what it used."""
    reply = chat(instant, max_tokens=3, n=2, model="alias")

    assert 200 == reply.status
    assert ("chat.completion", "alias") == (reply.document["object"], reply.document["model"])
    assert [(0, "assistant", " word word word", "length"), (1, "assistant", " word word word", "length")] == [
        (choice["index"], choice["message"]["role"], choice["message"]["content"], choice["finish_reason"])
        for choice in reply.document["choices"]
    ]
    assert {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8} == reply.document["usage"]


def test_completion_of_a_prompt_list(instant: EngineProcess) -> None:
    """Each prompt of a list gets its n choices, numbered through."""
    reply = complete(instant, prompt=["1234", "12345678"], max_tokens=1, n=2)

    assert "text_completion" == reply.document["object"]
    assert [(index, " word") for index in range(4)] == [(c["index"], c["text"]) for c in reply.document["choices"]]
    assert {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7} == reply.document["usage"]


def test_streamed_chat(instant: EngineProcess) -> None:
    """A streamed choice begins with its role, has a word an event, ends with a reason; usage comes last if asked."""
    reply = chat(instant, max_tokens=2, n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = reply.events
    deltas: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        deltas[choice["index"]].append((choice["delta"], choice["finish_reason"]))

    one = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": " word"}, None),
        ({"content": " word"}, None),
        ({"content": ""}, "length"),
    ]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert {0: one, 1: one} == deltas
    assert {"chat.completion.chunk"} == {chunk["object"] for chunk in reply.events}
    assert {None} == {chunk["usage"] for chunk in chunks}
    assert ([], {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}) == (last["choices"], last["usage"])


def test_streamed_completion_without_usage(instant: EngineProcess) -> None:
    """A streamed completion has text chunks only, and no usage unless asked."""
    reply = receive(send(instant, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True}))

    assert [(0, " word"), (0, " word"), (0, ""), (1, " word"), (1, " word"), (1, "")] == sorted(
        ((event["choices"][0]["index"], event["choices"][0]["text"]) for event in reply.events),
        key=lambda pair: pair[0],
    )
    assert not any("usage" in event for event in reply.events)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_says_what_arrived(instant: EngineProcess, stream: bool) -> None:
    """The headers of an answer repeat the body's hash, size and framing, and the ceiling that was run."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 4, "stream": stream}).encode()
    reply = receive(send(instant, "/v1/chat/completions", body))

    expected = {
        "x-engine-name": "instant",
        "x-engine-body-sha256": hashlib.sha256(body).hexdigest(),
        "x-engine-body-bytes": str(len(body)),
        "x-engine-framing": "content-length",
        "x-engine-input-tokens": "2",
        "x-engine-max-tokens": "4",
    }
    assert expected == {name: value for name, value in reply.headers.items() if name.startswith("x-engine-")}


def test_chunked_request(instant: EngineProcess) -> None:
    """A chunked body is understood, and the answer says that it came chunked."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", instant.port, timeout=WAIT_S_MAX)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", iter([body[:5], body[5:]]), headers, encode_chunked=True)
    reply = receive(connection)

    assert (200, "chunked", hashlib.sha256(body).hexdigest()) == (
        reply.status,
        reply.headers["x-engine-framing"],
        reply.headers["x-engine-body-sha256"],
    )


@pytest.mark.parametrize(
    ("lever", "tokens", "reason"), [("2", 2, "stop"), ("5", 5, "length"), ("99999999", 5, "length")]
)
def test_output_header_only_shortens(instant: EngineProcess, lever: str, tokens: int, reason: str) -> None:
    """The output header ends a sequence below its ceiling and is ignored above it."""
    reply = chat(instant, {"x-engine-output-tokens": lever}, max_tokens=5)

    assert "5" == reply.headers["x-engine-max-tokens"]
    assert tokens == reply.document["usage"]["completion_tokens"]
    assert reason == reply.document["choices"][0]["finish_reason"]


@pytest.mark.parametrize("lever", ["0", "-1", "x", "²", "9" * 5000])
def test_bad_output_header(instant: EngineProcess, lever: str) -> None:
    """An output header that is no positive integer is refused."""
    assert 400 == chat(instant, {"x-engine-output-tokens": lever}, max_tokens=5).status


def test_refusals(instant: EngineProcess) -> None:
    """A refused request gets an error object, with the headers about its body, and counts as refused."""
    before = instant.state()
    unknown = chat(instant, model="other")
    untyped = chat(instant, {"content-type": "text/plain"})
    oversized = chat(instant, {"content-length": str(2**26 + 1)})
    unbounded = chat(instant, max_tokens=99_998, n=128)

    assert [404, 400, 413, 400] == [reply.status for reply in (unknown, untyped, oversized, unbounded)]
    assert ("NotFoundError", "model") == (unknown.document["error"]["type"], unknown.document["error"]["param"])
    assert "x-engine-body-sha256" in unknown.headers
    assert 4 == (instant.state()["refused_total"] or 0) - (before["refused_total"] or 0)


def test_unfinished_body_does_not_unbalance_the_totals(slow: EngineProcess) -> None:
    """A request whose client leaves before its body is complete counts as cancelled and never ran."""
    connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=WAIT_S_MAX)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "100")
    connection.endheaders(b"{")
    wait_for(slow, requests_total=1)
    connection.close()
    state = wait_for(slow, cancelled_total=1)

    assert (0, 0) == (state["running_tokens_max"], state["refused_total"])


def test_models_and_health(instant: EngineProcess) -> None:
    """The engine lists its models with their context, is healthy, and has nothing elsewhere."""
    models = get(instant, "/v1/models").document

    assert ["qwen3", "alias"] == [model["id"] for model in models["data"]]
    assert {100_000} == {model["max_model_len"] for model in models["data"]}
    assert [200, 404] == [get(instant, path).status for path in ("/health", "/nothing")]
    assert "instant" == get(instant, "/nothing").headers["x-engine-name"]


def test_health_lever(slow: EngineProcess) -> None:
    """The health lever changes what GET /health answers and nothing else."""
    slow.control(health=503)

    assert 503 == get(slow, "/health").status
    assert 200 == chat(slow, max_tokens=1).status
    slow.control(health=200)
    assert 200 == get(slow, "/health").status


@pytest.mark.parametrize("status", [429, 503])
def test_status_lever(slow: EngineProcess, status: int) -> None:
    """While the status lever is set every generation request gets that status."""
    slow.control(status=status)
    refused = chat(slow, max_tokens=1)
    slow.control(status=None)

    assert [status, 200] == [refused.status, chat(slow, max_tokens=1).status]


@pytest.mark.parametrize("levers", [{"hold": 1}, {"health": 500}, {"status": 200}, {"other": True}])
def test_bad_levers_change_nothing(instant: EngineProcess, levers: dict[str, int]) -> None:
    """A control document with anything wrong in it is refused as a whole."""
    before = instant.state()
    with pytest.raises(ValueError, match="answered 400"):
        instant.control(**{"hold": True, **levers})

    assert before == instant.state()


def test_held_requests_run_after_release(slow: EngineProcess) -> None:
    """Held requests count as running with input + ceiling · n, get no answer, and all end on release."""
    slow.control(hold=True)
    fields = {"messages": MESSAGES, "max_tokens": 10, "n": 2}
    held = [send(slow, "/v1/chat/completions", fields, {"x-engine-output-tokens": "1"}) for _ in range(2)]
    held.append(send(slow, "/v1/chat/completions", {**fields, "stream": True, "n": 1}, {"x-engine-output-tokens": "1"}))
    state = wait_for(slow, running=3)

    assert (22 + 22 + 12, 0) == (state["running_tokens"], state["completed_total"])
    slow.control(hold=False)
    assert [200, 200, 200] == [receive(connection).status for connection in held]
    assert (
        0,
        3,
        56,
    ) == tuple(slow.state()[name] for name in ("running_tokens", "completed_total", "running_tokens_max"))


def test_requests_beyond_the_bound(slow: EngineProcess) -> None:
    """A request above the bound on concurrent requests is refused with 503 and leaves the others alone."""
    slow.control(hold=True)
    held = [send(slow, "/v1/completions", {"prompt": "x", "max_tokens": 1}) for _ in range(3)]
    wait_for(slow, running=3)
    refused = chat(slow, max_tokens=1)
    slow.control(hold=False)

    assert 503 == refused.status
    assert [200, 200, 200] == [receive(connection).status for connection in held]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels(slow: EngineProcess, stream: bool) -> None:
    """A client that goes away ends its generation at once."""
    fields = {"messages": MESSAGES, "max_tokens": 1000, "stream": stream}
    connection = send(slow, "/v1/chat/completions", fields)
    wait_for(slow, running=1, generating=1)
    if stream:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()
    connection.close()
    state = wait_for(slow, cancelled_total=1)

    assert (0, 0, 0, 0) == (state["running"], state["running_tokens"], state["completed_total"], state["generating"])


def test_disconnect_while_held_cancels(slow: EngineProcess) -> None:
    """A held request whose client goes away is cancelled without being run."""
    slow.control(hold=True)
    connection = send(slow, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5})
    wait_for(slow, running=1, generating=0)
    connection.close()
    state = wait_for(slow, cancelled_total=1)

    assert (0, 1) == (state["running"], state["requests_total"])


def test_tokens_take_the_models_time() -> None:
    """Prefill and decode take at least what the rates say, counted from the request."""
    with EngineProcess("timed", prefill_tokens_per_s=1000, decode_tokens_per_s=100) as engine:
        begin_s = time.monotonic()
        reply = complete(engine, prompt=[1] * 100, max_tokens=11)
        elapsed_s = time.monotonic() - begin_s

    assert 200 == reply.status
    assert elapsed_s >= 0.2
