"""Verdicts are told in batches, and nobody can see that in what is told."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from structlog.testing import capture_logs

from extproc.core.admission import Desk
from extproc.core.values import Admit, Demand, Reason, Reject
from extproc.service.metrics import Metrics
from extproc.service.verdicts import TELL_INTERVAL_S, UNTOLD_MAX, Verdicts
from tests.policies import policy

REFUSED = "tokenlane_refused_requests_total"
LABELS = {"lane": "none", "reason": "malformed_request"}


def _reject() -> Reject:
    return Reject(Reason.MALFORMED_REQUEST, "no")


def _admit(desk: Desk, *, inexact: bool = False) -> Admit:
    desk.set_ready("chat-0", ready=True)
    verdict = desk.decide(Demand("m", 10, 5, 5, 1, inexact=inexact), 0)
    assert isinstance(verdict, Admit)
    return verdict


def test_a_scrape_sees_every_verdict() -> None:
    """What is noted when a scrape comes is part of it, once."""
    metrics = Metrics(Desk(policy(), "i"))
    verdicts = Verdicts(metrics)
    value = metrics.registry.get_sample_value
    verdicts.note(_reject(), "r", 1)

    assert 1 == value(REFUSED, LABELS)
    assert 1 == value("tokenlane_decision_seconds_count")
    verdicts.note(_reject(), "r", 1)
    assert 2 == value(REFUSED, LABELS)


def test_a_full_batch_is_told() -> None:
    """No more than a batch ever waits."""
    verdicts = Verdicts(Metrics(Desk(policy(), "i")))
    with capture_logs() as logs:
        for _ in range(2 * UNTOLD_MAX - 1):
            verdicts.note(_reject(), "r", 1)

    assert UNTOLD_MAX == len(logs)


def test_a_line_says_when_and_how_long() -> None:
    """Lines come in the order of the verdicts, with the time of each and not that of the batch."""
    desk = Desk(policy(), "i")
    clock = iter((1.5, 2.5))
    verdicts = Verdicts(Metrics(desk), lambda: next(clock))
    verdicts.note(_admit(desk), "first", 7_000)
    verdicts.note(_reject(), "second", 9_999)
    with capture_logs() as logs:
        verdicts.tell()
        verdicts.tell()

    assert [("admit", "first", 7), ("refuse", "second", 9)] == [
        (line["event"], line["request_id"], line["decision_us"]) for line in logs
    ]
    assert [datetime.fromtimestamp(at_s, UTC) for at_s in (1.5, 2.5)] == [line["timestamp"] for line in logs]
    assert (400, 15) == (logs[1]["status"], logs[0]["reserved_tokens"])


def test_inexact_counts_are_counted() -> None:
    """A count with declared charges is told by model, and its line says so."""
    desk = Desk(policy(), "i")
    metrics = Metrics(desk)
    verdicts = Verdicts(metrics)
    verdicts.note(_admit(desk), "r", 1)
    verdicts.note(_admit(desk, inexact=True), "r", 1)
    with capture_logs() as logs:
        verdicts.tell()

    assert [False, True] == [line["inexact"] for line in logs]
    assert 1 == metrics.registry.get_sample_value("tokenlane_inexact_requests_total", {"model": "m"})


async def test_verdicts_are_told_by_and_by() -> None:
    """Without a scrape and with few requests, a verdict is logged all the same."""
    verdicts = Verdicts(Metrics(Desk(policy(), "i")))
    with capture_logs() as logs:
        telling = asyncio.create_task(verdicts.keep_told())
        verdicts.note(_reject(), "r", 1)
        async with asyncio.timeout(50 * TELL_INTERVAL_S):
            while not logs:  # noqa: ASYNC110 (no event tells of a line)
                await asyncio.sleep(TELL_INTERVAL_S / 10)
        telling.cancel()
