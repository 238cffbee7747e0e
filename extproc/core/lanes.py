"""Lanes: which lane a demand belongs to.

Classification is by tokenized size; a declared intent can only lower it. A model without a bulk lane has nothing to
lower to, and one without an interactive lane serves everything as bulk.
"""

from __future__ import annotations

from extproc.core.policy import Model
from extproc.core.values import Demand, Lane, LaneReason


def classify(demand: Demand, model: Model) -> Lane:
    """The lane of `demand` under the lane limits of `model`; OVERFLOW when no lane takes it."""
    interactive, bulk = model.interactive, model.bulk
    if (
        interactive is not None
        and not (demand.lowered and bulk is not None)
        and demand.input_tokens <= interactive.input_tokens_max
        and (interactive.output_tokens_max is None or demand.output_tokens <= interactive.output_tokens_max)
    ):
        return Lane.INTERACTIVE
    if (
        bulk is not None
        and demand.input_tokens <= bulk.input_tokens_max
        and (bulk.total_tokens_max is None or demand.reserve_tokens <= bulk.total_tokens_max)
    ):
        return Lane.BULK
    return Lane.OVERFLOW


def lane_reason(demand: Demand, model: Model, lane: Lane) -> LaneReason:
    """Why `demand` is in `lane`."""
    lowered = demand.lowered and lane is not classify(demand._replace(lowered=False), model)
    return LaneReason.INTENT if lowered else LaneReason.SIZE
