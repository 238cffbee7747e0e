"""Rules for the route table: no engine without a verdict, and with one the engine that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from extproc.config_check.document import Node, duration_ns, flag, section, sections, text, whole
from extproc.config_check.filter_rules import seconds
from extproc.config_check.findings import Fault
from extproc.config_check.matching import UNADMITTED
from extproc.config_check.view import Manager, Route, VirtualHost, canonical
from extproc.core.admission import EXPIRY_SLACK_NS
from extproc.core.names import DESTINATION_HEADER, LANE_HEADER, POOL_HEADER
from extproc.core.policy import Policy
from extproc.core.values import Lane
from extproc.envoy_config.routes import lane_pools

ROUTE_TIMEOUT_NS = 15_000_000_000
"""Envoy's default of a route's `timeout`."""

UNSEEN = frozenset({"connect-failure", "refused-stream", "reset-before-request"})
"""Retry conditions under which no engine has begun the request."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verdict makes of a request: the headers that it sets, and the path that it came for."""

    lane: Lane
    pool: str
    path: str

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by which it is routed; any address stands for the replica."""
        return {LANE_HEADER: self.lane.value, POOL_HEADER: self.pool, DESTINATION_HEADER: "192.0.2.1:1"}


def verdicts(policy: Policy) -> list[Verdict]:
    """Every admission and bypass that the policy can lead to."""
    lanes = [(lane, pool) for lane, pool in lane_pools(policy) if lane is not Lane.BYPASS]
    admitted = [Verdict(lane, pool, path.value) for lane, pool in lanes for path in sorted(policy.endpoints)]
    return admitted + [Verdict(Lane.BYPASS, rule.pool, rule.path) for rule in policy.bypass]


def ways(host: VirtualHost, verdict: Verdict) -> Iterator[Route]:
    """The routes that a request with this verdict can meet in `host`."""
    for route in host.routes:
        found = route.matches(verdict.headers, verdict.path)
        if found is not False:
            yield route
        if found:
            return


def engine_routes(policy: Policy, manager: Manager) -> list[Route]:
    """The routes to engines that an admitted request can meet, each once."""
    found = {
        route.where: route
        for host in manager.engine_hosts
        for verdict in verdicts(policy)
        if verdict.lane is not Lane.BYPASS
        for route in ways(host, verdict)
        if manager.reaches(route, verdict.headers)
    }
    return list(found.values())


def unadmitted_ways(host: VirtualHost) -> Iterator[Route]:
    """The routes that a request without a verdict can meet, whatever its client wrote."""
    for route in host.routes:
        found = route.matches(UNADMITTED)
        if found is not False:
            yield route
        if found:
            return


def route_bypass(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No route leads to an engine without a verdict's headers."""
    for host in manager.engine_hosts:
        for route in unadmitted_ways(host):
            if manager.reaches(route, UNADMITTED):
                yield Fault(
                    route.where,
                    f"it leads to an engine without asking for {LANE_HEADER}, so requests that were not admitted run",
                )


