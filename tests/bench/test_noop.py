"""The no-op server's prepared replies."""

from __future__ import annotations

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from bench.noop import Mode, replies
from extproc.core import names


def test_admit_routes_to_the_destination() -> None:
    """The body reply carries the headers that Tokenlane's carries, and has the route looked up again."""
    head, body = map(pb.ProcessingResponse.FromString, replies(Mode.ADMIT, "127.0.0.1:1"))
    common = body.request_body.response
    headers = {option.header.key: option.header.raw_value for option in common.header_mutation.set_headers}

    assert "request_headers" == head.WhichOneof("response")
    assert common.clear_route_cache
    assert {names.LANE_HEADER, names.POOL_HEADER, names.DESTINATION_HEADER} == set(headers)
    assert b"127.0.0.1:1,127.0.0.1:1" == headers[names.DESTINATION_HEADER]


def test_refuse_answers_the_body_message() -> None:
    """The header message passes, so that a refusal costs both messages as a real one does."""
    head, body = map(pb.ProcessingResponse.FromString, replies(Mode.REFUSE, ""))

    assert "request_headers" == head.WhichOneof("response")
    assert 429 == body.immediate_response.status.code
