"""The ledger: which tokens are held on which replica, for whom.

Rules:

1. The active tokens of a replica are the sum of its open reservations: nothing else changes the counter.
2. A reservation is made only when it fits: `reserve` refuses what would pass gross - guard or the hard cap on
   requests, and then changes nothing.
3. A reservation ends exactly once, by name. Ending an unknown ticket raises and changes nothing.
4. Reservations are kept in the order of admission. All may stand equally long, so the oldest expires first.
5. What already runs is counted even where it does not fit: `adopt` takes over what another process admitted, `move`
   follows a request to the replica that served it. Both may leave a replica above its budget, never below zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from extproc.core.policy import Replica
from extproc.core.values import Ending, Lane, Reservation


class LedgerError(Exception):
    """A step that the rules do not allow; the ledger is unchanged."""


class Account:
    """The counters of one replica, in tokens and requests."""

    __slots__ = ("active_requests", "active_tokens", "budget_tokens", "ready", "replica", "waiting_tokens")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.budget_tokens = replica.budget_tokens
        self.active_tokens = 0
        self.active_requests = 0
        self.waiting_tokens = dict.fromkeys((Lane.INTERACTIVE, Lane.BULK), 0)
        """Reserve of the requests that wait for this replica, by lane."""
        self.ready = False
        """What the last probe said; a replica that was never probed is not ready."""

    @property
    def available_tokens(self) -> int:
        """Tokens left: gross - guard - active - ahead, for a request at the tail of its lane.

        Ahead is the reserve of the waiting interactive requests, for either lane: bulk never overtakes them, and
        waiting bulk gives way to interactive. Negative where what runs is more than the budget (rule 5).
        """
        return self.budget_tokens - self.active_tokens - self.waiting_tokens[Lane.INTERACTIVE]

    @property
    def under_cap(self) -> bool:
        """Whether one more request stays within the hard cap on active requests."""
        return self.active_requests < self.replica.requests_max

    def __repr__(self) -> str:
        return f"{self.replica.name} {self.active_tokens}/{self.budget_tokens}, {self.active_requests} open"


class Ledger:
    """All accounts and all open reservations."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._accounts = {replica.name: Account(replica) for replica in replicas}
        self._open: dict[str, Reservation] = {}

    @property
    def accounts(self) -> Mapping[str, Account]:
        """Accounts by replica name."""
        return MappingProxyType(self._accounts)

    @property
    def open(self) -> Mapping[str, Reservation]:
        """Open reservations by ticket, oldest first."""
        return MappingProxyType(self._open)

    def reserve(self, ticket: str, replica: str, lane: Lane, reserve_tokens: int, now_ns: int) -> Reservation:
        """Hold tokens on a replica; LedgerError when they do not fit or the ticket is taken."""
        account = self._accounts[replica]
        if ticket in self._open:
            raise LedgerError(f"ticket {ticket} is already open")
        if reserve_tokens <= 0:
            raise LedgerError(f"a reservation of {reserve_tokens} tokens stands for nothing")
        if reserve_tokens > account.budget_tokens - account.active_tokens or not account.under_cap:
            raise LedgerError(f"{reserve_tokens} tokens do not fit: {account!r}")
        reservation = Reservation(ticket, replica, lane, reserve_tokens, now_ns)
        self._hold(reservation)
        return reservation

    def end(self, ticket: str, ending: Ending) -> Reservation:
        """End a reservation; LedgerError when it is not open."""
        reservation = self._open.pop(ticket, None)
        if reservation is None:
            raise LedgerError(f"ticket {ticket} is not open, so it cannot be {ending}")
        self._let_go(reservation)
        return reservation

    def adopt(self, reservation: Reservation) -> None:
        """Count a reservation that was made before this process; LedgerError when its ticket is open.

        Older than everything that this process admits, so adoptions come before the first `reserve`.
        """
        if reservation.ticket in self._open:
            raise LedgerError(f"ticket {reservation.ticket} is already open")
        self._hold(reservation)

    def move(self, ticket: str, replica: str) -> Reservation:
        """Count an open reservation on another replica; LedgerError when it is not open."""
        reservation = self._open.get(ticket)
        if reservation is None:
            raise LedgerError(f"ticket {ticket} is not open, so it cannot be moved")
        self._let_go(reservation)
        moved = replace(reservation, replica=replica)
        self._hold(moved)
        return moved

    def _hold(self, reservation: Reservation) -> None:
        account = self._accounts[reservation.replica]
        self._open[reservation.ticket] = reservation
        account.active_tokens += reservation.reserve_tokens
        account.active_requests += 1

    def _let_go(self, reservation: Reservation) -> None:
        account = self._accounts[reservation.replica]
        account.active_tokens -= reservation.reserve_tokens
        account.active_requests -= 1

    def admitted_before(self, then_ns: int) -> Iterator[Reservation]:
        """Open reservations admitted before `then_ns`, oldest first."""
        for reservation in list(self._open.values()):
            if reservation.admitted_ns >= then_ns:
                return
            yield reservation

    def __repr__(self) -> str:
        return f"<Ledger [{' | '.join(map(repr, self._accounts.values()))}]>"
