"""What happens when: requests, clients that leave, and faults, all from one seed.

Pure: the same seed and length give the same schedule. How long a request takes, and so which requests a fault meets,
is up to the machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from types import MappingProxyType

MS_PER_S = 1000

REPLICAS: Mapping[str, tuple[str, ...]] = MappingProxyType({"chat": ("chat-0", "chat-1"), "docs": ("docs-0",)})
"""Engines by pool."""

SERVICE, ENVOY = "tokenlane", "envoy"

RATE_PER_S = 30
"""Requests outside of bursts: the chat pool holds about a third of them at a time, so budgets are contended."""

BURST_GAP_MS = (1500, 4000)
BURST_REQUESTS = (20, 60)
BURST_MS = 50

LEAVING_SHARE = 0.2
LEAVING_BYTES_MAX = 20_000
"""Response bytes after which a client leaves: from inside the head to far into a stream."""

ENGINE_GAP_MS, ENVOY_GAP_MS, SERVICE_GAP_MS = (3000, 8000), (6000, 11_000), (9000, 15_000)
"""From the end of a fault to the next of its target. The service is back after some seconds, in which it decides
nothing."""

QUIET_MS = 3000
"""Before the first fault and after the last: budgets fill, and recovery is part of the run."""


@unique
class Kind(StrEnum):
    """Kinds of requests."""

    CHAT = "chat"
    CHAT_STREAM = "chat_stream"
    CHOICES_STREAM = "choices_stream"  # a completion with two choices
    IDS = "ids"  # a completion whose prompt is token ids
    OPEN_CEILING = "open_ceiling"  # states no output ceiling, so one is written into its body
    DOCUMENT = "document"
    DOCUMENT_STREAM = "document_stream"
    MALFORMED = "malformed"
    UNKNOWN_MODEL = "unknown_model"
    OVER_LIMIT = "over_limit"
    BYPASS = "bypass"


_WEIGHTS = MappingProxyType(
    {
        Kind.CHAT: 20,
        Kind.CHAT_STREAM: 30,
        Kind.CHOICES_STREAM: 8,
        Kind.IDS: 8,
        Kind.OPEN_CEILING: 8,
        Kind.DOCUMENT: 5,
        Kind.DOCUMENT_STREAM: 5,
        Kind.MALFORMED: 5,
        Kind.UNKNOWN_MODEL: 3,
        Kind.OVER_LIMIT: 3,
        Kind.BYPASS: 5,
    }
)
_DOCUMENTS = frozenset({Kind.DOCUMENT, Kind.DOCUMENT_STREAM})


@unique
class Leaving(StrEnum):
    """Where a client goes away."""

    UPLOADING = "uploading"
    READING = "reading"


@dataclass(frozen=True, slots=True)
class Leave:
    """A client goes away: after `at` bytes of the response, or after `at` millionths of its own request."""

    where: Leaving
    at: int


@dataclass(frozen=True, slots=True)
class Shot:
    """One request of the schedule. `words` is the size of its prompt."""

    number: int
    at_ms: int
    kind: Kind
    words: int
    max_tokens: int
    leave: Leave | None


@unique
class FaultKind(StrEnum):
    """What is done to a process, and undone after `down_ms`; what was ended is then started again."""

    ENGINE_KILL = "engine_kill"
    ENGINE_SICK = "engine_sick"  # its health check answers 503
    ENGINE_BUSY = "engine_busy"  # it answers 503 to requests
    ENGINE_HOLD = "engine_hold"  # it generates nothing
    SERVICE_KILL = "service_kill"
    SERVICE_TERM = "service_term"
    SERVICE_FREEZE = "service_freeze"  # it stands still, and its connections with it
    ENVOY_KILL = "envoy_kill"
    ENVOY_TERM = "envoy_term"
    ENVOY_SWITCH = "envoy_switch"  # a second Envoy takes over; the first ends after `down_ms`


ENGINE_FAULTS = (FaultKind.ENGINE_KILL, FaultKind.ENGINE_SICK, FaultKind.ENGINE_BUSY, FaultKind.ENGINE_HOLD)
SERVICE_FAULTS = (FaultKind.SERVICE_KILL, FaultKind.SERVICE_TERM, FaultKind.SERVICE_FREEZE)
ENVOY_FAULTS = (FaultKind.ENVOY_KILL, FaultKind.ENVOY_TERM, FaultKind.ENVOY_SWITCH)

DOWN_MS: Mapping[FaultKind, tuple[int, int]] = MappingProxyType(
    {
        **dict.fromkeys(ENGINE_FAULTS, (200, 2500)),
        **dict.fromkeys(SERVICE_FAULTS, (0, 1500)),
        FaultKind.SERVICE_FREEZE: (200, 4000),  # Envoy gives the connection up after two seconds of it
        **dict.fromkeys(ENVOY_FAULTS, (0, 1000)),
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something is done to `target` at `at_ms`, and undone `down_ms` later."""

    at_ms: int
    kind: FaultKind
    target: str
    down_ms: int


