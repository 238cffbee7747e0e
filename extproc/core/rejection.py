"""The contract of refusals: reason -> status, retry headers and JSON body.

One object that both the OpenAI and the Anthropic SDKs read. `x-should-retry: false` stops both from repeating what
cannot succeed; a transient refusal carries Retry-After (whole seconds) and retry-after-ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto, unique
from types import MappingProxyType
from typing import NamedTuple

import orjson

from extproc.core import names
from extproc.core.drain import retry_after
from extproc.core.values import Demand, Detail, Reason, Reject


@unique
class Retry(Enum):
    """What a client is told about trying again."""

    NEVER = auto()  # x-should-retry: false
    AFTER = auto()  # Retry-After and retry-after-ms
    UNSAID = auto()  # the SDK's own rule


@dataclass(frozen=True, slots=True)
class Rule:
    """How one reason is answered."""

    status: int
    error_type: str
    retry: Retry


_INVALID, _BUSY, _API = "invalid_request_error", "rate_limit_error", "api_error"

RULES: Mapping[Reason, Rule] = MappingProxyType(
    {
        Reason.MALFORMED_REQUEST: Rule(400, _INVALID, Retry.NEVER),
        Reason.UNKNOWN_MODEL: Rule(404, "not_found_error", Retry.NEVER),
        Reason.UNKNOWN_ENDPOINT: Rule(404, "not_found_error", Retry.NEVER),
        Reason.CONTEXT_LIMIT: Rule(413, _INVALID, Retry.NEVER),
        Reason.BODY_TOO_LARGE: Rule(413, "request_too_large", Retry.NEVER),
        Reason.UNSUPPORTED_ENCODING: Rule(415, _INVALID, Retry.NEVER),
        Reason.QUEUE_FULL: Rule(429, _BUSY, Retry.AFTER),
        Reason.TOKEN_BUDGET_EXHAUSTED: Rule(429, _BUSY, Retry.AFTER),
        Reason.CONCURRENCY_LIMIT: Rule(429, _BUSY, Retry.AFTER),
        Reason.ENGINE_BUSY: Rule(429, _BUSY, Retry.AFTER),
        Reason.CAPACITY_UNAVAILABLE: Rule(503, "overloaded_error", Retry.AFTER),
        Reason.ADMISSION_UNAVAILABLE: Rule(503, _API, Retry.AFTER),
        Reason.DRAINING: Rule(503, _API, Retry.AFTER),
        Reason.TOKENIZER_UNAVAILABLE: Rule(503, _API, Retry.AFTER),
        Reason.UPSTREAM_TIMEOUT: Rule(504, "timeout_error", Retry.UNSAID),
        Reason.INTERNAL_ERROR: Rule(500, _API, Retry.UNSAID),
    }
)

STATUS: Mapping[Reason, int] = MappingProxyType({reason: rule.status for reason, rule in RULES.items()})

LANE_UNKNOWN = "none"
"""x-llm-lane of a refusal that came before the lane was known."""

COUNT_HEADERS: Mapping[str, str] = MappingProxyType(
    {"input_tokens": "x-llm-input-tokens", "max_output_tokens": "x-llm-max-output-tokens"}
)
"""Details that are also sent as headers, where they are known."""


class Answer(NamedTuple):
    """A refusal as HTTP: status, headers in order, JSON body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def answer(reject: Reject, *, policy_version: str, request_id: str, jitter_ppm: int) -> Answer:
    """The HTTP answer to a refused request. `request_id` is a client's text: it only enters the JSON, escaped."""
    rule = RULES[reject.reason]
    known = {name: value for name, value in reject.details.items() if value is not None}
    details: dict[str, Detail] = {"error_code": reject.reason.value, **_counts(reject.demand), **known}
    headers = [
        ("content-type", "application/json"),
        ("x-llm-reason", reject.reason.value),
        ("x-llm-lane", LANE_UNKNOWN if reject.lane is None else reject.lane.value),
        ("x-llm-policy", policy_version),
        ("x-llm-reserved-tokens", "0"),
        ("x-llm-queue-ms", "0"),
    ]
    headers += [(header, str(details[key])) for key, header in COUNT_HEADERS.items() if key in details]
    if reject.demand is not None and reject.demand.inexact:
        headers.append((names.COUNT_HEADER, names.INEXACT))
    if rule.retry is Retry.NEVER:
        headers.append(("x-should-retry", "false"))
    elif rule.retry is Retry.AFTER:
        headers += _retry_headers(reject.retry_ns, jitter_ppm, details)
    return Answer(rule.status, tuple(headers), _body(reject, rule, details, request_id))


def _counts(demand: Demand | None) -> dict[str, Detail]:
    if demand is None:
        return {}
    return {
        "input_tokens": demand.input_tokens,
        "max_output_tokens": demand.max_output_tokens,
        "sequences": demand.sequences,
        "requested_tokens": demand.reserve_tokens,
    }


def _retry_headers(retry_ns: int, jitter_ppm: int, details: dict[str, Detail]) -> list[tuple[str, str]]:
    retry = retry_after(retry_ns, jitter_ppm)
    headers = [("retry-after", str(retry.header_s)), ("retry-after-ms", str(1000 * retry.header_s))]
    if retry.hopeless:
        details["retry_after_estimate_s"] = retry.estimate_s
        headers.append(("x-should-retry", "false"))
    return headers


def _body(reject: Reject, rule: Rule, details: Mapping[str, Detail], request_id: str) -> bytes:
    error = {
        "message": reject.message,
        "type": rule.error_type,
        "param": reject.param,
        "code": reject.reason.value,
        "details": details,
    }
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id or None})
