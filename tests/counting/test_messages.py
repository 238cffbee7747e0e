"""POST /v1/messages and count_tokens become the chat that the engine makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from tests.counting.models import QWEN3, counted, outcome, policy

MESSAGES, COUNT_TOKENS = Endpoint.MESSAGES, Endpoint.COUNT_TOKENS

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}

PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SYSTEM_FIRST_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
IGNORING_TEMPLATE = "{{ reasoning_effort if reasoning_effort != 'none' else 'max' }}: {{ messages[0].content }}"
REFUSING_TEMPLATE = (
    "{{ raise_exception('x') if reasoning_effort == 'none' else reasoning_effort }}: {{ messages[0].content }}"
)
TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "first": SYSTEM_FIRST_TEMPLATE,
    "ignoring": IGNORING_TEMPLATE,
    "refusing": REFUSING_TEMPLATE,
}


def request(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A body with `messages`, or one "hi" of a user."""
    return {"model": "engine", "max_tokens": 2000, "messages": list(messages) or [said("user", "hi")], **fields}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    """A message, of either kind of body."""
    return {"role": role, "content": content, **fields}


def text(words: str) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": words}


def used(name: str = "weather", **fields: Any) -> dict[str, Any]:
    """A tool_use block."""
    return {"type": "tool_use", "id": "1", "name": name, **fields}


def result(content: Any) -> dict[str, Any]:
    """A tool_result block."""
    return {"type": "tool_result", "tool_use_id": "1", "content": content}


def function(name: str = "weather", parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A tool of a chat."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or SCHEMA, **fields}}


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    """A tool of a messages body."""
    return {"name": name, "input_schema": SCHEMA, **fields}


def changed(kind: str, **fields: Any) -> dict[str, Any]:
    """A system message that adds or removes a tool."""
    return said("system", [{"type": kind, "tool": fields}])


CALL = {"id": "1", "function": {"name": "weather", "arguments": '{"at": "x"}'}}

CHATS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("text", request(), {"messages": [said("user", "hi")]}),
    ("system", request(system="brief"), {"messages": [said("system", "brief"), said("user", "hi")]}),
    (
        "system blocks",
        request(system=[text("be "), text("brief"), text("x-anthropic-billing-header: 1"), text("")]),
        {"messages": [said("system", "be brief"), said("user", "hi")]},
    ),
    ("empty system", request(system=""), {"messages": [said("user", "hi")]}),
    (
        "later system",
        request(said("user", "hi"), said("system", "now"), said("system", ""), said("user", "go")),
        {"messages": [said("user", "hi"), said("system", "now"), said("user", "go")]},
    ),
    ("blocks", request(said("user", [text("a"), text(""), text("b")])), {"messages": [said("user", "a\nb")]}),
    (
        "tool round",
        request(
            said("user", "a"),
            said(
                "assistant",
                [
                    {"type": "thinking", "thinking": "h", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "m"},
                    text("let me see"),
                    used(input={"at": "x"}),
                    used("", id=None),
                ],
            ),
            said("user", [text("so?"), result("wet"), result([text("dry"), text("cold"), {"type": "document"}])]),
        ),
        {
            "messages": [
                said("user", "a"),
                said(
                    "assistant",
                    "let me see",
                    reasoning="hm",
                    tool_calls=[CALL, {"id": "2", "function": {"name": "", "arguments": "{}"}}],
                ),
                said("tool", "wet", tool_call_id="1"),
                said("tool", "dry\ncold", tool_call_id="1"),
                said("user", "so?"),
            ]
        },
    ),
    (
        "only results",
        request(said("user", [result(None), result([])])),
        {"messages": [said("tool", ""), said("tool", "")]},
    ),
    (
        "references in a result",
        request(said("user", [result([{"type": "tool_reference", "tool_name": "weather"}])])),
        {"messages": [said("tool", ""), said("tool", [{"type": "tool_reference", "name": "weather"}])]},
    ),
    (
        "result of an assistant",
        request(said("user", "a"), said("assistant", [result([text("wet")])])),
        {"messages": [said("user", "a"), said("assistant", "Tool result: [{'type': 'text', 'text': 'wet'}]")]},
    ),
    (
        "empty turns",
        request(said("user", "a"), said("user", []), said("assistant", [])),
        {"messages": [said("user", "a"), said("assistant", None)]},
    ),
    (
        "tools",
        request(tools=[tool(description="d", strict=True), tool("b", input_schema={"properties": {}})]),
        {
            "messages": [said("user", "hi")],
            "tools": [
                function(description="d", strict=True),
                function("b", {"properties": {}, "type": "object"}),
            ],
        },
    ),
    ("no tools", request(tools=[]), {"messages": [said("user", "hi")]}),
    (
        "tools that change",
        request(
            said("user", "hi"),
            changed("tool_addition", type="tool_reference", name="late"),
            changed("tool_addition", type="tool_definition", definition=tool("new")),
            changed("tool_removal", type="tool_reference", name="weather"),
            changed("tool_removal", type="tool_reference", name="back"),
            changed("tool_addition", type="tool_reference", name="back"),
            tools=[tool(), tool("late", defer_loading=True), tool("back")],
        ),
        {"messages": [said("user", "hi")], "tools": [function("late"), function("back"), function("new")]},
    ),
    (
        "disabled thinking",
        request(thinking={"type": "disabled"}, output_config={"effort": "low"}),
        {"messages": [said("user", "hi")], "reasoning_effort": "none"},
    ),
    (
        "adaptive thinking",
        request(thinking={"type": "adaptive"}, output_config={"effort": "low"}),
        {"messages": [said("user", "hi")], "reasoning_effort": "low"},
    ),
    (
        "variables",
        request(chat_template_kwargs={"enable_thinking": False}),
        {"messages": [said("user", "hi")], "chat_template_kwargs": {"enable_thinking": False}},
    ),
]


