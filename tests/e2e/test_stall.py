"""Bodies made to be slow to check: they keep others waiting for milliseconds, not seconds."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import orjson
import pytest

from tests.e2e.mesh import CHAT, Mesh, chat, mesh

STALL_S_MAX = 0.6
"""Above what the JSON parser alone holds the interpreter for, and below what these bodies take in one piece."""

_CALLS = [{"function": {"name": "", "arguments": ""}}] * 20
HOSTILE: dict[str, dict[str, Any]] = {
    "tool calls": chat(messages=[{"role": "assistant", "tool_calls": _CALLS}] * 4096),
    "parts": chat(messages=[{"role": "user", "content": ["a"] * 600_000}]),
    "numbers as text": chat(stop_token_ids=["1"] * 800_000),
}


async def _longest_pause(chain: Mesh, until: asyncio.Future[Any]) -> float:
    """The longest time between two turns of the service's event loop, in seconds."""
    loop = asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    while not until.done():
        await asyncio.sleep(0.001)
        now = loop.time()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_slow_body_stalls_nobody(name: str) -> None:
    """While a hostile body is checked, the event loop keeps turning and a small chat is admitted."""
    body = orjson.dumps(HOSTILE[name])
    assert len(body) < 4 * 2**20
    async with mesh() as chain:

        async def send() -> int:
            headers = {"content-type": "application/json"}
            async with chain.client.post(chain.url + CHAT, data=io.BytesIO(body), headers=headers) as response:
                await response.read()
                return int(response.status)

        hostile = asyncio.ensure_future(send())
        pause = asyncio.ensure_future(_longest_pause(chain, hostile))
        while chain.desk.intake_bytes == 0 and not hostile.done():  # noqa: ASYNC110 (no event tells of intake)
            await asyncio.sleep(0.001)
        async with chain.post(chat()) as response:
            small = response.status
        status = await hostile

        assert 200 == small
        assert status in (200, 400, 413)
        assert await pause < STALL_S_MAX
        await chain.until_free()
