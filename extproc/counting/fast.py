"""fastokens: the same ids as Hugging Face `tokenizers`, many times faster, where that is proven.

A tokenizer is used only after it has given the ids of the reference for every probe text. In service one call in
`SHADOW_EVERY` is counted by the reference too. An exception or a difference, once, makes the reference count from
then on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import tokenizers

from extproc.counting import probe

SHADOW_EVERY = 1000
"""Calls for each that the reference repeats: its share of the time stays in the order of the fast count's own."""

SHADOW_CHARS_MAX = 16_384
"""Longer texts are not repeated: the reference needs about a millisecond for 2 KB."""

WARM_UP = "The first text of a thread pays for its caches. " * 2000
"""96 KB: caches are of the thread, and the first text over 64 KB pays once more."""


class FastBackend:
    """Counts with fastokens, and with `reference` once there is a doubt."""

    inline_chars_max = 16_384
    """Texts to count on the event loop: some 0.1 ms of prose, 2 ms of the worst text found (one letter repeated)."""
    segmented_chars_min = 16_384
    """What is counted on the event loop is counted whole: segments that are new cost as much again as their tokens, and
    prose of this size takes 0.1 ms."""

    def __init__(self, tokenizer_json: str, reference: tokenizers.Tokenizer) -> None:
        import fastokens  # noqa: PLC0415 (an optional extra)

        self.doubt: str | None = None
        """Why the reference counts instead; None while there is no reason."""
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        self._reference = reference
        self._calls = 0

    @property
    def name(self) -> str:
        """Who counts at the moment."""
        return "fastokens" if self.doubt is None else "huggingface"

    def prove(self) -> None:
        """Compare the ids of every probe text; a difference becomes the doubt."""
        texts = probe.texts(token.content for token in self._reference.get_added_tokens_decoder().values())
        expected = self._reference.encode_batch_fast(texts, add_special_tokens=True)
        for text, reference in zip(texts, expected, strict=True):
            if list(self._tokenizer.encode(text, add_special_tokens=True).ids) != reference.ids:
                self.doubt = f"other ids than the reference for a probe text of {len(text)} characters"
                return

    def warm(self) -> None:
        """Pay for the caches of the calling thread."""
        self.count_batch([WARM_UP], add_special_tokens=False)

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text."""
        if self.doubt is not None:
            return count_by_reference(self._reference, texts, add_special_tokens=add_special_tokens)
        try:
            counts = self._count(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
            self.doubt = f"an error: {error!r}"
            return count_by_reference(self._reference, texts, add_special_tokens=add_special_tokens)
        self._calls += 1
        if self._calls % SHADOW_EVERY == 0 and sum(map(len, texts)) <= SHADOW_CHARS_MAX:
            return self._compared(counts, texts, add_special_tokens=add_special_tokens)
        return counts

    def check(self, text: str) -> int:
        """Tokens of `text` by the reference; another count becomes the doubt."""
        counts = self.count_batch([text], add_special_tokens=False)
        return self._compared(counts, [text], add_special_tokens=False)[0]

    def _compared(self, counts: list[int], texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        expected = count_by_reference(self._reference, texts, add_special_tokens=add_special_tokens)
        if counts != expected:
            self.doubt = f"{sum(counts)} tokens where the reference counts {sum(expected)}"
        return expected

    def _count(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        _, offsets = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=add_special_tokens)
        ends = memoryview(offsets).cast("Q")
        return [ends[index + 1] - ends[index] for index in range(len(texts))]


def count_by_reference(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
    """Tokens of each text by Hugging Face `tokenizers`."""
    return [
        len(encoding) for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    ]


def installed() -> bool:
    """Whether the extra is there."""
    return importlib.util.find_spec("fastokens") is not None
