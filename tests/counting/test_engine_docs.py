"""docs/engines.md against the profiles: an endpoint without its row, or a row without its endpoint, fails here."""

from __future__ import annotations

import re

from extproc.counting.profiles import PROFILES
from tests.counting.models import ROOT

DOCUMENT = (ROOT / "docs" / "engines.md").read_text()


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
