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
from extproc.counting.fast import FastBackend
from extproc.counting.segments import Library, SegmentCache, find_cuts
from extproc.counting.tokenizer import HfBackend, load, read_tokenizer
from extproc.settings import PolicySection, freeze

PAGE = ROOT / "docs" / "benchmarks.md"
MODEL_DIR = ROOT / "extproc" / "demo" / "qwen3"
CHAT = Endpoint.CHAT_COMPLETIONS
SIZES_BYTES = (1024, 16_384, 262_144)
TURNS = 20
CHAT_TOKENS = 400
CONVERSATION_TOKENS = 45_000
BYTES_PER_TOKEN = 4.3
"""First guess for English prose; sizes that are stated in the result are counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of each text size, of conversations and of small chats."""

    text_rounds: Mapping[int, int]
    conversation_rounds: int
    chat_rounds: int


FULL = Plan({1024: 400, 16_384: 100, 262_144: 24}, conversation_rounds=40, chat_rounds=1000)
QUICK = Plan({1024: 40, 16_384: 12, 262_144: 3}, conversation_rounds=4, chat_rounds=100)

Way = Callable[[], object]


@dataclass
class Samples:
    """Nanoseconds of each way to do the same thing, in rounds; `size_bytes` and `tokens` are those of one text."""

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

    def round(self, ways: Mapping[str, Way], first: int) -> None:
        """Time each of `ways` once, beginning with another one each round; AssertionError unless all give the same."""
        names = list(ways)
        found = {}
        for name in names[first % len(names) :] + names[: first % len(names)]:
            begin = time.perf_counter_ns()
            result = ways[name]()
            self.ns.setdefault(name, []).append(time.perf_counter_ns() - begin)
            found[name] = result
        assert len(set(map(str, found.values()))) == 1, f"{self.title}: {found}"


