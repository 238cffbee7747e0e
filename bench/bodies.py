"""Chat bodies of a wanted size, made of genuine English text, each of them different.

The text is the reference that CPython carries for its own help(): half a megabyte of prose and examples. Sizes are
found by asking the service, so that a count in a result is the service's own, and differing bodies keep a cache from
answering for the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

PATH = "/v1/chat/completions"
MODEL = "qwen3"
OUTPUT_TOKENS = 16
SYSTEM = "You answer questions about the text that the user sends. Answer briefly, and quote the sentence you rely on."

CHARS_PER_TOKEN = 4.3
"""First guess; English prose has about four characters a token."""

TOLERANCE_RATIO = 0.01
ATTEMPTS_MAX = 12

Count = Callable[[bytes], Awaitable[int]]
"""Input tokens of a body, as the service answers them."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """Bodies of about one size, with the input tokens of each."""

    name: str
    bodies: tuple[bytes, ...]
    input_tokens: tuple[int, ...]

    @property
    def body_bytes(self) -> int:
        """Their mean size."""
        return sum(map(len, self.bodies)) // len(self.bodies)


def chat(text: str) -> bytes:
    """A chat with a system message and `text` from the user."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS}).encode()


async def build(name: str, count: int, tokens: int, ask: Count) -> Bodies:
    """`count` different bodies within 1 % of `tokens` input tokens; ValueError when that cannot be met."""
    text = " ".join(topics.values())
    stride = int(max(0, len(text) - tokens * CHARS_PER_TOKEN * 1.2)) // count
    made = [await _fitted(text[index * stride :], tokens, ask) for index in range(count)]
    if len(set(made)) < count:
        raise ValueError(f"the text is too short for {count} different bodies of {tokens} tokens")
    return Bodies(name, tuple(body for body, _ in made), tuple(found for _, found in made))


async def _fitted(text: str, tokens: int, ask: Count) -> tuple[bytes, int]:
    """The body of a prefix of `text` that comes close enough, and its tokens."""
    chars = int(tokens * CHARS_PER_TOKEN)
    for _ in range(ATTEMPTS_MAX):
        body = chat(text[:chars])
        found = await ask(body)
        if abs(found - tokens) <= tokens * TOLERANCE_RATIO:
            return body, found
        chars += int((tokens - found) * CHARS_PER_TOKEN * 0.8)
    raise ValueError(f"no text of about {tokens} tokens found")
