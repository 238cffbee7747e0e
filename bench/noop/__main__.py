"""Entry point of `python -m bench.noop`: serve until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal

import uvloop

from bench.noop import Mode, Servicer, build


async def serve(listen: str, mode: Mode, destination: str) -> None:
    """Serve on `listen` until SIGTERM; prints one line once it listens."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    server = build(Servicer(mode, destination))
    port = server.add_insecure_port(listen)
    await server.start()
    print(f"listening on port {port}", flush=True)
    await stopping.wait()
    await server.stop(grace=0)


parser = argparse.ArgumentParser(prog="python -m bench.noop", description="An ext_proc server that decides nothing.")
parser.add_argument("--listen", required=True, help="IP:port; port 0: the system picks")
parser.add_argument("--mode", required=True, type=Mode, choices=list(Mode))
parser.add_argument("--destination", default="127.0.0.1:9101", help="IP:port of the engine that admit names")
arguments = parser.parse_args()
uvloop.run(serve(arguments.listen, arguments.mode, arguments.destination))
