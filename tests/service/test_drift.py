"""Which responses are compared with their counts."""

from __future__ import annotations

import pytest

from extproc.core.admission import Desk
from extproc.core.drain import PPM
from extproc.core.values import Admit, Demand
from extproc.counting.usage import UsageReader
from extproc.service.drift import Drift
from extproc.service.metrics import Comparison, Metrics
from tests.policies import policy


@pytest.mark.parametrize(("inexact", "expected"), [(False, 1), (True, 0)])
def test_declared_charges_are_not_compared(inexact: bool, expected: int) -> None:
    """An engine counts media otherwise than the policy charges them, which says nothing about the tokenizer."""
    desk = Desk(policy(), "i")
    desk.set_ready("chat-0", ready=True)
    admit = desk.decide(Demand("m", 10, 5, 5, 1, inexact=inexact), 0)
    assert isinstance(admit, Admit)
    metrics = Metrics(desk)
    Drift(PPM, metrics).compare(admit, UsageReader(), "r")
    labels = {"model": "m", "comparison": Comparison.UNSTATED}

    assert expected == metrics.registry.get_sample_value("tokenlane_compared_counts_total", labels)
