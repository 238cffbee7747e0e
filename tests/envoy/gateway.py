"""A real Envoy between a test client, two engines and a scripted ext_proc service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc.aio
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2

from extproc.core.policy import Policy
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.envoy_config import Addresses, bootstrap
from extproc.settings import PolicySection, freeze

ENGINES = ("engine-0", "engine-1")
BODY_BYTES_MAX = 200_000

Verdict = Callable[[Mapping[str, str], bytes], pb.ProcessingResponse]


def make_policy(
    addresses: Iterable[str] = ("127.0.0.1:8100", "127.0.0.1:8101"),
    limits: Mapping[str, object] | None = None,
    **sections: object,
) -> Policy:
    """A policy with one pool `chat` of the given replicas; `limits` and whole sections can be replaced."""
    replicas = {
        name: {"address": address, "gross_tokens": 96_000} for name, address in zip(ENGINES, addresses, strict=False)
    }
    document = {
        "version": "p1",
        "limits": {"body_bytes_max": BODY_BYTES_MAX, **(limits or {})},
        "pools": {"chat": {"replicas": replicas}},
        "models": {"m": make_model(interactive="chat")},
        **sections,
    }
    return freeze(PolicySection.model_validate(document), base=Path())


def make_model(**pools: str) -> dict[str, object]:
    """The section of a model whose lanes run on the given pools."""
    limits: dict[str, dict[str, object]] = {
        "interactive": {},
        "bulk": {"input_tokens_max": 8000, "total_tokens_max": 9000},
    }
    lanes = {lane: {"pool": pool, **limits[lane]} for lane, pool in pools.items()}
    return {"tokenizer_dir": "t", "context_tokens_max": 32_768, "lanes": lanes}


def admit(lane: str, pool: str, destination: str | None = None) -> pb.CommonResponse:
    """The common part of an admission: routing headers, and a new look at the route table."""
    headers = {"x-llm-lane": lane, "x-llm-pool": pool}
    if destination is not None:
        headers["x-gateway-destination-endpoint"] = destination
    response = pb.CommonResponse(clear_route_cache=True)
    for key, value in headers.items():
        option = response.header_mutation.set_headers.add()
        option.header.key, option.header.raw_value = key, value.encode()
    return response


def in_body(common: pb.CommonResponse, **metadata: str | int) -> pb.ProcessingResponse:
    """An admission as the reply to the body message, with dynamic metadata."""
    response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
    response.dynamic_metadata.update({"llm.admission": metadata})
    return response


def in_headers(common: pb.CommonResponse) -> pb.ProcessingResponse:
    """An admission as the reply to the header message."""
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))


def refuse(status: int, body: str, reason: str | None, **headers: str) -> pb.ProcessingResponse:
    """An ImmediateResponse; `reason` goes into the metadata."""
    response = pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(status=http_status_pb2.HttpStatus(code=status), body=body.encode())
    )
    for key, value in headers.items():
        option = response.immediate_response.headers.set_headers.add()
        option.header.key, option.header.raw_value = key.replace("_", "-"), value.encode()
    if reason is not None:
        response.dynamic_metadata.update({"llm.admission": {"reason": reason}})
    return response


@dataclass
class Service:
    """An ext_proc service that answers with `verdict` and keeps what it saw."""

    verdict: Verdict
    seen: list[dict[str, str]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, address: str) -> grpc.aio.Server:
        """A started server at `address`."""
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8 * 2**20)])
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        name = "envoy.service.ext_proc.v3.ExternalProcessor"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Process": handler}),))
        server.add_insecure_port(address)
        await server.start()
        return server

    async def _process(
        self, requests: AsyncIterator[pb.ProcessingRequest], _context: object
    ) -> AsyncIterator[pb.ProcessingResponse]:
        try:
            async for reply in self._replies(requests):
                yield reply
        finally:
            self.ended.set()

    async def _replies(self, requests: AsyncIterator[pb.ProcessingRequest]) -> AsyncIterator[pb.ProcessingResponse]:
        headers: dict[str, str] = {}
        async for message in requests:
            match message.WhichOneof("request"):
                case "request_headers":
                    headers = {h.key: h.raw_value.decode() for h in message.request_headers.headers.headers}
                    self.seen.append(headers)
                    ended = message.request_headers.end_of_stream
                    nothing = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
                    yield self.verdict(headers, b"") if ended else nothing
                case "request_body":
                    if self.hold is not None:
                        await self.hold.wait()
                    yield self.verdict(headers, message.request_body.body)
                case _:
                    yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


NAME: web.AppKey[str] = web.AppKey("name", str)


async def echo(request: web.Request) -> web.StreamResponse:
    """An engine that says what it got, and tries to speak for the gateway."""
    body = await request.read()
    answer = {"engine": request.app[NAME], "headers": dict(request.headers), "bytes": len(body), "path": request.path}
    spoofed = {"x-llm-replica": "spoofed", "x-llm-lane": "spoofed", "x-llm-input-tokens": "1", "x-llm-other": "spoofed"}
    return web.json_response(answer, headers=spoofed)


@dataclass
class Gateway:
    """Envoy and everything around it; `async with` starts what is not None."""

    service: Service | None = None
    engine: Callable[[web.Request], Any] = echo
    limits: Mapping[str, object] = field(default_factory=dict)
    engines_up: tuple[bool, bool] = (True, True)
    socket_dir: Path | None = None

    def __post_init__(self) -> None:
        listen, admin, tokenlane, *engines = free_ports(5)
        self.engine_addresses = [f"127.0.0.1:{port}" for port in engines]
        self.url = f"http://127.0.0.1:{listen}"
        self.port = listen
        self.tokenlane = f"unix:{self.socket_dir}/ext_proc.sock" if self.socket_dir else f"127.0.0.1:{tokenlane}"
        self.policy = make_policy(
            self.engine_addresses,
            self.limits,
            bypass=[{"path": "/v1/models", "pool": "chat"}],
        )
        self.config = bootstrap(
            self.policy,
            Addresses(listen=f"127.0.0.1:{listen}", admin=f"127.0.0.1:{admin}", tokenlane=self.tokenlane),
        )
        self.envoy = EnvoyProcess(self.config)
        self.server: grpc.aio.Server | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for name, address, up in zip(ENGINES, self.engine_addresses, self.engines_up, strict=True):
                if up:
                    await self._start_engine(stack, name, address)
            if self.service is not None:
                self.server = await self.service.serve(self.tokenlane)
                stack.push_async_callback(self.server.stop, None)
            stack.enter_context(self.envoy)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._stack.aclose()

    async def _start_engine(self, stack: AsyncExitStack, name: str, address: str) -> None:
        app = web.Application(client_max_size=16 * 2**20)
        app[NAME] = name
        app.router.add_route("*", "/{tail:.*}", self.engine)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()

    async def raw(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send bytes that no client library would; the answer is read to its content-length."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
        finally:
            writer.close()
            await writer.wait_closed()
        return int(head[0].split(" ")[1]), headers, body
