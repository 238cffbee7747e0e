"""Embeddings, classification, scores and reranking: prompts alone, each a request of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from tests.counting.models import COMPLETIONS, counted, outcome, user

EMBEDDINGS, CLASSIFY, RERANK, SCORE = Endpoint.EMBEDDINGS, Endpoint.CLASSIFY, Endpoint.RERANK, Endpoint.SCORE

RERANKS = (RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2)
SCORES = (SCORE, Endpoint.SCORE_V1)

HI = user()["messages"]


def tokens(counter: Counter, *texts: str) -> tuple[int, ...]:
    """The tokens of texts as they are."""
    return counted(counter, {"prompt": list(texts)}, COMPLETIONS).prompts_tokens


@pytest.mark.parametrize("endpoint", [EMBEDDINGS, CLASSIFY])
@pytest.mark.parametrize("value", ["hi", ["hi", "a cape"], [5, 6, 7], [[5], [6, 7]]])
def test_input_is_counted_as_prompts(value: Any, endpoint: Endpoint, counter: Counter) -> None:
    """Texts and ids have the tokens that they have as prompts of a completion."""
    expected = counted(counter, {"prompt": value}, COMPLETIONS).prompts_tokens

    assert expected == counted(counter, {"input": value}, endpoint).prompts_tokens


@pytest.mark.parametrize(
    ("fields", "chats"),
    [
        ({"messages": HI}, 1),
        ({"messages": [HI, HI]}, 2),
        ({"input": HI}, 1),
        ({"input": [HI, HI]}, 2),
    ],
)
def test_chats_are_counted_without_an_opened_answer(fields: dict[str, Any], chats: int, counter: Counter) -> None:
    """A chat to embed has the tokens of a chat that opens no answer."""
    expected = counted(counter, user(add_generation_prompt=False)).demand.input_tokens

    assert (expected,) * chats == counted(counter, fields, EMBEDDINGS).prompts_tokens


def test_chat_opens_an_answer_where_asked(counter: Counter) -> None:
    """add_generation_prompt is the client's to set."""
    body = {"messages": HI, "add_generation_prompt": True}

    assert counted(counter, user()).prompts_tokens == counted(counter, body, EMBEDDINGS).prompts_tokens


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"input": ["a", "b"]}, EMBEDDINGS),
        ({"input": "a"}, CLASSIFY),
        ({"query": "a", "documents": "b"}, RERANK),
        ({"text_1": "a", "text_2": "b"}, SCORE),
    ],
)
def test_nothing_is_generated(body: dict[str, Any], endpoint: Endpoint, counter: Counter) -> None:
    """The reserve is the prompts, and no ceiling is written."""
    found = counted(counter, {"model": "refuse", **body}, endpoint)

    assert (0, found.demand.input_tokens, None) == (
        found.demand.output_tokens,
        found.demand.reserve_tokens,
        found.body,
    )


@pytest.mark.parametrize("endpoint", RERANKS)
def test_query_is_charged_with_each_document(endpoint: Endpoint, counter: Counter) -> None:
    """A pair is charged as two prompts: no fewer tokens than one prompt of both has."""
    query, documents = "name a cape", ["Cape Horn", "Cape Agulhas is south"]
    found = counted(counter, {"query": query, "documents": documents, "top_n": 1}, endpoint)

    assert tokens(counter, query, query, *documents) == found.prompts_tokens
    assert sum(tokens(counter, *(query + document for document in documents))) <= found.demand.input_tokens


@pytest.mark.parametrize("endpoint", SCORES)
@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
@pytest.mark.parametrize(
    ("sides", "texts"),
    [
        (("a", "b c"), ["a", "b c"]),
        (("a", ["b c", "d"]), ["a", "a", "b c", "d"]),
        ((["a", "a b c"], ["d", "e"]), ["a", "a b c", "d", "e"]),
    ],
)
def test_scores_pair_one_with_many_or_each_with_its_own(
    names: tuple[str, str], sides: tuple[Any, Any], texts: list[str], endpoint: Endpoint, counter: Counter
) -> None:
    """Both sides have any of the names that the engine knows."""
    body = dict(zip(names, sides, strict=True))

    assert tokens(counter, *texts) == counted(counter, body, endpoint).prompts_tokens


