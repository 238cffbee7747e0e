"""Counts of segments: a chat that has grown by a turn pays for that turn.

A tokenizer first cuts a text at its added tokens; then it normalizes, splits and merges each piece by itself. Where a
text is cut before an added token that is found wherever it is written, its tokens are the sum of its segments' tokens.
Such added tokens are *cuts*: those of the model's own chat template, as far as

- no added token is stripped or bound to word boundaries (`lstrip`, `rstrip`, `single_word` look across a cut);
- the cut overlaps no other added token and not itself, whole or in part, so that none of them can take a piece of it;
- it is found in the raw text: not `normalized`, or there is no normalizer;
- normalizer, pre-tokenizer, model and post-processor are of kinds that keep to their piece.

What holds by these rules is proven at load on texts around cuts, and in service the reference counts a run of segments
in one piece at one call in `SHADOW_EVERY`. Any doubt, once, ends the cache for good.

Counts are kept under a keyed digest of their segment, never under its text. They are kept in memory alone, a bounded
number of them, with those used least recently the first to go.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

import tokenizers

from extproc.counting import probe
from extproc.counting.components import parts
from extproc.counting.fast import SHADOW_CHARS_MAX, SHADOW_EVERY

SEGMENTS_MAX = 32_768
"""Counts kept for one tokenizer: some 6 MB in each process, and the turns of a thousand long chats."""

SEGMENT_CHARS_MIN = 256
"""Cuts nearer than this to the last one are passed over: a digest and a look-up pay for a few hundred characters."""

_DIGEST_BLOCK_BYTES = 64
"""SHA-256 reads blocks of this size: a key of one block is hashed once, for all segments."""

_KINDS = {
    "normalizer": frozenset({"NFC", "NFD", "NFKC", "NFKD", "Replace"}),
    "pre-tokenizer": frozenset({"ByteLevel", "Digits", "Punctuation", "Split"}),
    "post-processor": frozenset({"ByteLevel", "TemplateProcessing"}),
}
"""Kinds that treat a piece by itself, and add the same number of tokens to every text."""


class CutError(Exception):
    """Segments of a tokenizer's texts cannot be counted apart; the message says why."""


class Library(Protocol):
    """What counts whole texts.

    Below `segmented_chars_min` characters it counts a text sooner than its segments are looked up.
    """

    inline_chars_max: int
    segmented_chars_min: int

    @property
    def name(self) -> str:
        """The library that counts."""
        ...

    @property
    def doubt(self) -> str | None:
        """Why the faster library does not count."""
        ...

    def warm(self) -> None:
        """Pay now for what the first text of the calling thread would cost."""
        ...

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text."""
        ...

    def check(self, text: str) -> int:
        """Tokens of `text` by the reference; the library is in doubt from then on if it counts otherwise."""
        ...


class SegmentCache:
    """A backend that counts with `library` what it has not counted before.

    Once there is a `doubt` it hands all texts on as they are. `special_tokens` are those that the tokenizer adds to a
    text when it is asked to.
    """

    def __init__(
        self,
        library: Library,
        cuts: Sequence[str],
        special_tokens: int,
        *,
        doubt: str | None = None,
        segments_max: int = SEGMENTS_MAX,
    ) -> None:
        self.segments_doubt = doubt
        """Why counts of segments are not kept; None while they are."""
        self.inline_chars_max = library.inline_chars_max
        self.library = library
        self.cuts = tuple(cuts)
        self.segmented_chars_min = library.segmented_chars_min
        self._cut = _pattern(cuts)
        self._special_tokens = special_tokens
        self._segments_max = segments_max
        self._keyed = hashlib.sha256(secrets.token_bytes(_DIGEST_BLOCK_BYTES))
        self._calls = 0
        self._counted_by = library.name
        self._kept = _Kept(segments_max)

    @property
    def name(self) -> str:
        """The library that counts."""
        return self.library.name

    @property
    def doubt(self) -> str | None:
        """Why the faster library does not count."""
        return self.library.doubt

    @property
    def segments_kept(self) -> int:
        """How many counts are kept at the moment."""
        return len(self._kept)

    def warm(self) -> None:
        """Pay for the caches of the calling thread."""
        self.library.warm()

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text. What is not known yet reaches the library in one call, equal segments once."""
        if self.segments_doubt is not None or max(map(len, texts), default=0) < self.segmented_chars_min:
            return self.library.count_batch(texts, add_special_tokens=add_special_tokens)
        if not any(self._cut.search(text, SEGMENT_CHARS_MIN) for text in texts):
            return self.library.count_batch(texts, add_special_tokens=add_special_tokens)
        divided = [list(segments(text, self._cut, SEGMENT_CHARS_MIN)) for text in texts]
        counts = self._sums(divided)
        self._calls += 1
        if self._calls % SHADOW_EVERY == 0:
            self._check(max(divided, key=len))
            if self.segments_doubt is not None:
                return self.library.count_batch(texts, add_special_tokens=add_special_tokens)
            counts = self._sums(divided)  # the library may have failed the check, and its counts with it
        added = self._special_tokens if add_special_tokens else 0
        return [count + added for count in counts]

    def _sums(self, divided: Sequence[Sequence[str]]) -> list[int]:
        if self._counted_by != self.library.name:  # it has found a fault in what it counted before
            # In this order: who sees the new name must not find the old counts.
            self._kept = _Kept(self._segments_max)
            self._counted_by = self.library.name
        # Taken once: what a call counts while others are dropped is dropped with them.
        kept = self._kept
        counts: list[int] = []
        missing: dict[bytes, str] = {}
        places: list[tuple[int, bytes]] = []
        for index, parted in enumerate(divided):
            known = 0
            for segment in parted:
                digest = self._digest(segment)
                count = kept.get(digest)
                if count is None:
                    missing[digest] = segment
                    places.append((index, digest))
                else:
                    known += count
            counts.append(known)
        if missing:
            found = self.library.count_batch(list(missing.values()), add_special_tokens=False)
            counted = dict(zip(missing, found, strict=True))
            kept.keep(counted)
            for index, digest in places:
                counts[index] += counted[digest]
        return counts

    def _digest(self, segment: str) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(segment.encode())
        return keyed.digest()

    def _check(self, parted: Sequence[str]) -> None:
        """Compare a run of `parted` with the reference's count of it in one piece.

        Every check begins at another segment.
        """
        first = self._calls // SHADOW_EVERY % len(parted)
        run, size = [parted[first]], len(parted[first])
        for segment in parted[first + 1 :]:
            size += len(segment)
            if size > SHADOW_CHARS_MAX:
                break
            run.append(segment)
        if len(run) == 1:
            return
        whole = self.library.check("".join(run))
        summed = self._sums([run])[0]  # by the reference too, where the library has failed the check
        if whole != summed:
            self.segments_doubt = f"{summed} tokens in segments where the whole has {whole}"


