"""What an engine says it counted: `usage` in a response, as JSON or as server-sent events, in chunks of any size.

Fields: OpenAI's `usage.prompt_tokens` (chat, completions, embeddings); `usage.input_tokens` of Responses (also within
`response`) and of Anthropic's Messages (also within `message`), where tokens read from or written to a cache are
counted beside it; SGLang's `meta_info.prompt_tokens`. The last one that is stated holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import orjson

READ_BYTES_MAX = 2**20
"""Longest JSON body, and longest line of an event stream, that is looked at: parsing one takes a few milliseconds."""

_MARKS = (b'"usage"', b'"meta_info"')
_HOLDERS = ("response", "message")
_CACHED = ("cache_creation_input_tokens", "cache_read_input_tokens")


class UsageReader:
    """Feed it the bytes of one response; `input_tokens` is what the engine stated so far, None before that."""

    def __init__(self) -> None:
        self.input_tokens: int | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._is_document: bool | None = None

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        if self._is_document is None:
            start = chunk.lstrip()[:1]
            if not start:
                return
            self._is_document = start == b"{"
        if self._is_document or not (b"\n" in chunk or b"\r" in chunk):
            self._hold(chunk)
            return
        *lines, rest = b"".join((*self._parts, chunk)).replace(b"\r", b"\n").split(b"\n")
        self._drop()
        for line in lines:
            self._event(line)
        self._hold(rest)

    def end(self) -> None:
        """No more bytes will come."""
        self._event(b"".join(self._parts))
        self._drop()

    def _hold(self, part: bytes) -> None:
        # What is too long stays too long: no part of it is taken for a line.
        self._held_bytes += len(part)
        if self._held_bytes <= READ_BYTES_MAX:
            self._parts.append(part)
        else:
            self._parts.clear()

    def _drop(self) -> None:
        self._parts.clear()
        self._held_bytes = 0

    def _event(self, line: bytes) -> None:
        """A JSON document, or one line of an event stream that holds one."""
        if not any(mark in line for mark in _MARKS):
            return
        try:
            document = orjson.loads(line.removeprefix(b"data:"))
        except orjson.JSONDecodeError:
            return
        for usage in _usages(document):
            stated = _input_tokens(usage)
            if stated is not None:
                self.input_tokens = stated


def _usages(document: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(document, dict):
        return
    for holder in (document, *(document.get(name) for name in _HOLDERS)):
        if isinstance(holder, dict):
            for found in (holder.get("usage"), holder.get("meta_info")):
                if isinstance(found, dict):
                    yield found


def _input_tokens(usage: Mapping[str, object]) -> int | None:
    if type(usage.get("prompt_tokens")) is int:
        return usage["prompt_tokens"]  # type: ignore[return-value]
    stated = usage.get("input_tokens")
    if type(stated) is not int:
        return None
    cached = [usage.get(name) for name in _CACHED]
    return stated + sum(tokens for tokens in cached if type(tokens) is int)
