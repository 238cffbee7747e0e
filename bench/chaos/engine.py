"""The simulated engine, which counts words, and writes down the id of every generation request it sees.

    python -m bench.chaos.engine --seen ids.txt ...

One write a line, before the request is read, so that a kill loses none. Other options are those of
`extproc.demo.engine` that the chaos run uses.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import uvloop
from aiohttp import web

from bench.chaos.requests import prompts_tokens
from extproc.demo.engine import Engine, serve
from extproc.demo.engine_model import SimpleModel
from extproc.demo.engine_request import RequestReader

REQUESTS_MAX = 1024


class SeeingEngine(Engine):
    """An engine with a list of what reached it."""

    def __init__(self, seen: Path, name: str, reader: RequestReader, model: SimpleModel) -> None:
        super().__init__(name, reader, model, requests_max=REQUESTS_MAX)
        self._seen = os.open(seen, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Write down, then answer."""
        if request.method == "POST" and request.path != "/control":
            os.write(self._seen, f"{request.headers.get('x-request-id', '-')}\n".encode())
        return await super().handle(request)


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(prog="bench.chaos.engine")
    for name in ("--listen", "--name"):
        parser.add_argument(name, required=True)
    parser.add_argument("--seen", required=True, type=Path)
    for name in ("--context-tokens-max", "--prefill-tokens-per-s", "--decode-tokens-per-s"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--model", required=True)
    parser.add_argument("--until-eof", action="store_true")
    options = parser.parse_args()
    reader = RequestReader((options.model,), options.context_tokens_max, prompts_tokens)
    model = SimpleModel(options.prefill_tokens_per_s, options.decode_tokens_per_s)
    host, _, port = options.listen.rpartition(":")
    uvloop.run(
        serve(
            lambda: SeeingEngine(options.seen, options.name, reader, model),
            host,
            int(port),
            until_eof=options.until_eof,
        )
    )


if __name__ == "__main__":
    main()
