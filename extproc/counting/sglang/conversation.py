"""Chat messages and tools in the shape in which SGLang hands them to a chat template.

It dumps its own models: fields in their order, without those that are null at the top of a message, with them inside
a tool call and a tool. The keys of a function keep the client's order, and absent ones of `description`, `name` and
`parameters` follow as null.
"""

from __future__ import annotations

from typing import Any

import orjson

from extproc.counting.fields import as_bool, as_int, as_list, as_object, as_str, malformed, nullable, one_of
from extproc.counting.media import STANDS_AS, Meter
from extproc.counting.sglang.schema_types import standard_types
from extproc.counting.template import Message

TOOL_ROLES = frozenset({"developer", "root", "system"})
"""Roles of messages whose tools may be called."""

_ROLES = TOOL_ROLES | {"assistant", "function", "latest_reminder", "tool"}
"""Roles but the user's, written in any case."""

_MEDIA_PARTS = frozenset({"audio_url", "image_url", "input_audio", "video_url"})

_STRING = nullable(as_str)
_TEXT_FIELDS = (("tool_call_id", _STRING), ("name", _STRING), ("phase", nullable(one_of("commentary", "final_answer"))))


def conversation(messages: list[Any], meter: Meter, *, parts_as_list: bool) -> list[Message]:
    """What the template gets as `messages`; Fault(MALFORMED_REQUEST) for messages the engine refuses.

    `parts_as_list`: a list of parts reaches the template as one, else as its texts joined by spaces. A last message
    that is the assistant's becomes the user's. `meter` charges media parts.
    """
    shaped = [_message(message, meter, parts_as_list=parts_as_list) for message in messages]
    last = shaped[-1]
    if last["role"] == "assistant" and isinstance(last["content"], str):
        shaped[-1] = {"role": "user", "content": last["content"]}
    return shaped


def _message(message: object, meter: Meter, *, parts_as_list: bool) -> Message:
    message = as_object("messages", message)
    role = as_str("messages.role", message.get("role"))
    if role == "user":
        return {"role": role, "content": _content(message.get("content"), role, meter, parts_as_list=parts_as_list)}
    role = role.lower()
    if role not in _ROLES:
        raise malformed("messages.role is none that the engine knows", "messages.role")
    content = message.get("content")
    shaped = {
        "role": role,
        "content": "" if content is None else _content(content, role, meter, parts_as_list=parts_as_list),
        **{name: check(f"messages.{name}", message.get(name)) for name, check in _TEXT_FIELDS},
        "reasoning_content": _STRING("messages.reasoning_content", message.get("reasoning_content")),
        "tool_calls": _tool_calls(message.get("tool_calls"), role),
        "tools": None if message.get("tools") is None else tools_as_rendered("messages.tools", message["tools"]),
        "prefix": nullable(as_bool)("messages.prefix", message.get("prefix")),
    }
    if parts_as_list and isinstance(content, list):
        shaped["content"] = shaped.pop("content")  # a list that was handed on is the last key
    return {name: value for name, value in shaped.items() if value is not None}


def _content(content: object, role: str, meter: Meter, *, parts_as_list: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed("content must be a string or a list of parts", "messages.content")
    parts = [part for part in (_part(part, role, meter) for part in content) if part is not None]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if parts_as_list and (role != "tool" or len(texts) < len(parts)):
        return parts
    return " ".join([*(STANDS_AS for part in parts if part.keys() == {"type"}), *texts])


def _part(part: object, role: str, meter: Meter) -> dict[str, str] | None:
    """A part as a template sees it; None for reasoning, which reaches no template."""
    part = as_object("messages.content", part)
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": as_str("messages.content.text", part.get("text"))}
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": as_str("messages.content.name", part.get("name"))}
    if kind in ("thinking", "reasoning") and role == "assistant":
        if (part.get("thinking") is None) == (part.get("text") is None):
            raise malformed("a part of reasoning needs one of thinking and text", "messages.content")
        return None
    return meter.add(kind, part, _MEDIA_PARTS)


def _tool_calls(calls: object, role: str) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    return [_tool_call(as_object("messages.tool_calls", call), role) for call in as_list("messages.tool_calls", calls)]


def _tool_call(call: dict[str, Any], role: str) -> dict[str, Any]:
    function = as_object("messages.tool_calls.function", call.get("function"))
    one_of("function")("messages.tool_calls.type", call.get("type", "function"))
    return {
        "id": _STRING("messages.tool_calls.id", call.get("id")),
        "index": nullable(as_int)("messages.tool_calls.index", call.get("index")),
        "type": "function",
        "function": {
            "name": _STRING("messages.tool_calls.function.name", function.get("name")),
            "arguments": _arguments(function.get("arguments"), role),
        },
    }


def _arguments(arguments: object, role: str) -> object:
    """Arguments as the template gets them: those of the assistant as an object, which their text must be."""
    if arguments is None or isinstance(arguments, dict):
        return arguments
    name = "messages.tool_calls.function.arguments"
    text = as_str(name, arguments)
    if role != "assistant":
        return text
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise malformed("the arguments of a tool call must be JSON text", name) from None
    return as_object(name, found)


def tools_as_rendered(name: str, tools: object) -> list[dict[str, Any]]:
    """Tools of the field `name` as the engine dumps them."""
    return [_tool(name, as_object(name, tool)) for tool in as_list(name, tools)]


def _tool(name: str, tool: dict[str, Any]) -> dict[str, Any]:
    client = as_object(f"{name}.function", tool.get("function"))
    deferred = nullable(as_bool)(f"{name}.defer_loading", tool.get("defer_loading"))
    inner = nullable(as_bool)(f"{name}.function.defer_loading", client.get("defer_loading"))
    function = {
        "description": _STRING(f"{name}.function.description", client.get("description")),
        "name": as_str(f"{name}.function.name", client.get("name")),
        "parameters": standard_types(client.get("parameters")),
        "strict": nullable(as_bool)(f"{name}.function.strict", client.get("strict")),
        "defer_loading": deferred if inner is None else inner,
    }
    for key in ("strict", "defer_loading"):
        if function[key] is None:
            del function[key]
    order = [key for key in client if key in function]
    return {
        "type": as_str(f"{name}.type", tool.get("type", "function")),
        "function": {key: function[key] for key in (*order, *(key for key in function if key not in order))},
        "defer_loading": deferred,
    }
