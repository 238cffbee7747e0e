"""An engine in the test's own loop whose answers a test decides, one request at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

BODY_BYTES_MAX = 16 * 2**20


@dataclass(frozen=True)
class Reply:
    """What is answered; status None hangs up without an answer."""

    status: int | None = 200
    body: bytes = b'{"object":"scripted"}'
    headers: Mapping[str, str] = field(default_factory=dict)


class Scripted:
    """Answers the requests for generation with `replies` in turn, the last one for ever; keeps their bodies."""

    def __init__(self) -> None:
        self.replies = [Reply()]
        self.bodies: list[bytes] = []
        self.port = 0

    @property
    def address(self) -> str:
        """`IP:port` of this engine."""
        return f"127.0.0.1:{self.port}"

    def script(self, *replies: Reply) -> None:
        """Forget what came, and answer with these from now on."""
        self.replies, self.bodies = list(replies), []

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(web.Server(self._answer))
        await self._runner.setup()
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _listen(self) -> None:
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """Close every connection and refuse new ones."""
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.method == "POST":
            request._client_max_size = BODY_BYTES_MAX
            self.bodies.append(await request.read())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply.status is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
