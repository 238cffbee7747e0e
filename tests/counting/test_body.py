"""Bodies are read as `json.loads` reads them and changed in one field only."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.values import Fault, Reason
from extproc.counting.body import JSON_DEPTH_MAX, append_field, parse, rewritten

KEYS = st.text(max_size=6) | st.sampled_from(["max_tokens", "max_completion_tokens", "n", "tools"])


def _values(integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | integers | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=8,
    )


VALUES = _values(st.integers())
MODEST_VALUES = _values(st.integers(-(2**63), 2**63))
OBJECTS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=5)
INDENTS = st.sampled_from([None, 1])


def _message_with(number: int) -> dict[str, Any]:
    return {"messages": [{"content": [{"input": {"a": number}}]}]}


def nested(levels: int) -> bytes:
    """A body whose arrays and objects nest `levels` deep."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@given(document=OBJECTS, indent=INDENTS, ascii_only=st.booleans(), tail=st.sampled_from(["", " ", "\r\n\t"]))
def test_appended_field_changes_nothing_else(
    document: dict[str, Any], indent: int | None, ascii_only: bool, tail: str
) -> None:
    """One byte splice adds a field; the rest of the body stays byte for byte."""
    document.pop("max_tokens", None)
    document["z"] = 1
    body = (json.dumps(document, indent=indent, ensure_ascii=ascii_only) + tail).encode()
    after = append_field(body, "max_tokens", 77)

    assert {**json.loads(body), "max_tokens": 77} == json.loads(after)
    assert after.startswith(body[: body.rindex(b"}")])


@given(document=OBJECTS, indent=INDENTS, ascii_only=st.booleans())
def test_replaced_field_changes_nothing_else(document: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    """A body serialised again differs for `json.loads` in the one field."""
    body = json.dumps({**document, "max_tokens": None}, indent=indent, ensure_ascii=ascii_only).encode()

    assert {**json.loads(body), "max_tokens": 77} == json.loads(rewritten(body, ("max_tokens",), 77))


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens":null,"seed":123456789012345678901234567890,"x":-0.0,"y":1e400,"z":NaN,"d":1,"d":2}',
        b'\xef\xbb\xbf{"max_tokens":null,"t":"\\u00e9\\ud83d\\ude00 \xc3\xa9"}',
        b'{"max_tokens":null,"f":0.1000000000000000055511151231257827}',
    ],
)
def test_replaced_field_keeps_odd_values(body: bytes) -> None:
    """Big integers, negative zero, infinities, NaN and the last of duplicate keys survive a rewrite."""
    before = json.loads(body)
    after = json.loads(rewritten(body, ("max_tokens",), 5))

    assert repr({**before, "max_tokens": 5}) == repr(after)


@given(OBJECTS, INDENTS)
def test_parse_reads_what_json_reads(document: dict[str, Any], indent: int | None) -> None:
    """Values and key order are those of `json.loads`, but for integers that only a rendered field would show."""
    body = json.dumps({**document, "tools": [document]}, indent=indent).encode()

    assert repr(json.loads(body)) == repr(parse(body))


@given(st.lists(st.dictionaries(KEYS, MODEST_VALUES, max_size=3) | MODEST_VALUES, max_size=3))
def test_parse_reads_messages_as_json_does(messages: list[Any]) -> None:
    """Messages of text alone take a shorter way to the same values."""
    body = json.dumps({"messages": messages, "model": "m"}).encode()

    assert repr(json.loads(body)) == repr(parse(body))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"tools":[18446744073709551617]}', {"tools": [18446744073709551617]}),
        (b'{"t\\u006fols":[-9223372036854775809]}', {"tools": [-9223372036854775809]}),
        (b'\xef\xbb\xbf{"a":1}', {"a": 1}),
        (b'{"a":1e400}', {"a": float("inf")}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"max\\u005ftokens":9}', {"max_tokens": 9}),
        (b'{"messages":[{"content":[{"input":{"a":18446744073709551617}}]}]}', _message_with(18446744073709551617)),
    ],
)
def test_parse_agrees_with_json_where_orjson_differs(body: bytes, expected: dict[str, Any]) -> None:
    """Big integers, a byte order mark, infinities and duplicate keys are read as the engine reads them."""
    assert expected == parse(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n",
        b"[]",
        b"null",
        b'"{}"',
        b'{"a":1}}',
        b'{"a":1,}',
        b'{"a":01}',
        b'{"a":"\xe9"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-16-be"),
        '{"a":1}'.encode("utf-32"),
        '{"a":1}'.encode("utf-32-le"),
        '{"a":1}'.encode("utf-32-be"),
        b'{"a":' + b"9" * 5000 + b"}",
        nested(JSON_DEPTH_MAX + 1),
        nested(20_000),
        b'{"x":NaN,"a":' + b"[" * 100_000,
    ],
)
def test_parse_refuses_what_is_not_a_json_object_in_utf8(body: bytes) -> None:
    """Whatever the engine could not read, or reads in another encoding, is malformed."""
    with pytest.raises(Fault) as caught:
        parse(body)

    assert Reason.MALFORMED_REQUEST is caught.value.reason


def test_parse_reads_the_deepest_body_allowed() -> None:
    """The limit on depth itself is allowed."""
    assert "a" in parse(nested(JSON_DEPTH_MAX))
