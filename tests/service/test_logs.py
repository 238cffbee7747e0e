"""Logs: written soon or at once, and never in the way of a verdict."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import yaml
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.demo.envoy_process import free_ports
from extproc.demo.stack import QWEN3_DIR
from tests.policies import document, replica

READY_S_MAX = 30
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


@asynccontextmanager
async def _serve(directory: Path, stdout: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The service as a process, and its address."""
    listen, admin, engine = free_ports(3)
    content = document(
        chat={"chat-0": replica(engine)},
        model={"tokenizer_dir": str(QWEN3_DIR), "lanes": {"interactive": {"pool": "chat"}}},
    )
    path = directory / "policy.yaml"
    path.write_text(yaml.safe_dump(content))
    address = f"127.0.0.1:{listen}"
    command = [sys.executable, "-m", "extproc", "serve", str(path), "--listen", address]
    process = await asyncio.create_subprocess_exec(*command, "--admin", f"127.0.0.1:{admin}", stdout=stdout)
    try:
        yield process, address
    finally:
        process.kill()
        await process.communicate()


async def _refused(address: str, path: str = "/unknown") -> int:
    """The status of a refusal, asked for as Envoy asks."""
    headers = [
        base_pb2.HeaderValue(key=key, raw_value=value)
        for key, value in ((":method", b"POST"), (":path", path.encode()))
    ]
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=base_pb2.HeaderMap(headers=headers)))
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(
            METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )(iter([message]), wait_for_ready=True)
        reply = await asyncio.wait_for(call.read(), READY_S_MAX)
        return int(reply.immediate_response.status.code)


async def _lines(reader: asyncio.StreamReader, event: str) -> dict[str, Any]:
    async with asyncio.timeout(READY_S_MAX):
        while True:
            line: dict[str, Any] = orjson.loads(await reader.readline())
            if line["event"] == event:
                return line


async def test_a_decision_is_logged_soon(tmp_path: Path) -> None:
    """One line, gathered at first, comes by itself: level, time, reason, status and how long it took."""
    async with _serve(tmp_path, asyncio.subprocess.PIPE) as (process, address):
        assert process.stdout is not None
        ready = await _lines(process.stdout, "ready")
        assert 404 == await _refused(address)
        line = await _lines(process.stdout, "refuse")

    assert "info" == ready["level"]
    assert ("unknown_endpoint", 404) == (line["reason"], line["status"])
    assert isinstance(line["decision_us"], int)
    assert line["timestamp"].endswith("Z")


async def test_a_full_disk_costs_no_verdict(tmp_path: Path) -> None:
    """Where no line can be written, requests are answered as ever; far more lines than are gathered at one time."""
    full = os.open("/dev/full", os.O_WRONLY)
    async with _serve(tmp_path, full) as (process, address):
        os.close(full)
        statuses = [await _refused(address) for _ in range(100)]

        assert {404} == set(statuses)
        assert process.returncode is None
