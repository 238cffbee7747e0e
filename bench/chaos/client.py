"""A client over plain sockets, which can go away at any byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11

from bench.chaos.requests import request
from bench.chaos.schedule import Leaving, Shot
from bench.chaos.verdict import Outcome

ANSWER_S_MAX = 60.0
"""Longer than any response may take; then the answer counts as broken."""

READ_BYTES = 2**16


async def fire(shot: Shot, envoy: str, port: int, now_s: Callable[[], float]) -> Outcome:
    """Send the request of `shot` to the Envoy at `port`, and say what came of it."""
    data = request(shot)
    began_s = now_s()
    reading = _Reading(shot)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if shot.leave is not None and shot.leave.where is Leaving.UPLOADING:
                writer.write(data[: len(data) * shot.leave.at // 1_000_000])
                await writer.drain()
                # Let what was sent arrive; an abort at once would take it back.
                await asyncio.sleep(shot.leave.at % 50 / 1000)
                reading.left = True
            else:
                writer.write(data)
                await reading.all_of(reader)
    except (OSError, TimeoutError, h11.RemoteProtocolError):
        pass  # the outcome says how far it came
    finally:
        if writer is not None:
            writer.transport.abort()
    return Outcome(
        envoy,
        began_s,
        now_s(),
        reading.status,
        reading.headers,
        bytes(reading.body),
        whole=reading.whole,
        left=reading.left,
    )


class _Reading:
    """The state of an answer as it comes in."""

    def __init__(self, shot: Shot) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.whole = False
        self.left = False
        leave = shot.leave
        self._leave_at_bytes = None if leave is None or leave.where is Leaving.UPLOADING else leave.at
        self._method = "GET" if shot.kind == "bypass" else "POST"

    async def all_of(self, reader: asyncio.StreamReader) -> None:
        """Read until the message ends, breaks, or the client has enough."""
        connection = h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method=self._method, target="/", headers=[("host", "x"), ("connection", "close")]))
        connection.send(h11.EndOfMessage())
        received_bytes = 0
        while not (self.whole or self.left):
            limit = READ_BYTES if self._leave_at_bytes is None else self._leave_at_bytes - received_bytes
            data = await reader.read(min(READ_BYTES, limit))
            received_bytes += len(data)
            connection.receive_data(data)
            while self._take(connection.next_event()):
                pass
            self.left = received_bytes == self._leave_at_bytes and not self.whole

    def _take(self, event: object) -> bool:
        """Keep one event; False when more bytes are needed or no more come."""
        match event:
            case h11.Response():
                self.status = event.status_code
                self.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            case h11.Data():
                self.body += event.data
            case h11.EndOfMessage():
                self.whole = True
                return False
            case h11.InformationalResponse():
                pass
            case h11.ConnectionClosed():
                raise ConnectionResetError
            case _:
                return False
        return True
