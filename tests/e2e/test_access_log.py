"""What Envoy says of responses: how each ended, and which replica it was that served it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.core.values import ResponseEnd
from tests.e2e.mesh import COMPLETIONS, Mesh, ids, mesh, until
from tests.e2e.test_orphans import log_running_often

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """A chain that ends responses after a second, with an engine that needs ten for the longest."""
    async with mesh(limits={"response_s_max": 1}, engine={"decode_tokens_per_s": 100}) as running:
        yield running


async def _whole(chain: Mesh) -> None:
    async with chain.post(ids(5, 5), COMPLETIONS) as response:
        assert 200 == response.status


async def _left(chain: Mesh) -> None:
    async with chain.post(ids(5, 1000, stream=True), COMPLETIONS) as response:
        await response.content.readline()


async def _left_before_the_answer(chain: Mesh) -> None:
    await chain.control("chat-0", hold=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), chain.post(ids(5, 5), COMPLETIONS):
            pass
    await chain.control("chat-0", hold=False)


async def _too_long(chain: Mesh) -> None:
    async with chain.post(ids(5, 1000, stream=True), COMPLETIONS) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def _too_late(chain: Mesh) -> None:
    async with chain.post(ids(5, 1000), COMPLETIONS) as response:
        assert 504 == response.status


async def _engine_dies(chain: Mesh) -> None:
    async with chain.post(ids(5, 1000, stream=True), COMPLETIONS) as response:
        await response.content.readline()
        await asyncio.to_thread(chain.engines["chat-0"].kill)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


ENDS = {
    "complete": (_whole, ResponseEnd.COMPLETE),
    "left mid-stream": (_left, ResponseEnd.CLIENT_LEFT),
    "left before the answer": (_left_before_the_answer, ResponseEnd.CLIENT_LEFT),
    "too long": (_too_long, ResponseEnd.TIMEOUT),
    "too late": (_too_late, ResponseEnd.TIMEOUT),
    "engine dies": (_engine_dies, ResponseEnd.ENGINE_FAILED),  # last, because it does
}


def _ends(chain: Mesh) -> dict[ResponseEnd, int]:
    value = chain.server.metrics.registry.get_sample_value
    return {
        end: int(value("tokenlane_responses_total", {"lane": "interactive", "end": end}) or 0) for end in ResponseEnd
    }


@pytest.mark.parametrize("name", ENDS)
async def test_ends(chain: Mesh, name: str) -> None:
    """Each way in which a response can end is counted under its name, once."""
    act, end = ENDS[name]
    before = _ends(chain)
    await act(chain)
    await chain.until_free()
    await until(lambda: sum(_ends(chain).values()) > sum(before.values()))

    assert {**before, end: before[end] + 1} == _ends(chain)


def _without_the_first(config: dict[str, Any]) -> None:
    """Have Envoy's cluster lack the replica that is reserved, so that it takes another."""
    (cluster,) = (c for c in config["static_resources"]["clusters"] if c["name"] == "chat")
    del cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
    log_running_often(config)


async def test_another_replica_serves() -> None:
    """Tokens follow a request that another replica serves, while it runs; the mismatch is counted, and it ends once."""
    pools: dict[str, dict[str, dict[str, Any]]] = {
        "chat": {"chat-0": {"gross_tokens": 96_001}, "chat-1": {}},
        "docs": {"docs-0": {}},
    }
    async with mesh(pools=pools, tune=_without_the_first) as chain:
        accounts = chain.desk.ledger.accounts
        value = chain.server.metrics.registry.get_sample_value
        await chain.control("chat-1", hold=True)

        async def post() -> int:
            async with chain.post(ids(100, 20), COMPLETIONS) as response:
                return int(response.status)

        running = asyncio.create_task(post())
        await until(lambda: accounts["chat-1"].active_tokens == 120)
        assert 0 == accounts["chat-0"].active_tokens
        assert 1 == (await chain.control("chat-1"))["running"]
        await chain.control("chat-1", hold=False)
        assert 200 == await running
        await chain.until_free()
        await until(lambda: value("tokenlane_replica_mismatches_total") == 1)

        assert 0 == chain.reserved_tokens
        assert {"settled": 1, "released": 0, "expired": 0} == chain.ended()
