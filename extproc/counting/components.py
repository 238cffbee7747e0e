"""What a tokenizer is made of, from the JSON in which its components pickle."""

from __future__ import annotations

import json
from typing import Any


def parts(component: Any, key: str) -> list[dict[str, Any]]:  # noqa: ANN401 (unrelated library classes)
    """The steps of a normalizer, pre-tokenizer or post-processor; `key` is what holds those of a sequence."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[key]) if state["type"] == "Sequence" else [state]
