"""Envoy's access log: how responses ended, who served them, and the end of what no stream watches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2 as data
from envoy.service.accesslog.v3 import als_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from extproc.core import names
from extproc.core.admission import Desk
from extproc.core.values import Admit, Demand, Ending, Lane, ResponseEnd
from extproc.service.access_log import AccessLog, response_end
from extproc.service.book import Book
from extproc.service.journal import Journal
from extproc.service.metrics import Metrics
from tests.policies import policy, replica

RESERVED, OTHER = "127.0.0.1:9101", "127.0.0.1:9102"


class _Stage:
    """A desk with three admitted requests, and an access log over it."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.desk = Desk(policy(chat={"chat-0": replica(9101), "chat-1": replica(9102, gross_tokens=50_000)}), "i")
        self.desk.set_ready("chat-0", ready=True)
        self.desk.set_ready("chat-1", ready=True)
        self.metrics = Metrics(self.desk)
        for _ in range(3):
            verdict = self.desk.decide(Demand("m", 90, 10, 10, 1), 0)
            assert isinstance(verdict, Admit)
            assert RESERVED == verdict.address
        self.log = AccessLog(self.desk, Book(self.metrics, journal), self.metrics)

    def count(self, name: str, **labels: str) -> int:
        return int(self.metrics.registry.get_sample_value(f"tokenlane_{name}", labels) or 0)

    async def receive(self, *entries: data.HTTPAccessLogEntry) -> None:
        await self.log.stream(_messages(*entries), None)


async def _messages(*entries: data.HTTPAccessLogEntry) -> AsyncIterator[pb.StreamAccessLogsMessage]:
    yield pb.StreamAccessLogsMessage(identifier=pb.StreamAccessLogsMessage.Identifier(log_name="tokenlane"))
    for entry in entries:
        logs = pb.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry])
        yield pb.StreamAccessLogsMessage(http_logs=logs)


def _entry(
    ticket: str = "i-1",
    *,
    lane: str = "interactive",
    served: str = RESERVED,
    running: bool = False,
    code: int = 200,
    flags: Any = (),
    seconds: int = 2,
) -> data.HTTPAccessLogEntry:
    entry = data.HTTPAccessLogEntry()
    common = entry.common_properties
    fields = common.metadata.filter_metadata[names.METADATA_NAMESPACE].fields
    fields[names.METADATA_TICKET].string_value = ticket
    fields[names.METADATA_LANE].string_value = lane
    fields[names.METADATA_DESTINATION].string_value = RESERVED
    host, _, port = served.rpartition(":")
    if port:
        common.upstream_remote_address.socket_address.address = host
        common.upstream_remote_address.socket_address.port_value = int(port)
    common.intermediate_log_entry = running
    common.duration.seconds = seconds
    for flag in flags:
        setattr(common.response_flags, flag, True)
    entry.response.response_code.value = code
    return entry


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        ((), 200, ResponseEnd.COMPLETE),
        ((), 400, ResponseEnd.COMPLETE),
        ((), 429, ResponseEnd.ENGINE_BUSY),
        ((), 500, ResponseEnd.ENGINE_FAILED),
        (("downstream_connection_termination",), 200, ResponseEnd.CLIENT_LEFT),
        (("downstream_remote_reset", "upstream_remote_reset"), 0, ResponseEnd.CLIENT_LEFT),
        (("upstream_request_timeout",), 504, ResponseEnd.TIMEOUT),
        (("upstream_request_timeout",), 200, ResponseEnd.TIMEOUT),
        (("duration_timeout",), 200, ResponseEnd.TIMEOUT),
        (("stream_idle_timeout",), 504, ResponseEnd.TIMEOUT),
        (("upstream_max_stream_duration_reached",), 504, ResponseEnd.TIMEOUT),
        (("upstream_connection_failure",), 503, ResponseEnd.ENGINE_FAILED),
        (("upstream_connection_termination",), 200, ResponseEnd.ENGINE_FAILED),
        (("upstream_protocol_error",), 200, ResponseEnd.ENGINE_FAILED),
        (("upstream_remote_reset",), 200, ResponseEnd.ENGINE_FAILED),
        (("no_healthy_upstream",), 503, ResponseEnd.ENGINE_FAILED),
    ],
)
def test_response_end(flags: tuple[str, ...], code: int, expected: ResponseEnd) -> None:
    """A client that left comes before a timeout, a timeout before a failure, and 429 is the engine's own."""
    assert expected is response_end(_entry(flags=flags, code=code))


async def test_counts_ends_by_lane() -> None:
    """Every entry of an ended response is counted by lane and end, with its duration; a running one is not."""
    stage = _Stage()
    await stage.receive(
        _entry("i-1"), _entry("i-2", running=True), _entry("x-9", lane="bulk", code=500), _entry("x-8", lane="bulk")
    )

    assert (1, 1, 1) == (
        stage.count("responses_total", lane="interactive", end="complete"),
        stage.count("responses_total", lane="bulk", end="engine_failed"),
        stage.count("responses_total", lane="bulk", end="complete"),
    )
    assert (2, 4) == (
        stage.count("response_seconds_count", lane="bulk"),
        stage.count("response_seconds_sum", lane="bulk"),
    )


