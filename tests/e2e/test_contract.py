"""Every reason that a client can be given, provoked through the whole chain.

A case is a state of the fleet and a request. Whatever the reason, the answer has one shape, says who decided and
when to come back, and a request that was refused has reserved nothing and reached no engine.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import orjson
import pytest
import pytest_asyncio

from extproc.core.rejection import RULES, Retry
from extproc.core.values import Reason
from tests.e2e.mesh import CHAT, COMPLETIONS, Mesh, chat, ids, mesh, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

BODY_BYTES_MAX = 200_000
BUFFER_BYTES = 2 * BODY_BYTES_MAX + 2**20
"""What Envoy buffers; it refuses more itself."""

CONTEXT_TOKENS_MAX = 70_000
STREAMS_MAX = 9
REQUESTS_MAX = 8

ACCEPTED = {
    "context_tokens_max": CONTEXT_TOKENS_MAX,
    "interactive_input_tokens_max": 4096,
    "interactive_output_tokens_max": 1024,
    "bulk_input_tokens_max": 60_000,
    "bulk_total_tokens_max": 64_000,
}


@dataclass(frozen=True)
class Answer:
    """What the client got. Header names are in lower case; a repeated header keeps all its values."""

    status: int
    headers: Mapping[str, list[str]]
    body: bytes


def _hasten(config: dict[str, Any]) -> None:
    """Let Envoy wait for pool `docs` for a second only; for everything else as the policy says."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        if route["name"] == "bulk-docs":
            route["route"]["timeout"] = "1s"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """One chain with narrow limits for all cases."""
    async with mesh(
        pools={"chat": {"chat-0": {"gross_tokens": 6_000, "requests_max": REQUESTS_MAX}}, "docs": {"docs-0": {}}},
        limits={
            "body_bytes_max": BODY_BYTES_MAX,
            "intake_bytes_max": BODY_BYTES_MAX,
            "streams_max": STREAMS_MAX,
            "decision_s_max": 3,
        },
        model={"context_tokens_max": CONTEXT_TOKENS_MAX},
        tune=_hasten,
    ) as running:
        yield running


REQUEST_ID = 'id-"1"-\\'
"""A client may choose its request id, so it holds what JSON has to escape."""

Send = Callable[[Mesh], Coroutine[Any, Any, Answer]]
State = Callable[[Mesh], AbstractAsyncContextManager[None]]


def post(body: Mapping[str, Any] | bytes, path: str = CHAT, **headers: str) -> Send:
    """A POST with a sized body."""
    return _request("POST", path, body if isinstance(body, bytes) else orjson.dumps(body), headers)


