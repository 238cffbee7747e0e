"""Endpoints that generate nothing: embeddings, classification, scores of pairs and reranking.

Every prompt is a request of its own, and only prompts are charged. A pair is charged as two prompts, its query and
its document, which is an upper bound: a bi-encoder reads a shared query once, and a cross-encoder joins both halves,
so that separators (3 for BERT, 4 for RoBERTa) stand for the special tokens of two prompts (4). A template that an
engine puts around each pair is its own setting, or built into the model, and cannot be seen here: its tokens are not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.counting.fields import (
    Check,
    as_bool,
    as_object,
    as_str,
    checked,
    integer,
    malformed,
    nullable,
    one_of,
    refused,
)
from extproc.counting.prompts import texts_or_ids
from extproc.counting.request import Prompts, Read, Tools
from extproc.counting.vllm import chat
from extproc.counting.vllm.rules import COMMON, asked_of_prompts

PROMPTS_MAX = 2048
"""Prompts of one request: what OpenAI accepts for embeddings."""

REPEATED_CHARS_MAX = 2**21
"""Characters of a query and its instruction times the documents it repeats with: it keeps a small body from becoming
gigabytes of text, and leaves a query of a thousand characters its two thousand documents."""

_EMPTY_STANDS_AS = "."
"""An empty half of a pair still has the pair's separators: it is charged as one token."""

_FIELDS: Mapping[str, Check] = {
    **{
        name: COMMON[name]
        for name in (
            "cache_salt",
            "mm_processor_kwargs",
            "priority",
            "request_id",
            "service_tier",
            "truncate_prompt_tokens",
            "truncation_side",
            "user",
        )
    },
    "normalize": refused("is now use_activation"),
    "padding": nullable(one_of("do_not_pad")),  # padding to the longest would run more than was counted
    "use_activation": nullable(as_bool),
}

FIELDS: Mapping[str, Check] = {
    **_FIELDS,
    "add_generation_prompt": as_bool,
    "add_special_tokens": as_bool,
    "chat_template": chat.FIELDS["chat_template"],
    "chat_template_kwargs": chat.FIELDS["chat_template_kwargs"],
    "continue_final_message": as_bool,
    "dimensions": nullable(integer()),
    "encoding_format": one_of("float", "base64", "bytes", "bytes_only"),
    "media_io_kwargs": COMMON["media_io_kwargs"],
}
"""Fields of /v1/embeddings and /classify, without what is read."""


def _template_variables(name: str, value: object) -> str | None:
    """The instruction, the one variable whose text can be charged."""
    variables = as_object(name, value)
    for key in variables:
        if key != "instruction":
            raise malformed(f"{name} can set nothing but instruction here", name)
    return as_str(f"{name}.instruction", variables["instruction"]) if variables else None


PAIR_FIELDS: Mapping[str, Check] = {
    **_FIELDS,
    "chat_template_kwargs": nullable(_template_variables),
    "instruction": nullable(as_str),
    "max_tokens_per_doc": integer(0),
    "max_tokens_per_query": integer(0),
    "top_n": integer(0),
}
"""Fields of scores and reranking, without the pairs. Cutting queries or documents only makes a prompt shorter."""

PAIR_NAMES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""What the two sides of pairs to score may be called."""


def read(body: Mapping[str, Any], model: Tools) -> Read:
    """The rules of POST /v1/embeddings and of POST /classify: `input` as texts or ids, or `messages` as a chat.

    Either may also hold several chats. A chat opens no answer and gets no special tokens unless it asks for them.
    """
    values = checked(body, FIELDS)
    asked = asked_of_prompts(values)
    if body.get("input") is not None and body.get("messages") is not None:
        raise malformed("input and messages exclude each other", "input")
    name = "input" if body.get("messages") is None else "messages"
    conversations = _conversations(name, body.get(name))
    if conversations is not None:
        options = {"add_generation_prompt": False, **values}
        chat.check_options(options)
        return asked, lambda: chat.prompts(conversations, options, model.templates, model.media)
    special = values.get("add_special_tokens") is not False
    prompts = texts_or_ids("input", body.get("input"), model.token_id_max, PROMPTS_MAX, add_special_tokens=special)
    return asked, lambda: prompts


def _conversations(name: str, found: object) -> list[list[Any]] | None:
    """One chat or several; None for an input that is no chat."""
    if not isinstance(found, list):
        if name == "input":
            return None
        raise malformed("messages must hold at least one message", name)
    several = bool(found) and all(isinstance(item, list) and item and isinstance(item[0], dict) for item in found)
    if name == "input" and not several and not (found and isinstance(found[0], dict)):
        return None
    conversations = found if several else [found]
    if not found or sum(map(len, conversations)) > chat.MESSAGES_MAX:
        raise malformed(f"{name} must hold 1 to {chat.MESSAGES_MAX} messages", name)
    return conversations


def read_rerank(body: Mapping[str, Any], _model: Tools) -> Read:
    """The rules of POST /rerank, /v1/rerank and /v2/rerank: one query with each of the documents."""
    values = checked(body, PAIR_FIELDS)
    query = as_str("query", body.get("query"))
    return _read_pairs(values, [query], _texts("documents", body.get("documents")), "documents")


def read_score(body: Mapping[str, Any], _model: Tools) -> Read:
    """The rules of POST /score and /v1/score: one text with each of N others, or N texts with one each."""
    values = checked(body, PAIR_FIELDS)
    found = [names for names in PAIR_NAMES if all(body.get(name) is not None for name in names)]
    if len(found) != 1:
        raise malformed("a score needs queries and documents or items, data_1 and data_2, or text_1 and text_2")
    first, second = found[0]
    return _read_pairs(values, _texts(first, body[first]), _texts(second, body[second]), second)


def _texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise malformed(f"{name} must be a string or a list of at least one string", name)
    if len(texts) > PROMPTS_MAX:
        raise malformed(f"{name} holds more than {PROMPTS_MAX} texts", name)
    return texts


def _read_pairs(values: Mapping[str, Any], queries: list[str], documents: list[str], name: str) -> Read:
    if len(queries) not in (1, len(documents)):
        raise malformed("texts pair 1 to 1, 1 to N or N to N", name)
    instruction = values.get("chat_template_kwargs") or values.get("instruction") or ""
    pairs = len(documents) // len(queries)
    if sum(map(len, queries)) * pairs + len(instruction) * len(documents) > REPEATED_CHARS_MAX:
        raise malformed(f"the query repeats to more than {REPEATED_CHARS_MAX} characters", name)
    asked = asked_of_prompts(values)
    if instruction:
        queries = [f"{query}\n{instruction}" for query in queries]
    texts = tuple(text or _EMPTY_STANDS_AS for text in (*queries * pairs, *documents))
    return asked, lambda: Prompts(texts, (), add_special_tokens=True)
