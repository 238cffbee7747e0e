"""Rules for the file as a whole: its clusters, and what it does not hold."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config_check.document import section, sections, text, unpack
from extproc.config_check.findings import Fault
from extproc.config_check.view import Bootstrap, Manager, canonical, grpc_cluster
from extproc.core.names import DESTINATION_HEADER
from extproc.core.policy import Policy


def no_filter(_policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """A listener asks the service."""
    if not bootstrap.guarded:
        yield Fault(
            "the file", "no HTTP connection manager in it has an ext_proc filter, so nothing is admitted or refused"
        )


def unguarded(_policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """Nothing leads to an engine past the service."""
    engines = bootstrap.engine_names
    if not bootstrap.guarded:
        return
    for where, listener, kind, config in bootstrap.network_filters:
        if kind == "HttpConnectionManager":
            manager = Manager(where, config, listener, bootstrap)
            reached = manager.position is None and bool(manager.engine_hosts)
        else:
            parts = [config, *sections(section(config, "weighted_clusters"), "clusters")]
            reached = kind == "TcpProxy" and bool(
                {text(part, key) for part in parts for key in ("cluster", "name")} & engines
            )
        if reached:
            yield Fault(
                where, "it leads to an engine without the ext_proc filter, so tokens run there that nobody reserved"
            )


def service_cluster(_policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """The cluster of the service exists."""
    for manager in bootstrap.guarded:
        name = grpc_cluster(manager.ext_proc)
        if name and name not in bootstrap.clusters and not bootstrap.clusters_by_xds:
            yield Fault(
                manager.where,
                f"the ext_proc filter calls cluster {name}, which does not exist, so nothing is admitted",
            )


def service_http2(_policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """Envoy speaks HTTP/2 to the service."""
    for cluster in bootstrap.services:
        if not cluster.http2:
            yield Fault(
                cluster.where,
                "it has no http2_protocol_options, so gRPC to the service fails and nothing is admitted",
            )


def service_breaker(policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """The breaker of the service's cluster lets all streams through."""
    needed = policy.limits.streams_max
    for cluster in bootstrap.services:
        if (limit := cluster.limit("max_requests")) < needed:
            yield Fault(
                cluster.where,
                f"max_requests of its circuit breaker is {limit}, so with that many responses running nothing more is "
                f"admitted, below the {needed} of streams_max",
            )


def service_pending(policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """The breaker of the service's cluster lets all streams wait for a connection."""
    needed = policy.limits.streams_max
    for cluster in bootstrap.services:
        if (limit := cluster.limit("max_pending_requests")) < needed:
            yield Fault(
                cluster.where,
                f"max_pending_requests of its circuit breaker is {limit}, so of the requests that wait while Envoy "
                "connects to the service, the rest is answered as not admitted",
            )


def engine_breaker(policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """The breakers of engine clusters let through what may be admitted."""
    for cluster in bootstrap.engines:
        held = cluster.addresses or frozenset()
        needed = sum(replica.requests_max for replica in policy.replicas() if canonical(replica.address) in held)
        for name in ("max_requests",) if cluster.http2 else ("max_requests", "max_connections"):
            if (limit := cluster.limit(name)) < needed:
                yield Fault(
                    cluster.where,
                    f"{name} of its circuit breaker is {limit}, so Envoy holds back or refuses what was admitted (its "
                    f"replicas take {needed} requests)",
                )


def reserved_replica(_policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """Engine clusters send a request to the replica that the verdict names."""
    for cluster in bootstrap.engines:
        if cluster.members:
            continue
        policies = sections(section(cluster.config, "load_balancing_policy"), "policies")
        kind, config = unpack(section(policies[0], "typed_extension_config")) if policies else ("", {})
        headers = [text(source, "header").lower() for source in sections(config, "override_host_sources")]
        if kind != "OverrideHost":
            problem = "it has no override_host load balancing policy"
        elif headers[:1] != [DESTINATION_HEADER]:
            problem = f"its override_host policy does not read {DESTINATION_HEADER} first"
        else:
            continue
        yield Fault(cluster.where, f"{problem}, so requests run on other replicas than those that hold their tokens")


def unknown_endpoints(policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """Engine clusters hold no endpoint that is not in the policy."""
    known = {canonical(replica.address) for replica in policy.replicas()}
    for cluster in bootstrap.engines:
        for address in sorted((cluster.addresses or frozenset()) - known):
            yield Fault(
                cluster.where, f"endpoint {address} is no replica of the policy, so it gets nothing but what bypasses"
            )


def unseen(_policy: Policy, bootstrap: Bootstrap) -> Iterator[Fault]:
    """The file holds everything that rules look at."""
    dynamic = section(bootstrap.config, "dynamic_resources")
    for name, title in (("lds_config", "listeners"), ("cds_config", "clusters")):
        if name in dynamic:
            yield Fault("the file", f"{name} brings {title} that are not in it, so they are not checked")
    for manager in bootstrap.guarded:
        for name in ("rds", "scoped_routes"):
            if name in manager.config:
                yield Fault(manager.where, f"{name} brings routes that are not in the file, so they are not checked")
        if "google_grpc" in section(manager.ext_proc, "grpc_service"):
            yield Fault(
                manager.where, "google_grpc calls the service past Envoy's clusters, so no cluster of it is checked"
            )
    for cluster in bootstrap.engines:
        if cluster.addresses is None and not cluster.members:
            yield Fault(
                cluster.where,
                "its endpoints are not in the file or are names, so they are not compared with the policy",
            )
