"""POST /v1/chat/completions: messages and tools, rendered by the model's template.

Only what goes through a template is counted: models whose prompts SGLang builds in code (gpt-oss, DeepSeek V3.2 and
V4, Kimi K3) are not, nor are a template and template variables that the engine was started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.core.values import Fault
from extproc.counting.fields import (
    Check,
    as_bool,
    as_float,
    as_int,
    as_list,
    as_object,
    as_str,
    checked,
    malformed,
    nullable,
    number,
    refused,
)
from extproc.counting.media import Meter
from extproc.counting.prompts import REPLACES_PROMPT
from extproc.counting.request import Prompts, Read, Tools
from extproc.counting.sglang.conversation import TOOL_ROLES, conversation, tools_as_rendered
from extproc.counting.sglang.rules import OPENAI, asked
from extproc.counting.template import Chat, ChatTemplate, template_variables

MESSAGES_MAX = 4096
"""Messages of one chat, as for vLLM."""

TOOLS_MAX = 512
"""Tools of one chat, those of its messages included, as for vLLM."""

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_TRUE_WORDS = frozenset({"1", "true", "yes", "y", "on"})
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_LOOP_NAMES = frozenset({"message", "msg", "m"})


def _variables(name: str, value: object) -> dict[str, object]:
    variables = template_variables(name, value)
    for key in ("add_generation_prompt", "continue_final_message"):
        if key in variables:
            raise malformed(f"{name} cannot set {key}", f"{name}.{key}")
    return variables


def _effort(name: str, value: object) -> str | float:
    """A word, or a number from 0 to 0.99."""
    if isinstance(value, str) and value in _EFFORTS:
        return value
    if isinstance(value, bool):
        raise malformed(f"{name} must not be a boolean", name)
    number(0, 0.99)(name, value)
    return as_float(name, value)


FIELDS: Mapping[str, Check] = {
    **OPENAI,
    "chat_template": refused(REPLACES_PROMPT),
    "chat_template_kwargs": nullable(_variables),
    "continue_final_message": as_bool,
    "input_ids": refused(REPLACES_PROMPT),
    "logprobs": as_bool,
    "max_completion_tokens": nullable(as_int),
    "max_tokens": nullable(as_int),
    "messages": as_list,
    "min_p": nullable(number(0, 1)),
    "parallel_tool_calls": as_bool,
    "reasoning_effort": nullable(_effort),
    "repetition_penalty": nullable(number(above=0, high=2)),
    "temperature": nullable(number(0)),
    "tools": nullable(as_list),
    "top_k": nullable(as_int),
    "top_logprobs": nullable(as_int),
    "top_p": nullable(number(above=0, high=1)),
}
"""Fields of the request."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/chat/completions."""
    values: Mapping[str, Any] = checked(body, FIELDS)
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("messages must hold at least one message", "messages")
    if len(messages) > MESSAGES_MAX:
        raise malformed(f"messages holds more than {MESSAGES_MAX} messages", "messages")
    _check_continuation(values, messages)
    tools = _rendered_tools(values.get("tools") or [], messages, body.get("tool_choice"))
    variables = _template_variables(values, body.get("reasoning"))
    # A ceiling of 0 is none: the other field holds.
    names = ("max_completion_tokens", "max_tokens") if values.get("max_completion_tokens") else ("max_tokens",)
    return asked(values, names), lambda: _prompts(messages, tools, variables, model)


def _check_continuation(values: Mapping[str, Any], messages: list[Any]) -> None:
    """The engine counts a continued text apart from the prompt that it follows, so one text cannot stand for both."""
    last = messages[-1]
    role = last.get("role") if isinstance(last, dict) else None
    if values.get("continue_final_message") and isinstance(role, str) and role.lower() == "assistant":
        raise malformed("continue_final_message is not accepted here for this engine", "continue_final_message")


def _rendered_tools(tools: list[Any], messages: list[Any], choice: object) -> list[dict[str, Any]] | None:
    """The tools that the template gets: none where the choice is none, the chosen one where it has a name."""
    shaped = tools_as_rendered("tools", tools)
    names = [tool["function"]["name"] for tool in shaped]
    own_names = _names_in_messages(messages)
    everything = names + own_names
    if len(everything) > TOOLS_MAX:
        raise malformed(f"tools holds more than {TOOLS_MAX} tools", "tools")
    if own_names and len(everything) > len(set(everything)):
        raise malformed("the names of tools must differ, those of messages included", "tools.function.name")
    if choice in (None, "auto", "none", "required"):
        if choice == "required" and not everything:
            raise malformed("tool_choice required needs tools", "tool_choice")
        return None if choice == "none" else shaped or None
    function = as_object("tool_choice.function", as_object("tool_choice", choice).get("function"))
    chosen = as_str("tool_choice.function.name", function.get("name"))
    if chosen not in everything:
        raise malformed("tool_choice must be none, auto, required or one of the tools", "tool_choice")
    return [tool for tool in shaped if tool["function"]["name"] == chosen] or None


def _names_in_messages(messages: list[Any]) -> list[str]:
    """Names of the tools that messages hold; what else a message must be is checked where it is rendered."""
    return [
        tool["function"]["name"]
        for message in messages
        if isinstance(message, dict) and message.get("tools") and str(message.get("role")).lower() in TOOL_ROLES
        for tool in tools_as_rendered("messages.tools", message["tools"])
    ]


def _template_variables(values: Mapping[str, Any], reasoning: object) -> dict[str, Any]:
    """Variables of the request: `reasoning` and `reasoning_effort` set what its own variables leave open."""
    own = dict(values.get("chat_template_kwargs") or {})
    effort, thinking = values.get("reasoning_effort"), None
    if isinstance(reasoning, dict):
        stated = reasoning.get("effort")
        stated = reasoning.get("reasoning_effort") if stated is None else stated
        effort = effort if stated is None else _effort("reasoning.effort", stated)
        enabled = reasoning.get("enabled")
        enabled = reasoning.get("enable", False) if enabled is None else enabled
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in _TRUE_WORDS
        thinking = True if enabled else None
    if effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        own.setdefault("thinking", thinking)
        own.setdefault("enable_thinking", thinking)
    return own if effort is None else {"reasoning_effort": effort, **own}


def _prompts(
    messages: list[Any],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    model: Tools,
) -> Prompts:
    template = model.templates.get("tool_use") if tools is not None else None
    template = template or model.templates.get("default")
    if template is None:
        raise malformed("this model has no chat template", "messages")
    meter = Meter(model.media)
    chat = Chat(
        messages=conversation(messages, meter, parts_as_list=_takes_parts(template)),
        tools=tools,
        documents=variables.get("documents"),
        add_generation_prompt=True,
        continue_final_message=False,
        variables=variables,
    )
    try:
        text = template.render(chat)
    except Fault:
        if tools is None:
            raise
        # Some templates want functions without the object around them; the engine tries those next.
        text = template.render(chat._replace(tools=[tool["function"] for tool in tools]))
    charge = meter.taken()
    return Prompts((text,), (), add_special_tokens=False, media_tokens=(charge,) if charge else ())


def _takes_parts(template: ChatTemplate) -> bool:
    """Whether lists of parts reach the template as such: those that know media do, and those that loop over parts."""
    return any(word in template.source for word in _MEDIA_WORDS) or bool(template.content_loops & _LOOP_NAMES)
