"""Assembly and lifecycle of the service.

Start: tokenizers load, every replica is probed once, the gRPC server listens, and only then is it ready.
Drain: not ready, but still accepting for `drain_delay_s`, because endpoints lag behind health; then new requests are
refused with `draining` while what runs goes on; at the latest after `drain_grace_s` the server stops. Envoy lets
responses finish without it (failure_mode_allow), so stopping truncates nothing, and what still runs stays in the
journal for the next process.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import structlog
from envoy.service.accesslog.v3 import als_pb2 as als
from grpc_health.v1 import health_pb2_grpc

from extproc.core.admission import Desk
from extproc.core.policy import Policy
from extproc.core.values import Ending
from extproc.counting import Counter
from extproc.counting.encoding import available_encodings
from extproc.service import access_log, wire
from extproc.service.access_log import AccessLog
from extproc.service.admin import Admin
from extproc.service.book import Book
from extproc.service.health import Health
from extproc.service.journal import Journal
from extproc.service.metrics import Metrics
from extproc.service.probes import Prober
from extproc.service.servicer import Servicer

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

KEEPALIVE_PING_INTERVAL_MS_MIN = 1000
"""Shortest interval of Envoy's pings that is tolerated. gRPC's default of 5 minutes answers Envoy's pings with
GOAWAY, which kills every held stream."""

EXPIRY_INTERVAL_S = 1.0

LAG_INTERVAL_S = 0.1
"""Pause between two looks at the event loop's lag: ten a second cost less than half a percent of a core."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Options:
    """How this process is deployed. Addresses are `IP:port` (port 0: the system picks) or `unix:/path`."""

    listen: tuple[str, ...] = ("127.0.0.1:9002",)
    admin_host: str = "127.0.0.1"
    admin_port: int = 9003
    drain_delay_s: float = 0.0
    drain_grace_s: float = 30.0
    tokenizer_threads: int = 2
    tokenizer_processes: int = 0
    journal: Path | None = None


class Server:
    """The whole service in one event loop."""

    def __init__(self, policy: Policy, options: Options) -> None:
        # Tickets of two processes never meet in a log or an access log.
        self.desk = Desk(policy, instance=secrets.token_hex(4), encodings=available_encodings())
        self.metrics = Metrics(self.desk)
        self.health = Health()
        self.ports: list[int] = []
        self.admin_port = 0
        self._policy = policy
        self._options = options
        self._prober = Prober(self.desk)
        self._stopping = False
        self._admin = Admin(self.desk, self.metrics, self.health)

    async def start(self) -> None:
        """Load, probe, listen, then be ready. What was begun is given up when that fails."""
        try:
            await self._start()
        except BaseException:
            await self._prober.close()
            raise

    async def _start(self) -> None:
        """Load, adopt, probe, listen, then be ready. Raises TokenizerError, JournalError or OSError."""
        options = self._options
        self._journal = None if options.journal is None else Journal(options.journal, self.metrics.journal_error)
        self._book = Book(self.metrics, self._journal)
        self._access_log = AccessLog(self.desk, self._book, self.metrics)
        self._counter = await asyncio.to_thread(
            Counter, self._policy, threads=options.tokenizer_threads, processes=options.tokenizer_processes
        )
        self._counter.start_workers()
        self._counter.warm()
        self.metrics.watch_tokenizers(self._counter)
        for model, backend in self._counter.backends().items():
            _log.info(
                "tokenizer",
                model=model,
                backend=backend.name,
                doubt=backend.doubt,
                segments_doubt=backend.segments_doubt,
            )
        self._adopt()
        await self._prober.start()
        self.admin_port = await self._admin.start(options.admin_host, options.admin_port)
        # What start made stays for good: without this, a full collection would look through it for 50 ms.
        gc.collect()
        gc.freeze()
        self._grpc = self._build()
        self.ports = [self._grpc.add_insecure_port(address) for address in options.listen]
        await self.health.start()
        await self._grpc.start()
        self._chores = [
            asyncio.create_task(chore)
            for chore in (self._expire(), self._watch_lag(), self._servicer.verdicts.keep_told())
        ]
        await self.health.set_ready(ready=True)
        _log.info("ready", policy=self._policy.version, listen=options.listen, admin_port=self.admin_port)

    def _adopt(self) -> None:
        """Take over what the last process left running."""
        if self._journal is None:
            _log.warning("no_journal", consequence="a crash forgets what runs, and its tokens are handed out again")
            return
        adopted = self.desk.adopt(self._journal.read(time.monotonic_ns()))
        _log.info("adopted", reservations=len(adopted), tokens=sum(r.reserve_tokens for r in adopted))

    def _detaching(self) -> bool:
        """A broken stream leaves an orphan when this process stops, or when the access log will tell its end."""
        return self._stopping or self._access_log.reached

    def _build(self) -> grpc.aio.Server:
        self._servicer = Servicer(self.desk, self._counter, self.metrics, self._book, self._detaching)
        message_bytes_max = self._policy.limits.message_bytes_max
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", message_bytes_max),
                ("grpc.max_send_message_length", message_bytes_max),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_PING_INTERVAL_MS_MIN),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.so_reuseport", 0),
            ]
        )
        process: grpc.RpcMethodHandler[wire.Message, bytes] = grpc.stream_stream_rpc_method_handler(
            self._servicer.process, request_deserializer=wire.message
        )
        log: grpc.RpcMethodHandler[als.StreamAccessLogsMessage, als.StreamAccessLogsResponse] = (
            grpc.stream_unary_rpc_method_handler(
                self._access_log.stream,
                request_deserializer=als.StreamAccessLogsMessage.FromString,
                response_serializer=als.StreamAccessLogsResponse.SerializeToString,
            )
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
                grpc.method_handlers_generic_handler(access_log.SERVICE, {"StreamAccessLogs": log}),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        return server

    async def drain(self) -> None:
        """Let what runs finish within the grace, take nothing new, then stop."""
        await self.health.set_ready(ready=False)
        _log.info("drain", streams=self.desk.streams, delay_s=self._options.drain_delay_s)
        await asyncio.sleep(self._options.drain_delay_s)
        self.desk.draining = True
        await self._servicer.wait_idle(self._options.drain_grace_s)
        await self.stop()

    async def stop(self) -> None:
        """Stop now; open streams end, and Envoy lets their responses finish."""
        await self.health.set_ready(ready=False)
        self._stopping = True
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._grpc.stop(grace=0)
        self._servicer.verdicts.tell()
        await self._prober.close()
        await self._admin.close()
        self._counter.close()
        if self._journal is not None:
            self._journal.close()
        _log.info("stopped", reservations_open=len(self.desk.ledger.open))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            if self._journal is not None:
                self._journal.compact(self.desk.ledger.open.values())
            for reservation in self.desk.expire(time.monotonic_ns()):
                self._book.ended(reservation.ticket, Ending.EXPIRED)
                _log.warning("expired", ticket=reservation.ticket, replica=reservation.replica)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.metrics.lagged(max(0.0, loop.time() - due_s))
