"""One counter for all tests of this folder: loading a tokenizer takes most of a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from extproc.counting import Counter
from tests.counting.models import CLAMP, policy


@pytest.fixture(scope="session")
def counter() -> Iterator[Counter]:
    """Models `engine` (vLLM's own rules, the default), `clamp` and `refuse` (context 8192, default 1024)."""
    models = {"engine": {**CLAMP, "aliases": ["test-model"]}, "clamp": {"total_over_context": "clamp"}, "refuse": {}}
    found = Counter(policy(models, default_model="engine"))
    yield found
    found.close()
