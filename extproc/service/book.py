"""The book: what follows when a reservation is made or has ended, besides the ledger itself."""

from __future__ import annotations

from extproc.core.values import Admit, Ending, Reservation
from extproc.service.journal import Journal
from extproc.service.metrics import Metrics


class Book:
    """Metrics and the journal, kept together for every way in which a reservation can end."""

    def __init__(self, metrics: Metrics, journal: Journal | None) -> None:
        self._metrics = metrics
        self._journal = journal

    def made(self, admit: Admit) -> None:
        """A reservation is made; the journal knows it before Envoy does."""
        if self._journal is not None:
            self._journal.made(admit.reservation)

    def moved(self, reservation: Reservation) -> None:
        """A reservation is counted on another replica than before."""
        if self._journal is not None:
            self._journal.made(reservation)

    def ended(self, ticket: str, ending: Ending) -> None:
        """A reservation has ended."""
        self._metrics.ended(ending)
        if self._journal is not None:
            self._journal.ended(ticket)
