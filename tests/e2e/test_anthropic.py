"""The official Anthropic SDK against `/v1/messages`: what engines answer passes, and every refusal is understood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import orjson
import pytest
import pytest_asyncio

from extproc.core.policy import Endpoint
from extproc.core.values import Admit, Demand, Ending
from tests.e2e.mesh import Mesh, mesh, until
from tests.e2e.scripted import Reply, Scripted
from tests.e2e.test_sdks import Attempts

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "qwen3",
    "content": [{"type": "text", "text": "Paris."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 2},
}
EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Par"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "is."}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
]
STREAM = b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in EVENTS)
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "lane"}}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS: list[Any] = [{"name": "look_up", "description": "Look a word up in a dictionary.", "input_schema": SCHEMA}]
USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: dict[str, Any] = {"model": "qwen3", "max_tokens": 64, "messages": USER}

JSON = {"content-type": "application/json"}


class Chain:
    """A mesh whose engine answers what a test scripts."""

    def __init__(self, running: Mesh, engine: Scripted) -> None:
        self.mesh = running
        self.engine = engine

    def answer(self, document: object) -> None:
        """Let the engine answer with a JSON document from now on."""
        self.engine.script(Reply(body=orjson.dumps(document), headers=JSON))

    def occupy(self, pool: str, tokens: int) -> str:
        """Hold `tokens` of a pool's only replica; the ticket."""
        desk = self.mesh.desk
        (limits,) = (limits for limits in desk.policy.models["qwen3"].lanes if limits.pool == pool)
        input_tokens = min(tokens - 1, limits.input_tokens_max)
        output_tokens = tokens - input_tokens
        demand = Demand("qwen3", input_tokens, output_tokens, output_tokens, 1)
        verdict = desk.decide(demand, time.monotonic_ns())
        assert isinstance(verdict, Admit)
        assert verdict.pool == pool
        return verdict.reservation.ticket

    def free(self, ticket: str) -> None:
        """Give it back."""
        self.mesh.desk.end(ticket, Ending.RELEASED)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Chain]:
    """Messages are open; the bulk pool is so slow that what waits for it waits long."""
    async with Scripted() as engine:
        pools: dict[str, dict[str, dict[str, Any]]] = {
            "chat": {"chat-0": {"address": engine.address, "gross_tokens": 6000, "release_tokens_per_s": 4000}},
            "docs": {"docs-0": {"release_tokens_per_s": 100}},
        }
        endpoints = [Endpoint.MESSAGES.value, Endpoint.COUNT_TOKENS.value]
        async with mesh(pools=pools, endpoints=endpoints) as running:
            yield Chain(running, engine)


@asynccontextmanager
async def client(chain: Chain) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Attempts]]:
    """The SDK, and what it sent."""
    attempts = Attempts()
    transport = anthropic.DefaultAsyncHttpxClient(event_hooks=attempts.hooks())
    async with anthropic.AsyncAnthropic(base_url=chain.mesh.url, api_key="none", http_client=transport) as sdk:
        yield sdk, attempts


async def test_answer(chain: Chain) -> None:
    """An answer is the engine's, with the gateway's request id and headers."""
    chain.answer(MESSAGE)
    async with client(chain) as (sdk, attempts):
        raw = await sdk.messages.with_raw_response.create(**ASKED)
        message = await raw.parse()

    assert "Paris." == getattr(message.content[0], "text", None)
    assert raw.headers["x-request-id"] == message._request_id
    assert ("interactive", "64") == (raw.headers["x-llm-lane"], raw.headers["x-llm-max-output-tokens"])
    assert [200] == attempts.statuses


async def test_stream(chain: Chain) -> None:
    """A stream's events arrive as the engine sent them."""
    chain.engine.script(Reply(body=STREAM, headers={"content-type": "text/event-stream"}))
    async with client(chain) as (sdk, _), sdk.messages.stream(**ASKED) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert ["Par", "is."] == texts
    assert ("end_turn", 12) == (final.stop_reason, final.usage.input_tokens)
    await chain.mesh.until_free()


async def test_tools(chain: Chain) -> None:
    """Tools and their results pass, and are part of what is counted."""
    chain.answer({**MESSAGE, "content": [CALL], "stop_reason": "tool_use"})
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a path for requests of one kind"}
    follow_up = [*USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]
    counts = []
    async with client(chain) as (sdk, _):
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "messages": follow_up}):
            raw = await sdk.messages.with_raw_response.create(**{**ASKED, **more})
            assert {"word": "lane"} == getattr((await raw.parse()).content[0], "input", None)
            counts.append(int(raw.headers["x-llm-input-tokens"]))

    assert counts[0] + 50 < counts[1] < counts[2]


async def test_count_tokens(chain: Chain) -> None:
    """The engine counts; the gateway reserves the input, and nothing for output."""
    chain.answer({"input_tokens": 12})
    async with client(chain) as (sdk, _):
        raw = await sdk.messages.with_raw_response.count_tokens(model="qwen3", messages=USER)

        counted = await raw.parse()

    assert 12 == counted.input_tokens
    assert raw.headers["x-llm-reserved-tokens"] == raw.headers["x-llm-input-tokens"]


async def test_413(chain: Chain) -> None:
    """A request that can never run is asked once; its message says why, and its id is found."""
    async with client(chain) as (sdk, attempts):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await sdk.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "word " * 90_000}]})
    error = caught.value

    assert (413, "invalid_request_error") == (error.status_code, error.type)
    assert "prompt is too long: " in error.message
    assert attempts.headers[0]["x-request-id"] == error.request_id
    assert [413] == attempts.statuses


async def test_large_body(chain: Chain) -> None:
    """A body over the cap shows its message too."""
    async with client(chain) as (sdk, attempts):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await sdk.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "x" * 8_000_000}]})

    assert (413, "request_too_large") == (caught.value.status_code, caught.value.type)
    assert "request body is too large: " in caught.value.message
    assert [413] == attempts.statuses


async def test_429_is_retried(chain: Chain) -> None:
    """A busy lane is asked again after Retry-After, not before, and then serves."""
    chain.answer(MESSAGE)
    ticket = chain.occupy("chat", 5000)
    async with client(chain) as (sdk, attempts):
        answer = asyncio.create_task(sdk.messages.create(**{**ASKED, "max_tokens": 1000}))
        await until(lambda: attempts.statuses == [429])
        chain.free(ticket)
        await answer

    assert [429, 200] == attempts.statuses
    assert attempts.started_s[1] - attempts.ended_s[0] >= int(attempts.headers[0]["retry-after"]) >= 1


async def test_a_long_wait_is_not_retried(chain: Chain) -> None:
    """A wait that no SDK would sit out carries `x-should-retry: false`, and is asked once."""
    ticket = chain.occupy("docs", 60_000)
    long = [{"role": "user", "content": "word " * 50_000}]
    async with client(chain) as (sdk, attempts):
        with pytest.raises(anthropic.RateLimitError) as caught:
            await sdk.messages.create(**{**ASKED, "messages": long})
    chain.free(ticket)

    assert [429] == attempts.statuses
    assert "false" == attempts.headers[0]["x-should-retry"]
    assert "no room for" in caught.value.message


async def test_404(chain: Chain) -> None:
    """A model that is not served is said so, once."""
    async with client(chain) as (sdk, attempts):
        with pytest.raises(anthropic.NotFoundError) as caught:
            await sdk.messages.create(**{**ASKED, "model": "another"})

    assert (404, "not_found_error", [404]) == (caught.value.status_code, caught.value.type, attempts.statuses)
