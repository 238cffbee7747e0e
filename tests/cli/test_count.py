"""`tokenlane count` prints what a body would reserve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from extproc.cli.count import count

MODEL_DIR = str(Path(__file__).resolve().parents[2] / "extproc" / "demo" / "qwen3")
BODY = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})


def invoked(*arguments: str, body: str = BODY) -> Result:
    """The command with `body` on standard input."""
    return CliRunner().invoke(count, [*arguments], input=body)


def printed(result: Result) -> dict[str, Any]:
    """The one JSON object a run printed."""
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_body_is_counted_for_any_model_name() -> None:
    """Without a policy every model name is the model of the directory."""
    result = invoked("--model-dir", MODEL_DIR)

    assert 0 == result.exit_code, result.output
    assert {
        "input_tokens": 9,
        "prompts": [9],
        "max_output_tokens": 8,
        "sequences": 1,
        "reserved_tokens": 17,
        "lane": "interactive",
    } == printed(result)


def test_open_ceiling_is_the_context_left() -> None:
    """The context is the directory's, and a body without a ceiling reserves all of it in the bulk lane."""
    result = printed(invoked("--model-dir", MODEL_DIR, body=BODY.replace(', "max_tokens": 8', "")))

    assert (131_072, 131_063, "bulk") == (result["reserved_tokens"], result["max_output_tokens"], result["lane"])


def test_context_option_overrides_the_directory() -> None:
    """--max-model-len states the context that the engine was started with."""
    body = json.dumps({"prompt": ["Bow is to", "Aft is to"], "n": 2, "max_tokens": 100})
    arguments = ("--model-dir", MODEL_DIR, "--endpoint", "/v1/completions", "--max-model-len", "100")
    result = printed(invoked(*arguments, body=body))

    assert ([3, 4], 97, 4, 7 + 2 * (97 + 96)) == (
        result["prompts"],
        result["max_output_tokens"],
        result["sequences"],
        result["reserved_tokens"],
    )


def test_refused_body_exits_with_one() -> None:
    """A refusal is printed as an object with reason, status and message, and is an exit code of 1."""
    result = invoked("--model-dir", MODEL_DIR, "--max-model-len", "9")

    assert 1 == result.exit_code
    assert ("context_limit", 413) == (printed(result)["error"], printed(result)["status"])
    assert printed(result)["message"].startswith("prompt is too long: 9 tokens > 9 maximum")


def test_each_line_gets_a_line(tmp_path: Path) -> None:
    """With --jsonl a refused body takes its line and the run goes on, with an exit code of 0."""
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_text(f"{BODY}\n{{\n{BODY}\n", encoding="utf-8")
    result = invoked("--model-dir", MODEL_DIR, "--jsonl", str(bodies))
    lines = [json.loads(line) for line in result.stdout.splitlines()]

    assert 0 == result.exit_code
    assert [17, None, 17] == [line.get("reserved_tokens") for line in lines]
    assert {"error": "malformed_request", "status": 400, "message": "the request body is not valid JSON"} == lines[1]


def test_policy_decides_models_and_lanes(tmp_path: Path) -> None:
    """With a policy file its models, ceilings and lanes hold."""
    lanes = {"bulk": {"pool": "p", "input_tokens_max": 1000, "total_tokens_max": 2000}}
    document = {
        "version": "t",
        "pools": {"p": {"replicas": {"r": {"address": "127.0.0.1:9001", "gross_tokens": 10_000}}}},
        "models": {"m": {"tokenizer_dir": MODEL_DIR, "context_tokens_max": 8192, "lanes": lanes}},
    }
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(document), encoding="utf-8")

    known = printed(invoked("--policy", str(policy), body=BODY.replace('"any"', '"m"')))
    unknown = printed(invoked("--policy", str(policy)))

    assert "bulk" == known["lane"]
    assert ("unknown_model", 404) == (unknown["error"], unknown["status"])


@pytest.mark.parametrize("arguments", [(), ("--model-dir", "/nowhere"), ("--policy", "/nowhere.yaml")])
def test_unusable_setup_is_an_error_in_a_sentence(arguments: tuple[str, ...]) -> None:
    """What cannot be loaded is named on standard error, without a traceback."""
    result = invoked(*arguments)

    assert 0 != result.exit_code
    assert isinstance(result.exception, SystemExit)
    assert "Error: " in result.stderr
