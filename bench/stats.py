"""Quantiles, CPU time and ratios. Integers as long as possible; None where nothing was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

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
    """CPU time that a process and its running children have used, in user and kernel (Linux).

    A clock of the scheduler, exact to the nanosecond: /proc counts in ticks of 10 ms. OSError when a process is gone.
    """
    return sum(time.clock_gettime_ns((~each << 3) | _PROCESS_CLOCK) for each in (pid, *children(pid)))


def children(pid: int) -> list[int]:
    """Processes that a process started, with those that they started."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return found + [grandchild for child in found for grandchild in children(child)]
