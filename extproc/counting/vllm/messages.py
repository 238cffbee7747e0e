"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages, which the engine turns into a chat.

What a block becomes is vLLM 0.33's conversion: results of tools are messages of their own, before the turn that
holds them; thinking is reasoning; redacted thinking and documents within results are dropped. Fields that the
conversion does not know, such as service_tier, have no effect on the engine and none here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from extproc.core.values import Fault
from extproc.counting.fields import (
    Check,
    as_bool,
    as_list,
    as_object,
    as_str,
    checked,
    integer,
    malformed,
    nullable,
    one_of,
)
from extproc.counting.request import Asked, Read, Tools
from extproc.counting.template import ChatTemplate, Message
from extproc.counting.vllm import chat
from extproc.counting.vllm.conversation import BILLING_HEADER
from extproc.counting.vllm.rules import COMMON, asked, schema

THINKING_TOKENS_MIN = 1024
"""Least `thinking.budget_tokens`."""

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_BLOCKS = frozenset(
    {"redacted_thinking", "text", "thinking", "tool_reference", "tool_result", "tool_use", *_TOOL_CHANGES}
)
"""Types of blocks that the engine takes and that hold text; turns may also hold images."""

_CALL_ID = "call_1700000000"
"""The id of a call that has none: the engine takes the time in seconds."""


def _stop_sequences(name: str, value: object) -> None:
    COMMON["stop"](name, as_list(name, value))


def _model(name: str, value: object) -> str:
    if as_str(name, value):
        return str(value)
    raise malformed("model is required", name)


def _thinking(name: str, value: object) -> dict[str, Any]:
    thinking = as_object(name, value)
    one_of("enabled", "disabled", "adaptive")(f"{name}.type", thinking.get("type"))
    if thinking["type"] == "enabled":
        budget = integer(THINKING_TOKENS_MIN)(f"{name}.budget_tokens", thinking.get("budget_tokens"))
        return {**thinking, "budget_tokens": budget}
    return thinking


def _output_config(name: str, value: object) -> dict[str, object]:
    config = as_object(name, value)
    nullable(one_of(*_EFFORTS))(f"{name}.effort", config.get("effort"))
    nullable(schema)(f"{name}.format", config.get("format"))
    return config


def _tool_choice(name: str, value: object) -> None:
    choice = as_object(name, value)
    one_of("auto", "any", "tool", "none")(f"{name}.type", choice.get("type"))
    if choice["type"] == "tool" and not choice.get("name"):
        raise malformed(f"{name}.name is required when type is tool", f"{name}.name")


COUNTED_FIELDS: Mapping[str, Check] = {
    "chat_template_kwargs": chat.FIELDS["chat_template_kwargs"],
    "messages": as_list,
    "model": _model,
    "output_config": nullable(_output_config),
    "thinking": nullable(_thinking),
    "tool_choice": nullable(_tool_choice),
    "tools": nullable(as_list),
}
"""Fields of count_tokens, without the system text."""

FIELDS: Mapping[str, Check] = {
    **COUNTED_FIELDS,
    **{
        name: COMMON[name]
        for name in (
            "cache_salt",
            "ec_transfer_params",
            "kv_transfer_params",
            "temperature",
            "top_k",
            "top_p",
            "vllm_xargs",
        )
    },
    "max_tokens": integer(1),
    "metadata": nullable(as_object),
    "stop_sequences": nullable(_stop_sequences),
    "stream": nullable(as_bool),
}
"""Fields of messages, without the system text."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/messages."""
    values = checked(body, FIELDS)
    if "max_tokens" not in values:
        raise malformed("max_tokens is required", "max_tokens")
    _check_thinking_budget(values, body.get("kv_transfer_params") or {})
    return _read(body, values, model, asked(values, ("max_tokens",)))


