"""Clients of a flood: `python -m bench.flood --port PORT --clients N --seconds S`.

Each sends one request after the other, all kinds in turn, and reads the answer. Prints one JSON object: how often each
kind was answered with each status, 0 where the connection broke.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping

from bench.flood import requests

ANSWER_S_MAX = 60
NICENESS = 10
"""Clients are elsewhere in life: here they give way to what they attack."""


async def client(port: int, kinds: list[tuple[str, bytes]], until_s: float, seen: Counter[tuple[str, int]]) -> None:
    """One client, until the time is over."""
    turn = 0
    while time.monotonic() < until_s:
        name, data = kinds[turn % len(kinds)]
        turn += 1
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                seen[name, await _ask(port, data)] += 1
        except TimeoutError:
            seen[name, -1] += 1


async def _ask(port: int, data: bytes) -> int:
    """The status of the answer; 0 where none came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return int((await reader.readline()).split(b" ")[1])
    except (OSError, IndexError, ValueError):
        return 0
    finally:
        writer.transport.abort()


async def flood(port: int, clients: int, seconds: float, kinds: Mapping[str, bytes]) -> Counter[tuple[str, int]]:
    """All clients at once, each beginning with another kind."""
    seen: Counter[tuple[str, int]] = Counter()
    order = list(kinds.items())
    until_s = time.monotonic() + seconds
    shifts = [order[index % len(order) :] + order[: index % len(order)] for index in range(clients)]
    await asyncio.gather(*(client(port, shift, until_s, seen) for shift in shifts))
    return seen


def main() -> None:
    """Parse, flood, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description="Send requests made to hurt.")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    os.nice(NICENESS)
    kinds = requests()
    print("ready", flush=True)
    seen = asyncio.run(flood(options.port, options.clients, options.seconds, kinds))
    answers = {name: {str(status): times for (kind, status), times in seen.items() if kind == name} for name in kinds}
    print(json.dumps(answers), flush=True)


main()
