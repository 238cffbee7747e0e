"""Chat messages and tools in the shape in which vLLM hands them to a chat template."""

from __future__ import annotations

import json
from typing import Any

from extproc.counting.fields import as_bool, as_object, as_str, malformed
from extproc.counting.media import PART_TYPES, STANDS_AS, Meter
from extproc.counting.template import Message

_TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part type -> the key of its text."""

BILLING_HEADER = "x-anthropic-billing-header"
"""vLLM drops the first line of system text that starts with this: it changes with every request."""


def conversation(
    messages: list[Any], *, parts_as_list: bool, knows_developer: bool, meter: Meter | None = None
) -> list[Message]:
    """What the template gets as `messages`; Fault(MALFORMED_REQUEST) for messages the engine refuses.

    `parts_as_list`: content reaches the template as a list of parts, else as one string, parts joined by newlines.
    A template that does not know the developer role gets system messages instead, merged into the first. Media parts
    are charged to `meter`; without one they are refused.
    """
    meter = meter or Meter()
    shaped = [_message(message, meter, parts_as_list=parts_as_list) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in shaped):
        return _developer_as_system(shaped)
    return shaped


def _message(message: object, meter: Meter, *, parts_as_list: bool) -> Message:
    if not isinstance(message, dict):
        raise malformed("each message must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str):
        raise malformed("each message needs a role, which is a string", "messages.role")
    shaped: Message = {"role": role, "content": _content(message, role, meter, parts_as_list=parts_as_list)}
    if role == "assistant":
        _assistant(message, shaped)
    elif role == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        shaped["tools"] = message.get("tools")
    for key in ("name", "task"):
        value = message.get(key)
        if isinstance(value, str):
            shaped[key] = value
        elif value is not None:
            raise malformed(f"messages.{key} must be a string", f"messages.{key}")
    return shaped


def _content(message: dict[str, Any], role: str, meter: Meter, *, parts_as_list: bool) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str) and role != "system":
        return [{"type": "text", "text": content}] if parts_as_list and role != "tool" else content
    if content is None:
        if "content" in message and role not in ("assistant", "function"):
            raise malformed(f"content of a {_known(role)} message cannot be null", "messages.content")
        return [] if parts_as_list and role != "tool" else ""
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise malformed("content must be a string or a list of parts", "messages.content")
    shaped = [part for part in (_part(part, role, meter) for part in parts) if part is not None]
    if parts_as_list and (role != "tool" or any(part["type"] != "text" for part in shaped)):
        return shaped
    texts = [part["text"] if part["type"] == "text" else part.get("name") for part in shaped]
    # What stands for media comes first.
    return "\n".join([*(STANDS_AS for text in texts if text is None), *(text for text in texts if text)])


def _part(part: object, role: str, meter: Meter) -> dict[str, Any] | None:
    """A part as a list-taking template sees it; None for one without text."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise malformed("each content part must be a string or an object", "messages.content")
    if part.get("uuid") is not None:  # the engine then reads whatever media the part holds, whatever its type
        raise malformed("uuid of a content part is not accepted here", "messages.content.uuid")
    # The engine infers the type of a part that holds nothing but text.
    kind = part.get("type", "text" if part.keys() == {"text"} else None)
    if kind == "tool_reference":
        return {"type": kind, "name": as_str("messages.content.name", part.get("name"))}
    key = _TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if key is None:
        return meter.add(kind, part, PART_TYPES)
    text = part.get(key)
    if text is None:
        return None
    text = as_str(f"messages.content.{key}", text)
    if role == "system" and kind == "text" and text.startswith(BILLING_HEADER):
        text = text.partition("\n")[2]
        if not text:
            return None
    return {"type": "text", "text": text}


def _assistant(message: dict[str, Any], shaped: Message) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise malformed("tool_calls must be an array", "messages.tool_calls")
        if calls:  # an empty list would put templates on their tool path
            shaped["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        text = as_str("messages.reasoning", reasoning)
        shaped["reasoning"] = text
        shaped["reasoning_content"] = text


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise malformed("each of tool_calls must be an object of type function", "messages.tool_calls")
    name = as_str("messages.tool_calls.function.name", function.get("name"))
    return {
        "id": call.get("id"),
        "function": {"arguments": _arguments(function.get("arguments")), "name": name},
        "type": "function",
    }


def _arguments(arguments: object) -> dict[str, Any]:
    """Arguments as an object. Text that is not one becomes an empty object, so that a chat can go on after it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except RecursionError:
            raise malformed("the arguments of a tool call nest too deeply", "messages.tool_calls") from None
        except ValueError:
            arguments = {}
    elif arguments is not None and not isinstance(arguments, dict):
        raise malformed("the arguments of a tool call must be JSON text", "messages.tool_calls")
    return arguments if isinstance(arguments, dict) else {}


def _developer_as_system(messages: list[Message]) -> list[Message]:
    system = [message for message in messages if message["role"] in ("system", "developer")]
    first = {"role": "system", "content": _merged([message["content"] for message in system])}
    return [first, *(message for message in messages if message["role"] not in ("system", "developer"))]


def _merged(contents: list[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    texts = [content if isinstance(content, str) else "\n".join(map(_text, content)) for content in contents]
    text = "\n\n".join(texts)
    return text if isinstance(contents[0], str) else [{"type": "text", "text": text}]


def _text(part: dict[str, Any]) -> str:
    return str(part.get("text", ""))


def _known(role: str) -> str:
    """A role for a message to the client: never a client's own text."""
    return role if role in ("system", "developer", "user", "tool") else "custom"


def tools_as_rendered(tools: list[Any]) -> list[dict[str, Any]]:
    """Tools in the field order of the engine's model: absent description and parameters become null, extras go."""
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise malformed("each tool must be an object with a function", "tools.function")
    if tool.get("type", "function") != "function":
        raise malformed("each tool must be of type function", "tools.type")
    function = tool["function"]
    shaped: dict[str, Any] = {
        "name": as_str("tools.function.name", function.get("name")),
        "description": None,
        "parameters": None,
    }
    if function.get("description") is not None:
        shaped["description"] = as_str("tools.function.description", function["description"])
    if function.get("parameters") is not None:
        shaped["parameters"] = as_object("tools.function.parameters", function["parameters"])
    if function.get("strict") is not None:
        shaped["strict"] = as_bool("tools.function.strict", function["strict"])
    deferred = tool.get("defer_loading")
    inner = function.get("defer_loading", deferred)
    if inner is None:
        inner = deferred
    if inner is not None:
        shaped["defer_loading"] = as_bool("tools.function.defer_loading", inner)
    found: dict[str, Any] = {"type": "function", "function": shaped}
    if deferred is not None:
        found["defer_loading"] = as_bool("tools.defer_loading", deferred)
    return found
