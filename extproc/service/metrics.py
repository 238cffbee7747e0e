"""Prometheus metrics. Every label value comes from the policy or from a closed enum, and exists from the start.

Counters and histograms are bound to their labels once; gauges are read from the desk when Prometheus asks, so that
they cost a decision nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum, unique

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.core.admission import Desk
from extproc.core.rejection import LANE_UNKNOWN
from extproc.core.values import Demand, Ending, Lane, Reason, ResponseEnd
from extproc.counting import Counter as TokenCounter

TOKEN_BUCKETS = tuple(2**power for power in range(4, 21))
"""Powers of two from 16 to 1,048,576 tokens."""

SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

LAG_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

RESPONSE_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Up to the default of the longest response."""


@unique
class Comparison(StrEnum):
    """What comparing a count with the engine's own has found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNSTATED = "unstated"  # the response says nothing of it


class Metrics:
    """The registry of one service, with bound children for the hot path."""

    def __init__(self, desk: Desk) -> None:
        self.registry = CollectorRegistry()
        self._settling = _SettlingCollector()
        self.registry.register(self._settling)  # first, so that all that follows is settled
        self.registry.register(_DeskCollector(desk))
        self._tokenizers = _TokenizerCollector()
        self.registry.register(self._tokenizers)
        admitted = self._counter("admitted_requests", "Requests admitted with a reservation", "lane")
        self._admitted = {lane: admitted.labels(lane) for lane in (Lane.INTERACTIVE, Lane.BULK)}
        self._passed = self._counter("passed_requests", "Requests let through without tokens")
        refused = self._counter("refused_requests", "Requests refused", "lane", "reason")
        self._refused = {
            (lane, reason): refused.labels(LANE_UNKNOWN if lane is None else lane, reason)
            for lane in (Lane.INTERACTIVE, Lane.BULK, Lane.OVERFLOW, None)
            for reason in Reason
        }
        ended = self._counter("reservations_ended", "Reservations by how they ended", "ending")
        self._ended = {ending: ended.labels(ending) for ending in Ending}
        inputs = self._histogram("input_tokens", "Input tokens of counted requests", TOKEN_BUCKETS, "lane")
        outputs = self._histogram("output_tokens", "Permitted output tokens of counted requests", TOKEN_BUCKETS, "lane")
        self._tokens = {
            lane: (inputs.labels(lane), outputs.labels(lane)) for lane in (Lane.INTERACTIVE, Lane.BULK, Lane.OVERFLOW)
        }
        inexact = self._counter(
            "inexact_requests", "Counted requests whose media are charged as the policy declares", "model"
        )
        self._inexact = {model: inexact.labels(model) for model in desk.policy.models}
        responses = self._counter("responses", "Responses to admitted requests by how they ended", "lane", "end")
        self._responses = {
            (lane, end): responses.labels(lane, end) for lane in (Lane.INTERACTIVE, Lane.BULK) for end in ResponseEnd
        }
        seconds = self._histogram(
            "response_seconds",
            "Admitted requests from arrival to end",
            RESPONSE_SECONDS_BUCKETS,
            "lane",
        )
        self._response_s = {lane: seconds.labels(lane) for lane in (Lane.INTERACTIVE, Lane.BULK)}
        self._unread = self._counter("access_log_unread", "Access log entries of admitted requests that name no lane")
        self._mismatches = self._counter("replica_mismatches", "Responses served by another replica than the reserved")
        self._journal_errors = self._counter("journal_errors", "Writes to the journal that failed")
        self._decision_s = self._histogram(
            "decision_seconds", "Time from the last message needed to the verdict", SECONDS_BUCKETS
        )
        compared = self._counter("compared_counts", "Counts compared with the engine's own", "model", "comparison")
        self._compared = {
            (model, comparison): compared.labels(model, comparison)
            for model in desk.policy.models
            for comparison in Comparison
        }
        self._lag_s = self._histogram("loop_lag_seconds", "How late the event loop wakes a timer", LAG_SECONDS_BUCKETS)
        self._faults = self._counter("internal_errors", "Faults of this service")

    def journal_error(self) -> None:
        """Count a write to the journal that failed."""
        self._journal_errors.inc()

    def before_scrape(self, settle: Callable[[], None]) -> None:
        """Call `settle` before each scrape, for what it has not told yet."""
        self._settling.settle = settle

    def watch_tokenizers(self, counter: TokenCounter) -> None:
        """Show with every scrape who counts for each model."""
        self._tokenizers.counter = counter

    def admitted(self, lane: Lane, demand: Demand) -> None:
        """Count an admission."""
        self._admitted[lane].inc()
        self._observe(lane, demand)

    def refused(self, lane: Lane | None, reason: Reason, demand: Demand | None) -> None:
        """Count a refusal."""
        self._refused[lane, reason].inc()
        if lane is not None and demand is not None:
            self._observe(lane, demand)

    def passed(self) -> None:
        """Count a request without tokens."""
        self._passed.inc()

    def ended(self, ending: Ending) -> None:
        """Count the end of a reservation."""
        self._ended[ending].inc()

    def responded(self, lane: Lane, end: ResponseEnd, seconds: float) -> None:
        """Count the end of a response to an admitted request, `seconds` after the request came."""
        self._responses[lane, end].inc()
        self._response_s[lane].observe(seconds)

    def unread(self) -> None:
        """Count an access log entry that could not be used."""
        self._unread.inc()

    def mismatched(self) -> None:
        """Count a response that another replica served than the reserved one."""
        self._mismatches.inc()

    def lagged(self, seconds: float) -> None:
        """Record how late the event loop was."""
        self._lag_s.observe(seconds)

    def compared(self, model: str, comparison: Comparison) -> None:
        """Count a comparison of a count with the engine's own."""
        self._compared[model, comparison].inc()

    def decided(self, seconds: float) -> None:
        """Record how long a verdict took."""
        self._decision_s.observe(seconds)

    def fault(self) -> None:
        """Count a fault of ours."""
        self._faults.inc()

    def _observe(self, lane: Lane, demand: Demand) -> None:
        inputs, outputs = self._tokens[lane]
        inputs.observe(demand.input_tokens)
        outputs.observe(demand.output_tokens)
        if demand.inexact:
            self._inexact[demand.model].inc()

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, namespace="tokenlane", registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, documentation, labels, namespace="tokenlane", registry=self.registry, buckets=buckets)


