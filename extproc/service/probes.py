"""Active probes: one GET a replica and interval decides whether the replica is ready.

A replica starts as not ready and becomes ready with its first success, so nothing is admitted to an engine that was
never seen. What runs on a replica that stops answering stays reserved until its streams end.
"""

from __future__ import annotations

import asyncio

import aiohttp
import structlog

from extproc.core.admission import Desk
from extproc.core.drain import NS_PER_S
from extproc.core.policy import Probe, Replica

_log = structlog.get_logger()


class Prober:
    """Keeps the readiness of every replica of a desk up to date until it is closed."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._first = asyncio.Event()
        self._unprobed = {replica.name for replica in desk.policy.replicas()}

    async def start(self) -> None:
        """Start probing; returns when every replica was probed once."""
        session = self._session = aiohttp.ClientSession(headers={"user-agent": "tokenlane-probe"})
        for pool in self._desk.policy.pools.values():
            for replica in pool.replicas:
                self._tasks.append(asyncio.create_task(self._watch(session, replica, pool.probe)))
        await self._first.wait()

    async def close(self) -> None:
        """Stop probing; readiness stays as it was last seen."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _watch(self, session: aiohttp.ClientSession, replica: Replica, probe: Probe) -> None:
        failures = probe.failures_max
        while True:
            failures = 0 if await _alive(session, replica, probe) else failures + 1
            self._set_ready(replica, ready=failures < probe.failures_max)
            self._unprobed.discard(replica.name)
            if not self._unprobed:
                self._first.set()
            await asyncio.sleep(probe.interval_ns / NS_PER_S)

    def _set_ready(self, replica: Replica, *, ready: bool) -> None:
        if self._desk.ledger.accounts[replica.name].ready is not ready:
            self._desk.set_ready(replica.name, ready=ready)
            if ready:
                _log.info("replica_ready", replica=replica.name, pool=replica.pool)
            else:
                _log.warning("replica_not_ready", replica=replica.name, pool=replica.pool)


async def _alive(session: aiohttp.ClientSession, replica: Replica, probe: Probe) -> bool:
    timeout = aiohttp.ClientTimeout(total=probe.timeout_ns / NS_PER_S)
    try:
        async with session.get(f"http://{replica.address}{probe.path}", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
