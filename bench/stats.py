"""Quantiles, CPU time and ratios. Integers as long as possible; None where nothing was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

_PROCESS_CLOCK = 2
"""The scheduler's clock in the kernel's encoding of per-process CPU clocks, as in clock_getcpuclockid(3)."""


def quantile(ordered: Sequence[int], permille: int) -> int:
    """The nearest-rank quantile of ascending values; ValueError without any."""
    if not ordered:
        raise ValueError("no values, no quantile")
    rank = -(-len(ordered) * permille // 1000)
    return ordered[max(rank, 1) - 1]


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` in units of `base`; None unless both are there and the base is positive."""
    if value is None or base is None or base <= 0:
        return None
    return round(value / base, 2)


def cpu_ns(pid: int) -> int:
    """CPU time that all threads of a process have used since it started, in user and kernel (Linux).

    A clock of the scheduler, exact to the nanosecond: /proc counts in ticks of 10 ms. OSError when the process is gone.
    """
    return time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK)
