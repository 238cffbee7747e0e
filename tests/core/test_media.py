"""What a media part is charged: the policy's numbers, by what the body shows of its size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.media import MediaCharge, MediaSize

FLAT = MediaCharge(700, 700)
PATCHES = MediaCharge(4, 1000, patch_side_pixels=28)
KIBS = MediaCharge(10, 500, tokens_per_kib=3)


@pytest.mark.parametrize(
    ("charge", "size", "expected"),
    [
        (FLAT, MediaSize(), 700),
        (FLAT, MediaSize(10**9, (10**6, 10**6)), 700),
        (PATCHES, MediaSize(), 1000),
        (PATCHES, MediaSize(10), 1000),
        (PATCHES, MediaSize(10, (1, 1)), 5),
        (PATCHES, MediaSize(10, (28, 29)), 6),
        (PATCHES, MediaSize(10, (840, 840)), 904),
        (PATCHES, MediaSize(10, (10**6, 10**6)), 1000),
        (KIBS, MediaSize(), 500),
        (KIBS, MediaSize(1), 13),
        (KIBS, MediaSize(1024), 13),
        (KIBS, MediaSize(1025), 16),
        (KIBS, MediaSize(10**9), 500),
    ],
)
def test_charge(charge: MediaCharge, size: MediaSize, expected: int) -> None:
    """A size adds to the flat charge what it begins, up to the largest charge, which an unknown size costs at once."""
    assert expected == charge.of(size)


COUNTS = st.integers(1, 2**31)
SIZES = st.builds(
    MediaSize,
    st.none() | st.integers(0, 2**40),
    st.none() | st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
)


@given(COUNTS, COUNTS, SIZES, st.none() | st.integers(1, 4096), st.none() | st.integers(1, 2**20))
def test_no_charge_is_free_or_above_the_largest(
    tokens: int, more: int, size: MediaSize, patch_side_pixels: int | None, tokens_per_kib: int | None
) -> None:
    """Whatever a client sends, the charge is an integer from the flat one to the largest."""
    charge = MediaCharge(tokens, tokens + more, patch_side_pixels, tokens_per_kib).of(size)

    assert isinstance(charge, int)
    assert tokens <= charge <= tokens + more
