"""SGLang's profile: its prompts, ceilings and sequences, and what is refused because it would replace them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from extproc.counting.request import Tools
from extproc.counting.sglang import READERS, chat
from extproc.counting.template import ChatTemplate
from tests.counting.models import CHAT, COMPLETIONS, DATA, counted, outcome, policy, status, user

GENERATE = Endpoint.GENERATE
RECORDED = json.loads((DATA / "sglang.json").read_bytes())["cases"]


@pytest.fixture(scope="module")
def sglang() -> Iterator[Counter]:
    """Models `engine` (context 8192, policy default 1024) and `clamp`, both SGLang's."""
    models: dict[str, dict[str, Any]] = {
        "engine": {"engine": "sglang", "aliases": ["test-model"]},
        "clamp": {"engine": "sglang", "total_over_context": "clamp"},
    }
    found = Counter(policy(models, default_model="engine"))
    yield found
    found.close()


@pytest.mark.parametrize("case", RECORDED, ids=[str(index) for index in range(len(RECORDED))])
def test_chat_is_counted_as_the_engine_counts_it(case: dict[str, Any], sglang: Counter) -> None:
    """Tokens and refusals equal what the engine's own models and template made of the body."""
    result = outcome(sglang, {**case["body"], "max_tokens": 8})

    assert case["status"] == status(result)
    assert case["tokens"] == (None if isinstance(result, Fault) else result.demand.input_tokens)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_completion_tokens": 30, "max_tokens": 5}, 30),
        ({"max_completion_tokens": 0, "max_tokens": 500}, 500),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 0}, 7),
    ],
)
def test_chat_ceiling_is_the_newer_field_unless_it_is_none_or_zero(
    fields: dict[str, Any], tokens: int, sglang: Counter
) -> None:
    """A ceiling of 0 in max_completion_tokens falls through to max_tokens, and the body stays as it is."""
    found = counted(sglang, user(**fields))

    assert tokens == found.demand.max_output_tokens
    assert found.body is None


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": None}, {"max_completion_tokens": 0}, {"max_completion_tokens": None}]
)
def test_open_chat_ceiling_is_written_where_the_engine_reads_it(fields: dict[str, Any], sglang: Counter) -> None:
    """The policy's default stands in the body as the engine's own choice between both fields."""
    found = counted(sglang, user(**fields))
    assert found.body is not None
    written = json.loads(found.body)

    assert 1024 == found.demand.max_output_tokens
    assert 1024 == (written.get("max_completion_tokens") or written.get("max_tokens"))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_clamped_ceiling_is_written_to_the_field_that_holds(field: str, sglang: Counter) -> None:
    """A ceiling that shrinks to the context replaces the client's in its own field."""
    fields: dict[str, Any] = {"model": "clamp", field: 8192}
    found = counted(sglang, user(**fields))
    assert found.body is not None

    assert 8192 - found.demand.input_tokens == json.loads(found.body)[field] == found.demand.output_tokens


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_completion_tokens": 0, "max_tokens": 0}])
def test_ceiling_of_zero_is_refused(fields: dict[str, Any], sglang: Counter) -> None:
    """A chat that may generate nothing is no chat."""
    result = outcome(sglang, user(**fields))

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, "max_tokens") == (result.reason, result.param)


def test_sequences_multiply_the_output_only(sglang: Counter) -> None:
    """A prompt is shared by its sequences, each of which may run to the ceiling."""
    one, four = (counted(sglang, user(max_tokens=10, n=n)).demand for n in (1, 4))

    assert one.input_tokens == four.input_tokens
    assert (4, 40) == (four.sequences, four.output_tokens)


REFUSED_EVERYWHERE: list[tuple[str, Any]] = [
    ("audio_data", ["x"]),
    ("background", True),
    ("bootstrap_host", "h"),
    ("bootstrap_pair_key", "k"),
    ("bootstrap_port", 1),
    ("bootstrap_room", 1),
    ("data_parallel_rank", 0),
    ("decode_tp_size", 2),
    ("disagg_prefill_dp_rank", 0),
    ("encoder_urls", ["u"]),
    ("http_worker_ipc", "i"),
    ("image_data", ["x"]),
    ("input_embeds", [[0.5]]),
    ("kv_hints", {}),
    ("need_wait_for_mm_inputs", True),
    ("num_items_assigned", {}),
    ("positional_embed_overrides", {}),
    ("routed_dp_rank", 0),
    ("session_params", {"id": "s"}),
    ("video_data", ["x"]),
]


