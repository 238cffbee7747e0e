"""Media parts of a chat: checked, charged as the policy declares, and kept from templates and tokenizers.

A part holds its content as base64, or names a URL that the engine will fetch and the gateway never does. base64 must
be what engines decode; then its size is known, and for PNG, JPEG and WebP the size of the image by its header. A GIF's
is not: its frames may be larger than its header says.
"""

from __future__ import annotations

import binascii
import re
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from extproc.core.media import MediaCharge, MediaKind, MediaSize
from extproc.counting.fields import as_object, as_str, malformed

PARTS_MAX = 128
"""Media parts of one request: far more than an engine's context has room for, at hundreds of tokens each."""

JPEG_SEGMENTS_MAX = 256
"""Segments looked through for the size of a JPEG; a photo has some ten before it."""

SLICE_CHARS = 2**16
"""Characters of base64 decoded at a time: 0.4 ms."""

STANDS_AS = "."
"""A part in content that is one string. The engine writes a placeholder there, which the charge includes; a template
may leave out content that is empty."""

Charges = Mapping[MediaKind, MediaCharge]
NO_CHARGES: Charges = MappingProxyType({})

_TYPE = "messages.content.type"
_HTTP_URL = re.compile(r"https?://[^\s/]", re.IGNORECASE)
_DATA_URL = re.compile(r"data:(?:[a-z0-9.+-]+/[a-z0-9.+-]+)?;base64,", re.IGNORECASE)
_FORMAT = re.compile(r"[a-z0-9.+-]{1,32}", re.IGNORECASE)
_PATCHES = ("max_dynamic_patch", "min_dynamic_patch")


class Meter:
    """Adds up what the media parts of one request are charged."""

    def __init__(self, charges: Charges = NO_CHARGES) -> None:
        self._charges = charges
        self._parts = 0
        self._tokens = 0

    def add(self, part_type: object, part: Mapping[str, Any], known: frozenset[str]) -> dict[str, str]:
        """The part as a template sees it, charged; Fault for one that is not among the types `known` or malformed."""
        if not isinstance(part_type, str) or part_type not in known:
            raise malformed("content parts of this type are not accepted here", _TYPE)
        kind, read = _PARTS[part_type]
        charge = self._charges.get(kind)
        if charge is None:
            raise malformed(f"{kind} parts are not accepted here: the policy declares no charge for them", _TYPE)
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise malformed(f"messages hold more than {PARTS_MAX} media parts", "messages.content")
        self._tokens += charge.of(read(part))
        return {"type": kind.value}

    def taken(self) -> int:
        """Tokens added since the last call: those of one prompt."""
        tokens, self._tokens = self._tokens, 0
        return tokens


def _linked(key: str) -> Callable[[Mapping[str, Any]], MediaSize]:
    """A part with an object at `key` that has a `url`."""
    name = f"messages.content.{key}"

    def read(part: Mapping[str, Any]) -> MediaSize:
        target = as_object(name, part.get(key))
        for option in _PATCHES:
            if target.get(option) is not None:
                raise malformed(f"{option} would change what the part costs and is not accepted here", name)
        return _of_url(f"{name}.url", target.get("url"))

    return read


def _input_image(part: Mapping[str, Any]) -> MediaSize:
    return _of_url("messages.content.image_url", part.get("image_url"))


def _input_audio(part: Mapping[str, Any]) -> MediaSize:
    name = "messages.content.input_audio"
    audio = as_object(name, part.get("input_audio"))
    if not _FORMAT.fullmatch(str(as_str(f"{name}.format", audio.get("format")))):
        raise malformed(f"{name}.format must be the name of a format", f"{name}.format")
    return _of_content(f"{name}.data", audio.get("data"))


def _file(part: Mapping[str, Any]) -> MediaSize:
    name = "messages.content.file"
    return _of_url(f"{name}.file_data", as_object(name, part.get("file")).get("file_data"))


_PARTS: Mapping[str, tuple[MediaKind, Callable[[Mapping[str, Any]], MediaSize]]] = {
    "audio_url": (MediaKind.AUDIO, _linked("audio_url")),
    "file": (MediaKind.FILE, _file),
    "image_url": (MediaKind.IMAGE, _linked("image_url")),
    "input_audio": (MediaKind.AUDIO, _input_audio),
    "input_image": (MediaKind.IMAGE, _input_image),
    "video_url": (MediaKind.VIDEO, _linked("video_url")),
}
"""Part type -> what it holds, and how its size is read."""

PART_TYPES = frozenset(_PARTS)


def _of_url(name: str, value: object) -> MediaSize:
    url = str(as_str(name, value))
    if _HTTP_URL.match(url):
        return MediaSize()
    found = _DATA_URL.match(url)
    if found is None:
        raise malformed(f"{name} must be an http or https URL, or a data URL in base64", name)
    return _of_content(name, url[found.end() :])


def _of_content(name: str, value: object) -> MediaSize:
    text = str(as_str(name, value))
    try:
        # In slices, because the interpreter is held while one is decoded.
        slices = (text[at : at + SLICE_CHARS] for at in range(0, len(text), SLICE_CHARS))
        content = b"".join([binascii.a2b_base64(part, strict_mode=True) for part in slices])
    except ValueError:
        content = None
    if content is None or text.find("=", 0, max(0, len(text) - 2)) >= 0:
        raise malformed(f"{name} must hold base64, without line breaks", name)
    if not content:
        raise malformed(f"{name} holds nothing", name)
    return MediaSize(len(content), _pixels(content))


def _pixels(content: bytes) -> tuple[int, int] | None:
    """Width and height that the header of an image states; None for what is no image of a known format."""
    read = next((read for magic, read in _IMAGES.items() if content.startswith(magic)), None)
    try:
        found = None if read is None else read(content)
    except struct.error:  # it ends too early
        return None
    return found if found and all(found) else None


def _png(content: bytes) -> tuple[int, int] | None:
    if content[12:16] != b"IHDR" or content.count(b"IHDR") > 1:  # decoders take the last one
        return None
    width, height = struct.unpack_from(">II", content, 16)
    return width, height


def _jpeg(content: bytes) -> tuple[int, int] | None:
    """The size in the frame header, after segments that each state their length."""
    at = 2
    for _ in range(JPEG_SEGMENTS_MAX):
        mark, marker, length, height, width = struct.unpack_from(">BBHxHH", content, at)
        if mark != 0xFF or marker in _JPEG_WITHOUT_SIZE:
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # tables, not frames
            return width, height
        at += 2 + length
    return None


_JPEG_WITHOUT_SIZE = frozenset({0x00, 0x01, *range(0xD0, 0xDB), 0xFF})
"""Markers that have no length, and the start of the scan, which no frame header follows."""


def _webp(content: bytes) -> tuple[int, int] | None:
    kind = content[8:16]
    if kind == b"WEBPVP8X":
        width, width_high, height, height_high = struct.unpack_from("<HBHB", content, 24)
        return 1 + width + (width_high << 16), 1 + height + (height_high << 16)
    if kind == b"WEBPVP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"WEBPVP8 " and content[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", content, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


_IMAGES: Mapping[bytes, Callable[[bytes], tuple[int, int] | None]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8": _jpeg,
    b"RIFF": _webp,
}