@pytest.mark.parametrize(
    "fields", [{"instruction": "be exact"}, {"chat_template_kwargs": {"instruction": "be exact"}, "instruction": "x"}]
)
def test_instruction_is_charged_with_each_pair(fields: dict[str, Any], counter: Counter) -> None:
    """An instruction is part of every pair, and the template's variable wins over the field."""
    body = {"query": "a", "documents": ["b", "c"], **fields}

    assert tokens(counter, "a\nbe exact", "a\nbe exact", "b", "c") == counted(counter, body, RERANK).prompts_tokens


def test_empty_document_is_charged_a_token(counter: Counter) -> None:
    """A pair with an empty half still runs."""
    assert (1, 1) == counted(counter, {"query": "a", "documents": [""]}, RERANK).prompts_tokens


@pytest.mark.parametrize(("keep", "kept"), [(5, 5), (-1, 8192)])
def test_truncation_bounds_each_prompt(keep: int, kept: int, counter: Counter) -> None:
    """truncate_prompt_tokens keeps that many tokens, and -1 the whole context: no output needs room."""
    body = {"model": "refuse", "input": [1] * 9000, "truncate_prompt_tokens": keep}

    assert (kept,) == counted(counter, body, EMBEDDINGS).prompts_tokens


@pytest.mark.parametrize(("length", "reason"), [(8192, None), (8193, Reason.CONTEXT_LIMIT)])
def test_prompt_may_fill_the_context(length: int, reason: Reason | None, counter: Counter) -> None:
    """A prompt is refused only above the context."""
    found = outcome(counter, {"model": "refuse", "input": [1] * length}, EMBEDDINGS)

    assert reason is (found.reason if isinstance(found, Fault) else None)


def test_flex_lowers_and_priority_is_taken_out(counter: Counter) -> None:
    """Intent and order are handled as in a chat."""
    found = counted(counter, {"input": "a", "service_tier": "flex", "priority": 1}, EMBEDDINGS)

    assert found.body is not None
    assert {"input": "a", "service_tier": "flex"} == json.loads(found.body)
    assert found.demand.lowered


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": [[]]}, "input"),
        (EMBEDDINGS, {"input": ["a", 5]}, "input"),
        (EMBEDDINGS, {"input": [151_936]}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"input": "a", "messages": HI}, "input"),
        (EMBEDDINGS, {"messages": []}, "messages"),
        (EMBEDDINGS, {"messages": "hi"}, "messages"),
        (EMBEDDINGS, {"messages": HI * 4097}, "messages"),
        (EMBEDDINGS, {"input": [HI] * 4097}, "input"),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.content.type"),
        (EMBEDDINGS, {"messages": HI, "chat_template": "x"}, "chat_template"),
        (
            EMBEDDINGS,
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (EMBEDDINGS, {"input": "a", "padding": "max_length"}, "padding"),
        (EMBEDDINGS, {"input": "a", "normalize": True}, "normalize"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CLASSIFY, {"input": "a", "padding": "max_length"}, "padding"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": ["a"], "documents": ["a"]}, "query"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": [{"content": []}]}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents"),
        (RERANK, {"query": "a" * 2000, "documents": ["a"] * 2000}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"] * 2000, "instruction": "a" * 2000}, "documents"),
        (RERANK, {"query": "a", "documents": "b", "top_n": -1}, "top_n"),
        (RERANK, {"query": "a", "documents": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        (RERANK, {"query": "a", "documents": "b", "padding": "max_length"}, "padding"),
        (RERANK, {"query": "a", "documents": "b", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        (
            RERANK,
            {"query": "a", "documents": "b", "chat_template_kwargs": {"instruction": 1}},
            "chat_template_kwargs.instruction",
        ),
        (SCORE, {"text_1": "a"}, None),
        (SCORE, {"text_1": "a", "text_2": "b", "data_1": "a", "data_2": "b"}, None),
        (SCORE, {"text_1": ["a", "b"], "text_2": "b"}, "text_2"),
        (SCORE, {"text_1": [], "text_2": "b"}, "text_1"),
    ],
)
def test_what_the_engine_refuses_or_cannot_be_counted_is_malformed(
    endpoint: Endpoint, body: dict[str, Any], param: str | None, counter: Counter
) -> None:
    """A 400 names the field, where there is one."""
    found = outcome(counter, body, endpoint)

    assert isinstance(found, Fault)
    assert (Reason.MALFORMED_REQUEST, param) == (found.reason, found.param)
