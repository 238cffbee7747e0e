"""Rules for the bounds of a connection manager: no timer and no buffer below what the policy allows."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config_check.document import choice, duration_ns, section, whole
from extproc.config_check.filter_rules import seconds
from extproc.config_check.findings import Fault
from extproc.config_check.route_rules import engine_routes
from extproc.config_check.view import Manager
from extproc.core.policy import Policy

IDLE_NS = 300 * 1_000_000_000
"""Envoy's default of `stream_idle_timeout`."""

BUFFER_BYTES = 2**20
"""Envoy's default of `per_connection_buffer_limit_bytes`."""

WINDOW_BYTES = 16 * 2**20
"""Envoy's default of `initial_stream_window_size`, from 1.36 on."""

INJECTED_BYTES_MAX = 64 * 2**10
"""The most that the service adds to a body."""

HEADER_BYTES_MAX = 60 * 2**10
"""Envoy's default bound on request headers, which travel in messages too."""

CODECS = ("AUTO", "HTTP1", "HTTP2", "HTTP3")


def stream_idle(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No idle timer ends a request that waits for its verdict or its answer."""
    limits = policy.limits
    needed_ns = max(limits.decision_ns_max, limits.response_ns_max)
    idle = [(manager.where, "stream_idle_timeout", duration_ns(manager.config, "stream_idle_timeout", IDLE_NS))]
    idle += [
        (route.where, "idle_timeout", duration_ns(route.action, "idle_timeout", 0))
        for route in engine_routes(policy, manager)
    ]
    for where, name, timeout_ns in idle:
        if 0 < timeout_ns < needed_ns:
            yield Fault(
                where,
                f"{name} is {seconds(timeout_ns)}, so a request on which nothing moves for longer, as one that waits "
                f"for its verdict or for an answer that is not streamed, is cut before the {seconds(needed_ns)} that "
                "the policy allows",
            )


def stream_duration(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No bound on streams is below verdict and response together."""
    response_ns = policy.limits.response_ns_max
    whole_ns = policy.limits.decision_ns_max + response_ns
    bounds = [(manager.where, section(manager.config, "common_http_protocol_options"), whole_ns)]
    bounds += [(route.where, section(route.action, "max_stream_duration"), whole_ns) for route in manager.routes]
    for cluster in manager.bootstrap.engines:
        bounds.append((cluster.where, section(cluster.options, "common_http_protocol_options"), response_ns))
    for cluster in manager.bootstrap.services:
        bounds.append((cluster.where, section(cluster.options, "common_http_protocol_options"), whole_ns))
    for where, node, needed_ns in bounds:
        duration = duration_ns(node, "max_stream_duration", 0)
        if 0 < duration < needed_ns:
            yield Fault(
                where,
                f"max_stream_duration is {seconds(duration)}, so Envoy ends what may take {seconds(needed_ns)} by the "
                "policy",
            )


def request_timeout(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """An upload has a bound."""
    timeout_ns = duration_ns(manager.config, "request_timeout", 0)
    if timeout_ns == 0 or timeout_ns > policy.limits.decision_ns_max:
        yield Fault(
            manager.where,
            f"request_timeout is {seconds(timeout_ns) if timeout_ns else 'off'}, so a client that uploads slowly holds "
            f"a stream of the service for longer than the {seconds(policy.limits.decision_ns_max)} of decision_s_max",
        )


def body_buffer(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A body at the cap, and what is injected, fit Envoy's buffer."""
    needed = policy.limits.body_bytes_max + INJECTED_BYTES_MAX
    for host in manager.engine_hosts:
        limit = _buffer_bytes(manager, host.config)
        if limit < needed:
            yield Fault(
                manager.where,
                f"per_connection_buffer_limit_bytes is {limit}, so Envoy answers 413 to a body within body_bytes_max "
                f"{policy.limits.body_bytes_max}, even after its admission (needed with what is injected: {needed})",
            )
            return


def _buffer_bytes(manager: Manager, host: object) -> int:
    """The bound in a virtual host, or else of the listener."""
    listener = whole(manager.listener, "per_connection_buffer_limit_bytes", BUFFER_BYTES)
    node = host if isinstance(host, dict) else {}
    return whole(node, "request_body_buffer_limit", whole(node, "per_request_buffer_limit_bytes", listener))


def stream_window(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A body at the cap, and what is injected, fit the window of an HTTP/2 stream."""
    needed = policy.limits.body_bytes_max + INJECTED_BYTES_MAX
    window = _window_bytes(manager)
    if choice(manager.config, "codec_type", CODECS) != "HTTP1" and window < needed:
        yield Fault(
            manager.where,
            f"initial_stream_window_size is {window}, so over HTTP/2 Envoy answers 413 to a body within body_bytes_max "
            f"{policy.limits.body_bytes_max} (needed with what is injected: {needed})",
        )


def _window_bytes(manager: Manager) -> int:
    return whole(section(manager.config, "http2_protocol_options"), "initial_stream_window_size", WINDOW_BYTES)


def message_size(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Whatever Envoy buffers fits a message to the service."""
    taken = policy.limits.message_bytes_max
    buffered = {"per_connection_buffer_limit_bytes": _buffer_bytes(manager, {})}
    if choice(manager.config, "codec_type", CODECS) != "HTTP1":
        buffered["initial_stream_window_size"] = _window_bytes(manager)
    for name, limit in buffered.items():
        if limit > taken:
            yield Fault(
                manager.where,
                f"{name} is {limit}, so a body of more than {taken} bytes is buffered but too large for a message to "
                "the service, and its client is told 503, to come again, and not 413",
            )