def upload(length_bytes: int) -> Send:
    """A POST with a chunked body."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, length_bytes, 2**16):
            yield b" " * min(2**16, length_bytes - start)

    async def send(chain: Mesh) -> Answer:
        return await _request("POST", CHAT, pieces(), {})(chain)

    return send


def get(path: str, body: bytes | None = None) -> Send:
    """A GET."""
    return _request("GET", path, body, {})


def _request(method: str, path: str, body: Any, headers: Mapping[str, str]) -> Send:
    sent = {"content-type": "application/json", "x-request-id": REQUEST_ID}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}

    async def send(chain: Mesh) -> Answer:
        async with chain.client.request(method, chain.url + path, data=body, headers=sent) as answer:
            found: dict[str, list[str]] = {}
            for name, value in answer.headers.items():
                found.setdefault(name.lower(), []).append(value)
            return Answer(answer.status, found, await answer.read())

    return send


def raw(target: str, **headers: str) -> Send:
    """A GET that no client library would send."""

    async def send(chain: Mesh) -> Answer:
        host, _, port = chain.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [f"GET {target} HTTP/1.1", "host: gateway", f"x-request-id: {REQUEST_ID}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        found: dict[str, list[str]] = {}
        for line in filter(None, head[1:]):
            name, _, value = line.partition(": ")
            found.setdefault(name.lower(), []).append(value)
        body = await reader.readexactly(int(found["content-length"][0]))
        writer.close()
        await writer.wait_closed()
        return Answer(int(head[0].split(" ")[1]), found, body)

    return send


async def _until_engine_dies(chain: Mesh) -> Answer:
    await chain.control("chat-0", hold=True)
    sent = asyncio.create_task(post(ids(10, 6), COMPLETIONS)(chain))
    await _until_running(chain, "chat-0", 1)
    await asyncio.to_thread(chain.engines["chat-0"].kill)
    return await sent


async def _until_running(chain: Mesh, engine: str, count: int) -> None:
    for _ in range(5000):
        if (await asyncio.to_thread(chain.engines[engine].state))["running"] == count:
            return
        await asyncio.sleep(0.002)
    pytest.fail(f"engine {engine} never ran {count} requests")


@asynccontextmanager
async def _idle(chain: Mesh) -> AsyncIterator[None]:
    yield


def held(engine: str, *bodies: Mapping[str, Any]) -> State:
    """The engine holds these requests, and answers them when the case is over."""

    @asynccontextmanager
    async def state(chain: Mesh) -> AsyncIterator[None]:
        await chain.control(engine, hold=True)
        tasks = [asyncio.create_task(post(body, COMPLETIONS)(chain)) for body in bodies]
        try:
            await _until_running(chain, engine, len(bodies))
            yield
        finally:
            await chain.control(engine, hold=False)
            answers = await asyncio.gather(*tasks)
        assert [200] * len(bodies) == [answer.status for answer in answers]

    return state


@asynccontextmanager
async def _counting(chain: Mesh) -> AsyncIterator[None]:
    """A large body is being counted, for as long as the case lasts."""
    counter = chain.server._counter
    count, begun, ended = counter.count, asyncio.Event(), asyncio.Event()

    async def slow_count(draft: Any) -> Any:
        begun.set()
        await ended.wait()
        return await count(draft)

    with patch.object(counter, "count", slow_count), patch.object(counter, "counts_quickly", return_value=False):
        task = asyncio.create_task(post(ids(55_000), COMPLETIONS)(chain))
        await asyncio.wait_for(begun.wait(), 5)
    try:
        yield
    finally:
        ended.set()
        assert (await task).status == 200


@asynccontextmanager
async def _crowded(chain: Mesh) -> AsyncIterator[None]:
    """As many requests as the policy allows are admitted or being decided."""
    async with _counting(chain), held("chat-0", *[ids(10, 6)] * (STREAMS_MAX - 1))(chain):
        yield


@asynccontextmanager
async def _undecided(chain: Mesh) -> AsyncIterator[None]:
    """Counting never ends."""

    async def never(draft: Any) -> Any:
        await asyncio.Event().wait()

    with patch.object(chain.server._counter, "count", never):
        yield


@asynccontextmanager
async def _unready(chain: Mesh) -> AsyncIterator[None]:
    """The only replica of pool `chat` says that it is not healthy."""
    await chain.control("chat-0", health=503)
    await until(lambda: not chain.desk.ledger.accounts["chat-0"].ready)
    try:
        yield
    finally:
        await chain.control("chat-0", health=200)
        await until(lambda: chain.desk.ledger.accounts["chat-0"].ready)


@asynccontextmanager
async def _between_probes(chain: Mesh) -> AsyncIterator[None]:
    """No probe looks while the case lasts."""
    await chain.server._prober.close()
    try:
        yield
    finally:
        if not chain.engines["chat-0"].running:
            await asyncio.to_thread(chain.engines["chat-0"].start)
        await chain.server._prober.start()
        await until(lambda: chain.desk.ledger.accounts["chat-0"].ready)


@asynccontextmanager
async def _unreachable(chain: Mesh) -> AsyncIterator[None]:
    """The engine has gone since the last probe."""
    async with _between_probes(chain):
        await asyncio.to_thread(chain.engines["chat-0"].kill)
        yield


def broken(method: str) -> State:
    """Counting has a fault."""

    @asynccontextmanager
    async def state(chain: Mesh) -> AsyncIterator[None]:
        def fail(*_arguments: Any, **_options: Any) -> Any:
            raise RuntimeError("a fault")

        with patch.object(chain.server._counter, method, fail):
            yield

    return state


@asynccontextmanager
async def _without_tokenizer(chain: Mesh) -> AsyncIterator[None]:
    """The threads that tokenize are gone."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with patch.object(chain.server._counter, "_pool", pool):
        yield


@asynccontextmanager
async def _panicking(chain: Mesh) -> AsyncIterator[None]:
    """The tokenizer's library panics, with what is no Exception."""

    class Panic(BaseException):
        pass

    def panic(*_arguments: Any, **_options: Any) -> Any:
        raise Panic

    backend = chain.server._counter._prepared["qwen3"].loaded.backend
    with patch.object(type(backend), "count_batch", panic):
        yield