_Track = tuple[str, Sequence[FaultKind], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole run. Shots are in order of time; faults are too, and those of one target never overlap."""

    seed: int
    seconds: int
    shots: tuple[Shot, ...]
    faults: tuple[Fault, ...]


def schedule(seed: int, seconds: int) -> Schedule:
    """The run of `seed` over `seconds`."""
    end_ms = seconds * MS_PER_S
    # A stream of chance each, so that a change to the traffic leaves the faults as they were.
    shots = tuple(_shots(random.Random(f"{seed} shots"), end_ms))
    tracks: list[_Track] = [(name, ENGINE_FAULTS, ENGINE_GAP_MS) for names in REPLICAS.values() for name in names]
    tracks += [(SERVICE, SERVICE_FAULTS, SERVICE_GAP_MS), (ENVOY, ENVOY_FAULTS, ENVOY_GAP_MS)]
    faults = [fault for track in tracks for fault in _faults(random.Random(f"{seed} {track[0]}"), track, end_ms)]
    return Schedule(seed, seconds, shots, tuple(sorted(faults, key=lambda fault: (fault.at_ms, fault.target))))


def _shots(chance: random.Random, end_ms: int) -> Iterator[Shot]:
    times_ms = [chance.randrange(end_ms) for _ in range(RATE_PER_S * end_ms // MS_PER_S)]
    burst_ms = chance.randint(*BURST_GAP_MS)
    while burst_ms < end_ms:
        times_ms += [burst_ms + chance.randrange(BURST_MS) for _ in range(chance.randint(*BURST_REQUESTS))]
        burst_ms += chance.randint(*BURST_GAP_MS)
    for number, at_ms in enumerate(sorted(times_ms)):
        yield _shot(chance, number, at_ms)


def _shot(chance: random.Random, number: int, at_ms: int) -> Shot:
    kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    document = kind in _DOCUMENTS
    return Shot(
        number=number,
        at_ms=at_ms,
        kind=kind,
        words=chance.randint(2000, 12_000) if document else chance.randint(1, 300),
        max_tokens=chance.randint(1, 200) if document else chance.randint(1, 400),
        leave=_leave(chance) if chance.random() < LEAVING_SHARE else None,
    )


def _leave(chance: random.Random) -> Leave:
    if chance.random() < 0.4:
        return Leave(Leaving.UPLOADING, chance.randint(0, 1_000_000))
    # As many leave within the first hundreds of bytes as far into the stream.
    return Leave(Leaving.READING, int(LEAVING_BYTES_MAX ** chance.random()))


def _faults(chance: random.Random, track: _Track, end_ms: int) -> Iterator[Fault]:
    """Faults of one target, dealt in decks so that each kind comes as often as the others."""
    target, kinds, gap_ms = track
    deck: list[FaultKind] = []
    at_ms = QUIET_MS + chance.randrange(gap_ms[0])
    while at_ms < end_ms - QUIET_MS:
        deck = deck or chance.sample(kinds, len(kinds))
        kind = deck.pop()
        fault = Fault(at_ms, kind, target, chance.randint(*DOWN_MS[kind]))
        yield fault
        at_ms += fault.down_ms + chance.randint(*gap_ms)
