"""What the tour's steps do to the running installation: send requests, watch the ledger, pull the engines' levers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson

from extproc.demo.stack import Stack
from extproc.demo.tour_values import Account, Ledger, Moment, Observation, Reply, Value, reserved_tokens

CHAT = "/v1/chat/completions"

POLL_S = 0.002
"""Between two looks at the ledger: the precision of a release time."""

SETTLE_S_MAX = 3.0
"""A reservation ends within milliseconds of its response; two probes of a replica take half a second."""

DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Request:
    """A POST. `body` is sent as JSON; `file` is its name in the demo's directory, so that anyone can send it again."""

    file: str
    body: Mapping[str, object]
    path: str = CHAT
    headers: Mapping[str, str] = field(default_factory=dict)

    def curl(self) -> str:
        """The request as a shell line, run in the demo's directory."""
        headers = "".join(f" -H '{name}: {value}'" for name, value in self.headers.items())
        stream = " -N" if self.body.get("stream") else ""
        return f'curl -i{stream} $GATEWAY{self.path} -H "$JSON"{headers} -d @{self.file}'


class Stage:
    """A client in front of the installation, and its hands on the levers behind."""

    def __init__(self, stack: Stack, client: aiohttp.ClientSession) -> None:
        self.stack = stack
        self._client = client

    async def ask(self, request: Request) -> Reply:
        """Send `request` and read the whole answer."""
        async with await self._post(request) as response:
            body = await response.read()
            return Reply(response.status, _headers(response), _object(body))

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Stream]:
        """Send `request`; inside the block its answer is streaming, leaving the block hangs up."""
        response = await self._post(request)
        try:
            yield Stream(response)
        finally:
            response.close()

    async def _post(self, request: Request) -> aiohttp.ClientResponse:
        headers = {"content-type": "application/json", **request.headers}
        return await self._client.post(self.stack.url + request.path, data=orjson.dumps(request.body), headers=headers)

    async def ledger(self) -> Ledger:
        """The ledger now."""
        async with self._client.get(f"{self.stack.admin_url}/debug/ledger") as response:
            replicas: dict[str, dict[str, int]] = orjson.loads(await response.read())["replicas"]
        return {
            name: Account(
                reserved_tokens=replica["reserved_tokens"],
                budget_tokens=replica["gross_tokens"] - replica["guard_tokens"],
                ready=bool(replica["ready"]),
            )
            for name, replica in replicas.items()
        }

    async def ledger_when(self, suffices: Callable[[Ledger], bool]) -> Ledger:
        """The ledger as soon as it `suffices`, or as it is after SETTLE_S_MAX."""
        deadline_s = time.monotonic() + SETTLE_S_MAX
        while True:
            ledger = await self.ledger()
            if suffices(ledger) or time.monotonic() > deadline_s:
                return ledger
            await asyncio.sleep(POLL_S)

    async def observe(self, request: Request) -> Observation:
        """Send `request`; the ledger before it, while it runs if it does, and after it."""
        before = await self.ledger()
        ledger = {Moment.BEFORE: before}
        call = asyncio.create_task(self.ask(request))
        try:
            while not call.done() and Moment.DURING not in ledger:
                now = await self.ledger()
                if reserved_tokens(now) != reserved_tokens(before):
                    ledger[Moment.DURING] = now
            reply = await call
        finally:
            call.cancel()
        ledger[Moment.AFTER] = await self.ledger_when(lambda now: reserved_tokens(now) == reserved_tokens(before))
        return Observation(request.curl(), reply, ledger, self._ran_on(reply))

    def _ran_on(self, reply: Reply) -> dict[str, Value]:
        address = reply.headers.get("x-llm-replica")
        return {} if address is None else {"replica": self.stack.replica_at(address)}

    async def control(self, pool: str, **levers: bool | int) -> None:
        """Pull levers of all engines of `pool`."""
        for name, engine in self.stack.engines.items():
            if name.startswith(pool):
                async with self._client.post(f"http://{engine.address}/control", data=orjson.dumps(levers)) as answer:
                    answer.raise_for_status()

    async def generating_when_idle(self, name: str) -> int:
        """Prompts that engine `name` works on: 0 as soon as it has none, or what there is after SETTLE_S_MAX."""
        deadline_s = time.monotonic() + SETTLE_S_MAX
        while True:
            async with self._client.get(f"http://{self.stack.engines[name].address}/control") as answer:
                generating: int = orjson.loads(await answer.read())["generating"]
            if not generating or time.monotonic() > deadline_s:
                return generating
            await asyncio.sleep(POLL_S)

    async def restart_service(self) -> None:
        """Start Tokenlane, if it is down, and wait until it serves."""
        if not self.stack.service.running:
            self.stack.service.launch()
        await self.stack.wait_ready()


class Stream:
    """A streaming answer: its events are counted as they are read."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.head = Reply(response.status, _headers(response), {})
        self.tokens = 0
        self.complete = False
        self._response = response

    async def read(self, tokens_max: int | None = None) -> None:
        """Read until `tokens_max` generated tokens have come in all, or to the end."""
        while tokens_max is None or self.tokens < tokens_max:
            line = await self._response.content.readline()
            if not line:
                return
            self.complete |= line.startswith(DONE)
            self.tokens += _carries_text(line)


def _carries_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = orjson.loads(line.removeprefix(b"data: "))["choices"]
    return any(choice["delta"].get("content") for choice in choices)


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _object(body: bytes) -> Mapping[str, object]:
    try:
        document = orjson.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def write_requests(directory: Path, requests: tuple[Request, ...]) -> None:
    """Put the bodies of `requests` where their curl lines look for them."""
    for request in requests:
        (directory / request.file).write_bytes(orjson.dumps(request.body, option=orjson.OPT_INDENT_2))
