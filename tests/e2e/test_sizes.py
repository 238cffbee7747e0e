"""Bodies of every size through the whole chain: the engine gets the bytes that were counted, or the client our 413.

The cap is the policy's `body_bytes_max`. Envoy reads a body to its end up to `Limits.buffer_bytes`, so a refusal
between the two reaches every client; above it, the answer comes while the client is still writing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio

from tests.e2e.mesh import CHAT, Mesh, mesh
from tests.e2e.raw import Reply, http1, http2
from tests.e2e.recorder import Recorder

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

KB, MB, MIB = 10**3, 10**6, 2**20
DEFAULT_CAP_BYTES = 4 * MIB
BIG_CAP_BYTES = 16 * MIB
PIECE_BYTES = 100_000

VERSIONS = pytest.mark.parametrize("http2_client", [False, True], ids=["HTTP/1.1", "HTTP/2"])
FRAMINGS = pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])


@dataclass(frozen=True)
class Chain:
    """The mesh and its recording engine."""

    mesh: Mesh
    engine: Recorder

    @property
    def cap_bytes(self) -> int:
        """Largest body that can be admitted."""
        return self.mesh.desk.policy.limits.body_bytes_max

    @property
    def buffer_bytes(self) -> int:
        """Largest body that is read to its end."""
        return self.mesh.desk.policy.limits.buffer_bytes

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of Envoy."""
        host, _, port = self.mesh.url.removeprefix("http://").partition(":")
        return host, int(port)


async def _chain(**limits: int) -> AsyncIterator[Chain]:
    async with Recorder() as engine:
        pools = {"chat": {"chat-0": {"address": engine.address}}, "docs": {"docs-0": {"address": "127.0.0.1:1"}}}
        async with mesh(pools=pools, limits=limits) as running:
            yield Chain(running, engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Chain]:
    """A chain with the default cap."""
    async for running in _chain():
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def big_chain() -> AsyncIterator[Chain]:
    """A chain that takes four times the default."""
    async for running in _chain(body_bytes_max=BIG_CAP_BYTES):
        yield running


def body_of(size_bytes: int, *, ceiling: bool = True) -> bytes:
    """A chat of a few tokens whose other fields fill it up to `size_bytes`."""
    head = b'{"model":"qwen3","messages":[{"role":"user","content":"hi"}],"metadata":{"pad":"'
    tail = b'"},"max_tokens":8}' if ceiling else b'"}}'
    return head + b"p" * (size_bytes - len(head) - len(tail)) + tail


async def _post(chain: Chain, body: bytes, *, http2_client: bool, sized: bool) -> httpx.Response:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]

    headers = {"content-type": "application/json"} | ({"content-length": str(len(body))} if sized else {})
    chain.engine.seen.clear()
    async with httpx.AsyncClient(http1=not http2_client, http2=http2_client, timeout=15) as client:
        answer = await client.post(chain.mesh.url + CHAT, content=pieces(), headers=headers)
    await chain.mesh.until_free()

    assert ("HTTP/2" if http2_client else "HTTP/1.1") == answer.http_version
    return answer


def _check_arrived(chain: Chain, body: bytes, answer: httpx.Response) -> None:
    (seen,) = chain.engine.seen

    assert (200, "interactive") == (answer.status_code, answer.headers["x-llm-lane"])
    assert hashlib.sha256(body).hexdigest() == hashlib.sha256(seen.body).hexdigest()


def _check_refused(chain: Chain, size_bytes: int, answer: httpx.Response) -> None:
    """Refused by tokenlane, which knows the size."""
    error = answer.json()["error"]

    assert (413, "body_too_large", "false") == (
        answer.status_code,
        answer.headers["x-llm-reason"],
        answer.headers["x-should-retry"],
    )
    assert f"request body is too large: {size_bytes} bytes > {chain.cap_bytes} maximum" == error["message"]
    assert (size_bytes, chain.cap_bytes) == (error["details"]["body_bytes"], error["details"]["body_bytes_max"])
    assert ([], 0) == (chain.engine.seen, chain.mesh.desk.intake_bytes)


@pytest.mark.parametrize(
    "size_bytes",
    [31 * KB, 33 * KB, MB, 3_900 * KB, 4_100 * KB, DEFAULT_CAP_BYTES],
    ids=["31 KB", "33 KB", "1 MB", "3.9 MB", "4.1 MB", "the cap"],
)
@FRAMINGS
@VERSIONS
async def test_within_the_cap(chain: Chain, http2_client: bool, sized: bool, size_bytes: int) -> None:
    """Up to the cap, to the byte, the engine gets what the client sent."""
    body = body_of(size_bytes)
    answer = await _post(chain, body, http2_client=http2_client, sized=sized)

    assert size_bytes == len(body)
    _check_arrived(chain, body, answer)


