"""Tokenlane itself as a child process, so that the demo can kill it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STOP_S_MAX = 5.0
"""Longer than the drain grace it is started with; then it is killed."""

DRAIN_GRACE_S = 1
"""The demo stops the clients first, so there is nothing to wait for."""

LOG_TAIL_BYTES = 4000


class ServiceProcess:
    """`tokenlane serve POLICY`; `listen` is `unix:/path` or `IP:port`, `admin` is `IP:port`.

    The log is appended to `log_path`, over restarts too.
    """

    def __init__(self, policy: Path, listen: str, admin: str, log_path: Path) -> None:
        self._command = [
            *(sys.executable, "-m", "extproc", "serve", str(policy), f"--listen={listen}", f"--admin={admin}"),
            f"--drain-grace-s={DRAIN_GRACE_S}",
        ]
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """The process has been launched and has not ended."""
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Start it without waiting for it; /readyz at the admin address says when it is ready."""
        if self.running:
            raise RuntimeError("tokenlane runs already")
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it in order, by force when that takes too long; harmless when it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def log_tail(self) -> str:
        """The end of what it printed."""
        return self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self._log_path.exists() else ""


def _python_path() -> str:
    """Where this very package is, installed or not, before whatever else the caller searches."""
    return os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