def read_count(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/messages/count_tokens: the same prompt, and nothing is generated."""
    return _read(body, checked(body, COUNTED_FIELDS), model, Asked(generates=False))


def _check_thinking_budget(values: Mapping[str, Any], transfer: Mapping[str, Any]) -> None:
    """The budget is less than the ceiling, but where another engine is to decode."""
    budget = (values.get("thinking") or {}).get("budget_tokens")
    if budget is not None and budget >= values["max_tokens"] and not transfer.get("do_remote_decode"):
        raise malformed("thinking.budget_tokens must be less than max_tokens", "thinking.budget_tokens")


def _read(body: Mapping[str, Any], values: Mapping[str, Any], model: Tools, found: Asked) -> Read:
    if "model" not in values:
        raise malformed("model is required", "model")
    messages = chat.check_messages(values.get("messages"))
    chat.check_tools_count(values.get("tools"))
    return found, lambda: chat.rendered(
        [_conversation(body.get("system"), messages, model.templates)], _options(values, messages, model), model
    )


def _options(values: Mapping[str, Any], messages: list[Any], model: Tools) -> dict[str, object]:
    """The options of the chat that the messages become."""
    effort = (values.get("output_config") or {}).get("effort")
    if (values.get("thinking") or {}).get("type") == "disabled":
        if model.chats is not None:
            effort = "low"  # Harmony refuses `none`
        elif "default" in model.templates:
            effort = _effort_without_thinking(model.templates["default"])
    return {
        "chat_template_kwargs": values.get("chat_template_kwargs"),
        "reasoning_effort": effort,
        "tools": _tools(values.get("tools"), messages),
    }


@functools.lru_cache(maxsize=64)
def _effort_without_thinking(template: ChatTemplate) -> str:
    """The effort that disabled thinking stands for: `none`, or `low` where `template` refuses or ignores that."""
    without = _with_effort(template, "none")
    return "low" if without is None or without in {_with_effort(template, effort) for effort in _EFFORTS} else "none"


def _with_effort(template: ChatTemplate, effort: str) -> tuple[str, ...] | None:
    try:
        asking = [{"role": "user", "content": "Hi"}]
        return chat.prompts([asking], {"reasoning_effort": effort}, {"default": template}).texts
    except Fault:
        return None


def _conversation(system: object, messages: list[Any], templates: Mapping[str, ChatTemplate]) -> list[Message]:
    """The chat's messages: the system text, then every turn.

    System messages between turns join the first where a template takes none there.
    """
    inline = any(isinstance(message, dict) and message.get("role") == "system" for message in messages)
    merges = inline and any(_takes_system_first(template.source) for template in templates.values())
    leading = [system] if isinstance(system, str) else list(_system_texts(_blocks("system", system or [])))
    turns: list[Message] = []
    for message in messages:
        if not isinstance(message, dict):
            raise malformed("each message must be an object", "messages")
        role = one_of("user", "assistant", "system")("messages.role", message.get("role"))
        content = message.get("content")
        if role != "system":
            turns += _turns(str(role), content)
        elif text := "".join(_system_texts(_system_blocks(content))):
            if merges:
                leading.append(text)
            else:
                turns.append({"role": "system", "content": text})
    text = "".join(leading)
    return [{"role": "system", "content": text}, *turns] if text else turns


@functools.lru_cache(maxsize=64)
def _takes_system_first(source: str) -> bool:
    """Whether a template fails on a second system message; probed as bare as the engine does it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=turns, add_generation_prompt=False)
    except Exception:  # noqa: BLE001 (a template is code: it may raise anything)
        return True
    return False


def _system_texts(blocks: list[dict[str, Any]]) -> Iterator[str]:
    """The texts of system blocks, without what changes with every request."""
    for block in _of(blocks, "text"):
        if (text := _text("system", block, "text")) and not text.startswith(BILLING_HEADER):
            yield text


