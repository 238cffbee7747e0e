"""The desk: the only place where a verdict is made.

Four questions, cheapest first. `screen` looks at the request line and headers. `enter` bounds the bytes that are
being counted at one time. `foresee` refuses from byte bounds what cannot fit now, before anything is tokenized.
`decide` looks at the counted demand and the ledger. Each is one synchronous step: the
check and the change it allows happen without anything in between.

Refusals are found in the order 400/404/415, 413, 503, 429: what is wrong with the request itself comes before the
state of the fleet, so that a client is never told to retry what can never run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from extproc.core.drain import NS_PER_S, delay_ns
from extproc.core.lanes import classify, lane_reason
from extproc.core.ledger import Account, Ledger
from extproc.core.policy import Endpoint, LaneLimits, Model, Policy
from extproc.core.values import (
    BUILT_IN_ENCODINGS,
    Admit,
    Bypass,
    Demand,
    Detail,
    Encoding,
    Ending,
    Fault,
    Lane,
    Reason,
    Reject,
    RequestHead,
    Reservation,
)

INTAKE_RETRY_NS = NS_PER_S
"""Retry-After basis when counting is saturated: intake drains in the time of a few tokenizations, under a second."""

EXPIRY_SLACK_NS = 5 * NS_PER_S
"""How much longer than the longest response a reservation stands: Envoy's timer and ours do not start together."""

LARGE_BODY_BYTES = 2**20
"""Most of what a body of this size or more costs is to receive it: it is in the intake from its head on, and leaves
the last quarter of the intake to smaller ones."""

OVERFLOW_ADVICE = "summarize or split the input, ask for less output, or use dedicated capacity"


