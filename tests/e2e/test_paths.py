"""Every way to write a request line, headers and framing: what comes back, and that nothing runs unadmitted.

A case is the bytes that a client sends and the statuses that it reads. An answer is Envoy's own, tokenlane's, or the
engine's; `by` says whose. Whatever it is, it comes in time, and an engine sees the request exactly when tokens were
reserved for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
import pytest_asyncio

from tests.e2e.mesh import CHAT, Mesh, mesh
from tests.e2e.raw import Pairs, Reply, http1, http2
from tests.e2e.recorder import FIRST_EVENT, LAST_EVENT, Recorder, Seen

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

MODELS = "/v1/models"
BODY = b'{"model":"qwen3","messages":[{"role":"user","content":"hi"}],"max_tokens":8}'
SIZE = len(BODY)
RESERVED_TOKENS = 17

ENVOY, TOKENLANE, ENGINE = "Envoy", "tokenlane", "engine"


@dataclass(frozen=True)
class Chain:
    """The mesh and its two recording engines, in pools `chat` and `docs`."""

    mesh: Mesh
    chat: Recorder
    docs: Recorder

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of Envoy."""
        host, _, port = self.mesh.url.removeprefix("http://").partition(":")
        return host, int(port)

    def forget(self) -> None:
        """Let the engines have seen nothing."""
        self.chat.seen.clear()
        self.docs.seen.clear()

    @property
    def seen(self) -> list[Seen]:
        """What the engines got."""
        return self.chat.seen + self.docs.seen

    @property
    def decided(self) -> tuple[int, int]:
        """Reservations and refusals that tokenlane has made."""
        samples = [s for metric in self.mesh.server.metrics.registry.collect() for s in metric.samples]
        refusals = sum(int(s.value) for s in samples if s.name == "tokenlane_refused_requests_total")
        return self.mesh.desk._tickets, refusals


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Chain]:
    """One chain that gives an upload two seconds."""
    async with Recorder() as chat, Recorder() as docs:
        pools = {"chat": {"chat-0": {"address": chat.address}}, "docs": {"docs-0": {"address": docs.address}}}
        async with mesh(pools=pools, limits={"decision_s_max": 2}, model={"aliases": ["test-model"]}) as running:
            yield Chain(running, chat, docs)


