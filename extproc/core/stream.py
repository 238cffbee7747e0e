"""The sans-IO machine of one ext_proc stream: events in, one action out.

Rules:

1. Envoy sends the headers, then (for a request with a body) the whole body, then nothing until the HTTP stream ends;
   each message is answered exactly once.
2. A reservation is made on `Counted` and by nothing else. It is ended on `Ended` and by nothing else here, whatever
   happened between: the stream lives exactly as long as the HTTP response. Where the desk has ended it before, by
   expiry or by the access log, `Ended` changes nothing.
   The one exception is `Detached`: the transport broke, or this process stops, while the response may still run. The
   reservation then stays, as an orphan of the desk.
3. Until the admission is written (`Written`), nothing runs for the reservation, so its end is a release; after
   that the response ran, and its end is a settlement.
4. An event that the table does not list raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto, unique
from types import MappingProxyType
from typing import Any, ClassVar

from extproc.core.admission import Desk
from extproc.core.policy import Endpoint
from extproc.core.values import Admit, Bypass, Demand, Encoding, Ending, Fault, Reject, RequestHead


@unique
class State(StrEnum):
    """Where a stream stands."""

    HEAD = auto()  # nothing has come yet
    BODY = auto()  # the head passed, the body decides
    COUNTING = auto()  # the body is being counted; its bytes are in the intake
    ADMITTED = auto()  # tokens are reserved, the admission is not written yet
    RUNNING = auto()  # the admission is written, the response runs
    PASSED = auto()  # let through without tokens
    REFUSED = auto()  # answered here
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class HeadArrived:
    """Envoy's header message."""

    head: RequestHead


@dataclass(frozen=True, slots=True)
class BodyArrived:
    """Envoy's body message: the whole body, whatever its end_of_stream says (HTTP/2 trailers may follow)."""

    body: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Bounded:
    """The body is checked, not yet counted; its demand is between `least` and `most`."""

    least: Demand
    most: Demand


@dataclass(frozen=True, slots=True)
class Counted:
    """The body is counted; `body` is what the engine is to get, None when it stays as it is.

    `prompts_tokens` holds the input tokens of each prompt, for those who report them.
    """

    demand: Demand
    body: bytes | None
    prompts_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Faulted:
    """The body is at fault, or counting it failed."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Written:
    """The last action's reply is handed to the transport."""


@unique
class Part(Enum):
    """Parts of the HTTP exchange on which nothing depends; Envoy waits for an answer to each that it sends."""

    REQUEST_BODY = auto()  # of a request that passed by its head
    REQUEST_TRAILERS = auto()
    RESPONSE_HEADERS = auto()
    RESPONSE_BODY = auto()
    RESPONSE_TRAILERS = auto()


@dataclass(frozen=True, slots=True)
class PartArrived:
    """A part on which nothing depends; it passes."""

    part: Part


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream is over, for whatever reason."""


@dataclass(frozen=True, slots=True)
class Detached:
    """The stream is out of sight, which says nothing about the response."""


Event = HeadArrived | BodyArrived | Bounded | Counted | Faulted | Written | PartArrived | Ended | Detached


@dataclass(frozen=True, slots=True)
class Continue:
    """Reply: go on to the body."""


@dataclass(frozen=True, slots=True)
class Count:
    """To do: count this body, then come back with Bounded, Counted or Faulted."""

    endpoint: Endpoint
    body: bytes | memoryview
    lowered: bool
    encoding: Encoding | None = None


@dataclass(frozen=True, slots=True)
class Tokenize:
    """To do: go on with the count, then come back with Counted or Faulted."""


@dataclass(frozen=True, slots=True)
class Route:
    """Reply: route the admitted request to its replica, with `body` in place of the client's unless it is None.

    `decoded`: that body has no content-encoding any more.
    """

    admit: Admit
    body: bytes | None
    decoded: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """Reply: route the request to a pool without a reservation."""

    bypass: Bypass


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reply: answer the client here."""

    reject: Reject


