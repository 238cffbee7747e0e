"""A simulated inference engine: OpenAI-compatible HTTP in a process of its own, timing from an `EngineModel`.

    python -m extproc.demo.engine --listen 127.0.0.1:9001 --name chat-0

It generates exactly the run ceiling of a request (`max_completion_tokens` over `max_tokens`, clamped to the
context), one word a token. It counts prompts by their bytes, or exactly with `--tokenizer-dir`, and never believes
a header about that. Rates of 0, the default, mean that tokens take no time. It ends on SIGTERM, and with
`--until-eof` when its standard input ends, so that it does not outlive the process that started it.

POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health.

Levers of a request: header `x-engine-output-tokens: K` ends every sequence after K tokens if its ceiling is larger.

Every response says `x-engine-name`. An answer to a generation request also says what arrived:
`x-engine-body-sha256`, `x-engine-body-bytes`, `x-engine-framing` (`content-length`, `chunked` or `none`), and once
the body is understood `x-engine-input-tokens` (as the engine counts) and `x-engine-max-tokens` (the largest run
ceiling of a sequence).

Levers of a test, from loopback peers only: POST /control with any of
    {"hold": true}     no answer begins and no token is generated until {"hold": false}
    {"health": 503}    status of GET /health
    {"status": 429}    generation requests are answered with this status; null ends it
GET and POST /control answer with the levers and with
    requests_total      generation requests received: those running and the three totals below
    completed_total     answered to the end
    cancelled_total     the client went away first; generation stops at once
    refused_total       answered with an error
    running             understood and not ended, held ones included
    running_tokens      Σ (input + run ceiling · n) over those
    running_tokens_max  its peak
    generating          prompts that the model has: waiting for prefill, being prefilled or decoding
A request that is still being received is only in requests_total.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import ipaddress
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from aiohttp import web

from extproc.demo.engine_answer import Answer, StreamedAnswer, error_body
from extproc.demo.engine_model import NS_PER_S, EngineModel, Job, Progress, SimpleModel, Step
from extproc.demo.engine_request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    OUTPUT_TOKENS_MAX,
    GenerationRequest,
    PromptCounter,
    RequestError,
    RequestReader,
    estimate_prompts_tokens,
)

BODY_BYTES_MAX = 64 * 2**20
"""Above any cap a gateway in front would set, so that the gateway's own is what tests meet."""

BODY_S_MAX = 60
"""A sender this slow is stuck; its place among the concurrent requests is worth more."""

OFF_LOOP_BYTES = 16 * 1024
"""From here on, some milliseconds of tokenizing: other requests' tokens do not wait for that."""

CONTROL_BYTES_MAX = 4096
"""A control document has three short members."""

CONNECTIONS_BACKLOG = 1024
"""Connections the kernel holds while the engine is busy: a burst of a whole test fleet."""

OUTPUT_HEADER = "x-engine-output-tokens"

JSON_TYPE = {"content-type": "application/json"}
STREAM_TYPE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}

Headers = dict[str, str]
Route = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]


@dataclass(slots=True)
class Counters:
    """What GET /control reports; the module docstring defines each."""

    requests_total: int = 0
    completed_total: int = 0
    cancelled_total: int = 0
    refused_total: int = 0
    running: int = 0
    running_tokens: int = 0
    running_tokens_max: int = 0

    def begin(self, tokens: int) -> None:
        """A request of `tokens` runs."""
        self.running += 1
        self.running_tokens += tokens
        self.running_tokens_max = max(self.running_tokens_max, self.running_tokens)

    def end(self, tokens: int) -> None:
        """It does no longer."""
        self.running -= 1
        self.running_tokens -= tokens


@dataclass(slots=True)
class Levers:
    """What POST /control sets."""

    hold: bool = False
    health: int = 200
    status: int | None = None

    def set(self, document: object) -> None:
        """Apply `document`; ValueError, and no change, if it is not a valid one."""
        if not isinstance(document, dict) or not document.keys() <= asdict(self).keys():
            raise ValueError("a control document is an object with any of hold, health and status")
        changed = {**asdict(self), **document}
        if not isinstance(changed["hold"], bool) or changed["health"] not in (200, 503):
            raise ValueError("hold is true or false, health is 200 or 503")
        if changed["status"] not in (429, 503, None):
            raise ValueError("status is 429, 503 or null")
        for name, value in document.items():
            setattr(self, name, value)


