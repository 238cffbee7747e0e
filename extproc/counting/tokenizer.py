"""A model directory's tokenizer: exact counts off the interpreter lock, and byte bounds without tokenizing.

`tokenizer.json` (or `tokenizer.json.xz`) is what engines load for a served model. Counts go through
`encode_batch_fast`, which releases the GIL; `encode` would hold it for the whole text. A loaded tokenizer is never
changed: truncation or padding set on a shared one fails concurrent calls.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from extproc.core.policy import TokenizerBackend, TokenizerMode
from extproc.counting import fast, segments
from extproc.counting.components import parts
from extproc.counting.fast import count_by_reference
from extproc.counting.segments import CutError, Library, SegmentCache

_NORMALIZED_BYTES_RATIO = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Replace": 1, "Prepend": 1}
"""How many times longer UTF-8 text can become under a normalizer (Unicode FAQ on normalization, table of maximum
expansion factors). `Replace` and `Prepend` write a word marker, which is one token however many bytes it has."""

_COMPOSING_NORMALIZERS = frozenset({"NFC", "NFKC", "Prepend", "Replace"})

_LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that drop no text, so that tokens cover all of it."""


class TokenizerError(Exception):
    """A tokenizer directory cannot be used; the message is a sentence for an operator."""


class Backend(Protocol):
    """Counts tokens of texts; blocking, and safe to call from several threads.

    Texts of up to `inline_chars_max` characters together take no longer than an event loop can spare. `name` is the
    library that counts, `doubt` says why it is not the faster one where that was tried, and `segments_doubt` why counts
    of segments are not kept.
    """

    inline_chars_max: int

    @property
    def name(self) -> str:
        """The library that counts."""
        ...

    @property
    def doubt(self) -> str | None:
        """Why the faster library does not count."""
        ...

    @property
    def segments_doubt(self) -> str | None:
        """Why counts of segments are not kept."""
        ...

    def warm(self) -> None:
        """Pay now for what the first text of the calling thread would cost."""
        ...

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text."""
        ...


class HfBackend:
    """Hugging Face `tokenizers`: about a millisecond for 2 KB, so nothing is counted on the event loop."""

    name = "huggingface"
    inline_chars_max = 0
    segmented_chars_min = 512
    """Texts of this size take 0.2 ms; looking up their segments, a hundredth of that."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, doubt: str | None = None) -> None:
        self.doubt = doubt
        self._tokenizer = tokenizer

    def warm(self) -> None:
        """Nothing is kept for a thread."""

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text."""
        return count_by_reference(self._tokenizer, texts, add_special_tokens=add_special_tokens)

    def check(self, text: str) -> int:
        """Tokens of `text`: this is the reference."""
        return self.count_batch([text], add_special_tokens=False)[0]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the byte length of a text says about its token count.

    `token_bytes_max` is the longest text that one token can stand for; None where nothing bounds it. `composes` says
    that the normalizer changes only text that is not composed already.
    `special_tokens` are those that the post-processor adds to a text.
    """

    token_bytes_max: int | None
    normalized_bytes_ratio: int
    composes: bool
    special_tokens: int

    def lower_tokens(self, text_bytes: int, *, stable: bool) -> int:
        """No fewer tokens than this."""
        if self.token_bytes_max is None or text_bytes == 0:
            return 0
        ratio = 1 if stable else self.normalized_bytes_ratio
        return -(-text_bytes // (self.token_bytes_max * ratio))

    def upper_tokens(self, text_bytes: int, *, stable: bool, add_special_tokens: bool) -> int:
        """No more tokens than this: one per byte, after normalization."""
        ratio = 1 if stable else self.normalized_bytes_ratio
        return ratio * text_bytes + 1 + (self.special_tokens if add_special_tokens else 0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tokenizer directory in memory.

    `token_id_max` is the largest id the engine takes in a prompt of ids. `special_tokens` maps `bos_token` and the
    like to their text. `templates` holds chat templates by name; empty where the model has none.
    """

    backend: Backend
    bounds: Bounds
    token_id_max: int
    special_tokens: dict[str, str]
    templates: dict[str, str]


def load(
    directory: Path,
    backend: TokenizerBackend = TokenizerBackend.HUGGINGFACE,
    mode: TokenizerMode = TokenizerMode.TEMPLATE,
    control_tokens: Sequence[str] = (),
) -> Loaded:
    """Read tokenizer, configuration and chat template; TokenizerError says what is missing or unusable.

    `control_tokens` are those of prompts that no template writes.
    """
    data = read_tokenizer(directory)
    tokenizer = _parse_tokenizer(directory, data)
    config = _read_json(directory / "tokenizer_config.json", required=True)
    model_config = _read_json(directory / "config.json", required=False)
    if model_config.get("model_type") == "gpt_oss" and mode is not TokenizerMode.HARMONY:
        raise TokenizerError(f"{directory}: this is gpt-oss, whose chats are Harmony's: set tokenizer_mode: harmony")
    vocab_size = model_config.get("vocab_size")
    special_tokens, templates = dict(_special_tokens(config)), _templates(directory, config)
    bounds = _bounds(tokenizer)
    named = (*special_tokens.values(), *templates.values(), *control_tokens)
    return Loaded(
        backend=_segmented(_library(tokenizer, data, backend), tokenizer, named, bounds.special_tokens),
        bounds=bounds,
        token_id_max=max(tokenizer.get_vocab_size(), vocab_size if isinstance(vocab_size, int) else 0) - 1,
        special_tokens=special_tokens,
        templates=templates,
    )


def context_tokens(directory: Path) -> int | None:
    """The context that a model directory states; None where it states none.

    `model_max_length` of tokenizer_config.json, else `max_position_embeddings` of config.json.
    """
    found = (
        _read_json(directory / "tokenizer_config.json", required=True).get("model_max_length"),
        _read_json(directory / "config.json", required=False).get("max_position_embeddings"),
    )
    # Tokenizers without a limit state 1e30, which is no context.
    return next((number for number in found if isinstance(number, int) and 0 < number <= 2**31), None)


def _library(tokenizer: tokenizers.Tokenizer, data: bytes, wanted: TokenizerBackend) -> Library:
    if wanted is TokenizerBackend.HUGGINGFACE or not fast.installed():
        return HfBackend(tokenizer)
    try:
        found = fast.FastBackend(data.decode(), tokenizer)
        found.prove()
    except Exception as error:  # noqa: BLE001 (whatever it cannot load, the reference can)
        return HfBackend(tokenizer, doubt=f"it does not load: {error}")
    return found if found.doubt is None else HfBackend(tokenizer, doubt=found.doubt)


def _segmented(
    library: Library, tokenizer: tokenizers.Tokenizer, named: Iterable[str], special_tokens: int
) -> SegmentCache:
    try:
        cuts = segments.find_cuts(tokenizer, named)
        segments.prove(tokenizer, cuts, special_tokens)
    except CutError as error:
        return SegmentCache(library, (), special_tokens, doubt=str(error))
    return SegmentCache(library, cuts, special_tokens)


def read_tokenizer(directory: Path) -> bytes:
    """tokenizer.json, unpacked; TokenizerError where it is not there."""
    plain, packed = directory / "tokenizer.json", directory / "tokenizer.json.xz"
    if not directory.is_dir():
        raise TokenizerError(f"{directory}: there is no such directory")
    try:
        return plain.read_bytes() if plain.exists() else lzma.decompress(packed.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise TokenizerError(f"{directory}: tokenizer.json or tokenizer.json.xz cannot be read: {error}") from error


def _parse_tokenizer(directory: Path, data: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{directory}: tokenizer.json is not a tokenizer this version reads: {error}") from error


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return document


def _special_tokens(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Special tokens as the template sees them: text, or an AddedToken written as an object with `content`."""
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                yield name, text


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    if path.exists():
        return {"default": path.read_text(encoding="utf-8")}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        return {str(entry["name"]): str(entry["template"]) for entry in stated}
    return {}


def _bounds(tokenizer: tokenizers.Tokenizer) -> Bounds:
    normalizers = [part["type"] for part in parts(tokenizer.normalizer, "normalizers")]
    pre_tokenizers = [part["type"] for part in parts(tokenizer.pre_tokenizer, "pretokenizers")]
    unknown = [name for name in normalizers if name not in _NORMALIZED_BYTES_RATIO]
    if unknown:
        raise TokenizerError(
            f"how long text becomes under the normalizer {unknown[0]} is not known, so counts have no bound"
        )
    ratio = 1
    for name in normalizers:
        ratio *= _NORMALIZED_BYTES_RATIO[name]
    byte_level = "ByteLevel" in pre_tokenizers
    lossless = _LOSSLESS_PRE_TOKENIZERS.issuperset(pre_tokenizers) and (
        byte_level or getattr(tokenizer.model, "byte_fallback", False)
    )
    return Bounds(
        token_bytes_max=_token_bytes_max(tokenizer, byte_level=byte_level) if lossless else None,
        normalized_bytes_ratio=ratio,
        composes=_COMPOSING_NORMALIZERS.issuperset(normalizers),
        special_tokens=len(tokenizer.encode_batch_fast([""], add_special_tokens=True)[0]),
    )


def _token_bytes_max(tokenizer: tokenizers.Tokenizer, *, byte_level: bool) -> int | None:
    """Bytes of the longest token. A byte-level vocabulary writes each byte as one character."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token swallows any run of spaces beside it
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    learned = max(map(len, vocabulary) if byte_level else (len(token.encode()) for token in vocabulary), default=1)
    return max([learned, *(len(token.content.encode()) for token in added)])
