"""Counts, ceilings and refusals are those of the engine's own renderer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault
from extproc.counting import Counter
from tests.counting.models import DATA, counted, outcome, status
from tests.counting.recorded import CORPUS, RECORDINGS, REFUSED_HERE, WAYS, Way, agreement, directory

OWN = json.loads((DATA / "qwen3.json").read_bytes())["cases"]


@pytest.mark.parametrize("case", OWN, ids=[case["name"] for case in OWN])
def test_body_is_counted_as_the_engine_counts_it(case: dict[str, Any], counter: Counter) -> None:
    """Tokens of each prompt, the output ceiling and the refusal equal what the engine's renderer answered."""
    result = outcome(counter, json.dumps(case["body"]).encode(), Endpoint(case["endpoint"]))

    assert case["status"] == status(result)
    if not isinstance(result, Fault):
        assert tuple(case["prompts_tokens"]) == result.prompts_tokens
        assert case["max_output_tokens"] in {None, result.demand.max_output_tokens}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("recording", RECORDINGS)
def test_recorded_bodies_are_counted_exactly(recording: str, way: Way, shared: Path) -> None:
    """Every recorded body has the engine's count, or its refusal, with either library, whole and by segments."""
    if not directory(shared, recording).is_dir():
        pytest.skip(f"the tokenizer of {recording} is not here; its licence keeps it out of the repository")
    found = agreement(shared, recording, way)
    if found is None:
        pytest.skip("the extra `fast` is not installed")

    assert found.counted + found.refused > 90
    assert (sorted(REFUSED_HERE) if recording == CORPUS else []) == sorted(found.other)


def test_ceiling_of_recorded_body_equals_context_left(counter: Counter) -> None:
    """An open ceiling is all the context that the prompt leaves."""
    demand = counted(counter, {"messages": [{"role": "user", "content": "hi"}]}).demand

    assert 200_000 == demand.reserve_tokens
