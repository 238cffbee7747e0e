"""POST /v1/completions: texts or ids as they are, without a template. The tokenizer adds its special tokens to texts.

`best_of` has no effect on the engine. `suffix` has one only with a completion template, which is the engine's own
setting and cannot be seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import Check, as_bool, as_int, checked, integer, nullable, number, refused
from extproc.counting.prompts import PROMPTS_MAX, REPLACES_PROMPT, texts_or_ids
from extproc.counting.request import Read, Tools
from extproc.counting.sglang.rules import OPENAI, asked

DEFAULT_TOKENS = 16
"""Ceiling of a request that states none."""

FIELDS: Mapping[str, Check] = {
    **OPENAI,
    "best_of": nullable(as_int),
    "echo": as_bool,
    "input_ids": refused(REPLACES_PROMPT),
    "logprobs": nullable(as_int),
    "max_tokens": integer(1),
    "min_p": number(0, 1),
    "repetition_penalty": number(above=0, high=2),
    "suffix": refused("needs a template that fills in the middle and is not accepted here"),
    "temperature": number(0),
    "top_k": as_int,
    "top_p": number(above=0, high=1),
}
"""Fields without the prompt. A ceiling of null is refused, as the engine does."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/completions."""
    values = checked(body, FIELDS)
    prompts = texts_or_ids("prompt", body.get("prompt"), model.token_id_max, PROMPTS_MAX, add_special_tokens=True)
    return asked(values, ("max_tokens",), DEFAULT_TOKENS), lambda: prompts
