"""What a step of the tour is documented to come out as, what was observed, and the differences.

The documented outcome is data, so a step that comes out differently is found by comparison and never by how its
script was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique

Value = int | str | bool
Expected = int | str | bool | range | None
"""A value; a range of integers; None: absent."""


@unique
class Moment(StrEnum):
    """When the ledger was looked at."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Account:
    """What the ledger page says of one replica."""

    reserved_tokens: int
    budget_tokens: int
    ready: bool


Ledger = Mapping[str, Account]


def reserved_tokens(ledger: Ledger) -> dict[str, int]:
    """Reserved tokens of the replicas that hold any."""
    return {name: account.reserved_tokens for name, account in ledger.items() if account.reserved_tokens}


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: header names in lower case, `body` the JSON object or empty."""

    status: int
    headers: Mapping[str, str]
    body: Mapping[str, object]

    @property
    def message(self) -> str:
        """What the error object in the body says; empty without one."""
        error = self.body.get("error")
        return str(error.get("message", "")) if isinstance(error, dict) else ""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step saw. `request` is a curl line; a moment without a ledger is missing."""

    request: str
    reply: Reply
    ledger: Mapping[Moment, Ledger]
    facts: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a step is documented to come out.

    `ledger` gives the reserved tokens at a moment, of the replicas that hold any. What is not named is not compared.
    """

    status: int
    headers: Mapping[str, Expected] = field(default_factory=dict)
    facts: Mapping[str, Expected] = field(default_factory=dict)
    ledger: Mapping[Moment, Mapping[str, int]] = field(default_factory=dict)


def differences(expected: Expectation, observed: Observation) -> list[str]:
    """How `observed` differs from what is documented, one sentence each; empty when it does not."""
    found: list[str] = []
    reply = observed.reply
    if reply.status != expected.status:
        found.append(f"status is {reply.status}, documented is {expected.status}")
    for kind, wanted, seen in (("header ", expected.headers, reply.headers), ("", expected.facts, observed.facts)):
        found += [
            f"{kind}{name} is {_shown(seen.get(name))}, documented is {_shown(value)}"
            for name, value in wanted.items()
            if not _matches(value, seen.get(name))
        ]
    for moment, tokens in expected.ledger.items():
        ledger = observed.ledger.get(moment)
        held = None if ledger is None else reserved_tokens(ledger)
        if held != tokens:
            found.append(f"ledger, {moment}: {_shown_tokens(held)}; documented is {_shown_tokens(tokens)}")
    return found


def _matches(expected: Expected, value: Value | None) -> bool:
    if isinstance(expected, range):
        text = str(value)
        return text.isascii() and text.isdigit() and int(text) in expected
    return value == expected


def _shown(value: Expected) -> str:
    if isinstance(value, range):
        return f"{value.start} to {value.stop - 1}"
    return "absent" if value is None else str(value)


def _shown_tokens(held: Mapping[str, int] | None) -> str:
    if held is None:
        return "not known"
    return ", ".join(f"{tokens} on {name}" for name, tokens in sorted(held.items())) or "nothing"
