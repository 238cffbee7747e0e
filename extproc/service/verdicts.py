"""What metrics and logs tell of verdicts: noted at once, told in batches.

A verdict alone would pay for everything that counting and logging it touches; in a batch only the first does. Told
every `TELL_INTERVAL_S`, before each scrape, when the service stops, and when `UNTOLD_MAX` have gathered. So who
has an answer finds it in the metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import structlog

from extproc.core.drain import NS_PER_S
from extproc.core.rejection import STATUS
from extproc.core.values import Admit, Reject
from extproc.service.metrics import Metrics

TELL_INTERVAL_S = 0.1

UNTOLD_MAX = 128
"""Verdicts of one batch: telling them takes some 2 ms of the event loop."""

NS_PER_US = 1000

_log = structlog.get_logger()


class _Noted(NamedTuple):
    """A verdict with how long it took, and the wall clock when it was made."""

    verdict: Admit | Reject
    request_id: str
    decision_ns: int
    at_s: float


class Verdicts:
    """The verdicts that metrics and logs do not know yet."""

    def __init__(self, metrics: Metrics, clock_s: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock_s = clock_s
        self._untold: list[_Noted] = []
        metrics.before_scrape(self.tell)

    def note(self, verdict: Admit | Reject, request_id: str, decision_ns: int) -> None:
        """Remember a verdict that took `decision_ns`; called before its answer is written."""
        self._untold.append(_Noted(verdict, request_id, decision_ns, self._clock_s()))
        if len(self._untold) >= UNTOLD_MAX:
            self.tell()

    def tell(self) -> None:
        """Count and log what is untold."""
        untold, self._untold = self._untold, []
        for noted in untold:
            self._metrics.decided(noted.decision_ns / NS_PER_S)
            if isinstance(noted.verdict, Admit):
                self._admitted(noted.verdict, noted)
            else:
                self._refused(noted.verdict, noted)

    async def keep_told(self) -> None:
        """Tell in time, until cancelled."""
        while True:
            await asyncio.sleep(TELL_INTERVAL_S)
            self.tell()

    def _admitted(self, admit: Admit, noted: _Noted) -> None:
        reservation, demand = admit.reservation, admit.demand
        self._metrics.admitted(reservation.lane, demand)
        _log.info(
            "admit",
            request_id=noted.request_id,
            ticket=reservation.ticket,
            model=demand.model,
            lane=reservation.lane,
            lane_reason=admit.lane_reason,
            replica=reservation.replica,
            input_tokens=demand.input_tokens,
            inexact=demand.inexact,
            max_output_tokens=demand.max_output_tokens,
            sequences=demand.sequences,
            reserved_tokens=reservation.reserve_tokens,
            decision_us=noted.decision_ns // NS_PER_US,
            timestamp=_utc(noted.at_s),
        )

    def _refused(self, reject: Reject, noted: _Noted) -> None:
        demand = reject.demand
        self._metrics.refused(reject.lane, reject.reason, demand)
        _log.info(
            "refuse",
            request_id=noted.request_id,
            reason=reject.reason,
            status=STATUS[reject.reason],
            lane=reject.lane,
            input_tokens=None if demand is None else demand.input_tokens,
            inexact=None if demand is None else demand.inexact,
            reserve_tokens=None if demand is None else demand.reserve_tokens,
            decision_us=noted.decision_ns // NS_PER_US,
            timestamp=_utc(noted.at_s),
        )


def _utc(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)
