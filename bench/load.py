"""Closed-loop load over HTTP/1.1 keep-alive connections, cheap enough not to be what is measured.

Requests are prepared bytes, connections are bare protocols without a task each, and a response is cut by its
content-length. Every response is checked: a fast wrong answer is no result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

ANSWER_S_MAX = 120
"""An answer that takes longer never comes."""

_HEAD_END = b"\r\n\r\n"


class LoadError(Exception):
    """A response was not the expected one, or did not come."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every response must be: its status, and bytes that its head or body holds."""

    status: int
    marker: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete response; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def request(path: str, body: bytes, host: str = "bench") -> bytes:
    """A POST of JSON as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One connection with at most one request under way."""

    def __init__(self, expected: Expected) -> None:
        self.latencies_ns: list[int] = []
        self.response = b""
        self._expected = expected
        self._received = bytearray()
        self._length = 0
        self._requests: Iterator[bytes] = iter(())
        self._deadline_ns = 0
        self._turns = 0
        self._sent_ns = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports have the methods but not the class.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for a response waits in vain."""
        self._fail(f"the connection was closed ({exc})")

    def start(self, requests: Iterator[bytes], deadline_ns: int, turns_min: int) -> asyncio.Future[None]:
        """Send one request after the other until the deadline and for at least `turns_min` turns.

        The future is done when the last response is complete. `deadline_ns` is on the clock of perf_counter_ns.
        """
        self._requests, self._deadline_ns, self._turns = requests, deadline_ns, turns_min
        self._done = asyncio.get_running_loop().create_future()
        self._send()
        return self._done

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    def _send(self) -> None:
        data = next(self._requests)
        self._turns -= 1
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Collect a response; check it and go on when it is complete."""
        received = self._received
        received += data
        if not self._length:
            head_end = received.find(_HEAD_END)
            if head_end < 0:
                return
            try:
                self._length = head_end + len(_HEAD_END) + _content_length(bytes(received[:head_end]))
            except LoadError as error:
                self._fail(str(error))
                return
        if len(received) >= self._length:
            self._complete(time.perf_counter_ns())

    def _complete(self, now_ns: int) -> None:
        response = self.response = bytes(self._received)
        surplus = len(response) - self._length
        self._received.clear()
        self._length = 0
        expected = self._expected
        if surplus or self._done is None:
            self._fail("more was received than one response")
        elif int(response[9:12]) != expected.status or expected.marker not in response:
            self._fail(f"not the expected response: {response[:800].decode('latin-1')}")
        else:
            self.latencies_ns.append(now_ns - self._sent_ns)
            if now_ns < self._deadline_ns or self._turns > 0:
                self._send()
            elif not self._done.done():
                self._done.set_result(None)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LoadError(message))


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise LoadError("a response without content-length")


class Load:
    """`count` connections to one port; an asynchronous context manager."""

    def __init__(self, port: int, count: int, expected: Expected) -> None:
        self._port = port
        self._connections = [Connection(expected) for _ in range(count)]

    async def __aenter__(self) -> Self:
        for connection in self._connections:
            await self._connect(connection)
        return self

    async def _connect(self, connection: Connection) -> None:
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", self._port)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()

    async def run(self, requests: Iterator[bytes], seconds: float, turns_min: int = 1) -> list[int]:
        """Keep all connections busy for `seconds`; latencies in ns, in no order. LoadError at the first wrong answer.

        Connections take `requests` as they need them, so they must not end. Each connection has at least `turns_min`
        answers, however long that takes.
        """
        deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
        runs = [connection.start(requests, deadline_ns, turns_min) for connection in self._connections]
        try:
            async with asyncio.timeout(seconds + turns_min * ANSWER_S_MAX):
                await asyncio.gather(*runs)
        except TimeoutError:
            raise LoadError("an answer did not come") from None
        latencies_ns: list[int] = []
        for connection in self._connections:
            latencies_ns += connection.latencies_ns
            connection.latencies_ns = []
        return latencies_ns

    async def ask(self, data: bytes) -> Answer:
        """Send one request over the first connection and read its answer."""
        connection = self._connections[0]
        await asyncio.wait_for(connection.start(iter((data,)), 0, 1), ANSWER_S_MAX)
        connection.latencies_ns = []
        return _answer(connection.response)


def _answer(response: bytes) -> Answer:
    head, _, body = response.partition(_HEAD_END)
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Answer(int(status.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}, body)
