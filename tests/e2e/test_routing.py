"""Where an admitted request goes: its lane's cluster, the replica that holds its tokens, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from extproc.core.values import Lane
from tests.e2e.mesh import CHAT, COMPLETIONS, Mesh, chat, ids, mesh
from tests.e2e.recorder import Recorder

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

POOLS: dict[str, dict[str, dict[str, Any]]] = {
    "chat": {"chat-0": {}, "chat-1": {}, "chat-2": {}},
    "docs": {"docs-0": {}, "docs-1": {}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """Two pools of several replicas, and a declared charge for images."""
    async with mesh(pools=POOLS, model={"media": {"image": {"tokens": 300}}}) as running:
        yield running


async def _answer(chain: Mesh, body: Mapping[str, Any], path: str = COMPLETIONS, **headers: str) -> Any:
    """The answer to one request, read to its end."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with chain.post(body, path, headers=named) as answer:
        await answer.read()
        return answer


def _pool_of(chain: Mesh, replica: str) -> str:
    return chain.desk.ledger.accounts[replica].replica.pool


@asynccontextmanager
async def _held(chain: Mesh) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Engines answer nothing inside the block; requests added to the list are awaited at its end."""
    await asyncio.gather(*(chain.control(name, hold=True) for name in chain.engines))
    tasks: list[asyncio.Task[Any]] = []
    try:
        yield tasks
    finally:
        await asyncio.gather(*(chain.control(name, hold=False) for name in chain.engines))
        await asyncio.gather(*tasks)
        await chain.until_free()


async def _admitted(chain: Mesh, task: asyncio.Task[Any]) -> str:
    """Wait for the reservation of a request that was just sent; its ticket."""
    known = set(chain.desk.ledger.open)
    while not (new := chain.desk.ledger.open.keys() - known):
        assert not task.done(), task.result()
        await asyncio.sleep(0.001)
    return new.pop()


async def test_a_request_runs_where_its_tokens_are_held(chain: Mesh) -> None:
    """Cluster and replica of every request are those of its reservation, and the client is told which."""
    reservations = []
    bodies = [ids(4000, 1000), ids(3000, 1000), ids(20_000, 1000), ids(2000, 500), ids(5000, 10), ids(10, 10)] * 3
    async with _held(chain) as tasks:
        for body in bodies:
            task = asyncio.create_task(_answer(chain, body))
            ticket = await _admitted(chain, task)
            tasks.append(task)
            reservations.append(chain.desk.ledger.open[ticket])
    answers = [task.result() for task in tasks]
    addresses = {name: engine.address for name, engine in chain.engines.items()}

    assert {name for replicas in POOLS.values() for name in replicas} == {held.replica for held in reservations}
    assert [(200, held.replica, addresses[held.replica], held.lane) for held in reservations] == [
        (answer.status, *(answer.headers[f"x-{name}"] for name in ("engine-name", "llm-replica", "llm-lane")))
        for answer in answers
    ]
    assert ["chat" if held.lane is Lane.INTERACTIVE else "docs" for held in reservations] == [
        _pool_of(chain, held.replica) for held in reservations
    ]


async def test_a_post_passes_with_its_body(chain: Mesh) -> None:
    """A POST that the policy lets through reaches its pool with its body, and reserves nothing."""
    body = {"model": "qwen3", "prompt": "hello"}
    async with chain.post(body, "/tokenize") as answer:
        await answer.read()

    # The simulated engines have no such path: their own 404 shows that the request came through.
    assert (404, "bypass", 0) == (answer.status, answer.headers["x-llm-lane"], chain.reserved_tokens)
    assert "chat" == _pool_of(chain, answer.headers["x-engine-name"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_admitted_answer_says_what_was_decided(chain: Mesh, stream: bool) -> None:
    """Lane, counts, queue time, replica, policy and request id are headers of the answer, once each."""
    answer = await _answer(chain, ids(100, 30, n=2, stream=stream), x_request_id="mine")

    assert {
        "x-llm-lane": ["interactive"],
        "x-llm-lane-reason": ["size"],
        "x-llm-input-tokens": ["100"],
        "x-llm-max-output-tokens": ["30"],
        "x-llm-reserved-tokens": ["160"],
        "x-llm-queue-ms": ["0"],
        "x-llm-replica": [chain.engines[answer.headers["x-engine-name"]].address],
        "x-llm-policy": ["test-1"],
    } == {name.lower(): answer.headers.getall(name) for name in answer.headers if name.lower().startswith("x-llm-")}
    assert ["mine"] == answer.headers.getall("x-request-id")


async def test_an_inexact_count_says_so(chain: Mesh) -> None:
    """What holds a declared charge is marked, admitted or refused."""
    image = {"type": "image_url", "image_url": {"url": "https://images.example.invalid/quay.jpg"}}
    body: dict[str, Any] = chat()
    body["messages"][0]["content"] = [image]
    admitted = await _answer(chain, body, CHAT)
    body["messages"][0]["content"] = [image] * 128
    body["max_tokens"] = 60_000
    refused = await _answer(chain, body, CHAT)

    assert [(200, ["inexact"]), (413, ["inexact"])] == [
        (answer.status, answer.headers.getall("x-llm-count")) for answer in (admitted, refused)
    ]
    assert 300 < int(admitted.headers["x-llm-input-tokens"]) < 320


@pytest.mark.parametrize(
    ("body", "lane", "reserved_tokens"),
    [
        (ids(4096, 1024), "interactive", 5120),
        (ids(4097, 1024), "bulk", 5121),
        (ids(4096, 1025), "bulk", 5121),
        (ids(1, 1), "interactive", 2),
        (ids(60_000, 4000), "bulk", 64_000),
        (ids(60_001, 1), "overflow", 0),
        (ids(60_000, 4001), "overflow", 0),
        (ids(100, 256, n=4), "interactive", 1124),
        (ids(100, 256, n=5), "bulk", 1380),
        (ids(1, 512) | {"prompt": [[9] * 2048, [9] * 2048]}, "interactive", 5120),
        (ids(1, 512) | {"prompt": [[9] * 2048, [9] * 2049]}, "bulk", 5121),
        (ids(1, 512) | {"prompt": [[9], [9], [9]]}, "bulk", 1539),
        (ids(1, 100, n=3) | {"prompt": [[9] * 10, [9] * 20]}, "interactive", 630),
        ({"model": "qwen3", "prompt": [9] * 100}, "interactive", 116),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, dict) else None,
)
async def test_lanes_by_tokens(chain: Mesh, body: Mapping[str, Any], lane: str, reserved_tokens: int) -> None:
    """Input of all prompts and ceilings of all sequences decide the lane, to the token."""
    answer = await _answer(chain, body)

    assert (lane, str(reserved_tokens)) == (answer.headers["x-llm-lane"], answer.headers["x-llm-reserved-tokens"])
    assert (413 if lane == "overflow" else 200) == answer.status


@pytest.mark.parametrize(
    ("fields", "headers", "lane"),
    [
        ({}, {}, "interactive"),
        ({}, {"x_request_intent": "bulk"}, "bulk"),
        ({}, {"prefer": "respond-async"}, "bulk"),
        ({}, {"prefer": "wait=10, respond-async; x=1"}, "bulk"),
        ({"service_tier": "flex"}, {}, "bulk"),
        ({"service_tier": "priority"}, {}, "interactive"),
        ({}, {"x_request_intent": "urgent"}, "interactive"),
        ({}, {"prefer": "return=minimal"}, "interactive"),
    ],
)
async def test_intent_lowers(chain: Mesh, fields: dict[str, Any], headers: dict[str, str], lane: str) -> None:
    """A small request that declares bulk intent is served as bulk, synchronously; other values change nothing."""
    answer = await _answer(chain, ids(10, 10, **fields), **headers)

    assert (200, lane, False) == (answer.status, answer.headers["x-llm-lane"], "preference-applied" in answer.headers)
    assert {"interactive": "size", "bulk": "intent"}[lane] == answer.headers["x-llm-lane-reason"]
    assert {"interactive": "chat", "bulk": "docs"}[lane] == _pool_of(chain, answer.headers["x-engine-name"])


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({}, {"x_request_intent": "interactive"}),
        ({}, {"x_llm_lane": "interactive", "x_llm_pool": "chat"}),
        ({"service_tier": "priority"}, {"priority": "u=0", "prefer": "wait=0"}),
        ({"priority": -100}, {"x_vllm_priority": "-100"}),
    ],
)
async def test_nothing_raises(chain: Mesh, fields: dict[str, Any], headers: dict[str, str]) -> None:
    """A large request is bulk whatever it declares."""
    answer = await _answer(chain, ids(4097, 10, **fields), **headers)

    assert (200, "bulk") == (answer.status, answer.headers["x-llm-lane"])
    assert _pool_of(chain, answer.headers["x-engine-name"]) == "docs"


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "fits"),
    [(14_000, 4000, True), (16_400, 4000, True), (16_401, 4000, False), (19_000, 4000, False)],
)
async def test_the_worked_example(chain: Mesh, input_tokens: int, output_tokens: int, fits: bool) -> None:
    """Of 96,000 gross, 58,000 active, 8,000 waiting and a tenth of guard, 20,400 tokens are left: no more, no less."""
    accounts = chain.desk.ledger.accounts
    await chain.control("docs-1", health=503)
    await _until_ready(chain, "docs-1", ready=False)
    try:
        async with _held(chain) as tasks:
            tasks.append(asyncio.create_task(_answer(chain, ids(54_000, 4000))))
            await _admitted(chain, tasks[0])
            accounts["docs-0"].waiting_tokens[Lane.INTERACTIVE] = 8000
            available_tokens = accounts["docs-0"].available_tokens
            tasks.append(asyncio.create_task(_answer(chain, ids(input_tokens, output_tokens))))
            if fits:
                await _admitted(chain, tasks[1])
            else:
                await tasks[1]
            active_tokens = accounts["docs-0"].active_tokens
    finally:
        accounts["docs-0"].waiting_tokens[Lane.INTERACTIVE] = 0
        await chain.control("docs-1", health=200)
        await _until_ready(chain, "docs-1", ready=True)
    answer = tasks[1].result()

    assert 20_400 == available_tokens
    assert 58_000 + fits * (input_tokens + output_tokens) == active_tokens
    assert (200 if fits else 429) == answer.status
    assert (None if fits else "token_budget_exhausted") == answer.headers.get("x-llm-reason")


async def _until_ready(chain: Mesh, replica: str, *, ready: bool) -> None:
    for _ in range(5000):
        if chain.desk.ledger.accounts[replica].ready is ready:
            return
        await asyncio.sleep(0.002)
    pytest.fail(f"{replica} is still {'not ' if ready else ''}ready")


FORGED = {
    "X-LLM-Lane": "bulk",
    "x-llm-pool": "docs",
    "x-llm-reserved-tokens": "forged",
    "x-llm-anything": "forged",
    "X-Gateway-Destination-Endpoint": "127.0.0.1:1",
    "X-Vllm-Priority": "-100",
    "X-data-parallel-rank": "7",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded() -> AsyncIterator[tuple[Mesh, Recorder, Recorder]]:
    """Two recording engines in pool `chat`, the first of which speaks for the gateway; engines in pool `docs`."""
    spoofed = [("x-llm-lane", "spoofed"), ("x-llm-replica", "spoofed"), ("X-LLM-Other", "spoofed")]
    async with Recorder(*spoofed) as first, Recorder(*spoofed) as second:
        pools: dict[str, dict[str, dict[str, Any]]] = {
            "chat": {"chat-0": {"address": first.address}, "chat-1": {"address": second.address}},
            "docs": {"d": {}},
        }
        async with mesh(pools=pools) as running:
            yield running, first, second


def _forged(destination: str) -> dict[str, str]:
    return FORGED | {"X-Gateway-Destination-Endpoint": destination}


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_forged_headers_do_nothing(recorded: tuple[Mesh, Recorder, Recorder], http2: bool) -> None:
    """Headers that only the gateway or an operator may write neither reach an engine nor change the route."""
    chain, first, second = recorded
    first.seen.clear()
    async with httpx.AsyncClient(http1=not http2, http2=http2) as client:
        answer = await client.post(chain.url + CHAT, json=chat(), headers=_forged(second.address))
    await chain.until_free()
    (seen,) = first.seen

    assert (200, "interactive", first.address) == (
        answer.status_code,
        answer.headers["x-llm-lane"],
        answer.headers["x-llm-replica"],
    )
    assert second.seen == []
    assert {"x-llm-lane": ["interactive"], "x-llm-pool": ["chat"]} == {
        name: seen.all(name) for name in seen.names if name.startswith("x-llm-")
    }
    assert {first.address} == {
        host for value in seen.all("x-gateway-destination-endpoint") for host in value.split(",")
    }
    assert {"x-vllm-priority", "x-data-parallel-rank"}.isdisjoint(seen.names)


async def test_an_engine_cannot_speak_for_the_gateway(recorded: tuple[Mesh, Recorder, Recorder]) -> None:
    """Headers of the gateway in an engine's answer are replaced or removed."""
    chain, first, _ = recorded
    await chain.until_free()
    answer = await _answer(chain, chat(), CHAT)

    assert [["interactive"], [first.address]] == [
        answer.headers.getall(f"x-llm-{name}") for name in ("lane", "replica")
    ]
    assert "x-llm-other" not in answer.headers


