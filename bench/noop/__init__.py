"""The floor: an ext_proc server on the same gRPC stack that decides nothing.

    python -m bench.noop --listen 127.0.0.1:9010 --mode admit --destination 127.0.0.1:9101

Both modes answer the header message with a no-op. `admit` then answers the body message with the headers that route
the request and holds the stream until the response ends; `refuse` answers it with a 429. Every reply is built once,
and no body is looked at, so what a real service costs beyond this is its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import grpc.aio
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.core import names
from extproc.core.values import Lane, Reason

POOL = "engines"
"""The pool that `admit` names."""

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

KEEPALIVE_PING_INTERVAL_MS_MIN = 1000

MESSAGE_BYTES_MAX = 8 * 2**20
"""Above every body of a benchmark."""


class Mode(StrEnum):
    """What the body message is answered with."""

    ADMIT = "admit"
    REFUSE = "refuse"


def replies(mode: Mode, destination: str) -> tuple[bytes, bytes]:
    """The replies to header and body message, serialized. `destination` is the replica's `IP:port`."""
    body = _admitted(destination) if mode is Mode.ADMIT else _refused()
    header = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
    return header.SerializeToString(), body.SerializeToString()


def _admitted(destination: str) -> pb.ProcessingResponse:
    reply = pb.ProcessingResponse()
    common = reply.request_body.response
    common.clear_route_cache = True
    _set(common.header_mutation, names.LANE_HEADER, Lane.INTERACTIVE.value)
    _set(common.header_mutation, names.POOL_HEADER, POOL)
    # Twice, as for a policy with one retry.
    _set(common.header_mutation, names.DESTINATION_HEADER, f"{destination},{destination}")
    return reply


def _refused() -> pb.ProcessingResponse:
    reason = Reason.TOKEN_BUDGET_EXHAUSTED.value
    reply = pb.ProcessingResponse()
    immediate = reply.immediate_response
    immediate.status.code = 429
    immediate.body = b'{"type":"error","error":{"code":"%s"}}' % reason.encode()
    immediate.details = "noop"
    _set(immediate.headers, "content-type", "application/json")
    _set(immediate.headers, "retry-after", "1")
    # Envoy knows a refusal of its service by the reason, in header and metadata, and would replace one without.
    _set(immediate.headers, names.REASON_HEADER, reason)
    namespace = reply.dynamic_metadata.fields[names.METADATA_NAMESPACE].struct_value
    namespace.fields[names.METADATA_REASON].string_value = reason
    return reply


def _set(mutation: pb.HeaderMutation, key: str, value: str) -> None:
    mutation.set_headers.add(header=base_pb2.HeaderValue(key=key, raw_value=value.encode()))


class Servicer:
    """Serves ext_proc streams with two prepared replies."""

    def __init__(self, mode: Mode, destination: str) -> None:
        self._header, self._body = replies(mode, destination)
        self._holds = mode is Mode.ADMIT

    async def process(self, _requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One stream: a header message, a body message, and for an admitted request its end."""
        if await context.read() is grpc.aio.EOF:
            return
        await context.write(self._header)
        if await context.read() is grpc.aio.EOF:
            return
        await context.write(self._body)
        if self._holds:
            await context.read()


def build(servicer: Servicer) -> grpc.aio.Server:
    """A server with the options of the real one, not listening yet."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_PING_INTERVAL_MS_MIN),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        ]
    )
    process: grpc.RpcMethodHandler[pb.ProcessingRequest, bytes] = grpc.stream_stream_rpc_method_handler(
        servicer.process, request_deserializer=pb.ProcessingRequest.FromString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),))
    return server