class Generation:
    """The progress of one running request: put in by the driver, taken out by the request's handler."""

    def __init__(self, prompts: int, *, stream: bool) -> None:
        self._unfinished = prompts
        self._stream = stream
        self._progress: list[tuple[int, Progress]] = []
        self._awake = asyncio.Event()

    @property
    def finished(self) -> bool:
        """All prompts have finished."""
        return self._unfinished == 0

    def put(self, prompt: int, progress: Progress) -> None:
        """Prompt number `prompt` made progress."""
        self._unfinished -= progress.finished
        if self._stream:
            self._progress.append((prompt, progress))
        if self._stream or self.finished:
            self._awake.set()

    async def take(self) -> tuple[list[tuple[int, Progress]], bool]:
        """Progress since the last call, waiting for some, and whether it is the last.

        Not streaming: wait for the end and take nothing.
        """
        await self._awake.wait()
        self._awake.clear()
        taken, self._progress = self._progress, []
        return taken, self.finished


class Driver:
    """Runs a model on the event loop's time.

    While the engine is busy a step begins where the last one ended and not where the timer fired, so lateness of
    the loop does not add up.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[int, tuple[Generation, int]] = {}
        self._key = 0
        self._stepping = False
        self._held = False
        self._late: Step | None = None
        self._step_ns = 0

    @property
    def generating(self) -> int:
        """Prompts admitted that have neither finished nor been cancelled."""
        return len(self._consumers)

    def admit(self, generation: Generation, prompt: int, input_tokens: int, output_tokens: int, sequences: int) -> int:
        """Start prompt number `prompt` of `generation`; the key is for `cancel`."""
        self._key += 1
        self._consumers[self._key] = (generation, prompt)
        self._model.admit(Job(self._key, input_tokens, output_tokens, sequences), time.monotonic_ns())
        self._wake()
        return self._key

    def cancel(self, key: int) -> None:
        """Stop the prompt started as `key`, if it still runs."""
        if self._consumers.pop(key, None) is not None:
            self._model.cancel(key, time.monotonic_ns())

    def hold(self, *, held: bool) -> None:
        """Begin no step while `held`, and keep what the running one yields until then."""
        self._held = held
        if not held and self._late is not None:
            late, self._late = self._late, None
            self._step_ns = time.monotonic_ns()
            self._finish(late)
        else:
            self._wake()

    def _wake(self) -> None:
        if not self._stepping and not self._held:
            self._stepping = True
            self._step_ns = time.monotonic_ns()
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        step = None if self._held else self._model.step(self._step_ns)
        if step is None:
            self._stepping = False
            return
        self._step_ns += step.duration_ns
        wait_ns = self._step_ns - time.monotonic_ns()
        if wait_ns > 0:
            self._loop.call_later(wait_ns / NS_PER_S, self._finish, step)
        else:
            self._loop.call_soon(self._finish, step)

    def _finish(self, step: Step) -> None:
        if self._held:
            self._late = step
            return
        for progress in step.progress:
            consumer = self._consumers.get(progress.key)
            if consumer is None:
                continue
            if progress.finished:
                del self._consumers[progress.key]
            generation, prompt = consumer
            generation.put(prompt, progress)
        self._begin()


class Engine:
    """The HTTP side: `handle` answers every request of every connection."""

    def __init__(self, name: str, reader: RequestReader, model: EngineModel, *, requests_max: int) -> None:
        self._name = name
        self._reader = reader
        self._driver = Driver(model)
        self._requests_max = requests_max
        self._counters = Counters()
        self._levers = Levers()
        self._released = asyncio.Event()
        self._released.set()
        self._present = 0
        self._serial = 0
        self._routes: Mapping[tuple[str, str], Route] = {
            ("POST", CHAT_PATH): self._generate,
            ("POST", COMPLETIONS_PATH): self._generate,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/control"): self._control,
            ("POST", "/control"): self._control,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer `request`; errors become error objects."""
        route = self._routes.get((request.method, request.path))
        try:
            if route is None:
                raise RequestError(404, "There is nothing here.")
            return await route(request)
        except RequestError as error:
            return self._error(error, {})

    def _respond(self, status: int, body: bytes, headers: Headers) -> web.Response:
        return web.Response(status=status, body=body, headers={**JSON_TYPE, "x-engine-name": self._name, **headers})

    def _error(self, error: RequestError, headers: Headers) -> web.Response:
        return self._respond(error.status, error_body(error.status, error.message, error.param), headers)

    async def _models(self, request: web.BaseRequest) -> web.Response:  # noqa: ARG002 (a route)
        context_tokens = self._reader.context_tokens_max
        entries = [
            {"id": name, "object": "model", "created": 0, "owned_by": "tokenlane", "max_model_len": context_tokens}
            for name in self._reader.models
        ]
        return self._respond(200, orjson.dumps({"object": "list", "data": entries}), {})

    async def _health(self, request: web.BaseRequest) -> web.Response:  # noqa: ARG002 (a route)
        return self._respond(self._levers.health, b"", {})

    async def _control(self, request: web.BaseRequest) -> web.Response:
        if not ipaddress.ip_address(request.remote or "0.0.0.0").is_loopback:  # noqa: S104 (nobody's address)
            raise RequestError(403, "Levers are for loopback peers.")
        if request.method == "POST":
            try:
                self._levers.set(orjson.loads(await _read(request, CONTROL_BYTES_MAX)))
            except ValueError as error:
                raise RequestError(400, str(error)) from error
            self._driver.hold(held=self._levers.hold)
            (self._released.clear if self._levers.hold else self._released.set)()
        state = {**asdict(self._counters), "generating": self._driver.generating, **asdict(self._levers)}
        return self._respond(200, orjson.dumps(state), {})

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a generation request and count how it ended, once."""
        counters = self._counters
        counters.requests_total += 1
        self._present += 1
        echo: Headers = {}
        try:
            response = await self._answer(request, echo)
        except RequestError as error:
            counters.refused_total += 1
            return self._error(error, echo)
        except (asyncio.CancelledError, ConnectionError) as error:
            counters.cancelled_total += 1
            raise asyncio.CancelledError from error
        except Exception:
            counters.refused_total += 1  # with a 500: even then the totals add up
            raise
        else:
            counters.completed_total += 1
            return response
        finally:
            self._present -= 1

    async def _answer(self, request: web.BaseRequest, echo: Headers) -> web.StreamResponse:
        """The answer, already sent if streamed; RequestError to refuse. `echo` receives the headers to answer with."""
        if self._present > self._requests_max:
            raise RequestError(503, "The engine is currently busy.")
        body = await _read(request, BODY_BYTES_MAX)
        echo |= _body_headers(request, body)
        if self._levers.status is not None:
            raise RequestError(self._levers.status, "The engine refuses, as it was told to.")
        if request.content_type != "application/json":
            raise RequestError(400, "Content-Type must be application/json.")
        if len(body) < OFF_LOOP_BYTES:
            generation = self._reader.read(request.path, body)
        else:
            generation = await asyncio.to_thread(self._reader.read, request.path, body)
        outputs_tokens = _outputs_tokens(request, generation)
        echo["x-engine-input-tokens"] = str(generation.input_tokens)
        echo["x-engine-max-tokens"] = str(max(generation.ceilings_tokens))
        self._counters.begin(generation.reserve_tokens)
        try:
            await self._released.wait()
            return await self._run(request, generation, outputs_tokens, echo)
        finally:
            self._counters.end(generation.reserve_tokens)

    async def _run(
        self, http: web.BaseRequest, request: GenerationRequest, outputs_tokens: tuple[int, ...], echo: Headers
    ) -> web.StreamResponse:
        """Generate and answer; whatever ends this early also ends the generation."""
        generation = Generation(len(outputs_tokens), stream=request.stream)
        keys = [
            self._driver.admit(generation, prompt, input_tokens, output_tokens, request.sequences)
            for prompt, (input_tokens, output_tokens) in enumerate(
                zip(request.prompts_tokens, outputs_tokens, strict=True)
            )
        ]
        self._serial += 1
        serial = f"{self._name}-{self._serial}"
        try:
            if request.stream:
                return await self._stream(http, generation, StreamedAnswer(request, outputs_tokens, serial), echo)
            await generation.take()
            return self._respond(200, Answer(request, outputs_tokens, serial).whole(), echo)
        finally:
            if not generation.finished:
                for key in keys:
                    self._driver.cancel(key)

    async def _stream(
        self, http: web.BaseRequest, generation: Generation, answer: StreamedAnswer, echo: Headers
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**STREAM_TYPE, "x-engine-name": self._name, **echo})
        await response.prepare(http)
        finished = False
        while not finished:
            progress, finished = await generation.take()
            events = answer.events(progress)
            await response.write(events + answer.end() if finished else events)
        await response.write_eof()
        return response


async def _read(request: web.BaseRequest, bytes_max: int) -> bytes:
    """The body as it came over the wire; RequestError 413 above `bytes_max`, 408 after BODY_S_MAX."""
    too_large = RequestError(413, f"The body is over {bytes_max} bytes.")
    if (request.content_length or 0) > bytes_max:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > bytes_max:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(408, f"The body took more than {BODY_S_MAX} s.") from error
    return bytes(body)


def _body_headers(request: web.BaseRequest, body: bytes) -> Headers:
    framing = "none"
    if "content-length" in request.headers:
        framing = "content-length"
    elif "chunked" in request.headers.get("transfer-encoding", "").lower():
        framing = "chunked"
    return {
        "x-engine-body-sha256": hashlib.sha256(body).hexdigest(),
        "x-engine-body-bytes": str(len(body)),
        "x-engine-framing": framing,
    }


def _outputs_tokens(http: web.BaseRequest, request: GenerationRequest) -> tuple[int, ...]:
    """Tokens that each prompt's sequences generate: the ceiling, or what the output header allows below it."""
    lever = http.headers.get(OUTPUT_HEADER)
    outputs_tokens = request.ceilings_tokens
    if lever is not None:
        if not (lever.isascii() and lever.isdigit() and len(lever) < 20 and int(lever)):
            raise RequestError(400, f"{OUTPUT_HEADER} must be a positive integer.")
        outputs_tokens = tuple(min(int(lever), ceiling) for ceiling in request.ceilings_tokens)
    if request.sequences * sum(outputs_tokens) > OUTPUT_TOKENS_MAX:
        raise RequestError(400, f"This engine generates at most {OUTPUT_TOKENS_MAX} tokens for one request.")
    return outputs_tokens


