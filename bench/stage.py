"""The stage: one Envoy with a listener for each variant, the ext_proc servers behind it, and two engines.

All variants share Envoy's worker and, where a request is admitted, the same engine; they differ in the ext_proc
filter and in the server that it calls. The budget of the refusing Tokenlane is held by one request that its own
engine never answers.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import noop
from bench.bodies import MODEL
from bench.load import Expected, request
from extproc.core.policy import Policy
from extproc.demo.engine_process import EngineProcess, start_engines, stop_engines
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.envoy_config import Addresses, bootstrap
from extproc.envoy_config.clusters import TOKENLANE_CLUSTER
from extproc.settings import load_policy

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER_DIR = ROOT / "extproc" / "demo" / "qwen3"

START_S_MAX = 60.0
STOP_S_MAX = 5.0
POLL_S = 0.01

HELD_POOL = "held"
HELD_GROSS_TOKENS = 70_000
"""A guard of a tenth leaves 63,000: room for any one body of a benchmark."""

HOLDER_INPUT_TOKENS, HOLDER_OUTPUT_TOKENS = 60_000, 3_000
"""What one unanswered request reserves of it: all."""


class Name(StrEnum):
    """The variants, in the order in which their slices take turns."""

    NO_FILTER = "no filter"
    NOOP = "no-op"
    TOKENLANE = "Tokenlane"
    TOKENLANE_REFUSING = "Tokenlane refusing"
    NOOP_REFUSING = "no-op refusing"


EXPECTED: Mapping[Name, Expected] = {
    Name.NO_FILTER: Expected(200, b"x-engine-name: engine"),
    Name.NOOP: Expected(200, b"x-engine-name: engine"),
    Name.TOKENLANE: Expected(200, b"x-llm-input-tokens: "),
    Name.TOKENLANE_REFUSING: Expected(429, b"x-llm-reason: token_budget_exhausted"),
    Name.NOOP_REFUSING: Expected(429, b"x-llm-reason: token_budget_exhausted"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One listener. `server_pid` is the ext_proc server behind it, None where there is none."""

    name: Name
    port: int
    server_pid: int | None

    @property
    def expected(self) -> Expected:
        """What it answers to every body."""
        return EXPECTED[self.name]


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything is up, warmed by nothing yet."""

    variants: tuple[Variant, ...]
    envoy_pid: int

    def variant(self, name: Name) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name is name)


class StageError(RuntimeError):
    """A process did not come up; the message ends with its log."""


class Server:
    """An ext_proc server as a child process of its own."""

    def __init__(self, arguments: Sequence[str], directory: Path, name: str) -> None:
        self._log_path = directory / f"{name}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own modules, arguments from here)
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def log(self) -> str:
        """What it printed."""
        return self._log_path.read_text(errors="replace")

    def wait(self, text: str) -> None:
        """Wait until it has printed `text`; StageError when it ends or takes too long."""
        until(lambda: text in self.log() or self._process.poll() is not None, self.log)
        if text not in self.log():
            raise StageError(f"a server ended with status {self._process.returncode}:\n{self.log()}")

    def stop(self) -> None:
        """End it, by force when it takes too long."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def until(condition: Callable[[], bool], explain: Callable[[], object]) -> None:
    """Wait for `condition`; StageError with `explain()` when it does not come true."""
    deadline_s = time.monotonic() + START_S_MAX
    while not condition():
        if time.monotonic() > deadline_s:
            raise StageError(f"the stage is not ready after {START_S_MAX:.0f} s:\n{explain()}")
        time.sleep(POLL_S)


