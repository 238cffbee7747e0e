"""The wire: what Envoy sends is read as it is meant, and what we send is what another codec reads.

envoy-data-plane is the independent codec: generated from the same API by another compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy_data_plane.envoy.config.core import v3 as core_api
from envoy_data_plane.envoy.service.ext_proc import v3 as api
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.rejection import Answer
from extproc.core.stream import BodyArrived, HeadArrived, Part, PartArrived
from extproc.core.values import Admit, Bypass, Demand, Lane, LaneReason, RequestHead, Reservation
from extproc.service import wire


def _request_headers(*headers: tuple[str, bytes], end_of_stream: bool = False) -> pb.ProcessingRequest:
    """A header message encoded by the other codec."""
    message = api.ProcessingRequest(
        request_headers=api.HttpHeaders(
            headers=core_api.HeaderMap(headers=[core_api.HeaderValue(key=k, raw_value=v) for k, v in headers]),
            end_of_stream=end_of_stream,
        )
    )
    return pb.ProcessingRequest.FromString(bytes(message))


def _head(*headers: tuple[str, bytes]) -> RequestHead:
    event = wire.event(_request_headers(*headers))
    assert isinstance(event, HeadArrived)
    return event.head


def test_request_head() -> None:
    """The headers that a verdict depends on are read; the others are not looked at."""
    head = _head(
        (":method", b"POST"),
        (":path", b"/v1/completions?a=b"),
        ("content-type", b"application/json"),
        ("content-length", b"1234"),
        ("x-request-id", b"r-1"),
        ("authorization", b"Bearer secret"),
    )

    assert head == RequestHead(
        "POST",
        "/v1/completions?a=b",
        end_of_stream=False,
        request_id="r-1",
        content_type="application/json",
        content_length_bytes=1234,
    )


def test_connect_has_no_path() -> None:
    """CONNECT has no :path, and nothing is made up for it."""
    assert _head((":method", b"CONNECT")).path is None


@pytest.mark.parametrize("length", [b"", b"-1", b"1e3", "²".encode(), b"12, 12"])
def test_content_length_that_is_no_number(length: bytes) -> None:
    """A content-length that is not a plain number counts as absent: the body itself is bounded anyway."""
    assert _head((":method", b"POST"), ("content-length", length)).content_length_bytes is None


def test_repeated_header_is_one_list() -> None:
    """A second content-encoding cannot hide behind the first."""
    assert _head(("content-encoding", b"identity"), ("content-encoding", b"gzip")).content_encoding == "identity, gzip"


def test_hostile_request_id() -> None:
    """A request id is cut to 256 characters, and bytes that are no UTF-8 become replacement characters."""
    assert _head(("x-request-id", b"\xff" * 300)).request_id == "\ufffd" * wire.REQUEST_ID_CHARS_MAX


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x-request-intent", b"bulk", True),
        ("x-request-intent", b" Bulk ", True),
        ("x-request-intent", b"interactive", False),
        ("x-request-intent", b"urgent", False),
        ("prefer", b"respond-async", True),
        ("prefer", b"wait=10, Respond-Async; x=1", True),
        ("prefer", b"return=minimal", False),
    ],
)
def test_declared_intent_only_lowers(name: str, value: bytes, expected: bool) -> None:
    """Only values that ask for less service have an effect."""
    assert expected is _head((name, value)).lowered


def test_upgrade_is_seen() -> None:
    """Any upgrade header marks the request."""
    assert _head((":method", b"GET"), ("upgrade", b"websocket")).upgrade


@pytest.mark.parametrize("end_of_stream", [True, False])
def test_body(end_of_stream: bool) -> None:
    """The body message is the whole body, whatever its end_of_stream says."""
    message = api.ProcessingRequest(request_body=api.HttpBody(body=b"{}", end_of_stream=end_of_stream))

    assert BodyArrived(b"{}") == wire.event(pb.ProcessingRequest.FromString(bytes(message)))


METADATA = base_pb2.Metadata(filter_metadata={"a": struct_pb2.Struct(fields={"b": struct_pb2.Value(number_value=1)})})


@pytest.mark.parametrize("size_bytes", [wire.LARGE_MESSAGE_BYTES - 200, wire.LARGE_MESSAGE_BYTES, 3 * 2**20])
@pytest.mark.parametrize("end_of_stream", [True, False])
def test_a_large_body_is_cut_out(size_bytes: int, end_of_stream: bool) -> None:
    """Whatever else is in its message, a large body is the one that the parser finds, without a copy of it."""
    body = b"x" * size_bytes
    message = pb.ProcessingRequest(
        request_body=pb.HttpBody(body=body, end_of_stream=end_of_stream),
        metadata_context=METADATA,
        attributes={"envoy.filters.http.ext_proc": struct_pb2.Struct()},
        observability_mode=True,
    )
    found = wire.message(message.SerializeToString())

    assert isinstance(found, wire.LargeBody) == (size_bytes >= wire.LARGE_MESSAGE_BYTES)
    assert BodyArrived(body) == wire.event(found)


@pytest.mark.parametrize(
    "message",
    [
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x" * 2**20)),
        pb.ProcessingRequest(request_headers=pb.HttpHeaders(), metadata_context=METADATA),
        pb.ProcessingRequest(request_body=pb.HttpBody()),
    ],
)
def test_any_other_message_is_parsed(message: pb.ProcessingRequest) -> None:
    """Only a large request body takes the short way."""
    assert message == wire.message(message.SerializeToString())


@given(st.binary(max_size=30), st.sampled_from([b"", b"\x22", b"\x22\x80\x80\x40", b"\xff" * 12]))
def test_what_is_no_message_is_refused(tail: bytes, head: bytes) -> None:
    """Bytes that only look like a large body are the parser's to judge."""
    data = head + b"\x0a" * wire.LARGE_MESSAGE_BYTES + tail

    assert _parsed(pb.ProcessingRequest.FromString, data) == _parsed(wire.message, data)


