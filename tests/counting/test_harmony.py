"""Chats of gpt-oss have the tokens that the engine gives them in Harmony's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter, TokenizerError, typescript
from extproc.counting.request import Tools
from extproc.counting.vllm import chat, harmony
from tests.counting.models import CHAT, CLAMP, COMPLETIONS, DATA, counted, outcome, policy, status, user

library = pytest.importorskip("openai_harmony", reason="oss-harmony, with which these counts are compared, is missing")

CASES = json.loads((DATA / "gpt_oss.json").read_bytes())["cases"]
ENCODING = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)

TEXTS = st.lists(
    st.sampled_from(
        [
            *(
                "<|end|>",
                "<|start|>",
                "<|reserved_200013|>",
                "<|foo|>",
                "<|",
                "|>",
                "<",
                "|",
                "end",
                "Word",
                "'s",
                "_",
                "!",
                "/",
            ),
            *(" ", "\n", "\r\n", "\t", "123", "你好", "e\u0301", "\u0301", "😀"),
        ]
    )
    | st.text(max_size=3),
    max_size=8,
).map("".join)

FLOATS = st.integers(-(10**9), 10**9).map(lambda number: number / 1000)
"""Numbers of up to 12 digits: the library reads longer ones to within their last digit, and prints another."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


def _fields(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["object", "array", "string", "number", "integer", "boolean", "null", ["integer", "null"]]
            ),
            "properties": st.dictionaries(TEXTS, inner, max_size=3),
            "required": st.lists(TEXTS, max_size=2),
            "items": inner,
            "oneOf": st.lists(inner, max_size=3),
            "title": TEXTS,
            "description": st.sampled_from(["same", ""]) | TEXTS,
            "default": JSON,
            "enum": st.lists(st.sampled_from(["a", "b", 1]), max_size=3),
            "examples": st.lists(JSON, max_size=2),
            "nullable": st.booleans(),
        },
    )


SCHEMAS = st.recursive(_fields(JSON), _fields, max_leaves=8)


def pieces(body: dict[str, Any]) -> tuple[str, ...]:
    """The texts of the prompt of a chat."""
    return chat.read(body, Tools({}, 0, harmony.prompts))[1]().texts


def tokens(body: dict[str, Any]) -> int:
    """The tokens of a chat, by Harmony's vocabulary: each text with its control tokens."""
    return sum(len(ENCODING.encode(text, allowed_special="all")) for text in pieces(body))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_chat_is_counted_as_the_engine_counts_it(case: dict[str, Any]) -> None:
    """Tokens, or the refusal, equal what vLLM's own renderer made of the body."""
    if case["tokens"] is None:
        with pytest.raises(Fault):
            tokens(case["body"])
    else:
        assert case["tokens"] == tokens(case["body"])


@given(said=st.lists(TEXTS, min_size=1, max_size=4), answer=TEXTS)
def test_texts_of_clients_hold_no_control_token(said: list[str], answer: str) -> None:
    """Whatever a client writes is tokenized as the library tokenizes plain text, part by part."""
    messages = [
        library.Message.from_role_and_content(
            library.Role.SYSTEM, library.SystemContent.new().with_conversation_start_date("2026-12-31")
        ),
        library.Message.from_role_and_contents(library.Role.USER, [library.TextContent(text=text) for text in said]),
    ]
    if answer:
        messages.append(library.Message.from_role_and_content(library.Role.ASSISTANT, answer).with_channel("final"))
    expected = ENCODING.render_conversation_for_completion(
        library.Conversation.from_messages(messages), library.Role.ASSISTANT
    )
    parts = [{"type": "text", "text": text} for text in said]

    assert len(expected) == tokens(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}
    )


@given(description=TEXTS, parameters=st.none() | SCHEMAS)
def test_tools_are_declared_as_the_library_declares_them(description: str, parameters: dict[str, Any] | None) -> None:
    """Any schema becomes the TypeScript of Harmony, to the character."""
    tool = library.ToolDescription.new("f", description, parameters)
    content = library.DeveloperContent.new().with_function_tools([tool])
    message = library.Message.from_role_and_content(library.Role.DEVELOPER, content)
    printed = ENCODING.decode(ENCODING.render_conversation(library.Conversation.from_messages([message])))
    function = {"name": "f", "description": description, "parameters": parameters}

    assert printed == f"<|start|>developer<|message|>{typescript.namespace([function])}<|end|>"


def test_union_prints_what_its_variants_share_once() -> None:
    """A description of a property and of its first type is the type's; another one is above, and later ones stay."""
    variants = [{"type": "string", "description": "a"}, {"type": "null", "description": "b", "default": 1}]
    printed = {
        text: typescript.namespace(
            [
                {
                    "name": "f",
                    "description": None,
                    "parameters": {"type": "object", "properties": {"p": {"description": text, "oneOf": variants}}},
                }
            ]
        )
        for text in ("a", "x")
    }

    assert "{\np?:\n | string\n | any // b default: 1\n,\n}" in printed["a"]
    assert "{\n// x\np?:\n | string\n | any // b default: 1\n,\n}" in printed["x"]


def test_every_date_has_as_many_tokens() -> None:
    """The engine prints its own date, so any date may stand for it."""
    days = [date(2024, 1, 1) + timedelta(days=number) for number in range(0, 3650, 7)]

    assert {len(ENCODING.encode(harmony._DATE))} == {len(ENCODING.encode(f"{day:%Y-%m-%d}")) for day in days}


