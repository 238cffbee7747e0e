"""The policy: what it derives, and what it finds at fault with itself."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from extproc.core import names
from extproc.core.ceiling import Ceiling
from extproc.core.media import MediaCharge, MediaKind
from extproc.core.policy import BypassRule, EngineName, OverContext, Policy, Replica, TokenizerMode
from tests.policies import policy

POLICY = policy()
MODEL = POLICY.models["m"]
MEDIA = MappingProxyType({MediaKind.IMAGE: MediaCharge(5, 5)})


def _with_replicas(*replicas: Replica) -> Policy:
    pools = {**POLICY.pools, "chat": replace(POLICY.pools["chat"], replicas=replicas)}
    return replace(POLICY, pools=MappingProxyType(pools))


(FIRST,) = POLICY.pools["chat"].replicas


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (POLICY, None),
        (replace(POLICY, default_model="x"), "default_model x is not a model, so a request without one could not run"),
        (
            replace(POLICY, bypass=(BypassRule("POST", "/v1/completions", "chat"),)),
            "bypass POST /v1/completions: this path runs tokens, so it must not pass uncounted",
        ),
        (
            replace(POLICY, bypass=(BypassRule("GET", "/v1/models", "x"),)),
            "bypass GET /v1/models: there is no pool x, so it would be answered 503",
        ),
        (
            replace(POLICY, models=MappingProxyType({"m": replace(MODEL, aliases=("m",))})),
            "model name m is used twice, so a request for it would have two budgets",
        ),
        (
            replace(
                POLICY,
                models=MappingProxyType(
                    {"m": replace(MODEL, engine=EngineName.SGLANG, tokenizer_mode=TokenizerMode.HARMONY)}
                ),
            ),
            "model m: tokenizer_mode harmony follows vllm, so counts would not be those of sglang",
        ),
        (
            replace(POLICY, models=MappingProxyType({"m": replace(MODEL, engine=EngineName.TGI, media=MEDIA)})),
            "model m: media of tgi are not counted, so they cannot have a charge",
        ),
        (
            replace(
                POLICY,
                models=MappingProxyType({"m": replace(MODEL, tokenizer_mode=TokenizerMode.MISTRAL, media=MEDIA)}),
            ),
            "model m: media of tokenizer_mode mistral are not counted, so they cannot have a charge",
        ),
        (replace(POLICY, models=MappingProxyType({"m": replace(MODEL, media=MEDIA)})), None),
        (
            _with_replicas(FIRST, replace(FIRST, address="127.0.0.1:1")),
            "replica name chat-0 is used twice, so one engine would be given two budgets",
        ),
        (
            _with_replicas(FIRST, replace(FIRST, name="chat-1")),
            "replica address 127.0.0.1:9101 is used twice, so one engine would be given two budgets",
        ),
        (
            replace(POLICY, pools=MappingProxyType({"docs": POLICY.pools["docs"]})),
            "model m, lane interactive: there is no pool chat",
        ),
        (
            _with_replicas(replace(FIRST, gross_tokens=5_119, guard_tokens=0)),
            (
                "model m, lane interactive: a request of 5120 tokens is within the limits but no replica of pool chat "
                "can ever hold more than 5119"
            ),
        ),
    ],
)
def test_faults(broken: Policy, fault: str | None) -> None:
    """What could never work is named in a sentence with its reason; a sound policy has none."""
    assert ([] if fault is None else [fault]) == broken.faults()


def test_a_message_holds_the_largest_buffer() -> None:
    """What Envoy buffers reaches the service, headers and all, so that the refusal is the service's."""
    limits = POLICY.limits

    assert limits.body_bytes_max < limits.buffer_bytes < limits.message_bytes_max


def test_own_headers_have_the_prefix() -> None:
    """Every header by which routes are chosen, but the destination, is stripped from clients by one prefix."""
    for header in (names.LANE_HEADER, names.POOL_HEADER, names.REASON_HEADER):
        assert header.startswith(names.OWN_PREFIX)
    assert not names.INTENT_HEADER.startswith(names.OWN_PREFIX)


@pytest.mark.parametrize(("input_tokens", "expected"), [(900, True), (901, False)])
def test_room_for_a_whole_ceiling(input_tokens: int, expected: bool) -> None:
    """A prompt leaves room when input and ceiling together are the context or less."""
    ceiling = Ceiling("max_tokens", 100, None, 1000, OverContext.CLAMP)

    assert expected is ceiling.leaves_room(input_tokens)
