"""Every HTTP version and framing, on both sides: the engine gets the body that was counted, the client its stream.

Pool `chat` speaks HTTP/1.1 to its engine, pool `docs` HTTP/2. A client chooses by its intent.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import orjson
import pytest
import pytest_asyncio

from tests.e2e.mesh import CHAT, COMPLETIONS, Mesh, mesh
from tests.e2e.recorder import FIRST_EVENT, LAST_EVENT, Recorder, Seen

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

SIZES_BYTES = {"1 KB": 1_000, "40 KB": 40_000, "1 MB": 1_000_000, "3.9 MB": 3_900_000}
PIECE_BYTES = 100_000
DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class Chain:
    """The mesh and its engines."""

    mesh: Mesh
    http1: Recorder
    http2: Recorder

    def engine(self, *, http2: bool) -> Recorder:
        """The engine that speaks this version, having seen nothing."""
        chosen = self.http2 if http2 else self.http1
        chosen.seen.clear()
        chosen.gate.clear()
        return chosen

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of Envoy."""
        host, _, port = self.mesh.url.removeprefix("http://").partition(":")
        return host, int(port)


def _speak_http2(config: dict[str, Any]) -> None:
    """Let Envoy speak HTTP/2 to pool `docs`, as an operator may choose."""
    (docs,) = (cluster for cluster in config["static_resources"]["clusters"] if cluster["name"] == "docs")
    (options,) = docs["typed_extension_protocol_options"].values()
    options["explicit_http_config"] = {"http2_protocol_options": {}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Chain]:
    """One chain in front of two recording engines."""
    async with Recorder() as http1, Recorder() as http2:
        pools = {"chat": {"chat-0": {"address": http1.address}}, "docs": {"docs-0": {"address": http2.address}}}
        async with mesh(pools=pools, tune=_speak_http2) as running:
            yield Chain(running, http1, http2)


def _body(size_bytes: int, *, ceiling: bool) -> bytes:
    """A chat of a few tokens in `size_bytes`, laid out as no serialiser would."""
    head = b'{ "model" :"qwen3",\n\t"messages":[{"role":"user","content":"\\u00e9t\xc3\xa9"}] , "temperature": 1.0'
    head += b' ,"max_tokens" : 16' if ceiling else b""
    head += b',"user":"'
    return head + b"u" * (size_bytes - len(head) - 3) + b'" }'


def _headers(*, http2: bool) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"x-request-intent": "bulk"} if http2 else {})


def _checked(engine: Recorder, sent: bytes, *, http2: bool, sized: bool, ceiling: bool) -> Seen:
    """The one request that the engine got; it holds the body that was sent, and at most a ceiling besides.

    A body that is sent on as it came keeps its framing; a changed one has a length.
    """
    (seen,) = engine.seen

    assert (http2, "POST", CHAT) == (seen.http2, seen.method, seen.path)
    has_length = sized or not ceiling
    assert ([str(len(seen.body))] if has_length else []) == seen.all("content-length")
    assert ([] if has_length or http2 else ["chunked"]) == seen.all("transfer-encoding")
    if ceiling:
        assert hashlib.sha256(sent).hexdigest() == hashlib.sha256(seen.body).hexdigest()
    else:
        assert orjson.loads(sent) | {"max_tokens": DEFAULT_TOKENS} == orjson.loads(seen.body)
    return seen


@pytest.mark.parametrize("ceiling", [True, False], ids=["own ceiling", "injected ceiling"])
@pytest.mark.parametrize("size_bytes", SIZES_BYTES.values(), ids=SIZES_BYTES.keys())
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("to_http2", [False, True], ids=["to HTTP/1.1", "to HTTP/2"])
@pytest.mark.parametrize("from_http2", [False, True], ids=["from HTTP/1.1", "from HTTP/2"])
async def test_the_engine_gets_what_was_counted(
    chain: Chain, *, from_http2: bool, to_http2: bool, sized: bool, size_bytes: int, ceiling: bool
) -> None:
    """A body arrives byte for byte, or with nothing but the ceiling added, and its length is said right."""
    engine = chain.engine(http2=to_http2)
    body = _body(size_bytes, ceiling=ceiling)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]

    async with httpx.AsyncClient(http1=not from_http2, http2=from_http2) as client:
        answer = await client.post(
            chain.mesh.url + CHAT, content=body if sized else pieces(), headers=_headers(http2=to_http2)
        )

    assert size_bytes == len(body)
    assert ("HTTP/2" if from_http2 else "HTTP/1.1", 200) == (answer.http_version, answer.status_code)
    assert ("bulk" if to_http2 else "interactive") == answer.headers["x-llm-lane"]
    _checked(engine, body, http2=to_http2, sized=sized, ceiling=ceiling)
    await chain.mesh.until_free()


@pytest.mark.parametrize("ceiling", [True, False], ids=["own ceiling", "injected ceiling"])
@pytest.mark.parametrize("to_http2", [False, True], ids=["to HTTP/1.1", "to HTTP/2"])
async def test_a_compressed_body_arrives_decoded(chain: Chain, *, to_http2: bool, ceiling: bool) -> None:
    """Engines read no compressed bodies: they get the decoded one, with its length and without an encoding."""
    engine = chain.engine(http2=to_http2)
    body = _body(5_000, ceiling=ceiling)
    headers = {**_headers(http2=to_http2), "content-encoding": "gzip"}
    async with httpx.AsyncClient() as client:
        answer = await client.post(chain.mesh.url + CHAT, content=gzip.compress(body), headers=headers)
    seen = _checked(engine, body, http2=to_http2, sized=True, ceiling=ceiling)
    await chain.mesh.until_free()

    assert (200, []) == (answer.status_code, seen.all("content-encoding"))


