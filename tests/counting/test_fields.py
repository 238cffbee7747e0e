"""Field checks coerce as the engine's request models do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from extproc.core.values import Fault, Reason
from extproc.counting.fields import (
    INT64_MAX,
    as_bool,
    as_float,
    as_int,
    checked,
    deeper_than,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    refused,
)

WORDS = st.sampled_from(
    [
        "5",
        " 5 ",
        "+5",
        "-5",
        "5.0",
        "5.00",
        "5.",
        "1_000",
        "1__0",
        "0x5",
        "",
        "05",
        "5e0",
        "true",
        "YES",
        "oN",
        "f",
        "N",
    ]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6), WORDS, st.just({"v": 1})
)


def refusal(value: object, kind: type[Any]) -> bool:
    """Whether pydantic's lax mode refuses `value` as a `kind`."""
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return True
    return False


@given(SCALARS)
@example("0\x1f")
@example("\u30007")
def test_integers_are_coerced_as_in_lax_mode(value: object) -> None:
    """What pydantic takes as an integer has the same value here; numbers beyond int64 are refused."""
    try:
        found = as_int("n", value)
    except Fault:
        expected = None if refusal(value, int) else TypeAdapter(int).validate_python(value)

        assert expected is None or not -INT64_MAX - 1 <= expected <= INT64_MAX
    else:
        assert TypeAdapter(int).validate_python(value) == found


@given(SCALARS)
def test_booleans_are_coerced_as_in_lax_mode(value: object) -> None:
    """What pydantic takes as a boolean has the same value here, and nothing else passes."""
    try:
        found = as_bool("stream", value)
    except Fault:
        assert refusal(value, bool)
    else:
        assert TypeAdapter(bool).validate_python(value) is found


@given(SCALARS)
def test_numbers_are_coerced_as_in_lax_mode(value: object) -> None:
    """A finite number for pydantic has the same value here; NaN and infinities do not pass."""
    try:
        found = as_float("temperature", value)
    except Fault:
        assert refusal(value, float) or not math.isfinite(TypeAdapter(float).validate_python(value))
    else:
        assert TypeAdapter(float).validate_python(value) == found


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (integer(1, 4), 0),
        (integer(1, 4), 5),
        (number(0), -0.1),
        (number(above=0), 0),
        (one_of("left", "right"), "up"),
        (one_of("left", "right"), ["left"]),
        (list_of(as_int), "12"),
        (list_of(as_int), [1, "x"]),
        (refused("is not accepted"), 0),
        (as_int, None),
    ],
)
def test_value_outside_its_range_is_malformed(check: Any, value: object) -> None:
    """A value outside its field's range is refused with the field's name."""
    with pytest.raises(Fault) as caught:
        check("field", value)

    assert Reason.MALFORMED_REQUEST is caught.value.reason
    assert "field" == caught.value.param


def test_table_checks_what_it_names_and_ignores_the_rest() -> None:
    """Fields outside the table pass unseen, nullable ones may be null."""
    table = {"n": nullable(as_int), "k": as_int}

    assert {"n": None, "k": 3} == checked({"n": None, "k": "3", "other": object()}, table)


@pytest.mark.parametrize(("value", "depth"), [(1, 0), ([], 1), ({"a": 1}, 1), ([[{"a": [1]}]], 4), ([1, [2]], 2)])
def test_depth_counts_arrays_and_objects(value: object, depth: int) -> None:
    """A value is deeper than every number below its count of nested containers, and no deeper."""
    assert [True] * depth + [False] == [deeper_than(value, levels) for levels in range(depth + 1)]


def test_depth_of_a_very_deep_value_needs_no_stack() -> None:
    """Measuring depth cannot exhaust the interpreter's stack."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]

    assert deeper_than(value, 50_000)
    while value:  # taken apart by hand: freeing it recursively would go as deep
        value = value.pop()
