"""The sans-IO stream: the table is total, illegal steps change nothing, and every reservation ends once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.admission import Desk
from extproc.core.policy import Endpoint
from extproc.core.stream import (
    TRANSITIONS,
    Action,
    BodyArrived,
    Bounded,
    Continue,
    Count,
    Counted,
    Done,
    Ended,
    Event,
    Faulted,
    HeadArrived,
    Part,
    PartArrived,
    Pass,
    PassPart,
    Refuse,
    Route,
    State,
    Stream,
    StreamError,
    Tokenize,
    Written,
)
from extproc.core.values import Bypass, Demand, Ending, Fault, Lane, Reason, RequestHead
from tests.policies import policy

BODY = b'{"prompt": 1}'
HEAD = HeadArrived(RequestHead("POST", "/v1/completions", end_of_stream=False, content_type="application/json"))
MODELS = HeadArrived(RequestHead("GET", "/v1/models", end_of_stream=True))
TOKENIZE = HeadArrived(RequestHead("POST", "/tokenize", end_of_stream=False))
UNKNOWN = HeadArrived(RequestHead("GET", "/", end_of_stream=True))
BOUNDED = Bounded(Demand("m", 10, 20, 20, 1), Demand("m", 900, 20, 20, 1))
COUNTED = Counted(Demand("m", 100, 20, 20, 1), body=b"{}")
TOO_MUCH = Counted(Demand("m", 60_001, 20, 20, 1), body=None)
FAULTED = Faulted(Fault(Reason.MALFORMED_REQUEST, "no"))
TRAILERS = PartArrived(Part.RESPONSE_TRAILERS)
EVENTS: tuple[Event, ...] = (
    HEAD,
    MODELS,
    UNKNOWN,
    BodyArrived(BODY),
    BodyArrived(b"x" * 200),
    BOUNDED,
    COUNTED,
    TOO_MUCH,
    FAULTED,
    Written(),
    TRAILERS,
    Ended(),
)


def _desk() -> Desk:
    desk = Desk(
        policy(
            limits={"body_bytes_max": 150},
            bypass=[
                {"path": "/v1/models", "pool": "chat"},
                {"method": "POST", "path": "/tokenize", "pool": "chat"},
            ],
        ),
        "i",
    )
    for name in desk.ledger.accounts:
        desk.set_ready(name, ready=True)
    return desk


def _drive(desk: Desk, *events: Event) -> tuple[Stream, Action]:
    stream = Stream(desk)
    action: Action = Done()
    for event in events:
        action = stream.receive(event, 0)
    return stream, action


ADMITTED = (HEAD, Written(), BodyArrived(BODY), COUNTED)


def test_admitted_request() -> None:
    """Headers, body, count, admission, trailers, end: each is answered once, and the end settles."""
    desk = _desk()
    stream = Stream(desk)
    assert Continue() == stream.receive(HEAD, 0)
    stream.receive(Written(), 0)
    assert Count(Endpoint.COMPLETIONS, BODY, lowered=False) == stream.receive(BodyArrived(BODY), 0)
    assert len(BODY) == desk.intake_bytes
    route = stream.receive(COUNTED, 5)
    assert isinstance(route, Route)
    assert (b"{}", 120, 5) == (
        route.body,
        route.admit.reservation.reserve_tokens,
        route.admit.reservation.admitted_ns,
    )
    assert (0, 120) == (desk.intake_bytes, desk.ledger.accounts["chat-0"].active_tokens)
    stream.receive(Written(), 0)
    assert PassPart(Part.RESPONSE_TRAILERS) == stream.receive(TRAILERS, 0)
    stream.receive(Written(), 0)
    assert Done(Ending.SETTLED) == stream.receive(Ended(), 0)
    assert (0, 0) == (desk.streams, desk.ledger.accounts["chat-0"].active_tokens)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((HEAD,), None),
        ((HEAD, Written()), None),
        ((HEAD, BodyArrived(BODY)), None),
        (ADMITTED, Ending.RELEASED),
        ((*ADMITTED, Written()), Ending.SETTLED),
        ((HEAD, BodyArrived(BODY), TOO_MUCH), None),
        ((HEAD, BodyArrived(BODY), FAULTED, Written()), None),
        ((MODELS, Written(), TRAILERS), None),
        ((UNKNOWN, Written()), None),
    ],
)
def test_end_in_each_phase(events: tuple[Event, ...], expected: Ending | None) -> None:
    """Whatever phase a stream ends in, nothing stays behind, and only an admission has an ending."""
    desk = _desk()
    stream, _ = _drive(desk, *events)

    assert Done(expected) == stream.receive(Ended(), 0)
    assert (0, 0, 0) == (desk.streams, desk.intake_bytes, len(desk.ledger.open))


LARGE = HeadArrived(HEAD.head._replace(content_length_bytes=2**21))


@pytest.mark.parametrize(
    "events", [(LARGE,), (LARGE, Written(), BodyArrived(BODY)), (LARGE, BodyArrived(BODY), FAULTED)]
)
def test_a_large_body_leaves_the_intake(events: tuple[Event, ...]) -> None:
    """What a head announced is given back when the stream ends, and is the body's own size once that is there."""
    desk = Desk(policy(limits={"body_bytes_max": 2**22}), "i")
    stream, _ = _drive(desk, *events)
    expected = {State.BODY: 2**21, State.COUNTING: len(BODY), State.REFUSED: 0}[stream.state]

    assert expected == desk.intake_bytes
    stream.receive(Ended(), 0)
    assert 0 == desk.intake_bytes


