"""Logs: JSON lines on stdout, one line a decision. Prompt text never enters a log call.

Lines of decisions are gathered and written together, at the latest after `FLUSH_INTERVAL_S`; warnings and worse are
written at once, with what came before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from datetime import UTC, datetime
from typing import BinaryIO

import orjson
import structlog
import structlog.typing

FLUSH_INTERVAL_S = 0.1


class _Lines:
    """Writes lines for structlog, which asks for a method of each level.

    What cannot be written is dropped: a full disk or a reader that has gone must not cost anyone a verdict.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def gather(self, line: bytes) -> None:
        """Write a line before long."""
        try:
            self._stream.write(line + b"\n")
        except OSError:
            return

    def write(self, line: bytes) -> None:
        """Write a line now."""
        self.gather(line)
        self.flush()

    def flush(self) -> None:
        """Write what is gathered."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    debug = info = gather
    warning = error = critical = exception = write


def _line(logger: object, method: str, event: structlog.typing.EventDict) -> bytes:
    """The line of one event. One processor instead of one for each of its parts: it runs for every decision."""
    event["level"] = method
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    event.setdefault("timestamp", datetime.now(UTC))
    return orjson.dumps(event, default=repr, option=orjson.OPT_UTC_Z)


def configure(level: str = "info") -> None:
    """Set up structlog for the process; call once, before the first log call."""
    structlog.configure(
        processors=[_line],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Lines(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )


async def keep_flushed() -> None:
    """Write gathered lines in time, until cancelled."""
    lines = _Lines(sys.stdout.buffer)
    while True:
        await asyncio.sleep(FLUSH_INTERVAL_S)
        lines.flush()
