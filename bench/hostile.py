"""What hostile clients do to others: short chats and health checks before and during a flood of dear requests.

    python -m bench.hostile [--quick] [--json] [--cap-mib N]

Fifty clients send bodies of 27 MB, a million tokens, 10,000 messages and the like, as fast as they are answered, to a
service whose body cap lets all of them in unless `--cap-mib` says otherwise. It fails when an answer is none of the
contract's, never on a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.bodies import MODEL, PATH, chat
from bench.measure import tell
from bench.stage import ROOT, TOKENIZER_DIR, Server
from bench.stats import children, quantile, ratio
from extproc.core.rejection import STATUS
from extproc.demo.engine_process import EngineProcess, start_engines, stop_engines
from extproc.demo.envoy_process import EnvoyProcess, free_ports
from extproc.envoy_config import Addresses, bootstrap
from extproc.settings import load_policy

CLIENTS = 50
CAP_MIB = 32
CHATS_PER_S = 20
HEALTH_PER_S = 20
KIB = 1024
US_PER_S = 1_000_000

WORDS = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True, slots=True)
class Place:
    """What is running, and where."""

    url: str
    port: int
    admin: str
    service_pid: int


@dataclass(slots=True)
class Phase:
    """What was seen in one span of time; latencies in us."""

    chats_us: list[int] = field(default_factory=list)
    health_us: list[int] = field(default_factory=list)
    chats_failed: int = 0


@contextmanager
def place(cap_bytes: int) -> Iterator[Place]:
    """Envoy, one engine and the service as it is deployed, with the cap of the flood."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenlane-hostile-")))
        engine = EngineProcess("engine", prefill_tokens_per_s=10**9, decode_tokens_per_s=10**6)
        stack.callback(stop_engines, [engine])
        start_engines([engine])
        listen, envoy_admin, port, admin = free_ports(4)
        policy = directory / "policy.json"
        policy.write_text(json.dumps(_document(engine.address, cap_bytes)))
        arguments = ("extproc", "serve", f"--listen=127.0.0.1:{port}", f"--admin=127.0.0.1:{admin}")
        server = Server([*arguments, f"--journal={directory / 'journal'}", str(policy)], directory, "service")
        stack.callback(server.stop)
        server.wait('"event":"ready"')
        addresses = Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{envoy_admin}", f"127.0.0.1:{port}")
        stack.enter_context(EnvoyProcess(bootstrap(load_policy(policy), addresses), concurrency=1))
        yield Place(f"http://127.0.0.1:{listen}{PATH}", listen, f"http://127.0.0.1:{admin}", server.pid)


def _document(engine: str, cap_bytes: int) -> dict[str, Any]:
    replica = {"address": engine, "gross_tokens": 200_000, "requests_max": 1_000}
    lanes = {
        "interactive": {"pool": "engines"},
        "bulk": {"pool": "engines", "input_tokens_max": 60_000, "total_tokens_max": 63_000},
    }
    return {
        "version": "hostile-1",
        "limits": {"body_bytes_max": cap_bytes},
        "pools": {"engines": {"replicas": {"engine": replica}}},
        "models": {MODEL: {"tokenizer_dir": str(TOKENIZER_DIR), "context_tokens_max": 128_000, "lanes": lanes}},
    }


async def observe(place: Place, seconds: float) -> Phase:
    """Short chats and health checks at fixed rates, each timed from when it was due."""
    phase = Phase()
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        body = chat(WORDS * 40)
        started_s = time.monotonic()
        for number in range(int(seconds * CHATS_PER_S)):
            group.create_task(_chat(client, place.url, body, started_s + number / CHATS_PER_S, phase))
        for number in range(int(seconds * HEALTH_PER_S)):
            group.create_task(_health(client, place.admin, started_s + (number + 0.5) / HEALTH_PER_S, phase))
    return phase


async def _chat(client: aiohttp.ClientSession, url: str, body: bytes, due_s: float, phase: Phase) -> None:
    await asyncio.sleep(due_s - time.monotonic())
    async with client.post(url, data=body, headers={"content-type": "application/json"}) as answer:
        await answer.read()
    if answer.status == 200:
        phase.chats_us.append(int((time.monotonic() - due_s) * US_PER_S))
    else:
        phase.chats_failed += 1


