"""What the simulated engine reads from request bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.demo.engine_request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    GenerationRequest,
    RequestError,
    RequestReader,
    estimate_prompts_tokens,
)

CONTEXT = 1000
READER = RequestReader(("qwen3", "alias"), CONTEXT, estimate_prompts_tokens)
MESSAGES = [{"role": "user", "content": "12345678"}]


def read(path: str, fields: dict[str, Any]) -> GenerationRequest:
    """The request that the engine reads from a body of these fields."""
    return READER.read(path, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("fields", "ceiling"),
    [
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"max_completion_tokens": None, "max_tokens": 9}, 9),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": CONTEXT}, CONTEXT - 2),
        ({"max_tokens": None}, CONTEXT - 2),
        ({}, CONTEXT - 2),
    ],
)
def test_chat_ceiling(fields: dict[str, Any], ceiling: int) -> None:
    """max_completion_tokens beats max_tokens, null counts as absent, and what the prompt leaves bounds them all."""
    assert (ceiling,) == read(CHAT_PATH, {"messages": MESSAGES, **fields}).ceilings_tokens


@pytest.mark.parametrize(
    ("fields", "ceiling"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": 0, "echo": True}, 1)],
)
def test_completion_ceiling(fields: dict[str, Any], ceiling: int) -> None:
    """A completion without a ceiling runs for 16 tokens, and one that only echoes for 1."""
    assert (ceiling,) == read(COMPLETIONS_PATH, {"prompt": "abc", **fields}).ceilings_tokens


@pytest.mark.parametrize(
    ("prompt", "prompts_tokens"),
    [
        ("12345", (2,)),
        ("é" * 4, (2,)),
        ([5, 6, 7], (3,)),
        (["1234", "123456789"], (1, 3)),
        ([[1, 2], [3]], (2, 1)),
    ],
)
def test_prompts_are_counted_each(prompt: object, prompts_tokens: tuple[int, ...]) -> None:
    """Text counts a token for four UTF-8 bytes, rounded up; token ids count one each."""
    assert prompts_tokens == read(COMPLETIONS_PATH, {"prompt": prompt}).prompts_tokens


def test_text_parts_count_and_other_parts_do_not() -> None:
    """The texts of all messages count together, whether they are strings or parts."""
    parts = [{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {"url": "data:x" * 99}}]
    messages = [{"role": "system", "content": "12345678"}, {"role": "user", "content": parts}, {"role": "assistant"}]

    assert (3,) == read(CHAT_PATH, {"messages": messages}).prompts_tokens


def test_reserve_holds_input_once_and_output_for_each_sequence() -> None:
    """A request holds each prompt once and the ceiling for each sequence of each prompt."""
    request = read(COMPLETIONS_PATH, {"prompt": ["1234", "12345678"], "max_tokens": 10, "n": 3})

    assert 3 + 3 * 20 == request.reserve_tokens


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (CHAT_PATH, {"messages": MESSAGES, "model": "other"}, 404, "model"),
        (CHAT_PATH, {"messages": MESSAGES, "stream_options": {}}, 400, "stream_options"),
        (CHAT_PATH, {"messages": MESSAGES, "stream": True, "stream_options": 1}, 400, "stream_options"),
        (CHAT_PATH, {"messages": MESSAGES, "max_tokens": CONTEXT + 1}, 400, "max_tokens"),
        (CHAT_PATH, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT_PATH, {"messages": MESSAGES, "max_tokens": "9"}, 400, "max_tokens"),
        (CHAT_PATH, {"messages": MESSAGES, "max_tokens": True}, 400, "max_tokens"),
        (CHAT_PATH, {"messages": MESSAGES, "n": 0}, 400, "n"),
        (CHAT_PATH, {"messages": MESSAGES, "n": 129}, 400, "n"),
        (CHAT_PATH, {"messages": []}, 400, "messages"),
        (CHAT_PATH, {"messages": ["x"]}, 400, "messages"),
        (COMPLETIONS_PATH, {}, 400, "prompt"),
        (COMPLETIONS_PATH, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS_PATH, {"prompt": [[]]}, 400, "prompt"),
        (COMPLETIONS_PATH, {"prompt": [1, "x"]}, 400, "prompt"),
        (COMPLETIONS_PATH, {"prompt": ["x"] * 1025}, 400, "prompt"),
        (COMPLETIONS_PATH, {"prompt": [1] * CONTEXT}, 400, "max_tokens"),
        (COMPLETIONS_PATH, {"prompt": [1] * (CONTEXT + 1)}, 400, "input_tokens"),
    ],
)
def test_refused_bodies(path: str, fields: dict[str, Any], status: int, param: str) -> None:
    """The engine refuses what vLLM refuses, and names the field."""
    with pytest.raises(RequestError) as caught:
        read(path, fields)

    assert (status, param) == (caught.value.status, caught.value.param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_bodies_that_are_no_objects(body: bytes) -> None:
    """A body that is not a JSON object is refused with 400."""
    with pytest.raises(RequestError) as caught:
        READER.read(CHAT_PATH, body)

    assert 400 == caught.value.status


def test_absent_model_is_the_first() -> None:
    """A request without a model runs on the first one, and an alias keeps its name."""
    assert ["qwen3", "qwen3", "alias"] == [
        read(CHAT_PATH, {"messages": MESSAGES, **fields}).model for fields in ({}, {"model": None}, {"model": "alias"})
    ]
