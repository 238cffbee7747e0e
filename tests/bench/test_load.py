"""The load generator against a tiny server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import cycle, repeat

import pytest

from bench.load import Expected, Load, LoadError, request

OK = Expected(200, b"x-mark: yes")
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-mark: yes\r\n\r\nhello"


def same() -> Iterator[bytes]:
    """One request, again and again."""
    return repeat(request("/", b"a"))


Answers = Callable[[int, bytes], list[bytes]]
"""Number of the request on this server and its body to the pieces of the answer."""


class Served:
    """A server that answers with prepared pieces."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.bodies: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                for piece in self.answers(len(self.bodies), self.bodies[-1]):
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def served(answers: Answers) -> AsyncIterator[Served]:
    """A listening server."""
    state = Served(answers)
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    async with server:
        yield state


async def test_each_answer_is_one_latency() -> None:
    """A run returns one latency for each request that it made."""
    async with served(lambda _number, _body: [ANSWER]) as server, Load(server.port, 3, OK) as load:
        latencies_ns = await load.run(same(), seconds=0.05)
        again_ns = await load.run(same(), seconds=0)

    assert 3 == len(again_ns)
    assert len(server.bodies) == len(latencies_ns) + len(again_ns)
    assert all(latency_ns > 0 for latency_ns in latencies_ns)


async def test_turns_are_a_minimum() -> None:
    """Past the deadline each connection still makes the demanded turns, and no more."""
    async with served(lambda _number, _body: [ANSWER]) as server, Load(server.port, 2, OK) as load:
        latencies_ns = await load.run(same(), seconds=0, turns_min=3)

    assert 6 == len(latencies_ns)


async def test_requests_take_turns() -> None:
    """The requests are sent one after the other, whichever connection sends them."""
    bodies = [b"a", b"bb", b"ccc"]
    async with served(lambda _number, _body: [ANSWER]) as server, Load(server.port, 1, OK) as load:
        await load.run(cycle(request("/", body) for body in bodies), seconds=0, turns_min=4)

    assert [b"a", b"bb", b"ccc", b"a"] == server.bodies


async def test_an_answer_in_pieces() -> None:
    """An answer is complete when its content-length is, however it was cut on the way."""
    pieces = [ANSWER[index : index + 1] for index in range(len(ANSWER))]
    async with served(lambda _number, _body: pieces) as server, Load(server.port, 1, OK) as load:
        answer = await load.ask(request("/", b"a"))

    assert (200, "yes", b"hello") == (answer.status, answer.headers["x-mark"], answer.body)


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER.replace(b"200", b"503"),
        ANSWER.replace(b"x-mark: yes", b"x-mark: no"),
        ANSWER.replace(b"Content-Length: 5", b"Connection: close"),
        ANSWER + b"more",
        b"",
    ],
    ids=["status", "marker", "no length", "surplus", "closed"],
)
async def test_a_wrong_answer_ends_the_run(answer: bytes) -> None:
    """The first answer that is not the expected one fails the run, however many were right."""
    async with (
        served(lambda number, _body: [answer if number == 3 else ANSWER]) as server,
        Load(server.port, 1, OK) as load,
    ):
        with pytest.raises(LoadError):
            await load.run(same(), seconds=30)

    assert 3 == len(server.bodies)