class _SettlingCollector(Collector):
    """Shows nothing; lets others bring their metrics up to date."""

    settle: Callable[[], None] | None = None

    def collect(self) -> Iterator[Metric]:
        if self.settle is not None:
            self.settle()
        return iter(())


class _TokenizerCollector(Collector):
    """Who counts for each model at the moment of the scrape, and whether by segments; none without `counter`."""

    counter: TokenCounter | None = None

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "tokenlane_tokenizer_backend", "1 for the library that counts for a model", labels=("model", "backend")
        )
        cached = GaugeMetricFamily(
            "tokenlane_tokenizer_segment_cache",
            "1 while counts of segments are kept for a model, 0 where they could not be added up",
            labels=("model",),
        )
        for model, backend in self.counter.backends().items() if self.counter else ():
            family.add_metric((model, backend.name), 1)
            cached.add_metric((model,), backend.segments_doubt is None)
        yield family
        yield cached


class _DeskCollector(Collector):
    """What the desk holds at the moment of the scrape."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        desk = self._desk
        yield InfoMetricFamily("tokenlane_policy", "Policy in force", {"version": desk.policy.version})
        yield GaugeMetricFamily("tokenlane_streams", "Requests admitted or being decided", value=desk.streams)
        yield GaugeMetricFamily("tokenlane_intake_bytes", "Bodies being counted", value=desk.intake_bytes)
        yield GaugeMetricFamily(
            "tokenlane_orphans", "Open reservations that no stream watches", value=len(desk.orphans)
        )
        yield GaugeMetricFamily("tokenlane_draining", "1 while this process stops", value=desk.draining)
        families = {
            "reserved_tokens": "Tokens held by open reservations",
            "available_tokens": "Tokens that a reservation could take",
            "gross_tokens": "Load-tested ceiling",
            "guard_tokens": "Part of the ceiling that is never handed out",
            "active_requests": "Open reservations",
            "replica_ready": "1 when the last probes succeeded",
        }
        gauges = {
            name: GaugeMetricFamily(f"tokenlane_{name}", text, labels=("pool", "replica"))
            for name, text in families.items()
        }
        for account in desk.ledger.accounts.values():
            replica = account.replica
            labels = (replica.pool, replica.name)
            gauges["reserved_tokens"].add_metric(labels, account.active_tokens)
            gauges["available_tokens"].add_metric(labels, account.available_tokens)
            gauges["gross_tokens"].add_metric(labels, replica.gross_tokens)
            gauges["guard_tokens"].add_metric(labels, replica.guard_tokens)
            gauges["active_requests"].add_metric(labels, account.active_requests)
            gauges["replica_ready"].add_metric(labels, account.ready)
        yield from gauges.values()
