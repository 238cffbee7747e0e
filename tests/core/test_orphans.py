"""Orphans: what runs unwatched is counted until it ends, wherever it runs, and is never handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.core.admission import EXPIRY_SLACK_NS, Desk
from extproc.core.ledger import Ledger, LedgerError
from extproc.core.policy import Endpoint, Replica
from extproc.core.stream import BodyArrived, Counted, Detached, Done, Ended, HeadArrived, State, Stream, Written
from extproc.core.values import Admit, Demand, Ending, Lane, Reason, Reject, RequestHead, Reservation
from tests.policies import policy, replica

CHAT_0, CHAT_1 = "127.0.0.1:9101", "127.0.0.1:9102"
HEAD = RequestHead("POST", Endpoint.COMPLETIONS.value, end_of_stream=False, content_type="application/json")


def _desk(instance: str = "new") -> Desk:
    desk = Desk(policy(chat={"chat-0": replica(9101), "chat-1": replica(9102)}), instance)
    for name in desk.ledger.accounts:
        desk.set_ready(name, ready=True)
    return desk


def _left(ticket: str, replica: str = "chat-0", reserve_tokens: int = 86_400, admitted_ns: int = 0) -> Reservation:
    return Reservation(ticket, replica, Lane.INTERACTIVE, reserve_tokens, admitted_ns)


def _demand(reserve_tokens: int) -> Demand:
    return Demand("m", reserve_tokens - 1, 1, 1, 1)


def _stream(desk: Desk, state: State) -> Stream:
    """A stream that has come to one of the states with a demand of 100 tokens."""
    stream = Stream(desk)
    for event in (HeadArrived(HEAD), BodyArrived(b"{}"), Counted(_demand(100), None), Written()):
        if stream.state is state:
            break
        stream.receive(event, 0)
    assert state is stream.state
    return stream


def test_adopted_tokens_are_taken() -> None:
    """What a lost process admitted is not handed out again, until it ends."""
    desk = _desk()
    adopted = [_left("old-1"), _left("old-2", "chat-1", 86_390)]

    assert adopted == desk.adopt(adopted)
    assert {"old-1", "old-2"} == desk.orphans
    refused = desk.decide(_demand(20), 1)
    assert isinstance(refused, Reject)
    assert Reason.TOKEN_BUDGET_EXHAUSTED is refused.reason
    assert adopted[0] == desk.end("old-1", Ending.SETTLED)
    assert {"old-2"} == desk.orphans
    admitted = desk.decide(_demand(20), 2)
    assert isinstance(admitted, Admit)
    assert "chat-0" == admitted.reservation.replica


def test_what_ran_on_a_replica_that_is_gone_is_not_adopted() -> None:
    """Tokens on a replica that the policy no longer has stand for nothing that could be handed out."""
    desk = _desk()

    assert [] == desk.adopt([_left("old-1", "chat-9")])
    assert (set(), {}) == (desk.orphans, dict(desk.ledger.open))


def test_more_than_the_budget_may_be_adopted() -> None:
    """What runs is counted even where it does not fit: the replica is below zero, and admits nothing."""
    desk = _desk()
    desk.adopt([_left("old-1"), _left("old-2")])

    assert -86_400 == desk.ledger.accounts["chat-0"].available_tokens
    admitted = desk.decide(_demand(1_000), 1)
    assert isinstance(admitted, Admit)
    assert "chat-1" == admitted.reservation.replica


def test_adopted_expire_before_what_is_admitted() -> None:
    """An orphan that nobody ends stands no longer than a response can run, counted from its admission."""
    desk = _desk()
    desk.adopt([_left("old-1", admitted_ns=5)])
    desk.decide(_demand(100), 10)
    limit_ns = desk.policy.limits.response_ns_max + EXPIRY_SLACK_NS

    assert [] == desk.expire(limit_ns + 5)
    assert ["old-1"] == [reservation.ticket for reservation in desk.expire(limit_ns + 6)]
    assert (set(), ["new-1"]) == (desk.orphans, list(desk.ledger.open))


def test_a_ticket_is_adopted_once() -> None:
    """A ticket that is open cannot be adopted, and nothing changes."""
    ledger = Ledger([Replica("r", "p", "127.0.0.1:1", 100, 10, 3, 1)])
    ledger.adopt(_left("a", "r", 50))

    with pytest.raises(LedgerError, match="ticket a is already open"):
        ledger.adopt(_left("a", "r", 50))
    assert "<Ledger [r 50/90, 1 open]>" == repr(ledger)


def test_only_what_is_open_moves() -> None:
    """A ticket that is not open cannot be moved, and nothing changes."""
    ledger = Ledger([Replica("r", "p", "127.0.0.1:1", 100, 10, 3, 1)])

    with pytest.raises(LedgerError, match="ticket a is not open, so it cannot be moved"):
        ledger.move("a", "r")
    assert "<Ledger [r 0/90, 0 open]>" == repr(ledger)


def test_a_reservation_follows_its_request() -> None:
    """Tokens are counted where the request is served, keep their place in the order, and end once."""
    desk = _desk()
    admits = [desk.decide(_demand(100), now_ns) for now_ns in range(3)]
    assert isinstance(admits[0], Admit)
    moved = desk.served("new-1", CHAT_1)

    assert moved is not None
    assert ("chat-1", 100, 0) == (moved.replica, moved.reserve_tokens, moved.admitted_ns)
    assert "<Ledger [chat-0 100/86400, 1 open | chat-1 200/86400, 2 open | docs-0 0/86400, 0 open]>" == repr(
        desk.ledger
    )
    assert ["new-1", "new-2", "new-3"] == [reservation.ticket for reservation in desk.ledger.admitted_before(9)]
    assert moved == desk.end("new-1", Ending.SETTLED)
    assert desk.served("new-1", CHAT_0) is None


@pytest.mark.parametrize("address", [CHAT_0, "", "127.0.0.1:1", "not an address"])
def test_a_reservation_stays(address: str) -> None:
    """Served where it is reserved, nowhere, or where no replica of the policy is: nothing moves."""
    desk = _desk()
    desk.decide(_demand(100), 0)

    assert desk.served("new-1", address) is None
    assert "chat-0" == desk.ledger.open["new-1"].replica


def test_only_a_running_response_outlives_its_stream() -> None:
    """A stream that breaks leaves an orphan when its admission was written, and nothing in any earlier state."""
    for state in (State.HEAD, State.BODY, State.COUNTING, State.ADMITTED):
        desk = _desk()
        done = _stream(desk, state).receive(Detached(), 0)

        assert Done(Ending.RELEASED if state is State.ADMITTED else None) == done
        assert (0, 0, {}, set()) == (desk.streams, desk.intake_bytes, dict(desk.ledger.open), desk.orphans)

    desk = _desk()
    assert Done(None) == _stream(desk, State.RUNNING).receive(Detached(), 0)
    assert (0, ["new-1"], {"new-1"}) == (desk.streams, list(desk.ledger.open), desk.orphans)
    assert desk.end("new-1", Ending.SETTLED) is not None
    assert (set(), 0) == (desk.orphans, desk.ledger.accounts["chat-0"].active_tokens)


@pytest.mark.parametrize("event", [Ended(), Detached()])
def test_an_end_that_overtakes_its_stream(event: Ended | Detached) -> None:
    """A reservation that the access log ended first is no orphan when its stream ends, and does not end again."""
    desk = _desk()
    stream = _stream(desk, State.RUNNING)
    desk.end("new-1", Ending.SETTLED)

    assert Done(None) == stream.receive(event, 0)
    assert (0, set(), {}) == (desk.streams, desk.orphans, dict(desk.ledger.open))


class OrphanMachine(RuleBasedStateMachine):
    """Any order of admissions, breaks, moves, ends and expiry, against a plain dictionary as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = _desk()
        self.now_ns = 0
        self.streams: dict[str, Stream] = {}
        self.model = {"old-1": ("chat-0", 300, 0), "old-2": ("chat-1", 200, 0)}
        self.unwatched = {"old-1", "old-2"}
        self.desk.adopt([_left(ticket, *fields) for ticket, fields in self.model.items()])

    def _ticket(self, number: int) -> str:
        tickets = sorted(self.model)
        return tickets[number % len(tickets)]

    @rule()
    def admit(self) -> None:
        """A request comes and runs."""
        self.now_ns += 1
        stream = Stream(self.desk)
        for event in (HeadArrived(HEAD), BodyArrived(b"{}"), Counted(_demand(100), None), Written()):
            stream.receive(event, self.now_ns)
        assert stream.admit is not None
        reservation = stream.admit.reservation
        self.streams[reservation.ticket] = stream
        self.model[reservation.ticket] = (reservation.replica, 100, self.now_ns)

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0), breaks=st.booleans())
    def stream_is_over(self, number: int, breaks: bool) -> None:
        """A stream ends or breaks; it names an ending exactly when its end is what ended the reservation."""
        ticket = sorted(self.streams)[number % len(self.streams)]
        done = self.streams.pop(ticket).receive(Detached() if breaks else Ended(), self.now_ns)
        if breaks and ticket in self.model:
            self.unwatched.add(ticket)
            assert Done(None) == done
        else:
            ended = self.model.pop(ticket, None)
            assert Done(None if ended is None else Ending.SETTLED) == done

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0), address=st.sampled_from([CHAT_0, CHAT_1]))
    def served(self, number: int, address: str) -> None:
        """An entry of a running response says who serves it."""
        ticket = self._ticket(number)
        name = {CHAT_0: "chat-0", CHAT_1: "chat-1"}[address]
        before, tokens, admitted_ns = self.model[ticket]
        moved = self.desk.served(ticket, address)
        assert (None if before == name else name) == (None if moved is None else moved.replica)
        self.model[ticket] = (name, tokens, admitted_ns)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0))
    def response_is_over(self, number: int) -> None:
        """The entry of an ended response ends its reservation, once."""
        ticket = self._ticket(number)
        assert self.desk.end(ticket, Ending.SETTLED) is not None
        assert self.desk.end(ticket, Ending.SETTLED) is None
        del self.model[ticket]
        self.unwatched.discard(ticket)

    @rule(count=st.integers(0, 3))
    def expire(self, count: int) -> None:
        """Time passes, so that the oldest expire."""
        then_ns = sorted({admitted_ns for _, _, admitted_ns in self.model.values()} | {self.now_ns})[:count]
        if then_ns:
            limit_ns = self.desk.policy.limits.response_ns_max + EXPIRY_SLACK_NS
            expired = {reservation.ticket for reservation in self.desk.expire(then_ns[-1] + limit_ns)}
            assert {ticket for ticket, (_, _, at_ns) in self.model.items() if at_ns < then_ns[-1]} == expired
            self.model = {ticket: fields for ticket, fields in self.model.items() if ticket not in expired}
            self.unwatched -= expired

    @invariant()
    def counted_where_it_runs(self) -> None:
        """The ledger is the model, each counter is a sum, and orphans are the open ones without a stream."""
        found = {r.ticket: (r.replica, r.reserve_tokens, r.admitted_ns) for r in self.desk.ledger.open.values()}
        assert self.model == found
        for name, account in self.desk.ledger.accounts.items():
            held = [tokens for place, tokens, _ in self.model.values() if place == name]
            assert (sum(held), len(held)) == (account.active_tokens, account.active_requests)
        assert self.unwatched == self.desk.orphans
        assert len(self.streams) == self.desk.streams


TestOrphanMachine = OrphanMachine.TestCase
