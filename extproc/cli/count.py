"""`tokenlane count`: what a request body would reserve, and in which lane, without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from extproc.core.lanes import classify
from extproc.core.policy import Endpoint, EngineName, LaneLimits, Limits, Model, OverContext, Policy, TokenizerMode
from extproc.core.rejection import STATUS
from extproc.core.values import Fault, Lane
from extproc.counting import Counter, TokenizerError
from extproc.counting.tokenizer import context_tokens
from extproc.settings import PolicyError, load_policy

INTERACTIVE_INPUT_TOKENS_MAX = 4096
INTERACTIVE_OUTPUT_TOKENS_MAX = 1024


class _OneModel(Policy):
    """A policy whose only model answers to every name."""

    __slots__ = ()

    def model(self, name: str) -> Model | None:  # noqa: ARG002
        """The only model."""
        return next(iter(self.models.values()))


@click.command(short_help="Count the tokens of request bodies.")
@click.option(
    "--model-dir", type=click.Path(path_type=Path), help="Directory with tokenizer.json and tokenizer_config.json."
)
@click.option("--engine", type=click.Choice([name.value for name in EngineName]), default=EngineName.VLLM.value)
@click.option(
    "--tokenizer-mode",
    type=click.Choice([name.value for name in TokenizerMode]),
    default=TokenizerMode.TEMPLATE.value,
    help="What turns chats into tokens.",
)
@click.option(
    "--endpoint",
    type=click.Choice([path.value for path in Endpoint]),
    default=Endpoint.CHAT_COMPLETIONS.value,
    show_default=True,
    help="Path the body is sent to.",
)
@click.option("--max-model-len", type=click.IntRange(1, 2**31), help="Context in tokens; else as the directory states.")
@click.option("--policy", "policy_file", type=click.Path(path_type=Path), help="Policy file, in place of --model-dir.")
@click.option("--jsonl", type=click.File("rb"), help="File with one body a line; - is standard input.")
def count(  # noqa: PLR0913, PLR0917 (one parameter an option)
    model_dir: Path | None,
    engine: str,
    tokenizer_mode: str,
    endpoint: str,
    max_model_len: int | None,
    policy_file: Path | None,
    jsonl: BinaryIO | None,
) -> None:
    """Count a request body, read from standard input, and print what it would reserve as one JSON object.

    Without --policy every model name is accepted, the ceiling of a request that states none is all the context, and
    a ceiling beyond the context is clamped: what the engine does by itself.
    """
    try:
        if policy_file is not None:
            policy = load_policy(policy_file)
        elif model_dir is not None:
            policy = _policy(model_dir, EngineName(engine), TokenizerMode(tokenizer_mode), max_model_len)
        else:
            raise click.UsageError("give --model-dir or --policy")
        counter = Counter(policy, threads=1)
    except (PolicyError, TokenizerError) as error:
        raise click.ClickException(str(error)) from error
    bodies: Iterator[bytes] = iter([sys.stdin.buffer.read()]) if jsonl is None else iter(jsonl)
    refused = False
    for body in bodies:
        found = _result(counter, policy, Endpoint(endpoint), body)
        refused = "error" in found
        click.echo(json.dumps(found))
    if refused and jsonl is None:
        sys.exit(1)


def _result(counter: Counter, policy: Policy, endpoint: Endpoint, body: bytes) -> dict[str, object]:
    try:
        counted = counter.count_now(counter.read(endpoint, body))
    except Fault as fault:
        return {"error": fault.reason.value, "status": STATUS[fault.reason], "message": fault.message}
    demand = counted.demand
    model = policy.model(demand.model)
    return {
        "input_tokens": demand.input_tokens,
        "prompts": counted.prompts_tokens,
        "max_output_tokens": demand.max_output_tokens,
        "sequences": demand.sequences,
        "reserved_tokens": demand.reserve_tokens,
        "lane": None if model is None else classify(demand, model).value,
        **({"inexact": True} if demand.inexact else {}),
    }


def _policy(directory: Path, engine: EngineName, mode: TokenizerMode, max_model_len: int | None) -> Policy:
    """One model from `directory`, with the illustrative lane limits and the engine's own ceilings."""
    context = max_model_len or context_tokens(directory)
    if context is None:
        raise click.UsageError(f"{directory} states no context: give --max-model-len")
    model = Model(
        name=directory.resolve().name,
        aliases=(),
        tokenizer_dir=str(directory),
        engine=engine,
        context_tokens_max=context,
        over_context=OverContext.CLAMP,
        default_ceiling_tokens=None,
        interactive=LaneLimits(
            Lane.INTERACTIVE,
            "interactive",
            input_tokens_max=INTERACTIVE_INPUT_TOKENS_MAX,
            output_tokens_max=INTERACTIVE_OUTPUT_TOKENS_MAX,
        ),
        bulk=LaneLimits(Lane.BULK, "bulk", input_tokens_max=context, total_tokens_max=context),
        tokenizer_mode=mode,
    )
    return _OneModel(
        version="count",
        limits=Limits(
            body_bytes_max=2**28,
            intake_bytes_max=2**28,
            streams_max=1,
            decision_ns_max=1,
            response_ns_max=1,
            upstream_retries_max=0,
        ),
        pools={},
        models={model.name: model},
        endpoints=frozenset(Endpoint),
        bypass=(),
        default_model=model.name,
    )
