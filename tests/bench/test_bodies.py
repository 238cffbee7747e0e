"""Bodies of a wanted size."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from bench.bodies import NUMBER, build, chat


async def words(body: bytes) -> int:
    """A tokenizer for tests: one token a word of the user's message."""
    return len(json.loads(body)["messages"][1]["content"].split())


async def test_bodies_have_the_wanted_size() -> None:
    """Each body is within 1 % of the wanted tokens, and its count is the one that was answered."""
    bodies = await build("chat", 8, 400, words)

    assert all(396 <= tokens <= 404 for tokens in bodies.input_tokens)
    assert [await words(body) for body in bodies.bodies] == list(bodies.input_tokens)


async def test_requests_differ() -> None:
    """No two requests are the same, so that no cache of bodies can help, and their sizes stay."""
    bodies = await build("chat", 8, 400, words)
    requests = list(islice(bodies.requests(), 24))

    assert 24 == len(set(requests))
    assert list(map(len, requests[:8])) == list(map(len, requests[16:]))


async def test_requests_carry_the_bodies() -> None:
    """The first requests are the measured bodies but for their numbers."""
    bodies = await build("chat", 2, 400, words)
    sent = [data.partition(b"\r\n\r\n")[2] for data in islice(bodies.requests(), 2)]

    assert [bodies.bodies[0], bodies.bodies[1].replace(NUMBER % 0, NUMBER % 1)] == sent


async def test_a_size_that_no_text_has() -> None:
    """A size beyond the text is an error, not a smaller body."""
    with pytest.raises(ValueError, match="no text"):
        await build("chat", 1, 10**7, words)


def test_a_body_is_what_an_sdk_sends() -> None:
    """Text goes out as UTF-8, without escapes."""
    assert "é€".encode() in chat("é€")