def request(
    target: str = CHAT, method: str = "POST", body: bytes | None = BODY, *headers: str, version: str = "1.1"
) -> bytes:
    """A request whose length is said unless `headers` say how it is framed; None is no body."""
    lines = [f"{method} {target} HTTP/{version}", "host: gateway", "content-type: application/json", *headers]
    if body is not None and not any(line.lower().startswith(("content-length", "transfer-enc")) for line in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + (body or b"")


def framed(body: bytes, *headers: str) -> bytes:
    """A request whose framing is what `headers` say."""
    return request(CHAT, "POST", body, *headers)


def chunked(*pieces: bytes, trailer: bytes = b"", kind: str = "chunked") -> bytes:
    """A request in chunks."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"
    return framed(body, f"transfer-encoding: {kind}")


def upgrade(protocol: str, method: str = "GET", path: str = CHAT) -> bytes:
    """A request to change the protocol."""
    body = BODY if method == "POST" else None
    sent = request(path, method, body, f"upgrade: {protocol}", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
    return sent.replace(b"connection: close", b"connection: upgrade, http2-settings, close")


@dataclass(frozen=True)
class Case:
    """What is sent over HTTP/1.1 and what must come back.

    `path` is what the engine sees. Tokens are reserved exactly for a POST that an engine sees.
    """

    name: str
    sent: bytes
    by: str
    status: int
    reason: str | None = None
    path: str = CHAT
    statuses: Sequence[int] = ()


def admitted(name: str, sent: bytes, path: str = CHAT) -> Case:
    """A request that an engine answers."""
    return Case(name, sent, ENGINE, 200, path=path)


def unknown(name: str, sent: bytes) -> Case:
    """A request that tokenlane does not know."""
    return Case(name, sent, TOKENLANE, 404, "unknown_endpoint")


def bad(name: str, sent: bytes, status: int = 400) -> Case:
    """A request that Envoy cannot read."""
    return Case(name, sent, ENVOY, status, "malformed_request")


CANONICAL = (
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/./v1/./chat/completions",
    "/x/../v1/chat/completions",
    "/../v1/chat/completions",
    "/v1/%63hat/completions",
    "/v1/chat/completion%73",
    "/x/%2e%2e/v1/chat/completions",
    "/v1\\chat\\completions",
    "http://other/v1/chat/completions",
    "https://other/v1/chat/completions",
)
"""Spellings of one path: Envoy makes them the same before anyone decides."""

OTHER_PATHS = (
    "/v1/chat%2Fcompletions",
    "/v1/chat%2fcompletions",
    "/v1/chat%5Ccompletions",
    "/v1/%2563hat/completions",
    "/V1/CHAT/COMPLETIONS",
    "/v1/chat/completions/",
    "/v1/chat/completions//",
    "/v1/chat/completions/.",
    "/v1/chat/completions/..",
    "/v1/chat/completions/x/..",
    "/v1/chat/completions;a=b",
    "/v1/chat/completions%20",
    "/v1/chat/completions%0d",
    "/v1/chat/completions%3Fx=1",
    "/",
    "/health",
    "/metrics",
    "/v1/embeddings",
    MODELS,
)
"""Paths that are not open to a POST."""

UNREADABLE_PATHS = ("/v1/chat/completions%00", CHAT + "#f", "*", "v1/chat/completions", "/v1/\u0441hat/completions", "")

METHODS = ("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH")

CASES = [
    *[admitted(path, request(path)) for path in CANONICAL],
    *[admitted(query, request(CHAT + query), CHAT + query) for query in ("?", "?x=1", "?/../x", "?a=%2F//;b")],
    *[unknown(path, request(path)) for path in OTHER_PATHS],
    *[bad(path, request(path)) for path in UNREADABLE_PATHS],
    bad("endless query", request(CHAT + "?" + "q" * 70_000), 431),
    bad("endless header", request(CHAT, "POST", BODY, "x-a: " + "a" * 70_000), 431),
    *[unknown(f"{method} without body", request(CHAT, method, None)) for method in METHODS],
    *[unknown(f"{method} with body", request(CHAT, method)) for method in METHODS],
    *[bad(f"method {method}", request(CHAT, method)) for method in ("post", "POSTX", "PRI", "P\u00d6ST", "")],
    unknown("CONNECT", b"CONNECT gateway:443 HTTP/1.1\r\nhost: gateway:443\r\n\r\n"),
    bad("CONNECT to a path", request(CHAT, "CONNECT")),
    *[
        Case(f"upgrade {protocol} by {method}", upgrade(protocol, method), ENVOY, 403, "unknown_endpoint")
        for protocol in ("websocket", "foo/1")
        for method in ("GET", "POST")
    ],
    Case("upgrade of a bypass", upgrade("websocket", path=MODELS), ENVOY, 403, "unknown_endpoint"),
    unknown("upgrade h2c by GET", upgrade("h2c")),
    admitted("upgrade h2c by POST", upgrade("h2c", "POST")),
    admitted("upgrade without connection", request(CHAT, "POST", BODY, "upgrade: websocket")),
    Case("POST without body", request(CHAT, "POST", None), TOKENLANE, 400, "malformed_request"),
    Case("empty body", request(CHAT, "POST", b""), TOKENLANE, 400, "malformed_request"),
    Case("empty chunked body", chunked(), TOKENLANE, 400, "malformed_request"),
    admitted("chunks", chunked(BODY[:9], BODY[9:])),
    admitted("Chunked", chunked(BODY, kind="Chunked")),
    admitted(
        "a chunk with an extension", framed(b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (SIZE, BODY), "transfer-encoding: chunked")
    ),
    admitted("chunks with trailers", chunked(BODY, trailer=b"x-note: late\r\n")),
    admitted("trailers that forge", chunked(BODY, trailer=b"x-llm-lane: bulk\r\nx-llm-pool: docs\r\n")),
    bad("no chunk", framed(b"zz\r\n", "transfer-encoding: chunked")),
    bad("both lengths", framed(BODY, f"content-length: {SIZE}", "transfer-encoding: chunked")),
    bad("both lengths, chunked", framed(b"0\r\n\r\n", "content-length: 5", "transfer-encoding: chunked")),
    bad("two lengths", framed(BODY, f"content-length: {SIZE}", "content-length: 3")),
    bad("the same length twice", framed(BODY, f"content-length: {SIZE}", f"content-length: {SIZE}")),
    *[
        bad(f"length {length}", framed(BODY, f"content-length: {length}"))
        for length in (f"{SIZE}, {SIZE}", "-1", f"+{SIZE}", f"0x{SIZE:x}", "1e2", "9" * 23, "")
    ],
    Case("enormous length", framed(BODY, f"content-length: {10**13}"), TOKENLANE, 413, "body_too_large"),
    *[
        bad(f"transfer-encoding {kind}", chunked(BODY, kind=kind))
        for kind in ("gzip, chunked", "xchunked", "identity", "chunked, identity")
    ],
    bad("no host", request().replace(b"host: gateway\r\n", b"")),
    bad("space before colon", request(CHAT, "POST", BODY, "x-a : 1")),
    bad("NUL in a header", request(CHAT, "POST", BODY, "x-a: \0")),
    bad("CR in a name", request(CHAT, "POST", BODY, "x-llm\r-lane: bulk")),
    bad("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"),
    bad("HTTP/0.9", b"GET /v1/models\r\n\r\n", 426),
    bad("HTTP/1.0", request(version="1.0"), 426),
    bad("HTTP/2.0 in the request line", request(version="2.0"), 426),
    admitted("folded header", request(CHAT, "POST", BODY, "x-a: 1\r\n folded")),
    admitted("CR in a value", request(CHAT, "POST", BODY, "x-a: 1\rx-llm-lane: bulk")),
    admitted("LF ends a header", request(CHAT, "POST", BODY, "x-a: 1\nx-llm-lane: bulk\nx-llm-pool: docs")),
    Case("body shorter than it says", framed(BODY, f"content-length: {SIZE + 9}"), ENVOY, 408, "malformed_request"),
    Case("chunks that stop", chunked(BODY)[:-5], ENVOY, 408, "malformed_request"),
    bad("headers that stop", request()[:60], 408),
    Case("body cut by its length", framed(BODY, f"content-length: {SIZE - 5}"), TOKENLANE, 400, "malformed_request"),
    Case(
        "body longer than it says",
        request().replace(b"connection: close\r\n", b"") + b"EXTRA\r\n\r\n",
        ENGINE,
        200,
        statuses=(200, 400),
    ),
    Case("expect 100", request(CHAT, "POST", BODY, "expect: 100-continue"), ENGINE, 200, statuses=(100, 200)),
    admitted("GET of a bypass", request(MODELS, "GET", None), MODELS),
    admitted("GET of a bypass with a query", request(MODELS + "?limit=1", "GET", None), MODELS + "?limit=1"),
    admitted("GET of a bypass, other spelling", request("//v1/./mod%65ls", "GET", None), MODELS),
    unknown("GET beside a bypass", request(MODELS + "/", "GET", None)),
    unknown("HEAD of a bypass", request(MODELS, "HEAD", None)),
    Case("GET of a bypass with a body", request(MODELS, "GET"), TOKENLANE, 400, "malformed_request"),
    unknown("another method in a header", request(CHAT, "GET", None, "x-http-method-override: POST")),
    unknown("another path in a header", request("/v1/x", "POST", BODY, f"x-envoy-original-path: {CHAT}")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:40] or "empty")
async def test_http1(chain: Chain, case: Case) -> None:
    """Bytes over HTTP/1.1 get their answer in time, in the contract's shape, and run only when admitted."""
    chain.forget()
    tickets, refusals = chain.decided
    replies = await http1(chain.address, case.sent)
    await chain.mesh.until_free()
    reply = next(reply for reply in replies if reply.status == case.status)

    assert (case.statuses or (case.status,)) == tuple(reply.status for reply in replies)
    bypass = case.path.startswith(MODELS)
    assert (tickets + (case.by == ENGINE and not bypass), refusals + (case.by == TOKENLANE)) == chain.decided
    assert [(case.path, "GET" if bypass else "POST")] * (case.by == ENGINE) == [(s.path, s.method) for s in chain.seen]
    assert case.reason == reply.reason
    if case.by == ENGINE:
        _check_admitted(chain.seen[0], reply, bypass=bypass)
    else:
        _check_refused(reply, has_body=not case.sent.startswith(b"HEAD"))


def _check_admitted(seen: Seen, reply: Reply, *, bypass: bool) -> None:
    """The engine got the body that was counted, the gateway's own headers once, and nothing of the framing."""
    lane = "bypass" if bypass else "interactive"

    assert (lane, lane) == (reply.one("x-llm-lane"), "".join(seen.all("x-llm-lane")))
    assert (None if bypass else str(RESERVED_TOKENS)) == reply.one("x-llm-reserved-tokens")
    assert ["chat"] == seen.all("x-llm-pool")
    assert (b"" if bypass else BODY) == seen.body
    assert {"upgrade", "http2-settings", "expect", "trailer"}.isdisjoint(seen.names)


def _check_refused(reply: Reply, *, has_body: bool) -> None:
    assert ("none", "0", "false") == tuple(
        reply.one(name) for name in ("x-llm-lane", "x-llm-reserved-tokens", "x-should-retry")
    )
    assert "application/json" == reply.one("content-type")
    if has_body:
        assert reply.document["request_id"] == reply.one("x-request-id")


def head(*more: tuple[str, str], path: str = CHAT, method: str = "POST", without: str = "") -> Pairs:
    """Headers over HTTP/2."""
    pairs = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "gateway")]
    return [pair for pair in (*pairs, ("content-type", "application/json"), *more) if pair[0] != without]


