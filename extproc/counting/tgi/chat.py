"""POST /v1/chat/completions: messages rendered by the model's template.

The ceiling is `max_tokens` or `max_completion_tokens`, two names of one field: a body with both is refused. Tools are
refused, since the engine adds a text of its own to them, and so are messages with calls, which it writes as JSON. The
engine renders with minijinja; a template that this reads otherwise than jinja2 is counted otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import (
    SPACES,
    Check,
    as_list,
    as_object,
    as_str,
    checked,
    malformed,
    nullable,
    one_of,
    refused,
)
from extproc.counting.prompts import REPLACES_PROMPT
from extproc.counting.request import Prompts, Read, Tools, asked_of, is_lowered
from extproc.counting.template import Chat, ChatTemplate, Message
from extproc.counting.tgi.rules import OPENAI, flag, float_number, unsigned

MESSAGES_MAX = 4096
"""Messages of one chat, as for vLLM."""

CEILINGS = ("max_tokens", "max_completion_tokens")
"""Names of the ceiling's one field."""

_TOOLS = "adds a text of the engine's own to the prompt, which is not counted here"

FIELDS: Mapping[str, Check] = {
    **OPENAI,
    **dict.fromkeys(CEILINGS, nullable(unsigned())),
    "guideline": refused(REPLACES_PROMPT),
    "logprobs": nullable(flag),
    "messages": as_list,
    "n": nullable(unsigned()),
    "presence_penalty": nullable(float_number),
    "response_format": nullable(as_object),
    "stream_options": nullable(as_object),
    "tool_prompt": refused(_TOOLS),
    "tools": refused(_TOOLS),
    "top_logprobs": nullable(unsigned()),
}
"""Fields of the request."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/chat/completions."""
    values = checked(body, FIELDS)
    messages: Any = values.get("messages")
    if not messages:
        raise malformed("messages must hold at least one message", "messages")
    if len(messages) > MESSAGES_MAX:
        raise malformed(f"messages holds more than {MESSAGES_MAX} messages", "messages")
    present = [name for name in CEILINGS if name in body]
    if len(present) > 1:
        raise malformed("max_completion_tokens is another name of max_tokens: give one of them", present[1])
    one_sequence = {name: value for name, value in values.items() if name != "n"}
    asked = asked_of(one_sequence, tuple(present) or CEILINGS[:1])._replace(lowered=is_lowered(values))
    return asked, lambda: _prompts(messages, model.templates)


def _prompts(found: list[Any], templates: Mapping[str, ChatTemplate]) -> Prompts:
    template = templates.get("default")
    if template is None:
        raise malformed("this model has no chat template", "messages")
    messages = [_message(as_object("messages", message)) for message in found]
    text = template.render(
        Chat(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
    )
    return Prompts((_continued(text, messages[-1]),), (), add_special_tokens=False)


def _continued(text: str, last: Message) -> str:
    """The prompt ends with a last message of the assistant, which the model goes on with."""
    if last["role"] != "assistant":
        return text
    before, found, _ = text.rpartition(last["content"]) if last["content"] else (text, "", "")
    return (before + found).rstrip(SPACES) if found or not last["content"] else text


def _message(message: dict[str, object]) -> Message:
    for name in ("tool_calls", "tool_call_id"):
        if message.get(name) is not None:
            raise malformed(f"messages.{name} is not accepted here for this engine", f"messages.{name}")
    return {"role": as_str("messages.role", message.get("role")), "content": _content(message.get("content"))}


def _content(content: object) -> str:
    """Text, or the texts of a list of chunks with nothing between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed("content must be a string or a list of chunks", "messages.content")
    chunks = [as_object("messages.content", chunk) for chunk in content]
    for chunk in chunks:
        one_of("text")("messages.content.type", chunk.get("type"))
    return "".join(as_str("messages.content.text", chunk.get("text")) for chunk in chunks)
