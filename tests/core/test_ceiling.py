"""The output ceiling of a prompt in its context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.ceiling import Ceiling, Run, run
from extproc.core.policy import OverContext
from extproc.core.values import Fault, Reason

CLAMP, REFUSE = OverContext.CLAMP, OverContext.REFUSE


def ceiling(asked: int | None, over: OverContext = REFUSE, default: int | None = 1024, context: int = 8192) -> Ceiling:
    """A ceiling in field max_tokens."""
    return Ceiling("max_tokens", asked, default, context, over)


@pytest.mark.parametrize("asked", [0, -1])
def test_ceiling_below_one_is_malformed(asked: int) -> None:
    """A sequence generates at least one token."""
    with pytest.raises(Fault) as caught:
        ceiling(asked).check()

    assert Reason.MALFORMED_REQUEST is caught.value.reason
    assert "max_tokens" == caught.value.param


@pytest.mark.parametrize("over", list(OverContext))
def test_ceiling_above_the_context_is_refused_under_every_policy(over: OverContext) -> None:
    """A ceiling that no prompt could make right is a context limit, also where ceilings are clamped."""
    with pytest.raises(Fault) as caught:
        ceiling(8193, over).check()

    assert Reason.CONTEXT_LIMIT is caught.value.reason
    assert caught.value.message.startswith("prompt is too long: 8193 tokens > 8192 maximum")
    assert {"input_tokens": None, "max_output_tokens": 8193, "context_tokens_max": 8192} == caught.value.details


def test_ceiling_equal_to_the_context_passes_the_first_check() -> None:
    """Only the prompt decides about a ceiling within the context."""
    ceiling(8192).check()
    ceiling(None).check()


@pytest.mark.parametrize("over", list(OverContext))
@pytest.mark.parametrize("tokens", [8192, 9000])
def test_prompt_that_fills_the_context_is_refused(tokens: int, over: OverContext) -> None:
    """Without room for one token of output a prompt cannot run."""
    with pytest.raises(Fault) as caught:
        run(ceiling(None, over), [tokens], 1)

    assert Reason.CONTEXT_LIMIT is caught.value.reason
    assert caught.value.message.startswith(f"prompt is too long: {tokens} tokens > 8192 maximum")
    assert tokens == caught.value.details["input_tokens"]


def test_asked_total_over_the_context_is_refused() -> None:
    """Input plus an asked ceiling above the context is a context limit that names the numbers."""
    with pytest.raises(Fault) as caught:
        run(ceiling(1000), [7193], 1)

    assert caught.value.message.startswith("prompt is too long: 8193 tokens > 8192 maximum")
    assert {"input_tokens": 7193, "max_output_tokens": 1000, "context_tokens_max": 8192} == caught.value.details


def test_asked_total_equal_to_the_context_runs() -> None:
    """The context may be used to the last token."""
    assert Run(1000, 1000) == run(ceiling(1000), [7192], 1)


def test_asked_ceiling_is_clamped_to_what_is_left() -> None:
    """Under clamp a ceiling shrinks to the rest of the context."""
    assert Run(999, 999) == run(ceiling(1000, CLAMP), [7193], 1)


@pytest.mark.parametrize("over", list(OverContext))
def test_default_ceiling_shrinks_under_every_policy(over: OverContext) -> None:
    """Nobody is refused for a ceiling they did not ask for."""
    assert Run(100, 100) == run(ceiling(None, over), [8092], 1)


def test_default_of_none_is_all_the_context_left() -> None:
    """A model without a default ceiling lets a sequence run to the end of its context."""
    assert Run(8182, 8182) == run(ceiling(None, default=None), [10], 1)


def test_sequences_and_prompts_multiply() -> None:
    """Each of n sequences of each prompt may run to its own ceiling, and the largest is reported."""
    assert Run(100, 2 * (100 + 92)) == run(ceiling(100, CLAMP), [10, 8100], 2)


def test_lower_bound_of_the_input_refuses_early() -> None:
    """A prompt too long by its size is refused before it is counted, and the message says so."""
    with pytest.raises(Fault) as caught:
        ceiling(None).check_input(9000, exact=False)

    assert "lower bound" in caught.value.message


@given(
    asked=st.none() | st.integers(1, 8192),
    default=st.none() | st.integers(1, 9000),
    over=st.sampled_from(OverContext),
    prompts=st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    sequences=st.integers(1, 5),
)
def test_what_runs_fits_the_context(
    asked: int | None, default: int | None, over: OverContext, prompts: list[int], sequences: int
) -> None:
    """Whatever is not refused fits the context prompt by prompt, and never exceeds what was asked."""
    stated = ceiling(asked, over, default)
    try:
        ran = run(stated, prompts, sequences)
    except Fault as fault:
        assert Reason.CONTEXT_LIMIT is fault.reason  # noqa: PT017 (refusing is one of two right answers)
        assert max(prompts) >= 8192 or (asked is not None and over is REFUSE and max(prompts) + asked > 8192)
        return

    assert all(1 <= stated.run_tokens(tokens) <= 8192 - tokens for tokens in prompts)
    assert ran.max_output_tokens <= (asked or 8192)
    assert sum(map(stated.run_tokens, prompts)) * sequences == ran.output_tokens
