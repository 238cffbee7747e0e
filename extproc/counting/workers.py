"""Worker processes for large bodies: nothing of theirs holds the event loop, whose interpreter the parser would lock.

Each worker loads the tokenizers of the policy for itself. It ends by itself when the service dies without a word, and
gives way to the event loop where cores are short. A worker that dies takes the bodies of its pool with it, which are
answered `tokenizer_unavailable`; the next body starts a new pool.
"""

from __future__ import annotations

import asyncio
import copyreg
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from extproc.core.policy import Endpoint
from extproc.core.stream import Counted
from extproc.core.values import Encoding

if TYPE_CHECKING:
    from extproc.counting.counter import Counter

NICENESS = 5

FILED_BYTES_MIN = 2**20
"""Larger bodies go to a worker as a file in memory: pickling 27 MB would hold the interpreter for 25 ms."""

_counter: Counter | None = None


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


# Policies hold read-only mappings, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))


class Workers:
    """A pool of `processes` workers, each of which counts with what `make` returns there; started by the first body."""

    def __init__(self, make: Callable[[], Counter], processes: int) -> None:
        self._make = make
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Start the workers now, in the background, so that no body waits for them."""
        for _ in range(self._processes):
            self._running().submit(os.getpid)

    async def count(
        self, endpoint: Endpoint, body: bytes | memoryview, lowered: bool, encoding: Encoding | None
    ) -> Counted:
        """The exact count of `body`; Fault as from the counter, BrokenProcessPool when a worker died."""
        file = None
        if len(body) >= FILED_BYTES_MIN:
            file = _MemoryFile()
            await asyncio.to_thread(file.write, body)
        pool = self._running()
        try:
            sent = bytes(body) if file is None else file.path
            work = functools.partial(_count, endpoint, sent, lowered, encoding)
            return await asyncio.wrap_future(_submit(pool, work, file))
        except BrokenProcessPool:
            if self._pool is pool:
                self._pool = None
            raise

    def close(self) -> None:
        """Stop the workers; bodies that wait for one are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _running(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned: a fork would copy gRPC's threads and locks in the state they happen to be in.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, initializer=_begin, initargs=(self._make,))
        return self._pool


def _submit(pool: ProcessPoolExecutor, work: Callable[[], Counted], file: _MemoryFile | None) -> Future[Counted]:
    """Let a worker do `work`, which reads `file`.

    The future stays out of the coroutine that waits for it: a fault holds the frames that it came through, and the
    future holds the fault.
    """
    counting = pool.submit(work)
    # A worker may still be about to open the file when nobody waits for the count any more.
    counting.add_done_callback(functools.partial(_keep, file))
    return counting


def _keep(_file: _MemoryFile | None, _counting: Future[Counted]) -> None:
    """Nothing: being its callback holds the file until the count is done."""


def _begin(make: Callable[[], Counter]) -> None:
    global _counter  # noqa: PLW0603 (what a worker process has instead of an object to hold it)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the service ends its workers
    os.nice(NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _counter = make()
    _counter.warm()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _MemoryFile:
    """A file without a name, open as long as anyone refers to this: a thread that still writes, a count under way."""

    def __init__(self) -> None:
        self._file = os.memfd_create("body")

    def __del__(self) -> None:
        os.close(self._file)

    @property
    def path(self) -> Path:
        """Where a child of this process finds it (Linux)."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def write(self, content: bytes | memoryview) -> None:
        """Write all of `content`."""
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._file, rest) :]


def _count(endpoint: Endpoint, body: bytes | Path, lowered: bool, encoding: Encoding | None) -> Counted:
    assert _counter is not None  # noqa: S101 (the initializer ran)
    if isinstance(body, Path):
        body = body.read_bytes()
    return _counter.count_now(_counter.read(endpoint, body, lowered, encoding))
