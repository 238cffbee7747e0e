"""Rules for the ext_proc filter: what the service sees, and what Envoy does with its replies."""

from __future__ import annotations

import re
from collections.abc import Iterator

from extproc.config_check.document import Node, choice, duration_ns, flag, section, sections, texts
from extproc.config_check.findings import Fault
from extproc.config_check.matching import regex_matches, string_matches
from extproc.config_check.view import CUSTOM_RESPONSE, EXT_PROC, ROUTER, Manager
from extproc.core.names import (
    DESTINATION_HEADER,
    LANE_HEADER,
    METADATA_NAMESPACE,
    POOL_HEADER,
    READ_HEADERS,
    REASON_HEADER,
)
from extproc.core.policy import Policy

HEADER_MODES = ("DEFAULT", "SEND", "SKIP")
BODY_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
CACHE_ACTIONS = ("DEFAULT", "CLEAR", "RETAIN")

NS_PER_MS = 1_000_000
MESSAGE_TIMEOUT_NS = 200 * NS_PER_MS
"""Envoy's default of `message_timeout`."""

WRITTEN_HEADERS = (
    LANE_HEADER,
    POOL_HEADER,
    DESTINATION_HEADER,
    "content-length",
    "content-type",
    REASON_HEADER,
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-llm-policy",
    "x-llm-input-tokens",
    "x-llm-max-output-tokens",
    "x-llm-reserved-tokens",
    "x-llm-queue-ms",
)
"""Headers that the service sets, on requests or on its refusals."""


