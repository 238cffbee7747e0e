"""Faults of ours: whatever breaks in the service or between it and Envoy, the client gets the contract.

And afterwards nothing is held: no tokens, no stream, no bytes in the intake.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from structlog.testing import capture_logs

from extproc.core import rejection
from extproc.core.admission import EXPIRY_SLACK_NS
from extproc.core.drain import NS_PER_S
from extproc.core.values import Demand
from extproc.counting.counter import Draft
from extproc.demo.engine_process import EngineProcess
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.demo.service_process import ServiceProcess
from extproc.demo.stack import QWEN3_DIR
from extproc.envoy_config import Addresses, bootstrap
from extproc.envoy_config.clusters import HTTP_OPTIONS, TOKENLANE_CLUSTER
from extproc.service import wire
from extproc.settings import load_policy
from tests.e2e.mesh import CHAT, COMPLETIONS, Mesh, chat, ids, mesh, until
from tests.policies import document, replica

pytestmark = pytest.mark.asyncio(loop_scope="module")

DECISION_S_MAX = 2.0
HELD = 1000
PING_INTERVAL_S = 0.2
READY_S_MAX = 30.0

LONG_TEXT = "before dawn " * 1500
"""Long enough to be counted in a thread, short enough for the interactive lane."""

Broken = tuple[int, str]
"""Status and reason of a refusal."""

UNDECIDED: Broken = (503, "admission_unavailable")
FAULT: Broken = (500, "internal_error")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """A chain that gives up on a decision soon."""
    async with mesh(limits={"decision_s_max": DECISION_S_MAX}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide() -> AsyncIterator[Mesh]:
    """A chain with room for a thousand requests, whose Envoy pings the service all the time."""
    room = {"gross_tokens": 200_000, "requests_max": 2 * HELD}
    pools: dict[str, dict[str, dict[str, Any]]] = {"chat": {"chat-0": room}, "docs": {"docs-0": {}}}
    async with mesh(pools=pools, engine={"requests_max": 2 * HELD}, concurrency=2, tune=_ping_often) as running:
        yield running


def _service_cluster(config: dict[str, Any]) -> dict[str, Any]:
    clusters = config["static_resources"]["clusters"]
    found: dict[str, Any] = next(cluster for cluster in clusters if cluster["name"] == TOKENLANE_CLUSTER)
    return found


def _ping(config: dict[str, Any], interval_s: float, timeout_s: float) -> None:
    options = _service_cluster(config)["typed_extension_protocol_options"][HTTP_OPTIONS]
    keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert "10s" == keepalive["interval"]
    keepalive.update(interval=f"{interval_s}s", timeout=f"{timeout_s}s")


def _ping_often(config: dict[str, Any]) -> None:
    _ping(config, PING_INTERVAL_S, 5)


def _path(body: dict[str, Any]) -> str:
    return COMPLETIONS if "prompt" in body else CHAT


async def _refusal(chain: Mesh, body: dict[str, Any]) -> Broken:
    """Status and reason of a refusal, which is in the contract to the last key."""
    async with chain.post(body, _path(body)) as response:
        error = (await response.json())["error"]
        assert response.headers["x-llm-reason"] == error["code"] == error["details"]["error_code"]
        assert "0" == response.headers["x-llm-reserved-tokens"]
        return response.status, error["code"]


async def _served(chain: Mesh, body: dict[str, Any]) -> bool:
    async with chain.post(body, _path(body)) as response:
        await response.read()
        return bool(response.status == 200)


async def _until_idle(chain: Mesh, within_s: float = 5.0) -> None:
    desk = chain.desk
    await until(lambda: not desk.ledger.open and desk.streams == 0 and desk.intake_bytes == 0, within_s)


async def _requests_total(chain: Mesh, engine: str = "chat-0") -> int:
    return int((await chain.control(engine))["requests_total"])


def _break(*_arguments: Any, **_options: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _stages(chain: Mesh) -> dict[str, tuple[object, str, Broken]]:
    """What is broken at each stage, and what the client is to get."""
    server = chain.server
    return {
        "reading the message": (wire, "event", FAULT),
        "screen": (chain.desk, "screen", FAULT),
        "intake": (chain.desk, "enter", FAULT),
        "read": (server._counter, "read", FAULT),
        "count": (server._counter, "count", FAULT),
        "tokenize": (server._counter._prepared["qwen3"].loaded.backend, "count_batch", (503, "tokenizer_unavailable")),
        "decide": (chain.desk, "decide", FAULT),
        "reserved, then the journal": (server._book, "made", FAULT),
        "reserved, then the reply": (wire, "admitted", FAULT),
        "every answer": (rejection, "answer", UNDECIDED),
    }


@pytest.mark.parametrize(
    "stage",
    [
        "reading the message",
        "screen",
        "intake",
        "read",
        "count",
        "tokenize",
        "decide",
        "reserved, then the journal",
        "reserved, then the reply",
        "every answer",
    ],
)
async def test_exception(chain: Mesh, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """An exception at any stage is answered in the contract, holds nothing and lets nothing through."""
    target, name, expected = _stages(chain)[stage]
    before = await _requests_total(chain)
    # Without it, the pretty tracebacks of an unconfigured log take longer than a decision.
    with monkeypatch.context() as patch, capture_logs() as logs:
        if stage == "tokenize":
            patch.setattr(type(target), name, _break)
        elif stage == "every answer":
            patch.setattr(chain.desk, "screen", _break)
            patch.setattr(target, name, _break)
        else:
            patch.setattr(target, name, _break)
        refused = await _refusal(chain, chat())
        await _until_idle(chain)

    assert expected == refused
    assert any(entry["log_level"] == "error" for entry in logs)
    assert before == await _requests_total(chain)
    assert await _served(chain, chat())
    await _until_idle(chain)


async def test_exception_in_the_access_log(chain: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault with Envoy's log entries costs entries, but no response and no reservation, and the log comes back."""

    def logged() -> float:
        labels = {"lane": "interactive", "end": "complete"}
        return chain.server.metrics.registry.get_sample_value("tokenlane_responses_total", labels) or 0.0

    taken: list[object] = []

    def take(entry: object) -> None:
        taken.append(entry)
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(chain.server._access_log, "_take", take)
        served = [await _served(chain, chat(stream=True)) for _ in range(3)]
        await _until_idle(chain)
        await until(lambda: bool(taken))
    before = logged()

    assert [True] * 3 == served
    async with asyncio.timeout(5):
        while logged() == before:
            assert await _served(chain, chat())
    await _until_idle(chain)


