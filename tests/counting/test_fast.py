"""fastokens counts only while it is proven and undoubted; the reference's answer is the one that holds."""

from __future__ import annotations

import importlib.util
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.policy import TokenizerBackend
from extproc.counting import Counter, fast, probe
from extproc.counting.fast import FastBackend, count_by_reference
from extproc.counting.tokenizer import load
from tests.counting.models import COMPLETIONS, QWEN3, policy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fastokens") is None, reason="the extra `fast` is not installed"
)


@pytest.fixture(scope="module")
def source() -> str:
    """Qwen3's tokenizer.json."""
    return lzma.decompress((QWEN3 / "tokenizer.json.xz").read_bytes()).decode()


@pytest.fixture(scope="module")
def reference(source: str) -> tokenizers.Tokenizer:
    """The reference tokenizer."""
    return tokenizers.Tokenizer.from_str(source)


@pytest.fixture(scope="module")
def proven(source: str, reference: tokenizers.Tokenizer) -> FastBackend:
    """A backend that has seen the whole probe."""
    backend = FastBackend(source, reference)
    backend.prove()
    return backend


def _count(backend: FastBackend, *texts: str) -> list[int]:
    return backend.count_batch(texts, add_special_tokens=False)


def test_proven_on_the_probe(proven: FastBackend) -> None:
    """Qwen3's tokenizer gives the reference's ids for every probe text, so fastokens counts."""
    assert (None, "fastokens") == (proven.doubt, proven.name)


@given(
    st.lists(
        st.one_of(
            st.text(max_size=40),
            st.sampled_from(
                ["<|im_start|>", "<|im_end|>", "<think>", "</tool_call>", " ", "\n", "  \n", "'\u017f", "e\u0301"]
            ),
        ),
        max_size=12,
    ).map("".join)
)
def test_counts_as_the_reference(proven: FastBackend, reference: tokenizers.Tokenizer, text: str) -> None:
    """Any text, with whole and broken control tokens in it, has the reference's count."""
    assert count_by_reference(reference, [text, text + "x"], add_special_tokens=True) == proven.count_batch(
        [text, text + "x"], add_special_tokens=True
    )


def test_probe_holds_every_added_token(reference: tokenizers.Tokenizer) -> None:
    """Each added token is in the probe whole and broken, beside thousands of other characters."""
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    text = "".join(probe.texts(added))

    assert all(token in text and token[:-1] + " " in text for token in added)
    assert 100_000 < len(text.encode()) < 1_000_000
    assert len(set(text)) > 5_000


class _Off:
    """A tokenizer that differs on one word of the probe, and counts one token too many."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        return self._tokenizer.encode(text.replace("rain", "snow"), add_special_tokens=add_special_tokens)

    def encode_batch_flat(self, texts: Sequence[str], *, add_special_tokens: bool) -> Any:
        return self._tokenizer.encode_batch_flat([text + " x" for text in texts], add_special_tokens=add_special_tokens)


def test_a_difference_in_the_probe_is_a_doubt(source: str, reference: tokenizers.Tokenizer) -> None:
    """A tokenizer that differs on one word of the probe never counts."""
    backend = FastBackend(source, reference)
    backend._tokenizer = _Off(backend._tokenizer)
    backend.prove()

    assert "huggingface" == backend.name
    assert [2] == _count(backend, "hello there")


def test_a_shadow_check_ends_it(source: str, reference: tokenizers.Tokenizer) -> None:
    """A difference found in service is answered with the reference's count, from then on."""
    backend = FastBackend(source, reference)
    backend._tokenizer = _Off(backend._tokenizer)
    with patch.object(fast, "SHADOW_EVERY", 3):
        counts = [_count(backend, "hello there") for _ in range(5)]

    assert [[3], [3], [2], [2], [2]] == counts
    assert "3 tokens where the reference counts 2" == backend.doubt


def test_an_error_ends_it(source: str, reference: tokenizers.Tokenizer) -> None:
    """An exception, even one that is no Exception, loses nothing: the reference counts this text and all later ones."""

    class Panic(BaseException):
        pass

    backend = FastBackend(source, reference)
    with patch.object(backend, "_count", side_effect=Panic("boom")):
        assert [2] == _count(backend, "hello there")
    assert [2] == _count(backend, "hello there")
    assert backend.doubt == "an error: Panic('boom')"


def test_what_fastokens_cannot_load_the_reference_counts(tmp_path: Path) -> None:
    """A tokenizer.json that fastokens refuses is served by the reference, and the reason is kept."""
    document = orjson.loads(lzma.decompress((QWEN3 / "tokenizer.json.xz").read_bytes()))
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with patch.object(FastBackend, "__init__", side_effect=ValueError("no")):
        backend = load(tmp_path, TokenizerBackend.AUTO).backend

    assert ("huggingface", "it does not load: no") == (backend.name, backend.doubt)


async def test_small_texts_are_counted_in_place() -> None:
    """With fastokens a small text counts quickly, and a large one is counted in a thread."""
    counter = Counter(policy({"m": {"tokenizer_backend": "auto"}}, default_model="m"))
    counter.warm()
    small = counter.read(COMPLETIONS, b'{"prompt": "hello there"}')
    large = counter.read(COMPLETIONS, orjson.dumps({"prompt": "hello there " * 1500}))
    quickly = counter.counts_quickly(small), counter.counts_quickly(large)
    tokens = counter.count_now(small).demand.input_tokens, (await counter.count(large)).demand.input_tokens
    counter.close()

    assert (True, False) == quickly
    assert (2, 3001) == tokens
    assert {"m": "fastokens"} == {model: backend.name for model, backend in counter.backends().items()}
