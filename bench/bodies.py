"""Chat bodies of a wanted size, made of genuine English text, no two requests alike.

The text is the reference that CPython carries for its own help(): half a megabyte of prose and examples. Sizes are
found by asking the service, so that a count in a result is the service's own. Each request carries a number of its
own in the user's message, so that no cache of whole messages answers for the tokenizer. Words repeat, as they do.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pydoc_data.topics import topics

from bench.load import request

PATH = "/v1/chat/completions"
MODEL = "qwen3"
OUTPUT_TOKENS = 16
SYSTEM = "You answer questions about the text that the user sends. Answer briefly, and quote the sentence you rely on."

NUMBER = b"Question %06d: "
"""Begins the user's message. Tokenizers of today take digits one by one, or by three, so all numbers count alike."""

NUMBERS_MAX = 10**6

CHARS_PER_TOKEN = 4.3
"""First guess; English prose has about four characters a token."""

TOLERANCE_RATIO = 0.01
ATTEMPTS_MAX = 32

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

    def requests(self) -> Iterator[bytes]:
        """Requests without end, all different: the bodies in turn, each time with another number."""
        first = NUMBER % 0
        for number, data in enumerate(cycle([request(PATH, body) for body in self.bodies])):
            yield data.replace(first, NUMBER % (number % NUMBERS_MAX), 1)


def chat(text: str) -> bytes:
    """A chat with a system message and a numbered `text` from the user."""
    numbered = (NUMBER % 0).decode() + text
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": numbered}]
    document = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS}
    # As the SDKs write it: no spaces, no escapes.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


async def build(name: str, count: int, tokens: int, ask: Count) -> Bodies:
    """`count` different bodies within 1 % of `tokens` input tokens; ValueError when that cannot be met."""
    text = " ".join(topics.values())
    stride = int(max(0, len(text) - tokens * CHARS_PER_TOKEN * 1.2)) // count
    made = [await _fitted(text[index * stride :], tokens, ask) for index in range(count)]
    if len(set(made)) < count:
        raise ValueError(f"the text is too short for {count} different bodies of {tokens} tokens")
    return Bodies(name, tuple(body for body, _ in made), tuple(found for _, found in made))


async def _fitted(text: str, tokens: int, ask: Count) -> tuple[bytes, int]:
    """The body of a prefix of `text` that comes close enough, and its tokens.

    Each try follows the density of the last one, and halves the bracket where that leads out of it: tables and rules
    of the text have many characters a token.
    """
    low, high = 0, len(text)
    chars = min(high, int(tokens * CHARS_PER_TOKEN))
    for _ in range(ATTEMPTS_MAX):
        body = chat(text[:chars])
        found = await ask(body)
        if abs(found - tokens) <= tokens * TOLERANCE_RATIO:
            return body, found
        low, high = (chars, high) if found < tokens else (low, chars)
        chars = chars * tokens // found
        if not low < chars < high:
            chars = (low + high) // 2
    raise ValueError(f"no text of about {tokens} tokens found")
