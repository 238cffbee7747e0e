"""What vLLM's endpoints have in common: checks of fields, bounds, and where the output ceiling comes from.

Read from vLLM 0.33 (protocol.py of chat_completion and completion, sampling_params.py) and compared with the requests
that it accepts. Stricter than the engine in one respect: whatever would replace or reorder the counted prompt
(forwarded ids, embeddings, a request's own template, media) is refused, and so is beam search, which re-reads the
prompt at every step, so that no reservation bounds its prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import (
    Check,
    as_bool,
    as_float,
    as_int,
    as_list,
    as_object,
    as_str,
    deeper_than,
    integer,
    list_of,
    malformed,
    map_of,
    nullable,
    number,
    one_of,
    refused,
)
from extproc.counting.prompts import REPLACES_PROMPT
from extproc.counting.request import Asked, asked_of, is_lowered

STOP_STRINGS_MAX = 4
"""VLLM_MAX_STOP_STRINGS."""

SCHEMA_DEPTH_MAX = 64
"""Levels of a schema that constrains decoding; vLLM refuses deeper ones."""


def _stop(name: str, value: object) -> None:
    stops = [value] if isinstance(value, str) else [as_str(name, item) for item in as_list(name, value)]
    if len(stops) > STOP_STRINGS_MAX:
        raise malformed(f"{name} holds at most {STOP_STRINGS_MAX} strings", name)
    if "" in stops:
        raise malformed(f"{name} cannot hold an empty string", name)


def _kv_transfer(name: str, value: object) -> None:
    if as_object(name, value).get("prompt_token_ids") is not None:
        raise malformed(f"{name}.prompt_token_ids {REPLACES_PROMPT}", f"{name}.prompt_token_ids")


def _media_options(name: str, value: object) -> None:
    if as_object(name, value):
        raise malformed(f"{name} is not accepted per request", name)


def _stream_options(name: str, value: object) -> None:
    options = as_object(name, value)
    for key in ("include_usage", "continuous_usage_stats"):
        if options.get(key) is not None:
            as_bool(f"{name}.{key}", options[key])


def schema(name: str, value: object) -> dict[str, object]:
    """A constraint on decoding: an object that nests no deeper than the engine takes."""
    constraint = as_object(name, value)
    if deeper_than(constraint, SCHEMA_DEPTH_MAX + 2):
        raise malformed(f"{name} nests deeper than {SCHEMA_DEPTH_MAX} levels", name)
    return constraint


def _response_format(name: str, value: object) -> None:
    kind = schema(name, value)
    one_of("text", "json_object", "json_schema", "structural_tag")(f"{name}.type", kind.get("type"))
    if kind["type"] == "json_schema" and not isinstance(kind.get("json_schema"), dict):
        raise malformed(f"{name} of type json_schema needs json_schema", name)


def _structured_outputs(name: str, value: object) -> None:
    constraint = schema(name, value)
    if sum(constraint.get(key) is not None for key in ("json", "regex", "choice")) > 1:
        raise malformed(f"{name} takes one of json, regex and choice", name)


def _beam_search(name: str, value: object) -> None:
    if as_bool(name, value):
        raise malformed(f"{name} re-reads the prompt at every step and is not accepted here", name)


_INT64 = integer()
COMMON: Mapping[str, Check] = {
    "add_special_tokens": as_bool,
    "allowed_token_ids": nullable(list_of(as_int)),
    "bad_words": list_of(as_str),
    "cache_salt": nullable(as_str),
    "ec_transfer_params": nullable(as_object),
    "frequency_penalty": nullable(number(-2, 2)),
    "ignore_eos": as_bool,
    "include_stop_str_in_output": as_bool,
    "input_embeds": refused(REPLACES_PROMPT),
    "input_ids": refused(REPLACES_PROMPT),
    "kv_transfer_params": nullable(_kv_transfer),
    "length_penalty": as_float,
    "logit_bias": nullable(map_of(as_float)),
    "logprob_token_ids": nullable(list_of(as_int)),
    "max_tokens": nullable(as_int),
    "media_io_kwargs": nullable(_media_options),
    "min_p": nullable(number(0, 1)),
    "min_tokens": integer(0),
    "mm_processor_kwargs": nullable(_media_options),
    "presence_penalty": nullable(number(-2, 2)),
    "priority": _INT64,
    "prompt_embeds": refused(REPLACES_PROMPT),
    "prompt_logprobs": nullable(integer(-1)),
    "repetition_penalty": nullable(number(above=0)),
    "request_id": as_str,
    "response_format": nullable(_response_format),
    "return_token_ids": nullable(as_bool),
    "return_tokens_as_token_ids": nullable(as_bool),
    "seed": nullable(_INT64),
    "service_tier": nullable(as_str),
    "session_id": nullable(as_str),
    "skip_special_tokens": as_bool,
    "spaces_between_special_tokens": as_bool,
    "stop": nullable(_stop),
    "stop_token_ids": nullable(list_of(as_int)),
    "stream": nullable(as_bool),
    "stream_options": nullable(_stream_options),
    "structured_outputs": nullable(_structured_outputs),
    "temperature": nullable(number(0)),
    "thinking_token_budget": nullable(integer(-1)),
    "top_k": nullable(integer(-1)),
    "top_p": nullable(number(above=0, high=1)),
    "truncate_prompt_tokens": nullable(integer(-1)),
    "truncation_side": nullable(one_of("left", "right")),
    "use_beam_search": _beam_search,
    "user": nullable(as_str),
    "vllm_xargs": nullable(as_object),
}

"""Fields of every endpoint that generates."""


def asked(values: Mapping[str, Any], names: tuple[str, ...], default_tokens: int | None = None) -> Asked:
    """`asked_of` with what vLLM's fields say besides."""
    return asked_of(values, names, default_tokens)._replace(
        lowered=is_lowered(values), truncate_tokens=_truncate_tokens(values), removed=_removed(values)
    )


def asked_of_prompts(values: Mapping[str, Any]) -> Asked:
    """What a request asks for that runs nothing but its prompts."""
    return Asked(
        truncate_tokens=_truncate_tokens(values), generates=False, lowered=is_lowered(values), removed=_removed(values)
    )


def _truncate_tokens(values: Mapping[str, Any]) -> int | None:
    truncate: int | None = values.get("truncate_prompt_tokens")
    if truncate == 0:
        raise malformed("truncate_prompt_tokens leaves no prompt", "truncate_prompt_tokens")
    return truncate


def _removed(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A client's priority would let its request pass those that were admitted before it."""
    return ("priority",) if values.get("priority") else ()


def check_stream(body: Mapping[str, Any], values: Mapping[str, object]) -> None:
    """Fault for options of a stream without one, and for logprobs that no stream carries."""
    # The engine looks at the raw value here: any truthy one counts as a stream.
    if body.get("stream_options") and not body.get("stream"):
        raise malformed("stream_options needs stream", "stream_options")
    prompt_logprobs = values.get("prompt_logprobs")
    if body.get("stream") and prompt_logprobs:
        raise malformed("prompt_logprobs are not available with stream", "prompt_logprobs")
