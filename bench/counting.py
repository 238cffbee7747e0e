"""What a count costs: each library, whole and by segments, and the whole path from a body to its demand.

    python -m bench.counting [--quick] [--json] [--model DIR] [--out PAGE]

Prints tables. With `--json` they go to stderr, and the last line on stdout is one JSON object. A full run writes its
result into docs/benchmarks.md, `--quick` only where `--out` says so. It fails on wrong counts, never on a time.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import orjson
import tokenizers

from bench.counting_report import MARKS, report, section, tables
from bench.report import write
from bench.stage import ROOT
from bench.texts import body, corpora, cut, messages
from extproc.core.policy import Endpoint, Policy, TokenizerBackend
from extproc.counting import Counter
from extproc.counting.segments import Library, SegmentCache
from extproc.counting.tokenizer import read_tokenizer
from extproc.settings import PolicySection, freeze

PAGE = ROOT / "docs" / "benchmarks.md"
MODEL_DIR = ROOT / "extproc" / "demo" / "qwen3"
CHAT = Endpoint.CHAT_COMPLETIONS
TURNS = 20
CHAT_TOKENS = 400
CONVERSATION_TOKENS = 45_000
BYTES_PER_TOKEN = 4.3
"""First guess for English prose; sizes that are stated in the result are counted."""


IN_A_ROW = {1024: 16, 16_384: 4, 262_144: 1}
"""Texts of a size that one way counts before the next way has its turn."""

CONVERSATIONS_IN_A_ROW = 4
CHATS_IN_A_ROW = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of texts of each size, of conversations and of small chats."""

    text_rounds: Mapping[int, int]
    conversation_rounds: int
    chat_rounds: int


FULL = Plan({1024: 40, 16_384: 30, 262_144: 20}, conversation_rounds=15, chat_rounds=60)
QUICK = Plan({1024: 3, 16_384: 3, 262_144: 1}, conversation_rounds=2, chat_rounds=6)

Call = Callable[[], int]
Ways = dict[str, list[Call]]
"""Name -> calls that count one text each; the calls of all ways count the same texts."""


