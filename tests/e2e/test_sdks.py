"""OpenAI's official SDKs against the gateway: answers, streams and tools pass, and every refusal is understood.

An SDK reads status, `x-should-retry`, `retry-after-ms`, `error.message` and a request id; how often it really asks is
counted on its own HTTP client and, independently, by the desk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.e2e.mesh import COMPLETIONS, Mesh, chat, ids, mesh, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

TOKENS = 6
TEXT = " word" * TOKENS
"""What a simulated engine answers when it is permitted this many tokens."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up in a dictionary.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "language": {"type": "string", "enum": ["en", "de"]}},
                "required": ["word"],
            },
        },
    }
]

NODE_VERSION = "7.59.0"
NODE_INSTALL_S_MAX = 120.0
NODE_CLIENT = Path(__file__).with_name("openai_client.mjs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain() -> AsyncIterator[Mesh]:
    """A chain whose bulk pool is slow: what waits for it waits long."""
    pools: dict[str, dict[str, dict[str, Any]]] = {
        "chat": {"chat-0": {"gross_tokens": 6000, "release_tokens_per_s": 4000}},
        "docs": {"docs-0": {"release_tokens_per_s": 100}},
    }
    async with mesh(pools=pools) as running:
        yield running


@dataclass
class Attempts:
    """What an SDK sent: when, and what came back."""

    started_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def hooks(self) -> dict[str, list[Any]]:
        """Event hooks of an HTTP client."""
        clock = asyncio.get_running_loop().time

        async def sent(_request: Any) -> None:
            self.started_s.append(clock())

        async def received(response: Any) -> None:
            self.ended_s.append(clock())
            self.statuses.append(response.status_code)
            self.headers.append(response.headers)

        return {"request": [sent], "response": [received]}


@asynccontextmanager
async def _openai(chain: Mesh, max_retries: int = 2) -> AsyncIterator[tuple[openai.AsyncOpenAI, Attempts]]:
    attempts = Attempts()
    transport = openai.DefaultAsyncHttpxClient(event_hooks=attempts.hooks())
    async with openai.AsyncOpenAI(
        base_url=f"{chain.url}/v1", api_key="none", max_retries=max_retries, http_client=transport
    ) as client:
        yield client, attempts


def _refusals(chain: Mesh) -> int:
    samples = [s for metric in chain.server.metrics.registry.collect() for s in metric.samples]
    return sum(int(s.value) for s in samples if s.name == "tokenlane_refused_requests_total")


@asynccontextmanager
async def _occupied(chain: Mesh, engine: str, body: Mapping[str, Any]) -> AsyncIterator[asyncio.Event]:
    """The engine holds `body` until the event is set or the block ends."""
    released = asyncio.Event()

    async def occupy() -> None:
        await chain.control(engine, hold=True)
        async with chain.post(body, COMPLETIONS) as answer:
            await answer.read()

    async def release() -> None:
        await released.wait()
        await chain.control(engine, hold=False)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(occupy())
        tasks.create_task(release())
        await until(lambda: bool(chain.desk.ledger.open))
        try:
            yield released
        finally:
            released.set()
    await chain.until_free()


async def _until_refused(chain: Mesh, count: int) -> None:
    await until(lambda: _refusals(chain) >= count)


@asynccontextmanager
async def _unready(chain: Mesh) -> AsyncIterator[None]:
    """No replica of pool `chat` is ready."""
    account = chain.desk.ledger.accounts["chat-0"]
    await chain.control("chat-0", health=503)
    try:
        await until(lambda: not account.ready)
        yield
    finally:
        await chain.control("chat-0", health=200)
        await until(lambda: account.ready)


async def test_openai_answer(chain: Mesh) -> None:
    """An answer is the engine's, with the gateway's request id and headers."""
    async with _openai(chain) as (client, attempts):
        raw = await client.chat.completions.with_raw_response.create(**chat(max_tokens=TOKENS))
        answer = raw.parse()
        completion = await client.completions.create(**ids(10, TOKENS))

    assert (TEXT, "length") == (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert (TEXT, 10) == (completion.choices[0].text, completion.usage.prompt_tokens if completion.usage else None)
    assert ("interactive", str(TOKENS)) == tuple(raw.headers[f"x-llm-{name}"] for name in ("lane", "max-output-tokens"))
    assert answer._request_id
    assert raw.headers["x-request-id"] == answer._request_id
    assert [200, 200] == attempts.statuses


async def test_openai_stream(chain: Mesh) -> None:
    """A stream arrives in chunks, with usage at its end when asked for."""
    async with _openai(chain) as (client, _):
        stream = await client.chat.completions.create(
            **chat(max_tokens=TOKENS, stream=True, stream_options={"include_usage": True})
        )
        chunks = [chunk async for chunk in stream]

    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert TEXT == "".join(texts)
    assert len([text for text in texts if text]) > 1
    assert TOKENS == chunks[-1].usage.completion_tokens


async def test_openai_tools(chain: Mesh) -> None:
    """Tool schemas pass, and are part of what is counted."""
    counts, extras = [], list[dict[str, Any]]([{}, {"tools": TOOLS, "tool_choice": "auto"}])
    async with _openai(chain) as (client, _):
        for more in extras:
            raw = await client.chat.completions.with_raw_response.create(**chat(max_tokens=TOKENS, **more))
            assert raw.parse().choices[0].message.content == TEXT
            counts.append(int(raw.headers["x-llm-input-tokens"]))

    assert counts[1] > counts[0] + 50


async def test_openai_413(chain: Mesh) -> None:
    """A request that can never run is asked once, and its message says why."""
    before = _refusals(chain)
    async with _openai(chain) as (client, attempts):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**chat(max_tokens=100_000))
    error = caught.value

    assert (413, "context_limit", "invalid_request_error") == (error.status_code, error.code, error.type)
    assert "prompt is too long: " in error.message
    assert attempts.headers[0]["x-request-id"] == error.request_id
    assert ([413], before + 1) == (attempts.statuses, _refusals(chain))


async def test_openai_large_body(chain: Mesh) -> None:
    """A body over the cap shows its message too."""
    async with _openai(chain) as (client, attempts):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**chat("x" * 8_000_000))

    assert (413, "body_too_large") == (caught.value.status_code, caught.value.code)
    assert "request body is too large: " in caught.value.message
    assert [413] == attempts.statuses


