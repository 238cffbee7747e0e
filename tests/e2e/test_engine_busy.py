"""An engine's own 429 and 503: the client gets the contract's answer, the tokens are free, and it is counted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from extproc.core.values import Ending, Lane, ResponseEnd
from tests.e2e.mesh import COMPLETIONS, Mesh, ids, mesh
from tests.e2e.scripted import Reply, Scripted

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

RELEASE_TOKENS_PER_S = 2
FORGED = {"retry-after": "99", "x-llm-lane": "vip", "x-llm-reason": "none", "content-type": "text/plain"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Scripted]:
    """The only engine."""
    async with Scripted() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(engine: Scripted) -> AsyncIterator[Mesh]:
    """A chain whose engine releases two tokens a second."""
    replica: dict[str, Any] = {"address": engine.address, "release_tokens_per_s": RELEASE_TOKENS_PER_S}
    pools: dict[str, dict[str, dict[str, Any]]] = {
        "chat": {"chat-0": replica},
        "docs": {"docs-0": {"address": "127.0.0.1:1"}},
    }
    async with mesh(pools=pools) as running:
        yield running


def _ended(chain: Mesh, end: ResponseEnd) -> int:
    value = chain.server.metrics.registry.get_sample_value
    return int(value("tokenlane_responses_total", {"lane": "interactive", "end": end}) or 0)


async def _busy(chain: Mesh, answer: Any, *, lane: str, least_s: int) -> None:
    """The answer is the contract's `engine_busy`, with a Retry-After of `least_s` and its jitter."""
    body = await answer.json()
    headers = answer.headers
    assert (429, "application/json") == (answer.status, answer.content_type)
    assert ("engine_busy", [lane], "test-1") == (
        headers["x-llm-reason"],
        headers.getall("x-llm-lane"),
        headers["x-llm-policy"],
    )
    (seconds,) = headers.getall("retry-after")
    assert least_s <= int(seconds) <= min(60, least_s + least_s // 4 + 1)
    assert [f"{seconds}000"] == headers.getall("retry-after-ms")
    assert "x-should-retry" not in headers
    assert ("error", "engine_busy", {"error_code": "engine_busy"}) == (
        body["type"],
        body["error"]["code"],
        body["error"]["details"],
    )
    assert headers["x-request-id"] == body["request_id"]
    await chain.until_free()


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("status", [429, 503])
async def test_turned_away(chain: Mesh, engine: Scripted, status: int, streaming: bool) -> None:
    """Whatever the engine says with it, a client that it turns away gets our answer and the time of its own tokens."""
    engine.script(Reply(status, b"overloaded" * 10_000, FORGED))
    before, busy = chain.ended(), _ended(chain, ResponseEnd.ENGINE_BUSY)
    async with chain.post(ids(10, 30, stream=streaming), COMPLETIONS) as answer:
        await _busy(chain, answer, lane="interactive", least_s=math.ceil(40 / RELEASE_TOKENS_PER_S))

    assert 1 == len(engine.bodies)
    assert {**before, "settled": before["settled"] + 1} == chain.ended()
    async with asyncio.timeout(5):
        while _ended(chain, ResponseEnd.ENGINE_BUSY) == busy:  # noqa: ASYNC110 (the access log comes later)
            await asyncio.sleep(0.005)
    assert busy + 1 == _ended(chain, ResponseEnd.ENGINE_BUSY)


@pytest.mark.parametrize("status", [429, 503])
async def test_turned_away_without_tokens(chain: Mesh, engine: Scripted, status: int) -> None:
    """A request that passes without a reservation gets the same answer, to be retried in a second."""
    engine.script(Reply(status, b"overloaded", FORGED))
    async with chain.client.get(chain.url + "/v1/models") as answer:
        body = await answer.json()

    assert (429, "engine_busy", "bypass", "1", "1000") == (
        answer.status,
        body["error"]["code"],
        answer.headers["x-llm-lane"],
        answer.headers["retry-after"],
        answer.headers["retry-after-ms"],
    )


@pytest.mark.parametrize("status", [200, 400, 404, 413, 422, 500, 501])
async def test_other_answers_stay(chain: Mesh, engine: Scripted, status: int) -> None:
    """What an engine says otherwise is the client's, byte for byte."""
    engine.script(Reply(status, b'{"engine":"says"}', {"content-type": "application/json", "retry-after": "7"}))
    async with chain.post(ids(10, 10), COMPLETIONS) as answer:
        body = await answer.read()
    await chain.until_free()

    assert (status, b'{"engine":"says"}', "7") == (answer.status, body, answer.headers["retry-after"])
    assert "x-llm-reason" not in answer.headers


async def test_refusals_of_ours_stay(chain: Mesh, engine: Scripted) -> None:
    """A 429 or 503 of the service is no engine's: its reason, details and Retry-After reach the client."""
    engine.script(Reply())
    ledger = chain.desk.ledger
    ledger.reserve("held", "chat-0", Lane.INTERACTIVE, ledger.accounts["chat-0"].available_tokens, 0)
    async with chain.post(ids(10, 10), COMPLETIONS) as full:
        full_body = await full.json()
    ledger.end("held", Ending.RELEASED)
    chain.desk.draining = True
    async with chain.post(ids(10, 10), COMPLETIONS) as draining:
        draining_body = await draining.json()
    chain.desk.draining = False

    assert (429, "token_budget_exhausted", 0) == (
        full.status,
        full_body["error"]["code"],
        full_body["error"]["details"]["available_tokens"],
    )
    assert (503, "draining") == (draining.status, draining_body["error"]["code"])
    assert [] == engine.bodies
