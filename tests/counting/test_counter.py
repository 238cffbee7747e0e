"""From a body to a Demand: order of refusals, multiplicity, ceilings written into the body, bounds."""

from __future__ import annotations

import asyncio
import codecs
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.stream import Counted
from extproc.core.values import Fault, Reason
from extproc.counting import Counter, Draft, TokenizerError
from extproc.counting.tokenizer import context_tokens
from tests.counting.models import CHAT, COMPLETIONS, QWEN3, counted, outcome, policy, status, user

HI_TOKENS = 9
"""Tokens of a chat whose only message is a user's "hi"."""

TEXTS = (
    st.text(max_size=200) | st.text(alphabet="\U0001d160\u0344e\u0301 ", max_size=60) | st.text("a =\n1", max_size=300)
)
"""Any text, text that grows threefold under NFC, and runs that one token covers."""


def ceilings(body: bytes) -> dict[str, Any]:
    """The ceiling fields of a body, as `json.loads` sees them."""
    document = json.loads(body)
    return {name: document[name] for name in ("max_tokens", "max_completion_tokens") if name in document}


# --- the model


@pytest.mark.parametrize("name", [None, ""])
def test_request_without_a_model_gets_the_default(name: str | None, counter: Counter) -> None:
    """Null and empty names are absent names."""
    assert "engine" == counted(counter, user(model=name)).demand.model


def test_request_without_a_model_needs_a_default() -> None:
    """Without a default model a request must name one."""
    lonely = Counter(policy({"m": {}}))
    result = outcome(lonely, user())
    lonely.close()

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, "model") == (result.reason, result.param)


def test_alias_counts_as_its_model(counter: Counter) -> None:
    """A demand names the model, not the alias it was asked for by."""
    assert "engine" == counted(counter, user(model="test-model")).demand.model


def test_unknown_model_is_not_found(counter: Counter) -> None:
    """A name outside the policy is a 404 and never becomes a path."""
    result = outcome(counter, user(model="../../etc/passwd"))

    assert isinstance(result, Fault)
    assert (Reason.UNKNOWN_MODEL, "model") == (result.reason, result.param)


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 4}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 2**64}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 16_385}, "n"),
        ({"n": 2.5}, "n"),
        ({"priority": 1.5}, "priority"),
        ({"priority": None}, "priority"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"service_tier": {"a": 1}}, "service_tier"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": []}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.function"),
        ({"tools": [{"function": {"name": 1}}]}, "tools.function.name"),
        ({"tools": [{"function": {"name": "f"}}] * 513}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "g"}}, "tools": [{"function": {"name": "f"}}]}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params.prompt_token_ids"),
        ({"input_ids": [1, 2]}, "input_ids"),
        ({"prompt_embeds": "AA"}, "prompt_embeds"),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 8193}, "truncate_prompt_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"documents": ["x"]}, "documents"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [None]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.content.type"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages.content.type"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages.tool_calls"),
    ],
)
def test_chat_the_engine_refuses_is_malformed(fields: dict[str, Any], param: str, counter: Counter) -> None:
    """What the engine would refuse, or what would change the counted prompt, is a 400 naming the field."""
    result = outcome(counter, {**user(model="refuse"), **fields})

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (result.reason, result.param)


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (None, {}),
        ("", {}),
        ([], {}),
        ([[]], {}),
        (["a", 5], {}),
        ([1.5, 2.0], {}),
        ([-1, 5], {}),
        ([10**12], {}),
        ([2**65], {}),
        ([151_936], {}),
        ({"a": 1}, {}),
        (["x"] * 1025, {}),
        ("x", {"suffix": "y"}),
        ("x", {"n": None}),
        ("x", {"max_tokens": 0}),
        ("x", {"use_beam_search": True, "stream": True}),
        ("x", {"prompt_embeds": "AA"}),
    ],
)
def test_completion_the_engine_refuses_is_malformed(prompt: Any, fields: dict[str, Any], counter: Counter) -> None:
    """Prompts that are empty, mixed, out of the vocabulary or too many are a 400."""
    result = outcome(counter, {"prompt": prompt, **fields}, COMPLETIONS)

    assert isinstance(result, Fault)
    assert Reason.MALFORMED_REQUEST is result.reason


def test_refusals_never_quote_the_prompt(counter: Counter) -> None:
    """A message to the client holds no text of the prompt, whatever is wrong."""
    secret = "xyzzy"
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": secret, "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"messages": [{"role": "user", "content": secret}], "max_tokens": 0},
        {"messages": [{"role": "user", "content": secret, "name": [secret]}]},
        {"messages": [{"role": "user", "content": secret}], "stop": [secret] * 9},
    ]
    for body in bodies:
        result = outcome(counter, body)

        assert isinstance(result, Fault)
        assert secret not in f"{result.message} {result.param} {dict(result.details)}"


