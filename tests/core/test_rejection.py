"""The contract of refusals, as a client's SDK sees it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from extproc.core.rejection import RULES, Answer, Retry, answer
from extproc.core.values import Demand, Lane, Reason, Reject


def _answer(reject: Reject, request_id: str = "id-1") -> tuple[Answer, dict[str, str], dict[str, Any]]:
    found = answer(reject, policy_version="v7", request_id=request_id, jitter_ppm=0)
    return found, dict(found.headers), orjson.loads(found.body)


def test_every_reason_has_a_rule() -> None:
    """The table is total over the closed set of reasons."""
    assert set(Reason) == set(RULES)


@pytest.mark.parametrize("reason", list(Reason))
def test_retry_headers_follow_the_status(reason: Reason) -> None:
    """A 4xx that is the request's own fault says false and never Retry-After; 429 and 503 always say Retry-After."""
    found, headers, body = _answer(Reject(reason, "text", retry_ns=2_500_000_000))
    status = found.status

    assert (headers.get("x-should-retry") == "false") is (status in (400, 404, 413, 415))
    assert ("retry-after" in headers) is (status in (429, 503))
    assert (headers.get("retry-after"), headers.get("retry-after-ms")) in [(None, None), ("3", "3000")]
    assert (RULES[reason].retry is Retry.UNSAID) is (status in (500, 504))
    assert reason == headers["x-llm-reason"] == body["error"]["code"] == body["error"]["details"]["error_code"]


def test_one_body_for_both_sdks() -> None:
    """The body is one object with type, error and request_id; counts are in details and headers."""
    demand = Demand("m", 11, 10, 40, 4)
    _, headers, body = _answer(
        Reject(
            Reason.CONTEXT_LIMIT,
            "prompt is too long",
            param="max_tokens",
            lane=Lane.OVERFLOW,
            demand=demand,
            details={"context_tokens_max": 50},
        )
    )

    assert {
        "type": "error",
        "error": {
            "message": "prompt is too long",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "context_limit",
            "details": {
                "error_code": "context_limit",
                "input_tokens": 11,
                "max_output_tokens": 10,
                "sequences": 4,
                "requested_tokens": 51,
                "context_tokens_max": 50,
            },
        },
        "request_id": "id-1",
    } == body
    assert {
        "content-type": "application/json",
        "x-llm-reason": "context_limit",
        "x-llm-lane": "overflow",
        "x-llm-policy": "v7",
        "x-llm-reserved-tokens": "0",
        "x-llm-queue-ms": "0",
        "x-llm-input-tokens": "11",
        "x-llm-max-output-tokens": "10",
        "x-should-retry": "false",
    } == headers


def test_hostile_request_id_stays_text() -> None:
    """A request id is escaped into the JSON, and an absent one is null."""
    assert 'a"},\n' == _answer(Reject(Reason.DRAINING, "m"), 'a"},\n')[2]["request_id"]
    assert _answer(Reject(Reason.DRAINING, "m"), "")[2]["request_id"] is None


def test_honest_wait_beyond_the_cap() -> None:
    """A wait over 60 s is sent as 60 with x-should-retry false and the estimate in the details."""
    _, headers, body = _answer(Reject(Reason.TOKEN_BUDGET_EXHAUSTED, "m", retry_ns=90_000_000_000))

    assert ("60", "60000", "false") == (
        headers["retry-after"],
        headers["retry-after-ms"],
        headers["x-should-retry"],
    )
    assert body["error"]["details"]["retry_after_estimate_s"] == 90


@pytest.mark.parametrize("reason", [reason for reason, rule in RULES.items() if rule.status != 429])
def test_no_rate_limit_words_outside_429(reason: Reason) -> None:
    """Only a 429 has `rate limit` in its body, because LiteLLM maps that phrase before the status."""
    found, _, _ = _answer(Reject(reason, "text"))

    assert b"rate" not in found.body


@pytest.mark.parametrize(("inexact", "expected"), [(False, None), (True, "inexact")])
def test_an_inexact_count_says_so(inexact: bool, expected: str | None) -> None:
    """A refusal by a count that holds declared charges is marked; an exact one has no such header."""
    demand = Demand("m", 11, 10, 40, 4, inexact=inexact)
    _, headers, _ = _answer(Reject(Reason.TOKEN_BUDGET_EXHAUSTED, "text", demand=demand))

    assert expected == headers.get("x-llm-count")
