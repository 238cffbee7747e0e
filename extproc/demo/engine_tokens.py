"""Exact prompt counts for a simulated engine, with the tokenizer and chat template of the model it pretends to run."""

from __future__ import annotations

from pathlib import Path

from extproc.core.policy import Endpoint, EngineName, Limits, Model, OverContext, Policy
from extproc.core.values import Fault, Reason
from extproc.counting import Counter
from extproc.demo.engine_request import JsonObject, PromptCounter, RequestError


def exact_counter(directory: Path, models: tuple[str, ...], context_tokens_max: int) -> PromptCounter:
    """A counter for `models`, which share the tokenizer in `directory`; TokenizerError if it cannot be used."""
    counter = Counter(_policy(directory, models, context_tokens_max))

    def prompts_tokens(path: str, body: bytes, fields: JsonObject) -> tuple[int, ...]:  # noqa: ARG001 (an estimate's)
        try:
            return counter.count_now(counter.read(Endpoint(path), body)).prompts_tokens
        except Fault as fault:
            status = 404 if fault.reason is Reason.UNKNOWN_MODEL else 400
            raise RequestError(status, fault.message, fault.param) from fault

    return prompts_tokens


def _policy(directory: Path, models: tuple[str, ...], context_tokens_max: int) -> Policy:
    """As much policy as counting asks for: like the engine, it clamps and has no ceiling of its own."""
    name, *aliases = models
    model = Model(
        name=name,
        aliases=tuple(aliases),
        tokenizer_dir=str(directory),
        engine=EngineName.VLLM,
        context_tokens_max=context_tokens_max,
        over_context=OverContext.CLAMP,
        default_ceiling_tokens=None,
        interactive=None,
        bulk=None,
    )
    return Policy(
        version="engine",
        limits=Limits(1, 1, 1, 1, 1, 0),
        pools={},
        models={name: model},
        endpoints=frozenset(Endpoint),
        bypass=(),
        default_model=name,
    )
