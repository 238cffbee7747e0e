"""The bytes of a request of the schedule, and what a whole answer to it holds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from bench.chaos.schedule import Kind, Shot

MODEL = "qwen3"
CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
DEFAULT_CEILING_TOKENS = 64
CHOICES = 2
OVER_LIMITWORDS = 30_000

WORDS = ("the", "river", "master", "counts", "every", "ship", "that", "comes", "before", "the", "blue", "day")
"""One token each, wherever they stand: so an engine can count by words, on its own and without a tokenizer."""

CHAT_TOKENS = 8
"""What the chat template puts around the one message of a chat."""


STREAMS = frozenset({Kind.CHAT_STREAM, Kind.CHOICES_STREAM, Kind.DOCUMENT_STREAM})
GENERATING = STREAMS | {Kind.CHAT, Kind.IDS, Kind.OPEN_CEILING, Kind.DOCUMENT}
"""Kinds that an engine runs if there is room."""

_PATHS: Mapping[Kind, str] = MappingProxyType({Kind.CHOICES_STREAM: COMPLETIONS, Kind.IDS: COMPLETIONS})


def request_id(shot: Shot) -> str:
    """By which all logs know the request."""
    return f"soak-{shot.number}"


def request(shot: Shot) -> bytes:
    """The whole HTTP/1.1 request."""
    head = f"host: soak\r\nx-request-id: {request_id(shot)}\r\nconnection: close\r\n"
    if shot.kind is Kind.BYPASS:
        return f"GET {MODELS} HTTP/1.1\r\n{head}\r\n".encode()
    body = _malformed(shot) if shot.kind is Kind.MALFORMED else orjson.dumps(_document(shot))
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"POST {_PATHS.get(shot.kind, CHAT)} HTTP/1.1\r\n{head}\r\n".encode() + body


def sequences(shot: Shot) -> int:
    """Sequences that the engine generates."""
    return CHOICES if shot.kind is Kind.CHOICES_STREAM else 1


def output_tokens(shot: Shot) -> int:
    """Tokens of all sequences: an engine of the chaos run always generates up to the ceiling."""
    return DEFAULT_CEILING_TOKENS if shot.kind is Kind.OPEN_CEILING else sequences(shot) * shot.max_tokens


def prompts_tokens(_path: str, _body: bytes, fields: dict[str, Any]) -> tuple[int, ...]:
    """The engine's own count of a request of the schedule: its words, or its ids."""
    if "messages" in fields:
        return (len(fields["messages"][0]["content"].split()) + CHAT_TOKENS,)
    prompt = fields["prompt"]
    return (len(prompt.split() if isinstance(prompt, str) else prompt),)


def _text(words: int, first: int) -> str:
    return " ".join(WORDS[(first + index) % len(WORDS)] for index in range(words))


def _document(shot: Shot) -> dict[str, Any]:
    ceiling = {} if shot.kind is Kind.OPEN_CEILING else {"max_tokens": shot.max_tokens}
    fields: dict[str, Any] = {"model": MODEL, "stream": shot.kind in STREAMS, **ceiling}
    match shot.kind:
        case Kind.CHOICES_STREAM:
            return {**fields, "prompt": _text(shot.words, shot.number), "n": CHOICES}
        case Kind.IDS:
            return {**fields, "prompt": [9] * shot.words}
        case Kind.UNKNOWN_MODEL:
            fields["model"] = "nobody"
    words = OVER_LIMITWORDS if shot.kind is Kind.OVER_LIMIT else shot.words
    return {**fields, "messages": [{"role": "user", "content": _text(words, shot.number)}]}


def _malformed(shot: Shot) -> bytes:
    variants: tuple[bytes, ...] = (
        b"{",
        b"[]",
        b'{"model":"qwen3"}',
        b'{"model":"qwen3","messages":[]}',
        b'{"model":"qwen3","messages":[{"role":"user","content":"x"}],"max_tokens":"many"}',
        b'{"model":"qwen3","messages":[{"role":"user","content":"x"}],"max_tokens":-1}',
        b"\xff\xfe" * 20,
    )
    return variants[shot.number % len(variants)]
