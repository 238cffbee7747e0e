"""POST /generate, the native endpoint: one text, `inputs`; all else is in `parameters`.

`best_of` runs that many requests of the same prompt, each with its own prefill and ceiling. `truncate` keeps that many
tokens of the prompt. A body without a model is for the policy's default model: the engine has no such field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import Check, as_object, as_str, checked, malformed, nullable
from extproc.counting.request import Asked, Prompts, Read, Tools, asked_of, is_lowered
from extproc.counting.tgi.rules import UINT64_MAX, flag, float_number, texts, unsigned

BEST_OF_MAX = 4
"""Twice what the engine takes unless it is told otherwise: the prompt is counted that many times."""

_SECTION = "parameters"
_SAMPLING = ("temperature", "top_k", "top_p", "typical_p")

_PARAMETERS: Mapping[str, Check] = {
    "adapter_id": nullable(as_str),
    "best_of": nullable(unsigned(1, BEST_OF_MAX)),
    "decoder_input_details": flag,
    "details": flag,
    "do_sample": flag,
    "frequency_penalty": nullable(float_number),
    "grammar": nullable(as_object),
    "max_new_tokens": nullable(unsigned()),
    "repetition_penalty": nullable(float_number),
    "return_full_text": nullable(flag),
    "seed": nullable(unsigned(high=UINT64_MAX)),
    "stop": texts,
    "temperature": nullable(float_number),
    "top_k": nullable(unsigned(1)),
    "top_n_tokens": nullable(unsigned()),
    "top_p": nullable(float_number),
    "truncate": nullable(unsigned(1)),
    "typical_p": nullable(float_number),
    "watermark": flag,
}


def _parameters(name: str, value: object) -> dict[str, object]:
    parameters = as_object(name, value)
    return {key: _PARAMETERS[key](f"{name}.{key}", item) for key, item in parameters.items() if key in _PARAMETERS}


FIELDS: Mapping[str, Check] = {"inputs": as_str, _SECTION: _parameters, "service_tier": nullable(as_str)}
"""Fields of the request."""


def read(body: Mapping[str, Any], _model: Tools) -> Read:
    """The rules of POST /generate."""
    values = checked(body, FIELDS)
    inputs = values.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        raise malformed("inputs must be a non-empty string", "inputs")
    parameters: Any = values.get(_SECTION)
    if parameters is None:
        # Writing a ceiling would make the object, and with it the engine's defaults for sampling differ.
        raise malformed(f"{_SECTION} is missing: state {_SECTION}.max_new_tokens, or an empty object", _SECTION)
    best_of = parameters.get("best_of") or 1
    _check_best_of(parameters, best_of)
    prompts = Prompts((inputs,) * best_of, (), add_special_tokens=True)
    return _asked(values, parameters), lambda: prompts


def _check_best_of(parameters: Mapping[str, Any], best_of: int) -> None:
    if best_of == 1:
        return
    if parameters.get("seed") is not None:
        raise malformed("best_of above 1 excludes a seed", f"{_SECTION}.seed")
    if not parameters.get("do_sample") and all(parameters.get(name) is None for name in _SAMPLING):
        raise malformed("best_of above 1 needs sampling", f"{_SECTION}.best_of")


def _asked(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> Asked:
    return asked_of(parameters, ("max_new_tokens",), within=(_SECTION,))._replace(
        truncate_tokens=parameters.get("truncate"), lowered=is_lowered(values)
    )