@dataclass
class Samples:
    """Nanoseconds a text by way, round after round; `size_bytes` and `tokens` are those of one text."""

    title: str
    size_bytes: int = 0
    tokens: int = 0
    ns: dict[str, list[int]] = field(default_factory=dict)

    def us(self, way: str) -> float:
        """The median, in microseconds."""
        return median(self.ns[way]) / 1000

    def times(self, base: str, way: str) -> float:
        """How many times longer `base` takes than `way`: the median over rounds, each of which meets one machine."""
        return median(a / b for a, b in zip(self.ns[base], self.ns[way], strict=True))

    def round(self, ways: Ways, number: int) -> None:
        """Time each way once, beginning with another one each round; AssertionError unless all count alike.

        Each does several texts in a row: the first one finds the processor's caches full of another way's work.
        """
        names = list(ways)
        first = number % len(names)
        found = {}
        for name in names[first:] + names[:first]:
            begin = time.perf_counter_ns()
            found[name] = [call() for call in ways[name]]
            self.ns.setdefault(name, []).append((time.perf_counter_ns() - begin) // len(found[name]))
        assert len(set(map(str, found.values()))) == 1, f"{self.title}: {found}"
        self.tokens = found[names[0]][-1]


class Bench:
    """A model's tokenizer in all the ways to count with it."""

    def __init__(self, directory: Path) -> None:
        self.reference = tokenizers.Tokenizer.from_buffer(read_tokenizer(directory))
        self.counters = {name: Counter(_policy(directory, name), processes=1) for name in ("huggingface", "fastokens")}
        self._caches = {name: _segmented(counter) for name, counter in self.counters.items()}
        self.libraries = {name: cache.library for name, cache in self._caches.items()}
        assert list(self.libraries) == [library.name for library in self.libraries.values()], "fastokens is not there"
        for library in self.libraries.values():
            library.warm()

    def prompt(self, conversation: list[dict[str, str]]) -> str:
        """`conversation` as the model's template renders it."""
        return self.counters["huggingface"].read(CHAT, body("m", conversation)).prompts.texts[0]

    def encode(self, text: str) -> int:
        """The yardstick: what a program without this one would call."""
        return len(self.reference.encode(text, add_special_tokens=False))

    def cache(self, library: str) -> SegmentCache:
        """An empty cache that divides texts of any size."""
        made = SegmentCache(self.libraries[library], self._caches[library].cuts, 0)
        made.segmented_chars_min = 0
        return made

    def close(self) -> None:
        """Stop threads and processes."""
        for counter in self.counters.values():
            counter.close()


def _segmented(counter: Counter) -> SegmentCache:
    backend = counter.backends()["m"]
    assert isinstance(backend, SegmentCache)
    assert backend.segments_doubt is None, backend.segments_doubt
    return backend


def _policy(directory: Path, library: str) -> Policy:
    backend = TokenizerBackend.HUGGINGFACE if library == "huggingface" else TokenizerBackend.AUTO
    model = {
        "tokenizer_dir": str(directory),
        "tokenizer_backend": backend.value,
        "context_tokens_max": 400_000,
        "lanes": {"bulk": {"pool": "p", "input_tokens_max": 300_000, "total_tokens_max": 300_000}},
    }
    replicas = {"r": {"address": "127.0.0.1:9001", "gross_tokens": 400_000}}
    document = {"version": "bench-1", "pools": {"p": {"replicas": replicas}}, "models": {"m": model}}
    return freeze(PolicySection.model_validate(document), base=ROOT)


def texts(bench: Bench, plan: Plan) -> Iterator[Samples]:
    """Chats of one kind and size: some that are counted whole, and some in segments, first all new, then all known.

    Others each time, because fastokens is faster with words that it has just seen.
    """
    for kind, corpus in corpora().items():
        for size, rounds in plan.text_rounds.items():
            samples = Samples(kind, size)
            in_a_row = IN_A_ROW[size]
            starts = count(0, len(corpus) // (2 * rounds * in_a_row))
            for number in range(rounds):
                prompts = [bench.prompt(messages(kind, next(starts), size)) for _ in range(2 * in_a_row)]
                whole, divided = prompts[:in_a_row], prompts[in_a_row:]
                ways: Ways = {"encode": [functools.partial(bench.encode, text) for text in whole]}
                for name, library in bench.libraries.items():
                    ways[name] = _counts(library, whole)
                samples.round(ways, number)
                caches = {name: bench.cache(name) for name in bench.libraries}
                for state in ("new", "known"):
                    ways = {f"{name}, segments {state}": _counts(cache, divided) for name, cache in caches.items()}
                    samples.round(ways, number)
            tell(f"{kind}, {size // 1024} KB: {rounds} rounds")
            yield samples


def _counts(backend: Library | SegmentCache, prompts: Sequence[str]) -> list[Call]:
    return [functools.partial(_count, backend, prompt) for prompt in prompts]


def _count(backend: Library | SegmentCache, prompt: str) -> int:
    return backend.count_batch([prompt], add_special_tokens=False)[0]


def conversation(bench: Bench, plan: Plan) -> Samples:
    """The last turn of a long conversation: all but the last answer and the last question were counted before."""
    size = int(CONVERSATION_TOKENS * BYTES_PER_TOKEN) // (2 * TURNS - 1)
    start = count(0, size)
    before = [
        {"role": "assistant" if turn % 2 else "user", "content": cut("English", next(start), size)}
        for turn in range(2 * TURNS - 3)
    ]
    samples = Samples("last turn")
    caches = {name: bench.cache(name) for name in bench.libraries}
    with asyncio.Runner() as runner:

        def through_worker(data: bytes) -> int:
            return runner.run(bench.counters["fastokens"].count_apart(CHAT, data)).demand.input_tokens

        through_worker(body("m", before))
        for name, counter in bench.counters.items():
            _whole_path(counter, body("m", before))
            _count(caches[name], bench.prompt(before))
        for number in range(plan.conversation_rounds):
            turns = [
                [
                    *before,
                    {"role": "assistant", "content": f"{number}.{turn} {cut('English', next(start), size)}"},
                    {"role": "user", "content": f"{number}.{turn} {cut('English', next(start), size)}"},
                ]
                for turn in range(CONVERSATIONS_IN_A_ROW)
            ]
            bodies = [body("m", turn) for turn in turns]
            prompts = [bench.prompt(turn) for turn in turns]
            ways: Ways = {"encode": [functools.partial(bench.encode, prompt) for prompt in prompts]}
            for name, library in bench.libraries.items():
                ways[f"count: {name}, whole"] = _counts(library, prompts)
                ways[f"count: {name}, by segments"] = _counts(caches[name], prompts)
                ways[f"whole path: {name}"] = _whole_paths(bench.counters[name], bodies)
            ways["whole path: fastokens, in a worker process"] = [
                functools.partial(through_worker, data) for data in bodies
            ]
            samples.round(ways, number)
            samples.size_bytes = len(bodies[-1])
    tell(f"last turn: {plan.conversation_rounds} rounds")
    return samples


def _whole_paths(counter: Counter, bodies: Sequence[bytes]) -> list[Call]:
    return [functools.partial(_whole_path, counter, data) for data in bodies]


def _whole_path(counter: Counter, data: bytes) -> int:
    return counter.count_now(counter.read(CHAT, data)).demand.input_tokens


def small_chat(bench: Bench, plan: Plan) -> Samples:
    """A chat of some hundred tokens on the whole path, beside the least that anyone could do."""
    samples = Samples("small chat")
    size = int(CHAT_TOKENS * BYTES_PER_TOKEN)
    start = count(0, 251)
    fast = functools.partial(_count, bench.libraries["fastokens"])
    for number in range(plan.chat_rounds):
        chats = [[{"role": "user", "content": cut("English", next(start), size)}] for _ in range(CHATS_IN_A_ROW)]
        bodies = [body("m", chat) for chat in chats]
        prompts = [bench.prompt(chat) for chat in chats]
        ways: Ways = {
            name: [functools.partial(_bare, data, prompt, encode) for data, prompt in zip(bodies, prompts, strict=True)]
            for name, encode in (("orjson.loads + encode", bench.encode), ("orjson.loads + fastokens", fast))
        }
        for name, counter in bench.counters.items():
            ways[f"whole path: {name}"] = _whole_paths(counter, bodies)
        samples.round(ways, number)
        samples.size_bytes = len(bodies[-1])
    tell(f"small chat: {plan.chat_rounds} rounds")
    return samples


def _bare(data: bytes, prompt: str, encode: Callable[[str], int]) -> int:
    orjson.loads(data)
    return encode(prompt)


def tell(text: str) -> None:
    """Progress; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(prog="python -m bench.counting", description="Measure what a count costs.")
    parser.add_argument("--quick", action="store_true", help="less than a minute instead of minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of the model's tokenizer")
    parser.add_argument("--out", type=Path, help="page to write the result into; a full run writes docs/benchmarks.md")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    load_before = os.getloadavg()[0]
    bench = Bench(options.model)
    try:
        gc.collect()
        gc.freeze()
        measured = list(texts(bench, plan)), conversation(bench, plan), small_chat(bench, plan)
    finally:
        bench.close()
    result = report(*measured, load_average=(load_before, os.getloadavg()[0]))
    print(tables(result), file=sys.stderr if options.json else sys.stdout, flush=True)
    page = options.out or (None if options.quick else PAGE)
    if page is not None:
        write(page, section(result, " ".join(["python -m bench.counting", *arguments])), MARKS)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
