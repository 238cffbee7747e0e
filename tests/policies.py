"""Policies for tests: small, explicit, and built from the same file sections that operators write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extproc.core.policy import Policy
from extproc.settings import PolicySection, freeze

NOTE_GROSS_TOKENS = 96_000
"""Gross ceiling of the design note's worked example; its guard band is a tenth of it."""


def replica(port: int, **changes: Any) -> dict[str, Any]:
    """One replica section on loopback."""
    return {"address": f"127.0.0.1:{port}", "gross_tokens": NOTE_GROSS_TOKENS, **changes}


def document(
    *,
    chat: Mapping[str, Any] | None = None,
    docs: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A policy file: pool `chat` for interactive, pool `docs` for bulk, model `m` with the note's lane limits."""
    return {
        "version": "test-1",
        "pools": {
            "chat": {"replicas": chat or {"chat-0": replica(9101)}},
            "docs": {"replicas": docs or {"docs-0": replica(9201)}},
        },
        "models": {
            "m": {
                "tokenizer_dir": "unused",
                "tokenizer_backend": "huggingface",  # loads in a third of the time
                "context_tokens_max": 200_000,
                "lanes": {
                    "interactive": {"pool": "chat"},
                    "bulk": {"pool": "docs", "input_tokens_max": 60_000, "total_tokens_max": 64_000},
                },
                **(model or {}),
            }
        },
        **changes,
    }


def policy(**changes: Any) -> Policy:
    """The frozen policy of `document(**changes)`, free of faults."""
    frozen = freeze(PolicySection.model_validate(document(**changes)), Path())
    assert frozen.faults() == []
    return frozen
