"""vLLM's rules: which bodies it refuses, which prompts it runs and where the output ceiling comes from.

Read from vLLM 0.33 (protocol.py of chat_completion and completion, renderers/, sampling_params.py) and compared with
the token ids that its renderer returns. Stricter than the engine in one respect: whatever would replace or reorder
the counted prompt (forwarded ids, embeddings, a request's own template, media) is refused, and so is beam search,
which re-reads the prompt at every step, so that no reservation bounds its prefill.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from extproc.counting import fields
from extproc.counting.chat import conversation, tools_as_rendered
from extproc.counting.fields import (
    Check,
    as_bool,
    as_float,
    as_int,
    as_list,
    as_object,
    as_str,
    deeper_than,
    integer,
    list_of,
    malformed,
    map_of,
    nullable,
    number,
    one_of,
    refused,
)
from extproc.counting.template import Chat, ChatTemplate

MESSAGES_MAX = 4096
"""Messages of one chat. Each costs a few microseconds of the event loop to render; agents' histories hold hundreds."""

TOOLS_MAX = 512
"""Tools of one chat: four times what OpenAI accepts. Each costs some 20 us to render."""

PROMPTS_MAX = 1024
"""Prompts of one completion request: VLLM_MAX_COMPLETION_PROMPTS."""

SEQUENCES_MAX = 16_384
"""Sequences of one prompt: VLLM_MAX_N_SEQUENCES."""

STOP_STRINGS_MAX = 4
"""VLLM_MAX_STOP_STRINGS."""

SCHEMA_DEPTH_MAX = 64
"""Levels of a schema that constrains decoding; vLLM refuses deeper ones."""

COMPLETION_DEFAULT_TOKENS = 16
"""Ceiling of a completion request that states none: OpenAI's and vLLM's documented default."""

CHAT_CEILING_FIELDS = ("max_completion_tokens", "max_tokens")
COMPLETION_CEILING_FIELDS = ("max_tokens",)

_REPLACES_PROMPT = "would replace the counted prompt and is not accepted here"

_RESERVED_TEMPLATE_VARIABLES = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that a request's `chat_template_kwargs` may not set: arguments of the rendering itself."""


class Prompts(NamedTuple):
    """What runs: texts to tokenize, or lengths of prompts that came as ids; one of the two is empty."""

    texts: tuple[str, ...]
    lengths: tuple[int, ...]
    add_special_tokens: bool


class Asked(NamedTuple):
    """What a checked body asks for besides its prompts.

    `output_tokens` is the client's ceiling, in `ceiling_field`; None where a default holds. A ceiling written to
    `written_field` is the one that the engine obeys; `written_is_new` when the body does not have that field yet.
    `truncate_tokens` keeps that many tokens of a prompt; -1 keeps what the context has room for.
    """

    ceiling_field: str
    output_tokens: int | None
    written_field: str
    written_is_new: bool
    sequences_per_prompt: int
    min_tokens: int
    truncate_tokens: int | None


Read = tuple[Asked, Callable[[], Prompts]]
"""A checked body, and what renders its prompts: the dear part, which may still raise Fault."""


def _stop(name: str, value: object) -> None:
    stops = [value] if isinstance(value, str) else [as_str(name, item) for item in as_list(name, value)]
    if len(stops) > STOP_STRINGS_MAX:
        raise malformed(f"{name} holds at most {STOP_STRINGS_MAX} strings", name)
    if "" in stops:
        raise malformed(f"{name} cannot hold an empty string", name)


def _template_variables(name: str, value: object) -> dict[str, object]:
    variables = as_object(name, value)
    for key in _RESERVED_TEMPLATE_VARIABLES.intersection(variables):
        raise malformed(f"{name} cannot set {key}", f"{name}.{key}")
    return variables


def _kv_transfer(name: str, value: object) -> None:
    if as_object(name, value).get("prompt_token_ids") is not None:
        raise malformed(f"{name}.prompt_token_ids {_REPLACES_PROMPT}", f"{name}.prompt_token_ids")


def _media_options(name: str, value: object) -> None:
    if as_object(name, value):
        raise malformed(f"{name} is not accepted per request", name)


def _stream_options(name: str, value: object) -> None:
    options = as_object(name, value)
    for key in ("include_usage", "continuous_usage_stats"):
        if options.get(key) is not None:
            as_bool(f"{name}.{key}", options[key])


def _schema(name: str, value: object) -> dict[str, object]:
    constraint = as_object(name, value)
    if deeper_than(constraint, SCHEMA_DEPTH_MAX + 2):
        raise malformed(f"{name} nests deeper than {SCHEMA_DEPTH_MAX} levels", name)
    return constraint


def _response_format(name: str, value: object) -> None:
    kind = _schema(name, value)
    one_of("text", "json_object", "json_schema", "structural_tag")(f"{name}.type", kind.get("type"))
    if kind["type"] == "json_schema" and not isinstance(kind.get("json_schema"), dict):
        raise malformed(f"{name} of type json_schema needs json_schema", name)