def test_draft_shows_no_prompt(counter: Counter) -> None:
    """A draft that reaches a log shows numbers only."""
    shown = repr(counter.read(CHAT, orjson.dumps(user("xyzzy"))))

    assert "xyzzy" not in shown
    assert shown.startswith("<Draft for ")


def test_unknown_fields_pass(counter: Counter) -> None:
    """Fields that the engine ignores are no reason to refuse, at the top and inside options."""
    fields: dict[str, Any] = {
        "store": True,
        "metadata": {"a": [1]},
        "stream": True,
        "stream_options": {"include_usage": True, "x": 1},
    }

    assert 200 == status(outcome(counter, user(**fields)))


def test_too_deep_tool_arguments_are_malformed(counter: Counter) -> None:
    """JSON inside a string of tool arguments cannot exhaust the stack."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}
    result = outcome(counter, {"messages": [{"role": "assistant", "tool_calls": [call]}]})

    assert 400 == status(result)


def test_ceiling_arithmetic_comes_before_rendering(counter: Counter) -> None:
    """An impossible ceiling is found before a message is looked at."""
    result = outcome(counter, {"model": "refuse", "messages": [None], "max_tokens": 8193})

    assert isinstance(result, Fault)
    assert Reason.CONTEXT_LIMIT is result.reason


def test_size_alone_refuses_what_cannot_fit(counter: Counter) -> None:
    """A text longer than the context's worth of longest tokens is refused before it is tokenized."""
    with pytest.raises(Fault) as caught:
        counter.read(CHAT, orjson.dumps(user("x" * 3 * 128 * 8192, model="refuse")))

    assert Reason.CONTEXT_LIMIT is caught.value.reason
    assert caught.value.message.startswith("prompt is too long: ")


# --- ceilings and multiplicity


@pytest.mark.parametrize(
    ("fields", "ceiling"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 1, "max_completion_tokens": 4000}, 4000),
        ({"max_tokens": 33, "max_completion_tokens": None}, 33),
        ({"max_tokens": "5"}, 5),
        ({"max_tokens": 5.0}, 5),
        ({"max_tokens": True}, 1),
    ],
)
def test_chat_ceiling_is_the_one_the_engine_obeys(fields: dict[str, Any], ceiling: int, counter: Counter) -> None:
    """max_completion_tokens wins unless it is null, values are coerced, and the body is forwarded unchanged."""
    result = counted(counter, user(**fields))

    assert ceiling == result.demand.max_output_tokens
    assert None is result.body


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({}, {"max_tokens": 1024}),
        ({"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": 1024}),
        ({"max_completion_tokens": None}, {"max_tokens": 1024, "max_completion_tokens": None}),
        ({"max_tokens": None, "max_completion_tokens": None}, {"max_tokens": 1024, "max_completion_tokens": None}),
    ],
)
def test_open_ceiling_is_written_where_it_holds(
    fields: dict[str, Any], written: dict[str, Any], counter: Counter
) -> None:
    """The default goes into the field that the engine's precedence makes effective."""
    result = counted(counter, user(model="refuse", **fields))

    assert 1024 == result.demand.max_output_tokens
    assert result.body is not None
    assert written == ceilings(result.body)


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"max_tokens": 8190}, {"max_tokens": 8190, "max_completion_tokens": 8183}),
        ({"max_completion_tokens": 8190}, {"max_completion_tokens": 8183}),
        ({"max_tokens": 3, "max_completion_tokens": 8190}, {"max_tokens": 3, "max_completion_tokens": 8183}),
        ({"max_tokens": 8190, "max_completion_tokens": None}, {"max_tokens": 8183, "max_completion_tokens": None}),
    ],
)
def test_clamped_ceiling_is_written_where_it_holds(
    fields: dict[str, Any], written: dict[str, Any], counter: Counter
) -> None:
    """A ceiling cut to the rest of the context replaces the asked one, or outranks it."""
    result = counted(counter, user(model="clamp", **fields))

    assert 8192 - HI_TOKENS == result.demand.max_output_tokens
    assert result.body is not None
    assert written == ceilings(result.body)


def test_open_ceiling_is_spliced_into_the_bytes(counter: Counter) -> None:
    """A body without the field keeps every byte and gets the field before its last brace."""
    body = b'{ "messages" : [{"role":"user","content":"hi"}], "note": 12345678901234567890 }\n'
    result = counted(counter, body)

    assert result.body == body.replace(b" }\n", b' ,"max_tokens":199991}\n')