class Bench:
    """A model's tokenizer in all the ways to count with it."""

    def __init__(self, directory: Path) -> None:
        data = read_tokenizer(directory)
        self.reference = tokenizers.Tokenizer.from_buffer(data)
        loaded = load(directory)
        named = (*loaded.special_tokens.values(), *loaded.templates.values())
        self.cuts = find_cuts(self.reference, named)
        self.libraries: dict[str, Library] = {
            "huggingface": HfBackend(self.reference),
            "fastokens": FastBackend(data.decode(), self.reference),
        }
        for backend in self.libraries.values():
            backend.warm()
        policies = {name: _policy(directory, name) for name in self.libraries}
        self.counters = {name: Counter(policy) for name, policy in policies.items()}
        self.workers = Counter(policies["fastokens"], processes=1)

    def prompt(self, conversation: list[dict[str, str]]) -> str:
        """`conversation` as the model's template renders it."""
        return self.counters["huggingface"].read(CHAT, body("m", conversation)).prompts.texts[0]

    def encode(self, text: str) -> int:
        """The yardstick: what a program without this one would call."""
        return len(self.reference.encode(text, add_special_tokens=False))

    def cache(self, library: str) -> SegmentCache:
        """An empty cache that divides texts of any size."""
        made = SegmentCache(self.libraries[library], self.cuts, 0)
        made.segmented_chars_min = 0
        return made

    def close(self) -> None:
        """Stop threads and processes."""
        for counter in (*self.counters.values(), self.workers):
            counter.close()


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
    """Chats of one kind and size: one that is counted whole, and one in segments, first all new and then all known.

    Two different ones each round, because fastokens is faster with words that it has just seen.
    """
    for kind, corpus in corpora().items():
        for size in SIZES_BYTES:
            rounds = plan.text_rounds[size]
            samples = Samples(kind, size)
            for number in range(rounds):
                start = number * len(corpus) // rounds
                whole, divided = (bench.prompt(messages(kind, at, size)) for at in (start, start + len(corpus) // 2))
                caches = {library: bench.cache(library) for library in bench.libraries}
                ways: dict[str, Way] = {"encode": functools.partial(bench.encode, whole)}
                samples.round(
                    ways | {library: _counts(backend, whole) for library, backend in bench.libraries.items()}, number
                )
                for state in ("new", "known"):
                    samples.round(
                        {f"{library}, segments {state}": _counts(caches[library], divided) for library in caches},
                        number,
                    )
                samples.tokens = bench.encode(whole)
            tell(f"{kind}, {size // 1024} KB: {rounds} rounds")
            yield samples


def _counts(backend: Library | SegmentCache, text: str) -> Way:
    return lambda: backend.count_batch([text], add_special_tokens=False)[0]


def conversation(bench: Bench, plan: Plan) -> Samples:
    """The last turn of a long conversation: all but the last answer and the last question were counted before."""
    size = int(CONVERSATION_TOKENS * BYTES_PER_TOKEN) // (2 * TURNS - 1)
    start = count(0, size)
    before = [
        {"role": "assistant" if turn % 2 else "user", "content": cut("English", next(start), size)}
        for turn in range(2 * TURNS - 3)
    ]
    samples = Samples("last turn")
    caches = {library: bench.cache(library) for library in bench.libraries}
    with asyncio.Runner() as runner:

        def through_worker(data: bytes) -> int:
            return runner.run(bench.workers.count_apart(CHAT, data)).demand.input_tokens

        through_worker(body("m", before))
        for library, counter in bench.counters.items():
            counter.count_now(counter.read(CHAT, body("m", before)))
            caches[library].count_batch([bench.prompt(before)], add_special_tokens=False)
        for number in range(plan.conversation_rounds):
            new = [
                {"role": role, "content": f"{number} {cut('English', next(start), size)}"}
                for role in ("assistant", "user")
            ]
            data = body("m", before + new)
            text = bench.prompt(before + new)
            ways: dict[str, Way] = {"encode": functools.partial(bench.encode, text)}
            for library, backend in bench.libraries.items():
                ways[f"count: {library}, whole"] = _counts(backend, text)
                ways[f"count: {library}, by segments"] = _counts(caches[library], text)
                ways[f"whole path: {library}"] = _whole_path(bench.counters[library], data)
            ways["whole path: fastokens, in a worker process"] = functools.partial(through_worker, data)
            samples.round(ways, number)
            samples.size_bytes, samples.tokens = len(data), bench.encode(text)
    tell(f"last turn: {plan.conversation_rounds} rounds")
    return samples


def _whole_path(counter: Counter, data: bytes) -> Way:
    return lambda: counter.count_now(counter.read(CHAT, data)).demand.input_tokens


def small_chat(bench: Bench, plan: Plan) -> Samples:
    """A chat of some hundred tokens on the whole path, beside the least that anyone could do."""
    samples = Samples("small chat")
    size = int(CHAT_TOKENS * BYTES_PER_TOKEN)
    backend = bench.libraries["fastokens"]

    def fast(text: str) -> int:
        return backend.count_batch([text], add_special_tokens=False)[0]

    for number in range(plan.chat_rounds):
        chat = [{"role": "user", "content": cut("English", number * 251, size)}]
        data, text = body("m", chat), bench.prompt(chat)

        ways: dict[str, Way] = {
            "orjson.loads + encode": functools.partial(_bare, data, text, bench.encode),
            "orjson.loads + fastokens": functools.partial(_bare, data, text, fast),
        }
        ways |= {f"whole path: {library}": _whole_path(counter, data) for library, counter in bench.counters.items()}
        samples.round(ways, number)
        samples.size_bytes, samples.tokens = len(data), bench.encode(text)
    tell(f"small chat: {plan.chat_rounds} rounds")
    return samples


def _bare(data: bytes, text: str, encode: Callable[[str], int]) -> int:
    orjson.loads(data)
    return encode(text)


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
