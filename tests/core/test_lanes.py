"""Lane classification: by tokenized size, lowered by declared intent, never raised."""

from __future__ import annotations

import pytest

from extproc.core.lanes import classify, lane_reason
from extproc.core.values import Demand, Lane, LaneReason
from tests.policies import policy


def _demand(input_tokens: int, output_tokens: int, *, lowered: bool = False) -> Demand:
    return Demand("m", input_tokens, output_tokens, output_tokens, 1, lowered)


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "lowered", "expected"),
    [
        (4096, 1024, False, Lane.INTERACTIVE),
        (4097, 1024, False, Lane.BULK),
        (4096, 1025, False, Lane.BULK),
        (1, 1, True, Lane.BULK),
        (60_000, 4_000, False, Lane.BULK),
        (60_001, 1, False, Lane.OVERFLOW),
        (60_000, 4_001, False, Lane.OVERFLOW),
    ],
)
def test_boundaries(input_tokens: int, output_tokens: int, lowered: bool, expected: Lane) -> None:
    """The limits of a lane are inclusive, and intent lowers."""
    assert expected == classify(_demand(input_tokens, output_tokens, lowered=lowered), policy().models["m"])


def test_all_prompts_and_sequences_count() -> None:
    """A list of prompts is classified by the sum of its inputs, several sequences by the sum of their ceilings."""
    model = policy().models["m"]
    many = Demand("m", 4097, 1, 3, 3)
    sequences = Demand("m", 10, 513, 1026, 2)

    assert (Lane.BULK, Lane.BULK) == (classify(many, model), classify(sequences, model))


@pytest.mark.parametrize(
    ("input_tokens", "lowered", "lane", "expected"),
    [
        (4096, False, Lane.INTERACTIVE, LaneReason.SIZE),
        (4096, True, Lane.BULK, LaneReason.INTENT),
        (4097, True, Lane.BULK, LaneReason.SIZE),
    ],
)
def test_lane_reason(input_tokens: int, lowered: bool, lane: Lane, expected: LaneReason) -> None:
    """Intent is the reason only where it made a difference."""
    assert expected == lane_reason(_demand(input_tokens, 1, lowered=lowered), policy().models["m"], lane)


def test_without_bulk_intent_has_nothing_to_lower_to() -> None:
    """A model with one lane serves what fits it there, whatever the client declares."""
    interactive = policy(model={"lanes": {"interactive": {"pool": "chat"}}}).models["m"]
    bulk = policy(
        model={"lanes": {"bulk": {"pool": "docs", "input_tokens_max": 60_000, "total_tokens_max": 64_000}}}
    ).models["m"]

    assert Lane.INTERACTIVE == classify(_demand(1, 1, lowered=True), interactive)
    assert Lane.OVERFLOW == classify(_demand(5000, 1), interactive)
    assert Lane.BULK == classify(_demand(1, 1), bulk)
