"""The tour: nine things a client can meet, each with how it is documented to come out.

Token counts are those of Qwen3's own tokenizer for these very texts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from extproc.demo.stack import MODEL
from extproc.demo.tour_stage import Request, Stage
from extproc.demo.tour_texts import inspection_log
from extproc.demo.tour_values import Expectation, Ledger, Moment, Observation, Value, reserved_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `notes` are sentences with the facts as fields, shown after it; `during` names that moment."""

    name: str
    title: str
    text: str
    play: Callable[[Stage], Awaitable[Observation]]
    expected: Expectation
    notes: tuple[str, ...] = ()
    during: str = "while it runs"


SUMMARIZE = "Summarize this inspection log in ten sentences.\n\n"

ENDS_EARLY = MappingProxyType({"x-engine-output-tokens": "8"})
"""The simulated engine stops after eight tokens, as a model does that has no more to say."""


def _chat(file: str, content: str, max_tokens: int, *, stream: bool = False) -> Request:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return Request(file, {**body, "stream": True} if stream else body)


SMALL = _chat("chat.json", "Why is the sky blue? Answer in one sentence.", 64)
STREAM = _chat("stream.json", "Tell me a long story about a lighthouse.", 1000, stream=True)
SHORT_STREAM = _chat("short-stream.json", "Tell me a short story about a lighthouse.", 150, stream=True)
FILL = _chat("fill.json", SUMMARIZE + inspection_log(100), 750)
DOCUMENT = _chat("document.json", SUMMARIZE + inspection_log(640), 200)
OVERSIZED = _chat("oversized.json", SUMMARIZE + inspection_log(950), 200)
REQUESTS = (SMALL, STREAM, SHORT_STREAM, FILL, DOCUMENT, OVERSIZED)

FILLING = 6
"""Requests of 4,500 tokens that fill two replicas of 13,500 to the last token."""


async def _small_chat(stage: Stage) -> Observation:
    seen = await stage.observe(SMALL)
    usage = seen.reply.body.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return _with_facts(seen, prompt_tokens=-1 if counted is None else counted)


async def _document(stage: Stage) -> Observation:
    return await stage.observe(DOCUMENT)


async def _oversized(stage: Stage) -> Observation:
    return _with_advice(await stage.observe(OVERSIZED))


async def _full_lane(stage: Stage) -> Observation:
    """Held answers keep their reservations, so the lane stays full until the hold ends."""
    before = await stage.ledger()
    budget_tokens = {name: account.budget_tokens for name, account in before.items() if name.startswith("chat")}
    filling: list[asyncio.Task[int]] = []
    await stage.control("chat", hold=True)
    try:
        filling += [asyncio.create_task(_status(stage, FILL)) for _ in range(FILLING)]
        full = await stage.ledger_when(lambda now: reserved_tokens(now) == budget_tokens)
        refused = await stage.ask(FILL)
        await stage.control("chat", hold=False)
        statuses = await asyncio.gather(*filling)
    finally:
        await stage.control("chat", hold=False)
        for task in filling:
            task.cancel()
    after = await stage.ledger_when(_idle)
    ledger = {Moment.BEFORE: before, Moment.DURING: full, Moment.AFTER: after}
    return Observation(FILL.curl(), refused, ledger, {"filling_completed": statuses.count(200)})


async def _forged(stage: Stage) -> Observation:
    headers = {
        "x-llm-lane": "interactive",
        "x-llm-pool": "chat",
        "x-gateway-destination-endpoint": stage.stack.engines["chat-0"].address,
    }
    return await stage.observe(Request(DOCUMENT.file, DOCUMENT.body, headers=headers))


async def _unknown_path(stage: Stage) -> Observation:
    return await stage.observe(Request(SMALL.file, SMALL.body, path="/v1/embeddings"))


async def _client_leaves(stage: Stage) -> Observation:
    before = await stage.ledger()
    async with stage.stream(STREAM) as stream:
        await stream.read(tokens_max=20)
        during = await stage.ledger()
        replica = stage.stack.replica_at(stream.head.headers.get("x-llm-replica", ""))
    left_s = time.monotonic()
    after = await stage.ledger_when(_idle)
    released_ms = 1 + int(1000 * (time.monotonic() - left_s))
    ledger = {Moment.BEFORE: before, Moment.DURING: during, Moment.AFTER: after}
    facts: dict[str, Value] = {
        "replica": replica,
        "released_ms": released_ms,
        "read_tokens": stream.tokens,
        "generating": await stage.generating_when_idle(replica),
    }
    return Observation(STREAM.curl(), stream.head, ledger, facts)


