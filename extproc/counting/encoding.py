"""Content encodings: a compressed body as the bytes that an engine reads, within a bound.

Engines read no compressed bodies, so the decoded one is what is counted and what the engine gets.
"""

from __future__ import annotations

import zlib

from extproc.core.values import Encoding, Fault, Reason
from extproc.counting.fields import malformed

_WINDOW_BITS = {Encoding.GZIP: 16 + zlib.MAX_WBITS, Encoding.DEFLATE: zlib.MAX_WBITS}
"""zlib's words for the two formats: gzip (RFC 1952), and deflate within zlib's (RFC 1950, which HTTP means by it)."""


def decoded(body: bytes | memoryview, encoding: Encoding, bytes_max: int) -> bytes:
    """What `body` holds; Fault for what is not in that format, or larger than `bytes_max` once decoded.

    No more than one byte over the bound is ever decoded, whatever the body could become.
    """
    parts, left, rest = list[bytes](), bytes_max + 1, body
    while rest:  # gzip may be several members, one after the other
        decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
        try:
            part = decoder.decompress(rest, left)
        except zlib.error:
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
