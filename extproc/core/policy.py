"""The policy: what is served, where, and within which limits. Immutable and versioned.

`extproc.settings` reads it from YAML and reports shape errors; `Policy.faults` reports what the shape allows but
what could never work, in sentences for an operator. A running desk swaps one policy for another as one reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique
from types import MappingProxyType

from extproc.core.media import MediaCharge, MediaKind
from extproc.core.values import Lane

BUFFER_MARGIN_BYTES = 2**20
"""Buffer beyond twice the body cap: room for what the service injects (at most 64 KiB), however small the cap."""

MESSAGE_MARGIN_BYTES = 2**20
"""gRPC message over the largest body that Envoy buffers: headers travel too, in messages of their own."""


@unique
class OverContext(StrEnum):
    """What happens when input + ceiling exceed the model's context."""

    REFUSE = "refuse"  # 413 context_limit
    CLAMP = "clamp"  # the ceiling shrinks to what is left, written into the body


@unique
class Endpoint(StrEnum):
    """Request paths whose bodies can be counted."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    CHAT_COMPLETIONS_BATCH = "/v1/chat/completions/batch"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    CLASSIFY = "/classify"
    GENERATE = "/generate"


_RUNNING_PATHS = frozenset(
    {
        *Endpoint,
        "/",
        "/api/chat",
        "/api/generate",
        "/encode",
        "/generate_stream",
        "/invocations",
        "/pooling",
        "/vertex",
    }
)
"""Paths of vLLM, SGLang and TGI that put tokens on an engine: none of them may pass uncounted."""


@unique
class EngineName(StrEnum):
    """Engine profiles: whose rules turn a body into prompts and ceilings."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"


@unique
class TokenizerBackend(StrEnum):
    """Which library counts; the counts are the same."""

    AUTO = "auto"  # fastokens where it is installed and proven equal at load, else huggingface
    HUGGINGFACE = "huggingface"


