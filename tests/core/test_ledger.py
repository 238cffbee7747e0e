"""The ledger: the sum of open reservations is the counter, within the budget, and each ends exactly once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.core.ledger import Ledger, LedgerError
from extproc.core.policy import Replica
from extproc.core.values import Ending, Lane

SMALL = Replica("r0", "p", "127.0.0.1:1", gross_tokens=100, guard_tokens=10, requests_max=3, release_tokens_per_s=1)
LARGE = Replica("r1", "p", "127.0.0.1:2", gross_tokens=1000, guard_tokens=1, requests_max=9, release_tokens_per_s=1)


def _ledger() -> Ledger:
    return Ledger([SMALL, LARGE])


def test_reserve_to_the_last_token() -> None:
    """gross - guard is what reservations may hold together, not one token more."""
    ledger = _ledger()
    ledger.reserve("a", "r0", Lane.BULK, 90, now_ns=0)

    assert 0 == ledger.accounts["r0"].available_tokens
    with pytest.raises(LedgerError, match=r"1 tokens do not fit: r0 90/90, 1 open"):
        ledger.reserve("b", "r0", Lane.BULK, 1, now_ns=0)


def test_hard_cap() -> None:
    """The cap on requests holds while tokens are free."""
    ledger = _ledger()
    for ticket in "abc":
        ledger.reserve(ticket, "r0", Lane.INTERACTIVE, 1, now_ns=0)

    with pytest.raises(LedgerError, match="do not fit"):
        ledger.reserve("d", "r0", Lane.INTERACTIVE, 1, now_ns=0)


@pytest.mark.parametrize(("ticket", "reserve_tokens"), [("a", 1), ("b", 0), ("b", -1)])
def test_reservations_that_make_no_sense(ticket: str, reserve_tokens: int) -> None:
    """A ticket is open once, and a reservation holds at least one token; a refused step changes nothing."""
    ledger = _ledger()
    ledger.reserve("a", "r0", Lane.BULK, 10, now_ns=0)
    before = repr(ledger)

    with pytest.raises(LedgerError):
        ledger.reserve(ticket, "r0", Lane.BULK, reserve_tokens, now_ns=0)
    assert before == repr(ledger)


@pytest.mark.parametrize("ending", list(Ending))
def test_ends_once(ending: Ending) -> None:
    """The second end of a ticket raises and changes nothing, whatever the first was."""
    ledger = _ledger()
    reservation = ledger.reserve("a", "r1", Lane.BULK, 10, now_ns=0)

    assert reservation == ledger.end("a", ending)
    with pytest.raises(LedgerError, match="ticket a is not open, so it cannot be settled"):
        ledger.end("a", Ending.SETTLED)
    assert "<Ledger [r0 0/90, 0 open | r1 0/999, 0 open]>" == repr(ledger)


def test_waiting_interactive_comes_first() -> None:
    """Waiting interactive requests are ahead of both lanes; waiting bulk is ahead of none."""
    account = _ledger().accounts["r1"]
    account.waiting_tokens[Lane.INTERACTIVE] = 300
    account.waiting_tokens[Lane.BULK] = 500

    assert 999 - 300 == account.available_tokens


def test_oldest_first() -> None:
    """Reservations older than a moment come in the order of admission, without the younger ones."""
    ledger = _ledger()
    for now_ns, ticket in enumerate("abcd"):
        ledger.reserve(ticket, "r1", Lane.BULK, 1, now_ns=now_ns)

    assert ["a", "b"] == [reservation.ticket for reservation in ledger.admitted_before(2)]
    assert list("abcd") == [reservation.ticket for reservation in ledger.admitted_before(99)]


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of steps, allowed or not, against a plain dictionary as the model."""

    tickets = Bundle("tickets")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = _ledger()
        self.model: dict[str, tuple[str, int]] = {}
        self.endings: dict[str, Ending] = {}
        self.made = 0

    @rule(target=tickets, replica=st.sampled_from(["r0", "r1"]), tokens=st.integers(-2, 1100))
    def reserve(self, replica: str, tokens: int) -> str:
        """Reserve: succeeds exactly when it fits."""
        self.made += 1
        ticket = f"t{self.made}"
        held = [size for place, size in self.model.values() if place == replica]
        limits = self.ledger.accounts[replica].replica
        fits = 0 < tokens <= limits.budget_tokens - sum(held) and len(held) < limits.requests_max
        if fits:
            self.ledger.reserve(ticket, replica, Lane.BULK, tokens, now_ns=self.made)
            self.model[ticket] = (replica, tokens)
        else:
            with pytest.raises(LedgerError):
                self.ledger.reserve(ticket, replica, Lane.BULK, tokens, now_ns=self.made)
        return ticket

    @rule(target=ended, ticket=consumes(tickets), ending=st.sampled_from(Ending))
    def end(self, ticket: str, ending: Ending) -> str:
        """End: succeeds exactly when the ticket is open."""
        if ticket in self.model:
            self.ledger.end(ticket, ending)
            del self.model[ticket]
            assert ticket not in self.endings
            self.endings[ticket] = ending
        else:
            with pytest.raises(LedgerError):
                self.ledger.end(ticket, ending)
        return ticket

    @rule(ticket=ended, ending=st.sampled_from(Ending))
    def end_again(self, ticket: str, ending: Ending) -> None:
        """Ending again always raises."""
        with pytest.raises(LedgerError):
            self.ledger.end(ticket, ending)

    @invariant()
    def counters_are_sums(self) -> None:
        """The counter of a replica is the sum of its open reservations, >= 0 and within gross - guard."""
        assert dict(self.model) == {t: (r.replica, r.reserve_tokens) for t, r in self.ledger.open.items()}
        for name, account in self.ledger.accounts.items():
            held = [size for place, size in self.model.values() if place == name]
            assert (sum(held), len(held)) == (account.active_tokens, account.active_requests)
            assert 0 <= account.active_tokens <= account.replica.gross_tokens - account.replica.guard_tokens
            assert account.available_tokens == account.replica.budget_tokens - sum(held)


TestLedgerMachine = LedgerMachine.TestCase
