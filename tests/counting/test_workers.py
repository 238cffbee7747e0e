"""Worker processes: the same counts and faults as here, and a death that costs only what it was counting."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from extproc.core.policy import Endpoint
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from tests.counting.models import CHAT, COMPLETIONS, policy, user

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def apart() -> Iterator[Counter]:
    """A counter with one worker process, started."""
    counter = Counter(policy({"m": {}}, default_model="m"), processes=1)
    counter.start_workers()
    yield counter
    counter.close()


def _worker_pid(counter: Counter) -> int:
    assert counter._workers is not None
    assert counter._workers._pool is not None
    (pid,) = counter._workers._pool._processes
    return pid


def _links() -> list[str]:
    """What the open files of this process are."""
    return [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, user("a long story " * 2000, max_tokens=50)),
        (CHAT, user("an open ceiling")),
        (COMPLETIONS, {"prompt": [[1, 2, 3], [4]], "n": 2, "max_tokens": 5}),
    ],
)
async def test_the_same_count(apart: Counter, endpoint: Endpoint, body: dict[str, object]) -> None:
    """Demand, prompts and the body for the engine are those that this process finds."""
    data = orjson.dumps(body)
    here = apart.count_now(apart.read(endpoint, data, lowered=True))

    assert here == await apart.count_apart(endpoint, data, lowered=True)


async def test_large_bodies_leave_nothing(apart: Counter) -> None:
    """A body of megabytes counts the same, and its file is gone afterwards, also when nobody waits any more."""
    data = orjson.dumps({"prompt": "word " * 600_000, "max_tokens": 5})
    counting = asyncio.ensure_future(apart.count_apart(COMPLETIONS, data))
    await asyncio.sleep(0)
    counting.cancel()
    with pytest.raises(Fault) as here:
        apart.read(COMPLETIONS, data)
    with pytest.raises(Fault) as there:
        await apart.count_apart(COMPLETIONS, data)

    assert vars(here.value) == vars(there.value)
    await apart.count_apart(COMPLETIONS, b'{"prompt": "all others are done"}')
    del counting, there  # a fault holds the frames that it came through
    assert [] == [link for link in _links() if "memfd:body" in link]


async def test_the_same_fault(apart: Counter) -> None:
    """A refusal keeps its reason, message, field, details and model across processes."""
    data = orjson.dumps(user("x" * 50, max_tokens=10**6))
    with pytest.raises(Fault) as here:
        apart.read(CHAT, data)
    with pytest.raises(Fault) as there:
        await apart.count_apart(CHAT, data)

    assert Reason.CONTEXT_LIMIT == there.value.reason
    assert vars(here.value) == vars(there.value)


async def test_hostile_elements_stall_nobody(apart: Counter) -> None:
    """While a worker parses a million empty arrays, the event loop goes on."""
    body = b'{"prompt": [' + b",".join([b"[]"] * 1_000_000) + b"]}"
    await apart.count_apart(COMPLETIONS, b'{"prompt": "wait for the start"}')
    counting = asyncio.ensure_future(apart.count_apart(COMPLETIONS, body))
    worst_s = 0.0
    while not counting.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        worst_s = max(worst_s, time.perf_counter() - before)
    with pytest.raises(Fault) as refused:
        await counting

    assert Reason.MALFORMED_REQUEST == refused.value.reason
    assert worst_s < 0.1


async def test_a_dead_worker_is_replaced(apart: Counter) -> None:
    """What a killed worker was counting is tokenizer_unavailable; the next body finds a new one."""
    await apart.count_apart(COMPLETIONS, b'{"prompt": "wait for the start"}')
    killed = _worker_pid(apart)
    counting = asyncio.ensure_future(apart.count_apart(CHAT, orjson.dumps(user("x " * 500_000))))
    await asyncio.sleep(0)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(Fault) as lost:
        await counting
    again = await apart.count_apart(COMPLETIONS, b'{"prompt": "hello"}')

    assert Reason.TOKENIZER_UNAVAILABLE == lost.value.reason
    assert 1 == again.demand.input_tokens
    assert killed != _worker_pid(apart)
