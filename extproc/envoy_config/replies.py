"""Envoy's own replies in the shape of the contract.

Mappers are tried in order and the first match answers. What carries a reason of ours in the dynamic metadata, a refusal
of the service, only gets its id: it is complete as it is. A 503 without a lane header is the route table's
fail-closed answer, for no verdict was made; with a lane header an admitted request found no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Struct

from extproc.core.names import LANE_HEADER, METADATA_NAMESPACE, METADATA_REASON, METADATA_RETRY_AFTER, REASON_HEADER
from extproc.core.rejection import LANE_UNKNOWN, RULES, Retry
from extproc.core.values import Reason
from extproc.envoy_config.packing import header

REQUEST_ID = "%REQ(X-REQUEST-ID)%"

REQUEST_ID_HEADER = "request-id"
"""Where Anthropic's SDKs read the id; Envoy itself answers with `x-request-id`."""

MESSAGES = {
    Reason.MALFORMED_REQUEST: "the request could not be read",
    Reason.UNKNOWN_ENDPOINT: "this endpoint or upgrade is not served here",
    Reason.BODY_TOO_LARGE: "the request body is larger than the gateway accepts",
    Reason.ENGINE_BUSY: "the engine is busy; try again",
    Reason.CAPACITY_UNAVAILABLE: "no engine could be reached for this request",
    Reason.ADMISSION_UNAVAILABLE: "no admission decision could be made",
    Reason.UPSTREAM_TIMEOUT: "the engine did not answer in time",
    Reason.INTERNAL_ERROR: "the gateway failed to answer this request",
}
"""The reasons that Envoy itself can give."""

RETRY_AFTER_S = {
    Reason.ADMISSION_UNAVAILABLE: "1",  # a restart of the service takes about a second
    Reason.CAPACITY_UNAVAILABLE: "2",  # two probes of a replica, which is when verdicts learn of its loss
    Reason.ENGINE_BUSY: f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:{METADATA_RETRY_AFTER})%",  # written at admission
}

_EQ, _LE = accesslog.ComparisonFilterOp.EQ, accesslog.ComparisonFilterOp.LE


@dataclass(frozen=True, slots=True)
class Mapping:
    """One row: replies that match are answered with `reason`; `status` None keeps Envoy's own."""

    reason: Reason
    op: accesslog.ComparisonFilterOp | None
    code: int = 0
    undecided: bool = False
    status: int | None = None


MAPPINGS = (
    Mapping(Reason.ADMISSION_UNAVAILABLE, _EQ, 503, undecided=True),
    Mapping(Reason.UNKNOWN_ENDPOINT, _EQ, 403),
    Mapping(Reason.UNKNOWN_ENDPOINT, _EQ, 404),
    Mapping(Reason.BODY_TOO_LARGE, _EQ, 413),
    Mapping(Reason.ENGINE_BUSY, _EQ, 429),
    Mapping(Reason.MALFORMED_REQUEST, _LE, 499),
    Mapping(Reason.MALFORMED_REQUEST, _EQ, 501, status=400),  # a transfer-encoding that Envoy does not know
    Mapping(Reason.CAPACITY_UNAVAILABLE, _EQ, 502, status=503),
    Mapping(Reason.CAPACITY_UNAVAILABLE, _EQ, 503),
    Mapping(Reason.UPSTREAM_TIMEOUT, _EQ, 504),
    Mapping(Reason.INTERNAL_ERROR, None, status=500),
)
"""In order; the last row takes what is left."""


def local_replies(policy_version: str) -> hcm.LocalReplyConfig:
    """The configuration of all rows."""
    refused = hcm.ResponseMapper(filter=_with_reason(), headers_to_add=[header(REQUEST_ID_HEADER, REQUEST_ID)])
    return hcm.LocalReplyConfig(mappers=[refused, *(_mapper(mapping, policy_version) for mapping in MAPPINGS)])


def reply_headers(reason: Reason, policy_version: str) -> list[core.HeaderValueOption]:
    """The contract's headers of a reply that Envoy makes itself. After an admission its own values stay."""
    undecided = {
        LANE_HEADER: LANE_UNKNOWN,
        "x-llm-policy": policy_version,
        "x-llm-reserved-tokens": "0",
        "x-llm-queue-ms": "0",
    }
    headers = [header(REASON_HEADER, reason), header(REQUEST_ID_HEADER, REQUEST_ID)]
    headers += [header(name, value, keep_existing=True) for name, value in undecided.items()]
    if RULES[reason].retry is Retry.NEVER:
        headers.append(header("x-should-retry", "false"))
    elif RULES[reason].retry is Retry.AFTER:
        seconds = RETRY_AFTER_S[reason]
        headers += [header("retry-after", seconds), header("retry-after-ms", f"{seconds}000")]
    return headers


def error_json(reason: Reason, request_id: str | None) -> str:
    """The contract's error object as text."""
    return orjson.dumps(_error(reason, request_id)).decode()


def _error(reason: Reason, request_id: str | None) -> dict[str, Any]:
    error = {
        "message": MESSAGES[reason],
        "type": RULES[reason].error_type,
        "param": None,
        "code": reason.value,
        "details": {"error_code": reason.value},
    }
    return {"type": "error", "error": error, "request_id": request_id}


def _mapper(mapping: Mapping, policy_version: str) -> hcm.ResponseMapper:
    conditions = [_without_reason()]
    if mapping.op is not None:
        conditions.append(_status(mapping.op, mapping.code))
    if mapping.undecided:
        conditions.append(_without_lane())
    return hcm.ResponseMapper(
        filter=conditions[0]
        if len(conditions) == 1
        else accesslog.AccessLogFilter(and_filter=accesslog.AndFilter(filters=conditions)),
        status_code=mapping.status,
        headers_to_add=reply_headers(mapping.reason, policy_version),
        body_format_override=core.SubstitutionFormatString(
            json_format=Struct.from_dict(_error(mapping.reason, REQUEST_ID))
        ),
    )


def _without_reason() -> accesslog.AccessLogFilter:
    """True without our reason. No reason is `-`, so only the absence of the key can match."""
    return accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(
            matcher=matcher.MetadataMatcher(
                filter=METADATA_NAMESPACE,
                path=[matcher.MetadataMatcherPathSegment(key=METADATA_REASON)],
                value=matcher.ValueMatcher(string_match=matcher.StringMatcher(exact="-")),
            ),
            match_if_key_not_found=True,
        )
    )


def _with_reason() -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(
            matcher=matcher.MetadataMatcher(
                filter=METADATA_NAMESPACE,
                path=[matcher.MetadataMatcherPathSegment(key=METADATA_REASON)],
                value=matcher.ValueMatcher(present_match=True),
            ),
            match_if_key_not_found=False,
        )
    )


def _without_lane() -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(
        header_filter=accesslog.HeaderFilter(
            header=route.HeaderMatcher(name=LANE_HEADER, present_match=True, invert_match=True)
        )
    )


def _status(op: accesslog.ComparisonFilterOp, code: int) -> accesslog.AccessLogFilter:
    # The runtime key is demanded by the API; nothing sets it.
    value = core.RuntimeUInt32(default_value=code, runtime_key="tokenlane.local_reply")
    return accesslog.AccessLogFilter(
        status_code_filter=accesslog.StatusCodeFilter(comparison=accesslog.ComparisonFilter(op=op, value=value))
    )
