"""The desk: every verdict, by the rules of the design note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from extproc.core.admission import EXPIRY_SLACK_NS, Desk
from extproc.core.drain import NS_PER_S
from extproc.core.policy import Endpoint
from extproc.core.values import (
    Admit,
    Bypass,
    Demand,
    Ending,
    Fault,
    Lane,
    Reason,
    Reject,
    RequestHead,
)
from extproc.settings import PolicySection, freeze
from tests.policies import document, policy, replica

CHAT = Endpoint.CHAT_COMPLETIONS


def _desk(**changes: Any) -> Desk:
    desk = Desk(policy(**changes), "i")
    for name in desk.ledger.accounts:
        desk.set_ready(name, ready=True)
    return desk


def _demand(input_tokens: int, output_tokens: int) -> Demand:
    return Demand("m", input_tokens, output_tokens, output_tokens, 1)


def _head(**changes: Any) -> RequestHead:
    return RequestHead(
        **{"method": "POST", "path": CHAT.value, "end_of_stream": False, "content_type": "application/json", **changes}
    )


def _admit(desk: Desk, demand: Demand, now_ns: int = 0) -> Admit:
    verdict = desk.decide(demand, now_ns)
    assert isinstance(verdict, Admit)
    return verdict


def _reject(desk: Desk, demand: Demand) -> Reject:
    verdict = desk.decide(demand, 0)
    assert isinstance(verdict, Reject)
    return verdict


def test_worked_example_of_the_note() -> None:
    """Gross 96,000, active 58,000, queue 8,000, guard 9,600: 18,000 fits the 20,400 left, 23,000 does not."""
    desk = _desk()
    _admit(desk, _demand(54_000, 4_000))
    account = desk.ledger.accounts["docs-0"]
    account.waiting_tokens[Lane.INTERACTIVE] = 8_000

    assert 20_400 == account.available_tokens
    assert Reason.TOKEN_BUDGET_EXHAUSTED == _reject(desk, _demand(19_000, 4_000)).reason
    assert 20_400 == _reject(desk, _demand(19_000, 4_000)).details["available_tokens"]
    assert 18_000 == _admit(desk, _demand(14_000, 4_000)).reservation.reserve_tokens
    assert 2_400 == account.available_tokens


def test_admits_to_the_last_token() -> None:
    """A demand equal to what is available is admitted, one token more is not."""
    desk = _desk()
    _admit(desk, _demand(60_000, 4_000))
    available_tokens = desk.ledger.accounts["docs-0"].available_tokens

    assert Reason.TOKEN_BUDGET_EXHAUSTED == _reject(desk, _demand(available_tokens - 99, 100)).reason
    _admit(desk, _demand(available_tokens - 100, 100))
    assert 0 == desk.ledger.accounts["docs-0"].available_tokens


def test_lane_chooses_the_pool_and_the_emptiest_replica_the_rest() -> None:
    """Among the replicas that fit, the one with most available tokens is reserved, then the first by name."""
    desk = _desk(chat={"chat-1": replica(9102), "chat-0": replica(9101)})
    placed = [_admit(desk, _demand(size, 1)) for size in (10, 20, 5)]

    assert ["chat-0", "chat-1", "chat-0"] == [admit.reservation.replica for admit in placed]
    assert ("chat", "127.0.0.1:9101", Lane.INTERACTIVE) == (
        placed[0].pool,
        placed[0].address,
        placed[0].reservation.lane,
    )
    assert ["i-1", "i-2", "i-3"] == [admit.reservation.ticket for admit in placed]


def test_overflow_has_advice_and_the_accepted_maximums() -> None:
    """Beyond the lanes: 413 with lane overflow, the counts, what would be accepted, and what to do."""
    reject = _reject(_desk(), _demand(60_001, 10))

    assert (Reason.CONTEXT_LIMIT, Lane.OVERFLOW) == (reject.reason, reject.lane)
    assert reject.message.startswith("prompt is too long: 60001 tokens > 60000 maximum; summarize or split")
    assert {
        "context_tokens_max": 200_000,
        "interactive_input_tokens_max": 4096,
        "interactive_output_tokens_max": 1024,
        "bulk_input_tokens_max": 60_000,
        "bulk_total_tokens_max": 64_000,
        "advice": "summarize or split the input, ask for less output, or use dedicated capacity",
    } == reject.details
    assert _reject(_desk(), _demand(60_000, 9_000)).message.startswith(
        "prompt is too long: 69000 tokens > 64000 maximum"
    )


def test_what_no_replica_can_ever_hold_is_refused_for_good() -> None:
    """A reserve above gross - guard of every replica is 413, however empty the fleet and even if a lane allows it."""
    section = document(
        docs={"docs-0": replica(9201, gross_tokens=50_000), "docs-1": replica(9202, gross_tokens=60_000)}
    )
    desk = Desk(freeze(PolicySection.model_validate(section), Path()), "i")
    reject = _reject(desk, _demand(54_000, 1))

    assert (Reason.CONTEXT_LIMIT, Lane.OVERFLOW, 54_000) == (
        reject.reason,
        reject.lane,
        reject.details["replica_tokens_max"],
    )
    assert reject.message.startswith("prompt is too long: 54001 tokens > 54000 maximum")


def test_no_ready_replica_is_503_even_when_full() -> None:
    """Without a ready replica the answer is capacity_unavailable, before any budget is looked at."""
    desk = _desk()
    desk.set_ready("chat-0", ready=False)
    reject = _reject(desk, _demand(10, 10))

    assert (Reason.CAPACITY_UNAVAILABLE, Lane.INTERACTIVE, 2 * NS_PER_S) == (
        reject.reason,
        reject.lane,
        reject.retry_ns,
    )
    _admit(desk, _demand(10_000, 10))


def test_only_ready_replicas_are_reserved() -> None:
    """A replica that is not ready gets nothing, and its reservations stay."""
    desk = _desk(chat={"chat-0": replica(9101), "chat-1": replica(9102)})
    first = _admit(desk, _demand(1, 1)).reservation
    desk.set_ready("chat-0", ready=False)

    assert {"chat-1"} == {_admit(desk, _demand(1, 1)).reservation.replica for _ in range(3)}
    assert first.ticket in desk.ledger.open


def test_hard_cap_while_tokens_are_free() -> None:
    """At the cap on requests the reason is concurrency_limit, with the time of one average request."""
    desk = _desk(chat={"chat-0": replica(9101, requests_max=2, release_tokens_per_s=100)})
    _admit(desk, _demand(100, 100))
    _admit(desk, _demand(100, 300))
    reject = _reject(desk, _demand(1, 1))

    assert (Reason.CONCURRENCY_LIMIT, 3 * NS_PER_S) == (reject.reason, reject.retry_ns)
    assert 2 == reject.details["requests_max"]


def test_tokens_short_on_one_and_cap_on_another() -> None:
    """When one replica lacks requests and another lacks tokens, the cap is what stands in the way."""
    desk = _desk(
        chat={"chat-0": replica(9101, requests_max=1), "chat-1": replica(9102, gross_tokens=6_000, requests_max=9)}
    )
    _admit(desk, _demand(10, 10))
    _admit(desk, _demand(4_000, 1_000))

    assert Reason.CONCURRENCY_LIMIT == _reject(desk, _demand(4_000, 1_000)).reason


def test_retry_after_is_the_shortfall_over_the_rate() -> None:
    """A full lane predicts the shortfall over the release rate, on the replica that is free first."""
    desk = _desk(
        docs={
            "docs-0": replica(9201, release_tokens_per_s=1_000),
            "docs-1": replica(9202, release_tokens_per_s=10_000),
        }
    )
    _admit(desk, _demand(60_000, 4_000))
    _admit(desk, _demand(60_000, 4_000))
    reject = _reject(desk, _demand(30_000, 2_400))

    # 22,400 are available on each, so 10,000 are missing.
    assert (Reason.TOKEN_BUDGET_EXHAUSTED, NS_PER_S) == (reject.reason, reject.retry_ns)


def test_the_delay_is_that_of_the_first_replica_with_room() -> None:
    """A replica at its hard cap and one that is short of tokens are both waited for; the sooner one is predicted."""
    chat = {
        "chat-0": replica(9101, requests_max=1, release_tokens_per_s=100),
        "chat-1": replica(9102, release_tokens_per_s=100),
    }
    desk = _desk(chat=chat)
    desk.ledger.reserve("capped", "chat-0", Lane.INTERACTIVE, 1_000, 0)
    desk.ledger.reserve("short", "chat-1", Lane.INTERACTIVE, 86_400, 0)
    reject = desk.decide(_demand(100, 100), 0)

    # The request on chat-0 ends after 10 s; chat-1 has released 200 tokens after 2.
    assert isinstance(reject, Reject)
    assert (Reason.CONCURRENCY_LIMIT, 2 * NS_PER_S) == (reject.reason, reject.retry_ns)


def test_foresees_a_refusal_from_bounds() -> None:
    """Where even the least finds no room, the refusal names the bounds and predicts the delay of the most."""
    desk = _desk(chat={"chat-0": replica(9101, release_tokens_per_s=100)})
    desk.ledger.reserve("held", "chat-0", Lane.INTERACTIVE, 86_380, 0)
    reject = desk.foresee(_demand(1, 20), _demand(1_000, 20))

    assert reject is not None
    assert (Reason.TOKEN_BUDGET_EXHAUSTED, Lane.INTERACTIVE, None) == (reject.reason, reject.lane, reject.demand)
    assert (1, 1_000, 20) == tuple(
        reject.details[name] for name in ("input_tokens_min", "input_tokens_bound", "max_output_tokens")
    )
    assert 10 * NS_PER_S == reject.retry_ns


def test_foresees_nothing_where_counting_must_decide() -> None:
    """Bounds that span lanes, reach beyond the lanes, or leave room for the least are no ground for a refusal."""
    desk = _desk()
    for name in desk.ledger.accounts:
        desk.ledger.reserve(f"held-{name}", name, Lane.BULK, 86_380, 0)

    assert desk.foresee(_demand(1, 1_000), _demand(4_097, 1_000)) is None
    assert desk.foresee(_demand(1, 1_000), _demand(60_001, 1_000)) is None
    assert desk.foresee(_demand(1, 19), _demand(100, 19)) is None


def test_foresees_a_replica_that_is_only_too_small_for_the_most() -> None:
    """The delay of a replica that the cap blocks is that of the cap, when the most would fit its tokens."""
    desk = _desk(chat={"chat-0": replica(9101, requests_max=1, release_tokens_per_s=100)})
    desk.set_ready("chat-0", ready=False)
    unready = desk.foresee(_demand(1, 1), _demand(10, 1))
    desk.set_ready("chat-0", ready=True)
    _admit(desk, _demand(100, 100))
    capped = desk.foresee(_demand(1, 1), _demand(10, 1))

    assert unready is not None
    assert capped is not None
    assert (Reason.CAPACITY_UNAVAILABLE, Reason.CONCURRENCY_LIMIT) == (unready.reason, capped.reason)
    assert 2 * NS_PER_S == capped.retry_ns


def test_an_end_frees_the_tokens() -> None:
    """What ends is available to the next verdict, once."""
    desk = _desk()
    ticket = _admit(desk, _demand(60_000, 4_000)).reservation.ticket
    assert Reason.TOKEN_BUDGET_EXHAUSTED == _reject(desk, _demand(60_000, 4_000)).reason
    ended = desk.end(ticket, Ending.SETTLED)

    assert ended is not None
    assert desk.end(ticket, Ending.SETTLED) is None
    _admit(desk, _demand(60_000, 4_000))


def test_reservations_expire_after_the_longest_response() -> None:
    """A reservation that stands longer than a response can run ends as expired, and its stream's end is harmless."""
    desk = _desk()
    old = _admit(desk, _demand(1, 1), now_ns=0).reservation
    young = _admit(desk, _demand(1, 1), now_ns=2).reservation
    limit_ns = desk.policy.limits.response_ns_max + EXPIRY_SLACK_NS

    assert [] == desk.expire(limit_ns)
    assert [old] == desk.expire(limit_ns + 1)
    assert [young.ticket] == list(desk.ledger.open)
    assert desk.end(old.ticket, Ending.SETTLED) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, CHAT),
        ({"path": "/v1/completions?x=1"}, Endpoint.COMPLETIONS),
        ({"content_type": "Application/JSON; charset=utf-8"}, CHAT),
        ({"content_encoding": "identity"}, CHAT),
        ({"content_length_bytes": 9 * 2**20}, CHAT),
        ({"path": None, "method": "CONNECT"}, Reason.UNKNOWN_ENDPOINT),
        ({"path": "/v1/chat/completions/"}, Reason.UNKNOWN_ENDPOINT),
        ({"path": "/V1/chat/completions"}, Reason.UNKNOWN_ENDPOINT),
        ({"path": "/v1/chat%2Fcompletions"}, Reason.UNKNOWN_ENDPOINT),
        ({"method": "GET", "end_of_stream": True}, Reason.UNKNOWN_ENDPOINT),
        ({"upgrade": True}, Reason.UNKNOWN_ENDPOINT),
        ({"content_encoding": "gzip"}, CHAT),
        ({"content_encoding": "deflate"}, CHAT),
        ({"content_encoding": "br"}, Reason.UNSUPPORTED_ENCODING),
        ({"content_encoding": "zstd"}, Reason.UNSUPPORTED_ENCODING),
        ({"content_encoding": "identity, gzip"}, Reason.UNSUPPORTED_ENCODING),
        ({"content_type": ""}, Reason.UNSUPPORTED_ENCODING),
        ({"content_type": "text/json"}, Reason.UNSUPPORTED_ENCODING),
        ({"end_of_stream": True}, Reason.MALFORMED_REQUEST),
        ({"content_length_bytes": 9 * 2**20 + 1}, Reason.BODY_TOO_LARGE),
        ({"method": "GET", "path": "/v1/models?limit=5", "end_of_stream": True}, Bypass("chat")),
        ({"method": "GET", "path": "/v1/models"}, Reason.MALFORMED_REQUEST),
        ({"method": "GET", "path": "/v1/models", "end_of_stream": True, "upgrade": True}, Reason.UNKNOWN_ENDPOINT),
        ({"method": "POST", "path": "/v1/models"}, Reason.UNKNOWN_ENDPOINT),
    ],
)
def test_screen(changes: dict[str, Any], expected: object) -> None:
    """Only a POST with a JSON body to an open path goes on to the body; everything else is decided by its head."""
    verdict = _desk(bypass=[{"path": "/v1/models", "pool": "chat"}]).screen(_head(**changes))

    assert expected == (verdict.reason if isinstance(verdict, Reject) else verdict)