async def _health(client: aiohttp.ClientSession, admin: str, due_s: float, phase: Phase) -> None:
    await asyncio.sleep(due_s - time.monotonic())
    async with client.get(f"{admin}/healthz") as answer:
        await answer.read()
    phase.health_us.append(int((time.monotonic() - due_s) * US_PER_S))


async def lag(place: Place) -> dict[str, int]:
    """Looks at the event loop so far, by how late it was at most, in seconds; cumulative."""
    async with aiohttp.ClientSession() as client, client.get(f"{place.admin}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    prefix = 'tokenlane_loop_lag_seconds_bucket{le="'
    pairs = (line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix))
    return {bound: int(float(count)) for bound, count in pairs}


def peak_rss_bytes(pid: int) -> int:
    """The most memory that a process has had (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * KIB


async def measure(place: Place, seconds: float) -> dict[str, Any]:
    """The whole run: alone, then under the flood."""
    await observe(place, 2)
    tell(f"{CHATS_PER_S} chats a second alone, {seconds:.0f} s")
    alone = await observe(place, seconds)
    idle_lag, idle_bytes = await lag(place), _rss(place)
    tell(f"the same beside {CLIENTS} hostile clients")
    command = [sys.executable, "-m", "bench.flood", f"--port={place.port}", f"--clients={CLIENTS}"]
    flood = await asyncio.create_subprocess_exec(
        *command, f"--seconds={seconds + 1}", cwd=ROOT, stdout=subprocess.PIPE, limit=2**20
    )
    assert flood.stdout is not None
    await flood.stdout.readline()
    beside = await observe(place, seconds)
    answers = json.loads(await flood.stdout.readline())
    await flood.wait()
    during = {bound: count - idle_lag[bound] for bound, count in (await lag(place)).items()}
    return _result(alone, beside, answers, during, {"idle": idle_bytes, "peak": _rss(place)})


def _rss(place: Place) -> list[int]:
    """Peak memory of the service, then of its worker processes."""
    return [peak_rss_bytes(pid) for pid in (place.service_pid, *children(place.service_pid))]


def _result(
    alone: Phase, beside: Phase, answers: Mapping[str, Any], lag_counts: Mapping[str, int], rss: Mapping[str, list[int]]
) -> dict[str, Any]:
    p99 = [quantile(sorted(values), 990) for values in (alone.chats_us, beside.chats_us)]
    looks = lag_counts["+Inf"]
    return {
        "chat_p99_us": {"alone": p99[0], "beside": p99[1], "ratio": ratio(p99[1], p99[0])},
        "chat_p50_us": [quantile(sorted(values), 500) for values in (alone.chats_us, beside.chats_us)],
        "chats_failed": beside.chats_failed,
        "health_p99_us": [quantile(sorted(values), 990) for values in (alone.health_us, beside.health_us)],
        "lag_looks": looks,
        "lag_later_than": {bound: looks - count for bound, count in lag_counts.items() if bound != "+Inf"},
        "rss_bytes": rss,
        "answers": answers,
    }


def strange(answers: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Answers to the flood that the contract does not know; a connection that broke is none."""
    known = {"0", "200", *map(str, STATUS.values())}
    return [f"{kind}: {status}" for kind, found in answers.items() for status in found if status not in known]


def main(arguments: list[str]) -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description="Measure what hostile clients do.")
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--cap-mib", type=int, default=CAP_MIB, help="largest body that the service takes")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    tell("starting Envoy, an engine and the service")
    with place(options.cap_mib * 2**20) as running:
        result = uvloop.run(measure(running, 8 if options.quick else 30))
    print(json.dumps(result, indent=None if options.json else 2))
    unknown = strange(result["answers"])
    if unknown or result["chats_failed"]:
        sys.exit(f"answers outside the contract: {unknown}; chats that failed: {result['chats_failed']}")


if __name__ == "__main__":
    main(sys.argv[1:])
