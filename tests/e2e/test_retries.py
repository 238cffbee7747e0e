"""Envoy's retries: on the replica that holds the tokens, with the same bytes, on one reservation that ends once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest

from tests.e2e.mesh import COMPLETIONS, Mesh, ids, mesh
from tests.e2e.scripted import Reply, Scripted

RETRIES = 2
FAILED = Reply(500, b'{"error":"out of memory"}')
LARGE = orjson.dumps({"model": "qwen3", "prompt": [9] * 10, "user": "u" * 1_000_000})
"""A megabyte without a ceiling, so that the service writes one and the bytes are not the client's."""


@asynccontextmanager
async def _fleet(tune: Any = None) -> AsyncIterator[tuple[Mesh, list[Scripted]]]:
    """Three scripted replicas, the first of which every request reserves, and two retries."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Scripted()) for _ in range(3)]
        # The emptiest replica is reserved, and none of the others ever is emptier than the first.
        pool = {
            f"chat-{number}": {"address": engine.address, "gross_tokens": 96_000 - number}
            for number, engine in enumerate(engines)
        }
        limits = {"upstream_retries_max": RETRIES}
        docs = {"docs-0": {"address": "127.0.0.1:1"}}
        chain = await stack.enter_async_context(mesh(pools={"chat": pool, "docs": docs}, tune=tune, limits=limits))
        yield chain, engines


def _retry_on_5xx(config: dict[str, Any]) -> None:
    (filters,) = config["static_resources"]["listeners"][0]["filter_chains"]
    (host,) = filters["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    for route in host["routes"]:
        if "route" in route:
            route["route"]["retry_policy"]["retry_on"] += ",5xx"


async def _retried(chain: Mesh) -> int:
    return chain.envoy.stats("cluster.chat.upstream_rq_retry").get("cluster.chat.upstream_rq_retry", 0)


@pytest.mark.parametrize(("failures", "status"), [(0, 200), (1, 200), (2, 200), (3, 500)])
async def test_tries_are_the_same_request(failures: int, status: int) -> None:
    """Each try brings the same bytes to the reserved replica, on one reservation; after the last its answer stands."""
    async with _fleet(_retry_on_5xx) as (chain, engines):
        engines[0].script(*[FAILED] * failures, Reply())
        async with chain.post(LARGE, COMPLETIONS) as answer:
            body = await answer.read()
        await chain.until_free()

        tries = min(failures, RETRIES) + 1
        assert (status, FAILED.body if status == 500 else Reply().body) == (answer.status, body)
        assert [tries, 0, 0] == [len(engine.bodies) for engine in engines]
        assert 1 == len(set(engines[0].bodies))
        sent = orjson.loads(engines[0].bodies[0])
        assert {**orjson.loads(LARGE), "max_tokens": sent["max_tokens"]} == sent
        assert engines[0].address == answer.headers["x-llm-replica"]
        assert {"settled": 1, "released": 0, "expired": 0} == chain.ended()


async def test_a_request_that_an_engine_has_seen_is_not_repeated() -> None:
    """An engine that hangs up on a request may have run it, so it does not run twice; its tokens are free at once."""
    async with _fleet() as (chain, engines):
        engines[0].script(Reply(status=None))
        async with chain.post(ids(10, 10), COMPLETIONS) as answer:
            error = (await answer.json())["error"]
        await chain.until_free()

        assert (503, "capacity_unavailable") == (answer.status, error["code"])
        assert [1, 0, 0] == [len(engine.bodies) for engine in engines]
        assert {"settled": 1, "released": 0, "expired": 0} == chain.ended()


@pytest.mark.parametrize("dead", [1, 3])
async def test_dead_replicas(dead: int) -> None:
    """A reserved replica that refuses connections is tried again and no other is, however many live; freed once."""
    async with _fleet() as (chain, engines):
        await chain.server._prober.close()
        for engine in engines[:dead]:
            await engine.die()
        async with chain.post(ids(10, 10), COMPLETIONS) as answer:
            error = (await answer.json())["error"]
        await chain.until_free()

        assert (503, "capacity_unavailable") == (answer.status, error["code"])
        assert RETRIES == await _retried(chain)
        assert [0, 0, 0] == [len(engine.bodies) for engine in engines]
        assert {"settled": 1, "released": 0, "expired": 0} == chain.ended()
        assert 0 == chain.reserved_tokens
