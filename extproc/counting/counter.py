"""From a request body to a Demand, in two steps: `read` is cheap and says no early, `count` tokenizes.

`read` goes from cheap to dear: JSON, fields, ceiling arithmetic, rendering, and a lower bound of the tokens by the
bytes of the prompt. Only then is a text handed to the tokenizer, in a small fixed pool of threads, because a large
text takes tens of milliseconds. How many bytes may wait for that pool is bounded by the caller.

An output ceiling the client left open, or that was clamped, is written into the body, so that the engine runs what
was reserved.
"""

from __future__ import annotations

import asyncio
import functools
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import jinja2

from extproc.core.ceiling import Ceiling, Run, run
from extproc.core.policy import Endpoint, Model, Policy, TokenizerBackend, TokenizerMode
from extproc.core.stream import Counted
from extproc.core.values import Demand, Encoding, Fault, Reason
from extproc.counting.body import append_field, parse, rewritten
from extproc.counting.encoding import decoded
from extproc.counting.fields import malformed
from extproc.counting.profiles import ENDPOINTS, PROFILES
from extproc.counting.request import Asked, Prompts, Tools
from extproc.counting.template import ChatTemplate
from extproc.counting.tokenizer import Backend, Loaded, TokenizerError, load
from extproc.counting.vllm import harmony, mistral
from extproc.counting.workers import Workers

READ_BYTES_QUICK = 16_384
"""Larger bodies are read in a thread: 3 MB of tiny elements can take Python seconds to check and render, and a body
of this size some milliseconds at worst."""

_Result = TypeVar("_Result")

_ALL_TOKENS = 2**63

_COMPOSED_CHARS_MAX = 65_536
"""Longer texts that are not ASCII are not looked through: half a millisecond for a bound that is rarely needed."""


