"""Chaos through a real Envoy: mixed traffic, clients that leave, engines, Envoy and the service dying, from one seed.

    python -m bench.soak [--seconds 300] [--seed N] [--quick] [--json]

Checked throughout, from outside: the tokens that engines run stay within each budget; no answer is cut, none is
outside the contract, and each refusal has a fault or a full budget to explain it; no engine sees a request that was
not admitted, or one twice. At rest nothing is reserved. A failing run prints its seed and its faults, and the seed
gives them again. With `--json` the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.chaos.client import fire
from bench.chaos.fleet import RESPONSE_S_MAX, Fleet
from bench.chaos.requests import request_id
from bench.chaos.schedule import MS_PER_S, SERVICE, Fault, Schedule, Shot, schedule
from bench.chaos.verdict import BY_SERVICE, Outcome, faults_of, unadmitted, unlogged
from bench.chaos.watch import Watch, watch
from extproc.core.admission import EXPIRY_SLACK_NS
from extproc.core.drain import NS_PER_S

SECONDS, QUICK_SECONDS = 300, 30
SEED_MAX = 2**32

REST_S_MAX = RESPONSE_S_MAX + EXPIRY_SLACK_NS / NS_PER_S + 3
"""An orphan whose end nobody saw stands for the longest response and its slack; the rest is for a busy machine."""

UP_S_MIN = 3.0
"""How long a target is left alone after a fault, and at least as long as the fault took: a slow start costs faults."""

REST_POLL_S = 0.1
SHOWN_MAX = 40

Shots = list[tuple[Shot, Outcome]]


def main(arguments: list[str]) -> int:
    """Run, judge and report; 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Chaos through a real Envoy.")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="length of the schedule")
    parser.add_argument("--seed", type=int, help="of a run to repeat; without it a new one")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} s")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    seed = time.time_ns() % SEED_MAX if options.seed is None else options.seed
    seconds = QUICK_SECONDS if options.quick else options.seconds
    plan = schedule(seed, seconds)
    tell(f"seed {seed}: {len(plan.shots)} requests and {len(plan.faults)} faults in {seconds} s")
    fleet = Fleet()
    try:
        fleet.start()
        report = uvloop.run(_run(fleet, plan))
    finally:
        fleet.close()
    _print(plan, report, as_json=options.json)
    return 1 if report["violations"] else 0


