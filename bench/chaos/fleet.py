"""The processes of a chaos run: engines, the service with its journal, and the Envoy of the moment.

Each can be killed and started again on the same port. `episodes` tells what was done and when it was over.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.chaos.requests import DEFAULT_CEILING_TOKENS, MODEL, MODELS
from bench.chaos.schedule import MS_PER_S, REPLICAS, SERVICE, Fault, FaultKind
from bench.chaos.verdict import Episode, Rules
from extproc.core.policy import Policy
from extproc.demo.engine_process import EngineProcess, start_engines
from extproc.demo.envoy_process import EnvoyProcess
from extproc.envoy_config import Addresses, bootstrap
from extproc.envoy_config.clusters import HTTP_OPTIONS, TOKENLANE_CLUSTER
from extproc.settings import PolicySection, freeze

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER_DIR = ROOT / "extproc" / "demo" / "qwen3"

CONTEXT_TOKENS_MAX = 32_768
RESPONSE_S_MAX = 45
"""Short, so that what a missed end leaves behind is gone soon, and long enough to outlast a restart of the service."""

GROSS_TOKENS = {"chat": 3600, "docs": 36_000}
RATES = {
    "chat": {"prefill_tokens_per_s": 20_000, "decode_tokens_per_s": 200},
    "docs": {"prefill_tokens_per_s": 40_000, "decode_tokens_per_s": 200},
}
DRAIN_GRACE_S = 1.5
OUTLAST_S = 1.0
"""How long what ran before a restart of the service still runs after it, beside what is admitted then."""

PROBE_INTERVAL_S = 0.1
ENVOY_WORKERS = 2
KEEPALIVE_S = 1
"""Far below Envoy's own, so that a service that stands still loses its connections within a fault."""


START_S_MAX = 60.0
STOP_S_MAX = 10.0
POLL_S = 0.02

PORTS_FROM, PORTS_TO, PORTS_STEP, PORTS_RUNS = 15_000, 32_000, 30, 500
"""Below the ports that the system gives to outgoing connections: one of those could take the port of a dead server."""


class _Engine(EngineProcess):
    """An engine that writes down what it sees into `seen`, over all its lives."""

    def __init__(self, name: str, port: int, seen: Path, **options: int | str | Path) -> None:
        super().__init__(name, port, model=MODEL, seen=seen, **options)

    def _command(self) -> list[str]:
        python, option, _module, *arguments = super()._command()
        return [python, option, "bench.chaos.engine", *arguments]


