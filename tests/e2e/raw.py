"""Clients that send exactly what a test says, over HTTP/1.1 and HTTP/2, and read whatever comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import orjson

ANSWER_S_MAX = 10.0
"""A client that waits longer has been left hanging."""

READ_BYTES = 2**16

Pairs = Sequence[tuple[str, str]]


@dataclass
class Reply:
    """One answer; header names are in lower case. `reset` is the error code of a stream that was reset."""

    status: int = 0
    headers: dict[str, list[str]] = field(default_factory=dict)
    body: bytes = b""
    reset: int | None = None

    def one(self, name: str) -> str | None:
        """The value of a header that must not be repeated."""
        values = self.headers.get(name, [])
        assert len(values) < 2, (name, values)
        return values[0] if values else None

    @property
    def reason(self) -> str | None:
        """Why the gateway refused; header and body must agree."""
        reason = self.one("x-llm-reason")
        if reason is not None and self.body:
            assert reason == self.document["error"]["code"]
        return reason

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return orjson.loads(self.body)


async def http1(address: tuple[str, int], *pieces: bytes, finish: bool = False) -> list[Reply]:
    """Every answer on one connection that gets `pieces`, until the other side closes it or says that it will.

    `finish` says that nothing more will come (half-close). TimeoutError when the connection stays open.
    """
    head_only = pieces[0].startswith(b"HEAD ")
    async with asyncio.timeout(ANSWER_S_MAX), _connection(address) as (reader, writer):
        received = asyncio.create_task(_until_closed(reader, head_only=head_only))
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if finish:
                writer.write_eof()
        return await received


@contextlib.asynccontextmanager
async def _connection(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _until_closed(reader: asyncio.StreamReader, *, head_only: bool) -> list[Reply]:
    data, replies = b"", list[Reply]()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(READ_BYTES):
            data += piece
            while (found := _answer(data, head_only=head_only)) is not None:
                reply, data = found
                replies.append(reply)
                if "close" in reply.headers.get("connection", []):
                    return replies
    assert data == b"", "the last answer is not complete"
    return replies


def _answer(data: bytes, *, head_only: bool) -> tuple[Reply, bytes] | None:
    """The first answer in `data` and what follows it; None as long as it is not complete."""
    head, complete, data = data.partition(b"\r\n\r\n")
    if not complete:
        return None
    first, *lines = head.decode(errors="replace").split("\r\n")
    reply = Reply(int(first.split(" ")[1]))
    for line in lines:
        name, _, value = line.partition(": ")
        reply.headers.setdefault(name.lower(), []).append(value)
    if reply.status < 200 or head_only:
        return reply, data
    if reply.one("transfer-encoding") != "chunked":
        size = int(reply.one("content-length") or 0)
        reply.body = data[:size]
        return None if len(reply.body) < size else (reply, data[size:])
    while b"\r\n" in data:
        chunk_size, _, data = data.partition(b"\r\n")
        size = int(chunk_size, 16)
        if len(data) < size + 2:
            return None
        reply.body, data = reply.body + data[:size], data[size + 2 :]
        if size == 0:
            return reply, data
    return None


async def http2(
    address: tuple[str, int], headers: Pairs, body: bytes | None = None, trailers: Pairs = (), *, finish: bool = True
) -> Reply:
    """The answer to one request over HTTP/2, read while the request is still being written.

    `headers` come with their pseudo-headers and go out as they are. A body of None ends the stream with the headers;
    with `finish` false the stream stays open after the body. TimeoutError when no answer comes to its end.
    """
    config = h2.config.H2Configuration(
        header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
    )
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    connection.send_headers(1, list(headers), end_stream=body is None and finish)
    upload = _Upload(connection, memoryview(body or b""), trailers, over=body is None or not (finish or body))
    reply, open_ = Reply(), True
    async with asyncio.timeout(ANSWER_S_MAX), _connection(address) as (reader, writer):
        while open_:
            upload.go_on(finish=finish)
            writer.write(connection.data_to_send())
            data = await reader.read(READ_BYTES)
            if not data:
                break
            for event in connection.receive_data(data):
                open_ = open_ and _take(event, reply, upload, connection)
    return reply


def _take(event: h2.events.Event, reply: Reply, upload: _Upload, connection: h2.connection.H2Connection) -> bool:
    """Keep what an event says; false when it is the last one."""
    match event:
        case h2.events.ResponseReceived(headers=list(pairs)):
            for name, value in pairs:
                reply.headers.setdefault(str(name), []).append(str(value))
            reply.status = int(reply.headers.pop(":status")[0])
        case h2.events.DataReceived(data=bytes(piece)):
            reply.body += piece
            connection.acknowledge_received_data(event.flow_controlled_length or 0, 1)
        case h2.events.StreamEnded():
            upload.over = True
            return False
        case h2.events.StreamReset(error_code=code):
            upload.over, reply.reset = True, int(code or 0)
            return False
        case h2.events.ConnectionTerminated(error_code=code):
            upload.over, reply.reset = True, int(code or 0)
            return False
    return True


@dataclass
class _Upload:
    connection: h2.connection.H2Connection
    rest: memoryview
    trailers: Pairs
    over: bool

    def go_on(self, *, finish: bool) -> None:
        """Write what the windows allow."""
        connection = self.connection
        while not self.over:
            size = min(len(self.rest), connection.local_flow_control_window(1), connection.max_outbound_frame_size)
            last = size == len(self.rest)
            if size == 0 and not last:
                return
            connection.send_data(1, self.rest[:size].tobytes(), end_stream=last and finish and not self.trailers)
            self.rest = self.rest[size:]
            if last:
                self.over = True
                if self.trailers:
                    connection.send_headers(1, list(self.trailers), end_stream=True)
