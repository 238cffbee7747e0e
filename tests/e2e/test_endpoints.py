"""Every endpoint of every engine through the real Envoy: counted, reserved where it runs, and closed unless opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from extproc.core.policy import Endpoint, EngineName
from extproc.counting.profiles import PROFILES
from tests.e2e.mesh import Mesh, mesh
from tests.e2e.recorder import Recorder, Seen

MODEL = "qwen3"
USER = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"name": "look_up", "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}}}
LONG = "a document of many words " * 1200

BODIES: Mapping[Endpoint, Mapping[str, Any]] = {
    Endpoint.CHAT_COMPLETIONS: {"messages": USER, "max_tokens": 16},
    Endpoint.CHAT_COMPLETIONS_BATCH: {"messages": [USER, USER], "max_tokens": 16},
    Endpoint.COMPLETIONS: {"prompt": ["one", "two"], "max_tokens": 16},
    Endpoint.RESPONSES: {"input": "What is the capital of France?", "max_output_tokens": 16},
    Endpoint.MESSAGES: {"messages": USER, "max_tokens": 16, "tools": [TOOL]},
    Endpoint.COUNT_TOKENS: {"messages": USER},
    Endpoint.EMBEDDINGS: {"input": ["one", "two"]},
    Endpoint.RERANK: {"query": "one", "documents": ["two", "three"]},
    Endpoint.RERANK_V1: {"query": "one", "documents": ["two", "three"]},
    Endpoint.RERANK_V2: {"query": "one", "documents": ["two", "three"]},
    Endpoint.SCORE: {"text_1": "one", "text_2": ["two", "three"]},
    Endpoint.SCORE_V1: {"text_1": "one", "text_2": ["two", "three"]},
    Endpoint.CLASSIFY: {"input": "one"},
}
GENERATE: Mapping[EngineName, Mapping[str, Any]] = {
    EngineName.SGLANG: {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
    EngineName.TGI: {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
}


def body(engine: EngineName, endpoint: Endpoint) -> bytes:
    """A body that states its ceiling, so that the engine gets it as it is."""
    content = GENERATE[engine] if endpoint is Endpoint.GENERATE else BODIES[endpoint]
    return orjson.dumps({"model": MODEL, **content})


@dataclass
class Chain:
    """A mesh whose two engines keep what they get."""

    mesh: Mesh
    chat: Recorder
    docs: Recorder

    @property
    def seen(self) -> list[Seen]:
        """All that reached an engine."""
        return [*self.chat.seen, *self.docs.seen]

    async def post(self, path: str, data: bytes, **headers: str) -> tuple[int, Mapping[str, str]]:
        """Status and headers of an answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.mesh.post(data, path, headers=named) as answer:
            await answer.read()
            return answer.status, answer.headers


@asynccontextmanager
async def chain(
    engine: EngineName, model: Mapping[str, Any] | None = None, gross_tokens: int = 300_000, **changes: Any
) -> AsyncIterator[Chain]:
    """A mesh for a model of `engine`, changed by `model`."""
    async with Recorder() as chat, Recorder() as docs:
        for each in (chat, docs):
            each.gate.set()
        pools = {
            name: {f"{name}-0": {"address": f"127.0.0.1:{each.port}", "gross_tokens": gross_tokens}}
            for name, each in _named(chat, docs)
        }
        async with mesh(
            pools=pools, model={"engine": engine.value, **(model or {})}, default_model=MODEL, **changes
        ) as running:
            yield Chain(running, chat, docs)


def _named(chat: Recorder, docs: Recorder) -> list[tuple[str, Recorder]]:
    return [("chat", chat), ("docs", docs)]


@pytest.mark.parametrize("engine", list(EngineName))
async def test_every_endpoint_is_admitted_by_its_count(engine: EngineName) -> None:
    """The engine of the lane gets the very body; the answer says the count, and the reservation ends with it."""
    async with chain(engine, endpoints=[endpoint.value for endpoint in PROFILES[engine]]) as running:
        counter = running.mesh.server._counter
        for endpoint in PROFILES[engine]:
            data = body(engine, endpoint)
            demand = counter.count_now(counter.read(endpoint, data)).demand
            status, headers = await running.post(endpoint.value, data)
            await running.mesh.until_free()

            counts = demand.input_tokens, demand.max_output_tokens, demand.reserve_tokens
            names = ("input-tokens", "max-output-tokens", "reserved-tokens")
            assert (200, "interactive") == (status, headers["x-llm-lane"]), endpoint
            assert counts == tuple(int(headers[f"x-llm-{name}"]) for name in names), endpoint
            assert (endpoint.value, data) == (running.chat.seen[-1].path, running.chat.seen[-1].body)
        assert [] == running.docs.seen
        assert len(PROFILES[engine]) == sum(running.mesh.ended().values())