def turning_away(status: int) -> State:
    """The engine itself answers with this status."""

    @asynccontextmanager
    async def state(chain: Mesh) -> AsyncIterator[None]:
        await chain.control("chat-0", status=status)
        try:
            yield
        finally:
            await chain.control("chat-0", status=None)

    return state


@asynccontextmanager
async def _draining(chain: Mesh) -> AsyncIterator[None]:
    """The service stops, as on SIGTERM, and waits for a response that still runs."""
    async with held("chat-0", ids(10, 6))(chain):
        drained = asyncio.create_task(chain.server.drain())
        await until(lambda: chain.desk.draining)
        yield
    await drained


@asynccontextmanager
async def _stopped(chain: Mesh) -> AsyncIterator[None]:
    """The service is not there."""
    await chain.server.stop()
    yield


@dataclass(frozen=True)
class Case:
    """A state, a request in it, and what the answer must hold besides what all answers hold.

    `headers` and `details` are exact for the names they give. `status` is said where it is not that of the reason.
    `reserved_tokens` and `reached` tell of a request that was admitted before it failed.
    """

    name: str
    reason: Reason
    send: Send
    state: State = _idle
    lane: str = "none"
    param: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    status: int | None = None
    request_id: str | None = REQUEST_ID
    reserved_tokens: int = 0
    reached: int = 0


def counts(input_tokens: int, max_output_tokens: int) -> dict[str, Any]:
    """Details of a counted request of one sequence."""
    return {
        "input_tokens": input_tokens,
        "max_output_tokens": max_output_tokens,
        "sequences": 1,
        "requested_tokens": input_tokens + max_output_tokens,
    }


