"""Texts on which two tokenizers that differ anywhere are likely to differ.

Deterministic, some 300 KB: every added token alone and between text, every Unicode category, runs of white space,
contractions, digits, punctuation, code, scripts without spaces, emoji sequences, and text that normalization changes.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import cycle

CHARACTERS_PER_CATEGORY = 400
"""Evenly spread over each of Unicode's 30 categories; small categories are in whole."""

ENDS_CHARS = 64
"""How much of a long probe text stands beside a cut: more than the longest word or run that a tokenizer looks at."""

_PROSE = (
    "The harbour master's log says it didn't rain; they've 1,234.56 reasons (or 7e-3) to say we'll WAIT, don't you? "
    "I'M SURE IT'S FINE. Überraschung! Čeština, Ελληνικά, Русский язык, עברית, العربية, हिन्दी, ไทย, 한국어."
)
_CODE = (
    "def f(x: int = 0x1F) -> dict[str, Any]:\n\treturn {'a': x ** 2, **kw}  # note\n\n\n"
    "    if (a && b || !c) { i += 1; }\r\n\r\n<div class=\"x\">&nbsp;</div> SELECT * FROM t WHERE id='7';\n"
)
_DENSE = "机器学习模型在处理长文本时需要更多的显存。日本語のテキストには空白がない。ข้อความภาษาไทยไม่มีช่องว่าง"
_EMOJI = "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇭🇯🇵 ☺️ e\u0301 o\u0308 \u1100\u1161 \U0001d160 ﬁ ½ \u00a0 \u200b \ufeff x"
_WORDS = ("a", "Z", "word", "7", "2024", ".", "'s", "'S", "'\u017f", "'ll", "'", '"', "/", "-", "_", "é", "中", "🙂")
_SPACES = (" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028")


def texts(added_tokens: Iterable[str]) -> list[str]:
    """All probe texts for a tokenizer with `added_tokens`."""
    return [
        *(_PROSE * 8, _CODE * 8, _DENSE * 8, _EMOJI * 8, (_PROSE + _CODE + _DENSE + _EMOJI) * 20),
        *_spaced(),
        *_numbers_and_runs(),
        *_categories(),
        *_added(added_tokens),
    ]


def divided_texts(cuts: Iterable[str], added_tokens: Iterable[str]) -> Iterator[str]:
    """Texts with `cuts` before and after both ends of every probe text, and inside of one another.

    What a tokenizer makes of a cut depends on what is next to it, so of long texts the ends are enough.
    """
    every = [text for whole in texts(added_tokens) for text in (whole[:ENDS_CHARS], whole[-ENDS_CHARS:])]
    cuts = list(cuts)
    yield "".join(f"{cut}{text}" for text, cut in zip(every, cycle(cuts), strict=False))
    for cut in cuts:
        yield "".join(
            f"{other[:at]}{cut}{other[at:]}{cut[:at]}{other}{cut[at:]}"
            for other in cuts
            for at in (0, 1, len(cut) // 2, len(cut) - 1)
        )
        yield "".join(f"{cut}{space}{other}{space * 2}" for other in cuts for space in _SPACES)


def _spaced() -> Iterator[str]:
    for space in _SPACES:
        yield from (space * count for count in (1, 2, 3, 4, 7, 16, 40))
        yield space.join(_WORDS)
        yield (space * 2).join(_WORDS)
        yield " ".join(f"{word}{space}{word}" for word in _WORDS)
    yield " \n \n\n\t \n  x \r\n \n\n\n  y\t\t z "
    yield "".join(a + b for a in _WORDS for b in _WORDS)


def _numbers_and_runs() -> Iterator[str]:
    yield " ".join("1234567890123456"[:length] for length in range(1, 17))
    for character in "a=-*#.,'_/ \\{":
        yield " ".join(character * length for length in (1, 2, 3, 5, 8, 13, 64))


@cache
def _categories() -> tuple[str, ...]:
    return tuple(_by_category())


def _by_category() -> Iterator[str]:
    by_category: dict[str, list[str]] = defaultdict(list)
    for point in range(sys.maxunicode + 1):
        by_category[unicodedata.category(chr(point))].append(chr(point))
    del by_category["Cs"]  # halves of characters are no text
    for characters in by_category.values():
        chosen = characters[:: max(1, len(characters) // CHARACTERS_PER_CATEGORY)]
        yield "".join(chosen)
        yield " ".join(f"a{character}b {character}{character}7" for character in chosen)


def _added(added_tokens: Iterable[str]) -> Iterator[str]:
    known = sorted(added_tokens)
    for start in range(0, len(known), 64):
        some = known[start : start + 64]
        yield "".join(some)
        yield "".join(f"a {token} b{token}{token}\n{token[:-1]} {token[1:]}" for token in some)
