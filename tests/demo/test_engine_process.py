"""Engines as child processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extproc.demo.engine_process import EngineProcess, EngineStartError, start_engines, stop_engines

WAIT_S_MAX = 10.0
ROOT = Path(__file__).resolve().parents[2]


def listens(port: int) -> bool:
    """Whether someone accepts connections on `port`."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_engines_start_together_and_stop() -> None:
    """Engines started together each answer on a port of their own, and none is left after the stop."""
    engines = [EngineProcess(f"chat-{number}") for number in range(3)]
    start_engines(engines)
    ports = [engine.port for engine in engines]
    logs = [engine.log_path for engine in engines]

    assert 3 == len({port for port in ports if listens(port)})
    stop_engines(engines)
    assert [False] * 3 == [listens(port) for port in ports]
    assert [False] * 3 == [engine.running for engine in engines]
    assert not any(log and log.exists() for log in logs)


def test_killed_engine_can_start_again() -> None:
    """A killed engine is gone at once, and starts again on the same port if it was given one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EngineProcess("chat-0", port) as engine:
        first = engine.pid
        engine.kill()
        assert not engine.running
        assert not listens(port)
        engine.start()
        assert (port, True, True) == (engine.port, listens(port), engine.pid != first)


def test_failed_start_shows_the_log() -> None:
    """An engine that cannot start raises with the end of its log and leaves no process."""
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        engine = EngineProcess("chat-0", occupant.getsockname()[1])
        with pytest.raises(EngineStartError, match=r"(?s)engine chat-0 did not start:.*address already in use"):
            engine.start()

    assert not engine.running


def test_one_failed_start_stops_the_others() -> None:
    """When one of several engines fails to start, none of them stays."""
    good = EngineProcess("good")
    with pytest.raises(EngineStartError, match="engine bad did not start"):
        start_engines([good, EngineProcess("bad", no_such_option=1)])

    assert not good.running


def test_engine_ends_with_its_parent() -> None:
    """An engine whose parent process dies without a goodbye ends too."""
    script = (
        "import os, sys; from extproc.demo.engine_process import EngineProcess; engine = EngineProcess('orphan');"
        "engine.start(); print(engine.port); sys.stdout.flush(); os._exit(1)"
    )
    parent = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False, timeout=30)
    port = int(parent.stdout)
    deadline_s = time.monotonic() + WAIT_S_MAX
    while listens(port):
        assert time.monotonic() < deadline_s, f"the engine on port {port} still runs"