@dataclass(frozen=True, slots=True)
class PassPart:
    """Reply: the part stays as it is."""

    part: Part


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to reply; `ended` names how the reservation of this stream ended, if it had one that was open."""

    ended: Ending | None = None


_CONTINUE = Continue()
_DONE = Done()

Action = Continue | Count | Tokenize | Route | Pass | Refuse | PassPart | Done

TRANSITIONS: Mapping[State, Mapping[type[Event], frozenset[State]]] = MappingProxyType(
    {
        State.HEAD: {
            HeadArrived: frozenset({State.BODY, State.PASSED, State.REFUSED}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.BODY: {
            Written: frozenset({State.BODY}),
            BodyArrived: frozenset({State.COUNTING, State.REFUSED}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.COUNTING: {
            Bounded: frozenset({State.COUNTING, State.REFUSED}),
            Counted: frozenset({State.ADMITTED, State.REFUSED}),
            Faulted: frozenset({State.REFUSED}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.ADMITTED: {
            Written: frozenset({State.RUNNING}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.RUNNING: {
            Written: frozenset({State.RUNNING}),
            PartArrived: frozenset({State.RUNNING}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.PASSED: {
            Written: frozenset({State.PASSED}),
            BodyArrived: frozenset({State.PASSED}),
            PartArrived: frozenset({State.PASSED}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.REFUSED: {
            Written: frozenset({State.REFUSED}),
            Ended: frozenset({State.ENDED}),
            Detached: frozenset({State.ENDED}),
        },
        State.ENDED: {},
    }
)


class StreamError(Exception):
    """An event came that the state does not allow; the stream is unchanged."""


class Stream:
    """One ext_proc stream. `receive` is synchronous: nothing happens between a check and its change."""

    def __init__(self, desk: Desk) -> None:
        self.state = State.HEAD
        self.head: RequestHead | None = None
        self.admit: Admit | None = None
        self._desk = desk
        self._endpoint: Endpoint | None = None
        self._intake_bytes = 0
        desk.streams += 1

    def receive(self, event: Event, now_ns: int) -> Action:
        """Take one event and say what to do; StreamError when the table does not allow it here."""
        allowed = TRANSITIONS[self.state].get(type(event))
        if allowed is None:
            raise StreamError(f"{type(event).__name__} is not allowed in {self.state.name}")
        action, self.state = self._STEPS[type(event)](self, event, now_ns)
        return action

    def _head(self, event: HeadArrived, _now_ns: int) -> tuple[Action, State]:
        self.head = event.head
        verdict = self._desk.screen(event.head)
        match verdict:
            case Reject():
                return Refuse(verdict), State.REFUSED
            case Bypass():
                return Pass(verdict), State.PASSED
            case endpoint:
                announced = self._desk.announce(event.head)
                if isinstance(announced, Reject):
                    return Refuse(announced), State.REFUSED
                self._endpoint, self._intake_bytes = endpoint, announced
                return _CONTINUE, State.BODY

    def _body(self, event: BodyArrived, _now_ns: int) -> tuple[Action, State]:
        if self.state is State.PASSED:
            return PassPart(Part.REQUEST_BODY), State.PASSED
        assert self.head is not None  # noqa: S101 (the table lets no body come before the head)
        assert self._endpoint is not None  # noqa: S101 (nor after a head that did not ask for it)
        self._leave_intake()
        refused = self._desk.enter(len(event.body))
        if refused is not None:
            return Refuse(refused), State.REFUSED
        self._intake_bytes = len(event.body)
        return Count(self._endpoint, event.body, self.head.lowered, self._encoding), State.COUNTING

    @property
    def _encoding(self) -> Encoding | None:
        encoding = "" if self.head is None else self.head.content_encoding
        return None if encoding in ("", "identity") else Encoding(encoding)

    def _bounded(self, event: Bounded, _now_ns: int) -> tuple[Action, State]:
        refused = self._desk.foresee(event.least, event.most)
        if refused is None:
            return Tokenize(), State.COUNTING
        self._leave_intake()
        return Refuse(refused), State.REFUSED

    def _counted(self, event: Counted, now_ns: int) -> tuple[Action, State]:
        self._leave_intake()
        verdict = self._desk.decide(event.demand, now_ns)
        if isinstance(verdict, Reject):
            return Refuse(verdict), State.REFUSED
        self.admit = verdict
        return Route(verdict, event.body, self._encoding is not None), State.ADMITTED

    def _faulted(self, event: Faulted, _now_ns: int) -> tuple[Action, State]:
        self._leave_intake()
        return Refuse(self._desk.fault(event.fault)), State.REFUSED

    def _written(self, _event: Written, _now_ns: int) -> tuple[Action, State]:
        return _DONE, State.RUNNING if self.state is State.ADMITTED else self.state

    def _part(self, event: PartArrived, _now_ns: int) -> tuple[Action, State]:
        return PassPart(event.part), self.state

    def _ended(self, _event: Ended | Detached, _now_ns: int) -> tuple[Action, State]:
        self._leave()
        if self.admit is None:
            return _DONE, State.ENDED
        ending = Ending.SETTLED if self.state is State.RUNNING else Ending.RELEASED
        reservation = self._desk.end(self.admit.reservation.ticket, ending)
        return Done(None if reservation is None else ending), State.ENDED

    def _detached(self, event: Detached, now_ns: int) -> tuple[Action, State]:
        if self.admit is None or self.state is not State.RUNNING:
            return self._ended(event, now_ns)
        self._leave()
        self._desk.abandon(self.admit.reservation.ticket)
        return _DONE, State.ENDED

    def _leave(self) -> None:
        self._leave_intake()
        self._desk.streams -= 1

    def _leave_intake(self) -> None:
        self._desk.leave(self._intake_bytes)
        self._intake_bytes = 0

    # What each event does where the table allows it.
    _STEPS: ClassVar[Mapping[type[Event], Callable[[Stream, Any, int], tuple[Action, State]]]] = MappingProxyType(
        {
            HeadArrived: _head,
            BodyArrived: _body,
            Bounded: _bounded,
            Counted: _counted,
            Faulted: _faulted,
            Written: _written,
            PartArrived: _part,
            Ended: _ended,
            Detached: _detached,
        }
    )
