"""POST /v1/chat/completions/batch: conversations that share their options, each one prompt with its own ceiling.

The engine answers them without a stream, without tools and with one sequence each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import Check, checked, integer, malformed, nullable, refused
from extproc.counting.request import Read, Tools
from extproc.counting.vllm import chat
from extproc.counting.vllm.rules import asked

FIELDS: Mapping[str, Check] = {
    **chat.FIELDS,
    "n": nullable(integer(1, 1)),
    "tools": refused("are not available in a batch"),
}
"""Fields of the request: the engine hands all but the messages on to a chat of each conversation."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/chat/completions/batch."""
    values = checked(body, FIELDS)
    if values.get("stream"):
        raise malformed("stream is not available in a batch", "stream")
    if body.get("tool_choice") not in (None, "none"):
        raise malformed("tool_choice must be none in a batch", "tool_choice")
    chat.check_options(values)
    conversations = _conversations(values.get("messages"))
    return asked(values, chat.CEILINGS), lambda: chat.rendered(conversations, values, model)


def _conversations(found: object) -> list[list[Any]]:
    """The conversations, which hold no more messages together than one chat may."""
    if not isinstance(found, list) or not found:
        raise malformed("messages must hold at least one conversation", "messages")
    if not all(isinstance(messages, list) and messages for messages in found):
        raise malformed("messages must hold conversations of at least one message each", "messages")
    if sum(map(len, found)) > chat.MESSAGES_MAX:
        raise malformed(f"messages holds more than {chat.MESSAGES_MAX} messages", "messages")
    return found