def route_fail_closed(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A request without a verdict is answered 503 by the route table."""
    for host in manager.engine_hosts:
        last: Route | None = None
        for route in unadmitted_ways(host):
            last = route
        if last is None or last.matches(UNADMITTED) is not True:
            yield Fault(
                host.where,
                "no route takes every request that was not admitted, so while the service is down clients are told 404 "
                "and do not come back",
            )
        elif "direct_response" not in last.config:
            if not manager.reaches(last, UNADMITTED):
                yield Fault(
                    last.where,
                    "it takes what was not admitted and is no direct_response, so clients get what is behind it",
                )
        elif (status := whole(section(last.config, "direct_response"), "status", 200)) != 503:
            yield Fault(
                last.where,
                f"a request that was not admitted is answered {status} and not 503, so clients take a restart of the "
                "service for an answer",
            )


def verdict_route(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Every verdict has a route to an engine."""
    hosts = manager.engine_hosts
    if not hosts and "route_config" in manager.config:
        yield Fault(
            manager.where, "no route leads to an engine of the policy, so whatever is admitted is answered otherwise"
        )
    for host in hosts:
        missing = {
            (verdict.lane, verdict.pool): verdict
            for verdict in verdicts(policy)
            if not any(manager.reaches(route, verdict.headers) for route in ways(host, verdict))
        }
        for lane, pool in missing:
            yield Fault(
                host.where,
                f"no route leads lane {lane} of pool {pool} to an engine, so what is admitted there never runs",
            )


def verdict_cluster(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The cluster that a verdict leads to holds every replica of its pool."""
    clusters = manager.bootstrap.clusters
    found: dict[Fault, None] = {}
    for host in manager.engine_hosts:
        for verdict in verdicts(policy):
            for route in ways(host, verdict):
                for name in sorted(route.targets(verdict.headers) or ()):
                    held = clusters[name].addresses if name in clusters else None
                    if held is None:
                        continue
                    for replica in policy.pools[verdict.pool].replicas:
                        if canonical(replica.address) not in held:
                            sentence = (
                                f"cluster {name} has no endpoint {replica.address}, so what is admitted to "
                                f"{replica.name} runs on another replica than the one that holds its tokens"
                            )
                            found[Fault(route.where, sentence)] = None
    yield from found


def route_timeout(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A route to an engine ends a response at response_s_max, neither before nor after."""
    wanted_ns = policy.limits.response_ns_max
    for route in engine_routes(policy, manager):
        timeout_ns = duration_ns(route.action, "timeout", ROUTE_TIMEOUT_NS)
        if timeout_ns == 0 or timeout_ns > wanted_ns + EXPIRY_SLACK_NS:
            yield Fault(
                route.where,
                f"its timeout is {seconds(timeout_ns) if timeout_ns else 'off'}, so a response may run on after the "
                f"{seconds(wanted_ns)} of response_s_max, when its tokens are handed out again",
            )
        elif timeout_ns < wanted_ns:
            yield Fault(
                route.where,
                f"its timeout is {seconds(timeout_ns)}, so Envoy ends responses that may run for the "
                f"{seconds(wanted_ns)} of response_s_max",
            )


def route_tries(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Retries stay within upstream_retries_max and on the reserved replica."""
    retries_max = policy.limits.upstream_retries_max
    for route in engine_routes(policy, manager):
        retries = route.retry_policy
        count = whole(retries, "num_retries", 1) if text(retries, "retry_on") else 0
        if count > retries_max:
            yield Fault(
                route.where,
                f"it retries {count} times but the destination header names the reserved replica for "
                f"upstream_retries_max {retries_max}, so the next try runs on a replica that holds no tokens for it",
            )
        if sections(retries, "retry_host_predicate"):
            yield Fault(
                route.where,
                "retry_host_predicate turns a retry away from the reserved replica, so it runs on one that holds no "
                "tokens for it",
            )


def route_reruns(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Retries repeat only what no engine has begun."""
    for route in engine_routes(policy, manager):
        conditions = {name.strip() for name in text(route.retry_policy, "retry_on").split(",")} - {"", *UNSEEN}
        if conditions:
            yield Fault(
                route.where,
                f"it retries on {', '.join(sorted(conditions))}, so an engine may run a request twice on one "
                "reservation",
            )


def route_doubles(policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No route sends one request to engines twice at a time, or gives up a try that may still run."""
    engines = manager.bootstrap.engine_names
    for route in engine_routes(policy, manager):
        hedge = section(route.action, "hedge_policy") or section(route.host, "hedge_policy")
        if flag(hedge, "hedge_on_per_try_timeout"):
            yield Fault(
                route.where, "its hedge_policy starts a second try beside the first, so one reservation runs twice"
            )
        for mirror in _mirrors(route, manager):
            if not text(mirror, "cluster") or text(mirror, "cluster") in engines:
                yield Fault(
                    route.where,
                    "its request_mirror_policies copy requests to an engine, so tokens run that nobody reserved",
                )
        for name in ("per_try_timeout", "per_try_idle_timeout"):
            timeout_ns = duration_ns(route.retry_policy, name, 0)
            if 0 < timeout_ns < policy.limits.response_ns_max:
                yield Fault(
                    route.where,
                    f"its {name} is {seconds(timeout_ns)}, so Envoy ends responses that may run for the "
                    f"{seconds(policy.limits.response_ns_max)} of response_s_max",
                )


def _mirrors(route: Route, manager: Manager) -> list[Node]:
    """The mirrors in force: the nearest that are stated."""
    for node in (route.action, route.host, section(manager.config, "route_config")):
        if found := sections(node, "request_mirror_policies"):
            return found
    return []
