"""A client that leaves, in every phase of a request: its tokens are free within 100 ms, and ended once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from tests.e2e.mesh import CHAT, Mesh, chat, mesh, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUNDS = 12
FREE_WITHIN_S = 0.1

# Fits the bulk lane, and takes long enough that counting is still under way when the client leaves.
LONG_TEXT = "The harbour master counts every ship that leaves before dawn. " * 4_400
NUMBERS = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """One chain whose engine holds answers, for all tests of this module."""
    async with mesh(engine={"decode_tokens_per_s": 200}, options={"tokenizer_threads": 1}) as running:
        yield running


class _Client:
    """A raw HTTP/1.1 client that can leave at any byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, chain: Mesh) -> _Client:
        host, port = chain.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, body: dict[str, Any], *, part_bytes: int | None = None) -> None:
        data = orjson.dumps(body)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data[:part_bytes])
        await self.writer.drain()

    def leave(self) -> None:
        self.writer.transport.abort()


async def _gone(chain: Mesh) -> float:
    """Time until the service holds nothing of the request: no tokens, no stream, no intake."""
    desk = chain.desk
    return await until(lambda: not desk.ledger.open and desk.streams == 0 and desk.intake_bytes == 0)


async def _upload(chain: Mesh, client: _Client) -> None:
    await client.send(chat("x" * 10_000), part_bytes=5_000)
    await until(lambda: chain.desk.streams == 1)


async def _before_body(chain: Mesh, client: _Client) -> None:
    await client.send(chat("x" * 10_000), part_bytes=0)
    await until(lambda: chain.desk.streams == 1)


async def _tokenize(chain: Mesh, client: _Client) -> None:
    # What the last client left in the only thread is done first, so that it does not take the processor from Envoy.
    await asyncio.get_running_loop().run_in_executor(chain.server._counter._pool, int)
    # No two are alike, so that none is counted from memory.
    await client.send(chat(f"{next(NUMBERS)} {LONG_TEXT}"))
    await until(lambda: chain.desk.intake_bytes > 0)


async def _before_first_byte(chain: Mesh, client: _Client) -> None:
    await client.send(chat("hold"))
    await until(lambda: len(chain.desk.ledger.open) == 1)
    while (await chain.control("chat-0"))["running"] == 0:  # noqa: ASYNC110 (the engine is another process)
        await asyncio.sleep(0.001)


async def _mid_stream(chain: Mesh, client: _Client) -> None:
    await client.send(chat("stream", max_tokens=1000, stream=True))
    received = b""
    while b"data: " not in received:
        received += await asyncio.wait_for(client.reader.read(4096), 5)
    assert received.startswith(b"HTTP/1.1 200")
    assert 1 == len(chain.desk.ledger.open)


PHASES = {
    "uploading": (_upload, False),
    "between headers and body": (_before_body, False),
    "tokenizing": (_tokenize, False),
    "admitted, before the first byte": (_before_first_byte, True),
    "mid-stream": (_mid_stream, True),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_leaving(chain: Mesh, phase: str) -> None:
    """Whenever the client leaves, the reservation ends once and nothing is held 100 ms later."""
    reach, reserved = PHASES[phase]
    await chain.control("chat-0", hold=phase == "admitted, before the first byte")
    before = chain.ended()
    delays = []
    for _ in range(ROUNDS):
        client = await _Client.connect(chain)
        await reach(chain, client)
        client.leave()
        delays.append(await _gone(chain))
    await chain.control("chat-0", hold=False)
    ended = {ending: count - before[ending] for ending, count in chain.ended().items()}

    assert max(delays) < FREE_WITHIN_S
    assert {"settled": ROUNDS if reserved else 0, "released": 0, "expired": 0} == ended


async def test_many_leave_at_once(chain: Mesh) -> None:
    """Sixty clients in all phases leave together; the service is empty 100 ms later and serves the next."""
    clients = [await _Client.connect(chain) for _ in range(60)]
    for number, client in enumerate(clients):
        if number % 3 == 0:
            await client.send(chat("x" * 10_000), part_bytes=5_000)
        elif number % 3 == 1:
            await client.send(chat("stream", max_tokens=1000, stream=True))
        else:
            await client.send(chat("whole", max_tokens=1000))
    await until(lambda: len(chain.desk.ledger.open) == 40)
    for client in clients:
        client.leave()

    assert await _gone(chain) < FREE_WITHIN_S
    async with chain.post(chat("next")) as response:
        assert 200 == response.status
    await chain.until_free()
