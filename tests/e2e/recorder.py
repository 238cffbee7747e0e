"""An engine in the test's own loop that keeps what it receives, byte for byte, over HTTP/1.1 and HTTP/2 on one port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings
import h11

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
READ_BYTES = 2**16
WINDOW_BYTES = 2**24

FIRST_EVENT = b'data: {"choices":[{"text":"first"}]}\n\n'
LAST_EVENT = b"data: [DONE]\n\n"

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Seen:
    """One request as it arrived; header names are in lower case, and pseudo-headers are not among them."""

    http2: bool
    method: str
    path: str
    headers: Headers
    body: bytes

    def all(self, name: str) -> list[str]:
        """Every value of one header."""
        return [value for key, value in self.headers if key == name]

    @property
    def names(self) -> set[str]:
        """Names of all headers."""
        return {key for key, _ in self.headers}


class Recorder:
    """Answers 200 to everything; a body that asks for a stream gets its last event once `gate` is set.

    `headers` are added to every answer. Health checks are not kept.
    """

    def __init__(self, *headers: tuple[str, str]) -> None:
        self.seen: list[Seen] = []
        self.gate = asyncio.Event()
        self.port = 0
        self._headers = headers
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """`IP:port` of this engine."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            data = await reader.read(READ_BYTES)
            serve = self._serve_http2 if PREFACE.startswith(data[: len(PREFACE)]) else self._serve_http1
            await serve(reader, writer, data)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the other side has gone, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()

    def _keep(self, seen: Seen) -> None:
        if seen.path != "/health":
            self.seen.append(seen)

    def _answer_headers(self, seen: Seen) -> list[tuple[str, str]]:
        kind = "text/event-stream" if _streams(seen) else "application/json"
        return [("content-type", kind), *self._headers]

    async def _answer(self, seen: Seen) -> AsyncIterator[bytes]:
        if not _streams(seen):
            yield b'{"object":"recorded"}'
            return
        yield FIRST_EVENT
        await self.gate.wait()
        yield LAST_EVENT

    async def _serve_http1(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(data)
        request, body = None, bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                request, body = event, bytearray()
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                headers = tuple((name.decode(), value.decode(errors="replace")) for name, value in request.headers)
                seen = Seen(False, request.method.decode(), request.target.decode(), headers, bytes(body))
                self._keep(seen)
                writer.write(connection.send(h11.Response(status_code=200, headers=self._answer_headers(seen))) or b"")
                async for piece in self._answer(seen):
                    writer.write(connection.send(h11.Data(piece)) or b"")
                    await writer.drain()
                writer.write(connection.send(h11.EndOfMessage()) or b"")
                if connection.our_state is not h11.DONE:
                    return
                connection.start_next_cycle()
            else:
                return

    async def _serve_http2(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        connection.increment_flow_control_window(WINDOW_BYTES)
        requests: dict[int, Headers] = {}
        bodies: dict[int, bytearray] = {}
        async with asyncio.TaskGroup() as answers:
            while data:
                for event in connection.receive_data(data):
                    match event:
                        case h2.events.RequestReceived(stream_id=int(stream), headers=list(pairs)):
                            requests[stream] = tuple((str(name), str(value)) for name, value in pairs)
                            bodies[stream] = bytearray()
                        case h2.events.DataReceived(stream_id=int(stream), data=bytes(piece)):
                            bodies[stream] += piece
                            connection.acknowledge_received_data(event.flow_controlled_length or 0, stream)
                        case h2.events.StreamEnded(stream_id=int(stream)):
                            seen = _seen(requests.pop(stream), bytes(bodies.pop(stream)))
                            self._keep(seen)
                            answers.create_task(self._answer_http2(connection, writer, stream, seen))
                writer.write(connection.data_to_send())
                await writer.drain()
                data = await reader.read(READ_BYTES)

    async def _answer_http2(
        self, connection: h2.connection.H2Connection, writer: asyncio.StreamWriter, stream: int, seen: Seen
    ) -> None:
        connection.send_headers(stream, [(":status", "200"), *self._answer_headers(seen)])
        async for piece in self._answer(seen):
            connection.send_data(stream, piece)
            writer.write(connection.data_to_send())
        connection.end_stream(stream)
        writer.write(connection.data_to_send())
        with contextlib.suppress(ConnectionError):
            await writer.drain()


def _seen(pairs: Headers, body: bytes) -> Seen:
    pseudo = dict(pair for pair in pairs if pair[0].startswith(":"))
    headers = tuple(pair for pair in pairs if not pair[0].startswith(":"))
    return Seen(True, pseudo[":method"], pseudo[":path"], headers, body)


def _streams(seen: Seen) -> bool:
    return b'"stream":true' in seen.body.replace(b" ", b"")
