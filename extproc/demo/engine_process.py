"""Simulated engines as child processes: start, wait until they answer, pull levers, end.

with EngineProcess("chat-0", decode_tokens_per_s=50) as engine:
    send_requests_to(engine.address)
    assert engine.state()["running"] == 0
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_S_MAX = 30.0
"""An engine is up within a second, or three with a tokenizer; a loaded machine that starts a fleet gets more."""

STOP_S_MAX = 5.0
POLL_S = 0.01
LOG_TAIL_BYTES = 4000

Option = int | str | bool | Path | Sequence[str]


class EngineStartError(RuntimeError):
    """The engine did not come up; the message ends with its log."""


class EngineProcess:
    """One engine process. `options` are those of `python -m extproc.demo.engine`, with underscores.

    Port 0 lets the engine pick one; `port` and `address` hold it once it has started. The process ends when this
    one does, however that happens. Nothing here awaits: call it before or outside of an event loop, or in a thread.
    """

    def __init__(self, name: str, port: int = 0, **options: Option) -> None:
        self.name = name
        self.port = port
        self.log_path: Path | None = None
        self._port_asked = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<EngineProcess {self.name} {self.address} {'up' if self.running else 'down'}>"

    @property
    def address(self) -> str:
        """`IP:port` of the engine's HTTP server."""
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """The process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id; RuntimeError if it was never started."""
        return self._popen().pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers; EngineStartError if it does not."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self.running:
            raise RuntimeError(f"engine {self.name} runs already")
        with tempfile.NamedTemporaryFile(prefix=f"engine-{self.name}-", suffix=".log", delete=False) as log:
            self.log_path = Path(log.name)
            self._process = subprocess.Popen(  # noqa: S603 (our own module, arguments from the caller)
                self._command(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )

    def wait_ready(self) -> None:
        """Wait until GET /health answers 200; EngineStartError after START_S_MAX or when the process ends."""
        deadline_s = time.monotonic() + START_S_MAX
        while not self._healthy():
            if not self.running or time.monotonic() > deadline_s:
                tail = self.log_tail()
                self.kill()
                raise EngineStartError(f"engine {self.name} did not start:\n{tail}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End it in order (SIGTERM), by force when it takes too long. Its log is removed."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._collect()

    def kill(self) -> None:
        """End it at once, as a crash would. Its log is removed."""
        if self._process is not None:
            self._process.kill()
            self._collect()

    def state(self) -> dict[str, int | bool | None]:
        """GET /control."""
        return self._call("GET", "/control", None)

    def control(self, **levers: int | bool | None) -> dict[str, int | bool | None]:
        """POST /control with `hold`, `health` or `status`; the state after it."""
        return self._call("POST", "/control", levers)

    def log_tail(self) -> str:
        """The end of what the process printed; empty after it was stopped."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "extproc.demo.engine", "--until-eof"]
        command += [f"--listen=127.0.0.1:{self._port_asked}", f"--name={self.name}"]
        for key, value in self._options.items():
            flag = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                command += [flag] if value else []
            elif isinstance(value, int | str | Path):
                command.append(f"{flag}={value}")
            else:
                command += [f"{flag}={item}" for item in value]
        return command

    def _healthy(self) -> bool:
        # The log, because some other process may answer on the port that this one fails to get.
        port, whole_line, _ = self.log_tail().rpartition("listening on 127.0.0.1:")[2].partition("\n")
        if not (whole_line and port.isdigit()):
            return False
        self.port = int(port)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                return answer.status == 200
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False

    def _call(self, method: str, path: str, document: Mapping[str, object] | None) -> dict[str, int | bool | None]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, path, None if document is None else json.dumps(document))
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise ValueError(f"engine {self.name} answered {answer.status}: {body.decode(errors='replace')}")
            state: dict[str, int | bool | None] = json.loads(body)
            return state
        finally:
            connection.close()

    def _popen(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"engine {self.name} was not started")
        return self._process

    def _collect(self) -> None:
        process = self._popen()
        process.wait(STOP_S_MAX)
        if process.stdin is not None:
            process.stdin.close()
        if self.log_path is not None:
            self.log_path.unlink(missing_ok=True)
        self._process = None


def _python_path() -> str:
    """Where this very package is, installed or not, before whatever else the caller searches."""
    return os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))


def start_engines(engines: Iterable[EngineProcess]) -> None:
    """Start all at the same time; if one does not come up, none stays and EngineStartError says which."""
    engines = list(engines)
    try:
        for engine in engines:
            engine.launch()
        for engine in engines:
            engine.wait_ready()
    except BaseException:
        stop_engines(engines)
        raise


def stop_engines(engines: Iterable[EngineProcess]) -> None:
    """Stop all of them."""
    for engine in engines:
        engine.stop()