def test_completion_ceiling_defaults_to_sixteen(counter: Counter) -> None:
    """A completion without a ceiling runs 16 tokens, whatever the model's default, and the body says so."""
    for fields in ({}, {"max_tokens": None}):
        result = counted(counter, {"prompt": "The three signal flags are", **fields}, COMPLETIONS)

        assert 16 == result.demand.max_output_tokens
        assert result.body is not None
        assert {"max_tokens": 16} == ceilings(result.body)


def test_completion_ignores_the_chat_field(counter: Counter) -> None:
    """max_completion_tokens means nothing to a completion."""
    result = counted(counter, {"prompt": "x", "max_completion_tokens": 4, "max_tokens": 5}, COMPLETIONS)

    assert 5 == result.demand.max_output_tokens


def test_scored_prompt_runs_one_token(counter: Counter) -> None:
    """echo with a ceiling of 0 generates one token, and the body stays as it is."""
    result = counted(counter, {"prompt": "Score this.", "echo": True, "max_tokens": 0}, COMPLETIONS)

    assert (1, None) == (result.demand.output_tokens, result.body)


def test_sequences_multiply_output_and_not_input(counter: Counter) -> None:
    """n sequences share the prompt and each may run to the ceiling."""
    demand = counted(counter, user(n="4", max_tokens=50)).demand

    assert (HI_TOKENS, 200, 50, 4) == (
        demand.input_tokens,
        demand.output_tokens,
        demand.max_output_tokens,
        demand.sequences,
    )


@pytest.mark.parametrize("asked", [{"max_tokens": 50}, {}])
def test_a_priority_never_reaches_the_engine(counter: Counter, asked: dict[str, int]) -> None:
    """A client's priority is taken out of the body, whether or not a ceiling is written too; 0 is no priority."""
    body = {**user(seed=7), **asked}
    found = counted(counter, {**body, "priority": -10})
    untouched = counted(counter, user(max_tokens=50, priority=0))

    assert found.body is not None
    ceiling = {} if asked else {"max_tokens": found.demand.max_output_tokens}
    assert {**body, **ceiling} == json.loads(found.body)
    assert untouched.body is None


def test_prompts_multiply_both(counter: Counter) -> None:
    """Each prompt of a list is input of its own, with n sequences each."""
    body = {"prompt": [[791, 4062], [15339, 1917, 0]], "n": 2, "max_tokens": 10}
    found = counted(counter, body, COMPLETIONS)
    demand = found.demand

    assert ((2, 3), 5, 40, 4) == (found.prompts_tokens, demand.input_tokens, demand.output_tokens, demand.sequences)


def test_several_prompts_write_the_largest_clamped_ceiling(counter: Counter) -> None:
    """One field serves prompts of different lengths: the engine clamps each of them by itself."""
    body = {"model": "clamp", "prompt": [[1] * 8000, [1] * 8100], "max_tokens": 500}
    result = counted(counter, body, COMPLETIONS)

    assert (192, 192 + 92) == (result.demand.max_output_tokens, result.demand.output_tokens)
    assert result.body is not None
    assert {"max_tokens": 192} == ceilings(result.body)


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ([5, 6], (2,)),
        ([True, 2.0, "3"], (3,)),
        (["5", "6"], (1, 1)),
        ([[5], [6, 7]], (1, 2)),
        ("a", (1,)),
        (["5", 5], (2,)),
    ],
)
def test_prompt_shapes_are_told_apart_as_the_engine_does(
    prompt: list[Any] | str, lengths: tuple[int, ...], counter: Counter
) -> None:
    """Strings are texts where all are strings; whatever else coerces to integers is one prompt of ids."""
    assert lengths == counted(counter, {"prompt": prompt}, COMPLETIONS).prompts_tokens


@pytest.mark.parametrize(("keep", "tokens"), [(5, 5), (100, HI_TOKENS), (-1, HI_TOKENS)])
def test_truncation_bounds_the_input(keep: int, tokens: int, counter: Counter) -> None:
    """truncate_prompt_tokens keeps at most that many tokens, and -1 what fits."""
    assert tokens == counted(counter, user(truncate_prompt_tokens=keep)).demand.input_tokens