async def _engines_down(stage: Stage) -> Observation:
    before = await stage.ledger()
    await stage.control("docs", health=503)
    try:
        during = await stage.ledger_when(lambda now: not now["docs-0"].ready)
        refused = await stage.ask(DOCUMENT)
        chat_status = await _status(stage, SMALL)
    finally:
        await stage.control("docs", health=200)
    await stage.ledger_when(lambda now: now["docs-0"].ready)
    again_status = await _status(stage, DOCUMENT)
    after = await stage.ledger_when(_idle)
    ledger = {Moment.BEFORE: before, Moment.DURING: during, Moment.AFTER: after}
    return Observation(DOCUMENT.curl(), refused, ledger, {"chat_status": chat_status, "again_status": again_status})


async def _killed(stage: Stage) -> Observation:
    before = await stage.ledger()
    try:
        async with stage.stream(SHORT_STREAM) as stream:
            await stream.read(tokens_max=10)
            during = await stage.ledger()
            stage.stack.service.kill()
            refused = await stage.ask(SMALL)
            await stream.read()
    finally:
        await stage.restart_service()
    again_status = await _status(stage, SMALL)
    ledger = {Moment.BEFORE: before, Moment.DURING: during, Moment.AFTER: await stage.ledger_when(_idle)}
    facts = {"stream_tokens": stream.tokens, "stream_complete": stream.complete, "again_status": again_status}
    return Observation(SMALL.curl(), refused, ledger, facts)


async def _status(stage: Stage, request: Request) -> int:
    headers = {**request.headers, **ENDS_EARLY}
    return (await stage.ask(Request(request.file, request.body, request.path, headers))).status


def _idle(ledger: Ledger) -> bool:
    return not reserved_tokens(ledger)


def _with_facts(seen: Observation, **facts: Value) -> Observation:
    return Observation(seen.request, seen.reply, seen.ledger, {**seen.facts, **facts})


def _with_advice(seen: Observation) -> Observation:
    error = seen.reply.body.get("error")
    details = error.get("details", {}) if isinstance(error, dict) else {}
    return _with_facts(seen, advice=str(details.get("advice", "")))


BEFORE, DURING, AFTER = Moment

ADMITTED_DOCUMENT = {
    "x-llm-lane": "bulk",
    "x-engine-name": "docs-0",
    "x-llm-input-tokens": "24462",
    "x-llm-max-output-tokens": "200",
    "x-llm-reserved-tokens": "24662",
    "x-llm-reason": None,
}
DOCUMENT_LEDGER = {BEFORE: {}, DURING: {"docs-0": 24_662}, AFTER: {}}
UNTOUCHED: Mapping[Moment, Mapping[str, int]] = {BEFORE: {}, AFTER: {}}