PROTOCOL_ERROR = h2.errors.ErrorCodes.PROTOCOL_ERROR

TUNNEL = [(":method", "CONNECT"), (":authority", "gateway:443")]

HTTP2_CASES: dict[str, tuple[Pairs, bytes | None, str, int, str | None]] = {
    "plain": (head(), BODY, ENGINE, 200, None),
    "other spelling": (head(path="//v1\\%63hat/./completions"), BODY, ENGINE, 200, None),
    "https scheme": ([*head(without=":scheme"), (":scheme", "https")][::-1], BODY, ENGINE, 200, None),
    "expect": (head(("expect", "100-continue")), BODY, ENGINE, 200, None),
    "cookies": (head(("cookie", "a=1"), ("cookie", "b=2")), BODY, ENGINE, 200, None),
    "escaped slash": (head(path="/v1/chat%2Fcompletions"), BODY, TOKENLANE, 404, "unknown_endpoint"),
    "lower-case method": (head(method="post"), BODY, TOKENLANE, 404, "unknown_endpoint"),
    "GET": (head(method="GET"), None, TOKENLANE, 404, "unknown_endpoint"),
    "GET with body": (head(method="GET"), BODY, TOKENLANE, 404, "unknown_endpoint"),
    "CONNECT": (TUNNEL, BODY, TOKENLANE, 404, "unknown_endpoint"),
    "CONNECT without body": (TUNNEL, None, TOKENLANE, 404, "unknown_endpoint"),
    "no body": (head(), None, TOKENLANE, 400, "malformed_request"),
    "empty body": (head(), b"", TOKENLANE, 400, "malformed_request"),
    "fragment": (head(path=CHAT + "#f"), BODY, ENVOY, 400, "malformed_request"),
    "NUL": (head(path=CHAT + "%00"), BODY, ENVOY, 400, "malformed_request"),
    "asterisk": (head(path="*", method="OPTIONS"), None, ENVOY, 404, "unknown_endpoint"),
}

