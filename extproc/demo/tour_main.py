"""The demo from start to end: bring everything up, play the tour, stay or leave, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import aiohttp

from extproc.demo.engine_process import EngineStartError
from extproc.demo.envoy_process import EnvoyError
from extproc.demo.stack import Stack, StackError
from extproc.demo.tour import Outcome, as_json, run
from extproc.demo.tour_stage import Stage, write_requests
from extproc.demo.tour_steps import REQUESTS, STEPS, Step

ONCE_S_MAX = 40.0
"""The whole of `--once`; it takes about 15 s."""

START_ERRORS = (StackError, EngineStartError, EnvoyError)
"""What `main` raises when something does not start; the text is for the user."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

CLIENT_TIMEOUT = aiohttp.ClientTimeout(total=30)


class Show(Protocol):
    """What the tour tells its visitor."""

    def starting(self) -> None:
        """Before anything runs."""

    def started(self, stack: Stack, seconds: float) -> None:
        """Everything runs."""

    def step(self, outcome: Outcome) -> None:
        """A step was played."""

    def summary(self, steps: int, failed: int, seconds: float) -> None:
        """All were."""

    def invitation(self, stack: Stack) -> None:
        """Everything stays up."""

    def ending(self) -> None:
        """All children are about to end."""


class JsonLines:
    """One JSON object a step on standard output, and one for the summary."""

    def starting(self) -> None:
        """Say nothing."""

    def started(self, stack: Stack, seconds: float) -> None:
        """Say nothing."""

    def step(self, outcome: Outcome) -> None:
        """One object."""
        self._write(as_json(outcome))

    def summary(self, steps: int, failed: int, seconds: float) -> None:
        """The last object."""
        self._write({"steps": steps, "failed": failed, "seconds": round(seconds, 3)})

    def invitation(self, stack: Stack) -> None:
        """Say nothing."""

    def ending(self) -> None:
        """Say nothing."""

    def _write(self, document: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()


def main(show: Show, *, once: bool) -> int:
    """Run the demo; the exit code: 0, 1 when a step differs from its documentation, 128 + signal when interrupted.

    Raises one of START_ERRORS.
    """
    return asyncio.run(_interruptible(show, once=once))


async def _interruptible(show: Show, *, once: bool) -> int:
    """The first signal cancels the demo, later ones are ignored: ending all children is bounded in time."""
    received: list[int] = []
    demo = asyncio.create_task(_demo(show, once=once))

    def interrupt(number: int) -> None:
        if not received:
            demo.cancel()
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await demo
    except asyncio.CancelledError:
        return 128 + received[0]
    except Exception:
        # Ctrl-C in a terminal reaches the children as well, so they may have failed first.
        if received:
            return 128 + received[0]
        raise


async def _demo(show: Show, *, once: bool) -> int:
    begun_s = time.monotonic()
    show.starting()
    async with Stack() as stack, aiohttp.ClientSession(timeout=CLIENT_TIMEOUT) as client:
        write_requests(stack.directory, REQUESTS)
        show.started(stack, time.monotonic() - begun_s)
        code = await tour(STEPS, Stage(stack, client), show, begun_s, ONCE_S_MAX if once else None)
        if not once:
            show.invitation(stack)
            await _until_interrupted(show)
    return code


async def tour(steps: Sequence[Step], stage: Stage, show: Show, begun_s: float, seconds_max: float | None) -> int:
    """Play and show `steps` within `seconds_max` from `begun_s`; 0 when all came out as documented, else 1."""
    failed = 0
    async for outcome in run(steps, stage, None if seconds_max is None else begun_s + seconds_max):
        failed += bool(outcome.problems)
        show.step(outcome)
    show.summary(len(steps), failed, time.monotonic() - begun_s)
    return 1 if failed else 0


async def _until_interrupted(show: Show) -> None:
    """Ctrl-C is how this is meant to end."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        show.ending()
