"""Envoy's gRPC access log: why a response ended, who served it, and the end of what no stream watches.

The end of a stream releases a reservation; an entry comes some milliseconds later and says the rest. An entry of a
running response (Envoy flushes those periodically) moves the reservation when another replica serves it than the
reserved one. An entry of an ended response also ends the reservation where the stream has not: that of an orphan, for
which nobody else would before it expires, or of a stream whose end the entry overtook.

One stream a worker of Envoy, so entries of all its requests come to one server, whichever server admitted them. What
an entry holds is another program's: one that cannot be used is counted, and the stream goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import structlog
from envoy.data.accesslog.v3 import accesslog_pb2 as data
from envoy.service.accesslog.v3 import als_pb2 as pb

from extproc.core import names
from extproc.core.admission import Desk
from extproc.core.drain import NS_PER_S
from extproc.core.rejection import STATUS
from extproc.core.values import Ending, Lane, Reason, ResponseEnd
from extproc.service.book import Book
from extproc.service.metrics import Metrics
from extproc.service.wire import REQUEST_ID_CHARS_MAX

SERVICE = "envoy.service.accesslog.v3.AccessLogService"

_log = structlog.get_logger()


_LANES = {lane.value: lane for lane in (Lane.INTERACTIVE, Lane.BULK)}


class AccessLog:
    """Receives access log streams. `reached` says that Envoy has ever sent one.

    It stays true: a connection that breaks takes its access log along with its requests, in any order, and an Envoy
    that has logged here will do so again.
    """

    def __init__(self, desk: Desk, book: Book, metrics: Metrics) -> None:
        self.reached = False
        self._desk = desk
        self._book = book
        self._metrics = metrics

    async def stream(
        self, requests: AsyncIterator[pb.StreamAccessLogsMessage], _context: object
    ) -> pb.StreamAccessLogsResponse:
        """One stream of entries, for as long as Envoy keeps it."""
        self.reached = True
        async for message in requests:
            for entry in message.http_logs.log_entry:
                self._take(entry)
        return pb.StreamAccessLogsResponse()

    def _take(self, entry: data.HTTPAccessLogEntry) -> None:
        common = entry.common_properties
        fields = common.metadata.filter_metadata[names.METADATA_NAMESPACE].fields
        ticket = fields[names.METADATA_TICKET].string_value
        if not ticket:
            return  # refused, passed without tokens, or answered by Envoy before a verdict
        served = _address(common.upstream_remote_address)
        moved = self._desk.served(ticket, served)
        if moved is not None:
            self._book.moved(moved)
        if common.intermediate_log_entry:
            return
        lane = _LANES.get(fields[names.METADATA_LANE].string_value)
        if lane is None:
            self._metrics.unread()
        else:
            self._ended(entry, ticket, lane, fields[names.METADATA_DESTINATION].string_value, served)
        if self._desk.end(ticket, Ending.SETTLED) is not None:
            self._book.ended(ticket, Ending.SETTLED)

    def _ended(self, entry: data.HTTPAccessLogEntry, ticket: str, lane: Lane, reserved: str, served: str) -> None:
        common, end = entry.common_properties, response_end(entry)
        if served and served != reserved:
            self._metrics.mismatched()
            _log.warning("replica_mismatch", ticket=ticket, reserved=reserved, served=served)
        self._metrics.responded(lane, end, common.duration.ToNanoseconds() / NS_PER_S)
        if end is not ResponseEnd.COMPLETE:
            _log.info(
                "response",
                request_id=entry.request.request_id[:REQUEST_ID_CHARS_MAX],
                ticket=ticket,
                end=end,
                status=entry.response.response_code.value,
                details=entry.response.response_code_details,
                attempts=common.upstream_request_attempt_count,
                response_bytes=entry.response.response_body_bytes,
                duration_ms=common.duration.ToMilliseconds(),
            )


def response_end(entry: data.HTTPAccessLogEntry) -> ResponseEnd:
    """How a response ended, by Envoy's response flags and its status."""
    flags = entry.common_properties.response_flags
    if flags.downstream_connection_termination or flags.downstream_remote_reset:
        return ResponseEnd.CLIENT_LEFT
    timed_out = (
        flags.upstream_request_timeout
        or flags.duration_timeout
        or flags.upstream_max_stream_duration_reached
        or flags.stream_idle_timeout
    )
    if timed_out:
        return ResponseEnd.TIMEOUT
    if entry.response.response_code.value == STATUS[Reason.ENGINE_BUSY]:
        return ResponseEnd.ENGINE_BUSY  # an admitted request has no other way to this status
    failed = (
        flags.upstream_connection_failure
        or flags.upstream_connection_termination
        or flags.upstream_remote_reset
        or flags.upstream_overflow
        or flags.upstream_protocol_error
        or flags.no_healthy_upstream
        or flags.upstream_retry_limit_exceeded
        or entry.response.response_code.value >= 500
    )
    return ResponseEnd.ENGINE_FAILED if failed else ResponseEnd.COMPLETE


def _address(address: Any) -> str:  # noqa: ANN401 (Envoy's generated Address has no stubs)
    socket = address.socket_address
    if not socket.address:
        return ""
    host = f"[{socket.address}]" if ":" in socket.address else socket.address
    return f"{host}:{socket.port_value}"
