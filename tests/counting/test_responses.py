"""POST /v1/responses becomes the chat that the engine makes of it; what nothing would bound is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from tests.counting.models import CLAMP, counted, outcome, policy, status, user

RESPONSES = Endpoint.RESPONSES

CONTEXT_TOKENS = 8192
"""Context of the engine that the handed bodies were sent to."""

BACKGROUND = "95-resp-background-flex.json"
"""Either hold its reservation until a poll says that it is done, or refuse it. It is refused: nothing here polls."""

HANDED = (
    "80-chat-batch-endpoint.json",
    "93-resp-minimal.json",
    BACKGROUND,
    "97-resp-tools-max-calls.json",
    "98-resp-truncation-auto.json",
    "99-resp-reasoning-text-format.json",
    "101-resp-max-tokens-wrong-field.json",
    "103-anthropic-tools-thinking.json",
    "104-anthropic-no-max.json",
)

WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_preview"}


def request(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A body whose input is `items`, or "hi" where there are none."""
    return {"input": list(items) or "hi", **fields}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    """A message, of an input as of a chat."""
    return {"role": role, "content": content, **fields}


@pytest.fixture(scope="module")
def engine() -> Iterator[Counter]:
    """The engine's own rules in the context of the handed bodies."""
    found = Counter(policy({"test-model": {**CLAMP, "context_tokens_max": CONTEXT_TOKENS}}))
    yield found
    found.close()


@pytest.mark.parametrize("name", HANDED)
def test_handed_body_has_the_expected_ceiling(name: str, engine: Counter, shared: Path) -> None:
    """Ceiling, sequences, prompts and intent are those expected, or the body is refused."""
    expect = json.loads((shared / "cases" / "bodies" / name.replace(".json", ".expect.json")).read_bytes())
    body = (shared / "cases" / "bodies" / name).read_bytes()
    result = outcome(engine, body, Endpoint(expect["endpoint"].removeprefix("POST ")))
    ceiling = expect["ceiling"]

    if name == BACKGROUND or not expect["valid"]:
        assert 400 == status(result)
        return
    assert not isinstance(result, Fault)
    demand, lengths = result.demand, result.prompts_tokens
    open_tokens = CONTEXT_TOKENS - demand.input_tokens
    bounded = isinstance(ceiling["per_sequence"], int)
    sequences = ceiling["multiplicity"]
    assert (ceiling["per_sequence"] if bounded else open_tokens) == demand.max_output_tokens
    assert (ceiling["reserve"] if bounded else open_tokens * sequences) == demand.output_tokens
    assert (sequences, expect["input"]["prompt_units"]) == (demand.sequences, len(lengths))
    assert demand.lowered is False


TURNS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("text", request(), [said("user", "hi")]),
    (
        "instructions",
        request(said("user", "a"), instructions="be brief"),
        [said("system", "be brief"), said("user", "a")],
    ),
    (
        "parts",
        request(said("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])),
        [said("user", "a\nb")],
    ),
    (
        "tool round",
        request(
            said("user", "a"),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"at": "x"}'},
            {"type": "function_call", "call_id": "2", "name": "weather", "namespace": "sky", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "wet"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "dry"}]},
        ),
        [
            said("user", "a"),
            said(
                "assistant",
                "let me see",
                reasoning="hm",
                tool_calls=[
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "x"}'}},
                    {"id": "2", "type": "function", "function": {"name": "sky__weather", "arguments": "{}"}},
                ],
            ),
            said("tool", "wet", tool_call_id="1"),
            said("tool", "dry", tool_call_id="2"),
        ],
    ),
    (
        "custom tool round",
        request(
            said("user", "a"),
            {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "x\ny"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        ),
        [
            said("user", "a"),
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "patch", "arguments": '{"input": "x\\ny"}'}}],
            },
            said("tool", "done", tool_call_id="1"),
        ],
    ),
    (
        "summary",
        request(said("user", "a"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}),
        [said("user", "a"), said("assistant", None, reasoning="hm")],
    ),
    (
        "only the first part of an answer",
        request(said("assistant", [{"text": "one"}, {"text": "two"}], type="message"), said("user", "a")),
        [said("assistant", "one"), said("user", "a")],
    ),
    (
        "two answers in a row",
        request(said("assistant", "one"), said("assistant", "two"), said("user", "a")),
        [said("assistant", "one"), said("assistant", "two"), said("user", "a")],
    ),
    (
        "two thoughts in a row",
        request(
            said("user", "a"),
            {"type": "reasoning", "summary": [{"text": "one"}]},
            {"type": "reasoning", "summary": [{"text": "two"}]},
            {"type": "reasoning", "summary": []},
        ),
        [
            said("user", "a"),
            said("assistant", None, reasoning="one"),
            said("assistant", None, reasoning="two"),
            said("assistant", None, reasoning=""),
        ],
    ),
]