async def test_ends_what_its_stream_has_not() -> None:
    """The end of a response ends its reservation once, watched or not; an end before it stays the only one."""
    stage = _Stage()
    stage.desk.abandon("i-2")
    stage.desk.end("i-3", Ending.SETTLED)
    await stage.receive(_entry("i-1"), _entry("i-2"), _entry("i-3"), _entry("i-1"))

    assert ({}, set()) == (dict(stage.desk.ledger.open), stage.desk.orphans)
    assert 2 == stage.count("reservations_ended_total", ending="settled")


async def test_follows_what_runs() -> None:
    """A running response that another replica serves takes its tokens there; the mismatch is counted at its end."""
    stage = _Stage()
    await stage.receive(_entry(served=OTHER, running=True), _entry(served=OTHER, running=True))

    assert "chat-1" == stage.desk.ledger.open["i-1"].replica
    assert 0 == stage.count("replica_mismatches_total")
    await stage.receive(_entry(served=OTHER))
    assert 1 == stage.count("replica_mismatches_total")
    assert [200, 0, 0] == [account.active_tokens for account in stage.desk.ledger.accounts.values()]


async def test_the_journal_follows_too(tmp_path: Path) -> None:
    """After a crash a moved reservation is found where it runs, and an ended one is not."""
    journal = Journal(tmp_path / "j", lambda: None)
    journal.read(0)
    stage = _Stage(journal)
    for reservation in stage.desk.ledger.open.values():
        journal.made(reservation)
    await stage.receive(_entry("i-1", served=OTHER, running=True), _entry("i-2"))
    journal.close()
    journal = Journal(tmp_path / "j", lambda: None)
    found = {reservation.ticket: reservation.replica for reservation in journal.read(0)}
    journal.close()

    assert {"i-1": "chat-1", "i-3": "chat-0"} == found


async def test_served_by_nobody_is_no_mismatch() -> None:
    """A response that Envoy gave without an engine is ended, and nobody else served it."""
    stage = _Stage()
    await stage.receive(_entry(served="", code=503, flags=("no_healthy_upstream",)))

    assert 0 == stage.count("replica_mismatches_total")
    assert 1 == stage.count("responses_total", lane="interactive", end="engine_failed")
    assert "i-1" not in stage.desk.ledger.open


async def test_what_names_no_lane_is_counted() -> None:
    """An entry that names no lane of ours ends its reservation all the same, and is counted as unread."""
    stage = _Stage()
    await stage.receive(_entry("i-1", lane="express"), _entry("i-2", lane=""), _entry("i-3", lane="bypass"))

    assert 3 == stage.count("access_log_unread_total")
    assert {} == dict(stage.desk.ledger.open)


async def test_what_names_no_ticket_is_nothing() -> None:
    """Entries of refused, passed and foreign requests, and of other protocols, change nothing."""
    stage = _Stage()
    number = _entry()
    number.common_properties.metadata.filter_metadata[names.METADATA_NAMESPACE].fields[
        names.METADATA_TICKET
    ].number_value = 1
    foreign = _entry()
    foreign.common_properties.metadata.filter_metadata["other.filter"].fields["ticket"].string_value = "i-2"
    foreign.common_properties.metadata.filter_metadata.pop(names.METADATA_NAMESPACE)
    await stage.receive(data.HTTPAccessLogEntry(), _entry(""), number, foreign)
    tcp = pb.StreamAccessLogsMessage.TCPAccessLogEntries(log_entry=[data.TCPAccessLogEntry()])

    async def messages() -> AsyncIterator[pb.StreamAccessLogsMessage]:
        yield pb.StreamAccessLogsMessage()
        yield pb.StreamAccessLogsMessage(tcp_logs=tcp)

    await stage.log.stream(messages(), None)

    assert ["i-1", "i-2", "i-3"] == list(stage.desk.ledger.open)
    assert 0 == stage.count("access_log_unread_total")


TEXTS = st.sampled_from(["i-1", "i-2", "x-1", "interactive", "bulk", RESERVED, OTHER, "\0", "é" * 300]) | st.text()
VALUES = TEXTS | st.floats() | st.booleans() | st.none() | st.lists(TEXTS)


@given(
    st.dictionaries(st.sampled_from(["ticket", "lane", "destination"]), VALUES),
    st.binary(max_size=40),
    TEXTS,
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
)
async def test_any_entry(metadata: dict[str, Any], garbage: bytes, address: str, number: int, seconds: int) -> None:
    """Whatever an entry holds, the stream goes on to the next one, and each reservation ends at most once."""
    stage = _Stage()
    entry = data.HTTPAccessLogEntry()
    for part in (entry, entry.common_properties, entry.response):
        try:
            part.MergeFromString(garbage)
        except Exception:  # noqa: BLE001, S112 (what does not parse never reaches us)
            continue
    common = entry.common_properties
    common.metadata.filter_metadata[names.METADATA_NAMESPACE].update(metadata)
    common.upstream_remote_address.socket_address.address = address
    common.upstream_remote_address.socket_address.port_value = number
    common.duration.seconds = seconds
    entry.response.response_code.value = number
    await stage.receive(entry, _entry("i-3"))

    assert "i-3" not in stage.desk.ledger.open
    ended = sum(stage.count("reservations_ended_total", ending=ending) for ending in Ending)
    assert 3 == ended + len(stage.desk.ledger.open)


def test_lanes_of_the_contract() -> None:
    """Every lane that an admission can name is counted by the receiver."""
    stage = _Stage()

    for lane in (Lane.INTERACTIVE, Lane.BULK):
        for end in ResponseEnd:
            stage.metrics.responded(lane, end, 0.0)
            assert 1 == stage.count("responses_total", lane=lane, end=end)
