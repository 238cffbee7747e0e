"""What admission costs a request: latency through a real Envoy and CPU time, beside no filter and beside a no-op.

    python -m bench.latency [--quick] [--json] [--out PAGE]

Prints a table. With `--json` the table goes to stderr and stdout holds one JSON object. A full run writes its result
into docs/benchmarks.md, `--quick` only where `--out` says so. It fails on wrong answers, never on a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from bench.measure import FULL, QUICK, Measured, Plan, measure, tell
from bench.report import report, section, table, write
from bench.stage import ROOT, stage

PAGE = ROOT / "docs" / "benchmarks.md"


def main(arguments: list[str]) -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description="Measure what admission costs.")
    parser.add_argument("--quick", action="store_true", help="less than a minute instead of minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--out", type=Path, help="page to write the result into; a full run writes docs/benchmarks.md")
    options = parser.parse_args(arguments)
    # Without this and `_until_terminated` a terminated run would leave its servers behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    plan: Plan = QUICK if options.quick else FULL
    load_before = os.getloadavg()[0]
    tell("starting Envoy, engines and servers")
    with stage() as running:
        measured = uvloop.run(_until_terminated(measure(running, plan)))
    result = report(measured, load_average=(load_before, os.getloadavg()[0]))
    print(table(result), file=sys.stderr if options.json else sys.stdout, flush=True)
    page = options.out or (None if options.quick else PAGE)
    if page is not None:
        write(page, section(result, " ".join(["python -m bench.latency", *arguments])))
    if options.json:
        print(json.dumps(result))


async def _until_terminated(work: Coroutine[Any, Any, Measured]) -> Measured:
    """`work`, cancelled by SIGTERM: inside a loop, an exception of a signal handler may hit anything."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


if __name__ == "__main__":
    main(sys.argv[1:])