async def test_stalled_loop(chain: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stands still longer than a decision may take: 503 from the route table, and the late verdict ends."""
    decide, before, ended = chain.desk.decide, await _requests_total(chain), chain.ended()

    def stall(demand: Demand, now_ns: int) -> Any:
        time.sleep(DECISION_S_MAX + 0.5)
        return decide(demand, now_ns)

    with monkeypatch.context() as patch:
        patch.setattr(chain.desk, "decide", stall)
        refused = await _refusal(chain, ids(5))
        await _until_idle(chain)

    assert UNDECIDED == refused
    assert before == await _requests_total(chain)
    assert 1 == sum(chain.ended().values()) - sum(ended.values())
    assert await _served(chain, chat())


async def test_stuck_tokenizer() -> None:
    """A count that never returns: 503 in time, nothing held, requests without text go on, and the server can stop."""
    gate = threading.Event()

    def stuck(draft: Draft) -> Sequence[int]:
        gate.wait()
        return draft.prompts.lengths

    limits = {"decision_s_max": DECISION_S_MAX}
    async with mesh(limits=limits, options={"tokenizer_threads": 2}) as chain:
        tokenize = chain.server._counter._tokenize
        chain.server._counter._tokenize = stuck  # type: ignore[method-assign] # what would hang in native code
        try:
            refused = await asyncio.gather(*(_refusal(chain, chat(LONG_TEXT)) for _ in range(4)))
            await _until_idle(chain)
            others = await _served(chain, ids(5))
            chain.server._counter._tokenize = tokenize  # type: ignore[method-assign]
            gate.set()
            recovered = await _served(chain, chat(LONG_TEXT))
            gate.clear()
            chain.server._counter._tokenize = stuck  # type: ignore[method-assign]
            refused.append(await _refusal(chain, chat(LONG_TEXT)))
            async with asyncio.timeout(5):
                await chain.server.stop()
        finally:
            gate.set()

    assert [UNDECIDED] * 5 == refused
    assert others
    assert recovered


async def test_keepalive_holds_a_stream(wide: Mesh) -> None:
    """Envoy's pings, far more often than gRPC tolerates by itself, end no held stream and no connection."""
    async with asyncio.TaskGroup() as group:
        await wide.control("chat-0", hold=True)
        served = group.create_task(_served(wide, ids(5)))
        await until(lambda: len(wide.desk.ledger.open) == 1)
        connections = await asyncio.to_thread(wide.envoy.stats, "cluster.tokenlane.upstream_cx")
        await asyncio.sleep(15 * PING_INTERVAL_S)
        held = wide.reserved_tokens
        after = await asyncio.to_thread(wide.envoy.stats, "cluster.tokenlane.upstream_cx")
        await wide.control("chat-0", hold=False)

    assert served.result()
    assert 21 == held
    assert connections["cluster.tokenlane.upstream_cx_total"] == after["cluster.tokenlane.upstream_cx_total"]
    assert 0 == after.get("cluster.tokenlane.upstream_cx_destroy", 0)
    await _until_idle(wide)


async def test_a_thousand_held(wide: Mesh) -> None:
    """A thousand responses stand still at one time, each with its reservation; all end whole, and all reservations."""
    await wide.control("chat-0", hold=True)
    async with asyncio.TaskGroup() as group:
        served = [group.create_task(_served(wide, ids(5, max_tokens=4))) for _ in range(HELD)]
        await until(lambda: len(wide.desk.ledger.open) == HELD, within_s=30)
        held = wide.reserved_tokens, wide.desk.streams
        await wide.control("chat-0", hold=False)

    assert (9 * HELD, HELD) == held
    assert all(task.result() for task in served)
    await _until_idle(wide)


async def _held(chain: Mesh, count: int) -> list[asyncio.Task[bool]]:
    """Responses that stand still in the engine."""
    await chain.control("chat-0", hold=True)
    tasks = [asyncio.create_task(_served(chain, ids(5, stream=True))) for _ in range(count)]
    async with asyncio.timeout(5):
        while (await chain.control("chat-0"))["running"] < count:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.005)
    return tasks


