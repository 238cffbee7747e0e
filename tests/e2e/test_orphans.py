"""What runs stays counted when the service dies, stops or loses its connection, and ends with its response."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import pytest
import yaml

from extproc.core.admission import EXPIRY_SLACK_NS
from extproc.core.values import Lane, Reservation
from extproc.demo.engine_process import EngineProcess
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.demo.stack import QWEN3_DIR
from extproc.envoy_config import Addresses, bootstrap
from extproc.service.journal import Journal
from extproc.service.server import Options, Server
from extproc.settings import load_policy
from tests.e2e.mesh import COMPLETIONS, Mesh, ids, mesh, until
from tests.policies import document, policy, replica

BUDGET_TOKENS = 90
PROMPT_TOKENS = 10
READY_S_MAX = 30.0
SAMPLED = pytest.mark.parametrize("sampled", [0, 1], ids=["unread", "read for drift"])


def _policy_file(directory: Path, engine_port: int, sampled: float) -> Path:
    lane = {"pool": "chat", "input_tokens_max": 30, "output_tokens_max": 60}
    content = document(
        chat={"chat-0": replica(engine_port, gross_tokens=100)},
        model={"tokenizer_dir": str(QWEN3_DIR), "lanes": {"interactive": lane}},
        drift_sample_ratio=sampled,
    )
    del content["pools"]["docs"]
    content["pools"]["chat"]["probe"] = {"interval_s": 0.05, "timeout_s": 2}
    path = directory / "policy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class _Chain:
    """Envoy, one engine with a budget of 90 tokens, and the service as a process that can be killed."""

    def __init__(self, directory: Path, sampled: float) -> None:
        listen, envoy_admin, engine_port, admin_port, service_port = free_ports(5)
        self._policy = _policy_file(directory, engine_port, sampled)
        self._options = (
            f"--listen=127.0.0.1:{service_port}",
            f"--admin=127.0.0.1:{admin_port}",
            f"--journal={directory / 'journal'}",
            "--drain-grace-s=0",
        )
        config = bootstrap(
            load_policy(self._policy),
            Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{envoy_admin}", f"127.0.0.1:{service_port}"),
        )
        self.engine = EngineProcess("chat-0", engine_port, model="m", decode_tokens_per_s=20)
        self._envoy = EnvoyProcess(config)
        self._url = f"http://127.0.0.1:{listen}{COMPLETIONS}"
        self._admin = f"http://127.0.0.1:{admin_port}"
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for part in (self.engine, self._envoy):
            await asyncio.to_thread(part.start)
            self._stack.push_async_callback(asyncio.to_thread, part.stop)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._stack.push_async_callback(self.kill)
        await self.serve()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def serve(self) -> None:
        """Start the service and wait until it is ready."""
        command = (sys.executable, "-m", "extproc", "serve", str(self._policy), *self._options, "--log-level=error")
        self._process = await asyncio.create_subprocess_exec(*command)
        deadline_s = time.monotonic() + READY_S_MAX
        while not await self._ready():
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)

    async def _ready(self) -> bool:
        try:
            async with self.client.get(f"{self._admin}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def kill(self) -> None:
        """End the service as a crash would."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> int:
        """End the service in order; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), 10)

    async def metric(self, name: str) -> int:
        """The sum of a metric over its labels."""
        async with self.client.get(f"{self._admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = (line.rsplit(" ", 1) for line in lines)
        return int(sum(float(value) for key, value in values if key.partition("{")[0] == f"tokenlane_{name}"))

    async def until(self, name: str, expected: int) -> None:
        """Wait for the value of a metric."""
        deadline_s = time.monotonic() + 5
        while (found := await self.metric(name)) != expected:
            assert time.monotonic() < deadline_s, (name, found)
            await asyncio.sleep(0.01)

    def post(self, output_tokens: int) -> Any:
        """A streamed completion that reserves 10 tokens and these."""
        body = {**ids(PROMPT_TOKENS, output_tokens, stream=True), "model": "m"}
        return self.client.post(self._url, json=body)

    async def read(self, output_tokens: int) -> bytes:
        """The whole of one."""
        async with self.post(output_tokens) as response:
            return bytes(await response.read())

    async def refusal(self, output_tokens: int) -> tuple[int, str, int]:
        """Status, reason and available tokens of a request that is refused."""
        async with self.post(output_tokens) as response:
            error = (await response.json())["error"]
            return response.status, error["code"], error["details"]["available_tokens"]


@asynccontextmanager
async def _full(directory: Path, sampled: float) -> AsyncIterator[tuple[_Chain, list[aiohttp.ClientResponse]]]:
    """A chain at its full budget: three responses of 20, 30 and 40 tokens, each past its first event."""
    async with _Chain(directory, sampled) as chain, AsyncExitStack() as stack:
        responses = [await stack.enter_async_context(chain.post(output_tokens)) for output_tokens in (10, 20, 30)]
        await asyncio.to_thread(chain.engine.control, hold=True)
        assert [200] * 3 == [response.status for response in responses]
        yield chain, responses


@SAMPLED
async def test_killed_at_full_budget(tmp_path: Path, sampled: float) -> None:
    """After a crash nothing is admitted until a response of before ends, and then exactly what that frees."""
    async with _full(tmp_path, sampled) as (chain, responses):
        await chain.kill()
        await chain.serve()
        assert (3, BUDGET_TOKENS) == (await chain.metric("orphans"), await chain.metric("reserved_tokens"))
        assert (429, "token_budget_exhausted", 0) == await chain.refusal(1)

        responses[1].close()
        await chain.until("orphans", 2)
        assert (429, "token_budget_exhausted", 30) == await chain.refusal(21)
        next_one = asyncio.create_task(chain.read(20))
        await chain.until("reserved_tokens", BUDGET_TOKENS)
        assert (429, "token_budget_exhausted", 0) == await chain.refusal(1)
        await asyncio.to_thread(chain.engine.control, hold=False)
        bodies = [await responses[0].read(), await responses[2].read(), await next_one]
        assert [True] * 3 == [body.endswith(b"data: [DONE]\n\n") for body in bodies]
        await chain.until("reserved_tokens", 0)
        assert (0, 4) == (await chain.metric("orphans"), await chain.metric("reservations_ended_total"))


@SAMPLED
async def test_sigterm_hands_over(tmp_path: Path, sampled: float) -> None:
    """A service that stops while responses run cuts none of them and leaves their tokens to its successor."""
    async with _full(tmp_path, sampled) as (chain, responses):
        assert 0 == await chain.stop()
        await chain.serve()
        assert (429, "token_budget_exhausted", 0) == await chain.refusal(1)
        await asyncio.to_thread(chain.engine.control, hold=False)
        bodies = [await response.read() for response in responses]

        assert [True] * 3 == [body.endswith(b"data: [DONE]\n\n") for body in bodies]
        await chain.until("reserved_tokens", 0)
        assert (0, 3) == (await chain.metric("orphans"), await chain.metric("reservations_ended_total"))


async def test_an_orphan_without_an_end_expires(tmp_path: Path) -> None:
    """What was adopted and never ends stands until the longest response would have, counted from its admission."""
    section = policy(model={"tokenizer_dir": str(QWEN3_DIR)}, limits={"response_s_max": 1})
    stands_ns = section.limits.response_ns_max + EXPIRY_SLACK_NS
    path = tmp_path / "journal"
    journal = Journal(path, lambda: None)
    now_ns = time.monotonic_ns()
    journal.read(now_ns)
    journal.made(Reservation("old-1", "chat-0", Lane.INTERACTIVE, 500, now_ns - stands_ns))
    journal.made(Reservation("old-2", "chat-0", Lane.INTERACTIVE, 300, now_ns))
    journal.close()
    server = Server(section, Options(listen=("127.0.0.1:0",), admin_port=0, journal=path))
    await server.start()
    try:
        await until(lambda: len(server.desk.ledger.open) == 1)
        assert {"old-2"} == set(server.desk.orphans)
        assert 300 == server.desk.ledger.accounts["chat-0"].active_tokens
        value = server.metrics.registry.get_sample_value
        assert 1 == value("tokenlane_reservations_ended_total", {"ending": "expired"})
    finally:
        await server.stop()
    journal = Journal(path, lambda: None)
    assert ["old-2"] == [reservation.ticket for reservation in journal.read(time.monotonic_ns())]
    journal.close()


class _Wire:
    """The connections between Envoy and the service, which can be cut."""

    def __init__(self) -> None:
        self.target = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()

    def put_between(self, config: dict[str, Any]) -> None:
        """Have Envoy reach the service through here, and log running responses often."""
        (cluster,) = (c for c in config["static_resources"]["clusters"] if c["name"] == "tokenlane")
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        sock = endpoint["endpoint"]["address"]["socket_address"]
        self.target, sock["port_value"] = sock["port_value"], self._server.sockets[0].getsockname()[1]
        log_running_often(config)

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def log_running_often(config: dict[str, Any]) -> None:
    """Have Envoy log running responses ten times a second."""
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    chain["filters"][0]["typed_config"]["access_log_options"]["access_log_flush_interval"] = "0.1s"


async def _until_orphans(chain: Mesh, count: int) -> None:
    await until(lambda: len(chain.desk.orphans) == count)


async def test_a_lost_connection_ends_nothing() -> None:
    """When only the connection to the service breaks, what runs stays reserved until it ends, and ends once."""
    async with _Wire() as wire, mesh(tune=wire.put_between, engine={"decode_tokens_per_s": 100}) as chain:
        async with chain.post(ids(10, 10), COMPLETIONS) as response:
            assert 200 == response.status
        await chain.until_free()
        async with AsyncExitStack() as stack:
            posts = (chain.post(ids(10, 100, stream=True), COMPLETIONS) for _ in range(20))
            running = await asyncio.gather(*(stack.enter_async_context(post) for post in posts))
            await chain.control("chat-0", hold=True)
            assert 20 == len(chain.desk.ledger.open)
            wire.cut()
            await _until_orphans(chain, 20)
            await chain.control("chat-0", hold=False)
            async with chain.post(ids(10, 1000), COMPLETIONS, headers={"x-engine-output-tokens": "1"}) as late:
                assert 200 == late.status
                await late.read()
            bodies = [await response.read() for response in running]
        assert [True] * 20 == [body.endswith(b"data: [DONE]\n\n") for body in bodies]
        await _until_orphans(chain, 0)

        assert {"settled": 22, "released": 0, "expired": 0} == chain.ended()
        assert 0 == chain.reserved_tokens


async def test_an_end_of_envoy_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses that end or are left, many at once, are settled by their streams; few ever look like a break."""
    broken: list[str] = []
    async with mesh(engine={"decode_tokens_per_s": 400}) as chain:
        abandon = chain.desk.abandon

        def watched(ticket: str) -> None:
            broken.append(ticket)
            abandon(ticket)

        monkeypatch.setattr(chain.desk, "abandon", watched)

        async def one(number: int) -> None:
            async with chain.post(ids(10, 20, stream=True), COMPLETIONS) as response:
                assert 200 == response.status
                if number % 2:
                    await response.read()
                else:
                    await response.content.readline()
                    response.close()

        for _ in range(3):
            await asyncio.gather(*(one(number) for number in range(40)))
        await chain.until_free()

        assert len(broken) <= 12  # Envoy resets a stream that a busy machine leaves open for a second
        assert {"settled": 120, "released": 0, "expired": 0} == chain.ended()
