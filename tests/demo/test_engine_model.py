"""The timing of the simulated engine, on a clock that only the test moves."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.demo.engine_model import Job, Progress, SimpleModel, Step

MS = 1_000_000


def run(model: SimpleModel, now_ns: int = 0) -> list[tuple[int, tuple[Progress, ...]]]:
    """All steps until the model is idle: when each ends, and its progress."""
    steps = []
    while (step := model.step(now_ns)) is not None:
        now_ns += step.duration_ns
        steps.append((now_ns, step.progress))
    return steps


def test_prompt_is_prefilled_in_chunks_and_then_decoded() -> None:
    """A prompt takes its tokens / prefill rate to the first token and 1 / decode rate for each later one."""
    model = SimpleModel(prefill_tokens_per_s=1000, decode_tokens_per_s=20, chunk_tokens=100)
    model.admit(Job(1, input_tokens=250, output_tokens=3), 0)

    expected = [
        (100 * MS, ()),
        (200 * MS, ()),
        (250 * MS, (Progress(1, 1, finished=False),)),
        (300 * MS, (Progress(1, 1, finished=False),)),
        (350 * MS, (Progress(1, 1, finished=True),)),
    ]
    assert expected == run(model)


def test_long_prompt_slows_decoders_down() -> None:
    """While another prompt is prefilled a decoding sequence gets a token a chunk, not a token a decode step."""
    model = SimpleModel(prefill_tokens_per_s=1000, decode_tokens_per_s=100, chunk_tokens=100)
    model.admit(Job(1, input_tokens=1, output_tokens=4), 0)
    first = model.step(0)
    model.admit(Job(2, input_tokens=200, output_tokens=1), MS)

    expected = [
        (1 * MS + 110 * MS, (Progress(1, 1, finished=False),)),
        (1 * MS + 220 * MS, (Progress(1, 1, finished=False), Progress(2, 1, finished=True))),
        (1 * MS + 230 * MS, (Progress(1, 1, finished=True),)),
    ]
    assert Step(MS, (Progress(1, 1, finished=False),)) == first
    assert expected == run(model, MS)


def test_prompts_share_a_chunk_in_order_of_arrival() -> None:
    """A chunk goes to the oldest prompt first, and what it leaves goes to the next."""
    model = SimpleModel(prefill_tokens_per_s=1000, decode_tokens_per_s=10, chunk_tokens=100)
    for key in (1, 2, 3):
        model.admit(Job(key, input_tokens=60, output_tokens=1), 0)

    expected = [
        (100 * MS, (Progress(1, 1, finished=True),)),
        (180 * MS, (Progress(2, 1, finished=True), Progress(3, 1, finished=True))),
    ]
    assert expected == run(model)


def test_rates_of_zero_take_no_time() -> None:
    """Without rates a job is done in one step of no duration, however long it is."""
    model = SimpleModel()
    model.admit(Job(1, input_tokens=10**6, output_tokens=10**6, sequences=3), 7)

    assert [(7, (Progress(1, 10**6, finished=True),))] == run(model, 7)


def test_decoders_run_together() -> None:
    """A decode step gives every running sequence a token, at the price of one."""
    model = SimpleModel(decode_tokens_per_s=10)
    for key in range(50):
        model.admit(Job(key, input_tokens=1, output_tokens=3), 0)

    assert [end_ns for end_ns, _ in run(model)] == [0, 100 * MS, 200 * MS]


def test_cancelled_prompt_leaves_no_work_behind() -> None:
    """A prompt cancelled half way costs no more time, and the next one starts from its own first token."""
    model = SimpleModel(prefill_tokens_per_s=1000, decode_tokens_per_s=10, chunk_tokens=100)
    model.admit(Job(1, input_tokens=1000, output_tokens=1), 0)
    model.admit(Job(2, input_tokens=100, output_tokens=1), 0)
    model.step(0)
    model.cancel(1, 50 * MS)

    assert [(200 * MS, (Progress(2, 1, finished=True),))] == run(model, 100 * MS)


def test_cancelled_decoder_gets_no_more_tokens() -> None:
    """A decoding job that is cancelled is gone at the next step; unknown keys are ignored."""
    model = SimpleModel(decode_tokens_per_s=10)
    model.admit(Job(1, input_tokens=1, output_tokens=9), 0)
    model.step(0)
    model.cancel(1, 0)
    model.cancel(1, 0)
    model.cancel(99, 0)

    assert model.step(0) is None


def test_cancelling_a_waiting_prompt_keeps_the_progress_of_the_first() -> None:
    """What has been prefilled of the first prompt stays when one behind it is cancelled."""
    model = SimpleModel(prefill_tokens_per_s=1000, decode_tokens_per_s=10, chunk_tokens=100)
    model.admit(Job(1, input_tokens=150, output_tokens=1), 0)
    model.admit(Job(2, input_tokens=500, output_tokens=1), 0)
    model.step(0)
    model.cancel(2, 0)

    assert [(150 * MS, (Progress(1, 1, finished=True),))] == run(model, 100 * MS)


def test_key_in_use_and_empty_output_are_refused() -> None:
    """A key that waits or decodes cannot be admitted again, nor a job that generates nothing."""
    model = SimpleModel(decode_tokens_per_s=10)
    model.admit(Job(1, input_tokens=1, output_tokens=2), 0)
    with pytest.raises(ValueError, match="job 1 is already here"):
        model.admit(Job(1, input_tokens=1, output_tokens=2), 0)
    model.step(0)
    with pytest.raises(ValueError, match="job 1 is already here"):
        model.admit(Job(1, input_tokens=1, output_tokens=2), 0)
    with pytest.raises(ValueError, match="job 2 generates nothing"):
        model.admit(Job(2, input_tokens=1, output_tokens=0), 0)

    assert "<SimpleModel 0 waiting, 1 decoding>" == repr(model)


@given(
    jobs=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(0, 30)), max_size=12),
    prefill_tokens_per_s=st.sampled_from([0, 1, 333, 1000]),
    decode_tokens_per_s=st.sampled_from([0, 7, 1000]),
    chunk_tokens=st.integers(1, 128),
)
def test_every_job_gets_its_tokens_and_finishes_once(
    jobs: list[tuple[int, int, int]], prefill_tokens_per_s: int, decode_tokens_per_s: int, chunk_tokens: int
) -> None:
    """Whenever jobs arrive, each gets exactly its output, finishes with its last token, and prefill takes its time."""
    model = SimpleModel(prefill_tokens_per_s, decode_tokens_per_s, chunk_tokens)
    pending = dict(enumerate(jobs))
    got_tokens: defaultdict[int, int] = defaultdict(int)
    finished: list[int] = []
    now_ns = number = 0
    while True:
        for key in [key for key, (_, _, arrival) in pending.items() if arrival <= number]:
            input_tokens, output_tokens, _ = pending.pop(key)
            model.admit(Job(key, input_tokens, output_tokens), now_ns)
        step = model.step(now_ns)
        number += 1
        if step is None and not pending:
            break
        for progress in step.progress if step else ():
            assert progress.key not in finished
            got_tokens[progress.key] += progress.tokens
            finished += [progress.key] if progress.finished else []
        now_ns += step.duration_ns if step else 0

    assert {key: output_tokens for key, (_, output_tokens, _) in enumerate(jobs)} == got_tokens
    assert sorted(got_tokens) == sorted(finished)
    if prefill_tokens_per_s:
        assert now_ns * prefill_tokens_per_s >= sum(job[0] for job in jobs) * 1_000_000_000
