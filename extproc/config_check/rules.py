"""The rule tables, and their application to a configuration. Each rule stands on a measured fact about Envoy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extproc.config_check import cluster_rules as clusters
from extproc.config_check import contract_rules as contract
from extproc.config_check import filter_rules as filters
from extproc.config_check import route_rules as routes
from extproc.config_check import time_and_size_rules as bounds
from extproc.config_check.document import Node, ShapeError
from extproc.config_check.findings import Finding, Rule, Severity, Subject
from extproc.config_check.view import Bootstrap, Manager
from extproc.core.policy import Policy

_E, _W = Severity.ERROR, Severity.WARNING

BOOTSTRAP_RULES: tuple[Rule[Bootstrap], ...] = (
    Rule("no-filter", _E, clusters.no_filter),
    Rule("unguarded", _W, clusters.unguarded),
    Rule("service-cluster", _E, clusters.service_cluster),
    Rule("service-http2", _E, clusters.service_http2),
    Rule("service-breaker", _E, clusters.service_breaker),
    Rule("service-pending", _W, clusters.service_pending),
    Rule("engine-breaker", _E, clusters.engine_breaker),
    Rule("reserved-replica", _E, clusters.reserved_replica),
    Rule("unknown-endpoints", _W, clusters.unknown_endpoints),
    Rule("unseen", _W, clusters.unseen),
)
"""Applied once."""

MANAGER_RULES: tuple[Rule[Manager], ...] = (
    Rule("request-headers", _E, filters.request_headers_sent),
    Rule("request-body", _E, filters.request_body_buffered),
    Rule("response-trailers", _E, filters.response_trailers_sent),
    Rule("response-body", _E, filters.response_body_not_sent),
    Rule("response-headers", _W, filters.response_headers_not_sent),
    Rule("response-samples", _W, filters.responses_sampled),
    Rule("failure-mode", _E, filters.failure_mode_open),
    Rule("message-timeout", _E, filters.message_timeout),
    Rule("immediate-response", _E, filters.immediate_response),
    Rule("observability", _E, filters.observability),
    Rule("route-cache", _E, filters.route_cache),
    Rule("metadata-namespace", _E, filters.metadata_namespace),
    Rule("mutation-rules", _E, filters.mutation_rules),
    Rule("forward-rules", _E, filters.forward_rules),
    Rule("filter-enabled", _E, filters.filter_enabled),
    Rule("filter-order", _E, filters.filter_order),
    Rule("engine-busy", _W, filters.engine_busy),
    Rule("one-ext-proc", _W, filters.one_ext_proc),
    Rule("grpc-service", _E, filters.grpc_service),
    Rule("route-bypass", _E, routes.route_bypass),
    Rule("route-fail-closed", _E, routes.route_fail_closed),
    Rule("verdict-route", _E, routes.verdict_route),
    Rule("verdict-cluster", _E, routes.verdict_cluster),
    Rule("route-timeout", _E, routes.route_timeout),
    Rule("route-tries", _E, routes.route_tries),
    Rule("route-reruns", _W, routes.route_reruns),
    Rule("route-doubles", _E, routes.route_doubles),
    Rule("stream-idle", _E, bounds.stream_idle),
    Rule("stream-duration", _E, bounds.stream_duration),
    Rule("request-timeout", _W, bounds.request_timeout),
    Rule("body-buffer", _E, bounds.body_buffer),
    Rule("stream-window", _E, bounds.stream_window),
    Rule("message-size", _W, bounds.message_size),
    Rule("strip-verdict", _E, contract.strip_verdict),
    Rule("strip-priority", _E, contract.strip_priority),
    Rule("strip-prefix", _W, contract.strip_prefix),
    Rule("upgrades", _W, contract.upgrades),
    Rule("paths", _W, contract.paths),
    Rule("request-id", _W, contract.request_id),
    Rule("local-replies", _W, contract.local_replies),
    Rule("access-log", _W, contract.access_log),
    Rule("access-log-cluster", _E, contract.access_log_cluster),
)
"""Applied to each connection manager that asks the service."""

SHAPE = "shape"
"""The rule of findings about values that Envoy could not read either."""


def check(policy: Policy, document: Node) -> list[Finding]:
    """Everything wrong with the bootstrap `document` under `policy`: errors first, in the order of the rules."""
    bootstrap = Bootstrap(document, policy)
    found = list(_apply(BOOTSTRAP_RULES, policy, [("the file", bootstrap)]))
    try:
        guarded = bootstrap.guarded
    except ShapeError:
        guarded = []  # the rules above have said so
    found += _apply(MANAGER_RULES, policy, [(manager.where, manager) for manager in guarded])
    return sorted(dict.fromkeys(found), key=lambda finding: finding.severity is Severity.WARNING)


def _apply(rules: Iterable[Rule[Subject]], policy: Policy, subjects: list[tuple[str, Subject]]) -> Iterator[Finding]:
    for rule in rules:
        for place, subject in subjects:
            try:
                for where, sentence in rule.find(policy, subject):
                    yield Finding(rule.severity, rule.name, where, sentence)
            except ShapeError as error:
                yield Finding(Severity.ERROR, SHAPE, place, f"{error}, so Envoy refuses to start")