@unique
class TokenizerMode(StrEnum):
    """What turns a chat into tokens; vLLM chooses by model and by its `--tokenizer-mode`."""

    TEMPLATE = "template"  # the model's chat template
    HARMONY = "harmony"  # gpt-oss: its own format, whatever template there is
    MISTRAL = "mistral"  # mistral-common, which reads tekken.json or a SentencePiece model


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine process and its budget.

    `gross_tokens` is its load-tested ceiling of reserved tokens; `guard_tokens` of it are never handed out.
    `release_tokens_per_s` is the prior of the drain rate, measured in the same load test.
    """

    name: str
    pool: str
    address: str
    gross_tokens: int
    guard_tokens: int
    requests_max: int
    release_tokens_per_s: int

    @property
    def budget_tokens(self) -> int:
        """Tokens that reservations may hold together."""
        return self.gross_tokens - self.guard_tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """Active health check of each replica of a pool: GET `path`, 200 is ready."""

    path: str
    interval_ns: int
    timeout_ns: int
    failures_max: int


@dataclass(frozen=True, slots=True)
class Pool:
    """A cluster of replicas that serve the same models."""

    name: str
    replicas: tuple[Replica, ...]
    probe: Probe


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """What a lane of a model accepts, and the pool it runs on.

    Interactive: `input_tokens_max` and `output_tokens_max`. Bulk: `input_tokens_max` and `total_tokens_max`
    (input + output). A limit that a lane does not use is None.
    """

    lane: Lane
    pool: str
    input_tokens_max: int
    output_tokens_max: int | None = None
    total_tokens_max: int | None = None
    queue_requests_max: int = 0

    @property
    def total_tokens_max_any(self) -> int:
        """The largest reserve that the limits allow."""
        if self.total_tokens_max is not None:
            return self.total_tokens_max
        return self.input_tokens_max + (self.output_tokens_max or 0)


@dataclass(frozen=True, slots=True)
class Model:
    """One served model: how it is counted and which lanes it has.

    `default_ceiling_tokens` is the output ceiling of a request that states none; None means all the context that
    its prompt leaves. A kind of media that `media` does not list is refused.
    """

    name: str
    aliases: tuple[str, ...]
    tokenizer_dir: str
    engine: EngineName
    context_tokens_max: int
    over_context: OverContext
    default_ceiling_tokens: int | None
    interactive: LaneLimits | None
    bulk: LaneLimits | None
    tokenizer_backend: TokenizerBackend = TokenizerBackend.HUGGINGFACE
    tokenizer_mode: TokenizerMode = TokenizerMode.TEMPLATE
    media: Mapping[MediaKind, MediaCharge] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def lanes(self) -> tuple[LaneLimits, ...]:
        """The lanes that this model has, interactive first."""
        return tuple(limits for limits in (self.interactive, self.bulk) if limits is not None)

    def lane(self, lane: Lane) -> LaneLimits | None:
        """The limits of one lane; None when the model does not have it."""
        if lane is Lane.INTERACTIVE:
            return self.interactive
        return self.bulk if lane is Lane.BULK else None


@dataclass(frozen=True, slots=True)
class BypassRule:
    """A request that carries no tokens and may pass: exact method and path, to one pool."""

    method: str
    path: str
    pool: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients control, and on how long things may take."""

    body_bytes_max: int
    intake_bytes_max: int
    streams_max: int
    decision_ns_max: int
    response_ns_max: int
    upstream_retries_max: int

    @property
    def buffer_bytes(self) -> int:
        """The largest body that Envoy reads to its end; above it, a body is refused while it is still coming.

        Twice the cap, because a refusal in the middle of an upload gets lost: Envoy resets the HTTP/2 stream, or closes
        the HTTP/1 connection, of a client that is still writing, and many clients then report that instead.
        """
        return 2 * self.body_bytes_max + BUFFER_MARGIN_BYTES

    @property
    def message_bytes_max(self) -> int:
        """The largest gRPC message between Envoy and the service."""
        return self.buffer_bytes + MESSAGE_MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything a verdict depends on besides the ledger.

    `drift_sample_ppm`: of a million responses, how many are read for what the engine counted.
    """

    version: str
    limits: Limits
    pools: Mapping[str, Pool]
    models: Mapping[str, Model]
    endpoints: frozenset[Endpoint]
    bypass: tuple[BypassRule, ...]
    default_model: str | None
    drift_sample_ppm: int = 0
    _by_name: Mapping[str, Model] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {name: model for model in self.models.values() for name in (*model.aliases, model.name)}
        object.__setattr__(self, "_by_name", by_name)

    def replicas(self) -> Iterator[Replica]:
        """All replicas of all pools."""
        for pool in self.pools.values():
            yield from pool.replicas

    def model(self, name: str) -> Model | None:
        """The model served under `name` or an alias of it."""
        return self._by_name.get(name)

    def faults(self) -> list[str]:
        """What the shape allows but what could never work, one sentence each."""
        found = [*self._name_faults(), *self._lane_faults()]
        found += [
            f"bypass {rule.method} {rule.path}: there is no pool {rule.pool}, so it would be answered 503"
            for rule in self.bypass
            if rule.pool not in self.pools
        ]
        found += [
            f"bypass POST {rule.path}: this path runs tokens, so it must not pass uncounted"
            for rule in self.bypass
            if rule.method == "POST" and rule.path in _RUNNING_PATHS
        ]
        found += [
            f"model {model.name}: tokenizer_mode {model.tokenizer_mode} follows vllm, so counts would not be those of "
            f"{model.engine}"
            for model in self.models.values()
            if model.tokenizer_mode is not TokenizerMode.TEMPLATE and model.engine is not EngineName.VLLM
        ]
        found += [
            f"model {model.name}: media of {_media_unread(model)} are not counted, so they cannot have a charge"
            for model in self.models.values()
            if model.media and _media_unread(model)
        ]
        if self.default_model is not None and self.model(self.default_model) is None:
            found.append(f"default_model {self.default_model} is not a model, so a request without one could not run")
        return found

    def _name_faults(self) -> Iterator[str]:
        names = Counter(name for model in self.models.values() for name in (model.name, *model.aliases))
        for name in (name for name, count in names.items() if count > 1):
            yield f"model name {name} is used twice, so a request for it would have two budgets"
        for title, values in (
            ("replica name", [replica.name for replica in self.replicas()]),
            ("replica address", [replica.address for replica in self.replicas()]),
        ):
            for value in (value for value, count in Counter(values).items() if count > 1):
                yield f"{title} {value} is used twice, so one engine would be given two budgets"

    def _lane_faults(self) -> Iterator[str]:
        for model in self.models.values():
            for limits in model.lanes:
                where = f"model {model.name}, lane {limits.lane}"
                pool = self.pools.get(limits.pool)
                if pool is None:
                    yield f"{where}: there is no pool {limits.pool}"
                    continue
                budget = max(replica.budget_tokens for replica in pool.replicas)
                if limits.total_tokens_max_any > budget:
                    yield (
                        f"{where}: a request of {limits.total_tokens_max_any} tokens is within the limits but no "
                        f"replica of pool {pool.name} can ever hold more than {budget}"
                    )


def _media_unread(model: Model) -> str | None:
    """What reads media in a way that no charge of a part can stand for; None where nothing does."""
    if model.tokenizer_mode is not TokenizerMode.TEMPLATE:
        return f"tokenizer_mode {model.tokenizer_mode}"
    # It takes images out of Markdown in any text.
    return str(model.engine) if model.engine is EngineName.TGI else None
