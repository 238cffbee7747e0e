"""Counts that engines gave, and how many of them are given here: with each library, whole and by segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from extproc.core.policy import Endpoint, TokenizerBackend
from extproc.core.stream import Counted
from extproc.core.values import Fault
from extproc.counting import Counter, segments
from extproc.counting.fast import installed
from tests.counting.models import CHAT, CLAMP, COMPLETIONS, outcome, policy, status

CORPUS = "qwen3_corpus_and_bodies"

RECORDINGS = {name: name for name in ("qwen3", "deepseek_v3", "gemma3", "llama3_1")} | {CORPUS: "qwen3"}
"""Recording -> the directory of its tokenizer."""

REFUSED_HERE = {
    "bodies/76-chat-kv-transfer-prompt-ids.json",  # ids that replace the counted prompt
    "bodies/77-chat-sglang-input-ids.json",  # the same for another engine; this one ignores them
}
"""Bodies that the engine runs and the gateway refuses."""


class Body(NamedTuple):
    """A body and what the engine made of it: the tokens of each prompt and the ceilings that it said, or a refusal."""

    name: str
    endpoint: Endpoint
    body: bytes
    status: int
    prompts_tokens: list[int]
    max_output_tokens: list[int]

    def differs(self, result: Counted | Fault) -> bool:
        """Whether `result` is something else than the engine's own."""
        if isinstance(result, Fault):
            return self.status != status(result)
        ran = result.demand.max_output_tokens
        same = self.prompts_tokens == list(result.prompts_tokens) and ran == max(self.max_output_tokens, default=ran)
        return self.status != status(result) or not same


class Way(NamedTuple):
    """How bodies are counted."""

    backend: TokenizerBackend
    segmented: bool


WAYS = tuple(
    Way(backend, segmented)
    for backend in (TokenizerBackend.HUGGINGFACE, TokenizerBackend.AUTO)
    for segmented in (False, True)
)


@dataclass
class Agreement:
    """Bodies with the engine's count, bodies refused as by the engine, and the names of those with another outcome."""

    counted: int = 0
    refused: int = 0
    other: list[str] = field(default_factory=list)


def directory(shared: Path, recording: str) -> Path:
    """Where the tokenizer of a recording should be."""
    return shared / "tokenizers" / RECORDINGS[recording]


def recorded(shared: Path, recording: str) -> Iterator[Body]:
    """The bodies of a recording, those of endpoints that the gateway serves."""
    cases = json.loads((shared / "golden" / f"{recording}.json").read_bytes())["cases"]
    if recording == CORPUS:
        yield from _corpus(shared, cases)
        return
    for case in cases:
        tokens = [] if case["n"] is None else [case["n"]]
        yield Body(case["name"], CHAT, json.dumps(case["request"]).encode(), case["status"], tokens, [])


def _corpus(shared: Path, cases: dict[str, Any]) -> Iterator[Body]:
    corpus = {}
    for line in (shared / "corpus" / "bfcl_tools.jsonl").read_bytes().splitlines():
        entry = json.loads(line)
        corpus[f"bfcl/{entry['id']}"] = json.dumps({**entry["body"], "model": "engine"}).encode()
    for name, case in cases.items():
        ceilings = [tokens for tokens in case.get("max_tokens") or [] if tokens is not None]
        answer = case["status"], case.get("n_tokens") or [], ceilings
        if name in corpus:
            yield Body(name, CHAT, corpus[name], *answer)
            continue
        expect = json.loads((shared / "cases" / name.replace(".json", ".expect.json")).read_bytes())
        path = expect["endpoint"].removeprefix("POST ")
        if path in {CHAT, COMPLETIONS}:
            yield Body(name, Endpoint(path), (shared / "cases" / name).read_bytes(), *answer)


@cache
def agreement(shared: Path, recording: str, way: Way) -> Agreement | None:
    """How much of a recording is counted here as it was there; None where fastokens is not installed."""
    if way.backend is TokenizerBackend.AUTO and not installed():
        return None
    counter = _counter(directory(shared, recording), way.backend)
    backend = counter.backends()["engine"]
    found = Agreement()
    # By segments: wherever a text can be cut, however short it is.
    changes = {"segmented_chars_min": 0} if way.segmented else {"segments_doubt": "not wanted"}
    with patch.multiple(backend, **changes), patch.object(segments, "SEGMENT_CHARS_MIN", 1):
        for body in recorded(shared, recording):
            result = outcome(counter, body.body, body.endpoint)
            if body.differs(result):
                found.other.append(body.name)
            elif isinstance(result, Fault):
                found.refused += 1
            else:
                found.counted += 1
    return found


@cache
def _counter(tokenizer: Path, backend: TokenizerBackend) -> Counter:
    model = {**CLAMP, "aliases": ["test-model"], "tokenizer_dir": tokenizer, "tokenizer_backend": backend}
    counter = Counter(policy({"engine": model}, default_model="engine"))
    counter.close()  # it counts in the calling thread all the same
    return counter
