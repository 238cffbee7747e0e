"""POST /v1/chat/completions: messages and tools, rendered by the model's template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.counting.fields import (
    Check,
    as_bool,
    as_int,
    as_list,
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
from extproc.counting.media import NO_CHARGES, Charges, Meter
from extproc.counting.prompts import REPLACES_PROMPT, SEQUENCES_MAX
from extproc.counting.request import Prompts, Read, Tools
from extproc.counting.template import Chat, ChatTemplate, template_variables
from extproc.counting.vllm.conversation import conversation, tools_as_rendered
from extproc.counting.vllm.rules import COMMON, asked, check_stream

MESSAGES_MAX = 4096
"""Messages of one chat. Each costs a few microseconds of the event loop to render; agents' histories hold hundreds."""

TOOLS_MAX = 512
"""Tools of one chat: four times what OpenAI accepts. Each costs some 20 us to render."""

CEILINGS = ("max_completion_tokens", "max_tokens")
"""Fields of the output ceiling, the first that is not null holds."""

FIELDS: Mapping[str, Check] = {
    **COMMON,
    "add_generation_prompt": as_bool,
    "chat_template": refused(REPLACES_PROMPT),
    "chat_template_kwargs": nullable(template_variables),
    "continue_final_message": as_bool,
    "documents": nullable(list_of(map_of(as_str))),
    "echo": as_bool,
    "include_reasoning": as_bool,
    "logprobs": nullable(as_bool),
    "max_completion_tokens": nullable(as_int),
    "messages": as_list,
    "n": nullable(integer(1, SEQUENCES_MAX)),
    "parallel_tool_calls": nullable(as_bool),
    "reasoning_effort": nullable(one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "tools": nullable(as_list),
    "top_logprobs": nullable(integer(-1)),
}
"""Fields of the request."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/chat/completions."""
    values = checked(body, FIELDS)
    check_stream(body, values)
    check_options(values)
    messages = check_messages(values.get("messages"))
    _check_tools(values.get("tools"), body.get("tool_choice"))
    return asked(values, CEILINGS), lambda: rendered([messages], values, model)


def check_options(values: Mapping[str, object]) -> None:
    """Fault for options that exclude each other."""
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise malformed("top_logprobs needs logprobs", "top_logprobs")
    if values.get("continue_final_message") and values.get("add_generation_prompt", True):
        raise malformed("continue_final_message needs add_generation_prompt set to false", "continue_final_message")


def check_messages(messages: object) -> list[Any]:
    """`messages`, which are one to `MESSAGES_MAX`."""
    if not isinstance(messages, list) or not messages:
        raise malformed("messages must hold at least one message", "messages")
    if len(messages) > MESSAGES_MAX:
        raise malformed(f"messages holds more than {MESSAGES_MAX} messages", "messages")
    return messages


def _check_tools(tools: object, choice: object) -> None:
    """`tools` absent or at least one; `tool_choice` none, auto, required or the name of one of them."""
    if tools is not None:
        if not tools:
            raise malformed("tools must hold at least one tool, or be left out", "tools")
        check_tools_count(tools)
    if choice is None or choice == "none":
        return
    if tools is None:
        raise malformed("tool_choice needs tools", "tool_choice")
    if choice in ("auto", "required"):
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in _tool_names(tools):
        raise malformed("tool_choice must be none, auto, required or one of the tools", "tool_choice")


def check_tools_count(tools: object) -> None:
    """Fault for more than `TOOLS_MAX` tools."""
    if isinstance(tools, list) and len(tools) > TOOLS_MAX:
        raise malformed(f"tools holds more than {TOOLS_MAX} tools", "tools")


def _tool_names(tools: object) -> set[object]:
    found: set[object] = set()
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            found.add(name)
    return found


def rendered(conversations: Sequence[list[Any]], values: Mapping[str, Any], model: Tools) -> Prompts:
    """What `model` makes of `conversations`, one prompt each; `values` holds the options of a chat."""
    return (model.chats or functools.partial(prompts, templates=model.templates, charges=model.media))(
        conversations, values
    )


def prompts(
    conversations: Sequence[list[Any]],
    values: Mapping[str, Any],
    templates: Mapping[str, ChatTemplate],
    charges: Charges = NO_CHARGES,
) -> Prompts:
    """What the model's template makes of `conversations`, one prompt each; `values` holds the options of a chat."""
    tools = values.get("tools")
    template = templates.get("tool_use") if tools is not None else None
    template = template or templates.get("default")
    if template is None:
        raise malformed("this model has no chat template", "messages")
    variables = dict(values.get("chat_template_kwargs") or {})
    documents = values.get("documents")
    if documents is None:
        documents = variables.get("documents")
    effort = values.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    shaped_tools = None if tools is None else tools_as_rendered(tools)
    meter = Meter(charges)
    texts: list[str] = []
    media_tokens: list[int] = []
    for messages in conversations:
        shaped = conversation(
            messages,
            parts_as_list=template.parts_as_list,
            knows_developer=template.knows_developer,
            meter=meter,
        )
        media_tokens.append(meter.taken())
        chat = Chat(
            messages=shaped,
            tools=shaped_tools,
            documents=documents,
            add_generation_prompt=values.get("add_generation_prompt", True),
            continue_final_message=values.get("continue_final_message", False),
            variables=variables,
        )
        texts.append(template.render(chat))
    return Prompts(
        tuple(texts),
        (),
        add_special_tokens=values.get("add_special_tokens", False),
        media_tokens=tuple(media_tokens) if any(media_tokens) else (),
    )