@pytest.mark.parametrize("to_http2", [False, True], ids=["to HTTP/1.1", "to HTTP/2"])
@pytest.mark.parametrize("from_http2", [False, True], ids=["from HTTP/1.1", "from HTTP/2"])
async def test_a_stream_is_not_buffered(chain: Chain, from_http2: bool, to_http2: bool) -> None:
    """The client reads the first event before the engine has written the last, and the tokens are held until then."""
    engine = chain.engine(http2=to_http2)
    async with (
        httpx.AsyncClient(http1=not from_http2, http2=from_http2) as client,
        client.stream(
            "POST",
            chain.mesh.url + COMPLETIONS,
            content=b'{"model":"qwen3","prompt":[1,2,3],"max_tokens":5,"stream":true}',
            headers=_headers(http2=to_http2),
        ) as answer,
    ):
        events = answer.aiter_raw()
        first = await anext(events)
        reserved_tokens = chain.mesh.reserved_tokens
        engine.gate.set()
        rest = b"".join([piece async for piece in events])

    assert (FIRST_EVENT, LAST_EVENT) == (first, rest)
    assert ("text/event-stream", 8) == (answer.headers["content-type"], reserved_tokens)
    await chain.mesh.until_free()


@dataclass
class Reply:
    """An answer over a raw HTTP/2 connection."""

    headers: dict[str, str]
    body: bytes = b""
    ended: bool = False


async def _http2(chain: Chain, headers: dict[str, str], body: bytes, trailers: dict[str, str]) -> Reply:
    """One request over HTTP/2 whose trailers follow its body."""
    reader, writer = await asyncio.open_connection(*chain.address)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    pseudo = {":method": "POST", ":path": CHAT, ":scheme": "http", ":authority": "gateway"}
    connection.send_headers(1, list((pseudo | headers).items()))
    rest, ended = memoryview(body), False
    reply = Reply({})
    while not reply.ended:
        while rest and (window := min(connection.local_flow_control_window(1), connection.max_outbound_frame_size)):
            connection.send_data(1, rest[:window].tobytes())
            rest = rest[window:]
        if not rest and not ended:
            connection.send_headers(1, list(trailers.items()), end_stream=True)
            ended = True
        writer.write(connection.data_to_send())
        await writer.drain()
        data = await reader.read(2**16)
        assert data, "the connection ended before its answer"
        for event in connection.receive_data(data):
            match event:
                case h2.events.ResponseReceived(headers=list(pairs)):
                    reply.headers = {str(name): str(value) for name, value in pairs}
                case h2.events.DataReceived(data=bytes(piece)):
                    reply.body += piece
                case h2.events.StreamEnded() | h2.events.StreamReset():
                    reply.ended = True
    writer.close()
    await writer.wait_closed()
    return reply


@pytest.mark.parametrize("ceiling", [True, False], ids=["own ceiling", "injected ceiling"])
@pytest.mark.parametrize("size_bytes", SIZES_BYTES.values(), ids=SIZES_BYTES.keys())
@pytest.mark.parametrize("to_http2", [False, True], ids=["to HTTP/1.1", "to HTTP/2"])
async def test_trailers_follow_a_body(chain: Chain, to_http2: bool, size_bytes: int, ceiling: bool) -> None:
    """A body that does not end its stream, because trailers follow, is decided like any other."""
    engine = chain.engine(http2=to_http2)
    body = _body(size_bytes, ceiling=ceiling)
    reply = await _http2(chain, _headers(http2=to_http2), body, {"x-checksum": "1"})

    assert ("200", "bulk" if to_http2 else "interactive") == (reply.headers[":status"], reply.headers["x-llm-lane"])
    _checked(engine, body, http2=to_http2, sized=False, ceiling=ceiling)
    await chain.mesh.until_free()


async def _raw_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    return status, dict(line.lower().split(": ", 1) for line in lines)


@pytest.mark.parametrize("size_bytes", SIZES_BYTES.values(), ids=SIZES_BYTES.keys())
async def test_expect_continue(chain: Chain, size_bytes: int) -> None:
    """A client that waits for 100 is told to go on, and the engine gets its body."""
    engine = chain.engine(http2=False)
    body = _body(size_bytes, ceiling=True)
    reader, writer = await asyncio.open_connection(*chain.address)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"expect: 100-continue\r\n\r\n")
    going_on, _ = await _raw_head(reader)
    writer.write(body)
    status, headers = await _raw_head(reader)
    writer.close()
    await writer.wait_closed()

    assert ("HTTP/1.1 100 Continue", "HTTP/1.1 200 OK") == (going_on, status)
    assert "interactive" == headers["x-llm-lane"]
    seen = _checked(engine, body, http2=False, sized=True, ceiling=True)
    assert [] == seen.all("expect")
    await chain.mesh.until_free()


async def test_http_1_0_is_refused(chain: Chain) -> None:
    """HTTP/1.0 is not spoken here: the client is told so in the contract's shape, and no engine is asked."""
    engine = chain.engine(http2=False)
    body = _body(1000, ceiling=True)
    reader, writer = await asyncio.open_connection(*chain.address)
    head = f"POST {CHAT} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status, headers = await _raw_head(reader)
    answer = orjson.loads(await reader.readexactly(int(headers["content-length"])))
    writer.close()
    await writer.wait_closed()

    assert "426" == status.split(" ")[1]
    assert ("malformed_request", "false") == (headers["x-llm-reason"], headers["x-should-retry"])
    assert ("malformed_request", None) == (answer["error"]["code"], answer["request_id"])
    assert [] == engine.seen
