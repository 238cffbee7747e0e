"""What engines say they counted is found in responses of every form, however their bytes are cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.counting.usage import READ_BYTES_MAX, UsageReader

CHUNK = {"choices": [{"delta": {"content": 'say "usage": {"prompt_tokens": 1}'}}], "usage": None}
LAST = {"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 4}}


def read(chunks: Iterable[bytes]) -> int | None:
    """The input tokens stated in a response of these chunks."""
    reader = UsageReader()
    for chunk in chunks:
        reader.feed(chunk)
    reader.end()
    return reader.input_tokens


def events(*documents: Any, end: str = "\n\n") -> bytes:
    """A stream of server-sent events."""
    lines = [f"data: {json.dumps(document)}{end}" for document in documents]
    return "".join([": ping" + end, *lines, "data: [DONE]" + end]).encode()


STREAM = events(CHUNK, LAST)
DOCUMENT = json.dumps({"choices": [{"message": {"content": "x" * 50}}], **LAST}, indent=1).encode()


@given(
    body=st.sampled_from([STREAM, events(CHUNK, LAST, end="\r\n\r\n"), events(CHUNK, LAST, end="\r\r"), DOCUMENT]),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_every_split_reads_the_same(body: bytes, cuts: list[int]) -> None:
    """Chunks may end anywhere, in a word, in a line end, or before the first byte."""
    places = sorted({0, *(min(cut, len(body)) for cut in cuts), len(body)})

    assert 17 == read([b"", *(body[a:b] for a, b in pairwise(places))])
    assert 17 == read(body[at : at + 1] for at in range(len(body)))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (json.dumps({"usage": {"input_tokens": 5, "output_tokens": 1}}).encode(), 5),
        (events({"type": "response.completed", "response": {"usage": {"input_tokens": 6}}}), 6),
        (
            events(
                {"type": "message_start", "message": {"usage": {"input_tokens": 7}}}, {"usage": {"output_tokens": 1}}
            ),
            7,
        ),
        (b'{"usage":{"input_tokens":7,"cache_read_input_tokens":3,"cache_creation_input_tokens":null}}', 10),
        (b'{"text":"","meta_info":{"prompt_tokens":8}}', 8),
        (events({"usage": {"prompt_tokens": 1}}, {"usage": {"prompt_tokens": 2}}), 2),
        (STREAM.replace(b"data: ", b"data:"), 17),
        (b'{"error":{"message":"usage"}}', None),
        (b'{"usage":{"prompt_tokens":"9"}}', None),
        (b'{"usage":{"prompt_tokens":true,"input_tokens":9.5}}', None),
        (b'{"usage":[]}', None),
        (b'["usage"]', None),
        (b'{"usage":{"prompt_tokens":9}', None),
        (b"", None),
        (b"\x1f\x8b\x08\x00\n\x00", None),
    ],
)
def test_every_form_is_read(body: bytes, expected: int | None) -> None:
    """OpenAI's, Anthropic's and SGLang's words, and nothing that only looks like them."""
    assert expected == read([body])


def test_what_is_held_is_bounded() -> None:
    """A longer document is not read, and a longer line is passed over for the next one."""
    padding = b" " * READ_BYTES_MAX
    line = b'data: {"usage":{"prompt_tokens":1},"x":"' + padding + b'"}\n\n'

    assert read([b"{", padding, b'"usage":{"prompt_tokens":1}}']) is None
    assert read([line[:9], line[9:-9], line[-9:]]) is None
    assert 17 == read([line[:9], line[9:-9], line[-9:], STREAM])
