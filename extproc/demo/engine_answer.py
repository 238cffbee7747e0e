"""The bytes of a simulated engine's answers, in the shapes of the OpenAI API.

Every generated token is the same word, so all chunks of a choice are one `bytes` object, built once for a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import orjson

from extproc.demo.engine_model import Progress
from extproc.demo.engine_request import CHAT_PATH, GenerationRequest

WORD = " word"

DONE = b"data: [DONE]\n\n"


class Answer:
    """What is sent for `request`, whose prompts' sequences generate `outputs_tokens` tokens each.

    A sequence that stops below its ceiling has finish reason `stop`, otherwise `length`. Choice `p * n + s` is
    sequence s of prompt p.
    """

    def __init__(self, request: GenerationRequest, outputs_tokens: Sequence[int], serial: str) -> None:
        self._request = request
        self._outputs_tokens = outputs_tokens
        self._chat = request.path == CHAT_PATH
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{serial}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self) -> bytes:
        """The JSON body of an answer that is not streamed."""
        sequences = self._request.sequences
        choices = [self._choice(index) for index in range(sequences * len(self._outputs_tokens))]
        return orjson.dumps({**self._head, "choices": choices, "usage": self._usage()})

    def _choice(self, index: int) -> dict[str, object]:
        text = WORD * self._outputs_tokens[index // self._request.sequences]
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": self._finish_reason(index)}

    def _finish_reason(self, index: int) -> str:
        prompt = index // self._request.sequences
        return "length" if self._outputs_tokens[prompt] == self._request.ceilings_tokens[prompt] else "stop"

    def _usage(self) -> dict[str, int]:
        generated_tokens = self._request.sequences * sum(self._outputs_tokens)
        return {
            "prompt_tokens": self._request.input_tokens,
            "completion_tokens": generated_tokens,
            "total_tokens": self._request.input_tokens + generated_tokens,
        }


class StreamedAnswer(Answer):
    """The same answer as server-sent events."""

    def __init__(self, request: GenerationRequest, outputs_tokens: Sequence[int], serial: str) -> None:
        super().__init__(request, outputs_tokens, serial)
        if self._chat:
            self._head["object"] = "chat.completion.chunk"
        choices = range(request.sequences * len(outputs_tokens))
        self._word_events = [self._event(index, WORD, None) for index in choices]
        # The first event of a choice names the role, the last the finish reason.
        self._first_events = [self._event(index, None, None) if self._chat else b"" for index in choices]
        self._last_events = [self._event(index, "", self._finish_reason(index)) for index in choices]

    def events(self, progress: Iterable[tuple[int, Progress]]) -> bytes:
        """The events of what the prompts at the given positions have just generated."""
        sequences = self._request.sequences
        pieces: list[bytes] = []
        for prompt, step in progress:
            for index in range(prompt * sequences, (prompt + 1) * sequences):
                pieces += (self._first_events[index], self._word_events[index] * step.tokens)
                self._first_events[index] = b""
                if step.finished:
                    pieces.append(self._last_events[index])
        return b"".join(pieces)

    def end(self) -> bytes:
        """What follows the last token."""
        if not self._request.include_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": self._usage()}) + b"\n\n" + DONE

    def _event(self, index: int, text: str | None, finish_reason: str | None) -> bytes:
        content: dict[str, object] = {"text": text}
        if self._chat:
            content = {"delta": {"role": "assistant", "content": ""} if text is None else {"content": text}}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._request.include_usage else {}
        return b"data: " + orjson.dumps({**self._head, "choices": [choice], **usage}) + b"\n\n"


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The error object of an OpenAI-compatible server."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})
