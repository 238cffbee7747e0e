"""The measurement: every variant under every scenario, in slices that take turns.

A machine drifts: other work comes and goes, clocks and caches warm up. Variants measured one after the other would
each meet another machine. Here each has the machine for a fraction of a second, round after round, so that all meet
the same one, and their ratios hold where their times do not.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from bench.bodies import PATH, Bodies, build
from bench.load import Load, LoadError, request
from bench.stage import Name, Stage, Variant
from bench.stats import cpu_ns

SETTLE_S = 0.02
"""After the last response of a slice: servers learn of its end a little later, and that work belongs to the slice."""

IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Each scenario takes `scenario_s` and at least one round; a slice lasts `slice_s`, and on every connection at least
    `turns_min` requests. `warm_up_s` is for each variant, once.
    """

    scenario_s: float
    slice_s: float
    turns_min: int
    warm_up_s: float
    chat_bodies: int
    document_bodies: int
    chat_tokens: int = 400
    document_tokens: int = 55_000
    concurrencies: tuple[int, ...] = (1, 20)


FULL = Plan(scenario_s=60, slice_s=0.5, turns_min=3, warm_up_s=1.5, chat_bodies=64, document_bodies=4)
QUICK = Plan(scenario_s=3, slice_s=0.2, turns_min=1, warm_up_s=0.3, chat_bodies=16, document_bodies=2)


@dataclass(slots=True)
class Sample:
    """What one variant did in one scenario. CPU times are those of its slices only; a server's is None without one."""

    latencies_ns: list[int] = field(default_factory=list)
    server_cpu_ns: int | None = None
    envoy_cpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One size of bodies at one concurrency, measured for `rounds` rounds."""

    bodies: Bodies
    concurrency: int
    rounds: int
    samples: Mapping[Name, Sample]


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything of one run. `idle_cpu_us_per_s` is what each server uses when nothing is asked of it."""

    scenarios: tuple[Scenario, ...]
    idle_cpu_us_per_s: Mapping[Name, int]


async def measure(stage: Stage, plan: Plan) -> Measured:
    """Run the whole plan; LoadError at the first answer that is not the expected one."""
    async with Load(stage.variant(Name.TOKENLANE).port, 1, stage.variant(Name.TOKENLANE).expected) as load:

        async def input_tokens(body: bytes) -> int:
            return int((await load.ask(request(PATH, body))).headers["x-llm-input-tokens"])

        chats = await build("chat", plan.chat_bodies, plan.chat_tokens, input_tokens)
        documents = await build("document", plan.document_bodies, plan.document_tokens, input_tokens)
    await _warm_up(stage.variants, chats, plan)
    idle = await _idle(stage.variants)
    scenarios = []
    for bodies in (chats, documents):
        for concurrency in plan.concurrencies:
            scenarios.append(await _scenario(stage, bodies, concurrency, plan))
            tell(f"{bodies.name}, {concurrency} at a time: {scenarios[-1].rounds} rounds")
    return Measured(tuple(scenarios), idle)


def tell(text: str) -> None:
    """Progress; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


async def _warm_up(variants: Sequence[Variant], bodies: Bodies, plan: Plan) -> None:
    """The interpreter specializes code, pools fill, Envoy connects."""
    requests = bodies.requests()
    for variant in variants:
        async with Load(variant.port, max(plan.concurrencies), variant.expected) as load:
            await load.run(requests, plan.warm_up_s)


async def _idle(variants: Sequence[Variant]) -> dict[Name, int]:
    pids = {variant.name: variant.server_pid for variant in variants if variant.server_pid is not None}
    before = {name: cpu_ns(pid) for name, pid in pids.items()}
    await asyncio.sleep(IDLE_S)
    return {name: round((cpu_ns(pid) - before[name]) / IDLE_S / 1000) for name, pid in pids.items()}


async def _scenario(stage: Stage, bodies: Bodies, concurrency: int, plan: Plan) -> Scenario:
    requests = bodies.requests()
    samples = {variant.name: Sample() for variant in stage.variants}
    rounds = 0
    async with AsyncExitStack() as stack:
        loads = [
            await stack.enter_async_context(Load(variant.port, concurrency, variant.expected))
            for variant in stage.variants
        ]
        end_s = time.monotonic() + plan.scenario_s
        while not rounds or time.monotonic() < end_s:
            for variant, load in zip(stage.variants, loads, strict=True):
                try:
                    await _slice(stage, variant, load, requests, plan, samples[variant.name])
                except LoadError as error:
                    raise LoadError(f"{variant.name}, {bodies.name}, {concurrency} at a time: {error}") from error
            rounds += 1
    return Scenario(bodies, concurrency, rounds, samples)


async def _slice(  # noqa: PLR0913, PLR0917 (what one slice is made of)
    stage: Stage, variant: Variant, load: Load, requests: Iterator[bytes], plan: Plan, sample: Sample
) -> None:
    pid = variant.server_pid
    envoy_before_ns = cpu_ns(stage.envoy_pid)
    server_before_ns = 0 if pid is None else cpu_ns(pid)
    sample.latencies_ns += await load.run(requests, plan.slice_s, plan.turns_min)
    await asyncio.sleep(SETTLE_S)
    sample.envoy_cpu_ns += cpu_ns(stage.envoy_pid) - envoy_before_ns
    if pid is not None:
        sample.server_cpu_ns = (sample.server_cpu_ns or 0) + cpu_ns(pid) - server_before_ns
