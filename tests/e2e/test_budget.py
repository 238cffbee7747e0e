"""A thousand at once against a budget for a hundred: exactly a hundred run, whatever the order."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.e2e.mesh import COMPLETIONS, Mesh, ids, mesh

REQUESTS = 1000
FITTING = 100
RESERVE_TOKENS = 800


async def _storm(chain: Mesh) -> Counter[tuple[int, str]]:
    """Send all requests at once; the engine answers nothing before every verdict is in. Counts (status, reason)."""
    await chain.control("chat-0", hold=True)
    refused: asyncio.Queue[None] = asyncio.Queue()

    async def one() -> tuple[int, str]:
        async with chain.post(ids(RESERVE_TOKENS - 50, 50), COMPLETIONS) as response:
            await response.read()
            if response.status != 200:
                refused.put_nowait(None)
            return response.status, response.headers.get("x-llm-reason", "")

    tasks = [asyncio.create_task(one()) for _ in range(REQUESTS)]
    for _ in range(REQUESTS - FITTING):
        await asyncio.wait_for(refused.get(), 60)
    assert FITTING == len(chain.desk.ledger.open)
    await chain.control("chat-0", hold=False)
    return Counter(await asyncio.gather(*tasks))


async def test_tokens_run_out_exactly() -> None:
    """1,000 requests of reserve R against 100 R: 100 are admitted, 900 are 429, and all tokens come back."""
    budget_tokens = FITTING * RESERVE_TOKENS
    pools = {"chat": {"chat-0": {"gross_tokens": budget_tokens * 10 // 9 + 1, "requests_max": REQUESTS}}}
    lanes = {"interactive": {"pool": "chat"}}
    async with mesh(pools=pools, model={"lanes": lanes}) as chain:
        spare = chain.desk.ledger.accounts["chat-0"].replica.budget_tokens - budget_tokens
        assert 0 <= spare < RESERVE_TOKENS
        counts = await _storm(chain)
        await chain.until_free()
        state = await chain.control("chat-0")

        assert {(200, ""): FITTING, (429, "token_budget_exhausted"): REQUESTS - FITTING} == counts
        assert (FITTING, FITTING * RESERVE_TOKENS) == (state["requests_total"], state["running_tokens_max"])
        assert (0, 0) == (chain.reserved_tokens, chain.desk.ledger.accounts["chat-0"].active_requests)


async def test_hard_cap_runs_out_exactly() -> None:
    """The cap on active requests holds the same way while tokens are free."""
    pools = {"chat": {"chat-0": {"gross_tokens": 10_000_000, "requests_max": FITTING}}}
    lanes = {"interactive": {"pool": "chat"}}
    async with mesh(pools=pools, model={"lanes": lanes}) as chain:
        counts = await _storm(chain)
        await chain.until_free()

        assert {(200, ""): FITTING, (429, "concurrency_limit"): REQUESTS - FITTING} == counts
        assert 0 == chain.reserved_tokens