def tell(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


async def _run(fleet: Fleet, plan: Schedule) -> dict[str, Any]:
    sampled = Watch(fleet.budgets_tokens)
    watching = asyncio.create_task(watch(fleet, sampled))
    try:
        async with asyncio.TaskGroup() as group:
            shooting = group.create_task(_shoot(fleet, plan.shots))
            for target in {fault.target for fault in plan.faults}:
                faults = [fault for fault in plan.faults if fault.target == target]
                group.create_task(_strike(fleet, faults, plan.seconds))
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    rest_s, left_over = await _rest(fleet)
    fleet.note_memory()
    shots = shooting.result()
    return _report(fleet, shots, sampled, rest_s, left_over)


async def _shoot(fleet: Fleet, shots: Sequence[Shot]) -> Shots:
    """Send every request at its time, however the others fare."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for shot in shots:
            await asyncio.sleep(max(0.0, shot.at_ms / MS_PER_S - fleet.now_s()))
            tasks.append(group.create_task(fire(shot, fleet.envoy, fleet.port, fleet.now_s)))
    return list(zip(shots, (task.result() for task in tasks), strict=True))


async def _strike(fleet: Fleet, faults: Sequence[Fault], until_s: float) -> None:
    """One target's faults at their times, later where the target has only just come back."""
    up_s = 0.0
    for fault in faults:
        await asyncio.sleep(max(up_s, fault.at_ms / MS_PER_S - fleet.now_s()))
        if fleet.now_s() > until_s:
            return
        began_s = fleet.now_s()
        await fleet.strike(fault)
        up_s = max(UP_S_MIN, fleet.now_s() - began_s)


async def _rest(fleet: Fleet) -> tuple[float, list[str]]:
    """Wait until the service holds nothing; says how long that took, and what stayed."""
    started_s = time.monotonic()
    while True:
        page = await asyncio.to_thread(fleet.ledger)
        held = {
            "tokens reserved": sum(replica["reserved_tokens"] for replica in page["replicas"].values()),
            "reservations open": page["reservations_open"],
            "streams open": page["streams"],
            "bytes in the intake": page["intake_bytes"],
        }
        rest_s = time.monotonic() - started_s
        if not any(held.values()):
            return rest_s, []
        if rest_s > REST_S_MAX:
            return rest_s, [f"at rest: {count} {what}" for what, count in held.items() if count]
        await asyncio.sleep(REST_POLL_S)


def _report(fleet: Fleet, shots: Shots, sampled: Watch, rest_s: float, left_over: list[str]) -> dict[str, Any]:
    violations = [*sampled.over, *left_over]
    for shot, outcome in shots:
        what = f"{request_id(shot)} ({shot.kind}, {outcome.envoy}, {outcome.began_s:.3f} to {outcome.ended_s:.3f} s)"
        violations += [f"{what}: {text}" for text in faults_of(shot, outcome, fleet.episodes, fleet.rules)]
    refused = [request_id(shot) for shot, outcome in shots if outcome.reason in BY_SERVICE]
    seen = fleet.seen()
    unknown = unlogged(((request_id(shot), outcome) for shot, outcome in shots), fleet.episodes)
    violations += unadmitted(seen, fleet.admitted(), refused, unknown)
    violations += [f"the service logged a fault: {line}" for line in fleet.decisions() if line.get("event") == "fault"]
    return {
        "requests": len(shots),
        "kinds": _counts(shot.kind for shot, _ in shots),
        "answers": _counts(_answer(outcome) for _, outcome in shots),
        "seen_by_engines": {name: len(ids) for name, ids in seen.items()},
        "faults": _counts(episode.kind for episode in fleet.episodes),
        "service_down_s": round(sum(e.ended_s - e.began_s for e in fleet.episodes if e.target == SERVICE), 1),
        "samples": sampled.samples,
        "budgets_tokens": dict(fleet.budgets_tokens),
        "running_tokens_max": sampled.tokens_max,
        "rest_s": round(rest_s, 2),
        "service_rss_bytes_max": fleet.rss_bytes_max,
        "violations": violations,
        "episodes": [
            f"{episode.began_s:.3f} to {episode.ended_s:.3f} s: {episode.kind} {episode.target}"
            for episode in fleet.episodes
        ],
    }


def _answer(outcome: Outcome) -> str:
    if outcome.status == 0:
        return "left" if outcome.left else "none"
    end = "" if outcome.whole else (" left" if outcome.left else " broken")
    return f"{outcome.status}{end}" + (f" {outcome.reason}" if outcome.reason else "")


def _counts(values: Any) -> dict[str, int]:  # noqa: ANN401 (an iterable of strings)
    return dict(sorted(Counter(map(str, values)).items()))


def _print(plan: Schedule, report: dict[str, Any], *, as_json: bool) -> None:
    violations, episodes = report["violations"], report.pop("episodes")
    if violations:
        tell(f"seed {plan.seed}: {len(violations)} violations; faults of the schedule:")
        for fault in plan.faults:
            tell(f"  {fault.at_ms / MS_PER_S:8.3f} s {fault.kind} {fault.target} for {fault.down_ms} ms")
        tell("as they came:")
        for line in episodes:
            tell(f"  {line}")
        for line in violations[:SHOWN_MAX]:
            tell(f"VIOLATION {line}")
    result = {"seed": plan.seed, **report, "violations": violations[:SHOWN_MAX], "violations_total": len(violations)}
    print(json.dumps(result) if as_json else json.dumps(result, indent=2), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