@pytest.mark.parametrize(("field", "value"), REFUSED_EVERYWHERE, ids=[field for field, _ in REFUSED_EVERYWHERE])
@pytest.mark.parametrize(
    ("endpoint", "body"), [(CHAT, user()), (COMPLETIONS, {"prompt": "hi"}), (GENERATE, {"text": "hi"})]
)
def test_what_replaces_the_prompt_or_its_place_is_refused(
    endpoint: Endpoint, body: dict[str, Any], field: str, value: Any, sglang: Counter
) -> None:
    """No field may swap the counted prompt, fetch its cache, choose a queue or outlive the response."""
    result = outcome(sglang, {**body, field: value}, endpoint)

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, field) == (result.reason, result.param)
    assert not isinstance(outcome(sglang, {**body, field: None}, endpoint), Fault)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, user(input_ids=[1, 2]), "input_ids"),
        (CHAT, user(chat_template="{{ 1 }}"), "chat_template"),
        (CHAT, user(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs.chat_template"),
        (CHAT, user(chat_template_kwargs={"tools": []}), "chat_template_kwargs.tools"),
        (
            CHAT,
            user(chat_template_kwargs={"continue_final_message": True}),
            "chat_template_kwargs.continue_final_message",
        ),
        (
            CHAT,
            user(chat_template_kwargs={"add_generation_prompt": False}),
            "chat_template_kwargs.add_generation_prompt",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True},
            "continue_final_message",
        ),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.content.type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages.content.type"),
        (CHAT, {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages.content"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages.content"),
        (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages.role"),
        (CHAT, user(n=None), "n"),
        (CHAT, user(n=0), "n"),
        (CHAT, user(stop=["x"] * 33), "stop"),
        (CHAT, user(tools=[{"function": {"name": "f", "parameters": {"type": "any"}}}]), "tools.function.parameters"),
        (CHAT, user(tools=[{"function": {"name": "f"}}] * 513), "tools"),
        (
            CHAT,
            {"messages": [{"role": "system", "content": "", "tools": [{"function": {"name": "f"}}] * 2}]},
            "tools.function.name",
        ),
        (COMPLETIONS, {"prompt": "hi", "input_ids": [1]}, "input_ids"),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": None}, "max_tokens"),
        (COMPLETIONS, {"prompt": "hi", "suffix": "x"}, "suffix"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (GENERATE, {}, "text"),
        (GENERATE, {"text": "hi", "input_ids": [1]}, "input_ids"),
        (GENERATE, {"text": [1, 2]}, "text"),
        (GENERATE, {"input_ids": "hi"}, "input_ids"),
        (GENERATE, {"input_ids": ["hi"]}, "input_ids"),
        (GENERATE, {"input_ids": []}, "input_ids"),
        (GENERATE, {"text": "hi", "sampling_params": [{"n": 1}]}, "sampling_params"),
        (GENERATE, {"text": "hi", "sampling_params": {"beam_width": 2}}, "sampling_params.beam_width"),
        (GENERATE, {"text": "hi", "sampling_params": {"is_normalized": True}}, "sampling_params"),
        (GENERATE, {"text": "hi", "sampling_params": {"n": 0}}, "sampling_params.n"),
        (GENERATE, {"text": "hi", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        (
            GENERATE,
            {"text": "hi", "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
            "sampling_params.min_new_tokens",
        ),
    ],
)
def test_malformed_request_names_its_field(
    endpoint: Endpoint, body: dict[str, Any], param: str, sglang: Counter
) -> None:
    """What the engine refuses, or would run otherwise than counted, is a 400 with the field's name."""
    result = outcome(sglang, body, endpoint)

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (result.reason, result.param)


@pytest.mark.parametrize("priority", [0, 5, -1])
@pytest.mark.parametrize(
    ("endpoint", "body"), [(CHAT, user()), (COMPLETIONS, {"prompt": "hi"}), (GENERATE, {"text": "hi"})]
)
def test_priority_does_not_reach_the_engine(
    endpoint: Endpoint, body: dict[str, Any], priority: int, sglang: Counter
) -> None:
    """Any priority of a client's goes out of the body, 0 included, since the engine's default is the lowest."""
    found = counted(sglang, {**body, "priority": priority}, endpoint)

    assert found.body is not None
    assert "priority" not in json.loads(found.body)


@pytest.mark.parametrize(
    "fields",
    [
        {"rid": "r"},
        {"session_id": "s"},
        {"lora_path": "l"},
        {"cache_salt": "c"},
        {"extra_key": "e"},
        {"custom_params": {}},
        {"add_generation_prompt": False},
        {"truncate_prompt_tokens": 1},
        {"echo": True},
        {"documents": [{"text": "t"}]},
        {"background": False},
    ],
)
def test_fields_without_effect_on_the_count_pass(fields: dict[str, Any], sglang: Counter) -> None:
    """What neither changes the prompt nor its place leaves the count as it is."""
    plain = counted(sglang, user(max_tokens=3)).demand

    assert plain == counted(sglang, user(max_tokens=3, **fields)).demand


def test_flex_tier_lowers(sglang: Counter) -> None:
    """The tier for work that can wait is the client's word that bulk service is enough, at every endpoint."""
    bodies = ((CHAT, user()), (COMPLETIONS, {"prompt": "hi"}), (GENERATE, {"text": "hi"}))
    found = [counted(sglang, {**body, "service_tier": "flex"}, endpoint).demand.lowered for endpoint, body in bodies]

    assert [True, True, True] == found


def test_completion_without_ceiling_runs_sixteen(sglang: Counter) -> None:
    """The documented default is counted and written."""
    found = counted(sglang, {"prompt": ["a b", "c"], "n": 2, "best_of": 5}, COMPLETIONS)

    assert (16, 64, 4) == (found.demand.max_output_tokens, found.demand.output_tokens, found.demand.sequences)
    assert found.body is not None
    assert 16 == json.loads(found.body)["max_tokens"]


@pytest.mark.parametrize(("prompt", "tokens"), [([1, 2, 3], (3,)), ([[1], [2, 3]], (1, 2))])
def test_ids_are_counted_by_their_number(prompt: Any, tokens: tuple[int, ...], sglang: Counter) -> None:
    """Ids are the prompt, in a completion and as input_ids of /generate."""
    assert tokens == counted(sglang, {"prompt": prompt}, COMPLETIONS).prompts_tokens
    assert tokens == counted(sglang, {"input_ids": prompt}, GENERATE).prompts_tokens


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 128),
        ({"sampling_params": None}, 128),
        ({"sampling_params": {}}, 128),
        ({"sampling_params": {"temperature": None}}, 128),
        ({"sampling_params": {"max_new_tokens": None}}, 1024),
    ],
)
def test_open_ceiling_of_generate_is_written(fields: dict[str, Any], tokens: int, sglang: Counter) -> None:
    """An absent ceiling is the engine's 128, one of null has no bound and takes the policy's; both are written."""
    found = counted(sglang, {"text": "hi", **fields}, GENERATE)

    assert tokens == found.demand.max_output_tokens
    assert found.body is not None
    assert tokens == json.loads(found.body)["sampling_params"]["max_new_tokens"]


def test_ceiling_of_generate_over_context_names_its_field(sglang: Counter) -> None:
    """A ceiling that no prompt could make right is a 413 with the path of the field."""
    result = outcome(sglang, {"text": "hi", "sampling_params": {"max_new_tokens": 9000}}, GENERATE)

    assert isinstance(result, Fault)
    assert (Reason.CONTEXT_LIMIT, "sampling_params.max_new_tokens") == (result.reason, result.param)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "a b"),
        ("{% for message in messages %}{{ message.content | length }}{% endfor %}{# vision #}", "2"),
        ("{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}", "<a><b>"),
        ("{% for turn in messages %}{% for part in turn.content %}<{{ part }}>{% endfor %}{% endfor %}", "<a>< ><b>"),
    ],
)
def test_parts_reach_a_template_that_looks_for_them(source: str, expected: str) -> None:
    """Parts are joined by spaces, but for a template that names media or loops over content of its usual names."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]}
    _, render = chat.read(body, Tools({"default": ChatTemplate(source, {})}, 9))

    assert (expected,) == render().texts


def test_template_of_bare_functions_gets_them_next() -> None:
    """Where a template refuses tools as objects with a function, it gets the functions themselves."""
    source = "{% for tool in tools %}{{ tool.name + '!' }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, render = chat.read(user(tools=tools), Tools({"default": ChatTemplate(source, {})}, 9))

    assert ("f!",) == render().texts


def test_tools_are_dumped_as_the_engine_dumps_them() -> None:
    """Keys of a function keep the client's order, what it lacks follows as null, and extras go."""
    function = {"parameters": {"type": "dict"}, "name": "f", "x": 1}
    _, render = chat.read(
        user(tools=[{"function": function}]), Tools({"default": ChatTemplate("{{ tools | tojson }}", {})}, 9)
    )
    dumped = {"parameters": {"type": "object"}, "name": "f", "description": None}

    assert (json.dumps([{"type": "function", "function": dumped, "defer_loading": None}]),) == render().texts


