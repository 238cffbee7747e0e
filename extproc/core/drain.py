"""Drain: how long until enough reserved tokens end, and the Retry-After that says so.

The release rate is the replica's prior from the policy as long as nothing waits: a rate is only measured while
someone waits, since an idle replica releases what little it has at whatever pace it arrives.
"""

from __future__ import annotations

from typing import NamedTuple

NS_PER_S = 1_000_000_000

RETRY_AFTER_S_MAX = 60
"""SDKs ignore longer values or give up on them, so a longer honest wait is said in the body instead."""

PPM = 1_000_000


class RetryAfter(NamedTuple):
    """What a client is told: `header_s` within 1..60; `hopeless` when the honest wait is longer than that."""

    header_s: int
    estimate_s: int
    hopeless: bool


def delay_ns(shortfall_tokens: int, release_tokens_per_s: int) -> int:
    """Time until `shortfall_tokens` are released at the rate, rounded up; 0 when nothing is short."""
    return -(-max(0, shortfall_tokens) * NS_PER_S // release_tokens_per_s)


def retry_after(estimate_ns: int, jitter_ppm: int) -> RetryAfter:
    """Retry-After for a predicted delay: base = max(1, ceil(e)), plus floor(U * (base/4 + 1)), at most 60.

    U = `jitter_ppm` / 1e6 in [0, 1): jitter only goes upward, because SDKs sleep exactly what they are told and
    would all come back at once.
    """
    base_s = max(1, -(-estimate_ns // NS_PER_S))
    jitter_s = jitter_ppm * (base_s + 4) // (4 * PPM)
    return RetryAfter(
        header_s=min(RETRY_AFTER_S_MAX, base_s + jitter_s),
        estimate_s=base_s,
        hopeless=base_s > RETRY_AFTER_S_MAX,
    )
