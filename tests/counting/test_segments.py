"""Counts of segments add up to the count of the whole, or none are kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from extproc.core.admission import Desk
from extproc.core.policy import TokenizerBackend
from extproc.counting import Counter, probe, segments
from extproc.counting.fast import FastBackend, count_by_reference, installed
from extproc.counting.segments import CutError, SegmentCache, find_cuts, prove
from extproc.counting.tokenizer import HfBackend, load, read_tokenizer
from extproc.service.metrics import Metrics
from tests.counting.models import QWEN3
from tests.policies import policy as some_policy

MARKS = ("<|user|>", "<|end|>")
TEMPLATE = "<|user|>{{ messages[0].content }}<|end|>"


def small(
    *,
    added: Sequence[AddedToken] = (),
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    model: Any = None,
    special: bool = True,
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer that merges `ab`, with MARKS and `added` on top."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(model or models.BPE({**alphabet, "ab": len(alphabet)}, [("a", "b")]))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens([AddedToken(mark, special=special, normalized=not special) for mark in MARKS])
    made.add_tokens(list(added))
    return made


class Recorded:
    """The reference, which remembers what it was asked."""

    name = "huggingface"
    doubt = None
    inline_chars_max = 0
    segmented_chars_min = 0

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.asked: list[list[str]] = []
        self._tokenizer = tokenizer

    def warm(self) -> None:
        """Nothing is kept for a thread."""

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text."""
        self.asked.append(list(texts))
        return count_by_reference(self._tokenizer, texts, add_special_tokens=add_special_tokens)

    def check(self, text: str) -> int:
        """Tokens of `text`."""
        return self.count_batch([text], add_special_tokens=False)[0]


@pytest.fixture
def backend() -> Recorded:
    """The small tokenizer."""
    return Recorded(small())


def chat(*turns: str) -> str:
    """A rendered chat."""
    return "".join(f"<|user|>{turn}<|end|>" for turn in turns)


LONG = "ab " * 100
"""A turn that is a segment of its own."""


def test_a_grown_chat_pays_for_its_new_turn(backend: Recorded) -> None:
    """What was counted before reaches the backend no more, whichever text it is in."""
    cache = SegmentCache(backend, MARKS, 0)
    before = cache.count_batch([chat(LONG + "1", LONG + "2")], add_special_tokens=False)
    backend.asked.clear()
    after = cache.count_batch([chat(LONG + "1", LONG + "2", LONG + "3")], add_special_tokens=False)

    assert [["<|end|><|user|>" + LONG + "3"]] == backend.asked
    assert before == count_by_reference(small(), [chat(LONG + "1", LONG + "2")], add_special_tokens=False)
    assert after == count_by_reference(small(), [chat(LONG + "1", LONG + "2", LONG + "3")], add_special_tokens=False)


def test_equal_segments_of_one_call_are_counted_once(backend: Recorded) -> None:
    """Whatever is missing goes to the backend in one call without repetitions."""
    cache = SegmentCache(backend, MARKS, 0)
    cache.count_batch([chat(LONG, LONG, LONG), chat(LONG, LONG)], add_special_tokens=False)

    assert 1 == len(backend.asked)
    assert len(set(backend.asked[0])) == len(backend.asked[0]) < 5


def test_short_texts_and_single_segments_go_straight_to_the_backend(backend: Recorded) -> None:
    """Below the backend's threshold, and without a cut, a text is counted as it is and not kept."""
    backend.segmented_chars_min = 2000
    cache = SegmentCache(backend, MARKS, 0)
    texts = ["", chat(LONG, LONG), "ab " * 1000]
    for text in texts:
        cache.count_batch([text], add_special_tokens=True)

    assert [[text] for text in texts] == backend.asked
    assert 0 == cache.segments_kept


