"""The output ceiling: how many tokens an engine may generate for each prompt of a request.

Rules, for a context of L tokens and a prompt of I tokens:

- I >= L leaves no room for a single token: 413 `context_limit`.
- A ceiling the client asks for that is above L can never be honoured, whatever the policy; engines refuse it too.
- An asked ceiling c with I + c > L is refused or shrinks to L - I, as `OverContext` says.
- A ceiling the client did not ask for is a default and always shrinks to L - I: nobody is refused for what they did
  not ask.
- Each prompt has its own ceiling, and each of the n sequences of a prompt may run to it.

A message starts `prompt is too long: N tokens > M maximum`, a phrase that client libraries recognise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from extproc.core.policy import OverContext
from extproc.core.values import Fault, Reason


class Ceiling(NamedTuple):
    """What bounds the output of one sequence before the prompt is known, in tokens.

    `asked_tokens` is the client's; where it is None `default_tokens` holds, and None there means all the context
    that the prompt leaves. `field` names the body field for messages, `model` the policy's model. Where `generates` is
    False nothing runs but the prompt, which may fill the context.
    """

    field: str
    asked_tokens: int | None
    default_tokens: int | None
    context_tokens_max: int
    over_context: OverContext
    model: str | None = None
    generates: bool = True

    def check(self) -> None:
        """Raise Fault for a ceiling that no prompt could make right."""
        asked = self.asked_tokens
        if asked is None:
            return
        if asked < 1:
            raise Fault(Reason.MALFORMED_REQUEST, f"{self.field} must be at least 1, got {asked}", param=self.field)
        if asked > self.context_tokens_max:
            raise self._too_long(asked, f"{self.field} alone is {asked}", input_tokens=None)

    def leaves_room(self, input_tokens: int) -> bool:
        """Whether a prompt of `input_tokens` runs with its whole ceiling."""
        return input_tokens + self.run_tokens(0) <= self.context_tokens_max

    def check_input(self, input_tokens: int, *, exact: bool = True) -> None:
        """Raise Fault when a prompt of `input_tokens`, or of at least that many if not `exact`, cannot run."""
        asked = self.asked_tokens or 0
        if not self.generates:
            if input_tokens > self.context_tokens_max:
                raise self._too_long(input_tokens, "input", input_tokens)
            return
        if input_tokens >= self.context_tokens_max:
            note = "no room for output" if exact else "a lower bound of the input, by its size"
            raise self._too_long(input_tokens, note, input_tokens)
        if self.over_context is OverContext.REFUSE and input_tokens + asked > self.context_tokens_max:
            raise self._too_long(input_tokens + asked, f"{input_tokens} input + {asked} permitted output", input_tokens)

    def run_tokens(self, input_tokens: int) -> int:
        """The ceiling one sequence runs with after a prompt of `input_tokens`, at least 1 where it generates."""
        if not self.generates:
            return 0
        left = max(1, self.context_tokens_max - input_tokens)
        bound = self.default_tokens if self.asked_tokens is None else self.asked_tokens
        return left if bound is None else min(bound, left)

    def _too_long(self, tokens: int, note: str, input_tokens: int | None) -> Fault:
        limit = self.context_tokens_max
        return Fault(
            Reason.CONTEXT_LIMIT,
            f"prompt is too long: {tokens} tokens > {limit} maximum ({note})",
            param=self.field if input_tokens is None else None,
            details={
                "input_tokens": input_tokens,
                "max_output_tokens": self.asked_tokens,
                "context_tokens_max": limit,
            },
            model=self.model,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What the engine will run: the largest ceiling of one sequence, and the sum over all sequences."""

    max_output_tokens: int
    output_tokens: int


def run(ceiling: Ceiling, prompts_tokens: Sequence[int], sequences_per_prompt: int) -> Run:
    """The run ceilings of all prompts; Fault(CONTEXT_LIMIT) where one of them does not fit its context."""
    for tokens in prompts_tokens:
        ceiling.check_input(tokens)
    each = [ceiling.run_tokens(tokens) for tokens in prompts_tokens]
    return Run(max_output_tokens=max(each), output_tokens=sum(each) * sequences_per_prompt)
