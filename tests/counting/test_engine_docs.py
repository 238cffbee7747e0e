"""docs/engines.md against the profiles and the recorded counts.

An endpoint without its row, or a row without its endpoint, fails here. `UPDATE_DOCS=1` writes the rows of the recorded
counts anew, as far as their tokenizers are here; the others stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from extproc.counting.fast import installed
from extproc.counting.profiles import PROFILES
from tests.counting.models import ROOT
from tests.counting.recorded import RECORDINGS, WAYS, agreement, directory, recorded

PAGE = ROOT / "docs" / "engines.md"
DOCUMENT = PAGE.read_text()
BEGIN, END = "<!-- recorded counts: begin -->\n", "\n<!-- recorded counts: end -->"


def test_every_endpoint_of_every_engine_has_its_row() -> None:
    """The table of endpoints has one row for each reader of each profile, and no other."""
    rows = re.findall(r"^\| (\w+) \| `(/\S+)` \|(?: [^|\n]+ \|){4}$", DOCUMENT, re.MULTILINE)

    assert sorted((engine.value, endpoint.value) for engine in PROFILES for endpoint in PROFILES[engine]) == sorted(
        rows
    )


def test_every_engine_says_what_it_was_checked_against() -> None:
    """Each profile names a version and how its rules are known."""
    rows = re.findall(r"^\| `(\w+)` \| [^|\n]+ \| [^|\n]+ \|$", DOCUMENT, re.MULTILINE)

    assert [engine.value for engine in PROFILES] == rows


def test_every_rule_says_how_it_is_known() -> None:
    """A rule is observed, derived from source, or stricter than the engine, and names its source."""
    rules = re.findall(
        r"^\| (?!rule |---)[^|\n]+ \| ([^|\n]+) \| ([^|\n]+) \|$", DOCUMENT.split("\n## vLLM", 1)[1], re.MULTILINE
    )

    assert len(rules) > 40
    assert [] == [known for known, source in rules if not re.match(r"observed|derived|stricter", known) or not source]


def _row(shared: Path, recording: str) -> str | None:
    """What came of a recording; None where its tokenizer or a library is not here."""
    if not directory(shared, recording).is_dir() or not installed():
        return None
    found = [agreement(shared, recording, way) for way in WAYS]
    cells = [f"{each.counted} + {each.refused}" for each in found if each is not None]
    return " | ".join((f"| `{recording}`", str(len(list(recorded(shared, recording)))), *cells)) + " |"


@pytest.mark.parametrize("recording", RECORDINGS)
def test_recorded_counts(recording: str, shared: Path) -> None:
    """The table says of each recording how many of its bodies are counted and refused as the engine did."""
    row = _row(shared, recording)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = table.split("\n")
    place = next((index for index, line in enumerate(lines) if line.startswith(f"| `{recording}` |")), len(lines))
    if os.environ.get("UPDATE_DOCS"):
        missing = f"| `{recording}` | not run: its tokenizer was not there |" + " |" * len(WAYS)
        lines[place : place + 1] = [row or (lines[place] if place < len(lines) else missing)]
        PAGE.write_text(before + BEGIN + "\n".join(lines) + END + after)
    elif row is None:
        pytest.skip(f"the tokenizer of {recording} or the extra `fast` is not here")

    assert row in {None, lines[place]}