async def test_large_input_only_requests_are_bulk() -> None:
    """Embeddings of a long text go to the bulk pool, with no output reserved."""
    async with chain(EngineName.VLLM, endpoints=["/v1/embeddings"]) as running:
        data = orjson.dumps({"model": MODEL, "input": LONG})
        status, headers = await running.post("/v1/embeddings", data)

        assert (200, "bulk", headers["x-llm-input-tokens"]) == (
            status,
            headers["x-llm-lane"],
            headers["x-llm-reserved-tokens"],
        )
        assert [data] == [seen.body for seen in running.docs.seen]


async def test_what_is_not_opened_is_closed() -> None:
    """Under a policy that says nothing of endpoints, only chats and completions run; a bypass passes uncounted."""
    async with chain(EngineName.VLLM) as running:
        opened = {Endpoint.CHAT_COMPLETIONS, Endpoint.COMPLETIONS}
        statuses = {
            endpoint: (await running.post(endpoint.value, body(EngineName.VLLM, endpoint)))[0]
            for endpoint in BODIES
            if endpoint not in opened
        }
        assert {404} == set(statuses.values())
        assert [] == running.seen

        status, headers = await running.post("/tokenize", b'{"prompt": "one"}')
        assert (200, "bypass") == (status, headers["x-llm-lane"])
        assert [("/tokenize", b'{"prompt": "one"}')] == [(seen.path, seen.body) for seen in running.seen]


REPLACING: list[tuple[EngineName, Endpoint, Mapping[str, Any]]] = [
    (EngineName.VLLM, Endpoint.CHAT_COMPLETIONS, {"chat_template": "{{ messages }}"}),
    (EngineName.VLLM, Endpoint.CHAT_COMPLETIONS, {"kv_transfer_params": {"prompt_token_ids": [1]}}),
    (EngineName.VLLM, Endpoint.COMPLETIONS, {"prompt_embeds": "AAAA"}),
    (EngineName.VLLM, Endpoint.RESPONSES, {"previous_response_id": "resp_1"}),
    (EngineName.VLLM, Endpoint.RESPONSES, {"background": True}),
    (EngineName.SGLANG, Endpoint.CHAT_COMPLETIONS, {"input_ids": [1, 2, 3]}),
    (EngineName.SGLANG, Endpoint.GENERATE, {"input_embeds": [[0.5]]}),
]


@pytest.mark.parametrize("engine", [EngineName.VLLM, EngineName.SGLANG])
async def test_nothing_replaces_a_counted_prompt(engine: EngineName) -> None:
    """Fields that would run another prompt than the counted one are refused, and reach no engine."""
    async with chain(engine, endpoints=[endpoint.value for endpoint in PROFILES[engine]]) as running:
        for _, endpoint, more in (each for each in REPLACING if each[0] is engine):
            data = orjson.dumps({**orjson.loads(body(engine, endpoint)), **more})
            status, headers = await running.post(endpoint.value, data)

            assert (400, "malformed_request") == (status, headers["x-llm-reason"]), more
        assert [] == running.seen


async def test_nobody_jumps_the_engines_queue() -> None:
    """A priority is taken out of the body, and the headers that engines obey out of the request."""
    async with chain(EngineName.SGLANG) as running:
        content = orjson.loads(body(EngineName.SGLANG, Endpoint.CHAT_COMPLETIONS))
        status, _ = await running.post(
            Endpoint.CHAT_COMPLETIONS.value,
            orjson.dumps({**content, "priority": -5}),
            x_override_priority="-5",
            x_override_rid="another",
            x_vllm_priority="-5",
            x_data_parallel_rank="3",
        )
        await asyncio.sleep(0)
        (seen,) = running.seen

        assert 200 == status
        assert content == orjson.loads(seen.body)
        assert set() == seen.names & {
            "x-override-priority",
            "x-override-rid",
            "x-vllm-priority",
            "x-data-parallel-rank",
        }
