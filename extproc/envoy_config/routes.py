"""The route table: a lane and a pool set by the service lead to the pool's cluster, everything else to 503.

The table fails closed, so the ext_proc filter may fail open: a crash of the service then never cuts a response that
is streaming, and still lets no unadmitted request through. Clients cannot write the headers that routes match:
`listener` removes them before the first lookup.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.type.matcher import v3 as matcher

from extproc.core.names import COUNT_HEADER, LANE_HEADER, METADATA_COUNT, METADATA_NAMESPACE, POOL_HEADER
from extproc.core.policy import Limits, Policy
from extproc.core.values import Lane, Reason
from extproc.envoy_config.packing import duration, header
from extproc.envoy_config.replies import REQUEST_ID, REQUEST_ID_HEADER, error_json, reply_headers

METADATA_HEADERS = {
    "lane": "x-llm-lane",
    "lane_reason": "x-llm-lane-reason",
    METADATA_COUNT: COUNT_HEADER,
    "input_tokens": "x-llm-input-tokens",
    "max_output_tokens": "x-llm-max-output-tokens",
    "reserved_tokens": "x-llm-reserved-tokens",
    "queue_ms": "x-llm-queue-ms",
    "policy": "x-llm-policy",
}
"""Metadata key -> response header. A key that the service left out sends no header."""


def route_table(policy: Policy) -> route.RouteConfiguration:
    """All routes of the listener."""
    return route.RouteConfiguration(
        name="tokenlane",
        virtual_hosts=[
            route.VirtualHost(
                name="tokenlane",
                domains=["*"],
                response_headers_to_add=[
                    header(name, f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:{key})%")
                    for key, name in METADATA_HEADERS.items()
                ]
                + [header(REQUEST_ID_HEADER, REQUEST_ID)],
                routes=[
                    *(_admitted(lane, pool, policy.limits) for lane, pool in lane_pools(policy)),
                    _fail_closed(policy.version),
                ],
            )
        ],
    )


def lane_pools(policy: Policy) -> list[tuple[Lane, str]]:
    """Every pair of lane and pool that a verdict of this policy can name, each once, in a stable order."""
    pairs = {(limits.lane, limits.pool) for model in policy.models.values() for limits in model.lanes}
    pairs |= {(Lane.BYPASS, rule.pool) for rule in policy.bypass}
    return sorted(pairs)


def _admitted(lane: Lane, pool: str, limits: Limits) -> route.Route:
    return route.Route(
        name=f"{lane}-{pool}",
        match=route.RouteMatch(prefix="/", headers=[_exact(LANE_HEADER, lane), _exact(POOL_HEADER, pool)]),
        route=route.RouteAction(
            cluster=pool,
            # Runs from the hand-over of the complete, admitted request to the end of the response, over all
            # attempts: the one timer that neither upload nor queueing shortens.
            timeout=duration(limits.response_ns_max),
            retry_policy=_retries(limits.upstream_retries_max),
        ),
        response_headers_to_add=[header("x-llm-replica", "%UPSTREAM_REMOTE_ADDRESS%")],
    )


def _retries(count: int) -> route.RetryPolicy | None:
    """Retries only where no engine has seen the request, so that none runs twice on one reservation."""
    return route.RetryPolicy(retry_on="connect-failure,refused-stream", num_retries=count) if count else None


def _fail_closed(policy_version: str) -> route.Route:
    """No verdict, no engine. The body stands here too, for a listener without this one's local replies."""
    reason = Reason.ADMISSION_UNAVAILABLE
    return route.Route(
        name="no-admission",
        match=route.RouteMatch(prefix="/"),
        direct_response=route.DirectResponseAction(
            status=503, body=core.DataSource(inline_string=error_json(reason, request_id=None))
        ),
        response_headers_to_add=[header("content-type", "application/json"), *reply_headers(reason, policy_version)],
    )


def _exact(name: str, value: str) -> route.HeaderMatcher:
    return route.HeaderMatcher(name=name, string_match=matcher.StringMatcher(exact=value))