HTTP2_RESETS: dict[str, Pairs] = {
    "extended CONNECT": head((":protocol", "websocket"), method="CONNECT")[::-1],
    "length too long": head(("content-length", str(SIZE + 5))),
    "length too short": head(("content-length", str(SIZE - 5))),
    "two lengths": head(("content-length", str(SIZE)), ("content-length", "3")),
    "transfer-encoding": head(("transfer-encoding", "chunked")),
    "connection": head(("connection", "close")),
    "upgrade": head(("upgrade", "websocket")),
    "name in upper case": head(("X-LLM-Lane", "bulk")),
    "two paths": [(":path", "/x"), *head()],
    "no path": head(without=":path"),
    "no method": head(without=":method"),
    "no scheme": head(without=":scheme"),
    "empty path": head(path=""),
    "absolute URL": head(path="http://gateway" + CHAT),
    "space in the path": head(path=CHAT + " x"),
    "NUL in a value": head(("x-a", "\0")),
    "line end in a value": head(("x-a", "1\r\nx-llm-lane: bulk")),
}


@pytest.mark.parametrize("name", HTTP2_CASES)
async def test_http2(chain: Chain, name: str) -> None:
    """The same over HTTP/2."""
    headers, body, by, status, reason = HTTP2_CASES[name]
    headers = sorted(headers, key=lambda pair: not pair[0].startswith(":"))
    chain.forget()
    tickets, refusals = chain.decided
    reply = await http2(chain.address, headers, body)
    await chain.mesh.until_free()

    assert (status, reason) == (reply.status, reply.reason)
    assert (tickets + (by == ENGINE), refusals + (by == TOKENLANE)) == chain.decided
    assert [(CHAT, BODY)] * (by == ENGINE) == [(seen.path, seen.body) for seen in chain.seen]
    if by != ENGINE:
        _check_refused(reply, has_body=True)


