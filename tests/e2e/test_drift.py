"""Counts are compared with what engines say, and nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from extproc.service.metrics import Comparison
from tests.e2e.mesh import COMPLETIONS, Mesh, chat, ids, mesh, until
from tests.e2e.scripted import Reply, Scripted

TELLING: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """A chain that reads every response."""
    async with mesh(drift_sample_ratio=1) as running:
        yield running


def compared(chain: Mesh) -> dict[Comparison, int]:
    """Comparisons so far."""
    value = chain.server.metrics.registry.get_sample_value
    return {
        found: int(value("tokenlane_compared_counts_total", {"model": "qwen3", "comparison": found}) or 0)
        for found in Comparison
    }


async def after(chain: Mesh, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[bytes, Comparison]:
    """The response to `body`, and the one comparison that follows."""
    before = compared(chain)
    async with chain.post(body, path) as response:
        content = bytes(await response.read())
    await chain.until_free()
    await until(lambda: compared(chain) != before)
    (found,) = (found for found, times in compared(chain).items() if times != before[found])
    return content, found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ids(300), Comparison.EQUAL),
        (ids(300, 400, **TELLING), Comparison.EQUAL),
        (ids(300, stream=True), Comparison.UNSTATED),
    ],
)
async def test_responses_are_compared(chain: Mesh, body: dict[str, Any], expected: Comparison) -> None:
    """Documents and streams; one that does not say is counted as that."""
    _, found = await after(chain, body, COMPLETIONS)

    assert expected is found


async def test_a_difference_is_counted_and_logged() -> None:
    """The client gets what the engine sent; the operator gets both counts, and no word of the prompt."""
    answer = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 99}, "padding": "x" * 200_000})
    async with Scripted() as engine:
        engine.script(Reply(body=answer))
        pools: dict[str, Any] = {"chat": {"chat-0": {"address": engine.address}}, "docs": {"docs-0": {}}}
        async with mesh(drift_sample_ratio=1, pools=pools) as chain:
            with capture_logs() as logs:
                content, found = await after(chain, chat("secret"))

    (line,) = (line for line in logs if line["event"] == "count_differs")
    assert (answer, Comparison.DIFFERENT) == (content, found)
    assert (99, "qwen3") == (line["engine_input_tokens"], line["model"])
    assert 0 < line["input_tokens"] < 20
    assert "secret" not in repr(logs)


async def test_what_is_not_sampled_is_not_read() -> None:
    """Without the policy's word, no response reaches the service."""
    async with mesh() as chain:
        async with chain.post(chat("Hello", **TELLING)) as response:
            await response.read()
        await chain.until_free()

        assert {0} == set(compared(chain).values())
