"""POST /v1/responses: items and tools, which the engine turns into a chat.

What outlives or outgrows the body is refused: work in the background goes on when the response has ended, and a stored
response or conversation adds messages that are not in the body. A tool that the engine itself runs starts another turn
with a fresh ceiling, so every permitted turn is charged one; what such a tool answers, and the next turn reads, is not
known here and not counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from extproc.counting.fields import (
    Check,
    as_bool,
    as_int,
    as_list,
    as_object,
    as_str,
    checked,
    integer,
    list_of,
    malformed,
    map_of,
    nullable,
    one_of,
    refused,
)
from extproc.counting.request import Read, Tools
from extproc.counting.template import Message
from extproc.counting.vllm import chat
from extproc.counting.vllm.rules import COMMON, asked, schema

TOOL_CALLS_MAX = 128
"""Calls of the engine's own tools in one request: each may cost another ceiling, and few fit any budget."""

_HISTORY = "adds messages that are not in the body and is not accepted here"
_CUSTOM_INPUT = "input"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {_CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}
"""Parameters of the function that stands for a custom tool in vLLM's prompt; they are tokens of it."""

_UNFINISHED = ("in_progress", "incomplete")
"""Status of a last message that the answer continues."""


def _background(name: str, value: object) -> None:
    if as_bool(name, value):
        raise malformed(f"{name} goes on after the response has ended and is not accepted here", name)


def _previous_messages(name: str, value: object) -> None:
    if as_list(name, value):
        raise malformed(f"{name} {_HISTORY}", name)


def _reasoning(name: str, value: object) -> object:
    return chat.FIELDS["reasoning_effort"](f"{name}.effort", as_object(name, value).get("effort"))


def _text(name: str, value: object) -> object:
    constraint = schema(name, value).get("format")
    if constraint is None:
        return None
    kind = as_object(f"{name}.format", constraint).get("type")
    return one_of("text", "json_object", "json_schema")(f"{name}.format.type", kind)


FIELDS: Mapping[str, Check] = {
    **{
        name: COMMON[name]
        for name in (
            "cache_salt",
            "ec_transfer_params",
            "frequency_penalty",
            "ignore_eos",
            "include_stop_str_in_output",
            "kv_transfer_params",
            "logit_bias",
            "media_io_kwargs",
            "min_p",
            "mm_processor_kwargs",
            "presence_penalty",
            "priority",
            "repetition_penalty",
            "request_id",
            "seed",
            "session_id",
            "spaces_between_special_tokens",
            "stop",
            "stop_token_ids",
            "stream",
            "structured_outputs",
            "temperature",
            "top_k",
            "top_p",
            "user",
            "vllm_xargs",
        )
    },
    "background": nullable(_background),
    "chat_template_kwargs": chat.FIELDS["chat_template_kwargs"],
    "conversation": refused(_HISTORY),
    "enable_response_messages": as_bool,
    "include": nullable(list_of(as_str)),
    "include_reasoning": as_bool,
    "instructions": nullable(as_str),
    "max_output_tokens": nullable(as_int),
    "max_tool_calls": nullable(integer(high=TOOL_CALLS_MAX)),
    "metadata": nullable(map_of(as_str)),
    "parallel_tool_calls": nullable(as_bool),
    "previous_input_messages": nullable(_previous_messages),
    "previous_response_id": refused(_HISTORY),
    "prompt": refused("needs stored templates and is not accepted here"),
    "reasoning": nullable(_reasoning),
    "service_tier": one_of("auto", "default", "flex", "scale", "priority"),
    "skip_special_tokens": nullable(as_bool),
    "store": nullable(as_bool),
    "text": nullable(_text),
    "tools": as_list,
    "top_logprobs": nullable(as_int),
    "truncation": nullable(one_of("auto", "disabled")),
}
"""Fields of the request without its input."""


