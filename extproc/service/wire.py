"""The wire: Envoy's ext_proc messages to the core's events, the core's actions to reply bytes.

Only `raw_value` of a header is read by Envoy. A header mutation travels with every routing reply, because Envoy
ignores `clear_route_cache` without one. Replies that never differ are built once, and so are headers and metadata
that recur: serialized messages joined are the merged message (protobuf's encoding), so a reply is put together from
their bytes, in a fraction of the time that building each part takes.

xds-protos and Envoy 1.40 disagree on field 11 of ProcessingResponse, so no reply sets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from extproc.core import names
from extproc.core.rejection import Answer
from extproc.core.stream import BodyArrived, Event, HeadArrived, Part, PartArrived
from extproc.core.values import Admit, Bypass, Lane, RequestHead

REQUEST_ID_CHARS_MAX = 256
"""A client may choose the request id; longer ones are cut in logs and bodies. Envoy's own have 36."""

PARTS_KEPT_MAX = 4096
"""Serialized headers and metadata kept, of some 100 bytes each; what recurs is far less."""

REFUSALS_KEPT_MAX = 1024
"""Serialized refusals kept, of some 600 bytes each. They differ in reason, lane and Retry-After, and in the counts
where there are any."""


_HeaderMode, _BodyMode = (
    processing_mode_pb2.ProcessingMode.HeaderSendMode,
    processing_mode_pb2.ProcessingMode.BodySendMode,
)


LARGE_MESSAGE_BYTES = 2**20
"""From here on a request body is cut out of its message instead of parsed, which would copy it twice: some 10 ms of the
event loop for 4 MB."""

FIELDS_MAX = 32
"""Fields of a message that is cut up here; Envoy's has a handful."""

_LENGTH_DELIMITED, _VARINT = 2, 0
_REQUEST_BODY, _BODY = 4, 1
"""Field numbers of ProcessingRequest.request_body and HttpBody.body."""


_PARTS: Mapping[str | None, Part] = MappingProxyType(
    {
        "request_trailers": Part.REQUEST_TRAILERS,
        "response_headers": Part.RESPONSE_HEADERS,
        "response_body": Part.RESPONSE_BODY,
        "response_trailers": Part.RESPONSE_TRAILERS,
    }
)
"""Messages on which no verdict depends."""


class WireError(Exception):
    """A message that is none of the protocol's."""


class LargeBody(NamedTuple):
    """A message with a large request body, where it lies in the message's bytes."""

    body: memoryview


Message: TypeAlias = pb.ProcessingRequest | LargeBody


def message(data: bytes) -> Message:
    """One message of Envoy; DecodeError for what is none."""
    found = _large_body(memoryview(data)) if len(data) >= LARGE_MESSAGE_BYTES else None
    return pb.ProcessingRequest.FromString(data) if found is None else LargeBody(found)