STEPS = (
    Step(
        "small_chat",
        "A small chat",
        "A short question that permits 64 tokens of answer.",
        _small_chat,
        Expectation(
            200,
            headers={
                "x-llm-lane": "interactive",
                "x-llm-input-tokens": "19",
                "x-llm-max-output-tokens": "64",
                "x-llm-reserved-tokens": "83",
                "x-llm-reason": None,
            },
            facts={"replica": "chat-0", "prompt_tokens": 19},
            ledger={BEFORE: {}, DURING: {"chat-0": 83}, AFTER: {}},
        ),
        notes=(
            "It ran on {replica}: the replica with most room, the first by name among equals.",
            "The engine counted for itself: its usage.prompt_tokens is {prompt_tokens}, as in x-llm-input-tokens.",
        ),
    ),
    Step(
        "long_document",
        "A long document",
        "640 entries of an inspection log to be summarized. Size decides: this is bulk, on the other pool.",
        _document,
        Expectation(200, headers=ADMITTED_DOCUMENT, facts={"replica": "docs-0"}, ledger=DOCUMENT_LEDGER),
        notes=("It ran on {replica}; the chat replicas never saw it.",),
    ),
    Step(
        "oversized",
        "A document beyond every limit",
        "950 entries: more input than the bulk lane ever takes. Waiting would not help, so nothing says to retry.",
        _oversized,
        Expectation(
            413,
            headers={
                "x-llm-reason": "context_limit",
                "x-llm-lane": "overflow",
                "x-llm-input-tokens": "36346",
                "retry-after": None,
                "x-should-retry": "false",
            },
            facts={"advice": "summarize or split the input, ask for less output, or use dedicated capacity"},
            ledger=UNTOUCHED,
        ),
    ),
    Step(
        "full_lane",
        "A full lane",
        "The engines hold their answers while six requests of 4,500 tokens fill both chat replicas. This is the next.",
        _full_lane,
        Expectation(
            429,
            headers={
                "x-llm-reason": "token_budget_exhausted",
                "x-llm-lane": "interactive",
                # 4,500 tokens are short and 800 are released in a second: 6 s, and up to 2 s of jitter.
                "retry-after": range(6, 9),
            },
            facts={"filling_completed": FILLING},
            ledger={BEFORE: {}, DURING: {"chat-0": 13_500, "chat-1": 13_500}, AFTER: {}},
        ),
        notes=(
            "No engine was asked. Then the engines went on: {filling_completed} of 6 completed, and the lane is free.",
        ),
        during="while full",
    ),
    Step(
        "forged_headers",
        "Forged headers",
        "The long document again, from a client that writes the gateway's own headers to get onto the fast lane.",
        _forged,
        Expectation(200, headers=ADMITTED_DOCUMENT, facts={"replica": "docs-0"}, ledger=DOCUMENT_LEDGER),
        notes=("Still bulk, still on {replica}: Envoy drops these headers before it looks at any route.",),
    ),
    Step(
        "unknown_path",
        "An unknown path",
        "Only paths whose tokens can be counted are open.",
        _unknown_path,
        Expectation(
            404,
            headers={"x-llm-reason": "unknown_endpoint", "retry-after": None, "x-should-retry": "false"},
            ledger=UNTOUCHED,
        ),
    ),
    Step(
        "client_leaves",
        "A client leaves in the middle of a stream",
        "A story of up to 1,000 tokens; the client hangs up after 20 of them.",
        _client_leaves,
        Expectation(
            200,
            headers={"x-llm-lane": "interactive", "x-llm-reserved-tokens": "1018"},
            facts={"replica": "chat-0", "read_tokens": 20, "released_ms": range(1, 1001), "generating": 0},
            ledger={BEFORE: {}, DURING: {"chat-0": 1018}, AFTER: {}},
        ),
        notes=(
            "Its tokens were back {released_ms} ms after it left.",
            "{replica} works on {generating} prompts: it has stopped generating too.",
        ),
        during="while it streams",
    ),
    Step(
        "engines_down",
        "Engines down",
        "The engines of the docs pool fail their health check. Here is a long document.",
        _engines_down,
        Expectation(
            503,
            headers={
                "x-llm-reason": "capacity_unavailable",
                "x-llm-lane": "bulk",
                # A probe's interval and timeout are 1.2 s: 2 s, and up to 1 s of jitter.
                "retry-after": range(2, 4),
            },
            facts={"chat_status": 200, "again_status": 200},
            ledger={BEFORE: {}, DURING: {}, AFTER: {}},
        ),
        notes=(
            "A small chat at the same time: {chat_status}.",
            "The document again once its engine was healthy: {again_status}.",
        ),
        during="docs down",
    ),
    Step(
        "killed",
        "Tokenlane killed",
        "A short story is streaming when Tokenlane gets SIGKILL. Then comes a new request.",
        _killed,
        Expectation(
            503,
            headers={"x-llm-reason": "admission_unavailable", "retry-after": "1"},
            facts={"stream_tokens": 150, "stream_complete": True, "again_status": 200},
            ledger={BEFORE: {}, DURING: {"chat-0": 168}, AFTER: {}},
        ),
        notes=(
            "Envoy's route table answered the new request: what was not admitted reaches no engine.",
            "The running story was not cut: {stream_tokens} of 150 tokens, and [DONE].",
            "Tokenlane was started again and served a chat: {again_status}.",
        ),
        during="while it streams",
    ),
)