CASES = [
    Case("not JSON", Reason.MALFORMED_REQUEST, post(b'{"model":')),
    Case("no model", Reason.MALFORMED_REQUEST, post({"messages": []}), param="model"),
    Case("no messages", Reason.MALFORMED_REQUEST, post({"model": "qwen3"}), param="messages"),
    Case("no body", Reason.MALFORMED_REQUEST, post(b"")),
    Case("bad ceiling", Reason.MALFORMED_REQUEST, post(chat(max_tokens=0)), param="max_tokens"),
    Case("body where none belongs", Reason.MALFORMED_REQUEST, get("/v1/models", b"{}")),
    Case("no URL", Reason.MALFORMED_REQUEST, raw("/v1/x%00y")),
    Case("unknown model", Reason.UNKNOWN_MODEL, post(chat() | {"model": "gpt"}), param="model"),
    Case(
        "unknown path",
        Reason.UNKNOWN_ENDPOINT,
        post(chat(), "/v1/embeddings"),
        details={"endpoints": f"{CHAT}, {COMPLETIONS}"},
    ),
    Case("wrong method", Reason.UNKNOWN_ENDPOINT, get(CHAT), details={"endpoints": f"{CHAT}, {COMPLETIONS}"}),
    Case(
        "upgrade",
        Reason.UNKNOWN_ENDPOINT,
        raw(CHAT, connection="upgrade", upgrade="websocket"),
        status=403,
    ),
    Case(
        "input over the lanes",
        Reason.CONTEXT_LIMIT,
        post(ids(60_001, 16), COMPLETIONS),
        lane="overflow",
        message="prompt is too long: 60001 tokens > 60000 maximum",
        details={**counts(60_001, 16), **ACCEPTED},
    ),
    Case(
        "total over the lanes",
        Reason.CONTEXT_LIMIT,
        post(ids(60_000, 4001), COMPLETIONS),
        lane="overflow",
        message="prompt is too long: 64001 tokens > 64000 maximum",
        details={**counts(60_000, 4001), **ACCEPTED},
    ),
    Case(
        "total over the context",
        Reason.CONTEXT_LIMIT,
        post(ids(100, 69_901), COMPLETIONS),
        lane="overflow",
        message="prompt is too long: 70001 tokens > 70000 maximum",
        details={"input_tokens": 100, "max_output_tokens": 69_901, "context_tokens_max": CONTEXT_TOKENS_MAX},
    ),
    Case(
        "ceiling over the context",
        Reason.CONTEXT_LIMIT,
        post(chat(max_tokens=70_001)),
        lane="overflow",
        param="max_tokens",
        message="prompt is too long: 70001 tokens > 70000 maximum",
        details={"max_output_tokens": 70_001, "context_tokens_max": CONTEXT_TOKENS_MAX},
    ),
    Case(
        "sized body over the cap",
        Reason.BODY_TOO_LARGE,
        post(b" " * (BODY_BYTES_MAX + 1)),
        details={"body_bytes": BODY_BYTES_MAX + 1, "body_bytes_max": BODY_BYTES_MAX},
    ),
    Case(
        "chunked body over the cap",
        Reason.BODY_TOO_LARGE,
        upload(BODY_BYTES_MAX + 1),
        details={"body_bytes": BODY_BYTES_MAX + 1, "body_bytes_max": BODY_BYTES_MAX},
    ),
    Case("chunked body over the buffer", Reason.BODY_TOO_LARGE, upload(BUFFER_BYTES + 2**18)),
    Case("encoding", Reason.UNSUPPORTED_ENCODING, post(chat(), content_encoding="compress"), param="content-encoding"),
    Case(
        "encoded twice",
        Reason.UNSUPPORTED_ENCODING,
        post(chat(), content_encoding="gzip, gzip"),
        param="content-encoding",
    ),
    Case("not what it says", Reason.MALFORMED_REQUEST, post(chat(), content_encoding="gzip"), param="content-encoding"),
    Case("UTF-16", Reason.MALFORMED_REQUEST, post(json.dumps(chat()).encode("utf-16"))),
    Case(
        "bomb",
        Reason.BODY_TOO_LARGE,
        post(gzip.compress(b" " * 2**26), content_encoding="gzip"),
        details={"body_bytes_max": BODY_BYTES_MAX},
    ),
    Case("media type", Reason.UNSUPPORTED_ENCODING, post(chat(), content_type="text/plain"), param="content-type"),
    Case(
        "intake full",
        Reason.QUEUE_FULL,
        post(ids(55_000), COMPLETIONS),
        _counting,
        details={"queue": "intake", "queue_max": BODY_BYTES_MAX},
    ),
    Case(
        "streams full",
        Reason.QUEUE_FULL,
        post(chat()),
        _crowded,
        details={"queue": "streams", "queue_max": STREAMS_MAX},
    ),
    Case(
        "no tokens",
        Reason.TOKEN_BUDGET_EXHAUSTED,
        post(ids(265, 16), COMPLETIONS),
        held("chat-0", ids(4096, 1024)),
        lane="interactive",
        details={**counts(265, 16), "available_tokens": 280, "replicas_ready": 1, "input_tokens_max": 4096},
    ),
    Case(
        "no slot",
        Reason.CONCURRENCY_LIMIT,
        post(ids(10, 6), COMPLETIONS),
        held("chat-0", *[ids(10, 6)] * REQUESTS_MAX),
        lane="interactive",
        details={
            **counts(10, 6),
            "requests_max": REQUESTS_MAX,
            "available_tokens": 5400 - 16 * REQUESTS_MAX,
            "replicas_ready": 1,
        },
    ),
    Case(
        "no ready replica",
        Reason.CAPACITY_UNAVAILABLE,
        post(ids(10, 6), COMPLETIONS),
        _unready,
        lane="interactive",
        details={**counts(10, 6), "replicas": 1, "replicas_ready": 0},
    ),
    Case(
        "unreachable replica",
        Reason.CAPACITY_UNAVAILABLE,
        post(ids(10, 6), COMPLETIONS),
        _unreachable,
        lane="interactive",
        reserved_tokens=16,
    ),
    Case(
        "lost replica",
        Reason.CAPACITY_UNAVAILABLE,
        _until_engine_dies,
        _between_probes,
        lane="interactive",
        reserved_tokens=16,
        reached=1,
    ),
    Case(
        "late answer",
        Reason.UPSTREAM_TIMEOUT,
        post(ids(4097, 6), COMPLETIONS),
        held("docs-0"),
        lane="bulk",
        reserved_tokens=4103,
        reached=1,
    ),
    Case("fault in reading", Reason.INTERNAL_ERROR, post(chat()), broken("read")),
    Case("fault in counting", Reason.INTERNAL_ERROR, post(chat()), broken("count")),
    Case("dead tokenizer", Reason.TOKENIZER_UNAVAILABLE, post(chat()), _without_tokenizer),
    Case("panicking tokenizer", Reason.TOKENIZER_UNAVAILABLE, post(chat()), _panicking),
    Case(
        "busy engine",
        Reason.ENGINE_BUSY,
        post(ids(10, 6), COMPLETIONS),
        turning_away(429),
        lane="interactive",
        reserved_tokens=16,
        reached=1,
    ),
    Case(
        "full engine",
        Reason.ENGINE_BUSY,
        post(ids(10, 6), COMPLETIONS),
        turning_away(503),
        lane="interactive",
        reserved_tokens=16,
        reached=1,
    ),
    Case("no decision", Reason.ADMISSION_UNAVAILABLE, post(chat()), _undecided),
    # These two end the service, so they come last.
    Case("draining", Reason.DRAINING, post(chat()), _draining),
    Case("no service", Reason.ADMISSION_UNAVAILABLE, post(chat()), _stopped),
]