class _ToolSet(NamedTuple):
    """`functions` as a chat's tools, whether the engine runs one of the tools itself, and names by `tool_choice`."""

    functions: list[dict[str, Any]]
    runs: bool
    names: frozenset[str]


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/responses."""
    values: dict[str, Any] = checked(body, FIELDS)
    if values.get("text") and body.get("structured_outputs") is not None:
        raise malformed("structured_outputs and text.format exclude each other", "structured_outputs")
    chat.check_tools_count(values.get("tools"))
    tools = _tool_set(values.get("tools") or [])
    _check_tool_choice(body.get("tool_choice", "auto"), tools, any_tools=bool(values.get("tools")))
    if tools.runs:
        values["n"] = _turns(values.get("max_tool_calls"))
    if values.get("truncation", "disabled") != "disabled":  # null truncates too
        values["truncate_prompt_tokens"] = -1
    items = _items(body.get("input"))
    continues = items[-1].get("status") in _UNFINISHED and items[-1].get("type", "message") in ("message", "reasoning")
    options = {
        "add_generation_prompt": not continues,
        "chat_template_kwargs": values.get("chat_template_kwargs"),
        "continue_final_message": continues,
        "reasoning_effort": values.get("reasoning"),
        "tools": tools.functions if values.get("tools") else None,
    }
    found = asked(values, ("max_output_tokens",))
    return found, lambda: chat.prompts(
        [_messages(values.get("instructions"), items)], options, model.templates, model.media
    )


def _turns(tool_calls_max: int | None) -> int:
    """Turns that the engine may run: one more than its tools may be called."""
    if tool_calls_max is None:
        raise malformed(
            "tools that the engine runs need max_tool_calls, or nothing bounds the output", "max_tool_calls"
        )
    return max(0, tool_calls_max) + 1


def _tool_set(tools: list[Any]) -> _ToolSet:
    """Tools by what the engine makes of them: functions, functions of namespaces, custom tools, and its own."""
    functions: list[dict[str, Any]] = []
    local: list[str] = []
    runs = False
    for tool in tools:
        kind = as_str("tools.type", as_object("tools", tool).get("type"))
        if kind == "function":
            functions.append({key: value for key, value in tool.items() if key != "type"})
        elif kind == "custom":
            functions.append(_custom(tool))
        elif kind == "namespace":
            own = _namespaced(tool)
            functions += [function for _, function in own]
            local += [name for name, _ in own]
        else:
            runs = True
    chat.check_tools_count(functions)
    full = {as_str("tools.name", function.get("name")) for function in functions}
    names = full | {name for name, count in Counter(local).items() if count == 1}
    return _ToolSet([{"type": "function", "function": function} for function in functions], runs, frozenset(names))


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    constraint = tool.get("format")
    if isinstance(constraint, dict) and constraint.get("type") == "grammar":
        raise malformed("custom tools with a grammar are not accepted here", "tools.format")
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}


def _namespaced(tool: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The functions of a namespace, each with its own name."""
    namespace = as_str("tools.name", tool.get("name"))
    found = []
    for inner in as_list("tools.tools", tool.get("tools")):
        definition = as_object("tools.tools", inner)
        if definition.get("type") == "function":
            name = as_str("tools.tools.name", definition.get("name"))
            found.append((name, {**definition, "name": f"{namespace}__{name}"}))
    return found


def _check_tool_choice(choice: object, tools: _ToolSet, *, any_tools: bool) -> None:
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        if not isinstance(choice.get("name"), str) or choice["name"] not in tools.names:
            raise malformed("tool_choice must be one of the tools", "tool_choice")
    elif not isinstance(choice, dict):
        one_of("none", "auto", "required")("tool_choice", choice)
        if choice == "required" and not any_tools:
            raise malformed("tool_choice required needs tools", "tool_choice")


def _items(found: object) -> list[dict[str, Any]]:
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list) or not found:
        raise malformed("input must be a string or a list of at least one item", "input")
    if len(found) > chat.MESSAGES_MAX:
        raise malformed(f"input holds more than {chat.MESSAGES_MAX} items", "input")
    return [as_object("input", item) for item in found]


def _messages(instructions: str | None, items: list[dict[str, Any]]) -> list[Message]:
    """Items as chat messages. Reasoning, text and calls of one turn are items of their own and join one message."""
    found: list[Message] = []
    for item in items:
        message = _message(item)
        last = found[-1] if found and found[-1]["role"] == "assistant" else None
        if last is None or message["role"] != "assistant" or not _join(last, message):
            found.append(message)
    return [{"role": "system", "content": instructions}, *found] if instructions else found


def _join(last: Message, message: Message) -> bool:
    """Put what `message` says into `last`, where that has no such part yet; calls always join."""
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
        return True
    for part in ("reasoning", "content"):
        if part in message:
            if last.get(part) is not None or not isinstance(message[part], str):
                return False
            last[part] = message[part]
    return True


def _message(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        name, namespace = as_str("input.name", item.get("name")), item.get("namespace")
        if namespace:
            name = f"{as_str('input.namespace', namespace)}__{name}"
        return _call(item, name, as_str("input.arguments", item.get("arguments")))
    if kind == "custom_tool_call":
        text = as_str("input.input", item.get("input") or "")
        return _call(item, as_str("input.name", item.get("name")), json.dumps({_CUSTOM_INPUT: text}))
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = as_str("input.call_id", item.get("call_id"))
        return {"role": "tool", "content": _content(item.get("output")), "tool_call_id": call_id}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning": _reasoning_text(item)}
    if kind != "message":
        raise malformed("input holds an item of a type that is not accepted here", "input.type")
    role = one_of("user", "assistant", "system", "developer")("input.role", item.get("role"))
    content = _content(item.get("content"))
    if role == "assistant" and isinstance(content, list) and content:
        first = as_object("input.content", content[0])  # the engine reads no further part of an answer
        content = as_str("input.content.text", first["text"]) if first.get("text") is not None else content
    return {"role": role, "content": content}


def _content(content: object) -> str | list[Any]:
    if isinstance(content, str | list):
        return content
    raise malformed("content and output must be a string or a list of parts", "input.content")


def _call(item: Mapping[str, Any], name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    call_id = as_str("input.call_id", item.get("call_id"))
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """The first text of the reasoning, else of its summary."""
    if item.get("encrypted_content"):
        raise malformed("encrypted reasoning is not accepted here", "input.encrypted_content")
    summary = as_list("input.summary", item.get("summary"))
    texts = nullable(as_list)("input.content", item.get("content")) or summary
    if not isinstance(texts, list) or not texts:
        return ""
    return as_str("input.content.text", as_object("input.content", texts[0]).get("text"))
