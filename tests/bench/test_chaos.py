"""The pure parts of the chaos run: its schedule, its requests, and its judgement of what clients saw."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import orjson
import pytest

from bench.chaos.requests import (
    CHAT,
    COMPLETIONS,
    DEFAULT_CEILING_TOKENS,
    GENERATING,
    STREAMS,
    output_tokens,
    prompts_tokens,
    request,
)
from bench.chaos.schedule import (
    ENGINE_FAULTS,
    ENVOY_FAULTS,
    SERVICE_FAULTS,
    FaultKind,
    Kind,
    Leave,
    Leaving,
    Shot,
    schedule,
)
from bench.chaos.verdict import DONE, NOTICE_S, Episode, Outcome, Rules, faults_of, unadmitted, unlogged
from bench.chaos.watch import Watch
from extproc.core import rejection
from extproc.core.values import Reason, Reject
from extproc.demo.engine_tokens import exact_counter
from extproc.demo.stack import QWEN3_DIR

ADDRESS = "127.0.0.1:9"
RULES = Rules({ADDRESS: "chat-0"}, response_s_max=8)
SHOT = Shot(number=3, at_ms=0, kind=Kind.CHAT_STREAM, words=20, max_tokens=5, leave=None)


def test_same_seed_same_schedule() -> None:
    """A seed gives one schedule, and another seed another."""
    assert schedule(7, 60) == schedule(7, 60)
    assert schedule(7, 60).shots != schedule(8, 60).shots
    assert schedule(7, 60).faults != schedule(8, 60).faults


def test_schedule_has_everything() -> None:
    """Five minutes hold every kind of request, leaving and fault, in order, one fault of a target at a time."""
    plan = schedule(1, 300)
    leaves = [shot.leave for shot in plan.shots if shot.leave is not None]

    assert set(Kind) == {shot.kind for shot in plan.shots}
    assert set(Leaving) == {leave.where for leave in leaves}
    assert {*ENGINE_FAULTS, *SERVICE_FAULTS, *ENVOY_FAULTS} == set(FaultKind) == {fault.kind for fault in plan.faults}
    assert sorted(shot.at_ms for shot in plan.shots) == [shot.at_ms for shot in plan.shots]
    for target in {fault.target for fault in plan.faults}:
        track = [fault for fault in plan.faults if fault.target == target]
        assert all(one.at_ms + one.down_ms < other.at_ms for one, other in pairwise(track))


def test_engine_counts_as_the_model_does() -> None:
    """The engine's count by words is the count of the model's own tokenizer and template, wherever a text begins."""
    count = exact_counter(QWEN3_DIR, ("qwen3",), 32_768)
    for kind in sorted(GENERATING):
        for number in range(12):
            shot = replace(SHOT, kind=kind, number=number, words=30 + number)
            body = request(shot).partition(b"\r\n\r\n")[2]
            path = COMPLETIONS if kind in (Kind.CHOICES_STREAM, Kind.IDS) else CHAT
            fields = orjson.loads(body)

            assert count(path, body, fields) == prompts_tokens(path, body, fields)
            assert f"POST {path} ".encode() in request(shot)


def _answer(shot: Shot, **changes: object) -> Outcome:
    """What a client sees when all is right."""
    tokens = output_tokens(shot)
    body = b'{"text":"' + b" word" * tokens + b'"}'
    if shot.kind in STREAMS:
        body = b'data: {"content":" word"}\n\n' * tokens + DONE
    headers = {
        "x-llm-replica": ADDRESS,
        "x-engine-input-tokens": "28",
        "x-llm-reserved-tokens": str(28 + tokens),
    }
    right = Outcome("envoy-1", 10.0, 11.0, 200, headers, body, whole=True)
    return replace(right, **changes)  # type: ignore[arg-type]


def _refusal(reason: Reason, **changes: object) -> Outcome:
    answer = rejection.answer(Reject(reason, "no"), policy_version="p", request_id="", jitter_ppm=0)
    right = Outcome("envoy-1", 10.0, 11.0, answer.status, dict(answer.headers), answer.body, whole=True)
    return replace(right, **changes)  # type: ignore[arg-type]


def _episode(kind: FaultKind, target: str, began_s: float = 10.5, ended_s: float = 12.0) -> list[Episode]:
    return [Episode(kind, target, began_s, ended_s)]


@pytest.mark.parametrize("kind", sorted(GENERATING))
def test_right_answers(kind: Kind) -> None:
    """A whole answer with all its tokens is right, whatever faults there are."""
    shot = replace(SHOT, kind=kind)

    assert [] == faults_of(shot, _answer(shot), [], RULES)
    assert [] == faults_of(shot, _answer(shot), _episode(FaultKind.ENGINE_KILL, "chat-0"), RULES)
    assert DEFAULT_CEILING_TOKENS == output_tokens(replace(SHOT, kind=Kind.OPEN_CEILING))


BODY = _answer(SHOT).body


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"body": BODY.removesuffix(DONE)}, "the stream ended without [DONE]"),
        ({"body": BODY.replace(b'{"content":" word"}', b"{}", 1)}, "4 of 5 tokens came"),
        ({"whole": False}, "the answer (200) broke off without a fault that explains it"),
        ({"status": 0, "headers": {}, "whole": False}, "no answer, though its Envoy ran"),
        ({"status": 502, "headers": {}}, "status 502 with reason '' is outside the contract"),
        ({"headers": {"x-engine-input-tokens": "28"}}, "header x-llm-reserved-tokens is missing"),
        (
            {"headers": {"x-engine-input-tokens": "27", "x-llm-reserved-tokens": "33"}},
            "33 tokens were reserved for 32",
        ),
    ],
)
def test_wrong_answers(changes: dict[str, object], sentence: str) -> None:
    """Without a fault, each way of being wrong is named, and a fault of the service excuses none of them."""
    outcome = _answer(SHOT, **changes)

    assert [sentence] == faults_of(SHOT, outcome, [], RULES)
    assert [sentence] == faults_of(SHOT, outcome, _episode(FaultKind.SERVICE_KILL, "tokenlane"), RULES)


@pytest.mark.parametrize(
    ("episodes", "excused"),
    [
        (_episode(FaultKind.ENGINE_KILL, "chat-0"), True),
        (_episode(FaultKind.ENGINE_KILL, "chat-1"), False),
        (_episode(FaultKind.ENGINE_SICK, "chat-0"), False),
        (_episode(FaultKind.ENGINE_KILL, "chat-0", 11.5, 12.5), False),
        (_episode(FaultKind.ENGINE_KILL, "chat-0", 1.0, 9.9 - NOTICE_S), False),
        (_episode(FaultKind.ENVOY_TERM, "envoy-1"), True),
        (_episode(FaultKind.ENVOY_TERM, "envoy-2"), False),
    ],
)
def test_what_excuses_a_broken_answer(episodes: list[Episode], excused: bool) -> None:
    """Only the end of its own engine or its own Envoy, while it ran."""
    assert excused == (not faults_of(SHOT, _answer(SHOT, whole=False), episodes, RULES))


def test_a_long_answer_may_be_cut() -> None:
    """Envoy ends an answer at the longest response; not before."""
    broken = _answer(SHOT, whole=False, began_s=10.0)

    assert [] == faults_of(SHOT, replace(broken, ended_s=18.1), [], RULES)
    assert faults_of(SHOT, replace(broken, ended_s=17.9), [], RULES)


@pytest.mark.parametrize(
    ("kind", "reason", "episodes", "right"),
    [
        (Kind.CHAT, Reason.TOKEN_BUDGET_EXHAUSTED, [], True),
        (Kind.MALFORMED, Reason.MALFORMED_REQUEST, [], True),
        (Kind.CHAT, Reason.MALFORMED_REQUEST, [], False),
        (Kind.MALFORMED, Reason.TOKEN_BUDGET_EXHAUSTED, [], False),
        (Kind.OVER_LIMIT, Reason.CONTEXT_LIMIT, [], True),
        (Kind.UNKNOWN_MODEL, Reason.UNKNOWN_MODEL, [], True),
        (Kind.BYPASS, Reason.TOKEN_BUDGET_EXHAUSTED, [], False),
        (Kind.CHAT, Reason.ADMISSION_UNAVAILABLE, [], False),
        (Kind.CHAT, Reason.ADMISSION_UNAVAILABLE, _episode(FaultKind.SERVICE_KILL, "tokenlane"), True),
        (Kind.CHAT, Reason.DRAINING, _episode(FaultKind.SERVICE_KILL, "tokenlane"), False),
        (Kind.CHAT, Reason.ENGINE_BUSY, _episode(FaultKind.ENGINE_BUSY, "chat-0"), True),
        (Kind.CHAT, Reason.CAPACITY_UNAVAILABLE, _episode(FaultKind.ENGINE_SICK, "chat-0"), True),
        (Kind.CHAT, Reason.CAPACITY_UNAVAILABLE, _episode(FaultKind.SERVICE_KILL, "tokenlane"), False),
        (Kind.CHAT, Reason.UPSTREAM_TIMEOUT, [], False),
        (Kind.CHAT, Reason.INTERNAL_ERROR, _episode(FaultKind.SERVICE_KILL, "tokenlane"), False),
    ],
)
def test_refusals(kind: Kind, reason: Reason, episodes: list[Episode], right: bool) -> None:
    """A refusal is right for what the request is, or for a fault of what it names."""
    assert right == (not faults_of(replace(SHOT, kind=kind), _refusal(reason), episodes, RULES))


def test_refusal_shape() -> None:
    """Status, Retry-After and body of a refusal are held to the contract."""
    right = _refusal(Reason.QUEUE_FULL)
    without = {name: value for name, value in right.headers.items() if name != "retry-after"}

    assert ["queue_full came with status 503 instead of 429"] == faults_of(SHOT, replace(right, status=503), [], RULES)
    assert ["queue_full came with Retry-After ''"] == faults_of(SHOT, replace(right, headers=without), [], RULES)
    assert ["the body of queue_full is b'{}'"] == faults_of(SHOT, replace(right, body=b"{}"), [], RULES)


def test_clients_that_left() -> None:
    """Nothing is asked of what a client did not wait for, but what it saw has to be right."""
    leaving = replace(SHOT, leave=Leave(Leaving.READING, 100))

    assert [] == faults_of(leaving, Outcome("envoy-1", 1, 2, left=True), [], RULES)
    assert [] == faults_of(leaving, _answer(SHOT, whole=False, left=True, body=b""), [], RULES)
    assert faults_of(leaving, Outcome("envoy-1", 1, 2, 502, whole=False, left=True), [], RULES)


def test_unadmitted() -> None:
    """Each request that an engine saw was admitted to it, once, and no refused one was admitted."""
    admitted = {"a": "chat-0", "b": "chat-1"}

    assert [] == list(unadmitted({"chat-0": ["a"], "chat-1": []}, admitted, ["c"]))
    assert ["chat-0 saw c, which was never admitted"] == list(unadmitted({"chat-0": ["c"]}, admitted, []))
    assert ["chat-0 saw b, which was admitted to chat-1"] == list(unadmitted({"chat-0": ["b"]}, admitted, []))
    assert ["a reached engines 2 times"] == list(unadmitted({"chat-0": ["a", "a"]}, admitted, []))
    assert ["a was refused by the service and admitted"] == list(unadmitted({}, admitted, ["a"]))
    assert [] == list(unadmitted({"chat-0": ["c"]}, admitted, [], {"c"}))


def test_a_killed_service_takes_its_last_lines_along() -> None:
    """Only what was under way in the moment before a kill can have been admitted without a line in the log."""
    kill = Episode(FaultKind.SERVICE_KILL, "tokenlane", 10.0)
    spans = {"before": (8.0, 9.4), "lost": (8.0, 9.6), "running": (9.9, 12.0), "after": (10.1, 11.0)}
    shots = [(name, Outcome("envoy-1", *span)) for name, span in spans.items()]

    assert {"lost", "running"} == unlogged(shots, [kill])
    assert set() == unlogged(shots, [replace(kill, kind=FaultKind.SERVICE_TERM)])


def test_watch() -> None:
    """More tokens than the budget are told once for each new height, and the peak counts even between samples."""
    seen = Watch({"chat-0": 100})
    for running, most in ((50, 100), (10, 100), (10, 101), (0, 101), (102, 102)):
        seen.take("chat-0", 1.0, running, most)

    assert ["1.000 s: chat-0 ran 101 tokens (10 now) of 100", "1.000 s: chat-0 ran 102 tokens (102 now) of 100"] == (
        seen.over
    )
    assert {"chat-0": 102} == seen.tokens_max
    assert 5 == seen.samples