def test_closed_endpoint() -> None:
    """A path that the policy does not open is unknown."""
    verdict = _desk(endpoints=["/v1/completions"]).screen(_head())

    assert isinstance(verdict, Reject)
    assert ("endpoints", "/v1/completions") in verdict.details.items()


def test_draining_refuses_what_is_new_but_names_faults_first() -> None:
    """While draining, a good request is refused with draining and a bad one with its own fault."""
    desk = _desk()
    desk.draining = True
    good, bad = desk.screen(_head()), desk.screen(_head(content_encoding="br"))

    assert isinstance(good, Reject)
    assert isinstance(bad, Reject)
    assert (Reason.DRAINING, Reason.UNSUPPORTED_ENCODING) == (good.reason, bad.reason)


def test_streams_are_bounded() -> None:
    """One stream over the bound is refused with queue_full, details.queue = streams."""
    desk = _desk(limits={"streams_max": 2})
    desk.streams = 2
    assert desk.screen(_head()) is CHAT
    desk.streams = 3
    verdict = desk.screen(_head())

    assert isinstance(verdict, Reject)
    assert (Reason.QUEUE_FULL, "streams", 2) == (
        verdict.reason,
        verdict.details["queue"],
        verdict.details["queue_max"],
    )


def _announced(desk: Desk, length: int | None) -> int | Reject:
    return desk.announce(RequestHead("POST", "/v1/completions", False, content_length_bytes=length))