def test_only_chats_bring_their_own_special_tokens() -> None:
    """The tokenizer adds its special tokens to plain texts, and none to what a template rendered."""
    tools = Tools({"default": ChatTemplate("x", {})}, 9)
    bodies = {CHAT: user(), COMPLETIONS: {"prompt": "a"}, GENERATE: {"text": "a"}}
    found = {endpoint: READERS[endpoint](body, tools)[1]().add_special_tokens for endpoint, body in bodies.items()}

    assert {CHAT: False, COMPLETIONS: True, GENERATE: True} == found


def test_tools_of_system_messages_reach_the_template() -> None:
    """Tools on a message stay there for the template, and may be chosen by name."""
    source = "{% for message in messages %}{{ message.tools[0].function.name }}{% endfor %}{{ tools }}"
    body = {
        "messages": [{"role": "developer", "content": "x", "tools": [{"function": {"name": "f"}}]}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    _, render = chat.read(body, Tools({"default": ChatTemplate(source, {})}, 9))

    assert ("fNone",) == render().texts


REFUSED_HERE = {
    "10-chat-ceiling-equals-context.json": Reason.CONTEXT_LIMIT,
    "11-chat-ceiling-over-context.json": Reason.CONTEXT_LIMIT,
    "32-chat-template-in-kwargs.json": Reason.MALFORMED_REQUEST,
    "33-chat-continue-final.json": Reason.MALFORMED_REQUEST,
    "34-chat-continue-and-generate.json": Reason.MALFORMED_REQUEST,
    "35-chat-continue-default-generate.json": Reason.MALFORMED_REQUEST,
    "37-chat-echo.json": Reason.MALFORMED_REQUEST,
    "48-chat-image-http-url.json": Reason.MALFORMED_REQUEST,
    "49-chat-image-multi.json": Reason.MALFORMED_REQUEST,
    "50-chat-input-audio.json": Reason.MALFORMED_REQUEST,
    "51-chat-video-url.json": Reason.MALFORMED_REQUEST,
    "77-chat-sglang-input-ids.json": Reason.MALFORMED_REQUEST,
    "89-cmpl-suffix.json": Reason.MALFORMED_REQUEST,
    "91-cmpl-empty-string.json": Reason.MALFORMED_REQUEST,
}
"""Bodies that the engine's request models take: over the context, with media, or refused by the rules above."""


def test_handed_bodies_have_the_engines_ceiling_and_sequences(shared: Path, sglang: Counter) -> None:
    """Where the engine's models read a body, its ceiling and n are theirs; where they do not, it is refused."""
    refused: dict[str, Reason] = {}
    wrong, seen = [], 0
    for path in sorted((shared / "cases" / "bodies").glob("*.expect.json")):
        expect = json.loads(path.read_bytes())
        models = expect.get("sglang_0_5_23_models")
        if models is None:
            continue
        seen += 1
        endpoint = Endpoint(expect["endpoint"].removeprefix("POST "))
        result = outcome(sglang, path.with_name(expect["file"]).read_bytes(), endpoint)
        if isinstance(result, Fault):
            refused |= {expect["file"]: result.reason} if models["parse"] == "ok" else {}
            continue
        demand = result.demand
        ran = (demand.max_output_tokens, demand.sequences // len(result.prompts_tokens))
        if models["parse"] != "ok" or ran != (models["max_new_tokens"] or 1024, models["n"]):
            wrong.append((expect["file"], models, ran))

    assert seen > 60
    assert [] == wrong
    assert REFUSED_HERE == refused


def test_handed_generate_has_its_ceiling_times_texts_and_sequences(shared: Path, sglang: Counter) -> None:
    """The native body of two texts with n = 2 runs four sequences."""
    body = shared / "cases" / "bodies" / "106-sglang-generate.json"
    expected = json.loads(body.with_suffix(".expect.json").read_bytes())
    found = counted(sglang, body.read_bytes(), GENERATE)

    assert expected["input"]["prompt_units"] == len(found.prompts_tokens)
    assert expected["ceiling"]["per_sequence"] == found.demand.max_output_tokens
    assert expected["ceiling"]["multiplicity"] == found.demand.sequences
    assert expected["ceiling"]["reserve"] == found.demand.output_tokens