@pytest.mark.parametrize("name", HTTP2_RESETS)
async def test_http2_protocol_errors(chain: Chain, name: str) -> None:
    """What is no request of HTTP/2 resets its stream, and neither tokenlane nor an engine hears of it."""
    headers = sorted(HTTP2_RESETS[name], key=lambda pair: not pair[0].startswith(":"))
    chain.forget()
    before = chain.decided
    reply = await http2(chain.address, headers, BODY)

    assert (0, PROTOCOL_ERROR) == (reply.status, reply.reset)
    assert (before, []) == (chain.decided, chain.seen)
    await chain.mesh.until_free()


async def test_http2_trailers_forge_nothing(chain: Chain) -> None:
    """Trailers over HTTP/2 change neither verdict nor route, and do not become headers."""
    chain.forget()
    reply = await http2(chain.address, head(), BODY, [("x-llm-lane", "bulk"), ("x-llm-pool", "docs")])
    (seen,) = chain.seen

    assert 200 == reply.status
    _check_admitted(seen, reply, bypass=False)
    await chain.mesh.until_free()


@pytest.mark.parametrize("body", [BODY, b""], ids=["some", "none"])
async def test_http2_upload_that_stops(chain: Chain, body: bytes) -> None:
    """An upload over HTTP/2 that stops is answered when its time is over."""
    chain.forget()
    reply = await http2(chain.address, head(), body, finish=False)

    assert (408, "malformed_request", []) == (reply.status, reply.reason, chain.seen)
    _check_refused(reply, has_body=True)
    await chain.mesh.until_free()