class Draft(NamedTuple):
    """A checked request whose tokens are not counted yet.

    `body` is what the engine reads, `decoded` says that the client sent it compressed. The tokens of each prompt
    are between `low_tokens` and `high_tokens`, equal where the prompt came as ids.
    """

    endpoint: Endpoint
    model: Model
    low_tokens: tuple[int, ...]
    high_tokens: tuple[int, ...]
    body: bytes
    asked: Asked
    ceiling: Ceiling
    prompts: Prompts
    kept_tokens: int
    lowered: bool
    decoded: bool

    def __repr__(self) -> str:
        """Without what the client wrote."""
        return f"<Draft for {self.model.name}, {self.low_tokens} to {self.high_tokens} tokens>"

    def bounds(self) -> tuple[Demand, Demand] | None:
        """The least and the most this can ask for.

        None where the exact count is known already, or could still find a fault.
        """
        if not self.prompts.texts:
            return None
        # Where even the most leaves room for the whole ceiling, every prompt runs with that.
        whole = self.ceiling.run_tokens(0)
        if not self.ceiling.leaves_room(max(self.high_tokens)) or self.asked.min_tokens > whole:
            return None
        sequences = len(self.high_tokens) * self.asked.sequences_per_prompt
        ran = Run(whole, whole * sequences)
        return self.demand(sum(self.low_tokens), sequences, ran), self.demand(sum(self.high_tokens), sequences, ran)

    def demand(self, input_tokens: int, sequences: int, ran: Run) -> Demand:
        """What it asks for with prompts of `input_tokens` together."""
        return Demand(
            self.model.name,
            input_tokens,
            ran.max_output_tokens,
            ran.output_tokens,
            sequences,
            lowered=self.lowered,
            inexact=bool(self.prompts.media_tokens),
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    loaded: Loaded
    tools: Tools


class Counter:
    """Counts requests for the models of one policy.

    Raises TokenizerError where a model's tokenizer or template cannot be used.
    """

    def __init__(self, policy: Policy, *, threads: int = 2, processes: int = 0) -> None:
        self._policy = policy
        self._workers = Workers(functools.partial(Counter, policy, threads=1), processes) if processes else None
        models = policy.models.values()
        sources = {model.name: (model.tokenizer_dir, model.tokenizer_backend, model.tokenizer_mode) for model in models}
        by_source = {source: _prepare(*source) for source in set(sources.values())}
        self._prepared = {
            model.name: _Prepared(prepared.loaded, replace(prepared.tools, media=model.media))
            for model in models
            for prepared in (by_source[sources[model.name]],)
        }
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer", initializer=self.warm)

    def warm(self) -> None:
        """Let the calling thread pay now for its first texts; a service calls it in the thread of its event loop."""
        for prepared in self._prepared.values():
            prepared.loaded.backend.warm()

    def backends(self) -> dict[str, Backend]:
        """Who counts, by model."""
        return {name: prepared.loaded.backend for name, prepared in self._prepared.items()}

    def read(
        self, endpoint: Endpoint, body: bytes | memoryview, lowered: bool = False, encoding: Encoding | None = None
    ) -> Draft:
        """Check `body` and bound its tokens; Fault says what the engine or the model's context would refuse."""
        # What is not compressed is copied only where it is a view.
        body = bytes(body) if encoding is None else decoded(body, encoding, self._policy.limits.body_bytes_max)
        document = parse(body)
        model = self._model(document.get("model"))
        prepared = self._prepared[model.name]
        reader = PROFILES[model.engine].get(endpoint)
        if reader is None:
            raise Fault(Reason.UNKNOWN_ENDPOINT, "the engine of this model has no such endpoint")
        if endpoint not in ENDPOINTS.get(model.tokenizer_mode, (endpoint,)):
            raise Fault(Reason.UNKNOWN_ENDPOINT, f"chats of tokenizer_mode {model.tokenizer_mode} are not counted here")
        asked, render = reader(document, prepared.tools)
        ceiling = Ceiling(
            asked.ceiling_field,
            asked.output_tokens,
            model.default_ceiling_tokens if asked.default_tokens is None else asked.default_tokens,
            model.context_tokens_max,
            model.over_context,
            model.name,
            asked.generates,
        )
        ceiling.check()
        kept_tokens = _kept_tokens(asked, model)
        prompts = render()
        if prompts.media_tokens and asked.truncate_tokens is not None:
            raise malformed("a prompt with media is not truncated here", "truncate_prompt_tokens")
        low, high = _bounds(prompts, prepared.loaded, kept_tokens)
        for tokens in low:
            ceiling.check_input(tokens, exact=bool(prompts.lengths))
        return Draft(
            endpoint=endpoint,
            model=model,
            low_tokens=low,
            high_tokens=high,
            body=body,
            asked=asked,
            ceiling=ceiling,
            prompts=prompts,
            kept_tokens=kept_tokens,
            lowered=lowered or asked.lowered,
            decoded=encoding is not None,
        )

    def start_workers(self) -> None:
        """Start the worker processes in the background; without a call, the first large body does."""
        if self._workers is not None:
            self._workers.start()

    @property
    def has_workers(self) -> bool:
        """Whether `count_apart` is there for bodies that are not read quickly; else `read_large` and `count` are."""
        return self._workers is not None

    async def count_apart(
        self, endpoint: Endpoint, body: bytes | memoryview, lowered: bool = False, encoding: Encoding | None = None
    ) -> Counted:
        """`read` and `count` in a worker process."""
        assert self._workers is not None  # noqa: S101 (`has_workers` says so)
        try:
            return await self._workers.count(endpoint, body, lowered, encoding)
        except RuntimeError as error:  # the worker died, or the pool takes no more work
            raise _tokenizer_unavailable() from error

    async def read_large(
        self, endpoint: Endpoint, body: bytes | memoryview, lowered: bool = False, encoding: Encoding | None = None
    ) -> Draft:
        """`read` in a thread: Python's own switching keeps an event loop running beside it."""
        reading = functools.partial(self.read, endpoint, body, lowered, encoding)
        return await self._submit(reading)

    async def count(self, draft: Draft) -> Counted:
        """Count exactly, off the event loop; Fault where the exact count does not fit, or nothing can count it."""
        if not draft.prompts.texts:
            return self.count_now(draft)
        if draft.model.tokenizer_mode is TokenizerMode.MISTRAL and self.has_workers:
            # mistral-common runs Python between its steps, which holds the event loop for milliseconds at a time.
            return await self.count_apart(draft.endpoint, draft.body, draft.lowered)
        return _counted(draft, await self._submit(functools.partial(self._tokenize, draft)))

    def _submit(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        try:
            return asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:  # the pool takes no more work
            raise _tokenizer_unavailable() from error

    def reads_quickly(self, body: bytes | memoryview, encoding: Encoding | None = None) -> bool:
        """Whether `read` takes no longer than an event loop can spare; else `read_large` is there."""
        return encoding is None and len(body) <= READ_BYTES_QUICK  # what is compressed may be of any size

    def counts_quickly(self, draft: Draft) -> bool:
        """Whether `count_now` takes no longer than an event loop can spare; else `count` is there."""
        return sum(map(len, draft.prompts.texts)) <= self._backend(draft).inline_chars_max

    def count_now(self, draft: Draft) -> Counted:
        """`count` in this thread."""
        return _counted(draft, self._tokenize(draft) if draft.prompts.texts else draft.prompts.lengths)

    def _backend(self, draft: Draft) -> Backend:
        return self._prepared[draft.model.name].loaded.backend

    def _tokenize(self, draft: Draft) -> Sequence[int]:
        prompts = draft.prompts
        try:
            if prompts.counted_by is not None:
                return prompts.counted_by(prompts.texts)
            counts = self._backend(draft).count_batch(prompts.texts, add_special_tokens=prompts.add_special_tokens)
            return prompts.joined(counts)
        except Fault:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise _tokenizer_unavailable() from error

    def close(self) -> None:
        """Stop the threads; texts that wait for one are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()

    def _model(self, name: object) -> Model:
        if name is None or name == "":
            name = self._policy.default_model
            if name is None:
                raise malformed("model is missing", "model")
        if not isinstance(name, str):
            raise malformed("model must be a string", "model")
        model = self._policy.model(name)
        if model is None:
            raise Fault(Reason.UNKNOWN_MODEL, "there is no such model here", param="model")
        return model


def _prepare(tokenizer_dir: str, backend: TokenizerBackend, mode: TokenizerMode) -> _Prepared:
    directory = Path(tokenizer_dir)
    if mode is TokenizerMode.MISTRAL:
        mistral_backend, loaded = mistral.load(directory)
        return _Prepared(loaded, Tools({}, loaded.token_id_max, functools.partial(mistral.prompts, mistral_backend)))
    loaded = load(directory, backend, mode, harmony.CONTROL_TOKENS if mode is TokenizerMode.HARMONY else ())
    try:
        templates = {name: ChatTemplate(source, loaded.special_tokens) for name, source in loaded.templates.items()}
    except jinja2.TemplateError as error:
        raise TokenizerError(f"{directory}: the chat template does not compile: {error}") from error
    if mode is not TokenizerMode.HARMONY:
        return _Prepared(loaded, Tools(templates, loaded.token_id_max))
    counts = loaded.backend.count_batch(harmony.CONTROL_TOKENS, add_special_tokens=False)
    if sum(counts) != len(harmony.CONTROL_TOKENS):
        raise TokenizerError(
            f"{directory}: the tokenizer lacks control tokens of Harmony, so it is not that of gpt-oss"
        )
    return _Prepared(loaded, Tools(templates, loaded.token_id_max, harmony.prompts))


def _tokenizer_unavailable() -> Fault:
    return Fault(Reason.TOKENIZER_UNAVAILABLE, "the tokenizer of this model has failed; try again")


def _counted(draft: Draft, prompts_tokens: Sequence[int]) -> Counted:
    """The demand of `draft` whose prompts have `prompts_tokens`; Fault where that does not fit."""
    tokens = tuple(min(count, draft.kept_tokens) for count in prompts_tokens)
    if not all(tokens):
        raise malformed("a prompt without a single token cannot run", "prompt")
    tokens = draft.prompts.with_media(tokens)
    sequences = draft.asked.sequences_per_prompt
    ran = run(draft.ceiling, tokens, sequences)
    least = draft.ceiling.run_tokens(max(tokens))
    if draft.asked.min_tokens > least:
        raise malformed(f"min_tokens is above the output ceiling, which is {least} here", "min_tokens")
    demand = draft.demand(sum(tokens), len(tokens) * sequences, ran)
    return Counted(demand, _written(draft, ran.max_output_tokens), tokens)


def _bounds(prompts: Prompts, loaded: Loaded, kept_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fewest and most tokens of each prompt; equal where ids were given."""
    if prompts.counted_by is not None:
        return (0,) * len(prompts.texts), (_ALL_TOKENS,) * len(prompts.texts)
    low, high = list(prompts.lengths), list(prompts.lengths)
    for text in prompts.texts:
        text_bytes = len(text) if text.isascii() else _utf8_bytes(text)
        stable = text.isascii() or (loaded.bounds.composes and _is_composed(text))
        low.append(loaded.bounds.lower_tokens(text_bytes, stable=stable))
        high.append(
            loaded.bounds.upper_tokens(text_bytes, stable=stable, add_special_tokens=prompts.add_special_tokens)
        )
    low_tokens = tuple(min(tokens, kept_tokens) for tokens in prompts.joined(low))
    high_tokens = tuple(min(tokens, kept_tokens) for tokens in prompts.joined(high))
    return prompts.with_media(low_tokens), prompts.with_media(high_tokens)


def _is_composed(text: str) -> bool:
    """Whether normalization that composes leaves `text` as it is, as it does nearly all text."""
    return len(text) <= _COMPOSED_CHARS_MAX and unicodedata.is_normalized("NFKC", text)


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        # Escapes inside the arguments of a tool call can decode to half a character; no tokenizer takes it.
        raise malformed("the prompt holds text that is not valid Unicode", "messages") from None


def _kept_tokens(asked: Asked, model: Model) -> int:
    """Tokens of a prompt that survive `truncate_prompt_tokens`; more than any prompt has where it is not used.

    -1 keeps what fits: all the context but the asked ceiling, or but one token where anything is generated.
    """
    keep = asked.truncate_tokens
    if keep is None:
        return _ALL_TOKENS
    if keep < 0:
        return max(1, model.context_tokens_max - (asked.output_tokens or int(asked.generates)))
    if keep > model.context_tokens_max:
        raise malformed("truncate_prompt_tokens is above the model's context", "truncate_prompt_tokens")
    return keep


def _written(draft: Draft, max_output_tokens: int) -> bytes | None:
    """The body with `max_output_tokens` as its effective ceiling, without what is removed; None for the client's own.

    Several prompts share one field: it holds the largest of their ceilings, and the engine clamps each by itself.
    """
    asked = draft.asked
    kept = not asked.generates or (asked.output_tokens is not None and asked.output_tokens <= max_output_tokens)
    if kept and not asked.removed:
        return draft.body if draft.decoded else None
    if asked.written_is_new and len(asked.written) == 1 and not asked.removed:
        return append_field(draft.body, asked.written[0], max_output_tokens)
    return rewritten(draft.body, () if kept else asked.written, max_output_tokens, asked.removed)