class _Kept:
    """Counts by digest in two generations: one that fills, and the full one before it.

    A count that is asked for moves to the younger one, so that those go that nobody asks for. Reading takes no lock:
    what a reader misses because the generations change beside it is counted again.
    """

    def __init__(self, entries_max: int) -> None:
        self._generation_max = max(1, entries_max // 2)
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, digest: bytes) -> int | None:
        """The count of the segment with `digest`; None where it is not kept."""
        count = self._young.get(digest)
        if count is None:
            count = self._old.get(digest)
            if count is not None:
                self.keep({digest: count})
        return count

    def keep(self, counts: Mapping[bytes, int]) -> None:
        """Keep `counts`, and forget the older generation when the younger one is full."""
        with self._lock:
            for digest, count in counts.items():
                if len(self._young) >= self._generation_max:
                    self._young, self._old = {}, self._young
                self._young[digest] = count


def segments(text: str, cuts: re.Pattern[str], chars_min: int) -> Iterator[str]:
    """`text` in pieces of at least `chars_min` characters, but the last one; each but the first begins with a cut."""
    start = 0
    while (found := cuts.search(text, start + chars_min)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _pattern(cuts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, cuts)))


def find_cuts(tokenizer: tokenizers.Tokenizer, sources: Iterable[str]) -> tuple[str, ...]:
    """The cuts that the template texts `sources` name; CutError says why there are none.

    Other control tokens would be as exact, but a template writes none of the thousands that a vocabulary reserves.
    """
    _check_kinds(tokenizer)
    added = list(tokenizer.get_added_tokens_decoder().values())
    for token in added:
        if token.lstrip or token.rstrip or token.single_word:
            raise CutError(f"the added token {token.content!r} is matched by what is around it")
    normalizes = bool(parts(tokenizer.normalizer, "normalizers"))
    text = "\0".join(sources)
    contents = [token.content for token in added]
    cuts = tuple(
        token.content
        for token in added
        if token.content in text and not (normalizes and token.normalized) and _stands_alone(token.content, contents)
    )
    if not cuts:
        raise CutError("the chat template names no control token that is surely found wherever it is written")
    return cuts


def _check_kinds(tokenizer: tokenizers.Tokenizer) -> None:
    pre_tokenizers = parts(tokenizer.pre_tokenizer, "pretokenizers")
    found = {
        "normalizer": parts(tokenizer.normalizer, "normalizers"),
        "pre-tokenizer": pre_tokenizers,
        "post-processor": parts(tokenizer.post_processor, "processors"),
    }
    for component, steps in found.items():
        for kind in (step["type"] for step in steps):
            if kind not in _KINDS[component]:
                raise CutError(f"whether the {component} {kind} keeps to its piece is not known")
    if any(step.get("add_prefix_space") for step in pre_tokenizers):
        raise CutError("the pre-tokenizer adds a space to a piece")
    if not isinstance(tokenizer.model, tokenizers.models.BPE) or tokenizer.model.dropout:
        raise CutError("the model is no BPE that always merges alike")
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        raise CutError("the tokenizer truncates or pads")


def _stands_alone(cut: str, added: Iterable[str]) -> bool:
    """Whether no added token can share a character with an occurrence of `cut`."""
    heads = tuple(cut[:length] for length in range(1, len(cut)))
    tails = tuple(cut[length:] for length in range(1, len(cut)))
    if cut.endswith(heads):
        return False
    return not any(
        other != cut and (other in cut or cut in other or other.endswith(heads) or other.startswith(tails))
        for other in added
    )


def prove(tokenizer: tokenizers.Tokenizer, cuts: Sequence[str], special_tokens: int) -> None:
    """Compare the ids of whole texts with those of their segments, cut wherever possible; CutError if any differs.

    Ids and no counts: two errors in one text could cancel out.
    """
    pattern = _pattern(cuts)
    for text in probe.divided_texts(cuts, (token.content for token in tokenizer.get_added_tokens_decoder().values())):
        pieces = list(segments(text, pattern, 1))
        whole, *parted = tokenizer.encode_batch_fast([text, *pieces], add_special_tokens=False)
        if whole.ids != list(chain.from_iterable(piece.ids for piece in parted)):
            raise CutError(f"other tokens in segments than in the whole of a probe text of {len(text)} characters")
        completed = tokenizer.encode_batch_fast([text], add_special_tokens=True)[0]
        if len(completed) != len(whole) + special_tokens:
            raise CutError(f"a probe text of {len(text)} characters gets other special tokens than an empty one")
