"""The demo plays its tour against the real chain, tells a deviation from a success, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from extproc.cli import main
from extproc.demo.tour_main import ONCE_S_MAX, JsonLines, tour
from extproc.demo.tour_page import Page
from extproc.demo.tour_stage import Stage
from extproc.demo.tour_steps import Step
from extproc.demo.tour_values import Account, Expectation, Ledger, Moment, Observation, Reply, differences

DEMO = [sys.executable, "-m", "extproc", "demo", "--json"]
STATUSES = {
    "small_chat": 200,
    "long_document": 200,
    "oversized": 413,
    "full_lane": 429,
    "forged_headers": 200,
    "unknown_path": 404,
    "client_leaves": 200,
    "engines_down": 503,
    "killed": 503,
}


def alive(session: int) -> list[str]:
    """Command lines of the processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state != "Z":
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue  # it ended meanwhile
    return found


def start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """The demo as the leader of a session of its own, with its temporary files in `tmp_path`."""
    return subprocess.Popen(
        [*DEMO, *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )


def test_every_step_comes_out_as_documented(tmp_path: Path) -> None:
    """`tokenlane demo --once --json` exits 0, prints every step with its status, and leaves no process and no file."""
    demo = start(tmp_path, "--once")
    output, _ = demo.communicate(timeout=100)
    *steps, summary = map(json.loads, output.splitlines())

    assert STATUSES == {step["name"]: step["status"] for step in steps}
    assert [] == [problem for step in steps for problem in step["problems"]]
    assert (len(STATUSES), 0) == (summary["steps"], summary["failed"])
    assert summary["seconds"] <= ONCE_S_MAX
    assert demo.returncode == 0
    assert [] == alive(demo.pid)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("steps_seen", [0, 4])
def test_sigterm_ends_all_children(tmp_path: Path, steps_seen: int) -> None:
    """A demo that is told to end, while it starts or in the middle of its tour, ends all of its children first."""
    demo = start(tmp_path)
    assert demo.stdout is not None
    for _ in range(steps_seen):
        demo.stdout.readline()
    until_children(demo.pid)
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=60)

    assert 128 + signal.SIGTERM == demo.returncode
    assert [] == alive(demo.pid)
    assert [] == list(tmp_path.iterdir())


def until_children(session: int) -> None:
    """Wait until the session has more than its leader."""
    deadline_s = time.monotonic() + 60
    while len(alive(session)) < 2:
        assert time.monotonic() < deadline_s, "the demo starts nothing"
        time.sleep(0.01)


def test_help_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of commands describes the demo without rich, and running it then says what to install."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    runner = CliRunner()

    assert "demo" in runner.invoke(main, ["--help"]).output
    done = runner.invoke(main, ["demo", "--once"])
    assert 1 == done.exit_code
    assert "pip install 'tokenlane[demo]'" in done.output


def ledger(**held: int) -> Ledger:
    """Two replicas of 100 tokens that hold what is given."""
    return {name: Account(held.get(name, 0), 100, ready=True) for name in ("a", "b")}


SEEN = Observation(
    "curl",
    Reply(429, {"x-llm-reason": "token_budget_exhausted", "retry-after": "7"}, {}),
    {Moment.BEFORE: ledger(), Moment.DURING: ledger(a=40)},
    {"replica": "a", "released_ms": 3},
)
DOCUMENTED = Expectation(
    429,
    headers={"x-llm-reason": "token_budget_exhausted", "retry-after": range(6, 9), "x-should-retry": None},
    facts={"replica": "a", "released_ms": range(1, 1001)},
    ledger={Moment.BEFORE: {}, Moment.DURING: {"a": 40}},
)


def test_no_difference() -> None:
    """An observation within its documentation has no differences."""
    assert [] == differences(DOCUMENTED, SEEN)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"status": 200}, "status is 429, documented is 200"),
        (
            {"headers": {"x-llm-reason": None}},
            "header x-llm-reason is token_budget_exhausted, documented is absent",
        ),
        ({"headers": {"x-llm-lane": "bulk"}}, "header x-llm-lane is absent, documented is bulk"),
        ({"headers": {"retry-after": range(1, 7)}}, "header retry-after is 7, documented is 1 to 6"),
        (
            {"headers": {"x-llm-reason": range(1, 7)}},
            "header x-llm-reason is token_budget_exhausted, documented is 1 to 6",
        ),
        ({"facts": {"replica": "b"}}, "replica is a, documented is b"),
        ({"facts": {"missing": 0}}, "missing is absent, documented is 0"),
        (
            {"ledger": {Moment.DURING: {}}},
            "ledger, during: 40 on a; documented is nothing",
        ),
        (
            {"ledger": {Moment.DURING: {"a": 40, "b": 1}}},
            "ledger, during: 40 on a; documented is 40 on a, 1 on b",
        ),
        ({"ledger": {Moment.AFTER: {}}}, "ledger, after: not known; documented is nothing"),
    ],
)
def test_differences(change: Mapping[str, Any], difference: str) -> None:
    """Whatever differs from the documentation is named, with what was seen and what was expected."""
    assert [difference] == differences(replace(DOCUMENTED, **change), SEEN)


def step(name: str, expected: Expectation) -> Step:
    """A step that sees `SEEN`."""

    async def play(stage: Stage) -> Observation:
        return SEEN

    return Step(name, "A title", "A text.", play, expected, notes=("It took {released_ms} ms.",))


async def broken(stage: Stage) -> Observation:
    """What a step does when nothing listens."""
    raise ConnectionRefusedError(111, "refused")


NO_STAGE: Any = None
AS_DOCUMENTED = step("right", DOCUMENTED)
DIFFERENT = step("wrong", replace(DOCUMENTED, status=200))
BROKEN = replace(AS_DOCUMENTED, name="broken", play=broken)


@pytest.mark.parametrize(
    ("steps", "code", "problems"),
    [
        ([AS_DOCUMENTED], 0, [[]]),
        ([DIFFERENT, AS_DOCUMENTED], 1, [["status is 429, documented is 200"], []]),
        ([BROKEN], 1, [["it broke off: ConnectionRefusedError: [Errno 111] refused"]]),
    ],
)
async def test_exit_code(
    steps: list[Step], code: int, problems: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One step that differs from its documentation makes the exit code 1; the others are still played."""
    found = await tour(steps, NO_STAGE, JsonLines(), time.monotonic(), None)
    *shown, summary = map(json.loads, capsys.readouterr().out.splitlines())

    assert code == found
    assert problems == [line["problems"] for line in shown]
    assert (len(steps), code) == (summary["steps"], summary["failed"])


async def test_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not done in time has failed."""

    async def endless(stage: Stage) -> Observation:
        await asyncio.Event().wait()
        return SEEN

    found = await tour([replace(AS_DOCUMENTED, play=endless)], NO_STAGE, JsonLines(), time.monotonic(), 0.05)

    assert 1 == found
    assert "it took more than" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100, 120])
async def test_page(width: int) -> None:
    """Without a terminal the page is plain text within its width, in ASCII where that is all there is."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    page = Page(Console(file=written, width=width, highlight=False))
    await tour([AS_DOCUMENTED, DIFFERENT], NO_STAGE, page, time.monotonic(), None)
    written.seek(0)
    text = written.read()

    assert "NOT AS DOCUMENTED: status is 429, documented is 200" in text
    assert "1 of 2 steps did not come out as documented" in text
    assert "#" in text
    assert width >= max(map(len, text.splitlines()))