def test_kept_counts_are_bounded_and_the_unused_go_first(backend: Recorded) -> None:
    """However many segments come, no more are kept than the bound; one that is asked for again and again stays."""
    cache = SegmentCache(backend, MARKS, 0, segments_max=64)
    for number in range(300):
        cache.count_batch([chat(LONG, f"{LONG}{number}")], add_special_tokens=False)
        assert cache.segments_kept <= 64
    backend.asked.clear()
    cache.count_batch([chat(LONG, LONG + "0")], add_special_tokens=False)

    asked = [text for texts in backend.asked for text in texts]
    assert "<|user|>" + LONG not in asked
    assert any(text.endswith(LONG + "0") for text in asked)


def test_no_text_is_kept(backend: Recorded) -> None:
    """Only digests under a key of this object stay behind."""
    first, second = SegmentCache(backend, MARKS, 0), SegmentCache(backend, MARKS, 0)
    for cache in (first, second):
        cache.count_batch([chat(LONG, LONG)], add_special_tokens=False)

    assert {32} == {len(digest) for digest in first._kept._young}
    assert not first._kept._young.keys() & second._kept._young.keys()


def test_counts_of_a_doubted_backend_are_dropped(backend: Recorded) -> None:
    """When the backend falls back to the reference, so does everything that was counted before."""
    cache = SegmentCache(backend, MARKS, 0)
    cache.count_batch([chat(LONG, LONG)], add_special_tokens=False)
    backend.name = "fastokens"
    backend.asked.clear()
    cache.count_batch([chat(LONG, LONG)], add_special_tokens=False)

    assert [["<|user|>" + LONG, "<|end|><|user|>" + LONG, "<|end|>"]] == backend.asked


def test_a_shadow_check_ends_the_cache(backend: Recorded) -> None:
    """A sum that differs from a count in one piece is not answered, and nothing is looked up from then on."""
    cache = SegmentCache(backend, MARKS, 0)
    text = chat(LONG, LONG, LONG)
    with patch.object(segments, "SHADOW_EVERY", 3):
        cache.count_batch([text], add_special_tokens=False)
        for digest in cache._kept._young:
            cache._kept._young[digest] += 1
        counts = [cache.count_batch([text], add_special_tokens=False)[0] for _ in range(3)]
    whole = count_by_reference(small(), [text], add_special_tokens=False)[0]

    assert counts[0] != whole
    assert [whole, whole] == counts[1:]
    assert cache.segments_doubt is not None
    assert "tokens in segments where the whole has" in cache.segments_doubt


class Wrong(Recorded):
    """Counts one token too many until it is checked, as a library that differs from the reference does."""

    name = "fastokens"

    def count_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        """Tokens of each text."""
        counts = super().count_batch(texts, add_special_tokens=add_special_tokens)
        return [count + (self.name == "fastokens") for count in counts]

    def check(self, text: str) -> int:
        """Tokens of `text` by the reference."""
        self.name = "huggingface"
        return super().check(text)


def test_a_library_that_fails_the_shadow_check_is_what_is_doubted() -> None:
    """Where whole texts are counted wrong too, the sums are right to say so: their counts go, the cache stays."""
    cache = SegmentCache(Wrong(small()), MARKS, 0)
    text = chat(LONG, LONG + "1", LONG + "2")
    with patch.object(segments, "SHADOW_EVERY", 2):
        counts = [cache.count_batch([text], add_special_tokens=False)[0] for _ in range(3)]
    whole = count_by_reference(small(), [text], add_special_tokens=False)[0]

    assert [whole + 4, whole, whole] == counts
    assert cache.segments_doubt is None


@pytest.mark.skipif(not installed(), reason="the extra `fast` is not installed")
def test_fastokens_is_checked_by_the_reference() -> None:
    """A count of fastokens that differs from the reference's is fastokens' own doubt."""
    data = read_tokenizer(QWEN3)
    reference = tokenizers.Tokenizer.from_buffer(data)
    backend = FastBackend(data.decode(), reference)

    assert [2] == [backend.check("hello there")]
    assert backend.doubt is None
    with patch.object(backend, "_count", return_value=[3]):
        assert [2] == [backend.check("hello there")]
    assert "3 tokens where the reference counts 2" == backend.doubt


