"""Ten thousand streams that end at any moment: each reservation ends exactly once, and nothing stays."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.core.admission import Desk
from extproc.core.values import Ending
from extproc.counting import Counter
from extproc.demo.stack import QWEN3_DIR
from extproc.service.book import Book
from extproc.service.metrics import Metrics
from extproc.service.servicer import Servicer
from extproc.settings import PolicySection, freeze
from tests.policies import document, replica

STREAMS = 10_000
AT_ONCE = 100
STEPS_MAX = 30

TEXT = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a short question"}], "max_tokens": 8})
IDS = orjson.dumps({"model": "m", "prompt": [9] * 50, "max_tokens": 8})
BAD = b'{"model": "m", "prompt": '


def _head(path: str) -> pb.ProcessingRequest:
    values = {":method": "POST", ":path": path, "content-type": "application/json", "x-request-id": "r"}
    headers = [base_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()]
    return pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=base_pb2.HeaderMap(headers=headers)))


SCRIPTS = [
    [_head("/v1/chat/completions"), pb.ProcessingRequest(request_body=pb.HttpBody(body=TEXT, end_of_stream=True))],
    [_head("/v1/completions"), pb.ProcessingRequest(request_body=pb.HttpBody(body=IDS, end_of_stream=True))],
    [_head("/v1/completions"), pb.ProcessingRequest(request_body=pb.HttpBody(body=BAD, end_of_stream=True))],
    [_head("/unknown")],
]


class _Link:
    """The transport of one stream: hands over a script of messages, then stays silent or ends.

    Every read and write gives way to other streams, so that a cancellation can come at any of them.
    """

    def __init__(self, script: list[pb.ProcessingRequest], *, ends: bool) -> None:
        self._script = iter(script)
        self._ends = ends
        self.written: list[bytes] = []

    async def read(self) -> Any:
        await asyncio.sleep(0)
        message = next(self._script, None)
        if message is None and not self._ends:
            await asyncio.Event().wait()
        return grpc.aio.EOF if message is None else message

    async def write(self, reply: bytes) -> None:
        await asyncio.sleep(0)
        self.written.append(reply)


async def _one(servicer: Servicer, rng: random.Random) -> None:
    link = _Link(rng.choice(SCRIPTS), ends=rng.random() < 0.3)
    task = asyncio.create_task(servicer.process(None, link))  # type: ignore[arg-type]  # only read and write are used
    for _ in range(rng.randrange(STEPS_MAX)):
        await asyncio.sleep(0)
    if rng.random() < 0.3:
        await asyncio.sleep(rng.random() * 0.01)  # long enough for some counts to finish
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("seed", [1])
async def test_every_stream_ends_clean(seed: int) -> None:
    """Wherever a stream is cut, admissions = endings, and tokens, streams and intake are 0."""
    content = document(chat={"chat-0": replica(9101, gross_tokens=2_000, requests_max=40)})
    content["models"]["m"].update(
        tokenizer_dir=str(QWEN3_DIR), lanes={"interactive": {"pool": "chat", "input_tokens_max": 500}}
    )
    policy = freeze(PolicySection.model_validate(content), Path())
    desk = Desk(policy, "i")
    desk.set_ready("chat-0", ready=True)
    metrics = Metrics(desk)
    counter = Counter(policy)
    servicer = Servicer(desk, counter, metrics, Book(metrics, None), detaching=lambda: False)
    rng = random.Random(seed)
    for _ in range(STREAMS // AT_ONCE):
        await asyncio.gather(*(_one(servicer, rng) for _ in range(AT_ONCE)))
        assert (0, 0, 0) == (desk.streams, desk.intake_bytes, len(desk.ledger.open))
    counter.close()
    value = metrics.registry.get_sample_value
    admitted = value("tokenlane_admitted_requests_total", {"lane": "interactive"})
    ended = {ending: value("tokenlane_reservations_ended_total", {"ending": ending}) or 0 for ending in Ending}

    assert admitted == sum(ended.values())
    assert ended[Ending.SETTLED] > STREAMS / 20
    assert ended[Ending.RELEASED] > 10
    assert 0 == desk.ledger.accounts["chat-0"].active_tokens
    assert await servicer.wait_idle(0.1)
