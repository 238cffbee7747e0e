"""Whether what a client saw was right, given the faults that were in force. Pure.

Right is: an answer of the contract, whole, for a reason that holds. A broken answer is excused only by the end of its
own engine or its own Envoy, a refusal for want of something only by a fault of that something.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import orjson

from bench.chaos.requests import GENERATING, STREAMS, output_tokens
from bench.chaos.schedule import SERVICE_FAULTS, FaultKind, Kind, Shot
from extproc.core.rejection import RULES, Retry
from extproc.core.values import Reason

DONE = b"data: [DONE]\n\n"
WORD = b'" word"'

LOGGED_WITHIN_S = 0.5
"""A decision is in the service's log this long after it; a kill takes along what is not."""

NOTICE_S = 2.0
"""How long after its end a fault still excuses: probes, reconnects, and a busy machine."""

EARLY_S = 0.05
"""A fault is recorded a moment before or after it bites."""

RETRY_AFTER_S_MAX = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client saw. `headers` are in lower case; `status` is 0 when no head came.

    `whole` says that the HTTP message ended as its framing promised; `left`, that the client went away before that.
    `envoy` names the Envoy process asked.
    """

    envoy: str
    began_s: float
    ended_s: float
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    left: bool = False

    @property
    def reason(self) -> str:
        """The contract's reason; empty without one."""
        return self.headers.get("x-llm-reason", "")


@dataclass(slots=True)
class Episode:
    """A fault in force: from `began_s` until all is as before at `ended_s`. `target` is one process of many."""

    kind: FaultKind
    target: str
    began_s: float
    ended_s: float = float("inf")

    def meets(self, outcome: Outcome) -> bool:
        """Whether it may have touched a request."""
        return self.began_s - EARLY_S <= outcome.ended_s and outcome.began_s <= self.ended_s + NOTICE_S


@dataclass(frozen=True, slots=True)
class Rules:
    """What a judge has to know of the installation: names of replicas by address, and the longest response."""

    replicas: Mapping[str, str]
    response_s_max: float


_ALWAYS = frozenset({Reason.TOKEN_BUDGET_EXHAUSTED, Reason.CONCURRENCY_LIMIT, Reason.QUEUE_FULL})
_BY_KIND: Mapping[Kind, Reason] = MappingProxyType(
    {
        Kind.MALFORMED: Reason.MALFORMED_REQUEST,
        Kind.UNKNOWN_MODEL: Reason.UNKNOWN_MODEL,
        Kind.OVER_LIMIT: Reason.CONTEXT_LIMIT,
    }
)
_EXCUSES: Mapping[Reason, frozenset[FaultKind]] = MappingProxyType(
    {
        Reason.ENGINE_BUSY: frozenset({FaultKind.ENGINE_BUSY}),
        Reason.CAPACITY_UNAVAILABLE: frozenset({FaultKind.ENGINE_KILL, FaultKind.ENGINE_SICK}),
        Reason.ADMISSION_UNAVAILABLE: frozenset(SERVICE_FAULTS),
        Reason.DRAINING: frozenset({FaultKind.SERVICE_TERM}),
    }
)
BY_SERVICE = frozenset(Reason) - {
    *(Reason.ENGINE_BUSY, Reason.CAPACITY_UNAVAILABLE, Reason.ADMISSION_UNAVAILABLE, Reason.UPSTREAM_TIMEOUT)
}
"""Reasons with which the service itself refuses, so that nothing was admitted."""


def faults_of(shot: Shot, outcome: Outcome, episodes: Sequence[Episode], rules: Rules) -> list[str]:
    """What was wrong with the outcome, one sentence each; nothing when all was right."""
    if outcome.status == 0:
        return [] if outcome.left or _envoy_ended(outcome, episodes) else ["no answer, though its Envoy ran"]
    if not outcome.whole and not outcome.left:
        why = _why_broken(outcome, episodes, rules)
        return [] if why else [f"the answer ({outcome.status}) broke off without a fault that explains it"]
    if outcome.status == 200:
        return list(_accepted(shot, outcome))
    return list(_refused(shot, outcome, episodes, rules))


def _why_broken(outcome: Outcome, episodes: Iterable[Episode], rules: Rules) -> bool:
    replica = rules.replicas.get(outcome.headers.get("x-llm-replica", ""), "")
    engine_died = any(
        episode.kind is FaultKind.ENGINE_KILL and episode.target == replica and episode.meets(outcome)
        for episode in episodes
    )
    return engine_died or _envoy_ended(outcome, episodes) or _timed_out(outcome, rules)


