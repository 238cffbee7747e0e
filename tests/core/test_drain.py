"""Predicted delay and Retry-After: whole numbers, rounded against the client's favour, jitter only upward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.drain import NS_PER_S, PPM, RetryAfter, delay_ns, retry_after


@pytest.mark.parametrize(
    ("shortfall_tokens", "rate", "expected"),
    [(-5, 10, 0), (0, 10, 0), (1, 3, 333_333_334), (3000, 1000, 3 * NS_PER_S)],
)
def test_delay(shortfall_tokens: int, rate: int, expected: int) -> None:
    """The delay is the shortfall over the rate, rounded up, and nothing when nothing is short."""
    assert expected == delay_ns(shortfall_tokens, rate)


@pytest.mark.parametrize(
    ("estimate_ns", "jitter_ppm", "expected"),
    [
        (0, 0, RetryAfter(1, 1, hopeless=False)),
        (1, 0, RetryAfter(1, 1, hopeless=False)),
        (NS_PER_S + 1, 0, RetryAfter(2, 2, hopeless=False)),
        (8 * NS_PER_S, PPM - 1, RetryAfter(10, 8, hopeless=False)),
        (60 * NS_PER_S, PPM - 1, RetryAfter(60, 60, hopeless=False)),
        (60 * NS_PER_S + 1, 0, RetryAfter(60, 61, hopeless=True)),
    ],
)
def test_retry_after(estimate_ns: int, jitter_ppm: int, expected: RetryAfter) -> None:
    """Retry-After is at least the estimate, at least 1, at most 60, and says when 60 is not enough."""
    assert expected == retry_after(estimate_ns, jitter_ppm)


@given(st.integers(0, 10**13), st.integers(0, PPM - 1))
def test_jitter_goes_upward_by_at_most_a_quarter_and_one(estimate_ns: int, jitter_ppm: int) -> None:
    """base <= value < base + base/4 + 1, within 1..60."""
    retry = retry_after(estimate_ns, jitter_ppm)

    assert 1 <= retry.header_s <= 60
    assert min(60, retry.estimate_s) <= retry.header_s <= retry.estimate_s + retry.estimate_s // 4 + 1