def _structured_outputs(name: str, value: object) -> None:
    constraint = _schema(name, value)
    if sum(constraint.get(key) is not None for key in ("json", "regex", "choice")) > 1:
        raise malformed(f"{name} takes one of json, regex and choice", name)


def _beam_search(name: str, value: object) -> None:
    if as_bool(name, value):
        raise malformed(f"{name} re-reads the prompt at every step and is not accepted here", name)


_INT64 = integer()
_COMMON: Mapping[str, Check] = {
    "add_special_tokens": as_bool,
    "allowed_token_ids": nullable(list_of(as_int)),
    "bad_words": list_of(as_str),
    "cache_salt": nullable(as_str),
    "ec_transfer_params": nullable(as_object),
    "frequency_penalty": nullable(number(-2, 2)),
    "ignore_eos": as_bool,
    "include_stop_str_in_output": as_bool,
    "input_embeds": refused(_REPLACES_PROMPT),
    "input_ids": refused(_REPLACES_PROMPT),
    "kv_transfer_params": nullable(_kv_transfer),
    "length_penalty": as_float,
    "logit_bias": nullable(map_of(as_float)),
    "logprob_token_ids": nullable(list_of(as_int)),
    "max_tokens": nullable(as_int),
    "media_io_kwargs": nullable(_media_options),
    "min_p": nullable(number(0, 1)),
    "min_tokens": integer(0),
    "mm_processor_kwargs": nullable(_media_options),
    "presence_penalty": nullable(number(-2, 2)),
    "priority": _INT64,
    "prompt_embeds": refused(_REPLACES_PROMPT),
    "prompt_logprobs": nullable(integer(-1)),
    "repetition_penalty": nullable(number(above=0)),
    "request_id": as_str,
    "response_format": nullable(_response_format),
    "return_token_ids": nullable(as_bool),
    "return_tokens_as_token_ids": nullable(as_bool),
    "seed": nullable(_INT64),
    "service_tier": nullable(as_str),
    "session_id": nullable(as_str),
    "skip_special_tokens": as_bool,
    "spaces_between_special_tokens": as_bool,
    "stop": nullable(_stop),
    "stop_token_ids": nullable(list_of(as_int)),
    "stream": nullable(as_bool),
    "stream_options": nullable(_stream_options),
    "structured_outputs": nullable(_structured_outputs),
    "temperature": nullable(number(0)),
    "thinking_token_budget": nullable(integer(-1)),
    "top_k": nullable(integer(-1)),
    "top_p": nullable(number(above=0, high=1)),
    "truncate_prompt_tokens": nullable(integer(-1)),
    "truncation_side": nullable(one_of("left", "right")),
    "use_beam_search": _beam_search,
    "user": nullable(as_str),
    "vllm_xargs": nullable(as_object),
}

