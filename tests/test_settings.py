"""The policy file: exact numbers, unknown keys refused, and every impossible policy named in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.core.media import MediaCharge, MediaKind
from extproc.core.policy import OverContext
from extproc.settings import PolicyError, load_policy
from tests.policies import document, policy, replica


def _load(tmp_path: Path, content: dict[str, Any]) -> list[str]:
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(content))
    try:
        load_policy(path)
    except PolicyError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("gross_tokens", "guard_ratio", "expected"),
    [(96_000, 0.10, 9_600), (70, 0.1, 7), (101, 0.1, 11), (1000, 0, 0), (3, 0.333, 1), (10**9, 0.07, 70_000_000)],
)
def test_guard_is_rounded_up_exactly(gross_tokens: int, guard_ratio: float, expected: int) -> None:
    """guard = ceil(gross * ratio) in decimal arithmetic: 70 * 0.1 is 7, not 8."""
    content = document()
    content["pools"]["spare"] = {
        "guard_ratio": guard_ratio,
        "replicas": {"spare-0": replica(9301, gross_tokens=gross_tokens)},
    }
    found = policy(pools=content["pools"]).pools["spare"].replicas[0]

    assert (expected, gross_tokens - expected) == (found.guard_tokens, found.budget_tokens)


def test_values(tmp_path: Path) -> None:
    """Seconds become nanoseconds, paths are relative to the file, `context` becomes no default ceiling."""
    path = tmp_path / "policy.yaml"
    content = document(
        model={
            **document()["models"]["m"],
            "tokenizer_dir": "tok",
            "default_ceiling": "context",
            "total_over_context": "clamp",
            "aliases": ["alias"],
        },
        limits={"response_s_max": 1.5},
        default_model="alias",
    )
    path.write_text(yaml.safe_dump(content))
    loaded = load_policy(path)
    model = loaded.model("alias")

    assert model is not None
    assert (1_500_000_000, str(tmp_path / "tok"), None, OverContext.CLAMP, "m") == (
        loaded.limits.response_ns_max,
        model.tokenizer_dir,
        model.default_ceiling_tokens,
        model.over_context,
        model.name,
    )
    assert loaded.model("other") is None


def _with(path: str, value: object) -> dict[str, Any]:
    content = document()
    section: Any = content
    *parents, last = path.split("/")
    for key in parents:
        section = section[key]
    section[last] = value
    return content


MODEL_LANES = "models/m/lanes"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (document(), []),
        (_with("typo", 1), ["typo: unknown key"]),
        (
            _with("pools/chat/replicas/chat-0/address", "engine:80"),
            ["pools.chat.replicas.chat-0.address: engine:80 is not IP:port; names are not resolved"],
        ),
        (
            _with("pools/chat/replicas/chat-0/address", "127.0.0.1:0"),
            ["pools.chat.replicas.chat-0.address: the port must be a number from 1 to 65535"],
        ),
        (
            _with("models/m/lanes", {}),
            ["models.m.lanes: a model needs at least one lane"],
        ),
        (
            _with(f"{MODEL_LANES}/interactive/queue_requests_max", 5),
            ["models.m.lanes.interactive.queue_requests_max: Input should be 0"],
        ),
        (
            _with("models/m/aliases", ["m"]),
            ["model name m is used twice, so a request for it would have two budgets"],
        ),
        (
            _with("pools/docs/replicas", {"chat-0": replica(9201)}),
            ["replica name chat-0 is used twice, so one engine would be given two budgets"],
        ),
        (
            _with("pools/docs/replicas", {"docs-0": replica(9101)}),
            ["replica address 127.0.0.1:9101 is used twice, so one engine would be given two budgets"],
        ),
        (_with(f"{MODEL_LANES}/bulk/pool", "gone"), ["model m, lane bulk: there is no pool gone"]),
        (
            _with(f"{MODEL_LANES}/bulk/total_tokens_max", 86_401),
            [
                (
                    "model m, lane bulk: a request of 86401 tokens is within the limits but no replica of pool docs "
                    "can ever hold more than 86400"
                )
            ],
        ),
        (
            _with(f"{MODEL_LANES}/interactive/input_tokens_max", 90_000),
            [
                (
                    "model m, lane interactive: a request of 91024 tokens is within the limits but no replica of pool "
                    "chat can ever hold more than 86400"
                )
            ],
        ),
        (
            _with("bypass", [{"path": "/v1/models", "pool": "gone"}]),
            ["bypass GET /v1/models: there is no pool gone, so it would be answered 503"],
        ),
        (
            _with("default_model", "gone"),
            ["default_model gone is not a model, so a request without one could not run"],
        ),
    ],
)
def test_problems(tmp_path: Path, content: dict[str, Any], expected: list[str]) -> None:
    """Each problem is one sentence that says where it is and what would happen."""
    assert expected == _load(tmp_path, content)


@pytest.mark.parametrize("text", ["{", "- 1", "", "version: \xff"])
def test_what_is_no_policy(tmp_path: Path, text: str) -> None:
    """A file that is no YAML mapping is a PolicyError that names the file."""
    path = tmp_path / "policy.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PolicyError, match=r"policy\.yaml: ."):
        load_policy(path)


def test_missing_file(tmp_path: Path) -> None:
    """A missing file is a PolicyError too."""
    with pytest.raises(PolicyError, match="No such file"):
        load_policy(tmp_path / "none.yaml")


def test_media(tmp_path: Path) -> None:
    """A flat charge is also the largest; kinds that are left out have none."""
    media = {
        "image": {"tokens": 7, "tokens_max": 900, "patch_side_pixels": 28},
        "video": {"tokens": 3000},
        "audio": {"tokens": 1, "tokens_max": 1, "tokens_per_kib": 2},
    }
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(document(model={"media": media})))

    assert {
        MediaKind.IMAGE: MediaCharge(7, 900, patch_side_pixels=28),
        MediaKind.VIDEO: MediaCharge(3000, 3000),
        MediaKind.AUDIO: MediaCharge(1, 1, tokens_per_kib=2),
    } == dict(load_policy(path).models["m"].media)


BY_SIZE = "a charge by size needs tokens_max, and tokens_max needs a charge by size"


@pytest.mark.parametrize(
    ("media", "problem"),
    [
        ({"image": {}}, "image.tokens: missing"),
        ({"image": {"tokens": 0}}, "image.tokens: Input should be greater than 0"),
        ({"image": {"tokens": 1, "tokens_per_kib": 1}}, "image.tokens_per_kib: unknown key"),
        ({"audio": {"tokens": 1, "patch_side_pixels": 1}}, "audio.patch_side_pixels: unknown key"),
        ({"image": {"tokens": 1, "patch_side_pixels": 28}}, f"image: {BY_SIZE}"),
        ({"image": {"tokens": 1, "tokens_max": 2}}, f"image: {BY_SIZE}"),
        ({"file": {"tokens": 3, "tokens_max": 2, "tokens_per_kib": 1}}, "file: tokens_max is below tokens"),
        ({"text": {"tokens": 1}}, "text: unknown key"),
    ],
)
def test_media_that_cannot_be_charged(tmp_path: Path, media: dict[str, Any], problem: str) -> None:
    """A charge is complete, positive, bounded and of its kind."""
    assert [f"models.m.media.{problem}"] == _load(tmp_path, document(model={"media": media}))