def test_a_shadow_check_is_bounded(backend: Recorded) -> None:
    """A check counts no more than a bounded part of a text, and not a segment alone."""
    cache = SegmentCache(backend, MARKS, 0)
    with patch.object(segments, "SHADOW_EVERY", 1), patch.object(segments, "SHADOW_CHARS_MAX", 1000):
        for text in (chat(*[LONG] * 9), chat("ab" * 600, "ab" * 600, "ab" * 600)):
            cache.count_batch([text], add_special_tokens=False)

    assert max(len(text) for texts in backend.asked[1:2] for text in texts) <= 1000
    assert 3 == len(backend.asked)
    assert cache.segments_doubt is None


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: small(added=[AddedToken("<x>", rstrip=True)]), "matched by what is around it"),
        (lambda: small(added=[AddedToken("<x>", lstrip=True)]), "matched by what is around it"),
        (lambda: small(added=[AddedToken("x", single_word=True)]), "matched by what is around it"),
        (lambda: small(normalizer=normalizers.Prepend("x")), "normalizer Prepend"),
        (lambda: small(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])), "Strip"),
        (lambda: small(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), "pre-tokenizer Metaspace"),
        (lambda: small(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "adds a space"),
        (lambda: small(model=models.WordLevel({"a": 0, "?": 1}, unk_token="?")), "no BPE"),
        (lambda: small(model=models.BPE({"a": 0}, [], dropout=0.5)), "no BPE"),
        (lambda: small(normalizer=normalizers.NFC(), special=False), "names no control token"),
        (lambda: small(added=[AddedToken("|>a", normalized=False), AddedToken(">", normalized=False)]), "names no"),
    ],
)
def test_a_tokenizer_that_looks_across_a_cut_has_none(made: Callable[[], tokenizers.Tokenizer], why: str) -> None:
    """Each condition that fails leaves a reason instead of cuts."""
    with pytest.raises(CutError, match=why):
        find_cuts(made(), [TEMPLATE])


def test_a_tokenizer_that_truncates_has_no_cuts() -> None:
    """Where a text is cut short, the sum of its segments is not its count."""
    made = small()
    made.enable_truncation(10)

    with pytest.raises(CutError, match="truncates"):
        find_cuts(made, [TEMPLATE])


@pytest.mark.parametrize(
    ("mark", "found"),
    [
        ("<s>", True),
        ("##", False),  # of three, the first two or the last two
        ("x<|user|>", False),  # would take the start of a cut
        ("<|user|>x", False),
        ("user", False),
        ("d|>x", False),
    ],
)
def test_cuts_share_no_character_with_another_token(mark: str, found: bool) -> None:
    """A control token is a cut when no other, and no second one of itself, can take a piece of it."""
    made = small(added=[AddedToken(mark, normalized=False)])
    cuts = find_cuts(made, [TEMPLATE, mark])

    assert found == (mark in cuts)
    assert ("<|user|>" in cuts) == ("user" not in mark)
    assert ("<|end|>" in cuts) == ("d|>" not in mark)


def test_normalized_cuts_need_a_tokenizer_without_normalizer() -> None:
    """Tokens that are found after normalization are cuts where nothing is normalized."""
    assert MARKS == find_cuts(small(special=False), [TEMPLATE])
    assert MARKS == find_cuts(small(special=False, normalizer=normalizers.Sequence([])), [TEMPLATE])


OVERLAPPING = "ab\u0301"
"""Of so few characters, tokens overlap one another and themselves, and a composed text hides them."""