@pytest.mark.parametrize(("body", "messages"), [pytest.param(body, chat, id=name) for name, body, chat in TURNS])
def test_input_is_counted_as_its_chat(body: dict[str, Any], messages: list[dict[str, Any]], counter: Counter) -> None:
    """Items join the messages that the engine makes of them."""
    expected = counted(counter, {"messages": messages}).demand.input_tokens

    assert expected == counted(counter, body, RESPONSES).demand.input_tokens


def test_unfinished_answer_is_continued(counter: Counter) -> None:
    """A last message that is incomplete opens no new turn."""
    messages = [said("user", "a"), said("assistant", "one")]
    chat = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    body = request(messages[0], {**messages[1], "status": "incomplete"})

    assert counted(counter, chat).demand.input_tokens == counted(counter, body, RESPONSES).demand.input_tokens


@pytest.mark.parametrize(
    ("tools", "functions"),
    [
        ([], None),
        ([{"type": "function", **WEATHER, "strict": True}], [{**WEATHER, "strict": True}]),
        (
            [{"type": "namespace", "name": "sky", "tools": [{"type": "function", **WEATHER}, {"type": "custom"}]}],
            [{**WEATHER, "name": "sky__weather"}],
        ),
        (
            [{"type": "custom", "name": "patch", "format": {"type": "text"}}],
            [
                {
                    "name": "patch",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "input": {"type": "string", "description": "The freeform text payload for this tool."}
                        },
                        "required": ["input"],
                        "additionalProperties": False,
                    },
                }
            ],
        ),
    ],
)
def test_tools_are_counted_as_a_chats(
    tools: list[dict[str, Any]], functions: list[dict[str, Any]] | None, counter: Counter
) -> None:
    """Flat functions, functions of a namespace and custom tools are functions of the chat."""
    chat = user() if functions is None else user(tools=[{"type": "function", "function": item} for item in functions])

    assert counted(counter, chat).demand == counted(counter, request(tools=tools), RESPONSES).demand


@pytest.mark.parametrize("effort", ["none", "low"])
def test_effort_reaches_the_template_as_in_a_chat(effort: str, counter: Counter) -> None:
    """reasoning.effort renders like reasoning_effort."""
    chat = counted(counter, user(reasoning_effort=effort)).demand

    assert chat == counted(counter, request(reasoning={"effort": effort}), RESPONSES).demand


@pytest.mark.parametrize(("calls", "sequences"), [(3, 4), (0, 1), (-1, 1), (128, 129)])
def test_each_turn_of_the_engines_tools_is_charged_a_ceiling(calls: int, sequences: int, counter: Counter) -> None:
    """A tool that the engine runs starts a turn with a fresh ceiling."""
    body = request(tools=[SEARCH], max_tool_calls=calls, max_output_tokens=10)
    demand = counted(counter, body, RESPONSES).demand

    assert (sequences, 10 * sequences) == (demand.sequences, demand.output_tokens)


def test_calls_of_the_clients_tools_are_not_charged(counter: Counter) -> None:
    """max_tool_calls bounds the engine's own tools; a function ends the response."""
    body = request(tools=[{"type": "function", **WEATHER}], max_tool_calls=3)

    assert 1 == counted(counter, body, RESPONSES).demand.sequences


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({}, {"max_output_tokens": 1024}),
        ({"max_tokens": 5}, {"max_tokens": 5, "max_output_tokens": 1024}),
        ({"max_output_tokens": None}, {"max_output_tokens": 1024}),
        ({"max_output_tokens": 7}, None),
    ],
)
def test_ceiling_is_max_output_tokens(fields: dict[str, Any], written: dict[str, int] | None, counter: Counter) -> None:
    """An open ceiling is the policy's and is written where the engine reads it; a chat's field says nothing."""
    result = counted(counter, request(model="refuse", **fields), RESPONSES)

    assert (7 if written is None else 1024) == result.demand.max_output_tokens
    if written is None:
        assert result.body is None
    else:
        assert result.body is not None
        assert {"input": "hi", "model": "refuse", **written} == json.loads(result.body)


