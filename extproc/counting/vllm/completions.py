"""POST /v1/completions: texts or ids as they are, without a template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import Check, as_bool, checked, integer, nullable, refused
from extproc.counting.prompts import PROMPTS_MAX, SEQUENCES_MAX, texts_or_ids
from extproc.counting.request import Read, Tools
from extproc.counting.vllm.rules import COMMON, asked, check_stream

DEFAULT_TOKENS = 16
"""Ceiling of a request that states none: OpenAI's and vLLM's documented default."""

FIELDS: Mapping[str, Check] = {
    **COMMON,
    "echo": nullable(as_bool),
    "logprobs": nullable(integer(-1)),
    "n": integer(1, SEQUENCES_MAX),
    "suffix": refused("needs a model that fills in the middle and is not accepted here"),
}
"""Fields without the prompt."""


def read(body: Mapping[str, Any], tools: Tools) -> Read:
    """The rules of POST /v1/completions."""
    values = checked(body, FIELDS)
    check_stream(body, values)
    add_special_tokens = values.get("add_special_tokens") is not False
    prompts = texts_or_ids(
        "prompt", body.get("prompt"), tools.token_id_max, PROMPTS_MAX, add_special_tokens=add_special_tokens
    )
    if values.get("echo") and values.get("max_tokens") == 0:
        values["max_tokens"] = 1  # scoring: the engine generates one token all the same
    return asked(values, ("max_tokens",), DEFAULT_TOKENS), lambda: prompts