class Fleet:
    """The installation of one run. `started_s` is the zero of its clock."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tokenlane-soak-"))
        self.episodes: list[Episode] = []
        self.rss_bytes_max = 0
        names = [(pool, name) for pool, replicas in REPLICAS.items() for name in replicas]
        self._service_port, self._admin_port, *ports = _ports(6 + len(names))
        self._envoy_ports = [(ports.pop(), ports.pop()) for _ in range(2)]
        self.engines: dict[str, EngineProcess] = {
            name: _Engine(
                name,
                ports.pop(),
                self.directory / f"{name}.seen",
                context_tokens_max=CONTEXT_TOKENS_MAX,
                **RATES[pool],
            )
            for pool, name in names
        }
        self.policy = self._write_policy()
        self.rules = Rules({e.address: name for name, e in self.engines.items()}, RESPONSE_S_MAX)
        # Here, because the first one imports for a second, which no restart should take.
        self._configs = [self._envoy_config(listen, admin) for listen, admin in self._envoy_ports]
        self._service: subprocess.Popen[bytes] | None = None
        self._envoys: list[EnvoyProcess] = []
        self._slot = 0
        self._lives = 0
        self.started_s = time.monotonic()

    @property
    def envoy(self) -> str:
        """Name of the Envoy process that clients ask now."""
        return f"envoy-{self._lives}"

    @property
    def port(self) -> int:
        """Port of that Envoy."""
        return self._envoy_ports[self._slot][0]

    @property
    def budgets_tokens(self) -> Mapping[str, int]:
        """What reservations may hold, by replica."""
        return {replica.name: replica.budget_tokens for replica in self.policy.replicas()}

    def now_s(self) -> float:
        """Time of the run's clock."""
        return time.monotonic() - self.started_s

    def start(self) -> None:
        """Start everything and wait until it serves."""
        self._launch_service()
        start_engines(list(self.engines.values()))
        self._await_service()
        self._start_envoy()
        self.started_s = time.monotonic()

    def close(self) -> None:
        """End everything and remove its files."""
        for envoy in self._envoys:
            envoy.stop()
        if self._service is not None:
            self._service.kill()
            self._service.wait()
        for engine in self.engines.values():
            engine.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def strike(self, fault: Fault) -> None:
        """Do what `fault` says, undo it, and return when all is as before."""
        down_s = fault.down_ms / MS_PER_S
        target = self.envoy if fault.kind.startswith("envoy") else fault.target
        episode = Episode(fault.kind, target, self.now_s())
        self.episodes.append(episode)
        match fault.kind:
            case FaultKind.ENGINE_KILL:
                engine = self.engines[target]
                await self._cycle(engine.kill, down_s, engine.start)
            case FaultKind.ENGINE_SICK:
                await self._lever(target, down_s, "health", 503, 200)
            case FaultKind.ENGINE_BUSY:
                await self._lever(target, down_s, "status", 503, None)
            case FaultKind.ENGINE_HOLD:
                await self._lever(target, down_s, "hold", True, False)
            case FaultKind.SERVICE_KILL | FaultKind.SERVICE_TERM:
                number = signal.SIGKILL if fault.kind is FaultKind.SERVICE_KILL else signal.SIGTERM
                # Whatever a restart takes here, the engines are still full after it.
                await asyncio.to_thread(self._hold_engines, held=True)
                await self._cycle(lambda: self._end_service(number), down_s, self._start_service)
                await asyncio.sleep(OUTLAST_S)
                await asyncio.to_thread(self._hold_engines, held=False)
            case FaultKind.SERVICE_FREEZE:
                await self._cycle(
                    lambda: self._signal_service(signal.SIGSTOP), down_s, lambda: self._signal_service(signal.SIGCONT)
                )
            case FaultKind.ENVOY_KILL | FaultKind.ENVOY_TERM:
                number = signal.SIGKILL if fault.kind is FaultKind.ENVOY_KILL else signal.SIGTERM
                await self._cycle(lambda: self._end_envoy(number), down_s, self._start_envoy)
            case FaultKind.ENVOY_SWITCH:
                await asyncio.to_thread(self._switch_envoy)
                await asyncio.sleep(down_s)
                await asyncio.to_thread(self._end_envoy, signal.SIGTERM)
        episode.ended_s = self.now_s()

    async def _cycle(self, end: Callable[[], None], down_s: float, start: Callable[[], object]) -> None:
        await asyncio.to_thread(end)
        await asyncio.sleep(down_s)
        await asyncio.to_thread(start)

    async def _lever(self, target: str, down_s: float, lever: str, pulled: bool | int, back: bool | int | None) -> None:
        engine = self.engines[target]
        await asyncio.to_thread(engine.control, **{lever: pulled})
        await asyncio.sleep(down_s)
        await asyncio.to_thread(engine.control, **{lever: back})

    def _hold_engines(self, *, held: bool) -> None:
        for engine in self.engines.values():
            with contextlib.suppress(OSError, http.client.HTTPException):  # it may be down just now
                engine.control(hold=held)

    def ledger(self) -> dict[str, Any]:
        """The service's /debug/ledger."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/debug/ledger", timeout=5) as answer:
            page: dict[str, Any] = json.load(answer)
        return page

    def seen(self) -> dict[str, list[str]]:
        """Request ids that each engine saw."""
        paths = {name: self.directory / f"{name}.seen" for name in self.engines}
        return {name: path.read_text().split() if path.exists() else [] for name, path in paths.items()}

    def decisions(self) -> Iterable[dict[str, Any]]:
        """Lines of the service's log, over all its lives."""
        with self._log_path.open("rb") as log:
            for line in log:
                if line.startswith(b"{") and line.endswith(b"}\n"):
                    yield json.loads(line)

    def admitted(self) -> dict[str, str]:
        """Reserved replica by request id."""
        return {line["request_id"]: line["replica"] for line in self.decisions() if line.get("event") == "admit"}

    @property
    def _log_path(self) -> Path:
        return self.directory / "tokenlane.log"

    def _write_policy(self) -> Policy:
        document = {
            "version": "soak-1",
            "limits": {"response_s_max": RESPONSE_S_MAX, "decision_s_max": 5},
            "pools": {
                pool: {
                    "probe": {"interval_s": PROBE_INTERVAL_S, "timeout_s": 1},
                    "replicas": {
                        name: {"address": self.engines[name].address, "gross_tokens": GROSS_TOKENS[pool]}
                        for name in names
                    },
                }
                for pool, names in REPLICAS.items()
            },
            "models": {
                MODEL: {
                    "tokenizer_dir": str(TOKENIZER_DIR),
                    "context_tokens_max": CONTEXT_TOKENS_MAX,
                    "default_ceiling": DEFAULT_CEILING_TOKENS,
                    "lanes": {
                        "interactive": {"pool": "chat", "input_tokens_max": 512, "output_tokens_max": 1024},
                        "bulk": {"pool": "docs", "input_tokens_max": 16_384, "total_tokens_max": 20_480},
                    },
                }
            },
            "bypass": [{"path": MODELS, "pool": "chat"}],
        }
        # JSON is YAML too.
        (self.directory / "policy.yaml").write_text(json.dumps(document))
        return freeze(PolicySection.model_validate(document), self.directory)

    def _envoy_config(self, listen: int, admin: int) -> dict[str, Any]:
        addresses = Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{admin}", f"127.0.0.1:{self._service_port}")
        config = bootstrap(self.policy, addresses)
        (service,) = (c for c in config["static_resources"]["clusters"] if c["name"] == TOKENLANE_CLUSTER)
        options = service["typed_extension_protocol_options"][HTTP_OPTIONS]
        keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
        keepalive.update(interval=f"{KEEPALIVE_S}s", timeout=f"{KEEPALIVE_S}s")
        return config

    def _launch_service(self) -> None:
        command = [
            *(sys.executable, "-m", "extproc", "serve", str(self.directory / "policy.yaml")),
            f"--listen=127.0.0.1:{self._service_port}",
            f"--admin=127.0.0.1:{self._admin_port}",
            f"--journal={self.directory / 'journal'}",
            f"--drain-grace-s={DRAIN_GRACE_S}",
        ]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._log_path.open("ab") as log:
            self._service = subprocess.Popen(  # noqa: S603 (our own module)
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
            )

    def _await_service(self) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while not self._service_ready():
            if self._service is None or self._service.poll() is not None or time.monotonic() > deadline_s:
                tail = self._log_path.read_bytes()[-2000:].decode(errors="replace")
                raise RuntimeError(f"{SERVICE} did not start:\n{tail}")
            time.sleep(POLL_S)

    def _service_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _start_service(self) -> None:
        self._launch_service()
        self._await_service()

    def _end_service(self, number: int) -> None:
        assert self._service is not None
        self.note_memory()
        self._signal_service(number)
        self._service.wait(STOP_S_MAX)

    def _signal_service(self, number: int) -> None:
        assert self._service is not None
        self._service.send_signal(number)

    def note_memory(self) -> None:
        """Keep the largest memory that the service has ever had."""
        assert self._service is not None
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self._service.pid}/status").read_text().splitlines())
        self.rss_bytes_max = max(self.rss_bytes_max, 1024 * int(fields["VmHWM"].split()[0]))

    def _start_envoy(self) -> None:
        envoy = EnvoyProcess(self._configs[self._slot], concurrency=ENVOY_WORKERS)
        envoy.start()
        self._envoys.append(envoy)
        self._lives += 1

    def _switch_envoy(self) -> None:
        """Start another Envoy on the other ports; clients ask that one from now on."""
        old, self._slot = self._slot, 1 - self._slot
        try:
            self._start_envoy()
        except BaseException:
            self._slot = old
            raise

    def _end_envoy(self, number: int) -> None:
        """End the oldest Envoy."""
        envoy = self._envoys.pop(0)
        os.kill(envoy.pid, number)
        envoy.stop()


def _ports(count: int) -> list[int]:
    """Free loopback ports."""
    found: list[int] = []
    # Apart from those of other runs, which would take the port of a server of this one while it is down.
    for port in range(PORTS_FROM + PORTS_STEP * (os.getpid() % PORTS_RUNS), PORTS_TO):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("there are not enough free ports")
