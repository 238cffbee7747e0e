"""Quantiles, ratios and CPU clocks of the benchmarks."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bench.stats import cpu_ns, quantile, ratio


@pytest.mark.parametrize(
    ("permille", "expected"),
    [(0, 1), (1, 1), (500, 50), (501, 51), (990, 99), (991, 100), (1000, 100)],
)
def test_quantile_is_the_nearest_rank(permille: int, expected: int) -> None:
    """A quantile is the smallest value that at least that share of the values does not exceed."""
    assert expected == quantile(range(1, 101), permille)


def test_quantile_of_one_value() -> None:
    """One value is every quantile."""
    assert [7, 7] == [quantile([7], 500), quantile([7], 990)]


def test_quantile_of_nothing() -> None:
    """Nothing measured has no quantile, not a quantile of zero."""
    with pytest.raises(ValueError, match="no values"):
        quantile([], 500)


@pytest.mark.parametrize(
    ("value", "base", "expected"),
    [(5, 2, 2.5), (1, 3, 0.33), (None, 2, None), (2, None, None), (2, 0, None), (2, -1, None)],
)
def test_ratio(value: float | None, base: float | None, expected: float | None) -> None:
    """A ratio needs both numbers and a positive base."""
    assert expected == ratio(value, base)


def test_cpu_of_another_process() -> None:
    """The CPU clock of a process counts what it computes and stands while it waits."""
    burn = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        first_ns = cpu_ns(child.pid)
        waited_until_s = time.monotonic() + 0.05
        while time.monotonic() < waited_until_s:
            second_ns = cpu_ns(child.pid)

        assert 200_000_000 <= first_ns
        assert second_ns - first_ns < 20_000_000
        assert child.stdin is not None
        child.stdin.close()


def test_cpu_time_of_children_counts() -> None:
    """What a server lets its worker processes do is its own."""
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    starter = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    with subprocess.Popen(
        [sys.executable, "-c", starter, busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()

        assert 200_000_000 <= cpu_ns(parent.pid)
        assert parent.stdin is not None
        parent.stdin.write("\n")
        parent.stdin.close()