async def test_envoy_restart_under_load() -> None:
    """Envoy dies while responses run, twice: the next serves at once, and no reservation outlives the bound."""
    async with mesh(limits={"response_s_max": 4}) as chain:
        for number in (signal.SIGTERM, signal.SIGKILL):
            tasks = await _held(chain, 50)
            os.kill(chain.envoy.pid, number)
            await asyncio.to_thread(chain.envoy.stop)
            broken = await asyncio.gather(*tasks, return_exceptions=True)
            await chain.control("chat-0", hold=False)
            await asyncio.to_thread(chain.envoy.start)

            assert all(isinstance(error, aiohttp.ClientError) for error in broken)
            assert await _served(chain, ids(5))
        # Nobody saw the ends: they stand until no response can run any more.
        await _until_idle(chain, 4 + EXPIRY_SLACK_NS / NS_PER_S + 3)

        assert 102 == sum(chain.ended().values())


async def test_circuit_breaker() -> None:
    """Where Envoy's breaker for the service is reached, the rest get 503 from the route table and nothing leaks."""

    def tune(config: dict[str, Any]) -> None:
        (thresholds,) = _service_cluster(config)["circuit_breakers"]["thresholds"]
        thresholds["max_requests"] = 5

    async def answer(chain: Mesh) -> Broken:
        async with chain.post(ids(5), COMPLETIONS) as response:
            await response.read()
            return response.status, response.headers.get("x-llm-reason", "")

    async with mesh(tune=tune) as chain:
        await chain.control("chat-0", hold=True)
        tasks = [asyncio.create_task(answer(chain)) for _ in range(20)]
        await until(lambda: sum(task.done() for task in tasks) + len(chain.desk.ledger.open) == 20)
        held = len(chain.desk.ledger.open)
        await chain.control("chat-0", hold=False)
        answers = sorted(await asyncio.gather(*tasks))
        await _until_idle(chain)

        # One of the five may be the access log's.
        assert held in (4, 5)
        assert [(200, "")] * held + [UNDECIDED] * (20 - held) == answers
        assert held == await _requests_total(chain)
        assert await _served(chain, ids(5))


