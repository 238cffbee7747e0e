"""Chats of Mistral's models as vLLM reads them under `--tokenizer-mode mistral`: by mistral-common, an extra.

The library checks, renders and tokenizes a conversation in one, and no text of a client becomes a control token there.
It takes about a millisecond for 2 KB, so that none of it runs on the event loop. What is handed to it is vLLM
0.33's (renderers/mistral.py, tokenizers/mistral.py).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.counting.fields import as_str, malformed
from extproc.counting.request import Prompts
from extproc.counting.tokenizer import Bounds, Loaded, TokenizerError
from extproc.counting.vllm.conversation import conversation, tools_as_rendered

CALL_ID_CHARS_MAX = 9
"""Longer ids of calls are cut to their end: Mistral's templates know none that are longer."""

_EFFORT_VERSION_MIN = 15
"""Older tokenizers are not told of `reasoning_effort`."""


class MistralBackend:
    """Counts with mistral-common."""

    name = "mistral-common"
    doubt = None
    segments_doubt = "mistral-common takes conversations whole"
    inline_chars_max = 0

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 (MistralTokenizer, generic in every part of a chat)
        from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: PLC0415 (an extra)

        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest
        self._texts = tokenizer.instruct_tokenizer.tokenizer
        self.words = self._texts.n_words
        self.takes_effort = int(self._texts.version.value.lstrip("v")) >= _EFFORT_VERSION_MIN

    def warm(self) -> None:
        """Nothing is kept for a thread."""

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text; the only special token is the one that begins it."""
        return [len(self._texts.encode(text, bos=add_special_tokens, eos=False)) for text in texts]

    def count_chats(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each conversation, which `prompts` wrote; Fault for one that the library refuses."""
        return [self._count_chat(json.loads(text)) for text in texts]

    def _count_chat(self, chat: dict[str, Any]) -> int:
        try:
            return len(self._tokenizer.encode_chat_completion(self._request.from_openai(**chat)).tokens)
        except Exception as error:  # noqa: BLE001 (the engine refuses a chat for whatever is raised here)
            raise malformed(f"mistral-common refuses this chat: {type(error).__name__}", "messages") from None


def load(directory: Path) -> tuple[MistralBackend, Loaded]:
    """The tokenizer that the engine would take from `directory`; TokenizerError says why there is none."""
    if importlib.util.find_spec("mistral_common") is None:
        raise TokenizerError(f"{directory}: tokenizer_mode mistral needs the extra: pip install 'tokenlane[mistral]'")
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: PLC0415 (an extra)
    from mistral_common.tokens.tokenizers.utils import get_one_valid_tokenizer_file  # noqa: PLC0415

    try:
        path = get_one_valid_tokenizer_file([str(file) for file in directory.iterdir()])
        backend = MistralBackend(MistralTokenizer.from_file(path))
    except Exception as error:  # the library raises many kinds
        raise TokenizerError(f"{directory}: mistral-common finds no tokenizer that it can read: {error}") from error
    bounds = Bounds(token_bytes_max=None, normalized_bytes_ratio=1, composes=True, special_tokens=1)
    return backend, Loaded(backend, bounds, token_id_max=backend.words - 1, special_tokens={}, templates={})


def prompts(backend: MistralBackend, conversations: Sequence[list[Any]], values: Mapping[str, Any]) -> Prompts:
    """`conversations` in JSON, as the engine hands them to the library; `values` holds the options of a chat."""
    if values.get("chat_template_kwargs") is not None:
        raise malformed("chat_template_kwargs mean nothing to this model", "chat_template_kwargs")
    continues = values.get("continue_final_message", False)
    options: dict[str, Any] = {"continue_final_message": continues}
    if values.get("tools") is not None:
        options["tools"] = tools_as_rendered(values["tools"])
    if backend.takes_effort:
        options["reasoning_effort"] = values.get("reasoning_effort")
    texts = []
    for messages in conversations:
        shaped = [_message(message, source) for message, source in zip(_checked(messages), messages, strict=True)]
        answered = shaped[-1]["role"] == "assistant"
        if answered and values.get("add_generation_prompt", True):
            raise malformed("a last message of the assistant needs continue_final_message", "messages")
        if continues and not answered:
            raise malformed("continue_final_message needs a last message of the assistant", "continue_final_message")
        texts.append(json.dumps({"messages": shaped, **options}))
    return Prompts(tuple(texts), (), add_special_tokens=False, counted_by=backend.count_chats)


def _checked(messages: list[Any]) -> list[dict[str, Any]]:
    return conversation(messages, parts_as_list=False, knows_developer=True)


def _message(shaped: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the fields that the engine passes on: the content as the client wrote it, calls as read."""
    content = source.get("content")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, str) or part.get("type") != "text":
            raise malformed("content parts of this model must be of type text", "messages.content.type")
    found: dict[str, Any] = {"role": shaped["role"], "content": content}
    if shaped["role"] == "assistant":
        found["tool_calls"] = [{**call, "id": _call_id(call["id"])} for call in shaped.get("tool_calls", [])]
        found["reasoning"] = shaped.get("reasoning")
    elif shaped["role"] == "tool":
        found["tool_call_id"] = _call_id(source.get("tool_call_id"))
        found["name"] = shaped.get("name")
    return found


def _call_id(value: object) -> str:
    return as_str("messages.tool_call_id", value)[-CALL_ID_CHARS_MAX:]