class Desk:
    """Makes verdicts over one policy and one ledger. Not thread-safe: one event loop owns it.

    `encodings` are the content encodings that can be decoded for counting.
    """

    def __init__(self, policy: Policy, instance: str, encodings: frozenset[Encoding] = BUILT_IN_ENCODINGS) -> None:
        self.policy = policy
        self.ledger = Ledger(policy.replicas())
        self.orphans: set[str] = set()
        """Tickets of open reservations that no stream of this process watches."""
        self.draining = False
        self.streams = 0
        self.intake_bytes = 0
        self._instance = instance
        self._tickets = 0
        self._paths = {endpoint.value: endpoint for endpoint in policy.endpoints}
        self._pools = {
            name: tuple(self.ledger.accounts[replica.name] for replica in pool.replicas)
            for name, pool in policy.pools.items()
        }
        self._largest = {name: max(a.budget_tokens for a in accounts) for name, accounts in self._pools.items()}
        """What the largest replica of a pool can ever hold, in tokens."""
        self._replica_at = {replica.address: replica.name for replica in policy.replicas()}
        self._encodings = frozenset({"", "identity", *encodings})
        self._bypass = {(rule.method, rule.path): Bypass(rule.pool) for rule in policy.bypass}

    def screen(self, head: RequestHead) -> Endpoint | Bypass | Reject:
        """Verdict on the request line and headers; an Endpoint means that the body decides."""
        path = "" if head.path is None else head.path.partition("?")[0]
        bypass = self._bypass.get((head.method, path))
        if bypass is not None and not head.upgrade:
            if head.method != "POST" and not head.end_of_stream:
                return Reject(Reason.MALFORMED_REQUEST, "this request takes no body")
            return bypass
        endpoint = self._paths.get(path) if head.method == "POST" and not head.upgrade else None
        if endpoint is None:
            return Reject(Reason.UNKNOWN_ENDPOINT, "there is no such endpoint here", details=self._endpoints())
        return self._screen_body(head) or self._screen_load() or endpoint

    def _screen_body(self, head: RequestHead) -> Reject | None:
        """What the headers already say against the body."""
        if head.content_encoding not in self._encodings:
            decoded = [encoding for encoding in Encoding if encoding in self._encodings]
            return Reject(
                Reason.UNSUPPORTED_ENCODING,
                f"content-encoding must be {' or '.join(decoded)}, or left out",
                param="content-encoding",
            )
        if head.content_type.partition(";")[0].strip().lower() != "application/json":
            return Reject(Reason.UNSUPPORTED_ENCODING, "content-type must be application/json", param="content-type")
        if head.end_of_stream:
            return Reject(Reason.MALFORMED_REQUEST, "the request has no body")
        # A body over the cap that Envoy can hold is refused once it is there: see `Limits.buffer_bytes`.
        if head.content_length_bytes is not None and head.content_length_bytes > self.policy.limits.buffer_bytes:
            return self._too_large(head.content_length_bytes)
        return None

    def _screen_load(self) -> Reject | None:
        """What the gateway itself cannot take on now."""
        if self.draining:
            return Reject(Reason.DRAINING, "this gateway is stopping; try again", retry_ns=NS_PER_S)
        if self.streams > self.policy.limits.streams_max:
            return self._queue_full("streams", self.policy.limits.streams_max)
        return None

    def announce(self, head: RequestHead) -> int | Reject:
        """Let a large body into the intake before it is received; the bytes that it takes there, 0 for any other.

        `leave` must follow exactly once, before the body's own `enter`.
        """
        body_bytes = min(head.content_length_bytes or 0, self.policy.limits.body_bytes_max)
        if body_bytes < LARGE_BODY_BYTES:
            return 0
        return self.enter(body_bytes) or body_bytes

    def enter(self, body_bytes: int) -> Reject | None:
        """Let a body into counting; None lets it in, and `leave` must follow exactly once."""
        limits = self.policy.limits
        if body_bytes > limits.body_bytes_max:
            return self._too_large(body_bytes)
        room_bytes = limits.intake_bytes_max
        if body_bytes >= LARGE_BODY_BYTES:
            room_bytes -= room_bytes // 4
        # A body over the whole bound is let in alone: the bound limits the sum, the cap limits one.
        if self.intake_bytes > 0 and self.intake_bytes + body_bytes > room_bytes:
            return self._queue_full("intake", limits.intake_bytes_max)
        self.intake_bytes += body_bytes
        return None

    def leave(self, body_bytes: int) -> None:
        """A body that entered is counted, refused or gone."""
        self.intake_bytes -= body_bytes

    def fault(self, fault: Fault) -> Reject:
        """Verdict on a request that counting found at fault."""
        details, lane = fault.details, None
        if fault.reason is Reason.CONTEXT_LIMIT:
            limits = {} if fault.model is None else accepted(self.policy.models[fault.model])
            details, lane = {**limits, **details, "advice": OVERFLOW_ADVICE}, Lane.OVERFLOW
        return Reject(
            fault.reason, fault.message, param=fault.param, lane=lane, details=details, retry_ns=INTAKE_RETRY_NS
        )

    def decide(self, demand: Demand, now_ns: int) -> Admit | Reject:
        """Verdict on a counted demand; an Admit has reserved its tokens."""
        model = self.policy.models[demand.model]
        limits = model.lane(classify(demand, model))
        if limits is None:
            return _overflow(demand, model)
        largest = self._largest[limits.pool]
        if demand.reserve_tokens > largest:
            return _overflow(demand, model, largest)
        ready, tokens = self._ready(limits), demand.reserve_tokens
        account = _roomiest(ready, tokens)
        if account is None:
            return self._turned_away(limits, ready, demand, demand)
        replica = account.replica
        reservation = self.ledger.reserve(self._next_ticket(), replica.name, limits.lane, tokens, now_ns)
        busy_retry_ns = delay_ns(tokens, replica.release_tokens_per_s)
        why = lane_reason(demand, model, limits.lane)
        return Admit(reservation, limits.pool, replica.address, demand, why, busy_retry_ns)

    def foresee(self, least: Demand, most: Demand) -> Reject | None:
        """Verdict on a demand between `least` and `most` that is not counted yet; None where counting must decide.

        A refusal only where the bounds make lane and fit certain and even `least` finds no room; the predicted delay
        is that of `most`.
        """
        model = self.policy.models[most.model]
        limits = model.lane(classify(most, model))
        if (
            limits is None
            or classify(least, model) is not limits.lane
            or most.reserve_tokens > self._largest[limits.pool]
        ):
            return None
        ready = self._ready(limits)
        if _roomiest(ready, least.reserve_tokens) is not None:
            return None
        return self._turned_away(limits, ready, least, most)

    def _ready(self, limits: LaneLimits) -> list[Account]:
        """The accounts of a lane's replicas that are ready."""
        return [account for account in self._pools[limits.pool] if account.ready]

    def _turned_away(self, limits: LaneLimits, ready: list[Account], least: Demand, most: Demand) -> Reject:
        """Why none of `ready` takes a demand between `least` and `most`, which are the same one once it is counted."""
        retry_ns = self._recovery_ns(limits)
        if ready:
            reason, message, details = _busy(limits, ready, least.reserve_tokens)
            retry_ns = min([_room_delay_ns(account, most.reserve_tokens) for account in ready])
        else:
            reason, message = Reason.CAPACITY_UNAVAILABLE, f"no replica of the {limits.lane} lane is ready"
            details = {"replicas": len(self._pools[limits.pool]), "replicas_ready": 0}
        if least is not most:
            details |= {
                "input_tokens_min": least.input_tokens,
                "input_tokens_bound": most.input_tokens,
                "max_output_tokens": most.max_output_tokens,
                "sequences": most.sequences,
            }
        demand = most if least is most else None
        return Reject(reason, message, lane=limits.lane, demand=demand, details=details, retry_ns=retry_ns)

    def end(self, ticket: str, ending: Ending) -> Reservation | None:
        """End a reservation; None when it had ended before, by expiry or by the access log."""
        self.orphans.discard(ticket)
        return self.ledger.end(ticket, ending) if ticket in self.ledger.open else None

    def expire(self, now_ns: int) -> list[Reservation]:
        """End the reservations that stand for longer than a response can run."""
        overdue = list(self.ledger.admitted_before(now_ns - self.policy.limits.response_ns_max - EXPIRY_SLACK_NS))
        for reservation in overdue:
            self.end(reservation.ticket, Ending.EXPIRED)
        return overdue

    def adopt(self, reservations: Iterable[Reservation]) -> list[Reservation]:
        """Take over what a lost process admitted, as orphans; what ran on a replica that is gone is left out."""
        adopted = [reservation for reservation in reservations if reservation.replica in self.ledger.accounts]
        for reservation in adopted:
            self.ledger.adopt(reservation)
            self.orphans.add(reservation.ticket)
        return adopted

    def abandon(self, ticket: str) -> None:
        """The stream that watched a reservation is gone, but its response may still run."""
        if ticket in self.ledger.open:
            self.orphans.add(ticket)

    def served(self, ticket: str, address: str) -> Reservation | None:
        """Follow a request to the replica at `address` that serves it; the reservation, if that moved it.

        Without an address, or with one that no replica of the policy has, the reservation stays where it is.
        """
        reservation = self.ledger.open.get(ticket)
        replica = self._replica_at.get(address)
        if reservation is None or replica is None or replica == reservation.replica:
            return None
        return self.ledger.move(ticket, replica)

    def set_ready(self, replica: str, *, ready: bool) -> None:
        """What a probe says of a replica; what runs there goes on."""
        self.ledger.accounts[replica].ready = ready

    def _next_ticket(self) -> str:
        self._tickets += 1
        return f"{self._instance}-{self._tickets}"

    def _recovery_ns(self, limits: LaneLimits) -> int:
        probe = self.policy.pools[limits.pool].probe
        return probe.interval_ns + probe.timeout_ns

    def _endpoints(self) -> Mapping[str, Detail]:
        return {"endpoints": ", ".join(sorted(self._paths))}

    def _too_large(self, body_bytes: int) -> Reject:
        cap = self.policy.limits.body_bytes_max
        return Reject(
            Reason.BODY_TOO_LARGE,
            f"request body is too large: {body_bytes} bytes > {cap} maximum",
            details={"body_bytes": body_bytes, "body_bytes_max": cap},
        )

    def _queue_full(self, queue: str, bound: int) -> Reject:
        return Reject(
            Reason.QUEUE_FULL,
            "too many requests are being counted; try again",
            details={"queue": queue, "queue_max": bound},
            retry_ns=INTAKE_RETRY_NS,
        )