async def test_openai_429_is_retried(chain: Mesh) -> None:
    """A busy lane is asked again after Retry-After, not before, and then serves."""
    before = _refusals(chain)
    async with _occupied(chain, "chat-0", ids(4000, 1000)) as released, _openai(chain) as (client, attempts):
        answer = asyncio.create_task(client.completions.create(**ids(1000, TOKENS)))
        await _until_refused(chain, before + 1)
        released.set()
        text = (await answer).choices[0].text

    assert (TEXT, [429, 200]) == (text, attempts.statuses)
    assert before + 1 == _refusals(chain)
    assert attempts.started_s[1] - attempts.ended_s[0] >= int(attempts.headers[0]["retry-after"]) >= 1


async def test_openai_gives_up_on_a_long_wait(chain: Mesh) -> None:
    """A wait that no SDK would sit out carries `x-should-retry: false`, and is asked once."""
    before = _refusals(chain)
    async with _occupied(chain, "docs-0", ids(60_000, 4000)), _openai(chain) as (client, attempts):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**ids(50_000, TOKENS))

    assert ("token_budget_exhausted", [429], before + 1) == (caught.value.code, attempts.statuses, _refusals(chain))
    assert ("false", "60") == tuple(attempts.headers[0][name] for name in ("x-should-retry", "retry-after"))
    assert "no room for" in caught.value.message


async def test_openai_503(chain: Mesh) -> None:
    """When no replica is ready, the error says so; retries are the SDK's, after our time."""
    async with _unready(chain), _openai(chain, max_retries=1) as (client, attempts):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**chat())

    assert (503, "capacity_unavailable") == (caught.value.status_code, caught.value.code)
    assert "no replica of the interactive lane is ready" in caught.value.message
    assert [503, 503] == attempts.statuses
    assert attempts.started_s[1] - attempts.ended_s[0] >= int(attempts.headers[0]["retry-after"])