@settings(deadline=None, max_examples=400)
@given(
    added=st.dictionaries(
        st.text(OVERLAPPING, min_size=1, max_size=4), st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3
    ),
    normalizer=st.sampled_from([None, normalizers.NFC(), normalizers.Replace("a", "bb")]),
    texts=st.lists(st.text(OVERLAPPING, max_size=24), min_size=8, max_size=8),
)
def test_whatever_is_a_cut_is_exact(added: dict[str, tuple[bool, bool]], normalizer: Any, texts: list[str]) -> None:
    """Of any added tokens, however they overlap, those that the conditions let pass divide every text exactly."""
    tokens = [AddedToken(text, special=special, normalized=normalized) for text, (special, normalized) in added.items()]
    made = small(added=tokens, normalizer=normalizer)
    cuts = find_cuts(made, [TEMPLATE, *added])
    texts = [f"{text}<|user|>{text}{token}{text}" for text, token in zip(texts, cycle(added), strict=False)]
    pieces = [list(segments.segments(text, segments._pattern(cuts), 1)) for text in texts]

    assert count_by_reference(made, texts, add_special_tokens=False) == [
        sum(count_by_reference(made, each, add_special_tokens=False)) for each in pieces
    ]


def test_the_proof_finds_a_tokenizer_that_breaks_the_rule() -> None:
    """A tokenizer that merges across a cut, or adds other tokens than said, differs on the probe."""
    merging = small(added=[AddedToken("b<|user|>", normalized=False)])
    adding = small()
    adding.post_processor = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 257)])
    with pytest.raises(CutError, match="other tokens in segments than in the whole"):
        prove(merging, MARKS, 0)
    with pytest.raises(CutError, match="other special tokens"):
        prove(adding, MARKS, 0)
    prove(adding, MARKS, 1)


def test_probe_puts_each_cut_beside_everything() -> None:
    """Every kind of text is beside some cut in the probe, and every cut inside of every other."""
    added = [*MARKS, "<x>"]
    text = "".join(probe.divided_texts(MARKS, added))

    assert all(f"<{cut}" in text and f"{cut}>" in text for cut in MARKS)
    assert all(whole[: probe.ENDS_CHARS] in text for whole in probe.texts(added))
    assert len(text) < 300_000


