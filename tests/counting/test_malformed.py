"""Recorded malformed bodies get the status that is proposed for a gateway."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from extproc.core.policy import Endpoint
from extproc.counting import Counter
from tests.counting.models import CLAMP, outcome, policy, status

CATEGORIES = {"json", "type", "fields", "size"}

DECIDED_OTHERWISE = {
    "032-int-2pow63-1": 413,  # over the context: the design note's 413 wins over the engine's 400
    "101-messages-100k-empty": 400,  # more messages than one chat may hold, found before they are rendered
}
"""Cases where the proposal is not followed, and why."""


def allowed_statuses(proposal: str, engine_status: int) -> set[int]:
    """Statuses that a proposal such as "admit, or 400" allows."""
    found = {int(number) for number in re.findall(r"\b4\d\d\b", proposal)}
    if re.search(r"admit|ceiling \d|n=\d|stream=|last-wins|bounded time|default model|counted", proposal):
        found.add(200)
    if re.search(r"as backend|as the template|as model-missing", proposal):
        found |= {engine_status, 400}
    if "bounded time" in proposal:
        found.add(413)
    return found


def test_recorded_malformed_bodies_get_the_proposed_status(shared: Path) -> None:
    """Every recorded body about JSON, types, fields or size is answered as proposed, in a context of 8192."""
    models = {"m": {**CLAMP, "context_tokens_max": 8192, "aliases": ["test-model"]}}
    counter = Counter(policy(models, default_model="m"))
    wrong, seen = [], 0
    for path in sorted((shared / "cases" / "malformed").glob("*.expect.json")):
        case = json.loads(path.read_bytes())
        if case["category"] not in CATEGORIES or case["path"] not in set(Endpoint):
            continue
        seen += 1
        name = path.name.removesuffix(".expect.json")
        plain = path.with_name(case["file"])
        body = plain.read_bytes() if plain.exists() else gzip.decompress(Path(f"{plain}.gz").read_bytes())
        got = status(outcome(counter, body, Endpoint(case["path"])))
        allowed = allowed_statuses(case["gateway_should"], case["vllm_0_33_0_front_door"]["status"])
        if got not in ({DECIDED_OTHERWISE[name]} if name in DECIDED_OTHERWISE else allowed):
            wrong.append((name, got, case["gateway_should"]))
    counter.close()

    assert seen > 70
    assert [] == wrong


@pytest.mark.parametrize(
    ("proposal", "engine", "allowed"),
    [
        ("400", 200, {400}),
        ("admit or 400, but no crash", 200, {200, 400}),
        ("as backend (vLLM infers type)", 200, {200, 400}),
        ("ceiling 5 (backend coerces) or 400", 200, {200, 400}),
    ],
)
def test_proposals_are_read_as_written(proposal: str, engine: int, allowed: set[int]) -> None:
    """The reader of proposals allows no more than they say."""
    assert allowed == allowed_statuses(proposal, engine)