@pytest.mark.parametrize(("fields", "total"), [({}, (8191, 1)), ({"max_tokens": 100}, (8092, 100))])
def test_truncation_to_what_fits_leaves_room_for_output(
    fields: dict[str, Any], total: tuple[int, int], counter: Counter
) -> None:
    """A prompt truncated to the context keeps the asked ceiling, or one token, free."""
    body = {"model": "refuse", "prompt": [1] * 9000, "truncate_prompt_tokens": -1, "max_tokens": 1, **fields}
    demand = counted(counter, body, COMPLETIONS).demand

    assert total == (demand.input_tokens, demand.output_tokens)


@pytest.mark.parametrize(
    ("fields", "argument", "lowered"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"service_tier": "flex"}, False, True),
        ({"service_tier": "priority"}, False, False),
        ({"service_tier": "auto"}, True, True),
    ],
)
def test_intent_only_lowers(fields: dict[str, Any], argument: bool, lowered: bool, counter: Counter) -> None:
    """A tier of flex or the caller's word lowers a request; no tier raises one."""
    draft = counter.read(CHAT, orjson.dumps(user(**fields)), lowered=argument)

    assert lowered is counter.count_now(draft).demand.lowered


# --- bounds and threads


def _check_bounds(draft: Draft, found: Counted) -> None:
    """The exact count of every prompt is within its bounds, and so is the whole demand."""
    demand = found.demand
    each = zip(draft.low_tokens, found.prompts_tokens, draft.high_tokens, strict=True)
    assert all(low <= exact <= high for low, exact, high in each)
    bounds = draft.bounds()
    if bounds is not None:
        least, most = bounds
        assert least.output_tokens == demand.output_tokens == most.output_tokens
        assert least.reserve_tokens <= demand.reserve_tokens <= most.reserve_tokens
        assert (least.sequences, least.max_output_tokens) == (demand.sequences, demand.max_output_tokens)


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=3),
    n=st.integers(1, 3),
    asked=st.none() | st.integers(1, 400),
)
def test_draft_bounds_hold_for_completions(counter: Counter, texts: list[str], n: int, asked: int | None) -> None:
    """The exact count lies within the draft's bounds and the run ceilings are not below theirs."""
    body = {"model": "clamp", "prompt": texts, "n": n, "max_tokens": asked}
    draft = counter.read(COMPLETIONS, json.dumps(body).encode())

    _check_bounds(draft, counter.count_now(draft))


@settings(deadline=None, max_examples=150)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), asked=st.none() | st.integers(1, 8192))
def test_draft_bounds_and_rewrite_hold_for_chats(counter: Counter, texts: list[str], asked: int | None) -> None:
    """Bounds hold for a chat, and the forwarded body differs in the effective ceiling only."""
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = json.dumps({"model": "clamp", "messages": messages, "max_tokens": asked}, ensure_ascii=False).encode()
    draft = counter.read(CHAT, body)
    result = counter.count_now(draft)
    demand = result.demand

    _check_bounds(draft, result)
    after = json.loads(body if result.body is None else result.body)
    effective = after.pop("max_completion_tokens", None)
    assert demand.max_output_tokens == (after["max_tokens"] if effective is None else effective)
    assert json.loads(body)["messages"] == after["messages"]


@pytest.mark.parametrize(
    ("fields", "certain"),
    [
        ({"max_tokens": 10}, True),
        ({"max_tokens": 10, "min_tokens": 10}, True),
        ({"max_tokens": 10, "min_tokens": 11}, False),
        ({"max_tokens": 8192 - 20}, False),
        ({}, True),
    ],
)
def test_bounds_only_where_no_fault_can_follow(counter: Counter, fields: dict[str, Any], certain: bool) -> None:
    """A demand has bounds only when the exact count can neither clamp its ceiling nor refuse it."""
    draft = counter.read(COMPLETIONS, orjson.dumps({"model": "refuse", "prompt": "twenty characters ok", **fields}))

    assert certain is (draft.bounds() is not None)


def test_prompt_of_ids_has_exact_bounds(counter: Counter) -> None:
    """Ids need no tokenizer: both bounds are their number."""
    draft = counter.read(COMPLETIONS, orjson.dumps({"prompt": [[1, 2], [3]], "max_tokens": 4, "n": 2}))

    assert ((2, 1), (2, 1), None) == (draft.low_tokens, draft.high_tokens, draft.bounds())


async def test_texts_are_counted_off_the_event_loop(counter: Counter) -> None:
    """While a long text is counted the event loop keeps running, and the result is that of the blocking call."""
    draft = counter.read(CHAT, orjson.dumps(user("Long is the way to the harbour. " * 4000, max_tokens=5)))
    task = asyncio.create_task(counter.count(draft))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)

    assert counter.count_now(draft) == await task
    assert turns > 100