def _parsed(parse: Callable[[bytes], wire.Message], data: bytes) -> wire.Message | None:
    try:
        return parse(data)
    except DecodeError:
        return None


@pytest.mark.parametrize(
    ("message", "part", "reply"),
    [
        (
            api.ProcessingRequest(response_trailers=api.HttpTrailers()),
            Part.RESPONSE_TRAILERS,
            api.ProcessingResponse(response_trailers=api.TrailersResponse()),
        ),
        (
            api.ProcessingRequest(request_trailers=api.HttpTrailers()),
            Part.REQUEST_TRAILERS,
            api.ProcessingResponse(request_trailers=api.TrailersResponse()),
        ),
        (
            api.ProcessingRequest(response_headers=api.HttpHeaders()),
            Part.RESPONSE_HEADERS,
            api.ProcessingResponse(response_headers=api.HeadersResponse()),
        ),
        (
            api.ProcessingRequest(response_body=api.HttpBody()),
            Part.RESPONSE_BODY,
            api.ProcessingResponse(response_body=api.BodyResponse()),
        ),
    ],
)
def test_passing_parts(message: api.ProcessingRequest, part: Part, reply: api.ProcessingResponse) -> None:
    """A part on which nothing depends is answered with an empty reply of its own kind."""
    assert PartArrived(part) == wire.event(pb.ProcessingRequest.FromString(bytes(message)))
    assert reply == api.ProcessingResponse.parse(wire.PASS[part])


def test_parts_are_all_answered() -> None:
    """Every part has a reply: an unanswered message would stall the stream until Envoy's timeout."""
    assert set(Part) == set(wire.PASS)


def test_empty_message() -> None:
    """A message without content is an error, not an admission."""
    with pytest.raises(wire.WireError):
        wire.event(pb.ProcessingRequest())


def _admit() -> Admit:
    demand = Demand("m", 14_000, 2_000, 4_000, 2)
    return Admit(
        Reservation("i-1", "docs-0", Lane.BULK, 18_000, 0), "docs", "10.0.0.1:8000", demand, LaneReason.INTENT, 0
    )


def _headers(mutation: api.HeaderMutation | None) -> dict[str, bytes]:
    assert mutation is not None
    pairs = [(option.header.key, option.header.raw_value) for option in mutation.set_headers if option.header]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