def accepted(model: Model) -> dict[str, Detail]:
    """The accepted maximums of a model's lanes, as details of a refusal."""
    found: dict[str, Detail] = {"context_tokens_max": model.context_tokens_max}
    for limits in model.lanes:
        for name in ("input_tokens_max", "output_tokens_max", "total_tokens_max"):
            value = getattr(limits, name)
            if value is not None:
                found[f"{limits.lane}_{name}"] = value
    return found


def _overflow(demand: Demand, model: Model, replica_tokens_max: int | None = None) -> Reject:
    """No lane takes it, or no replica can ever hold it."""
    details = {**accepted(model), "advice": OVERFLOW_ADVICE}
    tokens, maximum = demand.reserve_tokens, max(limits.total_tokens_max_any for limits in model.lanes)
    input_tokens_max = max(limits.input_tokens_max for limits in model.lanes)
    if replica_tokens_max is not None:
        details["replica_tokens_max"] = maximum = replica_tokens_max
    elif demand.input_tokens > input_tokens_max:
        tokens, maximum = demand.input_tokens, input_tokens_max
    return Reject(
        Reason.CONTEXT_LIMIT,
        f"prompt is too long: {tokens} tokens > {maximum} maximum; {OVERFLOW_ADVICE}",
        lane=Lane.OVERFLOW,
        demand=demand,
        details=details,
    )


def _roomiest(ready: list[Account], tokens: int) -> Account | None:
    """The account that takes `tokens` now and has most of them available; the first by name among equals."""
    fitting = [a for a in ready if a.available_tokens >= tokens and a.under_cap]
    return min(fitting, key=lambda a: (-a.available_tokens, a.replica.name)) if fitting else None


def _busy(limits: LaneLimits, ready: list[Account], tokens: int) -> tuple[Reason, str, dict[str, Detail]]:
    """No replica takes `tokens` now: they are short, or only the hard cap on requests is in the way."""
    details: dict[str, Detail] = {
        "available_tokens": max([account.available_tokens for account in ready]),
        "replicas_ready": len(ready),
    }
    capped = [account.replica.requests_max for account in ready if account.available_tokens >= tokens]
    if capped:
        details["requests_max"] = max(capped)
        return Reason.CONCURRENCY_LIMIT, f"the {limits.lane} lane runs as many requests as it may; try again", details
    details["input_tokens_max"] = limits.input_tokens_max
    return (
        Reason.TOKEN_BUDGET_EXHAUSTED,
        f"the {limits.lane} lane has no room for {tokens} tokens now; try again",
        details,
    )


def _room_delay_ns(account: Account, tokens: int) -> int:
    """Time until `account` has room for `tokens`: its shortfall drains, and at the hard cap one request ends."""
    short_tokens = tokens - account.available_tokens
    if not account.under_cap:
        short_tokens = max(short_tokens, -(-account.active_tokens // account.active_requests))
    return delay_ns(short_tokens, account.replica.release_tokens_per_s)