@dataclass(frozen=True)
class _Apart:
    """A chain whose service is a process of its own."""

    url: str
    admin: str
    service: ServiceProcess
    engine: EngineProcess
    client: aiohttp.ClientSession

    async def ask(self, **more: Any) -> Broken:
        """Status and reason of one request."""
        async with self.client.post(self.url + CHAT, json=chat(**more)) as response:
            await response.read()
            return response.status, response.headers.get("x-llm-reason", "")

    async def ledger(self) -> dict[str, Any]:
        """The service's own page."""
        async with self.client.get(f"{self.admin}/debug/ledger") as response:
            page: dict[str, Any] = await response.json()
            return page

    async def until_running(self) -> None:
        """Wait until the engine runs a request."""
        async with asyncio.timeout(10):
            while (await asyncio.to_thread(self.engine.state))["running"] == 0:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.005)

    async def until_logged(self) -> None:
        """Wait until the service has an entry of Envoy's access log."""
        line = 'tokenlane_responses_total{end="complete",lane="interactive"} 1.0'
        async with asyncio.timeout(10):
            while True:
                async with self.client.get(f"{self.admin}/metrics") as response:
                    if line in await response.text():
                        return
                await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        """Wait until the service says so."""
        async with asyncio.timeout(READY_S_MAX):
            while True:
                try:
                    async with self.client.get(f"{self.admin}/readyz") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    assert self.service.running, self.service.log_tail()
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Wait until the service holds nothing."""
        keys = ("reservations_open", "streams", "intake_bytes")
        async with asyncio.timeout(10):
            page = await self.ledger()
            while any(page[key] for key in keys):
                await asyncio.sleep(0.01)
                page = await self.ledger()


@asynccontextmanager
async def _apart(directory: Path, ping_s: float | None = None) -> AsyncIterator[_Apart]:
    listen, envoy_admin, admin, service_port, *ports = free_ports(6)
    content = document(
        chat={"chat-0": replica(ports[0])},
        docs={"docs-0": replica(ports[1])},
        limits={"decision_s_max": DECISION_S_MAX},
    )
    content["models"] = {"qwen3": {**content["models"].pop("m"), "tokenizer_dir": str(QWEN3_DIR)}}
    path = directory / "policy.yaml"
    path.write_text(yaml.safe_dump(content))
    address = f"127.0.0.1:{service_port}"
    config = bootstrap(load_policy(path), Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{envoy_admin}", address))
    if ping_s is not None:
        _ping(config, ping_s, ping_s)
    engine = EngineProcess("chat-0", ports[0])
    service = ServiceProcess(path, address, f"127.0.0.1:{admin}", directory / "log")
    envoy = EnvoyProcess(config)
    async with AsyncExitStack() as stack:
        for process in (service, engine, envoy):
            stack.callback(process.stop)
        service.launch()
        await asyncio.to_thread(engine.start)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        chain = _Apart(f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}", service, engine, client)
        await chain.until_ready()
        await asyncio.to_thread(envoy.start)
        yield chain


async def test_silent_service(tmp_path: Path) -> None:
    """A service that takes streams and says nothing: 503 in time; once awake, it holds nothing that has ended."""
    async with _apart(tmp_path) as chain:
        process = chain.service._process
        assert process is not None
        await asyncio.to_thread(chain.engine.control, hold=True)
        running = asyncio.create_task(chain.ask(content="before"))
        await chain.until_running()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            refused = await asyncio.gather(*(chain.ask(content=f"number {n}") for n in range(10)))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        held = (await chain.ledger())["summary"]
        await asyncio.to_thread(chain.engine.control, hold=False)
        whole = await running
        await chain.until_idle()
        next_one = await chain.ask()
        await chain.until_idle()
        state = await asyncio.to_thread(chain.engine.state)

    assert [UNDECIDED] * 10 == refused
    assert "1 open" in held
    assert (200, "") == whole == next_one
    assert 2 == state["requests_total"]


async def test_cut_connection(tmp_path: Path) -> None:
    """A connection that Envoy gave up leaves its responses running, so their tokens stay held until they end."""
    async with _apart(tmp_path, ping_s=0.3) as chain:
        process = chain.service._process
        assert process is not None
        # The first entry of Envoy's log tells the service that it may wait for others.
        assert await chain.ask() == (200, "")
        await chain.until_logged()
        await asyncio.to_thread(chain.engine.control, hold=True)
        running = asyncio.create_task(chain.ask(content="before"))
        await chain.until_running()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            refused = await chain.ask(content="meanwhile")
        finally:
            os.kill(process.pid, signal.SIGCONT)
        # The next one is decided on a new connection, so the end of the old one has been seen.
        async with asyncio.timeout(10):
            while await chain.ask(max_tokens=-1) == UNDECIDED:
                pass
        await asyncio.sleep(0.5)
        held = (await chain.ledger())["summary"]
        await asyncio.to_thread(chain.engine.control, hold=False)
        whole = await running
        await chain.until_idle()

    assert UNDECIDED == refused
    assert "1 open" in held
    assert (200, "") == whole
