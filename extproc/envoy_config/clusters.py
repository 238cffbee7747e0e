"""Clusters: one for each pool of engines, and one for the service."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec import v3 as upstream_codec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstreams
from envoy_data_plane.google.protobuf import Any as ProtoAny

from extproc.core.names import DESTINATION_HEADER, OWN_PREFIX
from extproc.core.policy import Policy, Pool
from extproc.envoy_config.addresses import address
from extproc.envoy_config.packing import extension, remove_prefix

TOKENLANE_CLUSTER = "tokenlane"
"""Cluster of the service. Each pool has its cluster under its own name."""

CONNECT_TIMEOUT = timedelta(seconds=1)
"""Engines and the service are a hop away: longer means that nobody listens."""

ENGINE_IDLE_TIMEOUT = timedelta(seconds=4)
"""Below the 5 s after which uvicorn closes an idle connection: Envoy closes first, so none is reused while dying."""

KEEPALIVE = core.KeepaliveSettings(interval=timedelta(seconds=10), timeout=timedelta(seconds=10))
"""A service that vanished without a word is noticed within both together."""

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def clusters(policy: Policy, tokenlane: str) -> list[cluster.Cluster]:
    """Every cluster of the configuration, the service's last."""
    streams_max = policy.limits.streams_max
    return [*(_pool(pool, streams_max) for pool in policy.pools.values()), _tokenlane(tokenlane, streams_max)]


def _pool(pool: Pool, streams_max: int) -> cluster.Cluster:
    options = upstreams.HttpProtocolOptions(
        common_http_protocol_options=core.HttpProtocolOptions(idle_timeout=ENGINE_IDLE_TIMEOUT),
        explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=core.Http1ProtocolOptions()
        ),
        http_filters=_engine_filters(),
    )
    requests_max = sum(replica.requests_max for replica in pool.replicas)
    return cluster.Cluster(
        name=pool.name,
        connect_timeout=CONNECT_TIMEOUT,
        # The ledger bounds reservations; a lower breaker of Envoy's would refuse what was admitted.
        circuit_breakers=_breakers(requests_max + streams_max),
        typed_extension_protocol_options={HTTP_OPTIONS: ProtoAny.pack(options)},
        load_assignment=_endpoints(pool.name, [replica.address for replica in pool.replicas]),
        load_balancing_policy=_reserved_replica(),
    )


def _engine_filters() -> list[hcm.HttpFilter]:
    """Removes the gateway's own headers from what engines answer, before the router adds the true ones."""
    stripped = header_mutation.Mutations(response_mutations=[remove_prefix(OWN_PREFIX)])
    return [
        hcm.HttpFilter(
            name="envoy.filters.http.header_mutation",
            typed_config=ProtoAny.pack(header_mutation.HeaderMutation(mutations=stripped)),
        ),
        hcm.HttpFilter(
            name="envoy.filters.http.upstream_codec", typed_config=ProtoAny.pack(upstream_codec.UpstreamCodec())
        ),
    ]


def _reserved_replica() -> cluster.LoadBalancingPolicy:
    """The replica named by the verdict. Only bypassed requests name none and take the fallback."""
    return _policy(
        "envoy.load_balancing_policies.override_host",
        override_host.OverrideHost(
            override_host_sources=[override_host.OverrideHostOverrideHostSource(header=DESTINATION_HEADER)],
            fallback_policy=_policy("envoy.load_balancing_policies.least_request", least_request.LeastRequest()),
        ),
    )


def _policy(name: str, message: override_host.OverrideHost | least_request.LeastRequest) -> cluster.LoadBalancingPolicy:
    policy = cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension(name, message))
    return cluster.LoadBalancingPolicy(policies=[policy])


def _tokenlane(target: str, streams_max: int) -> cluster.Cluster:
    options = upstreams.HttpProtocolOptions(
        explicit_http_config=upstreams.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions(connection_keepalive=KEEPALIVE)
        )
    )
    return cluster.Cluster(
        name=TOKENLANE_CLUSTER,
        connect_timeout=CONNECT_TIMEOUT,
        # Each request holds a stream until its response ends, and one over the bound needs one to be told so.
        circuit_breakers=_breakers(2 * streams_max),
        typed_extension_protocol_options={HTTP_OPTIONS: ProtoAny.pack(options)},
        load_assignment=_endpoints(TOKENLANE_CLUSTER, [target]),
    )


def _breakers(count: int) -> cluster.CircuitBreakers:
    thresholds = cluster.CircuitBreakersThresholds(
        max_connections=count, max_pending_requests=count, max_requests=count, max_retries=count
    )
    return cluster.CircuitBreakers(thresholds=[thresholds])


def _endpoints(name: str, targets: list[str]) -> endpoint.ClusterLoadAssignment:
    hosts = [endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=address(target))) for target in targets]
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=hosts)]
    )