@pytest.mark.parametrize(("body", "chat"), [pytest.param(body, chat, id=name) for name, body, chat in CHATS])
def test_messages_are_counted_as_their_chat(body: dict[str, Any], chat: dict[str, Any], counter: Counter) -> None:
    """The prompt has the tokens of the chat that the engine makes of the body, in both endpoints."""
    expected = counted(counter, chat).demand.input_tokens

    assert expected == counted(counter, body, MESSAGES).demand.input_tokens
    assert expected == counted(counter, body, COUNT_TOKENS).demand.input_tokens


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(min_size=1)), min_size=1, max_size=6))
def test_any_texts_are_counted_as_their_chat(turns: list[tuple[str, str]], counter: Counter) -> None:
    """Whatever is said, as a string or as a block, has the tokens of the equivalent chat."""
    chat = {"messages": [said(role, words) for role, words in turns]}
    body = request(*(said(role, words if index % 2 else [text(words)]) for index, (role, words) in enumerate(turns)))

    assert counted(counter, chat).demand.input_tokens == counted(counter, body, MESSAGES).demand.input_tokens


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counter]:
    """A model with each template, named as it."""
    models = {}
    for name, source in TEMPLATES.items():
        directory = tmp_path_factory.mktemp(name)
        for path in QWEN3.iterdir():
            (directory / path.name).symlink_to(path)
        (directory / "chat_template.jinja").write_text(source)
        models[name] = {"tokenizer_dir": directory}
    found = Counter(policy(models))
    yield found
    found.close()


def rendered(templates: Counter, body: dict[str, Any]) -> str:
    """The one prompt of a messages body."""
    (prompt,) = templates.read(MESSAGES, json.dumps(body).encode()).prompts.texts
    return prompt


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        ("plain", "system: brief\nuser: hi\nsystem: now\nuser: go\n"),
        ("first", "system: briefnow\nuser: hi\nuser: go\n"),
    ],
)
def test_later_system_text_joins_the_first_where_the_template_needs_it(
    model: str, prompt: str, templates: Counter
) -> None:
    """A template that fails on a second system message gets one."""
    body = request(said("user", "hi"), said("system", "now"), said("user", "go"), model=model, system="brief")

    assert prompt == rendered(templates, body)


@pytest.mark.parametrize("model", ["ignoring", "refusing"])
def test_disabled_thinking_is_a_low_effort_where_none_does_not_work(model: str, templates: Counter) -> None:
    """A template that refuses `none`, or renders it like another effort, is asked for the lowest."""
    assert "low: hi" == rendered(templates, request(model=model, thinking={"type": "disabled"}))