async def test_slow_upload(chain: Chain) -> None:
    """A body that trickles in is answered when the time to decide is over, however steady it comes."""
    chain.forget()
    reader, writer = await asyncio.open_connection(*chain.address)
    writer.write(framed(b"", "content-length: 100000"))
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    async with asyncio.timeout(10):
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait([answer], timeout=0.1)
    writer.close()

    assert answer.result().startswith(b"HTTP/1.1 408 ")
    assert [] == chain.seen
    await chain.mesh.until_free()


async def test_a_client_that_leaves_in_its_upload(chain: Chain) -> None:
    """A client that closes before its body is complete leaves nothing behind."""
    chain.forget()
    replies = await http1(chain.address, framed(BODY, f"content-length: {SIZE + 9}"), finish=True)
    await chain.mesh.until_free()

    assert ([], []) == (replies, chain.seen)


async def test_an_http2_connection_outlives_a_malformed_request(chain: Chain) -> None:
    """A malformed request ends its own stream; the response beside it on the same connection goes on."""
    chain.chat.gate.clear()
    reader, writer = await asyncio.open_connection(*chain.address)
    connection = h2.connection.H2Connection(
        h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    )
    connection.initiate_connection()
    connection.send_headers(1, list(head()))
    connection.send_data(1, BODY[:-1] + b',"stream":true}', end_stream=True)
    received, resets, over = b"", [], False
    async with asyncio.timeout(10):
        while not over:
            writer.write(connection.data_to_send())
            data = await reader.read(2**16)
            assert data, "the connection ended"
            for event in connection.receive_data(data):
                match event:
                    case h2.events.DataReceived(data=bytes(piece)):
                        received += piece
                        if received == FIRST_EVENT:
                            connection.send_headers(3, [*head(), ("connection", "close")], end_stream=True)
                    case h2.events.StreamReset(stream_id=int(stream), error_code=code):
                        resets.append((stream, code))
                        chain.chat.gate.set()
                    case h2.events.StreamEnded(stream_id=1):
                        over = True
    writer.close()

    assert [(3, PROTOCOL_ERROR)] == resets
    assert FIRST_EVENT + LAST_EVENT == received
    await chain.mesh.until_free()


