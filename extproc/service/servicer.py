"""The stream loop: reads Envoy's messages, drives the sans-IO stream, writes its replies.

A clean return means "continue without me" to Envoy, so nothing here returns before its answer is written, except
where Envoy itself ended the stream. A fault of ours is answered 500 `internal_error`; what escapes even that leaves
the request without a lane header, and the route table answers it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import grpc.aio
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.core import rejection
from extproc.core.admission import Desk
from extproc.core.drain import PPM, retry_after
from extproc.core.stream import (
    Action,
    Bounded,
    Continue,
    Count,
    Detached,
    Done,
    Ended,
    Event,
    Faulted,
    Part,
    Pass,
    PassPart,
    Refuse,
    Route,
    State,
    Stream,
    Tokenize,
    Written,
)
from extproc.core.values import Admit, Fault, Reason, Reject
from extproc.counting import Counter
from extproc.counting.usage import UsageReader
from extproc.service import wire
from extproc.service.book import Book
from extproc.service.drift import Drift
from extproc.service.metrics import Metrics
from extproc.service.verdicts import Verdicts

_WRITTEN = Written()
_ENDED = Ended()
_DETACHED = Detached()
_INTERNAL_ERROR = Reject(Reason.INTERNAL_ERROR, "the gateway failed to decide; nothing was reserved")

_Result = TypeVar("_Result")

_log = structlog.get_logger()


class _Reply(NamedTuple):
    """A message to Envoy, and whether it is the stream's last."""

    message: bytes
    final: bool = False


_RESPONSE_PASSES = PassPart(Part.RESPONSE_BODY)

_CONTINUE = _Reply(wire.CONTINUE)
_CONTINUE_SAMPLED = _Reply(wire.CONTINUE_SAMPLED)


class _Gone(Exception):  # noqa: N818 (the end of a stream, not an error)
    """Envoy ended the stream before its verdict: the client has left."""