def request_headers_sent(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Request headers are sent to the service."""
    if choice(manager.processing_mode, "request_header_mode", HEADER_MODES) == "SKIP":
        yield Fault(
            manager.where,
            "request_header_mode is SKIP, so headers are gone before a verdict can set the lane, and every request "
            "meets the route of one that was not admitted",
        )


def request_body_buffered(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Request bodies are buffered."""
    mode = choice(manager.processing_mode, "request_body_mode", BODY_MODES)
    if mode == "NONE":
        yield Fault(
            manager.where, "request_body_mode is NONE, so no body reaches the service, and no prompt is ever admitted"
        )
    elif mode != "BUFFERED":
        yield Fault(
            manager.where,
            f"request_body_mode is {mode}, so the service gets large bodies in pieces and takes the first for all",
        )


def response_trailers_sent(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Response trailers are sent to the service."""
    if choice(manager.processing_mode, "response_trailer_mode", HEADER_MODES) != "SEND":
        yield Fault(
            manager.where,
            "response_trailer_mode is not SEND, so Envoy may end the stream at the response headers, and tokens are "
            "handed out again while the engine still works on them",
        )


def response_body_not_sent(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Response bodies are not sent to the service."""
    mode = choice(manager.processing_mode, "response_body_mode", BODY_MODES)
    if mode != "NONE":
        yield Fault(
            manager.where,
            f"response_body_mode is {mode}, so every chunk of an answer waits for the service, and one that is slow or "
            "gone stops answers that run",
        )


def response_headers_not_sent(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Response headers are not sent to the service."""
    if choice(manager.processing_mode, "response_header_mode", HEADER_MODES) != "SKIP":
        yield Fault(
            manager.where,
            "response_header_mode is not SKIP, so every answer waits for one more exchange with the service before its "
            "first byte",
        )


def responses_sampled(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The service may ask for the bodies of the responses that the policy wants compared."""
    if not policy.drift_sample_ppm:
        return
    if not flag(manager.ext_proc, "allow_mode_override"):
        yield Fault(
            manager.where,
            "allow_mode_override is not true, so no response reaches the service, and none is compared with its count",
        )
    allowed = sections(manager.ext_proc, "allowed_override_modes")
    if allowed and not any(_sends_response_bodies(mode) for mode in allowed):
        yield Fault(
            manager.where,
            "allowed_override_modes lacks the mode that sends response bodies, so none is compared with its count",
        )


def _sends_response_bodies(mode: Node) -> bool:
    """Whether an override is the one that the service asks for: all of it counts but the mode of request headers."""
    return (
        choice(mode, "request_body_mode", BODY_MODES) == "BUFFERED"
        and choice(mode, "response_body_mode", BODY_MODES) == "STREAMED"
        and choice(mode, "response_header_mode", HEADER_MODES) == "SKIP"
        and choice(mode, "response_trailer_mode", HEADER_MODES) == "SEND"
        and choice(mode, "request_trailer_mode", HEADER_MODES) == "SKIP"
    )


def failure_mode_open(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The filter fails open, for the route table fails closed."""
    if not flag(manager.ext_proc, "failure_mode_allow"):
        yield Fault(
            manager.where,
            "failure_mode_allow is not true, so when the service stops, Envoy cuts every response that is running",
        )


def message_timeout(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A message may wait for the longest verdict."""
    timeout_ns = duration_ns(manager.ext_proc, "message_timeout", MESSAGE_TIMEOUT_NS)
    if timeout_ns < policy.limits.decision_ns_max:
        yield Fault(
            manager.where,
            f"message_timeout is {seconds(timeout_ns)}, so a request whose verdict takes longer, within the "
            f"{seconds(policy.limits.decision_ns_max)} of decision_s_max, is answered as not admitted",
        )


def immediate_response(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The service may answer clients."""
    if flag(manager.ext_proc, "disable_immediate_response"):
        yield Fault(
            manager.where,
            "disable_immediate_response is true, so in place of a refusal the client is told 503, to come again",
        )


def observability(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The service's replies are used."""
    if flag(manager.ext_proc, "observability_mode"):
        yield Fault(
            manager.where,
            "observability_mode is true, so Envoy ignores every verdict, and every request meets the route of one that "
            "was not admitted",
        )


def route_cache(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A verdict chooses the route anew."""
    config = manager.ext_proc
    retained = choice(config, "route_cache_action", CACHE_ACTIONS) == "RETAIN"
    if retained or flag(config, "disable_clear_route_cache"):
        name = "route_cache_action is RETAIN" if retained else "disable_clear_route_cache is true"
        yield Fault(
            manager.where,
            f"{name}, so a request keeps the route from before its verdict, and what is admitted is answered 503",
        )


def metadata_namespace(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The metadata of verdicts is taken."""
    if METADATA_NAMESPACE not in texts(
        section(manager.ext_proc, "metadata_options", "receiving_namespaces"), "untyped"
    ):
        yield Fault(
            manager.where,
            f"receiving_namespaces.untyped lacks {METADATA_NAMESPACE}, so the access log has no ticket to end an "
            "orphan by, answers have no x-llm-* headers, and refusals are rewritten as replies of Envoy's own",
        )


def mutation_rules(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Every header that the service sets passes the filter."""
    rules = section(manager.ext_proc, "mutation_rules")
    dropped = [name for name in WRITTEN_HEADERS if not _may_write(rules, name)]
    if not dropped:
        return
    if {LANE_HEADER, POOL_HEADER} & set(dropped):
        effect = "what is admitted is answered as not admitted"
    elif DESTINATION_HEADER in dropped:
        effect = "a request runs on another replica than the one that holds its tokens"
    elif "content-length" in dropped:
        effect = "a request whose ceiling is written into its body is answered 500"
    else:
        effect = "refusals lose what the contract promises"
    yield Fault(manager.where, f"mutation_rules drop {', '.join(dropped)}, so {effect}")


def _may_write(rules: object, name: str) -> bool:
    """Whether HeaderMutationRules let a filter set `name`, none of which is a routing or an x-envoy header."""
    rules = rules if isinstance(rules, dict) else {}
    if regex_matches(section(rules, "disallow_expression"), name):
        return False
    if "allow_expression" in rules and regex_matches(section(rules, "allow_expression"), name):
        return True
    return not flag(rules, "disallow_all")


def forward_rules(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Every header that the service reads is forwarded to it."""
    rules = section(manager.ext_proc, "forward_rules")
    allowed = sections(section(rules, "allowed_headers"), "patterns")
    denied = sections(section(rules, "disallowed_headers"), "patterns")
    kept = [
        name
        for name in sorted(READ_HEADERS)
        if (not allowed or any(string_matches(pattern, name) for pattern in allowed))
        and not any(string_matches(pattern, name) for pattern in denied)
    ]
    missing = sorted(READ_HEADERS.difference(kept))
    if missing:
        yield Fault(
            manager.where,
            f"forward_rules keep {', '.join(missing)} from the service, so it judges requests by what it cannot see",
        )


def filter_enabled(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No listener, virtual host or route turns the filter off or changes it."""
    if manager.position is not None and flag(sections(manager.config, "http_filters")[manager.position], "disabled"):
        yield Fault(
            manager.where, "the ext_proc filter is disabled, so no request is admitted but where a route enables it"
        )
    places = [(manager.where, section(manager.config, "route_config"))]
    places += [(host.where, host.config) for host in manager.hosts]
    places += [(route.where, route.config) for route in manager.routes]
    for where, node in places:
        if manager.filter_name in section(node, "typed_per_filter_config"):
            yield Fault(
                where,
                "typed_per_filter_config changes the ext_proc filter, so what is checked here does not hold for "
                "requests that meet this first",
            )


def filter_order(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The filter stands before the router."""
    if ROUTER in [kind for kind, _ in manager.filters[: manager.position]]:
        yield Fault(
            manager.where, "the ext_proc filter stands behind the router, so a request leaves without a verdict"
        )


def engine_busy(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A custom_response filter turns an engine's own refusal into the contract's."""
    if CUSTOM_RESPONSE not in [kind for kind, _ in manager.filters]:
        yield Fault(
            manager.where,
            "there is no custom_response filter, so an engine's own 429 or 503 reaches the client as the engine words "
            "it, without a reason or a measured Retry-After",
        )


def one_ext_proc(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No other ext_proc filter comes after the service's."""
    if EXT_PROC in [kind for kind, _ in manager.filters[(manager.position or 0) + 1 :]]:
        yield Fault(
            manager.where,
            "another ext_proc filter follows, so it may send an admitted request to another replica than the one that "
            "holds its tokens",
        )


def grpc_service(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The filter calls the service over gRPC."""
    if "http_service" in manager.ext_proc:
        yield Fault(manager.where, "the filter calls an http_service, which gets no bodies, so nothing can be counted")
    elif not section(manager.ext_proc, "grpc_service"):
        yield Fault(manager.where, "the filter has no grpc_service, so no request has a verdict")


def seconds(ns: int) -> str:
    """A duration for a sentence."""
    return re.sub(r"\.?0+$", "", f"{ns / 1_000_000_000:.9f}") + " s"
