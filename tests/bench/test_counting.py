"""What the counting benchmark measures, says and writes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from bench.counting import FULL, IN_A_ROW, QUICK, Samples
from bench.counting_report import MARKS, report, section, tables
from bench.report import write
from bench.texts import TURN_BYTES, body, corpora, cut, messages

US = 1000


def measured(title: str, size_bytes: int, **us: int) -> Samples:
    """Two rounds of each way, one as long as is written here and one three times as long."""
    return Samples(title, size_bytes, 100, {way: [each * US, 3 * each * US] for way, each in us.items()})


def result() -> dict[str, object]:
    """A report in which fastokens takes a hundredth of the time, and the whole path a fiftieth."""
    ways = {"encode": 1000, "fastokens": 10, "count: fastokens, by segments": 5, "whole path: fastokens": 20}
    texts = [measured("English", 1024, **ways), measured("English", 262_144, **ways)]
    bare = {"orjson.loads + encode": 100, "orjson.loads + fastokens": 4}
    chat = measured("small chat", 2000, **bare, **{"whole path: huggingface": 150, "whole path: fastokens": 20})
    return report(texts, measured("last turn", 200_000, **ways), chat, load_average=(0.5, 1.25))


def test_ways_take_turns() -> None:
    """Each round begins with another way, and each way does its texts in a row."""
    order: list[tuple[str, int]] = []

    def call(way: str, text: int) -> int:
        order.append((way, text))
        return text

    samples = Samples("x")
    for number in range(3):
        samples.round({way: [partial(call, way, text) for text in (1, 2)] for way in "ab"}, number)

    assert [("a", 1), ("a", 2), ("b", 1), ("b", 2)] == order[:4]
    assert ["a", "b", "b", "a", "a", "b"] == [way for way, text in order if text == 1]
    assert {"a": 3, "b": 3} == {way: len(taken) for way, taken in samples.ns.items()}
    assert 2 == samples.tokens


def test_other_counts_end_the_benchmark() -> None:
    """Ways that do not count alike are not compared."""
    with pytest.raises(AssertionError, match="English"):
        Samples("English").round({"a": [lambda: 1], "b": [lambda: 2]}, 0)


def test_targets_are_judged_by_ratios() -> None:
    """Each target says what it compares with, what was found, and whether that is enough."""
    targets = result()["targets"]
    assert isinstance(targets, list)

    assert [200.0, 50.0, 100.0, 1.5, 0.2, 5.0] == [target["found"] for target in targets]
    assert [True, False, True, True, True, False] == [target["met"] for target in targets]


def test_report_is_json() -> None:
    """The whole report goes through JSON unchanged, with medians in microseconds."""
    rows = result()["texts"]
    assert isinstance(rows, list)

    assert result() == json.loads(json.dumps(result()))
    assert (2000.0, 131.1, 1.0) == tuple(rows[4][key] for key in ("us", "mb_per_s", "times_faster"))


def test_section_has_every_number(tmp_path: Path) -> None:
    """The page gets a line for each way and target between the counting marks."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write(page, section(result(), "the command"), MARKS)
    text = page.read_text()

    assert [2 + 8, 2 + 8, 2 + 6] == [len(table.splitlines()) for table in tables(result()).split("\n\n")]
    assert tables(result()) in text
    assert "`the command`" in text
    assert "load average 0.5 before and 1.2 after" in text


def test_texts_are_the_same_in_every_run() -> None:
    """Each kind is there in enough bytes, whole characters, and another text at another place."""
    for kind, corpus in corpora().items():
        assert len(corpus) > 300_000
        assert 16_000 < len(cut(kind, 5, 16_384).encode()) <= 16_384
        assert cut(kind, 0, 1000) != cut(kind, 1000, 1000)
        assert cut(kind, len(corpus) + 7, 100) == cut(kind, 7, 100)
    assert "\u6211\u4eec" in cut("Chinese", 0, 16_384)


def test_conversations_have_the_size_that_is_asked_for() -> None:
    """Messages of one size, from user and assistant in turn, become a chat body."""
    conversation = messages("English", 0, 3 * TURN_BYTES + 1)

    assert ["user", "assistant", "user", "assistant"] == [message["role"] for message in conversation]
    assert 3 * TURN_BYTES < sum(len(message["content"].encode()) for message in conversation) <= 3 * TURN_BYTES + 1
    assert conversation == json.loads(body("m", conversation))["messages"]


def test_a_quick_run_measures_what_a_full_one_does() -> None:
    """Both plans have rounds for every size."""
    assert QUICK.text_rounds.keys() == FULL.text_rounds.keys() == IN_A_ROW.keys()