def test_large_bodies_are_announced() -> None:
    """A large body is in the intake before it comes, up to the cap; three quarters of the intake are for such."""
    mib = 2**20
    desk = _desk(limits={"body_bytes_max": 4 * mib, "intake_bytes_max": 8 * mib})

    assert (0, 0, 0) == (_announced(desk, None), _announced(desk, mib - 1), desk.intake_bytes)
    assert (2 * mib, 4 * mib) == (_announced(desk, 2 * mib), _announced(desk, 5 * mib))
    full = _announced(desk, mib)
    assert isinstance(full, Reject)
    assert (Reason.QUEUE_FULL, 6 * mib) == (full.reason, desk.intake_bytes)
    assert desk.enter(mib - 1) is None


def test_intake_is_bounded_in_bytes() -> None:
    """Bodies being counted are bounded together; one body alone is bounded by the cap only."""
    desk = _desk(limits={"body_bytes_max": 100, "intake_bytes_max": 50})

    over = desk.enter(101)
    assert over is not None
    assert (Reason.BODY_TOO_LARGE, 100) == (over.reason, over.details["body_bytes_max"])
    assert desk.enter(90) is None
    full = desk.enter(1)
    assert full is not None
    assert (Reason.QUEUE_FULL, "intake") == (full.reason, full.details["queue"])
    desk.leave(90)
    assert desk.enter(50) is None
    assert 50 == desk.intake_bytes


def test_faults_of_counting() -> None:
    """A fault keeps its reason, field and details; one over the context also gets the overflow lane and advice."""
    desk = _desk()
    malformed = desk.fault(Fault(Reason.MALFORMED_REQUEST, "no", param="n", details={"n": 0}))
    context = desk.fault(Fault(Reason.CONTEXT_LIMIT, "prompt is too long", details={"input_tokens": 9}))

    assert (Reason.MALFORMED_REQUEST, "no", "n", None, {"n": 0}) == (
        malformed.reason,
        malformed.message,
        malformed.param,
        malformed.lane,
        malformed.details,
    )
    assert (Lane.OVERFLOW, 9, True) == (
        context.lane,
        context.details["input_tokens"],
        "advice" in context.details,
    )
