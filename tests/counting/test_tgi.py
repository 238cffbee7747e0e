"""TGI's profile: its prompts, ceilings and sequences, and what is refused because it cannot be counted here."""

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
from extproc.counting.template import ChatTemplate
from extproc.counting.tgi import READERS, chat
from tests.counting.models import CHAT, COMPLETIONS, counted, outcome, policy, user

GENERATE = Endpoint.GENERATE
BARE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }} \n{% endfor %}{% if add_generation_prompt %}>{% endif %}", {}
)


@pytest.fixture(scope="module")
def tgi() -> Iterator[Counter]:
    """Models `engine` (TGI's, context 8192, policy default 1024) and `vllm`, for comparison."""
    found = Counter(
        policy({"engine": {"engine": "tgi", "aliases": ["test-model"]}, "vllm": {}}, default_model="engine")
    )
    yield found
    found.close()


def generate(**parameters: Any) -> dict[str, Any]:
    """A body of /generate."""
    return {"inputs": "Name a cape.", "parameters": parameters}


def _rendered(*messages: dict[str, Any]) -> str:
    _, render = chat.read({"messages": list(messages)}, Tools({"default": BARE}, 9))
    return render().texts[0]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat_ceiling_has_two_names(field: str, tgi: Counter) -> None:
    """Either name states the ceiling, and the body stays as it is."""
    found = counted(tgi, {**user(), field: 30})

    assert 30 == found.demand.output_tokens
    assert found.body is None


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1, "max_completion_tokens": 4000},
        {"max_tokens": 5, "max_completion_tokens": None},
        {"max_tokens": None, "max_completion_tokens": 5},
    ],
)
def test_both_names_of_the_ceiling_are_refused(fields: dict[str, Any], tgi: Counter) -> None:
    """The engine reads both names as one field twice and refuses the body, null or not."""
    result = outcome(tgi, user(**fields))

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, "max_completion_tokens") == (result.reason, result.param)


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_completion_tokens": None}, "max_completion_tokens"),
    ],
)
def test_open_chat_ceiling_is_written_under_one_name(fields: dict[str, Any], written: str, tgi: Counter) -> None:
    """The policy's default takes the name that the body has, since a second one would be refused."""
    found = counted(tgi, user(**fields))
    assert found.body is not None
    body = json.loads(found.body)

    assert 1024 == found.demand.output_tokens == body[written]
    assert 1 == sum(name in body for name in ("max_tokens", "max_completion_tokens"))


@pytest.mark.parametrize(("endpoint", "body"), [(CHAT, user()), (COMPLETIONS, {"prompt": "hi"})])
def test_n_is_not_read(endpoint: Endpoint, body: dict[str, Any], tgi: Counter) -> None:
    """One sequence runs whatever n says, and one is reserved."""
    found = counted(tgi, {**body, "n": 4, "max_tokens": 10}, endpoint).demand

    assert (1, 10) == (found.sequences, found.output_tokens)


def test_chat_is_rendered_by_the_template(tgi: Counter) -> None:
    """A chat of text has the tokens that the same template gives it for another engine."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a cape."},
        {"role": "assistant", "content": "Cape Horn"},
        {"role": "user", "content": "Another", "name": "ann"},
    ]
    found, other = (counted(tgi, {"messages": messages, "model": model}) for model in ("engine", "vllm"))

    assert other.demand.input_tokens == found.demand.input_tokens


def test_chunks_are_concatenated() -> None:
    """Nothing stands between the texts of a content's chunks."""
    content = [{"type": "text", "text": text} for text in ("a", "b")]

    assert "[user]ab \n>" == _rendered({"role": "user", "content": content})


def test_last_assistant_message_is_continued() -> None:
    """A prompt whose last message is the assistant's ends with its text, without spaces."""
    assert "[user]a \n[assistant]a b" == _rendered(
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "a b  "}
    )
    assert "[assistant] \n>" == _rendered({"role": "assistant", "content": ""})


def test_only_chats_bring_their_own_special_tokens() -> None:
    """The tokenizer adds its special tokens to plain texts, and none to what a template rendered."""
    bodies = {CHAT: user(), COMPLETIONS: {"prompt": "a"}, GENERATE: generate()}
    model = Tools({"default": BARE}, 9)
    found = {endpoint: READERS[endpoint](body, model)[1]().add_special_tokens for endpoint, body in bodies.items()}

    assert {CHAT: False, COMPLETIONS: True, GENERATE: True} == found


def test_completion_counts_each_prompt(tgi: Counter) -> None:
    """Each text of a list is a prompt with its own ceiling."""
    found = counted(tgi, {"prompt": ["a", "b c"], "max_tokens": 5}, COMPLETIONS)

    assert (1, 2) == found.prompts_tokens
    assert (2, 10) == (found.demand.sequences, found.demand.output_tokens)


def test_other_name_of_the_ceiling_means_nothing_in_a_completion(tgi: Counter) -> None:
    """Only a chat has the second name: a completion's ceiling is still open and is written."""
    found = counted(tgi, {"prompt": "a", "max_completion_tokens": 5}, COMPLETIONS)

    assert found.body is not None
    assert 1024 == found.demand.output_tokens == json.loads(found.body)["max_tokens"]


