"""The whole path from Envoy's bytes to the verdict, under inputs that nobody would write.

`TOKENLANE_FUZZ_INPUTS` sets how many there are; more than the default are drawn at random instead of by a fixed seed.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from extproc.core.admission import Desk
from extproc.core.policy import Endpoint, EngineName
from extproc.core.rejection import STATUS
from extproc.core.values import Reason
from extproc.counting import Counter
from extproc.counting.profiles import PROFILES
from extproc.demo.stack import QWEN3_DIR
from extproc.service.book import Book
from extproc.service.metrics import Metrics
from extproc.service.servicer import Servicer
from extproc.settings import PolicySection, freeze
from tests.policies import document, replica

INPUTS_DEFAULT = 21_000
VARIANTS = 9
"""Inputs that follow each of Hypothesis."""

INPUTS = int(os.environ.get("TOKENLANE_FUZZ_INPUTS", INPUTS_DEFAULT))

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "And now?"},
]
BLOCKS = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
]
CHAT = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 9, "n": 2, "stream": False}
GENERATE = {
    "text": "Once",
    "inputs": "Once",
    "sampling_params": {"max_new_tokens": 5, "n": 1},
    "parameters": {"max_new_tokens": 5, "best_of": 2, "do_sample": True, "truncate": 4},
}
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT_COMPLETIONS: {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 1},
    Endpoint.CHAT_COMPLETIONS_BATCH: {**CHAT, "messages": [MESSAGES[:2], MESSAGES[:1]]},
    Endpoint.COMPLETIONS: {"prompt": ["Once", "upon"], "max_tokens": 5, "n": 2, "echo": False, "best_of": 2},
    Endpoint.RESPONSES: {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    },
    Endpoint.MESSAGES: {"messages": BLOCKS, "system": "Be brief.", "max_tokens": 9, "tools": [{"name": "f"}]},
    Endpoint.COUNT_TOKENS: {"messages": BLOCKS, "system": [{"type": "text", "text": "Be brief."}]},
    Endpoint.EMBEDDINGS: {"input": ["one", "two"], "truncate_prompt_tokens": 3},
    Endpoint.RERANK: {"query": "one", "documents": ["two", "three"], "top_n": 1},
    Endpoint.SCORE: {"text_1": "one", "text_2": ["two", "three"]},
    Endpoint.CLASSIFY: {"input": ["one", "two"]},
    Endpoint.GENERATE: GENERATE,
}
BODIES |= {
    Endpoint.RERANK_V1: BODIES[Endpoint.RERANK],
    Endpoint.RERANK_V2: BODIES[Endpoint.RERANK],
    Endpoint.SCORE_V1: BODIES[Endpoint.SCORE],
}

NUMBERS = st.sampled_from([0, 1, 2, -1, 7, 0.5, 5.0, 1e300, 2**31, 2**63, 2**64, -(2**70), float("inf"), float("nan")])
WORDS = st.sampled_from(
    [
        "",
        " ",
        "5",
        "<|im_start|>",
        "<|im_end|>",
        "{}",
        "[",
        "user",
        "assistant",
        "tool",
        "text",
        "flex",
        "\x00",
        "\ud800",
    ]
)
FIELD_NAMES = (
    [
        "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "messages", "content", "role", "type",
        "text", "prompt", "input", "tools", "tool_calls", "function", "arguments", "name", "stream", "stream_options",
        "priority", "input_ids", "chat_template", "kv_transfer_params", "prompt_token_ids", "truncate_prompt_tokens",
        "continue_final_message", "add_generation_prompt", "add_special_tokens", "reasoning_effort", "service_tier",
        "documents", "sampling_params", "parameters", "image_url", "url", "input_audio", "details", "echo", "logprobs",
        "previous_response_id",
    ]
)  # fmt: skip
NAMES = st.sampled_from(FIELD_NAMES)
IMAGE_URL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJ"
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
POOL: list[Any] = [
    None, True, False, 0, 1, 3, -1, 0.5, 5.0, 1e300, 2**31, 2**64, float("nan"), "", "5", "x", "\ud800", "<|im_end|>",
    [], {}, [[]], [""], [1, 2], [None], {"role": "user", "content": "x"}, {"type": "text", "text": "x"}, MESSAGES,
    IMAGE, [IMAGE], {"role": "user", "content": [IMAGE, {"type": "text", "text": "x"}]}, IMAGE_URL, "image_url",
]  # fmt: skip
FRAGMENTS = [b"", b"{", b"]", b'"', b",", b"1", b"null", b"\\", b"\xff", b"1e999", b"[" * 300, b"9" * 5000]
KINDS = ["set", "drop", "repeat", "add"]
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


@dataclass(frozen=True)
class Change:
    """A change of one place of a document, which `at` picks among all places."""

    at: int
    kind: str
    name: str
    value: Any

    def apply(self, body: dict[str, Any]) -> None:
        """Make it."""
        places = list(_places(body)) or [(body, self.name)]
        holder, key = places[self.at % len(places)]
        match self.kind:
            case "set":
                holder[key] = self.value
            case "drop" if key in holder or isinstance(holder, list):
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder.extend(holder[key : key + 1] * 20)
            case _:
                body[self.name] = self.value


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    items = list(node.items() if isinstance(node, dict) else enumerate(node))
    for key, value in items:
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


CHANGES = st.builds(Change, st.integers(0, 99), st.sampled_from(KINDS), NAMES, VALUES)


@st.composite
def changed_bodies(draw: st.DrawFn, endpoint: Endpoint, model: str) -> bytes:
    """A valid body for `endpoint` after some changes of what it says, and perhaps of its bytes."""
    body = json.loads(json.dumps({"model": model, **BODIES[endpoint]}))
    for change in draw(st.lists(CHANGES, max_size=4)):
        change.apply(body)
    raw = json.dumps(body).encode()
    for at, patch in draw(st.lists(st.tuples(st.integers(0, 999), st.binary(max_size=3)), max_size=1)):
        place = at % (len(raw) + 1)
        raw = raw[:place] + patch + raw[place + len(patch) :]
    return raw


@st.composite
def requests(draw: st.DrawFn, engine: EngineName) -> tuple[dict[str, str], bytes]:
    """Headers and body of a request to an endpoint of `engine`."""
    endpoint = draw(st.sampled_from(sorted(PROFILES[engine])))
    body = draw(changed_bodies(endpoint, engine.value)) if draw(st.integers(0, 19)) else draw(st.binary(max_size=40))
    headers = {":method": "POST", ":path": endpoint.value, "content-type": "application/json", "x-request-id": "r"}
    match draw(st.integers(0, 39)):
        case 0:
            headers["content-encoding"] = "gzip"
            body = gzip.compress(body, mtime=0)
        case 1:
            headers["content-encoding"] = draw(st.sampled_from(["gzip", "deflate"]))
        case 2:
            headers[draw(st.sampled_from(sorted(headers)))] = (
                draw(st.text(max_size=9)).encode("utf-8", "replace").decode()
            )
    return headers, body


def variants(body: bytes, seed: int) -> Iterator[bytes]:
    """`body`, and others near it: drawn by a generator that is quicker than Hypothesis."""
    yield body
    rng = random.Random(seed)
    for _ in range(VARIANTS):
        try:
            near = json.loads(body)
            for _ in range(rng.randint(1, 3)):
                kind, name = rng.choice(KINDS), rng.choice(FIELD_NAMES)
                Change(rng.randrange(100), kind, name, copy.deepcopy(rng.choice(POOL))).apply(near)
            yield json.dumps(near).encode()
        except (ValueError, TypeError, IndexError, AttributeError):  # no object any more, or none from the start
            at = rng.randrange(len(body) + 1)
            yield body[:at] + rng.choice(FRAGMENTS) + body[at + rng.randrange(4) :]


class _Link:
    """The transport of one stream, whose client reads the answer and leaves when there is no more."""

    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        values = [base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
        head = pb.HttpHeaders(headers=base_pb2.HeaderMap(headers=values))
        self._messages = iter(
            [
                pb.ProcessingRequest(request_headers=head),
                pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)),
            ]
        )
        self._answered = asyncio.Event()
        self.before_end: Callable[[], None]
        self.replies: list[pb.ProcessingResponse] = []

    async def read(self) -> Any:
        message = next(self._messages, None)
        if message is not None:
            return message
        await self._answered.wait()
        self.before_end()
        return grpc.aio.EOF

    async def write(self, reply: bytes) -> None:
        self.replies.append(pb.ProcessingResponse.FromString(reply))
        if not self.replies[-1].HasField("request_headers"):
            self._answered.set()


class Chain:
    """A servicer over a real desk and counter, and what it has done."""

    def __init__(self) -> None:
        lanes = {
            "interactive": {"pool": "chat"},
            "bulk": {"pool": "docs", "input_tokens_max": 8_000, "total_tokens_max": 16_000},
        }
        model = {"tokenizer_dir": str(QWEN3_DIR), "context_tokens_max": 16_000, "lanes": lanes}
        content = document(chat={"chat-0": replica(9101, gross_tokens=20_000)}, endpoints=sorted(Endpoint))
        charges = {"image": {"tokens": 5, "tokens_max": 900, "patch_side_pixels": 28}, "audio": {"tokens": 300}}
        content["models"] = {
            engine.value: {**model, "engine": engine.value, "media": {} if engine is EngineName.TGI else charges}
            for engine in EngineName
        }
        self.desk = Desk(freeze(PolicySection.model_validate(content), Path()), "i")
        for name in self.desk.ledger.accounts:
            self.desk.set_ready(name, ready=True)
        self.metrics = Metrics(self.desk)
        self.counter = Counter(self.desk.policy)
        self.servicer = Servicer(
            self.desk, self.counter, self.metrics, Book(self.metrics, None), detaching=lambda: False
        )
        self.verdicts = {"admitted": 0, "refused": 0}

    async def judge(self, headers: dict[str, str], body: bytes) -> None:
        """Run one request through, and judge what came of it."""
        link = _Link(headers, body)
        reserved: list[int] = []
        link.before_end = lambda: reserved.extend(r.reserve_tokens for r in self.desk.ledger.open.values())
        await self.servicer.process(None, link)  # type: ignore[arg-type]  # only read and write are used
        last = link.replies[-1]
        if last.HasField("immediate_response"):
            error = json.loads(last.immediate_response.body)["error"]
            assert last.immediate_response.status.code == STATUS[Reason(error["code"])]
            assert error["code"] != Reason.INTERNAL_ERROR
            assert [] == reserved
            self.verdicts["refused"] += 1
        else:
            assert last.HasField("request_body")
            assert 1 == len(reserved)
            assert reserved[0] > 0
            mutation = last.request_body.response.body_mutation
            json.loads(mutation.body or body)
            self.verdicts["admitted"] += 1
        assert (0, 0, 0) == (self.desk.streams, self.desk.intake_bytes, len(self.desk.ledger.open))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all inputs."""
    with asyncio.Runner() as running:
        yield running


@pytest.mark.timeout(3600 if INPUTS > INPUTS_DEFAULT else 300)
@pytest.mark.parametrize("engine", list(EngineName))
def test_every_input_ends_in_one_verdict(engine: EngineName, runner: asyncio.Runner) -> None:
    """Whatever comes is admitted with a positive reservation or refused by name; nothing fails, nothing stays."""
    chain = Chain()

    @settings(
        max_examples=INPUTS // len(EngineName) // (1 + VARIANTS),
        derandomize=INPUTS == INPUTS_DEFAULT,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(engine), st.integers(0, 2**32))
    def judge(request: tuple[dict[str, str], bytes], seed: int) -> None:
        headers, first = request
        with capture_logs():
            for body in variants(first, seed):
                note(repr(body))
                runner.run(chain.judge(headers, body))

    try:
        judge()
    finally:
        chain.counter.close()

    assert chain.metrics.registry.get_sample_value("tokenlane_internal_errors_total") == 0
    assert min(chain.verdicts.values()) > INPUTS / 50
    assert sum(chain.verdicts.values()) >= INPUTS // len(EngineName)