@pytest.mark.parametrize("size_bytes", [8 * MB, 16 * MB, BIG_CAP_BYTES], ids=["8 MB", "16 MB", "the cap"])
@FRAMINGS
@VERSIONS
async def test_within_a_big_cap(big_chain: Chain, http2_client: bool, sized: bool, size_bytes: int) -> None:
    """A policy may take more, and everything between client and engine follows it."""
    body = body_of(size_bytes)
    _check_arrived(big_chain, body, await _post(big_chain, body, http2_client=http2_client, sized=sized))


@VERSIONS
async def test_an_injected_ceiling_at_the_cap(big_chain: Chain, http2_client: bool) -> None:
    """A body at the cap still has room for the ceiling that is written into it."""
    body = body_of(BIG_CAP_BYTES, ceiling=False)
    answer = await _post(big_chain, body, http2_client=http2_client, sized=True)
    (seen,) = big_chain.engine.seen

    assert 200 == answer.status_code
    assert len(seen.body) > BIG_CAP_BYTES
    assert orjson.loads(body) | {"max_tokens": 1024} == orjson.loads(seen.body)


@pytest.mark.parametrize(
    "over", ["cap + 1", "5 MB", "8 MB", "2 * cap", "buffer"], ids=lambda text: text.replace(" ", "")
)
@FRAMINGS
@VERSIONS
async def test_over_the_cap(chain: Chain, http2_client: bool, sized: bool, over: str) -> None:
    """Over the cap, up to the last byte that Envoy can hold, the answer is tokenlane's own and says the sizes."""
    size_bytes = {
        "cap + 1": chain.cap_bytes + 1,
        "5 MB": 5 * MB,
        "8 MB": 8 * MB,
        "2 * cap": 2 * chain.cap_bytes,
        "buffer": chain.buffer_bytes,
    }[over]
    answer = await _post(chain, body_of(size_bytes), http2_client=http2_client, sized=sized)

    _check_refused(chain, size_bytes, answer)


@FRAMINGS
@VERSIONS
async def test_over_a_big_cap(big_chain: Chain, http2_client: bool, sized: bool) -> None:
    """Twice a big cap is refused in the same way: the largest message fits what the service takes."""
    size_bytes = 2 * big_chain.cap_bytes
    answer = await _post(big_chain, body_of(size_bytes), http2_client=http2_client, sized=sized)

    _check_refused(big_chain, size_bytes, answer)


def _chunks(body: bytes) -> bytes:
    pieces = (body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def _upload(chain: Chain, body: bytes, *, http2_client: bool, sized: bool) -> Reply:
    """The answer that a client reads which reads while it writes."""
    kind = ("content-type", "application/json")
    if http2_client:
        pseudo = [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "gateway")]
        length = [("content-length", str(len(body)))] if sized else []
        return await http2(chain.address, [*pseudo, kind, *length], body)
    framing = f"content-length: {len(body)}" if sized else "transfer-encoding: chunked"
    lines = [f"POST {CHAT} HTTP/1.1", "host: gateway", "connection: close", ": ".join(kind), framing, "", ""]
    head = "\r\n".join(lines).encode()
    (reply,) = await http1(chain.address, head, body if sized else _chunks(body))
    return reply


@pytest.mark.parametrize("times", [3, 5])
@FRAMINGS
@VERSIONS
async def test_over_the_buffer(chain: Chain, http2_client: bool, sized: bool, times: int) -> None:
    """Above what Envoy holds the answer comes early, and a client that reads while it writes gets it."""
    chain.engine.seen.clear()
    reply = await _upload(chain, body_of(times * chain.cap_bytes), http2_client=http2_client, sized=sized)

    assert (413, "body_too_large", "false") == (reply.status, reply.reason, reply.one("x-should-retry"))
    assert [] == chain.engine.seen
    await chain.mesh.until_free()


def _resident_bytes(pid: int | str) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@VERSIONS
async def test_refused_bodies_leave_no_memory(chain: Chain, http2_client: bool) -> None:
    """Round after round of large bodies that are refused: Envoy's memory does not grow, and nothing is held."""
    clients, body = 6, body_of(2 * chain.cap_bytes)
    resident = []
    for _ in range(4):
        replies = await asyncio.gather(
            *(_upload(chain, body, http2_client=http2_client, sized=True) for _ in range(clients))
        )
        resident.append(_resident_bytes(chain.mesh.envoy.pid))

        assert [(413, "body_too_large")] * clients == [(reply.status, reply.reason) for reply in replies]

    assert max(resident[2:]) - resident[1] < clients * len(body)
    assert (0, 0) == (chain.mesh.desk.streams, chain.mesh.desk.intake_bytes)