def _envoy_ended(outcome: Outcome, episodes: Iterable[Episode]) -> bool:
    return any(episode.target == outcome.envoy and episode.meets(outcome) for episode in episodes)


def _timed_out(outcome: Outcome, rules: Rules) -> bool:
    return outcome.ended_s - outcome.began_s >= rules.response_s_max


def _accepted(shot: Shot, outcome: Outcome) -> Iterator[str]:
    if shot.kind in _BY_KIND:
        yield "a request that can never run was answered 200"
        return
    if shot.kind not in GENERATING:
        if not outcome.left and b'"object":"list"' not in outcome.body:
            yield "the list of models is not one"
        return
    headers = outcome.headers
    needed = ("x-llm-reserved-tokens", "x-engine-input-tokens")
    missing = [name for name in needed if name not in headers]
    if missing:
        yield f"header {missing[0]} is missing"
        return
    reserved, runs = int(headers[needed[0]]), int(headers[needed[1]]) + output_tokens(shot)
    if reserved != runs:
        yield f"{reserved} tokens were reserved for {runs}"
    if not outcome.left:
        yield from _whole(shot, outcome.body)


def _whole(shot: Shot, body: bytes) -> Iterator[str]:
    words = body.count(WORD) if shot.kind in STREAMS else body.count(b" word")
    if words != output_tokens(shot):
        yield f"{words} of {output_tokens(shot)} tokens came"
    if shot.kind in STREAMS and not body.endswith(DONE):
        yield "the stream ended without [DONE]"


def _refused(shot: Shot, outcome: Outcome, episodes: Iterable[Episode], rules: Rules) -> Iterator[str]:
    try:
        reason = Reason(outcome.reason)
    except ValueError:
        yield f"status {outcome.status} with reason {outcome.reason!r} is outside the contract"
        return
    rule = RULES[reason]
    if outcome.status != rule.status:
        yield f"{reason} came with status {outcome.status} instead of {rule.status}"
    retry_after = outcome.headers.get("retry-after", "")
    if rule.retry is Retry.AFTER and not (retry_after.isdigit() and 1 <= int(retry_after) <= RETRY_AFTER_S_MAX):
        yield f"{reason} came with Retry-After {retry_after!r}"
    if outcome.whole and _code(outcome.body) != reason:
        yield f"the body of {reason} is {outcome.body[:200]!r}"
    if not _holds(shot, reason, outcome, episodes, rules):
        yield f"{reason} for a {shot.kind} request, and nothing explains it"


def _holds(shot: Shot, reason: Reason, outcome: Outcome, episodes: Iterable[Episode], rules: Rules) -> bool:
    if reason is _BY_KIND.get(shot.kind) or (reason in _ALWAYS and shot.kind in GENERATING):
        return True
    if reason is Reason.UPSTREAM_TIMEOUT:
        return _timed_out(outcome, rules)
    return any(episode.kind in _EXCUSES.get(reason, ()) and episode.meets(outcome) for episode in episodes)


def _code(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def unlogged(shots: Iterable[tuple[str, Outcome]], episodes: Iterable[Episode]) -> set[str]:
    """Request ids of `shots` whose admission a killed service may have taken along: those under way shortly before."""
    kills = [episode.began_s for episode in episodes if episode.kind is FaultKind.SERVICE_KILL]
    return {
        name
        for name, outcome in shots
        if any(outcome.began_s <= at_s + EARLY_S and at_s - LOGGED_WITHIN_S <= outcome.ended_s for at_s in kills)
    }


def unadmitted(
    seen: Mapping[str, Sequence[str]],
    admitted: Mapping[str, str],
    refused: Iterable[str],
    unknown: Collection[str] = (),
) -> Iterator[str]:
    """Requests that engines saw without an admission, or twice, and admissions that the client was refused.

    `seen` holds request ids by engine, `admitted` the reserved replica by request id, `refused` the ids of requests
    that the service answered itself, `unknown` those whose admission could be lost from its log.
    """
    times: dict[str, int] = {}
    for engine, ids in seen.items():
        for name in ids:
            times[name] = times.get(name, 0) + 1
            if name not in admitted:
                if name in unknown:
                    continue
                yield f"{engine} saw {name}, which was never admitted"
            elif admitted[name] != engine:
                yield f"{engine} saw {name}, which was admitted to {admitted[name]}"
    yield from (f"{name} reached engines {count} times" for name, count in times.items() if count > 1)
    yield from (f"{name} was refused by the service and admitted" for name in refused if name in admitted)
