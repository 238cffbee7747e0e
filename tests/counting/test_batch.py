"""POST /v1/chat/completions/batch: conversations are prompts of their own with shared options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from tests.counting.models import counted, outcome, user

BATCH = Endpoint.CHAT_COMPLETIONS_BATCH


def request(*texts: str, **fields: Any) -> dict[str, Any]:
    """A body with a conversation of one user message for each of `texts`, or for "hi"."""
    return {"messages": [user(text)["messages"] for text in texts or ("hi",)], **fields}


def test_each_conversation_is_a_prompt(counter: Counter) -> None:
    """A conversation has the tokens of its chat, and runs to the shared ceiling."""
    texts = ("hi", "name a cape", "hi")
    chats = tuple(counted(counter, user(text)).demand.input_tokens for text in texts)
    found = counted(counter, request(*texts, max_tokens=12), BATCH)

    assert chats == found.prompts_tokens
    assert (3, 12, 36) == (found.demand.sequences, found.demand.max_output_tokens, found.demand.output_tokens)


def test_options_hold_for_every_conversation(counter: Counter) -> None:
    """Template variables and efforts reach each prompt as they reach a chat's."""
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    chat = counted(counter, user(**options)).demand.input_tokens

    assert (chat, chat) == counted(counter, request("hi", "hi", **options), BATCH).prompts_tokens


def test_open_ceiling_is_written(counter: Counter) -> None:
    """An open ceiling is the policy's for every conversation, in the field that the engine reads."""
    found = counted(counter, request("a", "b", model="refuse"), BATCH)

    assert found.body is not None
    assert 1024 == json.loads(found.body)["max_tokens"]
    assert 2048 == found.demand.output_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"stream": True}, "stream"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": user()["messages"]}, "messages"),
        ({"messages": [user()["messages"]] * 4097}, "messages"),
        ({"messages": [[{"role": "user", "content": [{"type": "image_url"}]}]]}, "messages.content.type"),
    ],
)
def test_what_a_batch_cannot_hold_is_malformed(fields: dict[str, Any], param: str, counter: Counter) -> None:
    """A 400 names the field."""
    found = outcome(counter, {**request(), **fields}, BATCH)

    assert isinstance(found, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (found.reason, found.param)


@pytest.mark.parametrize("fields", [{"n": 1}, {"n": None}, {"stream": False}, {"tools": None}, {"tool_choice": "none"}])
def test_what_changes_nothing_passes(fields: dict[str, Any], counter: Counter) -> None:
    """One sequence, no stream and no tools may be said."""
    assert 1 == counted(counter, request(**fields), BATCH).demand.sequences
