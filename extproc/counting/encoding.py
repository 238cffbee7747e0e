"""Content encodings: a compressed body as the bytes that an engine reads, within a bound.

Engines read no compressed bodies, so the decoded one is what is counted and what the engine gets. br and zstd need the
extra `tokenlane[encodings]`; zstd is in Python itself from 3.14.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

from extproc.core.values import BUILT_IN_ENCODINGS, Encoding, Fault, Reason
from extproc.counting.fields import malformed

MEMBERS_MAX = 64
"""Members or frames of one body, one after the other: each costs a copy of what follows it."""

ZSTD_WINDOW_LOG_MAX = 23
"""8 MiB, the largest window of this content encoding (RFC 9659)."""

BROTLI_VERSION_MIN = (1, 2)
"""Older ones put out all that a body becomes, and no bound is possible."""

BROTLI_STEP_BYTES = 2**18
"""Output asked for at a time: its buffer grows in steps that double, beyond what is asked for."""


class _Decoder(Protocol):
    """A decoder of one member, as zlib's: `decompress` gives at most `max_length` bytes, and all that it can."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes: ...


class _BrotliDecoder:
    """brotli's decoder in the shape of zlib's. It takes bytes after the end for an error by itself."""

    unused_data = b""

    def __init__(self, decoder: Any) -> None:  # noqa: ANN401 (a class of an extra)
        self._decoder = decoder

    @property
    def eof(self) -> bool:
        return bool(self._decoder.is_finished())

    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes:
        parts = list[bytes]()
        while max_length > 0:
            part = self._decoder.process(data, output_buffer_limit=min(max_length, BROTLI_STEP_BYTES))
            parts.append(part)
            max_length -= len(part)
            data = b""
            if self.eof or not part:  # without output, it waits for more input
                break
        return b"".join(parts)


def _module(*names: str) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


_brotli = _module("brotli")
_zstd = _module("compression.zstd", "backports.zstd")


def _brotli_is_bounded() -> bool:
    if _brotli is None:
        return False
    major, minor, *_ = _brotli.__version__.split(".")
    return (int(major), int(minor)) >= BROTLI_VERSION_MIN


def _decoders() -> dict[Encoding, tuple[Callable[[], _Decoder], type[Exception]]]:
    """How each encoding that is available is decoded, and what its library raises."""
    # zlib's words for gzip (RFC 1952), and for deflate within zlib's format (RFC 1950), which HTTP means by it.
    found: dict[Encoding, tuple[Callable[[], _Decoder], type[Exception]]] = {
        Encoding.GZIP: (lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error),
        Encoding.DEFLATE: (lambda: zlib.decompressobj(zlib.MAX_WBITS), zlib.error),
    }
    if _brotli is not None and _brotli_is_bounded():
        brotli = _brotli
        found[Encoding.BR] = (lambda: _BrotliDecoder(brotli.Decompressor()), brotli.error)
    if _zstd is not None:
        zstd = _zstd
        options = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
        found[Encoding.ZSTD] = (lambda: zstd.ZstdDecompressor(options=options), zstd.ZstdError)
    return found


_DECODERS: Mapping[Encoding, tuple[Callable[[], _Decoder], type[Exception]]] = MappingProxyType(_decoders())


def available_encodings() -> frozenset[Encoding]:
    """The encodings that can be decoded here."""
    return BUILT_IN_ENCODINGS | _DECODERS.keys()


def decoded(body: bytes | memoryview, encoding: Encoding, bytes_max: int) -> bytes:
    """What `body` holds; Fault for what is not in that format, or larger than `bytes_max` once decoded.

    No more than a step over the bound is ever decoded, whatever the body could become.
    """
    make, error = _DECODERS[encoding]
    parts, left, rest = list[bytes](), bytes_max + 1, body
    while rest:  # gzip may be several members, zstd several frames, one after the other
        if len(parts) == MEMBERS_MAX:
            raise malformed(f"the compressed body has more than {MEMBERS_MAX} members", "content-encoding")
        decoder = make()
        try:
            part = decoder.decompress(rest, left)
        except error:
            raise malformed(
                f"the body is not {encoding}, which its content-encoding says", "content-encoding"
            ) from None
        parts.append(part)
        left -= len(part)
        if left <= 0:
            raise Fault(
                Reason.BODY_TOO_LARGE,
                f"request body is too large once decoded: more than {bytes_max} bytes",
                details={"body_bytes_max": bytes_max},
            )
        if not decoder.eof:
            raise malformed("the compressed body ends too early", "content-encoding")
        rest = decoder.unused_data
    return b"".join(parts)
