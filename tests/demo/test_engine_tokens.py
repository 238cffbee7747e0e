"""Exact counts in the simulated engine."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from pathlib import Path

import pytest

from extproc.demo.engine_process import EngineProcess
from extproc.demo.engine_request import CHAT_PATH, COMPLETIONS_PATH, RequestError
from extproc.demo.engine_tokens import exact_counter

TOKENIZER = Path(__file__).resolve().parents[2] / "extproc" / "demo" / "qwen3"


def test_counts_are_those_of_the_tokenizer() -> None:
    """A chat counts with its template around the text, a completion as its text, ids as they are."""
    count = exact_counter(TOKENIZER, ("qwen3", "alias"), 1000)

    def counted(path: str, **fields: object) -> tuple[int, ...]:
        return count(path, json.dumps(fields).encode(), fields)

    # <|im_start|> user \n hello <|im_end|> \n <|im_start|> assistant \n
    assert (9,) == counted(CHAT_PATH, model="alias", messages=[{"role": "user", "content": "hello"}])
    assert (1, 2, 3) == (
        *counted(COMPLETIONS_PATH, prompt=["hello", "hello world"]),
        *counted(COMPLETIONS_PATH, prompt=[1, 2, 3]),
    )


@pytest.mark.parametrize(("fields", "status"), [({"model": "other"}, 404), ({"prompt": [10**9]}, 400)])
def test_faults_become_refusals(fields: dict[str, object], status: int) -> None:
    """What counting refuses the engine refuses, an unknown model with 404 and the rest with 400."""
    count = exact_counter(TOKENIZER, ("qwen3",), 1000)
    with pytest.raises(RequestError) as caught:
        count(COMPLETIONS_PATH, json.dumps({"prompt": "x", **fields}).encode(), fields)

    assert status == caught.value.status


def test_engine_with_a_tokenizer_reports_exact_usage() -> None:
    """With a tokenizer the usage is exact, for short bodies and for those counted off the event loop."""
    with EngineProcess("exact", tokenizer_dir=TOKENIZER) as engine:
        used = []
        for text in ("hello", "hello " * 20_000):
            connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10)
            body = json.dumps({"prompt": text.strip(), "max_tokens": 1})
            connection.request("POST", COMPLETIONS_PATH, body, {"content-type": "application/json"})
            with closing(connection):
                used.append(json.load(connection.getresponse())["usage"]["prompt_tokens"])

    assert [1, 20_000] == used
