"""Compressed bodies: counted as what they hold, never as their bytes, and never decoded beyond the bound."""

from __future__ import annotations

import gzip
import json
import resource
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from extproc.core.values import BUILT_IN_ENCODINGS, Encoding, Fault, Reason
from extproc.counting import Counter, encoding
from extproc.counting.encoding import (
    BROTLI_STEP_BYTES,
    MEMBERS_MAX,
    ZSTD_WINDOW_LOG_MAX,
    available_encodings,
    decoded,
)
from tests.counting.models import CHAT, policy, user

BODY = orjson.dumps(user("a short question", max_tokens=5))
GZIP, DEFLATE, BR, ZSTD = Encoding


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (gzip.compress(BODY), GZIP),
        (gzip.compress(BODY[:20]) + gzip.compress(BODY[20:]), GZIP),
        (zlib.compress(BODY), DEFLATE),
    ],
)
def test_decoded(body: bytes, kind: Encoding) -> None:
    """Both formats, gzip in several members too, give the body; exactly the bound is not over it."""
    assert BODY == decoded(body, kind, len(BODY))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (BODY, GZIP),
        (gzip.compress(BODY), DEFLATE),
        (zlib.compress(BODY), GZIP),
        (gzip.compress(BODY)[:-1], GZIP),
        (gzip.compress(BODY) + b"x", GZIP),
        (zlib.compress(BODY) + zlib.compress(BODY)[:-4], DEFLATE),
    ],
)
def test_what_is_not_what_it_says(body: bytes, kind: Encoding) -> None:
    """Another format, a cut body and bytes after the end are the client's fault."""
    with pytest.raises(Fault) as refused:
        decoded(body, kind, 10_000)

    assert (Reason.MALFORMED_REQUEST, "content-encoding") == (refused.value.reason, refused.value.param)


def test_a_bomb_dies_early() -> None:
    """64 MiB of one letter cost no more memory than the bound."""
    bomb = gzip.compress(b"a" * 2**26)
    tracemalloc.start()
    with pytest.raises(Fault) as refused:
        decoded(bomb, GZIP, 2**20)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (Reason.BODY_TOO_LARGE, 2**20) == (refused.value.reason, refused.value.details["body_bytes_max"])
    assert peak_bytes < 4 * 2**20


def test_the_engine_gets_what_was_counted() -> None:
    """A compressed body has the count of the plain one, is never read in place, and goes on decoded."""
    counter = Counter(policy({"m": {}}, default_model="m"))
    body = gzip.compress(BODY)
    found = counter.count_now(counter.read(CHAT, body, encoding=GZIP))
    plain = counter.count_now(counter.read(CHAT, BODY))
    counter.close()

    assert (plain.demand, BODY) == (found.demand, found.body)
    assert (True, False) == (counter.reads_quickly(BODY), counter.reads_quickly(body, GZIP))


# --- br and zstd, of the extra

LARGE = bytes(range(256)) * 8192  # 2 MiB, many steps


def _needs(kind: Encoding) -> Any:
    """The library of an encoding; skips without it."""
    if kind not in available_encodings():
        pytest.skip(f"{kind} needs the extra: pip install 'tokenlane[encodings]'")
    return encoding._brotli if kind is BR else encoding._zstd


EXTRA = pytest.mark.parametrize("kind", [BR, ZSTD])


@EXTRA
@pytest.mark.parametrize("body", [BODY, LARGE, b"", b"x" * BROTLI_STEP_BYTES])
def test_an_extra_decodes(kind: Encoding, body: bytes) -> None:
    """The body is what was compressed; exactly the bound is not over it, and one byte less is."""
    compressed = _needs(kind).compress(body)

    assert body == decoded(compressed, kind, len(body)) == decoded(memoryview(compressed), kind, len(body))
    if body:
        with pytest.raises(Fault) as refused:
            decoded(compressed, kind, len(body) - 1)
        assert Reason.BODY_TOO_LARGE == refused.value.reason


@EXTRA
@pytest.mark.parametrize("body", [BODY, LARGE])
def test_an_extra_refuses_what_is_not_what_it_says(kind: Encoding, body: bytes) -> None:
    """Another format, a cut body and bytes after the end are the client's fault."""
    compressed = _needs(kind).compress(body)
    for wrong in (
        BODY,
        gzip.compress(body),
        compressed[:-1],
        compressed[:2],
        compressed + b"{",
        compressed + b"xxxxxxxx",
    ):
        with pytest.raises(Fault) as refused:
            decoded(wrong, kind, 2**22)
        assert (Reason.MALFORMED_REQUEST, "content-encoding") == (refused.value.reason, refused.value.param)


@EXTRA
def test_an_extra_stops_bombs(kind: Encoding) -> None:
    """64 MiB of one letter cost little more memory than the bound, in Python and beside it."""
    bomb = _needs(kind).compress(b"a" * 2**26)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    with pytest.raises(Fault) as refused:
        decoded(bomb, kind, 2**20)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert Reason.BODY_TOO_LARGE == refused.value.reason
    assert peak_bytes < 4 * 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 * 2**10


def test_zstd_frames() -> None:
    """Frames follow each other, and such as are skipped hold nothing."""
    compress = _needs(ZSTD).compress
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"

    assert BODY == decoded(compress(BODY[:20]) + skipped + compress(BODY[20:]), ZSTD, len(BODY))


def test_zstd_windows_are_bounded() -> None:
    """A frame whose window is above 8 MiB would take as much memory; it is refused."""
    zstd = _needs(ZSTD)
    options = {
        zstd.CompressionParameter.window_log: ZSTD_WINDOW_LOG_MAX + 1,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    with pytest.raises(Fault) as refused:
        decoded(zstd.compress(b"ab" * 2**24, options=options), ZSTD, 2**30)

    assert Reason.MALFORMED_REQUEST == refused.value.reason


@pytest.mark.parametrize("kind", [GZIP, ZSTD])
def test_members_are_bounded(kind: Encoding) -> None:
    """Each member costs a copy of the rest, so that many empty ones would cost seconds."""
    empty = gzip.compress(b"") if kind is GZIP else _needs(kind).compress(b"")

    assert b"" == decoded(empty * MEMBERS_MAX, kind, 10)
    with pytest.raises(Fault) as refused:
        decoded(empty * (MEMBERS_MAX + 1), kind, 10)
    assert Reason.MALFORMED_REQUEST == refused.value.reason


@pytest.mark.parametrize("version", ["1.0.9", "1.1.0"])
def test_an_old_brotli_is_none(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot bound its output does not decode at all."""
    brotli = _needs(BR)
    monkeypatch.setattr(brotli, "__version__", version)

    assert BR not in encoding._decoders()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own encodings are always there, and no others are without their libraries."""
    monkeypatch.setattr(encoding, "_brotli", None)
    monkeypatch.setattr(encoding, "_zstd", None)

    assert BUILT_IN_ENCODINGS == encoding._decoders().keys()
    assert encoding._module("no_such_module", "json.no_such_module") is None


@pytest.mark.parametrize(("name", "kind"), [("115-cenc-br", BR), ("116-cenc-zstd", ZSTD)])
def test_handed_bodies(shared: Path, name: str, kind: Encoding) -> None:
    """Recorded compressed bodies are JSON once decoded."""
    _needs(kind)
    body = (shared / "cases" / "malformed" / f"{name}.body").read_bytes()

    assert "messages" in json.loads(decoded(body, kind, 10_000))
