"""The admin port: metrics, health over HTTP and the ledger as an operator reads it.

On loopback unless told otherwise: the ledger page shows what runs where.
"""

from __future__ import annotations

import time

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from extproc.core.admission import Desk
from extproc.core.drain import NS_PER_S
from extproc.service.health import Health
from extproc.service.metrics import Metrics

RESERVATIONS_SHOWN_MAX = 1000
"""Open reservations on one ledger page; the oldest come first, and they are the ones asked about."""


class Admin:
    """HTTP server of the admin port."""

    def __init__(self, desk: Desk, metrics: Metrics, health: Health) -> None:
        self._desk = desk
        self._metrics = metrics
        self._health = health

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system picks when `port` is 0."""
        app = web.Application()
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", self._get_healthz)
        app.router.add_get("/readyz", self._get_readyz)
        app.router.add_get("/debug/ledger", self._get_ledger)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _get_healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_readyz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ready\n") if self._health.ready else web.Response(status=503, text="not ready\n")

    async def _get_ledger(self, _request: web.Request) -> web.Response:
        page = ledger_page(self._desk, time.monotonic_ns())
        return web.Response(body=orjson.dumps(page, option=orjson.OPT_INDENT_2), content_type="application/json")


def ledger_page(desk: Desk, now_ns: int) -> dict[str, object]:
    """The ledger as JSON: replicas with their counters, then the oldest open reservations."""
    open_reservations = list(desk.ledger.open.values())
    return {
        "policy": desk.policy.version,
        "summary": repr(desk.ledger),
        "draining": desk.draining,
        "streams": desk.streams,
        "intake_bytes": desk.intake_bytes,
        "replicas": {
            name: {
                "pool": account.replica.pool,
                "address": account.replica.address,
                "ready": account.ready,
                "gross_tokens": account.replica.gross_tokens,
                "guard_tokens": account.replica.guard_tokens,
                "reserved_tokens": account.active_tokens,
                "available_tokens": account.available_tokens,
                "waiting_tokens": {lane.value: tokens for lane, tokens in account.waiting_tokens.items()},
                "active_requests": account.active_requests,
                "requests_max": account.replica.requests_max,
            }
            for name, account in desk.ledger.accounts.items()
        },
        "reservations_open": len(open_reservations),
        "reservations": [
            {
                "ticket": reservation.ticket,
                "replica": reservation.replica,
                "lane": reservation.lane,
                "reserved_tokens": reservation.reserve_tokens,
                "age_s": round((now_ns - reservation.admitted_ns) / NS_PER_S, 3),
            }
            for reservation in open_reservations[:RESERVATIONS_SHOWN_MAX]
        ],
    }
