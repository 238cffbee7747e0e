"""Requests made to hurt: bodies that are dear to receive, to read, to render or to count."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping

from bench.bodies import MODEL, PATH

LARGE_BYTES = 27_000_000
TOKENS = 1_000_000


def _chat(content: object, **more: object) -> bytes:
    document = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16, **more}
    return json.dumps(document, separators=(",", ":")).encode()


def _tools(count: int) -> list[dict[str, object]]:
    properties = {f"argument_{index}": {"type": "string", "description": "what it is"} for index in range(20)}
    parameters = {"type": "object", "properties": properties}
    return [
        {"type": "function", "function": {"name": f"tool_{index}", "description": "x", "parameters": parameters}}
        for index in range(count)
    ]


def bodies() -> Mapping[str, bytes]:
    """JSON bodies by what is wrong with them."""
    turns = [{"role": "user", "content": "and then"}, {"role": "assistant", "content": "nothing"}] * 5_000
    return {
        "one string of 27 MB": _chat("a b " * (LARGE_BYTES // 4)),
        "500,000 strings in 24 MB": _chat([{"type": "text", "text": "x" * 16}] * 500_000),
        "1 M tokens": _chat("the " * TOKENS),
        "200 KB of one letter": _chat("a" * 200_000),
        "100 tools": _chat("hello", tools=_tools(100)),
        "10,000 messages": json.dumps({"model": MODEL, "messages": turns, "max_tokens": 16}).encode(),
        "10,000 levels deep": b'{"model":"%s","messages":%s%s}' % (MODEL.encode(), b"[" * 10_000, b"]" * 10_000),
    }


def requests() -> Mapping[str, bytes]:
    """The requests of a flood, as they go over the wire; the last one is a bomb: 64 MB, packed."""
    found = {name: _request(body) for name, body in bodies().items()}
    bomb = gzip.compress(_chat("a" * 64_000_000), 9, mtime=0)
    return {**found, "gzip bomb of 64 MB": _request(bomb, b"content-encoding: gzip\r\n")}


def _request(body: bytes, more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (PATH.encode(), more, len(body)) + body
