"""What SGLang's endpoints have in common: checks of fields, and what is not accepted.

Derived from the source of SGLang 0.5.23 (openai/protocol.py, io_struct.py, sampling_params.py); nothing here was
observed on a running engine. Stricter than the engine in one respect: whatever would replace the counted prompt, take
its cache from elsewhere, choose a queue inside the engine, or run on after its response is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import (
    Check,
    as_bool,
    as_float,
    as_int,
    as_object,
    as_str,
    integer,
    list_of,
    malformed,
    map_of,
    nullable,
    number,
    refused,
)
from extproc.counting.prompts import REPLACES_PROMPT, SEQUENCES_MAX
from extproc.counting.request import Asked, asked_of, is_lowered

STOP_STRINGS_MAX = 32
"""MAX_STOP_COUNT."""

_MEDIA = "carries media, which is not accepted here"
_INTERNAL = "is between parts of the engine and is not accepted here"
_QUEUE = "would choose a queue inside the engine and is not accepted here"


def _stop(name: str, value: object) -> None:
    stops = value if isinstance(value, list) else [value]
    for stop in stops:
        as_str(name, stop)
    if len(stops) > STOP_STRINGS_MAX:
        raise malformed(f"{name} holds at most {STOP_STRINGS_MAX} strings", name)


def _background(name: str, value: object) -> None:
    if as_bool(name, value):
        raise malformed(f"{name} would run on after its response and is not accepted here", name)


REFUSED: Mapping[str, Check] = {
    "audio_data": refused(_MEDIA),
    "background": nullable(_background),
    "bootstrap_host": refused(_INTERNAL),
    "bootstrap_pair_key": refused(_INTERNAL),
    "bootstrap_port": refused(_INTERNAL),
    "bootstrap_room": refused(_INTERNAL),
    "data_parallel_rank": refused(_QUEUE),
    "decode_tp_size": refused(_INTERNAL),
    "disagg_prefill_dp_rank": refused(_QUEUE),
    "encoder_urls": refused(_INTERNAL),
    "http_worker_ipc": refused(_INTERNAL),
    "image_data": refused(_MEDIA),
    "input_embeds": refused(REPLACES_PROMPT),
    "kv_hints": refused(_INTERNAL),
    "need_wait_for_mm_inputs": refused(_INTERNAL),
    "num_items_assigned": refused(_INTERNAL),
    "positional_embed_overrides": refused(REPLACES_PROMPT),
    "routed_dp_rank": refused(_QUEUE),
    "session_params": refused(REPLACES_PROMPT),
    "video_data": refused(_MEDIA),
}
"""Fields that no request may have, at any endpoint. A session is a prompt that the engine holds and adds to."""

_PENALTY = number(-2, 2)
SAMPLING: Mapping[str, Check] = {
    "custom_params": nullable(as_object),
    "ebnf": nullable(as_str),
    "frequency_penalty": _PENALTY,
    "ignore_eos": as_bool,
    "logit_bias": nullable(map_of(as_float)),
    "n": integer(1, SEQUENCES_MAX),
    "no_stop_trim": as_bool,
    "presence_penalty": _PENALTY,
    "regex": nullable(as_str),
    "skip_special_tokens": as_bool,
    "stop": nullable(_stop),
    "stop_regex": nullable(_stop),
    "stop_token_ids": nullable(list_of(as_int)),
}
"""Fields that all endpoints have; at /generate each may be null besides."""

OPENAI: Mapping[str, Check] = {
    **REFUSED,
    **SAMPLING,
    "min_tokens": integer(0),
    "priority": nullable(as_int),
    "response_format": nullable(as_object),
    "seed": nullable(integer()),
    "service_tier": nullable(as_str),
    "stream": as_bool,
    "stream_options": nullable(as_object),
    "user": nullable(as_str),
}
"""Fields of both of OpenAI's endpoints."""


def asked(values: Mapping[str, Any], names: tuple[str, ...], default_tokens: int | None = None) -> Asked:
    """`asked_of` with what the body says besides. See `removed` for its priority."""
    return asked_of(values, names, default_tokens)._replace(lowered=is_lowered(values), removed=removed(values))


def removed(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A client's priority would let its request pass others; even 0 does, since the engine's default is the lowest."""
    return () if values.get("priority") is None else ("priority",)
