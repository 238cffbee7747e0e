"""The whole chain for end-to-end tests: client, real Envoy, the service, simulated engines.

The service runs in the test's own event loop, so that a test can look at its desk; Envoy and the engines are
processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from extproc.core.admission import Desk
from extproc.core.values import Ending
from extproc.demo.engine_process import EngineProcess, start_engines, stop_engines
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.demo.stack import QWEN3_DIR
from extproc.envoy_config import Addresses, bootstrap
from extproc.service.server import Options, Server
from extproc.settings import PolicySection, freeze
from tests.policies import document, replica

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Mesh:
    """A running chain. `url` is Envoy's; engines are by name."""

    url: str
    server: Server
    envoy: EnvoyProcess
    engines: Mapping[str, EngineProcess]
    client: aiohttp.ClientSession
    config: dict[str, Any]

    @property
    def desk(self) -> Desk:
        """The desk of the service."""
        return self.server.desk

    @property
    def reserved_tokens(self) -> int:
        """Tokens held by all open reservations."""
        return sum(account.active_tokens for account in self.desk.ledger.accounts.values())

    def ended(self) -> dict[str, int]:
        """Reservations ended so far, by ending."""
        registry = self.server.metrics.registry
        return {
            ending.value: int(
                registry.get_sample_value("tokenlane_reservations_ended_total", {"ending": ending.value}) or 0
            )
            for ending in Ending
        }

    def post(self, body: Mapping[str, Any] | bytes, path: str = CHAT, **options: Any) -> Any:
        """POST a JSON body; use it with `async with`."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.client.post(self.url + path, data=data, headers=headers, **options)

    async def control(self, engine: str, **levers: Any) -> Mapping[str, Any]:
        """Pull levers of an engine without blocking the loop; returns its state."""
        return await asyncio.to_thread(self.engines[engine].control, **levers)

    async def until_free(self, within_s: float = 5.0) -> float:
        """Wait until nothing is reserved; returns how long that took in seconds."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while self.desk.ledger.open:
            assert loop.time() - started < within_s, self.desk.ledger
            await asyncio.sleep(0.001)
        return loop.time() - started


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait for `condition`; returns how long that took in seconds."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while not condition():
        assert loop.time() - started_s < within_s, "the condition did not come true"
        await asyncio.sleep(0.0005)
    return loop.time() - started_s


def chat(content: str = "Hello", max_tokens: int | None = 16, **more: Any) -> dict[str, Any]:
    """A chat body of one user message."""
    ceiling = {} if max_tokens is None else {"max_tokens": max_tokens}
    return {"model": "qwen3", "messages": [{"role": "user", "content": content}], **ceiling, **more}


def ids(count: int, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """A completion whose prompt is exactly `count` tokens."""
    return {"model": "qwen3", "prompt": [9] * count, "max_tokens": max_tokens, **more}


@asynccontextmanager
async def mesh(
    *,
    pools: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
    engine: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    concurrency: int = 1,
    tune: Any = None,
    **changes: Any,
) -> AsyncIterator[Mesh]:
    """Start everything on free loopback ports, and end it all.

    `pools` gives changes of each replica by pool and name; one that has an `address` is the caller's own engine.
    `engine` gives the options of all other engines, `changes` those of the policy document; `tune` may change Envoy's
    bootstrap.
    """
    pools = pools or {"chat": {"chat-0": {}}, "docs": {"docs-0": {}}}
    listen, admin, *ports = free_ports(2 + sum(map(len, pools.values())))
    engines = {
        name: EngineProcess(name, ports.pop(), **(engine or {}))
        for replicas in pools.values()
        for name, more in replicas.items()
        if "address" not in more
    }
    sections: dict[str, Any] = {
        "pools": {
            pool: {
                "probe": {"interval_s": 0.05, "timeout_s": 2},
                "replicas": {
                    name: replica(engines[name].port if name in engines else 0, **more)
                    for name, more in replicas.items()
                },
            }
            for pool, replicas in pools.items()
        },
        "bypass": [
            {"path": "/v1/models", "pool": "chat"},
            {"method": "POST", "path": "/tokenize", "pool": "chat"},
        ],
        **changes,
    }
    content = document(**sections)
    content["models"] = {"qwen3": {**content["models"].pop("m"), "tokenizer_dir": str(QWEN3_DIR)}}
    policy = freeze(PolicySection.model_validate(content), Path())
    assert policy.faults() == []
    server = Server(policy, Options(listen=("127.0.0.1:0",), admin_port=0, **(options or {})))
    try:
        await asyncio.to_thread(start_engines, list(engines.values()))
        await server.start()
        config = bootstrap(
            policy, Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{admin}", f"127.0.0.1:{server.ports[0]}")
        )
        if tune is not None:
            tune(config)
        envoy = EnvoyProcess(config, concurrency=concurrency)
        await asyncio.to_thread(envoy.start)
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as client:
                yield Mesh(f"http://127.0.0.1:{listen}", server, envoy, engines, client, config)
        finally:
            await asyncio.to_thread(envoy.stop)
            await server.stop()
    finally:
        await asyncio.to_thread(stop_engines, list(engines.values()))