def _large_body(data: memoryview) -> memoryview | None:
    """The request body in a serialized message; None where it has another form than Envoy's, which the parser knows."""
    try:
        bodies = [part for field, part in _fields(data) if field == _REQUEST_BODY]
        contents = [part for field, part in _fields(*bodies) if field == _BODY]
        (found,) = contents
    except (IndexError, TypeError, ValueError):
        return None
    return found


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each length-delimited field; ValueError or IndexError for other than those and numbers."""
    place = 0
    for _ in range(FIELDS_MAX):
        if place == len(data):
            return
        tag, place = _varint(data, place)
        number, place = _varint(data, place)
        if tag & 7 == _VARINT:
            continue
        if tag & 7 != _LENGTH_DELIMITED or place + number > len(data):
            raise ValueError
        yield tag >> 3, data[place : place + number]
        place += number
    raise ValueError


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """The number that begins at `place`, and the place after it (protobuf's base-128 encoding)."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError


def event(message: Message) -> Event:
    """The core's event for one message of Envoy; WireError for a message without content."""
    if isinstance(message, LargeBody):
        return BodyArrived(message.body)
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        return HeadArrived(_head(message.request_headers))
    if kind == "request_body":
        return BodyArrived(message.request_body.body)
    if kind not in _PARTS:
        raise WireError("a message without headers, body or trailers")
    return PartArrived(_PARTS[kind])


def _head(message: pb.HttpHeaders) -> RequestHead:
    found: dict[str, str] = {}
    for header in message.headers.headers:
        key = header.key
        if key in names.READ_HEADERS:
            value = (header.raw_value or header.value.encode()).decode("utf-8", "replace")
            # A repeated header is one list, as HTTP has it: a second content-encoding cannot hide.
            found[key] = f"{found[key]}, {value}" if key in found else value
    get = found.get
    length = get("content-length", "")
    intent, prefer = get(names.INTENT_HEADER), get("prefer")
    return RequestHead(
        get(":method", ""),
        get(":path"),
        message.end_of_stream,
        request_id=get("x-request-id", "")[:REQUEST_ID_CHARS_MAX],
        content_type=get("content-type", ""),
        content_encoding=get("content-encoding", "").strip().lower(),
        content_length_bytes=int(length) if length.isascii() and length.isdigit() else None,
        upgrade="upgrade" in found,
        lowered=(intent is not None or prefer is not None) and _lowered(intent or "", prefer or ""),
    )


def _lowered(intent: str, prefer: str) -> bool:
    """Whether a header declares that bulk service is enough; `Prefer` is a list of tokens (RFC 7240)."""
    if intent.strip().lower() == "bulk":
        return True
    return any(token.partition(";")[0].strip().lower() == "respond-async" for token in prefer.split(","))


def _bytes(reply: pb.ProcessingResponse) -> bytes:
    serialized: bytes = reply.SerializeToString()
    return serialized


CONTINUE = _bytes(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))
"""Reply to the header message of a request whose body decides."""

CONTINUE_SAMPLED = _bytes(
    pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(),
        mode_override=processing_mode_pb2.ProcessingMode(
            request_header_mode=_HeaderMode.SEND,
            request_body_mode=_BodyMode.BUFFERED,
            response_header_mode=_HeaderMode.SKIP,
            response_body_mode=_BodyMode.STREAMED,
            request_trailer_mode=_HeaderMode.SKIP,
            response_trailer_mode=_HeaderMode.SEND,
        ),
    )
)
"""The same, where the response's body is to come too."""

PASS: Mapping[Part, bytes] = MappingProxyType(
    {
        Part.REQUEST_BODY: _bytes(pb.ProcessingResponse(request_body=pb.BodyResponse())),
        Part.REQUEST_TRAILERS: _bytes(pb.ProcessingResponse(request_trailers=pb.TrailersResponse())),
        Part.RESPONSE_HEADERS: _bytes(pb.ProcessingResponse(response_headers=pb.HeadersResponse())),
        Part.RESPONSE_BODY: _bytes(pb.ProcessingResponse(response_body=pb.BodyResponse())),
        Part.RESPONSE_TRAILERS: _bytes(pb.ProcessingResponse(response_trailers=pb.TrailersResponse())),
    }
)
"""Replies that leave a part as it is. The documented mode sends response trailers only; a mesh may send the others."""


_INEXACT = ((names.METADATA_COUNT, names.INEXACT),)