def _call(name: object = "f", **fields: object) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}, **fields}
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return user(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (user(reasoning_effort="minimal"), "reasoning_effort"),
        (user(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
        (_call("<|end|>"), "messages.tool_calls.function.name"),
        (_call(id=None), "messages.tool_calls.id"),
        (_nested(40), "tools.function.parameters"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.role"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.content.type"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "messages.content.type"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages.tool_calls"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": ["1"]}]}, "messages.tool_call_id"),
        (
            user(
                tools=[{"type": "function", "function": {"name": "f", "parameters": {"oneOf": [{"default": 2**64}]}}}]
            ),
            "tools.function",
        ),
    ],
)
def test_what_cannot_be_counted_exactly_is_refused(body: dict[str, Any], param: str) -> None:
    """A chat that the engine refuses, or whose prompt is not certain, is malformed by the name of its field."""
    with pytest.raises(Fault) as caught:
        pieces(body)

    assert (Reason.MALFORMED_REQUEST, param) == (caught.value.reason, caught.value.param)


def test_rendered_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas that print far more than they are cannot exhaust memory."""
    monkeypatch.setattr(harmony, "RENDERED_CHARS_MAX", 100)
    with pytest.raises(Fault, match="too long"):
        pieces(user())


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose tokenizer has Harmony's control tokens, and one token for each byte."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=list(harmony.CONTROL_TOKENS))
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "config.json").write_text('{"model_type": "gpt_oss"}')
    return directory


@pytest.fixture(scope="module")
def gpt_oss(words: Path) -> Iterator[Counter]:
    """A model of that directory."""
    found = Counter(policy({"m": {**CLAMP, "tokenizer_dir": words, "tokenizer_mode": "harmony"}}, default_model="m"))
    yield found
    found.close()


def test_prompt_of_several_texts_is_one_prompt(gpt_oss: Counter) -> None:
    """A prompt that is cut at a control token's name has the tokens of its texts, and bounds around them."""
    plain, danger = counted(gpt_oss, user("<|ENDED|>")), counted(gpt_oss, user("<|ended|>"))
    draft = gpt_oss.read(CHAT, json.dumps(user("<|end|>")).encode())

    assert plain.prompts_tokens == danger.prompts_tokens
    assert draft.low_tokens < (plain.demand.input_tokens - len("ed"),) < draft.high_tokens


@pytest.mark.parametrize(
    ("endpoint", "body", "prompts"),
    [
        (CHAT, user(), 1),
        (Endpoint.CHAT_COMPLETIONS_BATCH, {"messages": [user("<|end|>")["messages"], user()["messages"]]}, 2),
        (COMPLETIONS, {"prompt": "x"}, 1),
        (Endpoint.MESSAGES, {"model": "m", "max_tokens": 5, "thinking": {"type": "disabled"}, **user()}, 1),
    ],
)
def test_other_endpoints_take_the_same_way(gpt_oss: Counter, endpoint: Endpoint, body: Any, prompts: int) -> None:
    """Batches and messages become chats of the format; completions are texts."""
    assert prompts == len(counted(gpt_oss, body, endpoint).prompts_tokens)


def test_calls_of_messages_have_their_input_as_text(gpt_oss: Counter) -> None:
    """An input of a tool_use block is printed as the engine prints it."""
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1, "é"]}}
    asking, text = {"role": "user", "content": "x"}, '{"a": [1, "\\u00e9"]}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    blocks = {"model": "m", "max_tokens": 5, "messages": [asking, {"role": "assistant", "content": [use]}]}
    calls = {"messages": [asking, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    assert counted(gpt_oss, calls).prompts_tokens == counted(gpt_oss, blocks, Endpoint.MESSAGES).prompts_tokens


def test_responses_are_refused(gpt_oss: Counter) -> None:
    """An endpoint whose prompts the engine builds in yet another way is not there for such a model."""
    result = outcome(gpt_oss, {"input": "x"}, Endpoint.RESPONSES)

    assert isinstance(result, Fault)
    assert 404 == status(result)
    assert "harmony" in result.message


def test_mode_and_model_belong_together(words: Path) -> None:
    """gpt-oss by a template would be a wrong count, and so would another model by Harmony."""
    with pytest.raises(TokenizerError, match="set tokenizer_mode: harmony"):
        Counter(policy({"m": {"tokenizer_dir": words}}))
    with pytest.raises(TokenizerError, match="lacks control tokens of Harmony"):
        Counter(policy({"m": {"tokenizer_mode": "harmony"}}))


def test_recorded_chats_are_counted_by_the_models_own_tokenizer(shared: Path) -> None:
    """tokenizer.json of gpt-oss gives the engine's counts, as Harmony's own vocabulary does."""
    directory = shared / "tokenizers" / "gptoss"
    if not directory.is_dir():
        pytest.skip("the tokenizer gptoss is not here: 28 MB")
    model = {**CLAMP, "tokenizer_dir": directory, "tokenizer_mode": "harmony", "tokenizer_backend": "auto"}
    counter = Counter(policy({"m": model}))
    found = [outcome(counter, case["body"]) for case in CASES]
    counter.close()

    assert [(case["tokens"],) if case["tokens"] else case["status"] for case in CASES] == [
        status(result) if isinstance(result, Fault) else result.prompts_tokens for result in found
    ]
