"""Models for counting tests: the vendored tokenizer under several policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extproc.core.policy import Endpoint, Policy
from extproc.core.rejection import STATUS
from extproc.core.stream import Counted
from extproc.core.values import Fault
from extproc.counting import Counter
from extproc.settings import PolicySection, freeze

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = ROOT / "extproc" / "demo" / "qwen3"
DATA = ROOT / "tests" / "data" / "counts"

CHAT, COMPLETIONS = Endpoint.CHAT_COMPLETIONS, Endpoint.COMPLETIONS

CLAMP: Mapping[str, Any] = {"total_over_context": "clamp", "default_ceiling": "context", "context_tokens_max": 200_000}
"""What vLLM does by itself, with the context of the recorded counts."""


def policy(models: Mapping[str, Mapping[str, Any]], **changes: Any) -> Policy:
    """A policy whose models use the vendored tokenizer unless they name another."""
    lanes = {"bulk": {"pool": "p", "input_tokens_max": 200_000, "total_tokens_max": 200_000}}
    sections = {
        name: {
            "tokenizer_dir": QWEN3,
            "tokenizer_backend": "huggingface",
            "context_tokens_max": 8192,
            "lanes": lanes,
            **model,
        }
        for name, model in models.items()
    }
    replicas = {"r": {"address": "127.0.0.1:9001", "gross_tokens": 300_000}}
    document = {"version": "t", "pools": {"p": {"replicas": replicas}}, "models": sections, **changes}
    return freeze(PolicySection.model_validate(document), base=ROOT)


def counted(counter: Counter, body: Mapping[str, Any] | bytes, endpoint: Endpoint = CHAT) -> Counted:
    """`body` read and counted."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return counter.count_now(counter.read(endpoint, raw))


def outcome(counter: Counter, body: Mapping[str, Any] | bytes, endpoint: Endpoint = CHAT) -> Counted | Fault:
    """`body` counted, or the fault it was refused with."""
    try:
        return counted(counter, body, endpoint)
    except Fault as fault:
        return fault


def status(result: Counted | Fault) -> int:
    """The HTTP status that a result leads to; 200 for a counted body."""
    return STATUS[result.reason] if isinstance(result, Fault) else 200


def user(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body with one user message."""
    return {"messages": [{"role": "user", "content": text}], **fields}