async def test_ids_need_no_thread() -> None:
    """A prompt of ids never waits behind texts: it is counted even when there is no pool any more."""
    closed = Counter(policy({"m": {}}, default_model="m"))
    closed.close()
    ids, text = (closed.read(COMPLETIONS, orjson.dumps({"prompt": prompt})) for prompt in ([1, 2, 3], "x"))

    assert 3 == (await closed.count(ids)).demand.input_tokens
    with pytest.raises(Fault) as refused:
        await closed.count(text)
    assert Reason.TOKENIZER_UNAVAILABLE == refused.value.reason


@pytest.mark.parametrize("ceiling", [{"max_tokens": 5}, {}])
def test_a_byte_order_mark_changes_nothing(counter: Counter, ceiling: dict[str, int]) -> None:
    """A body after a byte order mark is counted without it, and the engine's `json.loads` reads it with its ceiling."""
    body = json.dumps(user("hi", model="refuse", **ceiling)).encode()
    marked = codecs.BOM_UTF8 + body
    plain, found = counted(counter, body), counted(counter, marked)

    assert plain.demand == found.demand
    assert json.loads(plain.body or body) == json.loads(found.body or marked)


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_unicode_encodings_are_refused(counter: Counter, name: str) -> None:
    """The engine would read these; a gateway that another parser stands behind must not."""
    result = outcome(counter, json.dumps(user()).encode(name))

    assert Reason.MALFORMED_REQUEST == getattr(result, "reason", None)


# --- loading


def test_models_share_a_directory(counter: Counter) -> None:
    """A tokenizer is in memory once, however many models name its directory."""
    one, other = counter._prepared["clamp"], counter._prepared["refuse"]

    assert one.loaded is other.loaded
    assert one.tools.templates is other.tools.templates


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """A directory without a tokenizer fails at load with its path."""
    with pytest.raises(TokenizerError, match="cannot be read") as caught:
        Counter(policy({"m": {"tokenizer_dir": tmp_path}}))

    assert str(tmp_path) in str(caught.value)


def _directory(tmp_path: Path, **files: str) -> Path:
    for name, text in {"tokenizer_config.json": "{}", **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer.json.xz").write_bytes((QWEN3 / "tokenizer.json.xz").read_bytes())
    return tmp_path


def test_model_without_a_template_counts_completions_only(tmp_path: Path) -> None:
    """Without a chat template a chat is malformed, while a completion is counted."""
    bare = Counter(policy({"m": {"tokenizer_dir": _directory(tmp_path)}}, default_model="m"))
    chat, completion = outcome(bare, user()), outcome(bare, {"prompt": "x"}, COMPLETIONS)
    bare.close()

    assert (400, 200) == (status(chat), status(completion))


def test_template_file_overrides_the_configuration(tmp_path: Path) -> None:
    """chat_template.jinja is the model's template where it exists."""
    files = {"tokenizer_config.json": '{"chat_template": "never"}', "chat_template.jinja": "x"}
    fresh = Counter(policy({"m": {"tokenizer_dir": _directory(tmp_path, **files)}}, default_model="m"))
    demand = counted(fresh, user()).demand
    fresh.close()

    assert 1 == demand.input_tokens


def test_tools_choose_their_own_template(tmp_path: Path) -> None:
    """Of several named templates a chat with tools gets `tool_use`, every other one `default`."""
    templates = '[{"name": "default", "template": "x"}, {"name": "tool_use", "template": "a b c"}]'
    directory = _directory(tmp_path, **{"tokenizer_config.json": f'{{"chat_template": {templates}}}'})
    fresh = Counter(policy({"m": {"tokenizer_dir": directory}}, default_model="m"))
    plain = counted(fresh, user()).demand
    tools = counted(fresh, user(tools=[{"function": {"name": "f"}}])).demand
    fresh.close()

    assert (1, 3) == (plain.input_tokens, tools.input_tokens)


def test_broken_template_is_named_at_load(tmp_path: Path) -> None:
    """A template that does not compile stops the start."""
    with pytest.raises(TokenizerError, match="does not compile"):
        Counter(policy({"m": {"tokenizer_dir": _directory(tmp_path, **{"chat_template.jinja": "{% if %}"})}}))


def test_context_is_read_from_the_directory(tmp_path: Path) -> None:
    """model_max_length counts where it is a real limit, max_position_embeddings otherwise."""
    config = {"tokenizer_config.json": '{"model_max_length": 1e30}', "config.json": '{"max_position_embeddings": 512}'}

    assert 131_072 == context_tokens(QWEN3)
    assert 512 == context_tokens(_directory(tmp_path, **config))
