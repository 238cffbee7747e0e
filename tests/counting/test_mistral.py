"""Chats of Mistral's models have the tokens that the engine gives them under `--tokenizer-mode mistral`."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from extproc.cli.count import count
from extproc.core.policy import Endpoint
from extproc.core.stream import Counted
from extproc.core.values import Fault
from extproc.counting import Counter, TokenizerError
from tests.counting.models import CHAT, CLAMP, COMPLETIONS, DATA, counted, outcome, policy, status, user

VOCABULARIES = ("tekken_240911.json", "mistral_instruct_tokenizer_240323.model.v3")
CASES = json.loads((DATA / "mistral.json").read_bytes())["cases"]


def test_absent_extra_is_named_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library nothing is counted in its place: the start stops, and says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TokenizerError, match=r"pip install 'tokenlane\[mistral\]'"):
        Counter(policy({"m": {"tokenizer_dir": tmp_path, "tokenizer_mode": "mistral"}}))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with the vocabularies that the library brings with it."""
    library = pytest.importorskip("mistral_common", reason="the extra `mistral` is not installed")
    pytest.importorskip("sentencepiece")
    found = {}
    for name, file in zip(VOCABULARIES, ("tekken.json", "tokenizer.model.v3"), strict=True):
        found[name] = tmp_path_factory.mktemp("mistral")
        shutil.copy(Path(library.__file__).parent / "data" / name, found[name] / file)
    return found


@pytest.fixture(scope="module")
def mistral(directories: dict[str, Path]) -> Iterator[Counter]:
    """A model for each vocabulary, by its name."""
    modes = {name: {**CLAMP, "tokenizer_dir": path, "tokenizer_mode": "mistral"} for name, path in directories.items()}
    found = Counter(policy(modes, default_model=VOCABULARIES[0]))
    yield found
    found.close()


@pytest.mark.parametrize("case", CASES, ids=[f"{case['vocabulary'][:6]}-{case['name']}" for case in CASES])
def test_chat_is_counted_as_the_engine_counts_it(case: dict[str, Any], mistral: Counter) -> None:
    """Tokens, or the refusal, equal what vLLM's own renderer made of the body."""
    result = outcome(mistral, {**case["body"], "model": case["vocabulary"]})

    assert case["status"] == status(result)
    if isinstance(result, Counted):
        assert (case["tokens"],) == result.prompts_tokens


TEXTS = st.lists(
    st.sampled_from(["[INST]", "</s>", "<s>", "[TOOL_CALLS]", " ", "\n", "你好", "word"]) | st.text(max_size=3)
)


@given(turns=st.lists(st.tuples(TEXTS.map("".join), TEXTS.map("".join)), min_size=1, max_size=3))
def test_count_is_the_length_of_the_librarys_ids(turns: list[tuple[str, str]], mistral: Counter) -> None:
    """Any chat that the library takes has as many tokens as it gives ids."""
    request = pytest.importorskip("mistral_common.protocol.instruct.request").ChatCompletionRequest
    backend: Any = mistral.backends()[VOCABULARIES[0]]
    said = [
        message
        for asked, answered in turns
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": answered + "."})
    ][:-1]
    expected = backend._tokenizer.encode_chat_completion(request.from_openai(messages=said)).tokens

    assert (len(expected),) == counted(mistral, {"messages": said}).prompts_tokens


@pytest.mark.parametrize("name", VOCABULARIES)
def test_completions_are_texts_without_control_tokens(name: str, mistral: Counter) -> None:
    """A text gets the token that begins it, unless the request leaves that out, and never another one."""
    text = {"model": name, "prompt": "[INST] hello </s>"}
    whole = counted(mistral, text, COMPLETIONS).demand.input_tokens
    bare = counted(mistral, {**text, "add_special_tokens": False}, COMPLETIONS).demand.input_tokens

    assert whole == bare + 1
    assert bare > 5


@pytest.mark.parametrize(
    "content",
    [["x"], [{"type": "refusal", "refusal": "x"}], [{"text": "x"}], [{"type": "image_url", "image_url": {"url": "x"}}]],
)
def test_other_content_is_refused(content: list[Any], mistral: Counter) -> None:
    """Nothing but texts can be counted exactly."""
    assert 400 == status(outcome(mistral, {"messages": [{"role": "user", "content": content}]}))


async def test_refusal_of_the_library_is_the_clients_fault(mistral: Counter) -> None:
    """What the library finds out while it counts is a 400, not a failed tokenizer, and quotes nobody."""
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "abcdefghi", "content": "secret"}]
    draft = mistral.read(CHAT, json.dumps({"messages": messages}).encode())

    assert not mistral.counts_quickly(draft)
    assert draft.bounds() is None
    with pytest.raises(Fault, match="mistral-common refuses this chat") as caught:
        await mistral.count(draft)
    assert 400 == status(caught.value)
    assert "secret" not in caught.value.message


async def test_workers_count_chats_of_any_size(directories: dict[str, Path]) -> None:
    """Where there are worker processes, they count: the library would hold up the event loop."""
    model = {**CLAMP, "tokenizer_dir": directories[VOCABULARIES[1]], "tokenizer_mode": "mistral"}
    counter = Counter(policy({"m": model}, default_model="m"), processes=1)
    draft = counter.read(CHAT, json.dumps(user()).encode())
    apart, here = await counter.count(draft), counter.count_now(draft)
    assert counter._workers is not None
    started = counter._workers._pool is not None
    counter.close()

    assert here == apart
    assert started


@pytest.mark.parametrize("takes_effort", [True, False])
def test_effort_is_handed_on_from_v15(takes_effort: bool, mistral: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older tokenizers would refuse an effort, so they are not told of it."""
    backend: Any = mistral.backends()[VOCABULARIES[0]]
    monkeypatch.setattr(backend, "takes_effort", takes_effort)
    (text,) = mistral.read(CHAT, json.dumps(user(reasoning_effort="high")).encode()).prompts.texts

    assert takes_effort is ("high" in text)


def test_other_endpoints_are_refused(mistral: Counter) -> None:
    """The engine goes other ways to the prompt there."""
    assert 404 == status(outcome(mistral, {"input": "x"}, Endpoint.RESPONSES))
    assert 404 == status(outcome(mistral, {"messages": [user()["messages"]]}, Endpoint.CHAT_COMPLETIONS_BATCH))


def test_directory_without_a_vocabulary_is_named(directories: dict[str, Path], tmp_path: Path) -> None:
    """A directory in which the library finds nothing stops the start."""
    assert directories
    with pytest.raises(TokenizerError, match="finds no tokenizer"):
        Counter(policy({"m": {"tokenizer_dir": tmp_path, "tokenizer_mode": "mistral"}}))


def test_command_counts_by_mode(directories: dict[str, Path]) -> None:
    """`tokenlane count` takes the mode as an option."""
    arguments = [
        "--model-dir",
        str(directories[VOCABULARIES[0]]),
        "--tokenizer-mode",
        "mistral",
        "--max-model-len",
        "100",
    ]
    result = CliRunner().invoke(count, arguments, input=json.dumps(user()))

    assert 0 == result.exit_code, result.output
    assert 4 == json.loads(result.stdout)["input_tokens"]