def test_a_large_body_is_refused_by_its_head() -> None:
    """While the intake is full, a large body is not even received."""
    desk = Desk(policy(limits={"body_bytes_max": 2**22, "intake_bytes_max": 2**21}), "i")
    desk.enter(2**20)
    stream, action = _drive(desk, LARGE)

    assert isinstance(action, Refuse)
    assert (Reason.QUEUE_FULL, State.REFUSED, 2**20) == (action.reject.reason, stream.state, desk.intake_bytes)


def test_expired_reservation_has_no_second_ending() -> None:
    """A stream whose reservation expired ends without naming an ending."""
    desk = _desk()
    stream, _ = _drive(desk, *ADMITTED, Written())
    desk.expire(10**15)

    assert Done(None) == stream.receive(Ended(), 0)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((UNKNOWN,), Reason.UNKNOWN_ENDPOINT),
        ((HEAD, BodyArrived(b"x" * 200)), Reason.BODY_TOO_LARGE),
        ((HEAD, BodyArrived(BODY), FAULTED), Reason.MALFORMED_REQUEST),
        ((HEAD, BodyArrived(BODY), TOO_MUCH), Reason.CONTEXT_LIMIT),
    ],
)
def test_refusals(events: tuple[Event, ...], reason: Reason) -> None:
    """A refusal reserves nothing and frees the intake at once."""
    desk = _desk()
    _, action = _drive(desk, *events)

    assert isinstance(action, Refuse)
    assert (reason, 0, {}) == (action.reject.reason, desk.intake_bytes, dict(desk.ledger.open))


def test_bounds_decide_only_against() -> None:
    """With room for the least the count goes on, with the intake held; without room it is refused and freed."""
    desk = _desk()
    stream, action = _drive(desk, HEAD, BodyArrived(BODY), BOUNDED)
    assert (Tokenize(), State.COUNTING, len(BODY)) == (action, stream.state, desk.intake_bytes)
    stream.receive(Ended(), 0)
    desk.ledger.reserve("full", "chat-0", Lane.INTERACTIVE, 86_380, 0)
    _, action = _drive(desk, HEAD, BodyArrived(BODY), BOUNDED)

    assert isinstance(action, Refuse)
    assert (Reason.TOKEN_BUDGET_EXHAUSTED, 0) == (action.reject.reason, desk.intake_bytes)


def test_bypass() -> None:
    """A request without tokens passes to its pool."""
    assert Pass(Bypass("chat")) == _drive(_desk(), MODELS)[1]


def test_bypass_with_a_body() -> None:
    """A POST that passes by its head passes its body too, unseen, and takes nothing from the intake."""
    desk = _desk()
    stream, first = _drive(desk, TOKENIZE)
    second = stream.receive(BodyArrived(b"anything"), 0)

    assert (Pass(Bypass("chat")), PassPart(Part.REQUEST_BODY), 0) == (first, second, desk.intake_bytes)


def test_table_is_total() -> None:
    """Every state is in the table, every state but the last can end, and every target is a state of the table."""
    assert set(State) == set(TRANSITIONS)
    for state, row in TRANSITIONS.items():
        assert (Ended in row) is (state is not State.ENDED)
        assert all(target in TRANSITIONS for targets in row.values() for target in targets)


REACH: dict[State, tuple[Event, ...]] = {
    State.HEAD: (),
    State.BODY: (HEAD,),
    State.COUNTING: (HEAD, BodyArrived(BODY)),
    State.ADMITTED: ADMITTED,
    State.RUNNING: (*ADMITTED, Written()),
    State.PASSED: (MODELS,),
    State.REFUSED: (UNKNOWN,),
    State.ENDED: (Ended(),),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_event_in_each_state(state: State, event: Event) -> None:
    """An event leads where the table says, and one that the table does not list raises and changes nothing."""
    desk = _desk()
    stream, _ = _drive(desk, *REACH[state])
    assert state is stream.state
    before = (desk.streams, desk.intake_bytes, dict(desk.ledger.open))
    targets = TRANSITIONS[state].get(type(event))
    if targets is None:
        with pytest.raises(StreamError, match=f"{type(event).__name__} is not allowed in {state.name}"):
            stream.receive(event, 0)
        assert (state, before) == (stream.state, (desk.streams, desk.intake_bytes, dict(desk.ledger.open)))
    else:
        stream.receive(event, 0)
        assert stream.state in targets


@given(st.lists(st.lists(st.sampled_from(EVENTS), max_size=12), max_size=8))
def test_any_events_leave_nothing_behind(streams: list[list[Event]]) -> None:
    """Whatever events come, once all streams have ended the desk holds nothing."""
    desk = _desk()

    def feed(stream: Stream) -> Callable[[Event], None]:
        def step(event: Event) -> None:
            if type(event) in TRANSITIONS[stream.state]:
                stream.receive(event, 0)

        return step

    for events in streams:
        step = feed(Stream(desk))
        for event in [*events, Ended()]:
            step(event)

    assert (0, 0, {}) == (desk.streams, desk.intake_bytes, dict(desk.ledger.open))
    assert {0} == {account.active_tokens for account in desk.ledger.accounts.values()}