HOSTILE_IDS = {
    "quotes": 'a"b\\c',
    "format": "%REQ(host)%{x}${y}",
    "markup": "<script>alert(1)</script>",
    "long": "i" * 5000,
    "not ASCII": "\u00e9\u4e2d\u200f",
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", HOSTILE_IDS)
@pytest.mark.parametrize("target", [CHAT, "/v1/x"], ids=["admitted", "refused"])
async def test_hostile_request_ids(chain: Chain, name: str, target: str) -> None:
    """A request id is a client's text: it breaks neither an answer nor its JSON, and is cut in the body."""
    value = HOSTILE_IDS[name]
    sent = request(target, "POST", BODY, "x-request-id: \x00").replace(b"\x00", value.encode(errors="surrogateescape"))
    chain.forget()
    (reply,) = await http1(chain.address, sent)
    await chain.mesh.until_free()

    if target == CHAT:
        assert (200, 1) == (reply.status, len(chain.seen))
    else:
        text = value.encode(errors="surrogateescape").decode(errors="replace")

        assert (404, text[:256]) == (reply.status, reply.document["request_id"])


@pytest.mark.parametrize("ids", [("a", "b"), ("", "")], ids=["two", "empty"])
async def test_request_ids_that_are_none(chain: Chain, ids: tuple[str, ...]) -> None:
    """Two request ids are one text, and an empty one is replaced."""
    (reply,) = await http1(chain.address, request("/v1/x", "POST", BODY, *(f"x-request-id: {value}" for value in ids)))

    assert reply.one("x-request-id")
    assert reply.one("x-request-id") == reply.document["request_id"]


ENVOY_HEADERS = {
    "x-envoy-upstream-rq-timeout-ms": "1",
    "x-envoy-upstream-rq-per-try-timeout-ms": "1",
    "x-envoy-retry-on": "5xx,retriable-status-codes",
    "x-envoy-retriable-status-codes": "200",
    "x-envoy-max-retries": "3",
    "x-envoy-hedge-on-per-try-timeout": "true",
    "x-envoy-upstream-alt-stat-name": "mine",
    "x-envoy-force-trace": "1",
    "x-envoy-internal": "true",
}
"""What a client could tell Envoy's router, if it were believed: to give up early, or to run a request twice."""


@pytest.mark.parametrize("origin", [None, "127.0.0.1", "10.0.0.1"])
async def test_envoy_headers_of_a_client(chain: Chain, origin: str | None) -> None:
    """Envoy obeys no `x-envoy-*` of a client, wherever it says it comes from: one attempt, the policy's timeout."""
    headers = ENVOY_HEADERS | ({} if origin is None else {"x-forwarded-for": origin})
    chain.forget()
    (reply,) = await http1(
        chain.address, request(CHAT, "POST", BODY, *(f"{name}: {value}" for name, value in headers.items()))
    )
    (seen,) = chain.seen

    assert (200, set()) == (reply.status, ENVOY_HEADERS.keys() & seen.names)
    assert ["600000"] == seen.all("x-envoy-expected-rq-timeout-ms")
    await chain.mesh.until_free()


SHARED = {
    "126": (200, None),
    "127": (200, None),
    "128": (400, "malformed_request"),
    "129": (400, "malformed_request"),
    "130": (408, "malformed_request"),
    "132": (400, "malformed_request"),
    "133": (200, None),
    "134": (404, "unknown_endpoint"),
    "135": (200, None),
    "137": (404, "unknown_endpoint"),
    "138": (404, "unknown_endpoint"),
    "139": (404, "unknown_endpoint"),
}
"""Our answers to the shared raw requests, by number. Each is one that its `gateway_should` allows."""


async def test_shared_raw_requests(chain: Chain, shared: Path) -> None:
    """Raw requests that were collected elsewhere end as their expectation says."""
    found = {path.name[:3]: path for path in sorted((shared / "cases" / "malformed").glob("*.http"))}
    expected = {number: json.loads(path.with_suffix(".expect.json").read_bytes()) for number, path in found.items()}
    got: dict[str, tuple[int, str | None]] = {}
    for number, path in found.items():
        chain.forget()
        tickets, _ = chain.decided
        replies = await http1(chain.address, path.read_bytes())
        await chain.mesh.until_free()
        final = next(reply for reply in replies if reply.status >= 200)
        got[number] = (final.status, final.reason)

        assert len(chain.seen) == chain.decided[0] - tickets == (final.status == 200), number

    assert SHARED == got
    admits = {number for number, expectation in expected.items() if expectation["gateway_should"].startswith("admit")}
    assert admits == {number for number, (status, _) in got.items() if status == 200}


async def test_nothing_runs_without_the_service(chain: Chain) -> None:
    """With tokenlane gone, no spelling, method or framing reaches an engine. It ends the service: it is last."""
    await chain.mesh.server.stop()
    chain.forget()
    forged: list[Any] = [
        "x-llm-lane: interactive",
        "x-llm-pool: chat",
        f"x-gateway-destination-endpoint: {chain.chat.address}",
    ]
    cases = [case for case in CASES if case.status != 408]
    statuses = set()
    for case in cases:
        sent = case.sent.replace(b"host: gateway\r\n", "\r\n".join(["host: gateway", *forged, ""]).encode(), 1)
        for reply in await http1(chain.address, sent):
            if reply.status != 100:
                statuses.add((case.by if case.by == ENVOY else "decided", reply.status, reply.reason))
    for headers, body, *_ in HTTP2_CASES.values():
        pairs = sorted(headers, key=lambda pair: not pair[0].startswith(":"))
        pairs += [tuple(line.split(": ")) for line in forged]
        await http2(chain.address, pairs, body)

    assert {("decided", 503, "admission_unavailable")} == {status for status in statuses if status[1] == 503}
    assert {400, 403, 404, 426, 431, 503} == {status for _, status, _ in statuses}
    assert [] == chain.seen
