"""From samples to numbers, JSON and Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.bodies import Bodies
from bench.measure import Measured, Sample, Scenario
from bench.report import BEGIN, END, report, section, table, write
from bench.stage import Name

US = 1000
MS = 1000 * US


def measured() -> Measured:
    """Ten requests of each variant: all take as long as is written here, one of them ten times as long."""
    samples = {
        Name.NO_FILTER: Sample(latencies(1 * MS), None, 1 * MS),
        Name.NOOP: Sample(latencies(2 * MS), 10 * MS, 2 * MS),
        Name.TOKENLANE: Sample(latencies(3 * MS), 25 * MS, 3 * MS),
        Name.TOKENLANE_REFUSING: Sample(latencies(1500 * US), 15 * MS, 2 * MS),
        Name.NOOP_REFUSING: Sample(latencies(1 * MS), 10 * MS, 2 * MS),
    }
    bodies = Bodies("chat", (b"a", b"bcd"), (399, 401))
    return Measured((Scenario(bodies, 20, 3, samples),), {Name.NOOP: 12})


def latencies(ns: int) -> list[int]:
    """Ten latencies, the longest in the middle."""
    return [*[ns] * 5, 10 * ns, *[ns] * 4]


def result() -> dict[str, object]:
    """The report of `measured`."""
    return report(measured(), load_average=(0.5, 1.25))


def test_rows_are_per_request() -> None:
    """Latencies are quantiles, CPU times are divided by requests, and what is added is over no filter."""
    rows = {row["variant"]: row for row in report(measured(), load_average=(0, 0))["results"]}

    assert {
        "body": "chat",
        "concurrency": 20,
        "variant": "Tokenlane",
        "requests": 10,
        "p50_us": 3000,
        "p99_us": 30_000,
        "added_p50_us": 2000,
        "added_p99_us": 20_000,
        "server_cpu_us": 2500,
        "envoy_cpu_us": 300,
    } == rows["Tokenlane"]


def test_what_is_not_measured_is_none() -> None:
    """No filter has no server, and a refusal, which meets no engine, adds nothing to what an engine takes."""
    rows = {row["variant"]: row for row in report(measured(), load_average=(0, 0))["results"]}

    assert rows["no filter"]["server_cpu_us"] is None
    assert rows["Tokenlane refusing"]["added_p50_us"] is None


def test_ratios_compare_like_with_like() -> None:
    """Tokenlane admitting is divided by the no-op that admits, refusing by the one that refuses."""
    expected = {
        "admitting": {"cpu": 2.5, "p50": 1.5, "p99": 1.5, "added_p50": 2.0},
        "refusing": {"cpu": 1.5, "p50": 1.5, "p99": 1.5, "added_p50": None},
    }

    assert {"chat-20": expected} == result()["ratios"]


def test_report_is_json() -> None:
    """The whole report goes through JSON unchanged."""
    assert result() == json.loads(json.dumps(result()))


def test_table_has_every_number() -> None:
    """The table has a line for each variant and each comparison, of one width each."""
    results, ratios = table(result()).split("\n\n")

    assert [2 + len(Name), 2 + 2] == [len(results.splitlines()), len(ratios.splitlines())]
    assert 1 == len(set(map(len, results.splitlines())))
    assert "| chat-20  | admitting         | 2.50 | 1.50 | 1.50 |      2.00 |" in ratios


def test_page_keeps_its_text(tmp_path: Path) -> None:
    """Results replace what is between the marks, as often as they are written, and nothing else."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, section(result(), "the command"))
    once = page.read_text()
    write(page, section(result(), "the command"))

    assert once == page.read_text()
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "`the command`" in once
    assert "399 to 401 input tokens" in once
    assert "old" not in once


def test_page_without_marks(tmp_path: Path) -> None:
    """A page without a place for results is left as it is."""
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match="no place"):
        write(page, "result")

    assert "text" == page.read_text()
