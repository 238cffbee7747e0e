"""What is watched from outside while everything runs: the tokens that engines run, against their budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp

from bench.chaos.fleet import Fleet

SAMPLE_INTERVAL_S = 0.03
SAMPLE_S_MAX = 2.0


@dataclass
class Watch:
    """Samples of all engines. `tokens_max` is the most that each was seen to run; `over` tells of what was too much."""

    budgets_tokens: Mapping[str, int]
    samples: int = 0
    tokens_max: dict[str, int] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)

    def take(self, engine: str, now_s: float, running_tokens: int, running_tokens_max: int) -> None:
        """One sample: tokens that run now, and the most since the engine started."""
        self.samples += 1
        most = max(running_tokens, running_tokens_max)
        budget = self.budgets_tokens[engine]
        if most > budget and most > self.tokens_max.get(engine, 0):
            self.over.append(f"{now_s:.3f} s: {engine} ran {most} tokens ({running_tokens} now) of {budget}")
        self.tokens_max[engine] = max(most, self.tokens_max.get(engine, 0))


async def watch(fleet: Fleet, into: Watch) -> None:
    """Sample until cancelled. An engine that does not answer runs nothing that could be seen."""
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as group:
        for name, engine in fleet.engines.items():
            group.create_task(_sample(client, name, f"http://{engine.address}/control", into, fleet.now_s))


async def _sample(client: aiohttp.ClientSession, name: str, url: str, into: Watch, now_s: Callable[[], float]) -> None:
    timeout = aiohttp.ClientTimeout(total=SAMPLE_S_MAX)
    while True:
        try:
            async with client.get(url, timeout=timeout) as answer:
                state = await answer.json()
            into.take(name, now_s(), state["running_tokens"], state["running_tokens_max"])
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass
        await asyncio.sleep(SAMPLE_INTERVAL_S)
