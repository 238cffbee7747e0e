"""The scripted tour: plays the steps in order, compares each with its documentation, and says it in words or JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from extproc.demo.tour_stage import Stage
from extproc.demo.tour_steps import Step
from extproc.demo.tour_values import Ledger, Observation, Reply, differences

STEP_S_MAX = 20.0
"""The longest step takes three seconds; a loaded machine gets some more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step came out; without an observation it broke off."""

    number: int
    step: Step
    observation: Observation | None
    problems: tuple[str, ...]
    seconds: float


async def run(steps: Sequence[Step], stage: Stage, deadline_s: float | None) -> AsyncIterator[Outcome]:
    """Play the steps in order; what is not done at `deadline_s` of the monotonic clock has failed."""
    for number, step in enumerate(steps, start=1):
        begun_s = time.monotonic()
        left_s = STEP_S_MAX if deadline_s is None else min(STEP_S_MAX, deadline_s - begun_s)
        observation, problems = await _play(step, stage, max(0.0, left_s))
        yield Outcome(number, step, observation, problems, time.monotonic() - begun_s)


async def _play(step: Step, stage: Stage, seconds_max: float) -> tuple[Observation | None, tuple[str, ...]]:
    try:
        async with asyncio.timeout(seconds_max):
            observation = await step.play(stage)
    except TimeoutError:
        return None, (f"it took more than {seconds_max:.1f} s",)
    except Exception as error:  # noqa: BLE001 (a step that breaks is a finding, and the others still run)
        return None, (f"it broke off: {type(error).__name__}: {error}",)
    return observation, tuple(differences(step.expected, observation))


def as_json(outcome: Outcome) -> dict[str, object]:
    """One step for machines."""
    seen = outcome.observation
    return {
        "step": outcome.number,
        "name": outcome.step.name,
        "ok": not outcome.problems,
        "problems": list(outcome.problems),
        "request": None if seen is None else seen.request,
        "status": None if seen is None else seen.reply.status,
        "headers": {} if seen is None else dict(shown_headers(seen.reply)),
        "message": None if seen is None else seen.reply.message or None,
        "verdict": None if seen is None else verdict(seen.reply),
        "facts": {} if seen is None else dict(seen.facts),
        "ledger": {} if seen is None else {moment: _accounts(ledger) for moment, ledger in seen.ledger.items()},
        "seconds": round(outcome.seconds, 3),
    }


def _accounts(ledger: Ledger) -> dict[str, dict[str, int | bool]]:
    return {
        name: {"reserved_tokens": a.reserved_tokens, "budget_tokens": a.budget_tokens, "ready": a.ready}
        for name, a in ledger.items()
    }


HEADERS_SHOWN = (
    "x-llm-reason",
    "x-llm-lane",
    "x-llm-replica",
    "x-engine-name",
    "x-llm-input-tokens",
    "x-llm-max-output-tokens",
    "x-llm-reserved-tokens",
    "retry-after",
    "x-should-retry",
)
"""Response headers that tell the story, in the order in which they are shown."""

REFUSALS: Mapping[str, str] = MappingProxyType(
    {
        "context_limit": "it can never run here, so do not try again",
        "unknown_endpoint": "there is nothing to admit it to",
        "token_budget_exhausted": "the lane is full",
        "capacity_unavailable": "no replica of the lane is ready",
        "admission_unavailable": "nobody was there to decide, and nothing runs undecided",
    }
)
"""What the reasons of the tour mean for the client."""


def shown_headers(reply: Reply) -> Mapping[str, str]:
    """The headers of `reply` worth showing."""
    return {name: reply.headers[name] for name in HEADERS_SHOWN if name in reply.headers}


def verdict(reply: Reply) -> str:
    """The answer in words."""
    headers = reply.headers
    reason = headers.get("x-llm-reason")
    if reason is not None:
        again = f"; come back in {headers['retry-after']} s" if "retry-after" in headers else ""
        return f"Refused: {REFUSALS.get(reason, reason)}{again}."
    counts = [_number(headers, f"x-llm-{name}-tokens") for name in ("input", "max-output", "reserved")]
    return "Admitted to the {} lane: {} in + {} out at most = {} tokens reserved.".format(
        headers.get("x-llm-lane", "?"), *counts
    )


def _number(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "?")
    return f"{int(value):,}" if value.isascii() and value.isdigit() else value
