"""Compressed bodies: counted as what they hold, never as their bytes, and never decoded beyond the bound."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import orjson
import pytest

from extproc.core.values import Encoding, Fault, Reason
from extproc.counting import Counter
from extproc.counting.encoding import decoded
from tests.counting.models import CHAT, policy, user

BODY = orjson.dumps(user("a short question", max_tokens=5))
GZIP, DEFLATE = Encoding.GZIP, Encoding.DEFLATE


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (gzip.compress(BODY), GZIP),
        (gzip.compress(BODY[:20]) + gzip.compress(BODY[20:]), GZIP),
        (zlib.compress(BODY), DEFLATE),
    ],
)
def test_decoded(body: bytes, encoding: Encoding) -> None:
    """Both formats, gzip in several members too, give the body; exactly the bound is not over it."""
    assert BODY == decoded(body, encoding, len(BODY))


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (BODY, GZIP),
        (gzip.compress(BODY), DEFLATE),
        (zlib.compress(BODY), GZIP),
        (gzip.compress(BODY)[:-1], GZIP),
        (gzip.compress(BODY) + b"x", GZIP),
        (zlib.compress(BODY) + zlib.compress(BODY)[:-4], DEFLATE),
    ],
)
def test_what_is_not_what_it_says(body: bytes, encoding: Encoding) -> None:
    """Another format, a cut body and bytes after the end are the client's fault."""
    with pytest.raises(Fault) as refused:
        decoded(body, encoding, 10_000)

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
