"""The words of the core: lanes, reasons, demands, reservations and verdicts. All are frozen.

Those that every request makes several of are tuples, which take a third of a frozen dataclass's time to make.

Token quantities are integers; `_ns` is nanoseconds of a monotonic clock. An enum here is closed: its members are
the only values that reach a metric label, a header or an error code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from types import MappingProxyType
from typing import NamedTuple


@unique
class Lane(StrEnum):
    """Where a demand belongs. `OVERFLOW` never enters a queue; `BYPASS` carries no tokens at all."""

    INTERACTIVE = "interactive"
    BULK = "bulk"
    OVERFLOW = "overflow"
    BYPASS = "bypass"


@unique
class Encoding(StrEnum):
    """Content encodings that are decoded for counting; an engine gets the decoded body."""

    GZIP = "gzip"
    DEFLATE = "deflate"
    BR = "br"
    ZSTD = "zstd"


BUILT_IN_ENCODINGS = frozenset({Encoding.GZIP, Encoding.DEFLATE})
"""What Python itself decodes; the others need the extra `tokenlane[encodings]`."""


@unique
class LaneReason(StrEnum):
    """Why a request is in its lane."""

    SIZE = "size"  # its tokens
    INTENT = "intent"  # it would fit a faster lane, but declared that bulk service is enough


@unique
class Reason(StrEnum):
    """Why a request was refused. `core.rejection` maps every member to a status and retry headers."""

    MALFORMED_REQUEST = "malformed_request"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_ENDPOINT = "unknown_endpoint"
    CONTEXT_LIMIT = "context_limit"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    QUEUE_FULL = "queue_full"
    TOKEN_BUDGET_EXHAUSTED = "token_budget_exhausted"  # noqa: S105 (a reason, not a secret)
    CONCURRENCY_LIMIT = "concurrency_limit"
    ENGINE_BUSY = "engine_busy"
    CAPACITY_UNAVAILABLE = "capacity_unavailable"
    ADMISSION_UNAVAILABLE = "admission_unavailable"
    DRAINING = "draining"
    TOKENIZER_UNAVAILABLE = "tokenizer_unavailable"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    INTERNAL_ERROR = "internal_error"


@unique
class Ending(StrEnum):
    """How a reservation ended. Every reservation ends exactly once, with one of these."""

    SETTLED = "settled"  # the response it stands for ended, completely or not
    RELEASED = "released"  # the admission never reached Envoy, so nothing runs for it
    EXPIRED = "expired"  # it stood for longer than a response can run


@unique
class ResponseEnd(StrEnum):
    """How the response to an admitted request ended, as Envoy saw it."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client_left"
    ENGINE_BUSY = "engine_busy"
    ENGINE_FAILED = "engine_failed"
    TIMEOUT = "timeout"


Detail = int | str | bool | None

_NO_DETAILS: Mapping[str, Detail] = MappingProxyType({})


class Fault(Exception):  # noqa: N818 (a value of the domain that travels as an exception)
    """What is wrong with a request itself: raised by counting, answered by the desk.

    `message` is for the client and never holds prompt text. `param` names the field at fault. `model` is the model it
    was meant for, once that is known.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        param: str | None = None,
        details: Mapping[str, Detail] | None = None,
        model: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.details: Mapping[str, Detail] = details or {}
        self.model = model

    def __reduce__(self) -> tuple[object, ...]:
        """As an exception that crosses processes."""
        return _fault, (self.reason, self.message, self.param, dict(self.details), self.model)


def _fault(reason: Reason, message: str, param: str | None, details: Mapping[str, Detail], model: str | None) -> Fault:
    return Fault(reason, message, param=param, details=details, model=model)


class RequestHead(NamedTuple):
    """The request line and the headers that a verdict may depend on, as Envoy forwards them.

    `path` may carry a query; it is None for CONNECT. `content_length_bytes` is None when the client sent none or
    something that is not a number. `lowered` is true when a header declares that bulk service is enough.
    """

    method: str
    path: str | None
    end_of_stream: bool
    request_id: str = ""
    content_type: str = ""
    content_encoding: str = ""
    content_length_bytes: int | None = None
    upgrade: bool = False
    lowered: bool = False


class Demand(NamedTuple):
    """What one request asks of the fleet, in tokens the engine will run.

    `input_tokens` is the sum over the prompts, each counted once however many sequences it starts (engines share the
    prefix); `output_tokens` is the sum of the run ceilings of all sequences; `max_output_tokens` is the
    largest ceiling of one sequence. `lowered` is true when the client declared that bulk service is enough, `inexact`
    when part of the input is charged as the policy declares and not counted.
    """

    model: str
    input_tokens: int
    max_output_tokens: int
    output_tokens: int
    sequences: int
    lowered: bool = False
    inexact: bool = False

    @property
    def reserve_tokens(self) -> int:
        """What the reservation holds: input and permitted output."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens held on one replica for one admitted request."""

    ticket: str
    replica: str
    lane: Lane
    reserve_tokens: int
    admitted_ns: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Verdict: the request runs on `reservation.replica`, whose address is `address`, in `pool`.

    `lane_reason` says why it is in its lane. `busy_retry_ns` is the time in which the replica releases as many
    tokens as this request reserved: when the engine itself turns the request away, a retry before that is unlikely
    to fare better.
    """

    reservation: Reservation
    pool: str
    address: str
    demand: Demand
    lane_reason: LaneReason
    busy_retry_ns: int


@dataclass(frozen=True, slots=True)
class Bypass:
    """Verdict: the request carries no tokens and goes to `pool` without a reservation."""

    pool: str


class Reject(NamedTuple):
    """Verdict: the request is refused; nothing is reserved.

    `lane` and `demand` are None as long as they are not known. `retry_ns` is the predicted delay before the same
    request could be admitted; it matters only for reasons whose rule sends Retry-After.
    """

    reason: Reason
    message: str
    param: str | None = None
    lane: Lane | None = None
    demand: Demand | None = None
    details: Mapping[str, Detail] = _NO_DETAILS
    retry_ns: int = 0