def test_admitted() -> None:
    """An admission routes by lane and pool, names its replica once an attempt, and annotates the response."""
    reply = api.ProcessingResponse.parse(
        wire.admitted(_admit(), b"{}", attempts=2, policy_version="v1", busy_retry_s=7)
    )
    assert reply.request_body is not None
    common = reply.request_body.response
    assert common is not None
    assert common.clear_route_cache
    assert common.body_mutation is not None
    assert common.body_mutation.body == b"{}"
    assert reply.dynamic_metadata is not None

    assert {
        "x-llm-lane": b"bulk",
        "x-llm-pool": b"docs",
        "x-gateway-destination-endpoint": b"10.0.0.1:8000,10.0.0.1:8000",
        "content-length": b"2",
    } == _headers(common.header_mutation)
    assert {
        "llm.admission": {
            "lane": "bulk",
            "lane_reason": "intent",
            "input_tokens": "14000",
            "max_output_tokens": "2000",
            "reserved_tokens": "18000",
            "queue_ms": "0",
            "policy": "v1",
            "ticket": "i-1",
            "destination": "10.0.0.1:8000",
            "retry_after": "7",
        }
    } == reply.dynamic_metadata.to_dict()


def test_an_inexact_count_is_marked() -> None:
    """What was charged as declared says so in the metadata; nothing else has that key."""
    admit = _admit()
    marked = replace(admit, demand=admit.demand._replace(inexact=True))
    reply = api.ProcessingResponse.parse(wire.admitted(marked, None, attempts=1, policy_version="v1", busy_retry_s=7))
    assert reply.dynamic_metadata is not None

    assert "inexact" == reply.dynamic_metadata.to_dict()["llm.admission"]["count"]


def test_unchanged_body_is_not_sent_back() -> None:
    """Without a new body there is no body mutation and no content-length."""
    reply = api.ProcessingResponse.parse(wire.admitted(_admit(), None, attempts=1, policy_version="v1", busy_retry_s=7))
    assert reply.request_body is not None
    common = reply.request_body.response
    assert common is not None

    assert common.body_mutation is None
    assert "content-length" not in _headers(common.header_mutation)


def test_passed() -> None:
    """A bypass routes in the reply to the headers, by the lane `bypass` and its pool."""
    reply = api.ProcessingResponse.parse(wire.passed(Bypass("chat"), policy_version="v1"))
    assert reply.request_headers is not None
    common = reply.request_headers.response
    assert common is not None

    assert common.clear_route_cache
    assert {"x-llm-lane": b"bypass", "x-llm-pool": b"chat"} == _headers(common.header_mutation)


def test_refused() -> None:
    """A refusal carries status, headers and body, and marks itself in the metadata for the reply mappers."""
    answer = Answer(429, (("retry-after", "3"), ("x-llm-reason", "queue_full")), b"{}")
    reply = api.ProcessingResponse.parse(wire.refused(answer, "queue_full"))
    immediate = reply.immediate_response
    assert immediate is not None
    assert immediate.status is not None
    assert reply.dynamic_metadata is not None

    assert (429, b"{}", "tokenlane_queue_full") == (int(immediate.status.code), immediate.body, immediate.details)
    assert {"retry-after": b"3", "x-llm-reason": b"queue_full"} == _headers(immediate.headers)
    assert {"llm.admission": {"reason": "queue_full"}} == reply.dynamic_metadata.to_dict()


def test_golden_bytes() -> None:
    """The reply to the headers is a constant."""
    assert wire.CONTINUE == b"\x0a\x00"
    assert wire.PASS[Part.RESPONSE_TRAILERS] == b"\x32\x00"


def test_raw_value_only() -> None:
    """Only raw_value is set, because some Envoys refuse a header that has both."""
    reply = pb.ProcessingResponse.FromString(
        wire.admitted(_admit(), None, attempts=1, policy_version="v1", busy_retry_s=7)
    )
    options = reply.request_body.response.header_mutation.set_headers

    assert {""} == {option.header.value for option in options}
    assert isinstance(options[0].header, base_pb2.HeaderValue)
