"""Drift: a share of the responses is read for what the engine counted, and that is compared with the admission.

An engine that was updated, or serves another template than its policy says, counts otherwise than the gateway. Nothing
is changed by what is found; it is counted by model, and a difference is logged.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog

from extproc.core.drain import PPM
from extproc.core.values import Admit
from extproc.counting.usage import UsageReader
from extproc.service.metrics import Comparison, Metrics

_log = structlog.get_logger()


class Drift:
    """Compares `sample_ppm` of a million responses with their counts."""

    def __init__(self, sample_ppm: int, metrics: Metrics, chance: Callable[[], float] = random.random) -> None:
        self._sample_ppm = sample_ppm
        self._metrics = metrics
        self._chance = chance

    def sample(self) -> UsageReader | None:
        """A reader for the response to a request that comes now, if it is one of the sample."""
        return UsageReader() if self._sample_ppm and self._chance() * PPM < self._sample_ppm else None

    def compare(self, admit: Admit, usage: UsageReader, request_id: str) -> None:
        """Compare a whole response with the admission of its request, where that was counted exactly."""
        if admit.demand.inexact:
            return
        usage.end()
        counted, stated = admit.demand.input_tokens, usage.input_tokens
        if stated is None:
            found = Comparison.UNSTATED
        else:
            found = Comparison.EQUAL if stated == counted else Comparison.DIFFERENT
        self._metrics.compared(admit.demand.model, found)
        if found is Comparison.DIFFERENT:
            _log.warning(
                "count_differs",
                request_id=request_id,
                ticket=admit.reservation.ticket,
                model=admit.demand.model,
                input_tokens=counted,
                engine_input_tokens=stated,
            )
