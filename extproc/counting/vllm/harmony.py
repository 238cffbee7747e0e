"""Chats of gpt-oss, which vLLM writes in the Harmony format whatever template the model has.

The rules are vLLM 0.33's (openai/parser/harmony_utils.py, renderers/online_renderer.py). What a client wrote never
becomes a control token: where it names one, the prompt is cut inside of the name, between the two words that any
tokenizer of this vocabulary keeps apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from extproc.counting import typescript
from extproc.counting.fields import as_str, malformed, nullable
from extproc.counting.request import Prompts
from extproc.counting.template import RENDERED_CHARS_MAX
from extproc.counting.vllm.conversation import conversation, tools_as_rendered

CONTROL_TOKENS = ("<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|end|>")
"""Tokens of the format that prompts hold; a vocabulary without them is none of gpt-oss."""

_IN_TOKEN_NAMES = re.compile(r"(?<=<\|)(?=[a-z][a-z_]*[0-9]*\|>)")
"""Before the first letter, because a run of marks may be one token, and a mark and a letter after it never are."""

_DATE = "2025-01-01"
"""Stands for the engine's date: every date of this form has as many tokens."""

_SYSTEM = f"""You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {_DATE}

Reasoning: %s

# Valid channels: analysis, commentary, final. Channel must be included for every message."""

_CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."


class _Message(NamedTuple):
    """A message of the format: `texts` are tokenized one by one."""

    header: str
    texts: list[str]
    ending: str = "<|end|>"


_ANALYSIS, _FINAL = "assistant<|channel|>analysis", "assistant<|channel|>final"


def prompts(conversations: Sequence[list[Any]], values: Mapping[str, Any]) -> Prompts:
    """What the engine makes of `conversations`, one prompt each; `values` holds the options of a chat.

    Whether an answer is opened or continued is not asked: every prompt ends with the header of a new answer.
    """
    if values.get("truncate_prompt_tokens") is not None:
        raise malformed("truncate_prompt_tokens does not shorten a chat of this model", "truncate_prompt_tokens")
    effort = values.get("reasoning_effort") or "medium"
    if effort not in ("low", "medium", "high"):
        raise malformed("reasoning_effort of this model is low, medium or high", "reasoning_effort")
    shaped = tools_as_rendered(values.get("tools") or [])
    tools = typescript.namespace([tool["function"] for tool in shaped]) if shaped else ""
    system = _Message("system", [_SYSTEM % effort + (_CALLS if tools else "")])
    found = [_pieces([system, *_messages(messages, tools)]) for messages in conversations]
    texts = tuple(text for pieces in found for text in pieces)
    if sum(map(len, texts)) > RENDERED_CHARS_MAX:
        raise malformed("the rendered prompt is too long", "messages")
    return Prompts(texts, (), add_special_tokens=False, texts_per_prompt=tuple(map(len, found)))


def _pieces(messages: list[_Message]) -> list[str]:
    """The prompt, cut where no token may reach across."""
    pieces, current = list[str](), list[str]()
    for message in messages:
        current += ("<|start|>", message.header, "<|message|>")
        for index, text in enumerate(message.texts):
            parts = _IN_TOKEN_NAMES.split(text)
            if index:
                parts.insert(0, "")
            for part in parts[:-1]:
                pieces.append("".join((*current, part)))
                current.clear()
            current.append(parts[-1])
        current.append(message.ending)
    return [*pieces, "".join((*current, "<|start|>assistant"))]


def _messages(messages: list[Any], tools: str) -> list[_Message]:
    conversation(messages, parts_as_list=False, knows_developer=True)  # for its checks
    leads = messages[0]["role"] in ("system", "developer")
    lead = _texts(messages[0]) if leads else []
    instructions = "".join(lead) if lead else None
    found = [_developer(instructions, tools)] if instructions or tools else []
    rest = messages[1:] if leads else messages
    names = {call["id"]: call["function"]["name"] for message in rest for call in _calls(message)}
    for message in rest:
        found += _message(message, names)
    answers = [index for index, message in enumerate(found) if message.header == _FINAL]
    last = answers[-1] if answers else -1
    # What was thought before an answer is not shown again.
    return [message for index, message in enumerate(found) if index > last or message.header != _ANALYSIS]


def _developer(instructions: str | None, tools: str = "") -> _Message:
    sections = [] if instructions is None else ["# Instructions", instructions]
    return _Message("developer", ["\n\n".join([*sections, tools] if tools else sections)])


def _message(message: Mapping[str, Any], names: Mapping[object, str]) -> list[_Message]:
    role, texts = message["role"], _texts(message)
    if role == "assistant":
        return _answer(message, texts)
    if role == "tool":
        name = names.get(nullable(as_str)("messages.tool_call_id", message.get("tool_call_id")), "")
        return [_Message(f"functions.{name}<|channel|>commentary to=assistant", ["".join(texts)])]
    if role in ("system", "developer"):
        return [_developer("".join(texts))] if texts else []
    if role == "user":
        return [_Message("user", texts or [""])]
    raise malformed("a role of this model is system, developer, user, assistant or tool", "messages.role")


def _answer(message: Mapping[str, Any], texts: list[str]) -> list[_Message]:
    thought = message.get("reasoning")
    if thought is None:
        thought = message.get("reasoning_content")
    thoughts = [_Message(_ANALYSIS, [thought])] if thought else []
    if calls := _calls(message):
        said = [_Message("assistant<|channel|>commentary", ["".join(texts)])] if any(texts) else []
        return [*said, *thoughts, *(_call(call["function"]) for call in calls)]
    return [*thoughts, _Message(_FINAL, texts)] if texts and texts[0] else thoughts


def _call(function: Mapping[str, Any]) -> _Message:
    arguments = function.get("arguments") or ""
    if isinstance(arguments, dict):  # an input of a message's block, of which the engine makes text
        arguments = json.dumps(arguments)
    return _Message(f"assistant to=functions.{function['name']}<|channel|>commentary json", [arguments], "<|call|>")


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if calls and message["role"] != "assistant":
        raise malformed("tool_calls are the assistant's", "messages.tool_calls")
    for call in calls:
        as_str("messages.tool_calls.id", call.get("id"))
        if "<|" in call["function"]["name"]:
            raise malformed("the name of a function cannot hold <|", "messages.tool_calls.function.name")
    return calls


def _texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a content, which the engine reads from nothing but parts of text."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content or []
    for part in parts:
        if isinstance(part, str) or part.get("type", "text") != "text":
            raise malformed("content parts of this model must be of type text", "messages.content.type")
    return [part["text"] for part in parts]