def test_ceiling_is_max_tokens(counter: Counter) -> None:
    """max_tokens bounds the output, thinking included, and the body stays as it is."""
    body = request(max_tokens=4096, thinking={"type": "enabled", "budget_tokens": 2048})
    found = counted(counter, body, MESSAGES)

    assert (4096, 1, None) == (found.demand.max_output_tokens, found.demand.sequences, found.body)


def test_counting_tokens_generates_nothing(counter: Counter) -> None:
    """count_tokens needs no ceiling, reserves its prompt alone and gets no field written."""
    body = {key: value for key, value in request(model="refuse").items() if key != "max_tokens"}
    found = counted(counter, body, COUNT_TOKENS)

    assert (0, found.demand.input_tokens, None) == (
        found.demand.max_output_tokens,
        found.demand.reserve_tokens,
        found.body,
    )


@pytest.mark.parametrize("tier", ["auto", "standard_only", "flex"])
def test_no_tier_lowers(tier: str, counter: Counter) -> None:
    """Anthropic's tiers declare no bulk, and the engine reads none of them."""
    assert not counted(counter, request(service_tier=tier), MESSAGES).demand.lowered


def test_budget_above_the_ceiling_passes_where_another_engine_decodes(counter: Counter) -> None:
    """A prefill leg comes with a ceiling of one token and the client's thinking."""
    thinking = {"type": "enabled", "budget_tokens": 2048}
    body = request(max_tokens=1, thinking=thinking, kv_transfer_params={"do_remote_decode": True})

    assert 1 == counted(counter, body, MESSAGES).demand.output_tokens


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.name"),
        ({"tools": [tool()] * 513}, "tools"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"temperature": -1}, "temperature"),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system.type"),
        ({"system": [{"type": "tool_removal"}]}, "system.type"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [said("user", "hi")] * 4097}, "messages"),
        ({"messages": [said("tool", "hi")]}, "messages.role"),
        ({"messages": [said("user", None)]}, "messages.content"),
        ({"messages": [said("user", ["hi"])]}, "messages.content"),
        ({"messages": [said("user", [text("a"), IMAGE])]}, "messages.content.type"),
        ({"messages": [said("user", [{"type": "document", "source": {}}])]}, "messages.content.type"),
        ({"messages": [said("user", [{"type": "server_tool_use"}])]}, "messages.content.type"),
        ({"messages": [said("user", [{"type": "tool_addition"}])]}, "messages.content.type"),
        ({"messages": [said("user", [{"type": "text", "text": 5}])]}, "messages.content.text"),
        ({"messages": [said("user", [result([IMAGE])])]}, "messages.content.type"),
        ({"messages": [said("user", [result(5)])]}, "messages.content"),
        ({"messages": [said("assistant", [used(input="x")])]}, "messages.content.input"),
        ({"messages": [changed("tool_removal", type="tool_reference", name="f")]}, "messages.content.tool.name"),
        ({"messages": [changed("tool_removal", type="tool_definition")]}, "messages.content.tool.type"),
        ({"messages": [said("system", [{"type": "tool_addition"}])]}, "messages.content.tool"),
    ],
)
def test_what_the_engine_refuses_is_malformed(fields: dict[str, Any], param: str, counter: Counter) -> None:
    """A 400 names the field."""
    found = outcome(counter, {**request(), **fields}, MESSAGES)

    assert isinstance(found, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (found.reason, found.param)


@pytest.mark.parametrize(
    ("missing", "endpoint"), [("max_tokens", MESSAGES), ("model", MESSAGES), ("model", COUNT_TOKENS)]
)
def test_required_fields_have_no_default(missing: str, endpoint: Endpoint, counter: Counter) -> None:
    """A ceiling and a model must be named."""
    body = request()
    del body[missing]
    found = outcome(counter, body, endpoint)

    assert isinstance(found, Fault)
    assert (Reason.MALFORMED_REQUEST, missing) == (found.reason, found.param)


def test_refusals_never_quote_the_prompt(counter: Counter) -> None:
    """A message to the client holds no text of the prompt."""
    secret = "xyzzy"
    bodies = [
        request(said(secret, "hi")),
        request(said("user", [{"type": secret}])),
        request(said("user", [{"type": "text", "text": [secret]}])),
        request(thinking={"type": secret}),
        request(changed("tool_removal", type="tool_reference", name=secret)),
    ]
    for body in bodies:
        found = outcome(counter, body, MESSAGES)

        assert isinstance(found, Fault)
        assert secret not in f"{found.message} {found.param}"