async def serve(engine_of: Callable[[], Engine], host: str, port: int, *, until_eof: bool) -> None:
    """Serve on `host`:`port` until SIGTERM, SIGINT or, if asked, the end of standard input."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if until_eof:
        # Nobody writes to it, so readable means that it has ended.
        loop.add_reader(sys.stdin.fileno(), ended.set)
    engine = engine_of()
    server = web.Server(engine.handle, handler_cancellation=True, access_log=None, auto_decompress=False)
    listener = await loop.create_server(server, host, port, backlog=CONNECTIONS_BACKLOG)
    sys.stdout.write(f"listening on {host}:{listener.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await ended.wait()
    listener.close()


def main(arguments: list[str] | None = None) -> None:
    """Run one engine; the options are described by --help."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except OSError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> None:
    host, port = options.listen
    models = tuple(options.model or ["qwen3"])
    count: PromptCounter = estimate_prompts_tokens
    if options.tokenizer_dir is not None:
        # Here, because an engine that estimates should start without a tokenizer library.
        from extproc.counting import TokenizerError  # noqa: PLC0415
        from extproc.demo.engine_tokens import exact_counter  # noqa: PLC0415

        try:
            count = exact_counter(options.tokenizer_dir, models, options.context_tokens_max)
        except TokenizerError as error:
            raise SystemExit(f"error: {error}") from error
    reader = RequestReader(models, options.context_tokens_max, count)
    model = SimpleModel(options.prefill_tokens_per_s, options.decode_tokens_per_s, options.chunk_tokens)
    uvloop.run(
        serve(
            lambda: Engine(options.name, reader, model, requests_max=options.requests_max),
            host,
            port,
            until_eof=options.until_eof,
        )
    )


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not IP:port")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="extproc.demo.engine", description="A simulated inference engine.")
    parser.add_argument("--listen", required=True, type=_listen, metavar="IP:PORT", help="port 0 picks a free one")
    parser.add_argument("--name", required=True, help="sent as x-engine-name")
    parser.add_argument("--model", action="append", metavar="NAME", help="served model, may repeat (qwen3)")
    parser.add_argument("--tokenizer-dir", type=Path, metavar="DIR", help="count prompts exactly; else bytes / 4")
    parser.add_argument("--context-tokens-max", type=int, default=131_072, metavar="N", help="max_model_len")
    parser.add_argument("--prefill-tokens-per-s", type=int, default=0, metavar="N", help="0: no time")
    parser.add_argument("--decode-tokens-per-s", type=int, default=0, metavar="N", help="of a sequence; 0: no time")
    parser.add_argument("--chunk-tokens", type=int, default=2048, metavar="N", help="prompt tokens of one step")
    parser.add_argument("--requests-max", type=int, default=1024, metavar="N", help="more at one time: 503")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does")
    return parser


if __name__ == "__main__":
    main()