class _Messages:
    """Envoy's messages of one stream, in order, also watched while the service works."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._ahead: asyncio.Future[Any] | None = None

    def next(self) -> Awaitable[Any]:
        """The next message, or EOF."""
        ahead, self._ahead = self._ahead, None
        return self._context.read() if ahead is None else ahead

    async def during(self, work: Awaitable[_Result]) -> _Result:
        """The result of `work`; `_Gone` as soon as the stream ends before it."""
        working = asyncio.ensure_future(work)
        reading = self._ahead = self._ahead or asyncio.ensure_future(self._context.read())
        try:
            await asyncio.wait((working, reading), return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and reading.result() is grpc.aio.EOF:
                raise _Gone
            return await working
        finally:
            working.cancel()

    def close(self) -> None:
        """Give up what was read ahead."""
        if self._ahead is not None:
            self._ahead.cancel()


class Servicer:
    """Serves ext_proc streams over one desk and one counter.

    `detaching` says whether a stream that breaks off leaves its reservation as an orphan.
    """

    def __init__(
        self, desk: Desk, counter: Counter, metrics: Metrics, book: Book, detaching: Callable[[], bool]
    ) -> None:
        self._desk = desk
        self._book = book
        self._counter = counter
        self._metrics = metrics
        self.verdicts = Verdicts(metrics)
        self._drift = Drift(desk.policy.drift_sample_ppm, metrics)
        self._detaching = detaching
        self._attempts = desk.policy.limits.upstream_retries_max + 1
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no stream is open; False when that takes longer than `timeout_s`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def process(self, _requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One stream, from Envoy's first message to the end of the HTTP response."""
        stream = Stream(self._desk)
        self._idle.clear()
        over: Event = _ENDED
        messages = _Messages(context)
        try:
            await self._serve(stream, messages, context)
            if stream.state is State.RUNNING and self._detaching():
                # gRPC reports a lost connection as if the peer had half-closed. Only a write tells them apart, and
                # Envoy, which then waits for nothing but the end of the stream, ignores what it says.
                await context.write(b"")
        except BaseException:
            # A stream that breaks off says nothing of the response, so with an access log to tell its end, the
            # reservation waits for that.
            if self._detaching():
                over = _DETACHED
            raise
        finally:
            messages.close()
            # Synchronous, so a cancellation cannot come between the end of the stream and the end of its reservation.
            self._close(stream, over)

    def _close(self, stream: Stream, over: Event) -> None:
        done = stream.receive(over, time.monotonic_ns())
        if stream.admit is not None and isinstance(done, Done) and done.ended is not None:
            self._book.ended(stream.admit.reservation.ticket, done.ended)
        if self._desk.streams == 0:
            self._idle.set()

    async def _serve(self, stream: Stream, messages: _Messages, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        sample: UsageReader | None = None
        while (message := await messages.next()) is not grpc.aio.EOF:
            started_ns = time.monotonic_ns()
            try:
                action = stream.receive(wire.event(message), started_ns)
                if isinstance(action, Count):
                    action = await self._count(stream, messages, action)
                reply = self._answer(stream, action, started_ns)
                if reply is _CONTINUE and (sample := self._drift.sample()) is not None:
                    reply = _CONTINUE_SAMPLED
                elif sample is not None and action == _RESPONSE_PASSES:
                    self._read_response(stream, sample, message.response_body)
            except _Gone:
                return
            except Exception:
                self._metrics.fault()
                _log.exception("fault", request_id=_request_id(stream))
                if stream.state in (State.RUNNING, State.PASSED):
                    raise  # an answer of ours would replace the engine's
                reply = self._refuse(stream, _INTERNAL_ERROR, started_ns)
            await context.write(reply.message)
            if reply.final:
                return
            stream.receive(_WRITTEN, time.monotonic_ns())

    def _read_response(self, stream: Stream, sample: UsageReader, part: pb.HttpBody) -> None:
        sample.feed(part.body)
        if part.end_of_stream and stream.admit is not None:
            self._drift.compare(stream.admit, sample, _request_id(stream))

    def _answer(self, stream: Stream, action: Action, started_ns: int) -> _Reply:
        """The reply that `action` asks for."""
        match action:
            case Continue():
                return _CONTINUE
            case Route(admit, body, decoded):
                return self._admit(stream, admit, body, started_ns, decoded=decoded)
            case Refuse(reject):
                return self._refuse(stream, reject, started_ns)
            case Pass(bypass):
                self._metrics.passed()
                return _Reply(wire.passed(bypass, policy_version=self._desk.policy.version))
            case PassPart(part):
                return _Reply(wire.PASS[part])
            case Count() | Tokenize() | Done():
                raise AssertionError(f"{action} is no reply")

    async def _count(self, stream: Stream, messages: _Messages, action: Count) -> Action:
        """Count the body, unless its size alone leads to a refusal."""
        event: Event
        try:
            counter, request = self._counter, (action.endpoint, action.body, action.lowered, action.encoding)
            if counter.reads_quickly(action.body, action.encoding):
                draft = counter.read(*request)
            elif counter.has_workers:
                return stream.receive(await messages.during(counter.count_apart(*request)), time.monotonic_ns())
            else:
                draft = await messages.during(counter.read_large(*request))
            bounds = draft.bounds()
            if bounds is not None:
                foreseen = stream.receive(Bounded(*bounds), time.monotonic_ns())
                if isinstance(foreseen, Refuse):
                    return foreseen
            event = (
                counter.count_now(draft)
                if counter.counts_quickly(draft)
                else await messages.during(counter.count(draft))
            )
        except Fault as fault:
            if fault.reason is Reason.TOKENIZER_UNAVAILABLE:
                self._metrics.fault()
                _log.error("tokenizer_failed", error=repr(fault.__cause__))
            event = Faulted(fault)
        return stream.receive(event, time.monotonic_ns())

    def _admit(self, stream: Stream, admit: Admit, body: bytes | None, started_ns: int, *, decoded: bool) -> _Reply:
        self._book.made(admit)
        message = wire.admitted(
            admit,
            body,
            attempts=self._attempts,
            policy_version=self._desk.policy.version,
            busy_retry_s=retry_after(admit.busy_retry_ns, _jitter_ppm()).header_s,
            decoded=decoded,
        )
        self.verdicts.note(admit, _request_id(stream), time.monotonic_ns() - started_ns)
        return _Reply(message)

    def _refuse(self, stream: Stream, reject: Reject, started_ns: int) -> _Reply:
        answer = rejection.answer(
            reject,
            policy_version=self._desk.policy.version,
            request_id=_request_id(stream),
            jitter_ppm=_jitter_ppm(),
        )
        message = wire.refused(answer, reject.reason)
        self.verdicts.note(reject, _request_id(stream), time.monotonic_ns() - started_ns)
        return _Reply(message, final=True)


def _jitter_ppm() -> int:
    return int(random.random() * PPM)  # noqa: S311 (spreads retries, guards nothing)


def _request_id(stream: Stream) -> str:
    return "" if stream.head is None else stream.head.request_id