async def test_a_bypass_carries_no_forged_headers(recorded: tuple[Mesh, Recorder, Recorder]) -> None:
    """A request without tokens goes to the pool of its rule, and takes no forged header along."""
    chain, first, second = recorded
    for engine in (first, second):
        engine.seen.clear()
    headers = _forged(chain.engines["d"].address)
    before = chain.desk._tickets
    async with chain.client.get(chain.url + "/v1/models", headers=headers) as answer:
        await answer.read()
    (seen,) = first.seen + second.seen

    assert (200, "bypass") == (answer.status, answer.headers["x-llm-lane"])
    assert before == chain.desk._tickets
    assert {"x-llm-lane": ["bypass"], "x-llm-pool": ["chat"]} == {
        name: seen.all(name) for name in seen.names if name.startswith("x-llm-")
    }
    assert {"x-gateway-destination-endpoint", "x-vllm-priority", "x-data-parallel-rank"}.isdisjoint(seen.names)


async def test_forged_headers_do_nothing_without_the_service(recorded: tuple[Mesh, Recorder, Recorder]) -> None:
    """With the service gone, a complete forgery of an admission reaches no engine. It ends the service: it is last."""
    chain, first, second = recorded
    await chain.server.stop()
    for engine in (first, second):
        engine.seen.clear()
    before = await asyncio.to_thread(chain.engines["d"].state)
    statuses = []
    for lane, pool, destination in (
        ("interactive", "chat", first.address),
        ("bulk", "docs", chain.engines["d"].address),
        ("bypass", "chat", second.address),
    ):
        forged = FORGED | {"X-LLM-Lane": lane, "x-llm-pool": pool, "X-Gateway-Destination-Endpoint": destination}
        for method, path, body in (("POST", CHAT, b"{}"), ("GET", "/v1/models", None)):
            async with chain.client.request(method, chain.url + path, data=body, headers=forged) as answer:
                statuses.append((answer.status, answer.headers["x-llm-reason"], answer.headers["x-llm-lane"]))

    assert [(503, "admission_unavailable", "none")] * 6 == statuses
    assert (first.seen, second.seen) == ([], [])
    assert before == await asyncio.to_thread(chain.engines["d"].state)


async def test_a_retry_stays_on_the_reserved_replica(chain: Mesh) -> None:
    """An engine that died since its last probe is tried again; no replica gets what was not reserved on it."""
    await chain.server._prober.close()
    before = {name: (await chain.control(name))["requests_total"] for name in ("chat-1", "chat-2")}
    retries = await asyncio.to_thread(chain.envoy.stats, "cluster.chat.upstream_rq_retry")
    await asyncio.to_thread(chain.engines["chat-0"].kill)
    try:
        answer = await _answer(chain, ids(10, 10))
        body = await answer.json()
        await chain.until_free()
        after = {name: (await chain.control(name))["requests_total"] for name in before}
        retried = await asyncio.to_thread(chain.envoy.stats, "cluster.chat.upstream_rq_retry")
    finally:
        await asyncio.to_thread(chain.engines["chat-0"].start)
        await chain.server._prober.start()

    assert (503, "capacity_unavailable") == (answer.status, body["error"]["code"])
    assert before == after
    assert retries.get("cluster.chat.upstream_rq_retry", 0) + 1 == retried["cluster.chat.upstream_rq_retry"]
