"""What a check says: findings, and the rules that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Generic, NamedTuple, TypeVar

from extproc.core.policy import Policy

Subject = TypeVar("Subject")


class Fault(NamedTuple):
    """Where, and a sentence that says what would happen."""

    where: str
    sentence: str


@unique
class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"  # something leaks, passes unadmitted or ends too early
    WARNING = "warning"  # the contract or the economy suffers, or the file does not say


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of a policy or of an Envoy configuration."""

    severity: Severity
    rule: str
    where: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.rule}] {self.where}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Rule(Generic[Subject]):
    """A row of the rule table. `find` is pure; the first line of its docstring says what must be true.

    `find` may raise `document.ShapeError` for a value that Envoy could not read either.
    """

    name: str
    severity: Severity
    find: Callable[[Policy, Subject], Iterator[Fault]]

    @property
    def meaning(self) -> str:
        """What must be true, in one sentence."""
        return (self.find.__doc__ or "").strip().partition("\n")[0].removesuffix(".")
