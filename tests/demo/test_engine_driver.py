"""What drives the model on the event loop, with steps that take no time."""

from __future__ import annotations

import asyncio

from extproc.demo.engine import Driver, Generation
from extproc.demo.engine_model import SimpleModel


async def settle() -> None:
    """Let everything run that is due now: more turns of the loop than a step has."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_cancel_reaches_the_model() -> None:
    """A cancelled prompt leaves the model, where it would go on costing steps."""
    model = SimpleModel(prefill_tokens_per_s=1)
    driver = Driver(model)
    key = driver.admit(Generation(1, stream=False), 0, input_tokens=10**6, output_tokens=1, sequences=1)
    other = driver.admit(Generation(1, stream=False), 0, input_tokens=10**6, output_tokens=1, sequences=1)
    driver.cancel(key)
    driver.cancel(key)

    assert (1, "<SimpleModel 1 waiting, 0 decoding>") == (driver.generating, repr(model))
    driver.cancel(other)
    assert (0, "<SimpleModel 0 waiting, 0 decoding>") == (driver.generating, repr(model))


async def test_hold_keeps_what_the_running_step_yields() -> None:
    """A step that is under way when the hold comes hands its tokens out only after the release."""
    driver = Driver(SimpleModel())
    generation = Generation(1, stream=False)
    driver.admit(generation, 0, input_tokens=5, output_tokens=5, sequences=1)
    await asyncio.sleep(0)
    driver.hold(held=True)
    await settle()

    assert not generation.finished
    driver.hold(held=False)
    assert generation.finished


async def test_admitted_while_held_runs_after_release() -> None:
    """Nothing that is admitted during a hold begins before its end, and then all of it runs."""
    driver = Driver(SimpleModel())
    driver.hold(held=True)
    generations = [Generation(1, stream=False) for _ in range(3)]
    for generation in generations:
        driver.admit(generation, 0, input_tokens=5, output_tokens=5, sequences=1)
    await settle()

    assert [False] * 3 == [generation.finished for generation in generations]
    driver.hold(held=False)
    await settle()
    assert [True] * 3 == [generation.finished for generation in generations]


async def test_generation_of_several_prompts_ends_with_the_last() -> None:
    """A streamed generation hands out the progress of each prompt, and is over when all have finished."""
    driver = Driver(SimpleModel())
    generation = Generation(2, stream=True)
    for prompt, output_tokens in enumerate((3, 4)):
        driver.admit(generation, prompt, input_tokens=1, output_tokens=output_tokens, sequences=1)
    progress, finished = await generation.take()

    assert ([(0, 3), (1, 4)], True) == ([(prompt, step.tokens) for prompt, step in progress], finished)
