"""The policy file: YAML in, `core.policy.Policy` out, every fault named.

Durations in the file are seconds (`_s`), in the policy nanoseconds (`_ns`). Unknown keys are errors. Paths in the
file are relative to the file.
"""

from __future__ import annotations

import ipaddress
import math
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from extproc.core import policy as core
from extproc.core.drain import PPM
from extproc.core.media import MediaCharge, MediaKind
from extproc.core.values import Lane

NS_PER_S = 1_000_000_000


class PolicyError(ValueError):
    """The policy file cannot be used; `problems` holds one sentence each."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        super().__init__(f"{path}: " + "; ".join(problems))
        self.path = path
        self.problems = problems


def socket_address(text: str, port_min: int = 1) -> str:
    """`IP:port`, with brackets around an IPv6 address.

    Envoy's `override_host` compares the destination header with resolved addresses, so a name cannot work.
    """
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError(f"{text} is not IP:port; names are not resolved") from None
    if not (port.isascii() and port.isdigit() and port_min <= int(port) < 65536):
        raise ValueError(f"the port must be a number from {port_min} to 65535")
    return text


SocketAddress = Annotated[str, AfterValidator(socket_address)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Seconds = Annotated[Decimal, Field(gt=0, le=86_400)]
Tokens = Annotated[int, Field(gt=0, le=2**31)]
RequestPath = Annotated[str, Field(pattern=r"^/[^?#\s]{0,255}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProbeSection(_Section):
    """Active health check of the pool's replicas."""

    path: RequestPath = Field("/health", description="path of the GET; status 200 means ready")
    interval_s: Seconds = Field(Decimal(1), description="pause between two probes of one replica")
    timeout_s: Seconds = Field(Decimal(1), description="a probe that takes longer has failed")
    failures_max: PositiveInt = Field(2, description="failures in a row that make a replica not ready")


class ReplicaSection(_Section):
    """One engine process and its budget."""

    address: SocketAddress = Field(description="IP:port of the engine's HTTP server")
    gross_tokens: Tokens = Field(description="load-tested ceiling of reserved tokens")
    requests_max: PositiveInt = Field(256, description="hard cap on active requests")
    release_tokens_per_s: PositiveInt = Field(
        1000, description="reserved tokens that end in a second under full load, from the same load test"
    )


class PoolSection(_Section):
    """A cluster of replicas that serve the same models."""

    guard_ratio: Decimal = Field(
        Decimal("0.10"), ge=0, lt=1, description="share of each gross ceiling that is never handed out"
    )
    probe: ProbeSection = Field(ProbeSection(), description="active health check")
    replicas: dict[Label, ReplicaSection] = Field(min_length=1, description="by name; names are unique in the policy")


class InteractiveSection(_Section):
    """The lane of short, latency-sensitive requests."""

    pool: Label = Field(description="pool that serves it")
    input_tokens_max: Tokens = Field(4096, description="largest input, all prompts together")
    output_tokens_max: Tokens = Field(1024, description="largest permitted output, all sequences together")
    queue_requests_max: Literal[0] = Field(0, description="0: a full lane refuses at once")


class BulkSection(_Section):
    """The lane of everything larger, up to its own limits."""

    pool: Label = Field(description="pool that serves it")
    input_tokens_max: Tokens = Field(description="largest input, all prompts together")
    total_tokens_max: Tokens = Field(description="largest input + permitted output")
    queue_requests_max: Literal[0] = Field(0, description="0: a full lane refuses at once")


class LanesSection(_Section):
    """The lanes of a model; one may be left out."""

    interactive: InteractiveSection | None = Field(None, description="short requests")
    bulk: BulkSection | None = Field(None, description="long requests")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.interactive is None and self.bulk is None:
            raise ValueError("a model needs at least one lane")
        return self


