"""Counts, ceilings and refusals are those of the engine's own renderer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault
from extproc.counting import Counter
from tests.counting.models import CHAT, CLAMP, COMPLETIONS, DATA, counted, outcome, policy, status

OWN = json.loads((DATA / "qwen3.json").read_bytes())["cases"]

REFUSED_HERE = {
    "bodies/76-chat-kv-transfer-prompt-ids.json",  # ids that replace the counted prompt
    "bodies/77-chat-sglang-input-ids.json",  # the same for another engine; this one ignores them
}
"""Bodies that the engine runs and the gateway refuses."""


@pytest.mark.parametrize("case", OWN, ids=[case["name"] for case in OWN])
def test_body_is_counted_as_the_engine_counts_it(case: dict[str, Any], counter: Counter) -> None:
    """Tokens of each prompt, the output ceiling and the refusal equal what the engine's renderer answered."""
    result = outcome(counter, json.dumps(case["body"]).encode(), Endpoint(case["endpoint"]))

    assert case["status"] == status(result)
    if not isinstance(result, Fault):
        assert tuple(case["prompts_tokens"]) == result.prompts_tokens
        assert case["max_output_tokens"] in {None, result.demand.max_output_tokens}


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma3", "llama3_1"])
def test_recorded_chats_are_counted_exactly(name: str, shared: Path) -> None:
    """Every recorded chat has the engine's token count, or its refusal, with the model's own directory."""
    directory = shared / "tokenizers" / name
    if not directory.is_dir():
        pytest.skip(f"the tokenizer {name} is not here; its licence keeps it out of the repository")
    counter = Counter(policy({name: {**CLAMP, "tokenizer_dir": directory}}, default_model=name))
    cases = json.loads((shared / "golden" / f"{name}.json").read_bytes())["cases"]

    wrong = []
    for case in cases:
        result = outcome(counter, json.dumps(case["request"]).encode())
        tokens = None if isinstance(result, Fault) else result.demand.input_tokens
        if (case["status"], case["n"]) != (status(result), tokens):
            wrong.append((case["name"], status(result), tokens))
    counter.close()

    assert len(cases) > 90
    assert [] == wrong


def _recorded_bodies(shared: Path) -> Iterator[tuple[str, Endpoint, bytes, dict[str, Any]]]:
    corpus = {}
    for line in (shared / "corpus" / "bfcl_tools.jsonl").read_bytes().splitlines():
        entry = json.loads(line)
        corpus[f"bfcl/{entry['id']}"] = json.dumps({**entry["body"], "model": "engine"}).encode()
    recorded = json.loads((shared / "golden" / "qwen3_corpus_and_bodies.json").read_bytes())["cases"]
    for name, expected in recorded.items():
        if name in corpus:
            yield name, CHAT, corpus[name], expected
            continue
        expect = json.loads((shared / "cases" / name.replace(".json", ".expect.json")).read_bytes())
        path = expect["endpoint"].removeprefix("POST ")
        if path in {CHAT, COMPLETIONS}:
            yield name, Endpoint(path), (shared / "cases" / name).read_bytes(), expected


def test_recorded_bodies_and_tool_schemas_are_counted_exactly(shared: Path, counter: Counter) -> None:
    """Every recorded body has the engine's count for each prompt, its run ceiling, or its refusal."""
    wrong, seen = [], set()
    for name, endpoint, body, expected in _recorded_bodies(shared):
        seen.add(name)
        result = outcome(counter, body, endpoint)
        if isinstance(result, Fault):
            if expected["status"] == 200 and name not in REFUSED_HERE:
                wrong.append((name, result.message))
            continue
        demand = result.demand
        ceilings = [tokens for tokens in expected["max_tokens"] if tokens is not None]
        same_input = expected["status"] == 200 and expected["n_tokens"] == list(result.prompts_tokens)
        if not same_input or max(ceilings, default=demand.max_output_tokens) != demand.max_output_tokens:
            wrong.append((name, str(demand)))

    assert len(seen) > 290
    assert seen >= REFUSED_HERE
    assert [] == wrong


def test_ceiling_of_recorded_body_equals_context_left(counter: Counter) -> None:
    """An open ceiling is all the context that the prompt leaves."""
    demand = counted(counter, {"messages": [{"role": "user", "content": "hi"}]}).demand

    assert 200_000 == demand.reserve_tokens
