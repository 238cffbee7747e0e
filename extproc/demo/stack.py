"""The demo's installation: Envoy, Tokenlane and two pools of simulated engines, on loopback, until its block ends.

All children load at the same time. Everything that is written lies in one directory, which goes with them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from extproc.demo.engine_process import EngineProcess, stop_engines
from extproc.demo.envoy_process import EnvoyProcess, envoy_path, free_ports
from extproc.demo.service_process import ServiceProcess
from extproc.settings import load_policy

QWEN3_DIR = Path(__file__).with_name("qwen3")

MODEL = "qwen3"
CONTEXT_TOKENS_MAX = 40_960
POOLS = {"chat": ("chat-0", "chat-1"), "docs": ("docs-0",)}
RATES = {
    "chat": {"prefill_tokens_per_s": 20_000, "decode_tokens_per_s": 200},
    "docs": {"prefill_tokens_per_s": 40_000, "decode_tokens_per_s": 400},
}

READY_S_MAX = 20.0
"""Loading a tokenizer takes a second; a loaded machine may need much longer."""

POLL_S = 0.02

POLICY = """\
# The policy of this demo. Budgets are small, so that a few requests fill them.
version: demo-1

pools:
  # Short chats. Of 15,000 tokens a tenth is kept back, so 13,500 can be reserved on each replica.
  chat:
    guard_ratio: 0.10
    probe: {{interval_s: 0.2}} # two failed probes in a row take a replica out
    replicas:
      chat-0: {{address: "{chat_0}", gross_tokens: 15000, release_tokens_per_s: 800}}
      chat-1: {{address: "{chat_1}", gross_tokens: 15000, release_tokens_per_s: 800}}
  # Long documents, kept away from the chats. 86,400 tokens can be reserved.
  docs:
    guard_ratio: 0.10
    probe: {{interval_s: 0.2}}
    replicas:
      docs-0: {{address: "{docs_0}", gross_tokens: 96000, release_tokens_per_s: 1500}}

models:
  qwen3:
    tokenizer_dir: {tokenizer_dir}
    tokenizer_backend: huggingface # auto would take fastokens, which counts faster but loads slower
    context_tokens_max: {context_tokens_max}
    default_ceiling: 256 # output tokens of a request that states no max_tokens; written into its body
    lanes:
      interactive: {{pool: chat, input_tokens_max: 4096, output_tokens_max: 1024}}
      bulk: {{pool: docs, input_tokens_max: 32768, total_tokens_max: 36864}}

# Requests without tokens that may pass. Everything else is answered 404.
bypass:
  - {{path: /v1/models, pool: chat}}
"""


class StackError(RuntimeError):
    """The installation did not come up; the text says what failed."""


class Stack:
    """Everything that runs; `async with Stack() as stack` starts and ends it.

    Entering raises StackError, EngineStartError or EnvoyError. Leaving ends all children without awaiting anything,
    so a cancelled task cannot leave one behind.
    """

    def __init__(self) -> None:
        envoy_path()
        self.directory = Path(tempfile.mkdtemp(prefix="tokenlane-demo-"))
        listen, envoy_admin, admin, *ports = free_ports(3 + sum(map(len, POOLS.values())))
        self.url = f"http://127.0.0.1:{listen}"
        self.admin_url = f"http://127.0.0.1:{admin}"
        self.envoy_admin_url = f"http://127.0.0.1:{envoy_admin}"
        self.engines = {
            name: EngineProcess(
                name,
                ports.pop(),
                **RATES[pool],
                tokenizer_dir=QWEN3_DIR,
                context_tokens_max=CONTEXT_TOKENS_MAX,
            )
            for pool, names in POOLS.items()
            for name in names
        }
        self.policy_path = self.directory / "policy.yaml"
        self._listen = f"unix:{self.directory}/tokenlane.sock"
        self.service = ServiceProcess(
            self.policy_path, self._listen, f"127.0.0.1:{admin}", self.directory / "tokenlane.log"
        )
        self._envoy: EnvoyProcess | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all children and remove the directory."""
        if self._envoy is not None:
            self._envoy.stop()
        self.service.stop()
        stop_engines(self.engines.values())
        shutil.rmtree(self.directory, ignore_errors=True)

    def replica_at(self, address: str) -> str:
        """Name of the replica at `address`; the address itself when there is none."""
        return next((engine.name for engine in self.engines.values() if engine.address == address), address)

    async def wait_ready(self) -> None:
        """Wait until Tokenlane is ready and has seen all replicas; StackError when it ends or takes too long."""
        deadline_s = time.monotonic() + READY_S_MAX
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
            while not await self._ready(client):
                if not self.service.running or time.monotonic() > deadline_s:
                    raise StackError(f"tokenlane did not become ready:\n{self.service.log_tail()}")
                await asyncio.sleep(POLL_S)

    async def _ready(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(f"{self.admin_url}/readyz") as readiness:
                if readiness.status != 200:
                    return False
            async with client.get(f"{self.admin_url}/debug/ledger") as answer:
                replicas = (await answer.json())["replicas"].values()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return all(replica["ready"] for replica in replicas)

    async def _start(self) -> None:
        self._write_policy()
        self.service.launch()
        for engine in self.engines.values():
            engine.launch()
        await asyncio.to_thread(self._write_envoy_config)
        self._start_envoy()
        for engine in self.engines.values():
            await asyncio.to_thread(engine.wait_ready)
        await self.wait_ready()

    def _write_policy(self) -> None:
        addresses = {name.replace("-", "_"): engine.address for name, engine in self.engines.items()}
        text = POLICY.format(**addresses, tokenizer_dir=QWEN3_DIR, context_tokens_max=CONTEXT_TOKENS_MAX)
        self.policy_path.write_text(text, encoding="utf-8")

    def _write_envoy_config(self) -> None:
        # Here, because importing it takes a second in which the children can load.
        from extproc.envoy_config import Addresses, bootstrap, to_yaml  # noqa: PLC0415

        addresses = Addresses(
            self.url.removeprefix("http://"), self.envoy_admin_url.removeprefix("http://"), self._listen
        )
        config = bootstrap(load_policy(self.policy_path), addresses)
        (self.directory / "envoy.yaml").write_text(to_yaml(config), encoding="utf-8")
        self._envoy = EnvoyProcess(config)

    def _start_envoy(self) -> None:
        # On the loop, which has nothing else to do: a thread could still start it after the block was left.
        if self._envoy is not None:
            self._envoy.start()