async def test_the_table_is_complete() -> None:
    """Every reason has a case."""
    assert set(Reason) == {case.reason for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_every_reason(chain: Mesh, case: Case) -> None:
    """Each answer has the status, shape and retry headers of its reason, and nothing stays reserved."""
    async with case.state(chain):
        before = await _position(chain)
        answer = await case.send(chain)
        tickets = case.reserved_tokens > 0
        await until(lambda: _held_by(chain) == before.held)
        after = await _position(chain)

    assert case.reason.value == answer.headers["x-llm-reason"][0]
    assert before.tickets + tickets == after.tickets
    if case.name != "lost replica":
        assert before.engine_requests + case.reached == after.engine_requests
    _check_shape(case, answer)
    _check_headers(case, answer)
    _check_retry(case, answer)


Held = tuple[frozenset[str], int, int]
"""Open tickets, streams, and bytes that are being counted."""


@dataclass(frozen=True)
class Position:
    """What the desk holds, how many reservations were ever made, and how many requests engines ever saw."""

    held: Held
    tickets: int
    engine_requests: int


async def _position(chain: Mesh) -> Position:
    states = [await asyncio.to_thread(engine.state) for engine in chain.engines.values() if engine.running]
    seen = sum(int(state["requests_total"] or 0) for state in states)
    return Position(_held_by(chain), chain.desk._tickets, seen)


def _held_by(chain: Mesh) -> Held:
    return frozenset(chain.desk.ledger.open), chain.desk.streams, chain.desk.intake_bytes


def _check_shape(case: Case, answer: Answer) -> None:
    """The body is one object that the OpenAI and the Anthropic SDKs both read."""
    rule, document = RULES[case.reason], orjson.loads(answer.body)
    error = document["error"]

    assert (case.status or rule.status) == answer.status
    assert {"type", "error", "request_id"} == document.keys()
    assert {"message", "type", "param", "code", "details"} == error.keys()
    assert ("error", rule.error_type, case.reason.value) == (document["type"], error["type"], error["code"])
    assert case.param == error["param"]
    assert error["message"].startswith(case.message)
    assert {"error_code": case.reason.value, **case.details} == {
        name: error["details"].get(name) for name in ("error_code", *case.details)
    }
    assert case.request_id == document["request_id"]


def _check_headers(case: Case, answer: Answer) -> None:
    expected = {
        "content-type": "application/json",
        "x-llm-reason": case.reason.value,
        "x-llm-lane": case.lane,
        "x-llm-policy": "test-1",
        "x-llm-reserved-tokens": str(case.reserved_tokens),
        "x-llm-queue-ms": "0",
    }
    if case.request_id is not None:
        expected["x-request-id"] = case.request_id
    details = orjson.loads(answer.body)["error"]["details"]
    for name in ("input_tokens", "max_output_tokens"):
        if details.get(name) is not None:
            expected[f"x-llm-{name.replace('_', '-')}"] = str(details[name])

    assert {name: [value] for name, value in expected.items()} == {name: answer.headers.get(name) for name in expected}


def _check_retry(case: Case, answer: Answer) -> None:
    rule, headers = RULES[case.reason], answer.headers
    if rule.retry is Retry.AFTER:
        (seconds,), (milliseconds,) = headers["retry-after"], headers["retry-after-ms"]

        assert 1 <= int(seconds) <= 60
        assert 1000 * int(seconds) == int(milliseconds)
        assert "x-should-retry" not in headers
    else:
        assert {"retry-after", "retry-after-ms"}.isdisjoint(headers)
        assert (["false"] if rule.retry is Retry.NEVER else None) == headers.get("x-should-retry")
    if answer.status in (413, 503):
        text = answer.body.decode().lower().replace("_", " ").replace("-", " ")

        assert "rate limit" not in text
        assert "ratelimit" not in text