class _ChargeSection(_Section):
    tokens: Tokens = Field(description="charge of a part, with the marks and the placeholder around it")
    tokens_max: Tokens | None = Field(
        None, description="largest charge of a part, and that of one whose size the body does not show"
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        grows = any(value is not None for name, value in self if name not in _ChargeSection.model_fields)
        if grows != (self.tokens_max is not None):
            raise ValueError("a charge by size needs tokens_max, and tokens_max needs a charge by size")
        if self.tokens_max is not None and self.tokens_max < self.tokens:
            raise ValueError("tokens_max is below tokens")
        return self


class ImageSection(_ChargeSection):
    """The charge of an image."""

    patch_side_pixels: Annotated[int, Field(gt=0, le=4096)] | None = Field(
        None, description="one more token for each square of this side that the image begins"
    )


class ContentSection(_ChargeSection):
    """The charge of a recording or a file."""

    tokens_per_kib: Annotated[int, Field(gt=0, le=2**20)] | None = Field(
        None, description="more tokens for each KiB that the content begins"
    )


class MediaSection(_Section):
    """What parts of a chat are charged that are not text; a kind that is left out is refused."""

    image: ImageSection | None = Field(None, description="an image")
    audio: ContentSection | None = Field(None, description="a recording")
    video: ContentSection | None = Field(None, description="a video")
    file: ContentSection | None = Field(None, description="a file")


class ModelSection(_Section):
    """One served model."""

    aliases: list[Name] = Field([], description="other names under which clients ask for it")
    tokenizer_dir: Path = Field(
        description="directory with tokenizer.json (or .json.xz) and tokenizer_config.json; of mode mistral, with "
        "tekken.json or tokenizer.model.v3"
    )
    tokenizer_backend: core.TokenizerBackend = Field(
        core.TokenizerBackend.AUTO,
        description="auto: fastokens where it is installed and proven equal at load, else huggingface",
    )
    tokenizer_mode: core.TokenizerMode = Field(
        core.TokenizerMode.TEMPLATE,
        description="what turns chats into tokens: the directory's chat template, harmony for gpt-oss, or mistral for "
        "vLLM's --tokenizer-mode mistral (needs the extra `tokenlane[mistral]`)",
    )
    engine: core.EngineName = Field(core.EngineName.VLLM, description="engine profile")
    context_tokens_max: Tokens = Field(description="the engine's max_model_len")
    total_over_context: core.OverContext = Field(
        core.OverContext.REFUSE, description="input + ceiling over the context: refuse with 413, or clamp the ceiling"
    )
    default_ceiling: Tokens | Literal["context"] = Field(
        1024, description="output ceiling written into a request that states none; context: all that is left"
    )
    lanes: LanesSection = Field(description="lane limits")
    media: MediaSection = Field(MediaSection(), description="charges of media parts; a kind without one is refused")


class BypassSection(_Section):
    """A request that runs no tokens and may pass; a POST passes with its body, which nobody looks at."""

    method: Literal["GET", "HEAD", "POST"] = Field("GET", description="exact method")
    path: RequestPath = Field(description="exact path, without a query")
    pool: Label = Field(description="pool that answers it")


class LimitsSection(_Section):
    """Bounds on what clients control, and on how long things may take."""

    body_bytes_max: PositiveInt = Field(4 * 2**20, le=256 * 2**20, description="largest request body")
    intake_bytes_max: PositiveInt = Field(64 * 2**20, description="bodies being counted at one time, in bytes together")
    streams_max: PositiveInt = Field(20_000, description="concurrent requests, admitted or being decided")
    decision_s_max: Seconds = Field(
        Decimal(30), description="longest time from a request's arrival at Envoy to the verdict; Envoy gives up then"
    )
    response_s_max: Seconds = Field(Decimal(600), description="longest response; Envoy ends it then")
    upstream_retries_max: int = Field(
        1, ge=0, le=5, description="retries of Envoy on the reserved replica when it could not be reached"
    )


class PolicySection(_Section):
    """The whole file."""

    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = Field(
        description="name of this policy, sent as x-llm-policy"
    )
    limits: LimitsSection = Field(LimitsSection(), description="bounds")
    pools: dict[Label, PoolSection] = Field(min_length=1, description="by name")
    models: dict[Name, ModelSection] = Field(min_length=1, description="by the name the engine serves it under")
    default_model: Name | None = Field(None, description="model of a request that names none; absent: 400")
    endpoints: list[core.Endpoint] = Field(
        [core.Endpoint.CHAT_COMPLETIONS, core.Endpoint.COMPLETIONS],
        min_length=1,
        description="POST paths that are open",
    )
    bypass: list[BypassSection] = Field([], description="requests without tokens that may pass")
    drift_sample_ratio: Decimal = Field(
        Decimal(0), ge=0, le=1, description="share of the responses read for what the engine counted, to compare"
    )


def load_policy(path: Path) -> core.Policy:
    """The policy in the YAML file at `path`; PolicyError names everything that is wrong with it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(path, [error.strerror or str(error)]) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(path, [" ".join(str(error).split()).removesuffix(" ^")]) from error
    try:
        section = PolicySection.model_validate(document)
    except ValidationError as error:
        raise PolicyError(path, [_sentence(fault["loc"], fault["msg"]) for fault in error.errors()]) from error
    policy = freeze(section, base=path.parent)
    problems = policy.faults()
    if problems:
        raise PolicyError(path, problems)
    return policy


def freeze(section: PolicySection, base: Path) -> core.Policy:
    """The core's plain values for a validated file in directory `base`."""
    limits = section.limits
    return core.Policy(
        version=section.version,
        limits=core.Limits(
            body_bytes_max=limits.body_bytes_max,
            intake_bytes_max=limits.intake_bytes_max,
            streams_max=limits.streams_max,
            decision_ns_max=_ns(limits.decision_s_max),
            response_ns_max=_ns(limits.response_s_max),
            upstream_retries_max=limits.upstream_retries_max,
        ),
        pools=MappingProxyType({name: _pool(name, pool) for name, pool in section.pools.items()}),
        models=MappingProxyType({name: _model(name, model, base) for name, model in section.models.items()}),
        endpoints=frozenset(section.endpoints),
        bypass=tuple(core.BypassRule(rule.method, rule.path, rule.pool) for rule in section.bypass),
        default_model=section.default_model,
        drift_sample_ppm=math.ceil(section.drift_sample_ratio * PPM),
    )


def _pool(name: str, section: PoolSection) -> core.Pool:
    numerator, denominator = section.guard_ratio.as_integer_ratio()
    probe = section.probe
    return core.Pool(
        name=name,
        replicas=tuple(
            core.Replica(
                name=replica_name,
                pool=name,
                address=replica.address,
                gross_tokens=replica.gross_tokens,
                guard_tokens=-(-replica.gross_tokens * numerator // denominator),
                requests_max=replica.requests_max,
                release_tokens_per_s=replica.release_tokens_per_s,
            )
            for replica_name, replica in section.replicas.items()
        ),
        probe=core.Probe(probe.path, _ns(probe.interval_s), _ns(probe.timeout_s), probe.failures_max),
    )


def _model(name: str, section: ModelSection, base: Path) -> core.Model:
    return core.Model(
        name=name,
        aliases=tuple(section.aliases),
        tokenizer_dir=str(base / section.tokenizer_dir),
        engine=section.engine,
        context_tokens_max=section.context_tokens_max,
        over_context=section.total_over_context,
        default_ceiling_tokens=None if section.default_ceiling == "context" else section.default_ceiling,
        interactive=_limits(Lane.INTERACTIVE, section.lanes.interactive),
        bulk=_limits(Lane.BULK, section.lanes.bulk),
        tokenizer_backend=section.tokenizer_backend,
        tokenizer_mode=section.tokenizer_mode,
        media=MappingProxyType({MediaKind(kind): _charge(charge) for kind, charge in section.media if charge}),
    )


def _charge(section: ImageSection | ContentSection) -> MediaCharge:
    return MediaCharge(**{**section.model_dump(), "tokens_max": section.tokens_max or section.tokens})


def _limits(lane: Lane, section: InteractiveSection | BulkSection | None) -> core.LaneLimits | None:
    """The limits of one lane: the keys of its section are their names."""
    return None if section is None else core.LaneLimits(lane, **section.model_dump())


def _ns(seconds: Decimal) -> int:
    return int(seconds * NS_PER_S)


_PLAIN = {"Extra inputs are not permitted": "unknown key", "Field required": "missing"}


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    if message.startswith("Input should be a valid dictionary"):
        message = "must be a mapping of keys to values"
    plain = _PLAIN.get(message, message.removeprefix("Value error, "))
    return f"{'.'.join(map(str, location)) or 'the file'}: {plain}"
