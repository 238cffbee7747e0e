"""Bodies made to be slow to check: nobody who comes later has to wait until they are."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import orjson
import pytest

from tests.e2e.mesh import CHAT, chat, mesh

_CALLS = [{"function": {"name": "", "arguments": ""}}] * 20
HOSTILE: dict[str, dict[str, Any]] = {
    "tool calls": chat(messages=[{"role": "assistant", "tool_calls": _CALLS}] * 4096),
    "parts": chat(messages=[{"role": "user", "content": ["a"] * 600_000}]),
    "numbers as text": chat(stop_token_ids=["1"] * 800_000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_slow_body_stalls_nobody(name: str) -> None:
    """A hostile body is checked beside the event loop, and a small chat that came later is answered first."""
    body = orjson.dumps(HOSTILE[name])
    assert len(body) < 4 * 2**20
    readers: list[threading.Thread] = []
    async with mesh() as chain:
        read = chain.server._counter.read

        def watched(*arguments: Any, **options: Any) -> Any:
            readers.append(threading.current_thread())
            return read(*arguments, **options)

        chain.server._counter.read = watched  # type: ignore[method-assign]

        async def send() -> int:
            headers = {"content-type": "application/json"}
            async with chain.client.post(chain.url + CHAT, data=io.BytesIO(body), headers=headers) as response:
                await response.read()
                return int(response.status)

        hostile = asyncio.ensure_future(send())
        while chain.desk.intake_bytes == 0 and not hostile.done():  # noqa: ASYNC110 (no event tells of intake)
            await asyncio.sleep(0.001)
        async with chain.post(chat()) as response:
            small, overtaken = response.status, not hostile.done()

        assert (200, True) == (small, overtaken)
        assert [False, True] == [reader is threading.main_thread() for reader in readers]
        assert await hostile in (200, 400, 413)
        await chain.until_free()
