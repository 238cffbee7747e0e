"""The process: ready only when it can serve, and a SIGTERM that loses nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.demo.engine_process import EngineProcess
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.demo.stack import QWEN3_DIR
from extproc.envoy_config import Addresses, bootstrap
from extproc.service.health import LIVENESS_NAME, READINESS_NAMES
from extproc.settings import load_policy
from tests.policies import document, replica

READY_S_MAX = 30


def _policy_file(directory: Path, port: int) -> Path:
    content = document(
        chat={"chat-0": replica(port)},
        docs={"docs-0": replica(port + 1 if port < 65535 else 1)},
        model={
            "tokenizer_dir": str(QWEN3_DIR),
            "context_tokens_max": 200_000,
            "lanes": {"interactive": {"pool": "chat"}},
        },
    )
    del content["pools"]["docs"]
    content["pools"]["chat"]["probe"] = {"interval_s": 0.05}
    path = directory / "policy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@asynccontextmanager
async def _serve(policy: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", "serve", str(policy), *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _lines_until(process: asyncio.subprocess.Process, event: str) -> list[bytes]:
    assert process.stdout is not None
    lines: list[bytes] = []
    async with asyncio.timeout(READY_S_MAX):
        while not lines or f'"event":"{event}"'.encode() not in lines[-1]:
            line = await process.stdout.readline()
            assert line, b"".join(lines).decode()
            lines.append(line)
    return lines


async def _health(address: str) -> dict[str, int]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = (*READINESS_NAMES, LIVENESS_NAME)
        return {name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}


async def _status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url) as response:
        return response.status


async def test_serves_on_a_socket_and_says_so(tmp_path: Path) -> None:
    """Over UDS: all health names serve once it is ready; an unready replica does not stop it from being ready."""
    (dead_port, admin_port) = free_ports(2)
    address = f"unix:{tmp_path}/ext_proc.sock"
    options = ("--listen", address, "--admin", f"127.0.0.1:{admin_port}")
    async with _serve(_policy_file(tmp_path, dead_port), *options) as process, aiohttp.ClientSession() as client:
        await _lines_until(process, "ready")
        states = await _health(address)
        admin = f"http://127.0.0.1:{admin_port}"

        assert {*READINESS_NAMES, LIVENESS_NAME} == set(states)
        assert {health_pb2.HealthCheckResponse.SERVING} == set(states.values())
        assert [200, 200, 200, 200] == [
            await _status(client, admin + path) for path in ("/healthz", "/readyz", "/metrics", "/debug/ledger")
        ]
        process.send_signal(signal.SIGTERM)
        assert 0 == await asyncio.wait_for(process.wait(), 10)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"version": 1}, b"version: Input should be a valid string"),
        (None, b"tokenizer"),
    ],
)
async def test_refuses_to_start(tmp_path: Path, content: dict[str, Any] | None, sentence: bytes) -> None:
    """A policy or tokenizer that cannot be used ends the process with a sentence, not a traceback."""
    path = _policy_file(tmp_path, free_ports(1)[0])
    document = yaml.safe_load(path.read_text()) if content is None else content
    if content is None:
        document["models"]["m"]["tokenizer_dir"] = str(tmp_path)
    path.write_text(yaml.safe_dump(document))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc", "serve", str(path), stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), READY_S_MAX)

    assert 1 == process.returncode
    assert error.startswith(b"Error: ")
    assert sentence in error
    assert b"Traceback" not in error


def _children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _alive(pid: int) -> bool:
    try:
        return "Z" != Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_a_killed_service_leaves_no_worker(tmp_path: Path) -> None:
    """The processes that count large bodies end by themselves when the service is killed."""
    options = ("--listen", f"unix:{tmp_path}/ext_proc.sock", "--admin", f"127.0.0.1:{free_ports(1)[0]}")
    async with _serve(_policy_file(tmp_path, free_ports(1)[0]), *options, "--tokenizer-processes=2") as process:
        await _lines_until(process, "ready")
        workers = _children(process.pid)
        process.kill()
        await process.wait()
        async with asyncio.timeout(READY_S_MAX):
            while any(map(_alive, workers)):  # noqa: ASYNC110 (other processes)
                await asyncio.sleep(0.01)

    assert len(workers) >= 2


@dataclass(frozen=True)
class _Running:
    """A service process behind Envoy, and one streaming response that stands still after its first chunk."""

    process: asyncio.subprocess.Process
    client: aiohttp.ClientSession
    engine: EngineProcess
    service: str
    readyz: str
    first: bytes
    response: aiohttp.ClientResponse
    url: str

    async def request(self) -> tuple[int, str, str]:
        """Status, reason and Retry-After of a new request."""
        async with self.client.post(self.url, json=BODY) as response:
            code = (await response.json())["error"]["code"]
            return response.status, code, response.headers["retry-after"]

    async def finish(self) -> bytes:
        """Let the engine go on; returns the whole stream."""
        await asyncio.to_thread(self.engine.control, hold=False)
        return self.first + await self.response.read()


BODY = {"model": "m", "prompt": [9] * 5, "max_tokens": 20, "stream": True}


@asynccontextmanager
async def _running(directory: Path) -> AsyncIterator[_Running]:
    listen, envoy_admin, engine_port, admin_port, service_port = free_ports(5)
    path = _policy_file(directory, engine_port)
    service = f"127.0.0.1:{service_port}"
    config = bootstrap(load_policy(path), Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{envoy_admin}", service))
    engine, envoy = EngineProcess("chat-0", engine_port, model="m", decode_tokens_per_s=100), EnvoyProcess(config)
    await asyncio.to_thread(engine.start)
    try:
        async with _serve(path, "--listen", service, "--admin", f"127.0.0.1:{admin_port}") as process:
            await _lines_until(process, "ready")
            await asyncio.to_thread(envoy.start)
            url = f"http://127.0.0.1:{listen}/v1/completions"
            async with aiohttp.ClientSession() as client, client.post(url, json=BODY) as response:
                first = await response.content.readline()
                await asyncio.to_thread(engine.control, hold=True)
                readyz = f"http://127.0.0.1:{admin_port}/readyz"
                yield _Running(process, client, engine, service, readyz, first, response, url)
    finally:
        await asyncio.to_thread(envoy.stop)
        await asyncio.to_thread(engine.stop)


def _whole(stream: bytes) -> bool:
    return stream.count(b"data: ") == 22 and stream.endswith(b"data: [DONE]\n\n")


async def test_sigterm_finishes_what_runs(tmp_path: Path) -> None:
    """While draining: not ready but alive, new requests get 503 draining, the running stream ends whole, exit 0."""
    async with _running(tmp_path) as chain:
        chain.process.send_signal(signal.SIGTERM)
        await _lines_until(chain.process, "drain")
        while await _status(chain.client, chain.readyz) != 503:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.005)
        states = await _health(chain.service)
        refused = await chain.request()
        stream = await chain.finish()

        assert (503, "draining") == refused[:2]
        assert {health_pb2.HealthCheckResponse.NOT_SERVING} == {states[name] for name in READINESS_NAMES}
        assert health_pb2.HealthCheckResponse.SERVING == states[LIVENESS_NAME]
        assert _whole(stream)
        assert 0 == await asyncio.wait_for(chain.process.wait(), 10)


async def test_sigkill_truncates_nothing(tmp_path: Path) -> None:
    """A killed service: the running stream ends whole, a new request is answered by the route table."""
    async with _running(tmp_path) as chain:
        chain.process.kill()
        await chain.process.wait()
        refused = await chain.request()
        stream = await chain.finish()

        assert (503, "admission_unavailable", "1") == refused
        assert _whole(stream)
        assert 1 == (await asyncio.to_thread(chain.engine.state))["requests_total"]


async def test_grace_ends_and_truncates_nothing(tmp_path: Path) -> None:
    """A second SIGTERM does not wait for the running stream, which ends whole without the service."""
    async with _running(tmp_path) as chain:
        chain.process.send_signal(signal.SIGTERM)
        await _lines_until(chain.process, "drain")
        chain.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(chain.process.wait(), 10)

        assert -signal.SIGTERM == chain.process.returncode
        assert _whole(await chain.finish())