def _node_module() -> Path:
    """The pinned npm client, installed once beside the Python packages; skips where that cannot be."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not here")
    home = Path(sys.prefix) / "node" / f"openai-{NODE_VERSION}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            fresh = Path(folder) / "fresh"
            fresh.mkdir()
            _npm_install(fresh)
            with contextlib.suppress(OSError):  # another run was faster
                fresh.rename(home)
    return home / "node_modules" / "openai" / "index.mjs"


def _npm_install(folder: Path) -> None:
    command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund"]
    command += ["--no-package-lock", "--no-update-notifier", "--fetch-retries=0", f"openai@{NODE_VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NODE_INSTALL_S_MAX)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install openai {NODE_VERSION} within {NODE_INSTALL_S_MAX:.0f} s")
    if done.returncode != 0:
        pytest.skip(f"npm cannot install openai {NODE_VERSION}: {done.stderr.strip()[-300:]}")


@dataclass
class Node:
    """The npm client in its process."""

    process: asyncio.subprocess.Process

    async def call(self, body: Mapping[str, Any], max_retries: int = 2) -> Any:
        """One call of chat.completions.create, with all its attempts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"body": body, "maxRetries": max_retries}).encode() + b"\n")
        await self.process.stdin.drain()
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 20))


@asynccontextmanager
async def _node(chain: Mesh) -> AsyncIterator[Node]:
    process = await asyncio.create_subprocess_exec(
        "node",
        str(NODE_CLIENT),
        str(await asyncio.to_thread(_node_module)),
        f"{chain.url}/v1",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        yield Node(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _statuses(outcome: Any) -> list[int]:
    return [attempt["status"] for attempt in outcome["attempts"]]


def _pauses_s(outcome: Any) -> list[float]:
    """How long the client slept before each further attempt."""
    attempts = outcome["attempts"]
    return [(after["startedMs"] - before["endedMs"]) / 1000 for before, after in pairwise(attempts)]


@pytest.mark.timeout(180)
async def test_openai_for_node(chain: Mesh) -> None:
    """The npm client reads answers, streams and tools, retries after Retry-After, and obeys a refusal for good."""
    async with _node(chain) as node:
        for more in ({}, {"stream": True}, {"tools": TOOLS}):
            outcome = await node.call(chat(max_tokens=TOKENS, **more))

            assert (TEXT, [200]) == (outcome.get("text"), _statuses(outcome))

        too_long = await node.call(chat(max_tokens=100_000))
        too_large = await node.call(chat("x" * 8_000_000))
        before = _refusals(chain)
        async with _occupied(chain, "chat-0", ids(4000, 1000)) as released:
            answer = asyncio.create_task(node.call(chat("word " * 1000, max_tokens=TOKENS)))
            await _until_refused(chain, before + 1)
            released.set()
            retried = await answer
        async with _occupied(chain, "docs-0", ids(60_000, 4000)):
            hopeless = await node.call(chat("word " * 50_000, max_tokens=TOKENS))
        async with _unready(chain):
            unready = await node.call(chat(), max_retries=0)

    assert ([413], "context_limit") == (_statuses(too_long), too_long["error"]["code"])
    assert "prompt is too long: " in too_long["error"]["message"]
    assert too_long["error"]["requestId"]
    assert ([413], "body_too_large") == (_statuses(too_large), too_large["error"]["code"])
    assert (TEXT, [429, 200]) == (retried.get("text"), _statuses(retried))
    assert _pauses_s(retried)[0] >= int(retried["attempts"][0]["headers"]["retry-after"]) >= 1
    assert ([429], "RateLimitError") == (_statuses(hopeless), hopeless["error"]["name"])
    assert "false" == hopeless["attempts"][0]["headers"]["x-should-retry"]
    assert ([503], "capacity_unavailable") == (_statuses(unready), unready["error"]["code"])
    assert "no replica of the interactive lane is ready" in unready["error"]["message"]