@contextmanager
def stage() -> Iterator[Stage]:
    """Start all processes on free loopback ports; end them all."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenlane-bench-")))
        engine, holder = engines = [EngineProcess("engine"), EngineProcess("holder")]
        stack.callback(stop_engines, engines)
        start_engines(engines)
        policies = {
            Name.TOKENLANE: _policy(directory / "admit.json", noop.POOL, engine.address, 2**31),
            Name.TOKENLANE_REFUSING: _policy(directory / "refuse.json", HELD_POOL, holder.address, HELD_GROSS_TOKENS),
        }
        ports = dict(zip(_SERVERS, free_ports(len(_SERVERS)), strict=True))
        arguments = _arguments(directory, ports, engine.address)
        servers = {}
        for name in _SERVERS:
            servers[name] = Server(arguments[name], directory, name.replace(" ", "-"))
            stack.callback(servers[name].stop)
        for name, server in servers.items():
            server.wait('"event":"ready"' if name in policies else "listening on port")
        admin, *listeners = free_ports(1 + len(Name))
        listen = dict(zip(Name, listeners, strict=True))
        config = envoy_config(policies, listen, ports, admin)
        envoy = stack.enter_context(EnvoyProcess(config, concurrency=1))
        stack.enter_context(_held(holder, listen[Name.TOKENLANE_REFUSING]))
        pids = {name: server.pid for name, server in servers.items()}
        yield Stage(tuple(Variant(name, listen[name], pids.get(name)) for name in Name), envoy.pid)


_SERVERS: tuple[Name, ...] = tuple(name for name in Name if name is not Name.NO_FILTER)


def _arguments(directory: Path, ports: Mapping[Name, int], engine: str) -> dict[Name, list[str]]:
    """Module and arguments of each server."""
    listen = {name: f"--listen=127.0.0.1:{port}" for name, port in ports.items()}
    serve = ("extproc", "serve", "--admin=127.0.0.1:0")
    return {
        Name.NOOP: ["bench.noop", listen[Name.NOOP], "--mode=admit", f"--destination={engine}"],
        Name.NOOP_REFUSING: ["bench.noop", listen[Name.NOOP_REFUSING], "--mode=refuse"],
        Name.TOKENLANE: [*serve, listen[Name.TOKENLANE], *_deployed(directory / "admit.json")],
        Name.TOKENLANE_REFUSING: [*serve, listen[Name.TOKENLANE_REFUSING], *_deployed(directory / "refuse.json")],
    }


def _deployed(policy: Path) -> list[str]:
    """Arguments for what a deployment has: a journal."""
    return [f"--journal={policy.with_suffix('.journal')}", str(policy)]


def _policy(path: Path, pool: str, engine: str, gross_tokens: int) -> Policy:
    """Write a policy with one pool of one replica, and read it as the service will."""
    replica = {"address": engine, "gross_tokens": gross_tokens, "requests_max": 10_000}
    lanes = {
        "interactive": {"pool": pool},
        "bulk": {"pool": pool, "input_tokens_max": 60_000, "total_tokens_max": 63_000},
    }
    document = {
        "version": "bench-1",
        # The request that holds the budget outlasts every run.
        "limits": {"response_s_max": 86_400},
        # Replicas are probed once, at the start: a probe is not what a request costs.
        "pools": {pool: {"probe": {"interval_s": 86_400}, "replicas": {pool: replica}}},
        "models": {MODEL: {"tokenizer_dir": str(TOKENIZER_DIR), "context_tokens_max": 128_000, "lanes": lanes}},
    }
    path.write_text(json.dumps(document))
    return load_policy(path)


def envoy_config(
    policies: Mapping[Name, Policy], listen: Mapping[Name, int], servers: Mapping[Name, int], admin: int
) -> dict[str, Any]:
    """One bootstrap with a listener for each variant: Tokenlane's own, with what differs changed."""
    parts = {
        name: bootstrap(
            policy,
            Addresses(f"127.0.0.1:{listen[name]}", f"127.0.0.1:{admin}", f"127.0.0.1:{servers[name]}"),
        )
        for name, policy in policies.items()
    }
    plain = parts[Name.TOKENLANE]
    service = _cluster(plain, TOKENLANE_CLUSTER)
    clusters = [_cluster(part, pool) for part, pool in zip(parts.values(), (noop.POOL, HELD_POOL), strict=True)]
    clusters += [_renamed(service, name, port) for name, port in servers.items()]
    listeners = [_listener(parts, name, listen[name]) for name in Name]
    return {"admin": plain["admin"], "static_resources": {"listeners": listeners, "clusters": clusters}}


def _cluster(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in part["static_resources"]["clusters"] if each["name"] == name)
    return found


def _renamed(service: Mapping[str, Any], name: Name, port: int) -> dict[str, Any]:
    cluster = deepcopy(dict(service))
    cluster["name"] = cluster["load_assignment"]["cluster_name"] = name.value
    hosts = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    hosts[0]["endpoint"]["address"]["socket_address"]["port_value"] = port
    return cluster


def _listener(parts: Mapping[Name, Mapping[str, Any]], name: Name, port: int) -> dict[str, Any]:
    """A listener of Tokenlane's own, with its access log, or one made of it for a variant that has none."""
    part = parts.get(name, parts[Name.TOKENLANE])
    listener: dict[str, Any] = deepcopy(part["static_resources"]["listeners"][0])
    listener["name"] = name.value
    listener["address"]["socket_address"]["port_value"] = port
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["stat_prefix"] = name.value
    filters = {each["name"]: each for each in manager["http_filters"]}
    if name is Name.NO_FILTER:
        manager["http_filters"] = [filters["envoy.filters.http.router"]]
        route = {"match": {"prefix": "/"}, "route": {"cluster": noop.POOL}}
        manager["route_config"]["virtual_hosts"][0]["routes"] = [route]
    else:
        service = filters["envoy.filters.http.ext_proc"]["typed_config"]["grpc_service"]
        service["envoy_grpc"]["cluster_name"] = name.value
    if name in parts:
        log = manager["access_log"][0]["typed_config"]["common_config"]["grpc_service"]
        log["envoy_grpc"]["cluster_name"] = name.value
    else:
        del manager["access_log"]
    return listener


@contextmanager
def _held(engine: EngineProcess, port: int) -> Iterator[None]:
    """Hold the refusing budget with one admitted request that is never answered."""
    engine.control(hold=True)
    body = {"model": MODEL, "prompt": [9] * HOLDER_INPUT_TOKENS, "max_tokens": HOLDER_OUTPUT_TOKENS}
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request("/v1/completions", json.dumps(body).encode()))
        until(lambda: engine.state()["running"] == 1, engine.state)
        yield
