"""Prompts that a body holds as they are: texts, or token ids, of which nothing but the number matters."""

from __future__ import annotations

from array import array
from typing import Any

from extproc.counting.fields import as_int, malformed
from extproc.counting.request import Prompts

PROMPTS_MAX = 1024
"""Prompts of one request: vLLM's VLLM_MAX_COMPLETION_PROMPTS, and enough where an engine has no bound."""

SEQUENCES_MAX = 16_384
"""Sequences of one prompt: vLLM's VLLM_MAX_N_SEQUENCES, and enough where an engine has no bound."""

REPLACES_PROMPT = "would replace the counted prompt and is not accepted here"


def texts_or_ids(name: str, value: object, token_id_max: int, prompts_max: int, *, add_special_tokens: bool) -> Prompts:
    """The prompts of the field `name`: one text, a list of texts, one list of ids or a list of such lists."""
    if isinstance(value, str) and value:
        return Prompts((value,), (), add_special_tokens)
    if not isinstance(value, list) or not value:
        raise malformed(f"{name} must be a non-empty string, or a list of strings or token ids", name)
    if not isinstance(value[0], str | list) or len(set(map(type, value))) > 1:
        return Prompts((), (_ids_length(name, value, token_id_max),), add_special_tokens)
    if len(value) > prompts_max:
        raise malformed(f"{name} holds more than {prompts_max} prompts", name)
    if isinstance(value[0], str):
        return Prompts(tuple(value), (), add_special_tokens)
    return Prompts((), tuple(_ids_length(name, ids, token_id_max) for ids in value), add_special_tokens)


def _ids_length(name: str, ids: list[Any], token_id_max: int) -> int:
    """Tokens of a prompt given as ids. `array` checks a list of plain integers in one pass in C."""
    if not ids:
        raise malformed(f"{name} holds an empty list of token ids", name)
    outside = malformed(f"{name} holds a token id outside 0 to {token_id_max}", name)
    try:
        array("Q", ids)
    except TypeError:
        ids = [as_int(name, item) for item in ids]
    except OverflowError:
        raise outside from None
    if max(ids) > token_id_max or min(ids) < 0:
        raise outside
    return len(ids)