CHAT: Mapping[str, Check] = {
    **_COMMON,
    "add_generation_prompt": as_bool,
    "chat_template": refused(_REPLACES_PROMPT),
    "chat_template_kwargs": nullable(_template_variables),
    "continue_final_message": as_bool,
    "documents": nullable(list_of(map_of(as_str))),
    "echo": as_bool,
    "include_reasoning": as_bool,
    "logprobs": nullable(as_bool),
    "max_completion_tokens": nullable(as_int),
    "messages": as_list,
    "n": nullable(integer(1, SEQUENCES_MAX)),
    "parallel_tool_calls": nullable(as_bool),
    "reasoning_effort": nullable(one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "tools": nullable(as_list),
    "top_logprobs": nullable(integer(-1)),
}
"""Fields of POST /v1/chat/completions."""

COMPLETION: Mapping[str, Check] = {
    **_COMMON,
    "echo": nullable(as_bool),
    "logprobs": nullable(integer(-1)),
    "n": integer(1, SEQUENCES_MAX),
    "suffix": refused("needs a model that fills in the middle and is not accepted here"),
}
"""Fields of POST /v1/completions, without the prompt."""


def read_chat(body: Mapping[str, Any], templates: Mapping[str, ChatTemplate]) -> Read:
    """The rules of POST /v1/chat/completions."""
    values = fields.checked(body, CHAT)
    _check_stream(body, values)
    _check_top_logprobs(values)
    messages, tools = values.get("messages"), values.get("tools")
    if not isinstance(messages, list) or not messages:
        raise malformed("messages must hold at least one message", "messages")
    if len(messages) > MESSAGES_MAX:
        raise malformed(f"messages holds more than {MESSAGES_MAX} messages", "messages")
    _check_tools(tools, body.get("tool_choice"))
    if values.get("continue_final_message") and values.get("add_generation_prompt", True):
        raise malformed("continue_final_message needs add_generation_prompt set to false", "continue_final_message")
    return _asked(values, CHAT_CEILING_FIELDS), lambda: _chat_prompts(values, templates)


def read_completion(body: Mapping[str, Any], token_id_max: int) -> Read:
    """The rules of POST /v1/completions."""
    values = fields.checked(body, COMPLETION)
    _check_stream(body, values)
    add_special_tokens = values.get("add_special_tokens") is not False
    prompts = _completion_prompts(body.get("prompt"), token_id_max, add_special_tokens=add_special_tokens)
    if values.get("echo") and values.get("max_tokens") == 0:
        values["max_tokens"] = 1  # scoring: the engine generates one token all the same
    return _asked(values, COMPLETION_CEILING_FIELDS), lambda: prompts


def _asked(values: Mapping[str, Any], names: tuple[str, ...]) -> Asked:
    """`names` are the ceiling's fields: the first that is not null holds, and the last one stands for a default."""
    place = next((index for index, name in enumerate(names) if values.get(name) is not None), len(names) - 1)
    field = names[place]
    # A field of equal or higher precedence decides; one that the body lacks can be added without touching the rest.
    free = [name for name in names[: place + 1] if name not in values]
    truncate = values.get("truncate_prompt_tokens")
    if truncate == 0:
        raise malformed("truncate_prompt_tokens leaves no prompt", "truncate_prompt_tokens")
    return Asked(
        ceiling_field=field,
        output_tokens=values.get(field),
        written_field=free[-1] if free else field,
        written_is_new=bool(free),
        sequences_per_prompt=values.get("n") or 1,
        min_tokens=values.get("min_tokens", 0),
        truncate_tokens=truncate,
    )


def _check_stream(body: Mapping[str, Any], values: Mapping[str, object]) -> None:
    # The engine looks at the raw value here: any truthy one counts as a stream.
    if body.get("stream_options") and not body.get("stream"):
        raise malformed("stream_options needs stream", "stream_options")
    prompt_logprobs = values.get("prompt_logprobs")
    if body.get("stream") and prompt_logprobs:
        raise malformed("prompt_logprobs are not available with stream", "prompt_logprobs")


def _check_top_logprobs(values: Mapping[str, object]) -> None:
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise malformed("top_logprobs needs logprobs", "top_logprobs")


def _check_tools(tools: object, choice: object) -> None:
    """`tools` absent or at least one; `tool_choice` none, auto, required or the name of one of them."""
    if tools is not None:
        if not isinstance(tools, list) or not tools:
            raise malformed("tools must hold at least one tool, or be left out", "tools")
        if len(tools) > TOOLS_MAX:
            raise malformed(f"tools holds more than {TOOLS_MAX} tools", "tools")
    if choice is None or choice == "none":
        return
    if tools is None:
        raise malformed("tool_choice needs tools", "tool_choice")
    if choice in ("auto", "required"):
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in _tool_names(tools):
        raise malformed("tool_choice must be none, auto, required or one of the tools", "tool_choice")


def _tool_names(tools: object) -> set[object]:
    found: set[object] = set()
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            found.add(name)
    return found


def _chat_prompts(values: Mapping[str, Any], templates: Mapping[str, ChatTemplate]) -> Prompts:
    tools = values.get("tools")
    template = templates.get("tool_use") if tools else None
    template = template or templates.get("default")
    if template is None:
        raise malformed("this model has no chat template", "messages")
    variables = dict(values.get("chat_template_kwargs") or {})
    documents = values.get("documents")
    if documents is None:
        documents = variables.get("documents")
    effort = values.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    chat = Chat(
        messages=conversation(
            values["messages"], parts_as_list=template.parts_as_list, knows_developer=template.knows_developer
        ),
        tools=None if tools is None else tools_as_rendered(tools),
        documents=documents,
        add_generation_prompt=values.get("add_generation_prompt", True),
        continue_final_message=values.get("continue_final_message", False),
        variables=variables,
    )
    text = template.render(chat)
    return Prompts((text,), (), add_special_tokens=values.get("add_special_tokens", False))


def _completion_prompts(prompt: object, token_id_max: int, *, add_special_tokens: bool) -> Prompts:
    """One text, a list of texts, one list of ids or a list of such lists."""
    if isinstance(prompt, str) and prompt:
        return Prompts((prompt,), (), add_special_tokens)
    if not isinstance(prompt, list) or not prompt:
        raise malformed("prompt must be a non-empty string, or a list of strings or token ids", "prompt")
    if not isinstance(prompt[0], str | list) or len(set(map(type, prompt))) > 1:
        return Prompts((), (_ids_length(prompt, token_id_max),), add_special_tokens)
    if len(prompt) > PROMPTS_MAX:
        raise malformed(f"prompt holds more than {PROMPTS_MAX} prompts", "prompt")
    if isinstance(prompt[0], str):
        return Prompts(tuple(prompt), (), add_special_tokens)
    return Prompts((), tuple(_ids_length(ids, token_id_max) for ids in prompt), add_special_tokens)


def _ids_length(ids: list[Any], token_id_max: int) -> int:
    """Tokens of a prompt given as ids. `array` checks a list of plain integers in one pass in C."""
    if not ids:
        raise malformed("prompt holds an empty list of token ids", "prompt")
    outside = malformed(f"prompt holds a token id outside 0 to {token_id_max}", "prompt")
    try:
        array("Q", ids)
    except TypeError:
        ids = [as_int("prompt", item) for item in ids]
    except OverflowError:
        raise outside from None
    if max(ids) > token_id_max or min(ids) < 0:
        raise outside
    return len(ids)
