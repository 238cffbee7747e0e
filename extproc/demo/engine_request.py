"""What a simulated engine reads from a request body: prompts, sequences and the ceiling it will run.

The rules are those of vLLM's OpenAI server (0.33), as far as they decide tokens; sampling fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

PROMPTS_MAX = 1024
"""Prompts in one completion request: vLLM's VLLM_MAX_COMPLETION_PROMPTS."""

SEQUENCES_MAX = 128
"""Choices of one prompt: the `n` of OpenAI's API reference goes to 128."""

OUTPUT_TOKENS_MAX = 2**22
"""Tokens generated for one request, all choices together: bounds the memory of an answer to some 20 MB."""

COMPLETION_DEFAULT_TOKENS = 16
"""Ceiling of a completion request that states none."""

BYTES_PER_TOKEN = 4
"""English text holds about four bytes a token; used when there is no tokenizer."""

JsonObject = dict[str, object]
PromptCounter = Callable[[str, bytes, JsonObject], tuple[int, ...]]


class RequestError(Exception):
    """The engine refuses the request with `status`; `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request the engine runs. `ceilings_tokens` holds the run ceiling of each prompt's sequences."""

    path: str
    model: str
    prompts_tokens: tuple[int, ...]
    ceilings_tokens: tuple[int, ...]
    sequences: int
    stream: bool
    include_usage: bool

    @property
    def input_tokens(self) -> int:
        """Input of all prompts, each counted once."""
        return sum(self.prompts_tokens)

    @property
    def reserve_tokens(self) -> int:
        """Input and the run ceilings of all sequences: what the engine may come to hold for it."""
        return self.input_tokens + self.sequences * sum(self.ceilings_tokens)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads bodies for an engine that serves `models` with a context of `context_tokens_max`."""

    models: tuple[str, ...]
    context_tokens_max: int
    count: PromptCounter

    def read(self, path: str, body: bytes) -> GenerationRequest:
        """The request in `body`; RequestError with 400 or 404 if the engine would refuse it."""
        fields = _parse(body)
        model = fields.get("model") or self.models[0]
        if model not in self.models:
            raise RequestError(404, f"The model `{model}` does not exist.", "model")
        stream = fields.get("stream") is True
        options = fields.get("stream_options")
        if options is not None and not (stream and isinstance(options, dict)):
            raise RequestError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
        stated = _stated_ceiling(path, fields)
        if stated is not None and stated > self.context_tokens_max:
            raise RequestError(400, f"max_tokens is over the context of {self.context_tokens_max}.", "max_tokens")
        sequences = _integer(fields, "n", 1)
        if not 1 <= sequences <= SEQUENCES_MAX:
            raise RequestError(400, f"n must be from 1 to {SEQUENCES_MAX}.", "n")
        prompts_tokens = self.count(path, body, fields)
        return GenerationRequest(
            path=path,
            model=str(model),
            prompts_tokens=prompts_tokens,
            ceilings_tokens=tuple(self._run_ceiling(tokens, stated) for tokens in prompts_tokens),
            sequences=sequences,
            stream=stream,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def _run_ceiling(self, prompt_tokens: int, stated: int | None) -> int:
        """The ceiling clamped to what the prompt leaves of the context, which must be something."""
        left_tokens = self.context_tokens_max - prompt_tokens
        ceiling = left_tokens if stated is None else min(left_tokens, stated)
        if prompt_tokens > self.context_tokens_max:
            message = f"The prompt has {prompt_tokens} tokens; the context is {self.context_tokens_max}."
            raise RequestError(400, message, "input_tokens")
        if ceiling < 1:
            raise RequestError(400, f"max_tokens must be at least 1, got {ceiling}.", "max_tokens")
        return ceiling


def estimate_prompts_tokens(path: str, body: bytes, fields: JsonObject) -> tuple[int, ...]:  # noqa: ARG001
    """Tokens of each prompt, by its text's UTF-8 bytes; prompts given as token ids are exact."""
    if path == CHAT_PATH:
        return (_estimate(_messages_text(fields.get("messages"))),)
    prompts = _prompt_list(fields.get("prompt"))
    return tuple(_estimate(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)


def _parse(body: bytes) -> JsonObject:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "The body is not valid JSON.") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "The body is not a JSON object.")
    return fields


def _stated_ceiling(path: str, fields: JsonObject) -> int | None:
    """The ceiling the request asks for; None means all the context that its prompt leaves."""
    if path == CHAT_PATH:
        name = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
        return None if fields.get(name) is None else _integer(fields, name, 0)
    ceiling = _integer(fields, "max_tokens", COMPLETION_DEFAULT_TOKENS)
    # A completion that only echoes its prompt still runs for one token.
    return 1 if ceiling == 0 and fields.get("echo") is True else ceiling


def _integer(fields: JsonObject, name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(400, f"{name} must be an integer.", name)
    return value


def _messages_text(messages: object) -> str:
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list with at least one message.", "messages")
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            raise RequestError(400, "A message must be an object.", "messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts)


def _prompt_list(prompt: object) -> list[str | list[int]]:
    """A string, a list of token ids, or a list of either, as a list of prompts."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(400, "prompt must not be empty.", "prompt")
    prompts = [prompt] if _is_ids(prompt) else prompt
    if len(prompts) > PROMPTS_MAX:
        raise RequestError(400, f"prompt holds more than {PROMPTS_MAX} prompts.", "prompt")
    if not all(item and (isinstance(item, str) or _is_ids(item)) for item in prompts):
        raise RequestError(400, "prompt must be text, token ids, or a list of either.", "prompt")
    return prompts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _estimate(text: str) -> int:
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN))