@pytest.mark.parametrize("truncation", ["auto", None])
def test_truncation_keeps_what_fits(truncation: str | None, counter: Counter) -> None:
    """`auto` and null cut a prompt that is too long; the engine takes null for `auto`."""
    body = request(said("user", "x " * 9000), model="refuse", max_output_tokens=10, truncation=truncation)
    demand = counted(counter, body, RESPONSES).demand

    assert (8182, 10) == (demand.input_tokens, demand.output_tokens)


@pytest.mark.parametrize("fields", [{}, {"truncation": "disabled"}])
def test_long_input_is_refused_without_truncation(fields: dict[str, Any], counter: Counter) -> None:
    """Nothing is cut unless the client asks for it."""
    result = outcome(counter, request(said("user", "x " * 9000), model="refuse", **fields), RESPONSES)

    assert isinstance(result, Fault)
    assert Reason.CONTEXT_LIMIT is result.reason


@pytest.mark.parametrize(("tier", "lowered"), [("flex", True), ("auto", False), ("priority", False)])
def test_only_flex_lowers(tier: str, lowered: bool, counter: Counter) -> None:
    """service_tier flex says that bulk service is enough."""
    assert lowered is counted(counter, request(service_tier=tier), RESPONSES).demand.lowered


def test_priority_is_taken_out(counter: Counter) -> None:
    """A client's priority does not reach the engine."""
    result = counted(counter, request(priority=-1, max_output_tokens=5), RESPONSES)

    assert result.body is not None
    assert "priority" not in json.loads(result.body)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}, "safety_identifier": "u", "prompt_cache_key": "k", "include": None},
        {"background": False, "previous_input_messages": [], "previous_response_id": None, "conversation": None},
        {"text": {"format": {"type": "json_schema", "schema": {}}, "verbosity": "low"}},
        {"text": {"verbosity": "low"}, "structured_outputs": {"regex": "a"}},
        {"tools": [{"type": "function", **WEATHER}], "tool_choice": {"type": "function", "name": "weather"}},
        {
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **WEATHER}]}],
            "tool_choice": {"type": "function", "name": "weather"},
        },
        {"tools": [SEARCH], "max_tool_calls": 1, "tool_choice": {"type": "web_search_preview"}},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
    ],
)
def test_harmless_fields_pass(fields: dict[str, Any], counter: Counter) -> None:
    """Fields that change nothing of what runs leave the ceiling as it is."""
    assert 5 == counted(counter, request(max_output_tokens=5, **fields), RESPONSES).demand.max_output_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"background": "yes"}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [SEARCH]}, "max_tool_calls"),
        ({"tools": [SEARCH], "max_tool_calls": 129}, "max_tool_calls"),
        ({"tools": None}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools.type"),
        ({"tools": [{"type": "function"}]}, "tools.name"),
        ({"tools": [{"type": "function", **WEATHER}] * 513}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}] * 513}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools.format"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "weather"}, "tool_choice"),
        ({"tool_choice": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        (
            {
                "tools": [
                    {"type": "namespace", "name": name, "tools": [{"type": "function", **WEATHER}]} for name in "ab"
                ],
                "tool_choice": {"type": "function", "name": "weather"},
            },
            "tool_choice",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"service_tier": None}, "service_tier"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [said("user", "hi")] * 4097}, "input"),
        ({"input": [said("tool", "hi")]}, "input.role"),
        ({"input": [said("user", None)]}, "input.content"),
        ({"input": [said("assistant", [{"text": 1}])]}, "input.content.text"),
        ({"input": [said("user", [{"type": "input_image", "image_url": "x"}])]}, "messages.content.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.type"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.encrypted_content"),
        ({"input": [{"type": "reasoning"}]}, "input.summary"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input.arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.call_id"),
    ],
)
def test_what_the_engine_refuses_or_nothing_bounds_is_malformed(
    fields: dict[str, Any], param: str, counter: Counter
) -> None:
    """A 400 names the field."""
    result = outcome(counter, {**request(model="refuse"), **fields}, RESPONSES)

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (result.reason, result.param)