def _system_blocks(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return _blocks("messages.content", content, changes_tools=True)


def _blocks(name: str, content: object, *, changes_tools: bool = False, images: bool = False) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        raise malformed(f"{name} must be a string or a list of blocks", name)
    for block in content:
        if not isinstance(block, dict):
            raise malformed(f"each block of {name} must be an object", name)
        kind = block.get("type")
        if not isinstance(kind, str) or (kind not in _BLOCKS and not (images and kind == "image")):
            raise malformed("blocks of this type are not accepted here", f"{name}.type")
        if kind in _TOOL_CHANGES and not changes_tools:
            raise malformed("only a system message changes tools", f"{name}.type")
    return content


def _text(name: str, block: Mapping[str, Any], key: str) -> str:
    """The text at `key`; empty where there is none."""
    value = block.get(key)
    return "" if value is None else as_str(f"{name}.{key}", value)


def _turns(role: str, content: object) -> Iterator[Message]:
    """One turn as chat messages: results of tools, then what is left of it."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    name = "messages.content"
    blocks = _blocks(name, content, images=True)
    if role == "user":
        for block in _of(blocks, "tool_result"):
            yield from _results(name, block)
    parts = list(_parts(name, blocks, role))
    if role == "user" and not parts:
        return
    turn: Message = {"role": role}
    if parts:
        turn["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if calls := [_call(name, block) for block in _of(blocks, "tool_use")]:
        turn["tool_calls"] = calls
    thinking = [block for block in _of(blocks, "thinking") if block.get("thinking") is not None]
    if thinking:
        turn["reasoning"] = "".join(_text(name, block, "thinking") for block in thinking)
    yield turn


def _of(blocks: list[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (block for block in blocks if block["type"] == kind)


def _parts(name: str, blocks: list[dict[str, Any]], role: str) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if block["type"] == "text" and (text := _text(name, block, "text")):
            yield {"type": "text", "text": text}
        elif block["type"] == "image":
            yield _image(name, block)
        elif block["type"] == "tool_result" and role == "assistant":
            yield {"type": "text", "text": f"Tool result: {block.get('content') or ''}"}


def _image(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """An image as a part of a chat; its source is a URL, or else content in base64."""
    source = as_object(f"{name}.source", block.get("source"))
    url = source.get("url")
    if source.get("type") != "url":
        data = as_str(f"{name}.source.data", source.get("data"))
        media_type = as_str(f"{name}.source.media_type", source.get("media_type", "image/jpeg"))
        url = f"data:{media_type};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = nullable(as_object)(f"{name}.input", block.get("input"))
    function = {"name": _text(name, block, "name"), "arguments": arguments or {}}
    return {"id": _text(name, block, "id") or _CALL_ID, "type": "function", "function": function}


def _results(name: str, block: Mapping[str, Any]) -> Iterator[Message]:
    """A tool's result, its images, and the tools that it refers to, as messages: images are the user's."""
    content = block.get("content")
    items = [{"type": "text", "text": content}] if isinstance(content, str) else nullable(as_list)(name, content) or []
    texts: list[str] = []
    images: list[dict[str, Any]] = []
    found: list[dict[str, str]] = []
    for item in items if isinstance(items, list) else []:
        kind = as_object(name, item).get("type")
        if kind == "text":
            texts.append(as_str(f"{name}.text", item.get("text", "")))
        elif kind == "image":
            images.append(_image(name, item))
        elif kind == "tool_reference" and (referred := item.get("tool_name") or item.get("name")):
            found.append({"type": "tool_reference", "name": as_str(f"{name}.tool_name", referred)})
    call_id = _text(name, block, "tool_use_id")
    yield {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if found:
        yield {"role": "tool", "tool_call_id": call_id, "content": found}


def _tools(tools: list[Any] | None, messages: list[Any]) -> list[dict[str, Any]] | None:
    """The tools in effect after the last message, as a chat's tools."""
    changes = list(_tool_changes(messages))
    if tools is None and not changes:
        return None
    functions = [_function(tool) for tool in tools or []]
    if changes:
        functions = _changed({function["name"]: function for function in functions}, changes)
    return [{"type": "function", "function": function} for function in functions]


def _function(tool: object) -> dict[str, Any]:
    definition = as_object("tools", tool)
    parameters = as_object("tools.input_schema", definition.get("input_schema"))
    return {
        "name": as_str("tools.name", definition.get("name")),
        "description": definition.get("description"),
        "parameters": parameters if "type" in parameters else {**parameters, "type": "object"},
        "strict": definition.get("strict"),
        "defer_loading": definition.get("defer_loading"),
    }


def _tool_changes(messages: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else []:
            if isinstance(block, dict) and block.get("type") in _TOOL_CHANGES:
                yield block["type"], as_object("messages.content.tool", block.get("tool"))


def _changed(functions: dict[str, dict[str, Any]], changes: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """`functions` after `changes`: an added tool is no longer deferred, a removed one is not there."""
    removed: set[str] = set()
    for kind, tool in changes:
        if tool.get("type") == "tool_definition" and kind == "tool_addition":
            function = _function(tool.get("definition"))
            functions[function["name"]] = function
        else:
            one_of("tool_reference")("messages.content.tool.type", tool.get("type"))
            function = functions.get(as_str("messages.content.tool.name", tool.get("name")), {})
            if not function:
                raise malformed("a tool that changes must be one of tools", "messages.content.tool.name")
        if kind == "tool_removal":
            removed.add(function["name"])
            continue
        removed.discard(function["name"])
        if tool["type"] == "tool_reference":
            functions[function["name"]] = {**function, "defer_loading": None}
    return [function for name, function in functions.items() if name not in removed]