def test_open_ceiling_of_generate_is_written(tgi: Counter) -> None:
    """The policy's default goes into the parameters."""
    found = counted(tgi, generate(), GENERATE)

    assert found.body is not None
    assert 1024 == found.demand.output_tokens == json.loads(found.body)["parameters"]["max_new_tokens"]


def test_best_of_runs_prompt_and_output_again(tgi: Counter) -> None:
    """Every candidate is a request of its own to the engine, with its own prefill."""
    one = counted(tgi, generate(max_new_tokens=9), GENERATE).demand
    three = counted(tgi, generate(max_new_tokens=9, best_of=3, do_sample=True), GENERATE).demand

    assert (3, 27, 3 * one.input_tokens) == (three.sequences, three.output_tokens, three.input_tokens)


def test_truncated_prompt_counts_what_is_kept(tgi: Counter) -> None:
    """`truncate` keeps at most that many tokens."""
    whole, cut = (counted(tgi, generate(max_new_tokens=9, **kept), GENERATE) for kept in ({}, {"truncate": 2}))

    assert whole.demand.input_tokens > 2 == cut.demand.input_tokens


def test_flex_tier_lowers(tgi: Counter) -> None:
    """The tier for work that can wait is the client's word that bulk service is enough, at every endpoint."""
    bodies = ((CHAT, user()), (COMPLETIONS, {"prompt": "hi"}), (GENERATE, generate()))
    found = [counted(tgi, {**body, "service_tier": "flex"}, endpoint).demand.lowered for endpoint, body in bodies]

    assert [True, True, True] == found


@pytest.mark.parametrize(
    "parameters",
    [
        {"decoder_input_details": True},
        {"details": True},
        {"return_full_text": True},
        {"adapter_id": "a"},
        {"grammar": {"type": "regex", "value": "x"}},
        {"watermark": True},
        {"unknown": [1]},
    ],
)
def test_parameters_without_effect_on_the_count_pass(parameters: dict[str, Any], tgi: Counter) -> None:
    """What changes neither the prompt nor its length leaves the count as it is."""
    plain = counted(tgi, generate(max_new_tokens=9), GENERATE).demand

    assert plain == counted(tgi, generate(max_new_tokens=9, **parameters), GENERATE).demand


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, user(tools=[TOOL]), "tools"),
        (CHAT, user(tools=[]), "tools"),
        (CHAT, user(tool_prompt="x"), "tool_prompt"),
        (CHAT, user(guideline="x"), "guideline"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [TOOL]}]}, "messages.tool_calls"),
        (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.tool_call_id"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.content.type"),
        (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages.content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.role"),
        (CHAT, user(max_tokens=0), "max_tokens"),
        (CHAT, user(max_tokens="5"), "max_tokens"),
        (CHAT, user(max_tokens=True), "max_tokens"),
        (CHAT, user(max_tokens=5.0), "max_tokens"),
        (CHAT, user(max_tokens=-1), "max_tokens"),
        (CHAT, user(max_tokens=2**32), "max_tokens"),
        (CHAT, user(stream="yes"), "stream"),
        (CHAT, user(temperature="1"), "temperature"),
        (COMPLETIONS, {"prompt": [1, 2]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {}, "prompt"),
        (GENERATE, {"parameters": {}}, "inputs"),
        (GENERATE, {"inputs": "", "parameters": {}}, "inputs"),
        (GENERATE, {"inputs": ["a"], "parameters": {}}, "inputs"),
        (GENERATE, {"inputs": "a"}, "parameters"),
        (GENERATE, {"inputs": "a", "parameters": None}, "parameters"),
        (GENERATE, generate(max_new_tokens=0), "parameters.max_new_tokens"),
        (GENERATE, generate(truncate=0), "parameters.truncate"),
        (GENERATE, generate(truncate=-1), "parameters.truncate"),
        (GENERATE, generate(best_of=5, do_sample=True), "parameters.best_of"),
        (GENERATE, generate(best_of=0), "parameters.best_of"),
        (GENERATE, generate(best_of=2), "parameters.best_of"),
        (GENERATE, generate(best_of=2, do_sample=True, seed=1), "parameters.seed"),
    ],
)
def test_malformed_request_names_its_field(endpoint: Endpoint, body: dict[str, Any], param: str, tgi: Counter) -> None:
    """What the engine refuses, or adds to in ways that are not counted here, is a 400 with the field's name."""
    result = outcome(tgi, body, endpoint)

    assert isinstance(result, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (result.reason, result.param)


def test_handed_generate_has_its_ceiling_times_best_of(shared: Path, tgi: Counter) -> None:
    """The native body with best_of = 2 reserves two outputs, and each candidate's own prompt."""
    body = shared / "cases" / "bodies" / "105-tgi-generate.json"
    expected = json.loads(body.with_suffix(".expect.json").read_bytes())["ceiling"]
    found = counted(tgi, body.read_bytes(), GENERATE)

    assert expected["per_sequence"] == found.demand.max_output_tokens
    assert expected["multiplicity"] == found.demand.sequences == len(found.prompts_tokens)
    assert expected["reserve"] == found.demand.output_tokens


def test_handed_body_with_both_ceilings_is_refused(shared: Path, tgi: Counter) -> None:
    """The body that hides a large ceiling behind a small one cannot run here at all."""
    body = (shared / "cases" / "bodies" / "04-chat-both-small-legacy.json").read_bytes()

    assert isinstance(outcome(tgi, body), Fault)
