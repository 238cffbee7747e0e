"""Logs: JSON lines on stdout, one line a decision. Prompt text never enters a log call."""

from __future__ import annotations

import sys

import orjson
import structlog


def configure(level: str = "info") -> None:
    """Set up structlog for the process; call once, before the first log call."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(serializer=orjson.dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
