"""The handed bodies, good and bad, through the real Envoy: ceiling, sequences and lane, or one named refusal."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from extproc.core.policy import EngineName
from extproc.counting.profiles import PROFILES
from tests.counting.test_malformed import DECIDED_OTHERWISE, allowed_statuses
from tests.e2e.test_endpoints import Chain, chain

pytestmark = pytest.mark.timeout(120)

CONTEXT_TOKENS = 8192
"""Context of the engine that the cases speak of."""

BULK = {"pool": "docs", "input_tokens_max": 150_000, "total_tokens_max": 200_000}
POLICY: Mapping[str, Any] = {
    "context_tokens_max": CONTEXT_TOKENS,
    "total_over_context": "clamp",
    "default_ceiling": "context",
    "aliases": ["test-model"],
    "lanes": {"interactive": {"pool": "chat"}, "bulk": BULK},
}
"""What the engine itself does: the cases are compared with that."""

NATIVE = {"105-tgi-generate.json": EngineName.TGI, "106-sglang-generate.json": EngineName.SGLANG}
"""Bodies for another engine than vLLM."""

REFUSED_HERE = {
    "15-chat-beam-search.json": 400,  # reads its prompt again at every step
    "35-chat-continue-default-generate.json": 400,  # the engine refuses it too, once it renders
    "48-chat-image-http-url.json": 400,  # media for which this policy declares no charge
    "49-chat-image-multi.json": 400,
    "50-chat-input-audio.json": 400,
    "51-chat-video-url.json": 400,
    "52-chat-file-part.json": 400,
    "76-chat-kv-transfer-prompt-ids.json": 400,  # "strip or 400": ids that replace the counted prompt
    "77-chat-sglang-input-ids.json": 400,
    "89-cmpl-suffix.json": 400,  # the engine refuses it for every model without a template for it
    "95-resp-background-flex.json": 400,  # runs when nobody is connected any more
}
"""Bodies that could be admitted."""

OVER_CONTEXT = {"11-chat-ceiling-over-context.json": 413}
"""Where the design note's 413 wins over the engine's 400."""

BEST_OF_IGNORED = {"86-cmpl-best-of.json": 2}
"""Sequences where the engine itself ignores `best_of`, and so runs `n`."""

CHOSEN = {
    **dict.fromkeys(("017", "021", "022", "029", "046", "048", "050", "059", "060", "061", "062"), 200),
    **dict.fromkeys(("072", "074", "078", "079", "082", "083", "115", "116", "117"), 200),
    **dict.fromkeys(("036", "037", "096", "119"), 400),
    "103": 413,
    "125": 404,
    **dict.fromkeys(("104", "105", "106", "107", "111"), 415),
}
"""Our answer where an expectation offers a choice: values are coerced and keys repeated as the engine does it, what can
be decoded is, and what is not called JSON is not read."""


def allowed(case: Mapping[str, Any]) -> set[int]:
    """Statuses that the expectation of a bad body allows."""
    name = case["file"].partition(".")[0]
    if name in DECIDED_OTHERWISE:
        return {DECIDED_OTHERWISE[name]}
    found = allowed_statuses(case["gateway_should"], case["vllm_0_33_0_front_door"]["status"])
    return found | {200} if "decode" in case["gateway_should"] else found


def good_bodies(shared: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Expectation and body of each case in bodies/."""
    for path in sorted((shared / "cases" / "bodies").glob("*.expect.json")):
        case = json.loads(path.read_bytes())
        yield case, path.with_name(case["file"]).read_bytes()


def bad_bodies(shared: Path) -> Iterator[tuple[str, dict[str, Any], bytes]]:
    """Name, expectation and body of each case in malformed/ that is a body."""
    for path in sorted((shared / "cases" / "malformed").glob("*.expect.json")):
        case = json.loads(path.read_bytes())
        file = path.with_name(case["file"])
        if file.suffix == ".body":
            packed = path.with_name(f"{file.name}.gz")
            yield path.name[:3], case, file.read_bytes() if file.exists() else gzip.decompress(packed.read_bytes())


def ceiling(case: Mapping[str, Any], input_tokens: int) -> tuple[int, int]:
    """The ceiling of one sequence and the sum over all, as the engine runs them."""
    stated, sequences = case["ceiling"]["per_sequence"], case["ceiling"]["multiplicity"]
    sequences = BEST_OF_IGNORED.get(case["file"], sequences)
    tokens = stated if isinstance(stated, int) else CONTEXT_TOKENS - input_tokens
    return tokens, tokens * sequences


@pytest.mark.parametrize("engine", list(EngineName))
async def test_handed_bodies(shared: Path, engine: EngineName) -> None:
    """A good body reserves its input and what its ceiling lets all sequences run, in the lane that it asked for."""
    open_paths = [endpoint.value for endpoint in PROFILES[engine]]
    async with chain(engine, endpoints=open_paths, model=POLICY) as running:
        for case, body in good_bodies(shared):
            if NATIVE.get(case["file"], EngineName.VLLM) is not engine:
                continue
            before = len(running.seen)
            status, headers = await running.post(case["endpoint"].removeprefix("POST "), body)
            await running.mesh.until_free()
            expected = {**REFUSED_HERE, **OVER_CONTEXT}.get(case["file"], 200 if case["valid"] else 400)

            assert expected == status, case["file"]
            assert len(running.seen) == before + (status == 200)
            if status != 200:
                continue
            names = ("input-tokens", "max-output-tokens", "reserved-tokens")
            input_tokens, per_sequence, reserved = (int(headers[f"x-llm-{name}"]) for name in names)
            lowered = case["intent"]["declared"] == "flex"
            assert (per_sequence, reserved - input_tokens) == ceiling(case, input_tokens), case["file"]
            assert ("intent" if lowered else "size") == headers["x-llm-lane-reason"], case["file"]
            assert headers["x-llm-lane"] == "bulk" or not lowered


async def test_handed_malformed_bodies(shared: Path) -> None:
    """A bad body ends in one named status, reserves nothing and reaches no engine."""
    seen, wrong = 0, []
    async with chain(EngineName.VLLM, model=POLICY) as running:
        for number, case, body in bad_bodies(shared):
            seen += 1
            before = len(running.seen)
            status, content = await _send(running, case, body)
            choices = allowed(case)
            expected = CHOSEN[number] if number in CHOSEN else min(choices)
            if status != expected or (choices and status not in choices) or (number not in CHOSEN and len(choices) > 1):
                wrong.append((case["file"], status, case["gateway_should"]))
            assert len(running.seen) == before + (status == 200), case["file"]
            if status != 200:
                error = json.loads(content)["error"]
                assert {"message", "type", "code", "details"} <= error.keys()
        await running.mesh.until_free()

    assert seen > 90
    assert [] == wrong


async def _send(running: Chain, case: Mapping[str, Any], body: bytes) -> tuple[int, bytes]:
    target = running.mesh.url + case["path"]
    headers = case["headers"]
    async with running.mesh.client.post(
        target, data=body, headers=headers, skip_auto_headers=["content-type"]
    ) as answer:
        return answer.status, await answer.read()
