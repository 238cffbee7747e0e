"""Media parts of a prompt: what each is charged, because no gateway can count what an engine makes of one.

The charge is the policy's: a flat number of tokens, and more by the size where the body shows it. It is never above
`tokens_max`, which also stands for a part whose size the body does not show: nothing is fetched to learn it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import NamedTuple

BYTES_PER_KIB = 1024


@unique
class MediaKind(StrEnum):
    """What a part holds besides text."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


class MediaSize(NamedTuple):
    """What a body shows of a part: its bytes, and an image's width and height in pixels; None where it does not."""

    content_bytes: int | None = None
    pixels: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class MediaCharge:
    """Tokens of one part: `tokens`, and one for each patch of an image, or `tokens_per_kib` for its bytes."""

    tokens: int
    tokens_max: int
    patch_side_pixels: int | None = None
    tokens_per_kib: int | None = None

    def of(self, size: MediaSize) -> int:
        """The charge of a part of `size`; `tokens_max` where that is not known but matters."""
        grown = self._grown(size)
        return self.tokens_max if grown is None else min(self.tokens + grown, self.tokens_max)

    def _grown(self, size: MediaSize) -> int | None:
        if self.patch_side_pixels is not None:
            if size.pixels is None:
                return None
            width, height = (-(-side // self.patch_side_pixels) for side in size.pixels)
            return width * height
        if self.tokens_per_kib is not None:
            if size.content_bytes is None:
                return None
            return -(-size.content_bytes // BYTES_PER_KIB) * self.tokens_per_kib
        return 0
