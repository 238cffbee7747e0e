"""What counts cost, as JSON, as tables and as a part of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.report import machine, markdown, place, versions

if TYPE_CHECKING:
    from bench.counting import Samples

PACKAGES = ("fastokens", "jinja2", "orjson", "tokenizers")

MARKS = "<!-- counting results: begin -->", "<!-- counting results: end -->"

Row = dict[str, Any]


def report(
    texts: Sequence[Samples], conversation: Samples, chat: Samples, *, load_average: tuple[float, float]
) -> dict[str, Any]:
    """The result of a run as one JSON object. Times are medians in microseconds, ratios medians over rounds."""
    return {
        "bench": "counting",
        "machine": {**machine(), "load_average": [round(load, 1) for load in load_average]},
        "versions": versions(PACKAGES),
        "texts": [row for samples in texts for row in _rows(samples, "encode")],
        "conversation": _rows(conversation, "encode"),
        "chat": _rows(chat, "orjson.loads + encode"),
        "targets": list(_targets(texts, conversation, chat)),
    }


def _rows(samples: Samples, base: str) -> list[Row]:
    return [
        {
            "body": samples.title,
            "bytes": samples.size_bytes,
            "tokens": samples.tokens,
            "way": way,
            "rounds": len(taken),
            "us": round(samples.us(way), 1),
            "mb_per_s": round(samples.size_bytes / samples.us(way), 1),
            "times_faster": round(samples.times(base, way), 2),
        }
        for way, taken in samples.ns.items()
    ]


def _targets(texts: Sequence[Samples], conversation: Samples, chat: Samples) -> Sequence[Row]:
    english = max((each for each in texts if each.title == "English"), key=lambda each: each.size_bytes)
    return [
        _faster("last turn, count", 100, conversation, "encode", "count: fastokens, by segments"),
        _faster("last turn, whole path", 100, conversation, "encode", "whole path: fastokens"),
        _faster("256 KB of English", 20, english, "encode", "fastokens"),
        _slower("small chat, huggingface", 3, chat, "orjson.loads + encode", "whole path: huggingface"),
        _slower("small chat, fastokens", 3, chat, "orjson.loads + encode", "whole path: fastokens"),
        _slower("small chat, fastokens", 3, chat, "orjson.loads + fastokens", "whole path: fastokens"),
    ]


def _faster(what: str, times: int, samples: Samples, base: str, way: str) -> Row:
    found = samples.times(base, way)
    return _target(what, f"at least {times} times as fast as {base}", found, met=found >= times)


def _slower(what: str, times: int, samples: Samples, base: str, way: str) -> Row:
    found = samples.times(way, base)
    return _target(what, f"at most {times} times as long as {base}", found, met=found <= times)


def _target(name: str, wanted: str, found: float, *, met: bool) -> Row:
    return {"what": name, "target": wanted, "found": round(found, 2), "met": met}


def tables(result: Mapping[str, Any]) -> str:
    """Results in Markdown, which reads as well in a terminal."""
    texts = [
        [row["body"], row["bytes"], row["way"], row["rounds"], row["us"], row["mb_per_s"], row["times_faster"]]
        for row in result["texts"]
    ]
    bodies = [
        [row["body"], row["tokens"], row["way"], row["rounds"], row["us"], row["times_faster"]]
        for row in (*result["conversation"], *result["chat"])
    ]
    targets = [[row["what"], row["target"], row["found"], "yes" if row["met"] else "no"] for row in result["targets"]]
    return "\n\n".join(
        (
            markdown(("text", "bytes", "way", "rounds", "µs", "MB/s", "times faster"), texts, texts=(0, 2)),
            markdown(("body", "tokens", "way", "rounds", "µs", "times faster"), bodies, texts=(0, 2)),
            markdown(("target", "wanted", "found", "met"), targets, texts=(0, 1, 3)),
        )
    )


def section(result: Mapping[str, Any], command: str) -> str:
    """The measured part of the page."""
    tools = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    parts = (f"Command: `{command}`", place(result["machine"]), f"Versions: {tools}.", tables(result))
    return "\n\n".join(parts)
