"""POST /v1/completions: texts as they are; ids are not taken. The tokenizer adds its special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import Check, checked, malformed, nullable, refused
from extproc.counting.prompts import PROMPTS_MAX
from extproc.counting.request import Prompts, Read, Tools, asked_of, is_lowered
from extproc.counting.tgi.rules import OPENAI, float_number, texts, unsigned

FIELDS: Mapping[str, Check] = {
    **OPENAI,
    "max_tokens": nullable(unsigned()),
    "repetition_penalty": nullable(float_number),
    "suffix": refused("is not supported by the engine"),
}
"""Fields without the prompt. `max_completion_tokens` is none of them."""


def read(body: Mapping[str, Any], _model: Tools) -> Read:
    """The rules of POST /v1/completions."""
    values = checked(body, FIELDS)
    prompts = Prompts(_texts(body.get("prompt")), (), add_special_tokens=True)
    return asked_of(values, ("max_tokens",))._replace(lowered=is_lowered(values)), lambda: prompts


def _texts(prompt: object) -> tuple[str, ...]:
    found = texts("prompt", [prompt] if isinstance(prompt, str) else prompt)
    if not found or "" in found:
        raise malformed("prompt must be a non-empty string or a list of them", "prompt")
    if len(found) > PROMPTS_MAX:
        raise malformed(f"prompt holds more than {PROMPTS_MAX} prompts", "prompt")
    return tuple(found)
