"""POST /generate, the native endpoint: texts or ids as they are; the ceiling is in `sampling_params`.

A ceiling that the body lacks is 128 tokens; one that is null has no bound of its own, so the policy's default holds.
A body without a model is for the policy's default model: the engine has one model and no such field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import (
    Check,
    as_bool,
    as_int,
    as_object,
    as_str,
    checked,
    integer,
    malformed,
    nullable,
    number,
)
from extproc.counting.prompts import PROMPTS_MAX, texts_or_ids
from extproc.counting.request import Asked, Prompts, Read, Tools, asked_of, is_lowered
from extproc.counting.sglang.rules import REFUSED, SAMPLING, removed

DEFAULT_TOKENS = 128
"""Ceiling of a request whose sampling parameters state none."""

_SECTION = "sampling_params"
_CEILING = "max_new_tokens"


def _beam_width(name: str, value: object) -> None:
    if as_int(name, value) > 1:
        raise malformed(f"{name} re-reads the prompt at every step and is not accepted here", name)


_SAMPLING_FIELDS: Mapping[str, Check] = {
    name: nullable(check)
    for name, check in {
        **SAMPLING,
        "beam_width": _beam_width,
        "json_schema": as_str,
        _CEILING: as_int,
        "min_new_tokens": integer(0),
        "min_p": number(0, 1),
        "repetition_penalty": number(above=0, high=2),
        "sampling_seed": integer(),
        "spaces_between_special_tokens": as_bool,
        "stream_interval": as_int,
        "structural_tag": as_str,
        "temperature": number(0),
        "top_k": as_int,
        "top_p": number(above=0, high=1),
        "watermark": as_object,
    }.items()
}
"""All that the engine takes in `sampling_params`."""


def _sampling_params(name: str, value: object) -> dict[str, object]:
    if isinstance(value, list):
        raise malformed(f"{name} must be one object for all prompts", name)
    params = as_object(name, value)
    for key in params:
        if key not in _SAMPLING_FIELDS:
            raise malformed(f"{name} holds a field that the engine does not have", name)
    return {key: _SAMPLING_FIELDS[key](f"{name}.{key}", item) for key, item in params.items()}


FIELDS: Mapping[str, Check] = {
    **REFUSED,
    "priority": nullable(as_int),
    _SECTION: nullable(_sampling_params),
    "service_tier": nullable(as_str),
    "stream": as_bool,
}
"""Fields without the prompt."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /generate."""
    values = checked(body, FIELDS)
    prompts = _prompts(body, model)
    return _asked(values), lambda: prompts


def _asked(values: Mapping[str, Any]) -> Asked:
    params = values.get(_SECTION) or {}
    default_tokens = None if _CEILING in params else DEFAULT_TOKENS
    least, most = params.get("min_new_tokens") or 0, params.get(_CEILING)
    if most is not None and least > most:
        raise malformed(f"min_new_tokens is above {_CEILING}, which is {most}", f"{_SECTION}.min_new_tokens")
    return asked_of(params, (_CEILING,), default_tokens, within=(_SECTION,))._replace(
        min_tokens=least, lowered=is_lowered(values), removed=removed(values)
    )


def _prompts(body: Mapping[str, Any], model: Tools) -> Prompts:
    """The prompts of `text` or `input_ids`; of both, the engine would run the ids and number them by the texts."""
    text, ids = body.get("text"), body.get("input_ids")
    if ids is None:
        if isinstance(text, list) and not all(isinstance(item, str) for item in text):
            raise malformed("text must be a string or a list of them", "text")
    elif text is not None:
        raise malformed("input_ids would replace text: give one of them", "input_ids")
    elif not isinstance(ids, list) or any(isinstance(item, str) for item in ids):
        raise malformed("input_ids must be a list of token ids, or a list of such lists", "input_ids")
    name, value = ("text", text) if ids is None else ("input_ids", ids)
    return texts_or_ids(name, value, model.token_id_max, PROMPTS_MAX, add_special_tokens=True)
