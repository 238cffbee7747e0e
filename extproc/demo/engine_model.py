"""When a simulated engine produces which token: the timing model, without I/O and without a clock.

A model is a continuous batcher seen from outside. Jobs enter with `admit` and leave with `cancel` or when they
finish; `step` plans everything the engine computes next, together, and says how long that takes. The caller lets
that time pass, on a clock of its choice (`extproc.demo.engine` on the real one, a replay on a virtual one), hands
out the step's progress at its end, and asks for the next step.

    now_ns = 0
    while (step := model.step(now_ns)) is not None:
        now_ns += step.duration_ns
        deliver(step.progress)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

NS_PER_S = 1_000_000_000

PREFILL_CHUNK_TOKENS = 2048
"""Prompt tokens that one step takes at most: the order of vLLM's `max_num_batched_tokens`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and the sequences it starts, which share its prefill and are equally long.

    `output_tokens` (at least 1) is what each of the `sequences` generates.
    """

    key: int
    input_tokens: int
    output_tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """At the end of a step each sequence of job `key` has `tokens` more tokens, and has all of them if `finished`."""

    key: int
    tokens: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. A step that only prefills part of a prompt has no progress."""

    duration_ns: int
    progress: tuple[Progress, ...]


class EngineModel(Protocol):
    """The timing of one engine.

    Steps do not overlap and their `now_ns` never decreases. `admit` and `cancel` may come while a step runs: they
    take effect with the next one, and progress of a job that was cancelled meanwhile is the caller's to drop.
    """

    def admit(self, job: Job, now_ns: int) -> None:
        """Queue `job`, which arrived at `now_ns`; its key is not in use."""

    def cancel(self, key: int, now_ns: int) -> None:
        """Forget job `key`; one that has finished or never was is ignored."""

    def step(self, now_ns: int) -> Step | None:
        """Begin the next step at `now_ns`; None when there is nothing to compute."""


class SimpleModel:
    """Prefill and decode at constant rates, in one step together, so that a long prompt slows every decoder down.

    step time = prompt tokens in the step / prefill rate + (1 / decode rate if any sequence decodes)

    Prompts are prefilled in order of arrival, up to `chunk_tokens` a step; the step that completes a prompt yields
    its first token. Each decoding sequence gets one token a step, however many there are. A rate of 0 means that
    the work takes no time; then it is not cut into steps either.
    """

    def __init__(
        self,
        prefill_tokens_per_s: int = 0,
        decode_tokens_per_s: int = 0,
        chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    ) -> None:
        if prefill_tokens_per_s < 0 or decode_tokens_per_s < 0 or chunk_tokens < 1:
            raise ValueError("rates are 0 or more and a chunk holds at least one token")
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_ns = -(-NS_PER_S // decode_tokens_per_s) if decode_tokens_per_s else 0
        self._chunk_tokens = chunk_tokens
        self._waiting: dict[int, Job] = {}
        self._head_done_tokens = 0
        self._left_tokens: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<SimpleModel {len(self._waiting)} waiting, {len(self._left_tokens)} decoding>"

    def admit(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 (constant rates need no arrival time)
        """Queue `job` behind the prompts that wait."""
        if job.key in self._waiting or job.key in self._left_tokens:
            raise ValueError(f"job {job.key} is already here")
        if job.output_tokens < 1:
            raise ValueError(f"job {job.key} generates nothing")
        self._waiting[job.key] = job

    def cancel(self, key: int, now_ns: int) -> None:  # noqa: ARG002 (the next step begins later anyway)
        """Forget job `key`, wherever it is."""
        if self._waiting and key == next(iter(self._waiting)):
            self._head_done_tokens = 0
        self._waiting.pop(key, None)
        self._left_tokens.pop(key, None)

    def step(self, now_ns: int) -> Step | None:  # noqa: ARG002 (the rates do not change with time)
        """Decode once for all running sequences and prefill one chunk."""
        decoding = list(self._left_tokens)
        if not decoding and not self._waiting:
            return None
        prefill_tokens, prefilled = self._prefill()
        duration_ns = self._decode_ns if decoding else 0
        if self._prefill_tokens_per_s:
            duration_ns += -(-prefill_tokens * NS_PER_S // self._prefill_tokens_per_s)
        return Step(duration_ns, tuple(self._generate(key) for key in (*decoding, *prefilled)))

    def _prefill(self) -> tuple[int, list[int]]:
        """Prompt tokens taken into this step, and the jobs whose prompts they complete."""
        taken_tokens = 0
        completed: list[int] = []
        while self._waiting:
            job = next(iter(self._waiting.values()))
            rest_tokens = job.input_tokens - self._head_done_tokens
            room_tokens = self._chunk_tokens - taken_tokens if self._prefill_tokens_per_s else rest_tokens
            if rest_tokens > room_tokens:
                self._head_done_tokens += room_tokens
                return taken_tokens + room_tokens, completed
            taken_tokens += rest_tokens
            self._head_done_tokens = 0
            del self._waiting[job.key]
            self._left_tokens[job.key] = job.output_tokens
            completed.append(job.key)
        return taken_tokens, completed

    def _generate(self, key: int) -> Progress:
        left_tokens = self._left_tokens[key]
        tokens = 1 if self._decode_ns else left_tokens
        if tokens < left_tokens:
            self._left_tokens[key] = left_tokens - tokens
        else:
            del self._left_tokens[key]
        return Progress(key, tokens, tokens == left_tokens)