def test_threads_get_exact_counts(backend: Recorded) -> None:
    """Many threads that share a cache which is always full get the count of the whole each time."""
    cache = SegmentCache(backend, MARKS, 0, segments_max=16)
    texts = [chat(*(f"{LONG}{(number * step) % 23}" for step in range(1, 5))) for number in range(23)]
    expected = count_by_reference(small(), texts, add_special_tokens=False)
    wrong: list[str] = []

    def count(first: int) -> None:
        for turn in range(60):
            index = (first + turn * 7) % len(texts)
            if cache.count_batch([texts[index]], add_special_tokens=False) != [expected[index]]:
                wrong.append(texts[index])

    threads = [threading.Thread(target=count, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == wrong
    assert cache.segments_kept <= 16


def test_threads_keep_no_count_of_a_doubted_library() -> None:
    """When the library falls back while many threads count, every later count is the reference's."""
    library = Wrong(small())
    cache = SegmentCache(library, MARKS, 0)
    texts = [chat(f"{LONG}{number}", f"{LONG}{number + 1}") for number in range(40)]
    expected = count_by_reference(small(), texts, add_special_tokens=False)
    begin = threading.Barrier(4)

    def count(first: int) -> None:
        begin.wait()
        for text in texts[first:] + texts[:first]:
            cache.count_batch([text], add_special_tokens=False)
            if first == 0 and text is texts[20]:
                library.check("a")

    threads = [threading.Thread(target=count, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert expected == [cache.count_batch([text], add_special_tokens=False)[0] for text in texts]


def test_what_cannot_be_divided_is_counted_whole(tmp_path: Path) -> None:
    """A model directory whose tokenizer has no cuts is served without the cache, and the reason is kept."""
    small(added=[AddedToken("<x>", rstrip=True)]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    loaded = load(tmp_path).backend

    assert "the added token '<x>' is matched by what is around it" == loaded.segments_doubt
    assert [102] == loaded.count_batch([chat("ab" * 100)], add_special_tokens=False)


@dataclass(frozen=True)
class Real:
    """A model's tokenizer, its cuts, and caches with each library over it that divide whatever they can."""

    name: str
    reference: tokenizers.Tokenizer = field(repr=False)
    cuts: tuple[str, ...] = field(repr=False)
    caches: tuple[SegmentCache, ...] = field(repr=False)
    added: tuple[str, ...] = field(repr=False)


@pytest.fixture(scope="module", params=["vendored", "deepseek_v3", "gemma3", "llama3_1"])
def real(request: pytest.FixtureRequest) -> Real:
    """Each tokenizer that is here."""
    directory = (
        QWEN3 if request.param == "vendored" else request.getfixturevalue("shared") / "tokenizers" / request.param
    )
    if not directory.is_dir():
        pytest.skip(f"the tokenizer {request.param} is not here; its licence keeps it out of the repository")
    data = read_tokenizer(directory)
    reference = tokenizers.Tokenizer.from_buffer(data)
    loaded = load(directory)
    cuts = find_cuts(reference, [*loaded.special_tokens.values(), *loaded.templates.values()])
    backends = [HfBackend(reference), *([FastBackend(data.decode(), reference)] if installed() else [])]
    caches = [SegmentCache(_dividing(backend), cuts, loaded.bounds.special_tokens) for backend in backends]
    added = tuple(token.content for token in reference.get_added_tokens_decoder().values())
    return Real(request.param, reference, cuts, tuple(caches), added)


def _dividing(backend: Any) -> Any:
    backend.segmented_chars_min = 0
    return backend


def test_a_real_tokenizer_is_divided(real: Real) -> None:
    """Every model's own chat can be divided, and the proof holds."""
    assert len(real.cuts) > 3
    prove(real.reference, real.cuts, real.caches[0].count_batch([""], add_special_tokens=True)[0])


SEAMS = (
    " ",
    "\n",
    "\n\n",
    " \n",
    "  ",
    "\t",
    "\u00a0",
    "\u2581",
    "\u0301",
    "\u1161",
    "e\u0301",
    "'s",
    "1",
    "<",
    "|",
    ">",
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_segments_add_up_to_the_whole(real: Real, data: st.DataObject) -> None:
    """Any chat, with whole and broken control tokens injected anywhere, has the count of the whole, again and again."""
    cut = st.sampled_from(real.cuts)
    added = st.sampled_from(real.added)
    broken = st.tuples(st.one_of(cut, added), st.integers(0, 8)).map(lambda pair: pair[0][pair[1] :])
    fragment = st.one_of(cut, added, broken, broken.map(lambda text: text[:-1]), st.sampled_from(SEAMS), st.text())
    texts = data.draw(st.lists(st.lists(fragment, max_size=16).map("".join), min_size=1, max_size=4))
    add_special_tokens = data.draw(st.booleans())
    expected = count_by_reference(real.reference, texts, add_special_tokens=add_special_tokens)

    for cache in real.caches:
        with patch.object(segments, "SEGMENT_CHARS_MIN", 1):
            counts = [cache.count_batch(texts, add_special_tokens=add_special_tokens) for _ in range(2)]
        assert [expected, expected] == counts
        assert cache.doubt is cache.segments_doubt is None


def test_load_divides_the_vendored_model() -> None:
    """The vendored model counts by segments as loaded, with either library."""
    for backend in TokenizerBackend:
        loaded = load(QWEN3, backend).backend
        text = "".join(f"<|im_start|>user\n{LONG}{number}<|im_end|>\n" for number in range(80))
        counts = loaded.count_batch([text], add_special_tokens=True)

        assert isinstance(loaded, SegmentCache)
        assert loaded.segments_doubt is None
        assert loaded.segments_kept == 81
        assert counts == loaded.count_batch([text], add_special_tokens=True)


def test_a_metric_says_for_which_models_counts_are_kept(counter: Counter) -> None:
    """The gauge is 1 for a model that counts by segments, and 0 from the moment of a doubt."""
    metrics = Metrics(Desk(some_policy(), "i"))
    metrics.watch_tokenizers(counter)
    name, labels = "tokenlane_tokenizer_segment_cache", {"model": "engine"}

    assert 1 == metrics.registry.get_sample_value(name, labels)
    with patch.object(counter.backends()["engine"], "segments_doubt", "a difference"):
        assert 0 == metrics.registry.get_sample_value(name, labels)