def admitted(  # noqa: PLR0913 (what a reply says)
    admit: Admit,
    body: bytes | None,
    *,
    attempts: int,
    policy_version: str,
    busy_retry_s: int,
    decoded: bool = False,
) -> bytes:
    """Reply to the body message of an admitted request.

    `decoded`: `body` takes the place of one with a content-encoding. The destination is written once for each of
    Envoy's `attempts`, so that a retry stays on the reserved replica. `busy_retry_s` is the Retry-After for a
    client whose request the engine turns away.
    """
    reservation, demand = admit.reservation, admit.demand
    headers = [
        (names.LANE_HEADER, reservation.lane.value),
        (names.POOL_HEADER, admit.pool),
        (names.DESTINATION_HEADER, ",".join((admit.address,) * attempts)),
    ]
    reply = pb.ProcessingResponse()
    common = reply.request_body.response
    common.clear_route_cache = True
    if body is not None:
        common.body_mutation.body = body
        headers.append(("content-length", str(len(body))))
    common.header_mutation.MergeFromString(_headers(headers))
    if decoded:
        common.header_mutation.remove_headers.append("content-encoding")
    _annotate(
        reply,
        (
            (names.METADATA_LANE, reservation.lane.value),
            ("lane_reason", admit.lane_reason.value),
            ("input_tokens", str(demand.input_tokens)),
            ("max_output_tokens", str(demand.max_output_tokens)),
            ("reserved_tokens", str(reservation.reserve_tokens)),
            ("queue_ms", "0"),
            ("policy", policy_version),
            (names.METADATA_DESTINATION, admit.address),
            (names.METADATA_RETRY_AFTER, str(busy_retry_s)),
            *(_INEXACT if demand.inexact else ()),
        ),
        ticket=reservation.ticket,
    )
    return _bytes(reply)


def passed(bypass: Bypass, *, policy_version: str) -> bytes:
    """Reply to the header message of a request that carries no tokens."""
    reply = pb.ProcessingResponse()
    common = reply.request_headers.response
    common.clear_route_cache = True
    common.header_mutation.MergeFromString(
        _headers(((names.LANE_HEADER, Lane.BYPASS.value), (names.POOL_HEADER, bypass.pool)))
    )
    _annotate(
        reply,
        (
            (names.METADATA_LANE, Lane.BYPASS.value),
            ("policy", policy_version),
            (names.METADATA_RETRY_AFTER, "1"),  # nothing is reserved that could be waited for
        ),
    )
    return _bytes(reply)


def refused(answer: Answer, reason: str, *, details: str = "tokenlane") -> bytes:
    """Reply that makes Envoy answer the client with `answer`.

    The reason in the metadata keeps Envoy's local reply mappers away from it.
    """
    reply = pb.ProcessingResponse.FromString(_refusal(answer.status, answer.headers, f"{details}_{reason}", reason))
    reply.immediate_response.body = answer.body
    return _bytes(reply)


@lru_cache(REFUSALS_KEPT_MAX)
def _refusal(status: int, headers: tuple[tuple[str, str], ...], details: str, reason: str) -> bytes:
    """A serialized refusal without its body: few differ in more than that."""
    reply = pb.ProcessingResponse()
    immediate = reply.immediate_response
    immediate.status.code = status
    immediate.details = details
    immediate.headers.MergeFromString(_headers(headers))
    _annotate(reply, ((names.METADATA_REASON, reason),))
    return _bytes(reply)


def _headers(headers: Iterable[tuple[str, str]]) -> bytes:
    """A serialized HeaderMutation that sets `headers`."""
    return b"".join([_header(key, value) for key, value in headers])


@lru_cache(PARTS_KEPT_MAX)
def _header(key: str, value: str) -> bytes:
    option = base_pb2.HeaderValueOption(header=base_pb2.HeaderValue(key=key, raw_value=value.encode()))
    serialized: bytes = pb.HeaderMutation(set_headers=[option]).SerializeToString()
    return serialized


def _annotate(reply: pb.ProcessingResponse, values: Iterable[tuple[str, str]], *, ticket: str | None = None) -> None:
    """Write the metadata of a verdict; no ticket recurs, so that one is never kept."""
    namespace = reply.dynamic_metadata.fields[names.METADATA_NAMESPACE].struct_value
    namespace.MergeFromString(b"".join([_value(key, value) for key, value in values]))
    if ticket is not None:
        namespace.fields[names.METADATA_TICKET].string_value = ticket


@lru_cache(PARTS_KEPT_MAX)
def _value(key: str, value: str) -> bytes:
    serialized: bytes = struct_pb2.Struct(fields={key: struct_pb2.Value(string_value=value)}).SerializeToString()
    return serialized
