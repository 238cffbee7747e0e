"""What rules look at: the parts of a bootstrap, found by what they are and not by what they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from itertools import chain

from extproc.config_check.document import Node, choice, section, sections, text, texts, unpack, whole
from extproc.config_check.matching import UNADMITTED, VERDICT_HEADERS, route_matches
from extproc.core.names import METADATA_NAMESPACE
from extproc.core.policy import Policy
from extproc.envoy_config.clusters import TOKENLANE_CLUSTER

EXT_PROC, ROUTER, CUSTOM_RESPONSE = "ExternalProcessor", "Router", "CustomResponse"


@dataclass(frozen=True, slots=True)
class Cluster:
    """One static cluster."""

    name: str
    config: Node

    @property
    def where(self) -> str:
        """Its place in sentences."""
        return f"cluster {self.name}"

    @property
    def options(self) -> Node:
        """Its HTTP protocol options."""
        return section(
            self.config, "typed_extension_protocol_options", "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        )

    @property
    def http2(self) -> bool:
        """Whether Envoy speaks HTTP/2 to it, or finds out by ALPN."""
        explicit = section(self.options, "explicit_http_config")
        return "http2_protocol_options" in {**self.config, **explicit} or "auto_config" in self.options

    @property
    def addresses(self) -> frozenset[str] | None:
        """Its endpoints as `IP:port`, in the form of the policy; None when they are not in the file."""
        if "load_assignment" not in self.config:
            return None
        found = set()
        for locality in sections(section(self.config, "load_assignment"), "endpoints"):
            for host in sections(locality, "lb_endpoints"):
                socket = section(host, "endpoint", "address", "socket_address")
                if socket:
                    found.add(canonical(f"{text(socket, 'address')}:{whole(socket, 'port_value', 0)}"))
        return None if None in found else frozenset(address for address in found if address is not None)

    @property
    def members(self) -> list[str]:
        """The clusters of an aggregate."""
        kind, config = unpack(section(self.config, "cluster_type"))
        return texts(config, "clusters") if kind == "ClusterConfig" else []

    def limit(self, name: str) -> int:
        """A bound of its circuit breaker at default priority; Envoy's default is 1024."""
        for threshold in sections(section(self.config, "circuit_breakers"), "thresholds"):
            if choice(threshold, "priority", ("DEFAULT", "HIGH")) == "DEFAULT":
                return whole(threshold, name, 1024)
        return 1024


def canonical(address: str) -> str | None:
    """`IP:port` in one spelling; None for what is not an IP."""
    host, _, port = address.rpartition(":")
    try:
        ip = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


@dataclass(frozen=True, slots=True)
class Route:
    """One route of a virtual host."""

    where: str
    config: Node
    host: Node

    @property
    def action(self) -> Node:
        """Its RouteAction; empty for any other kind."""
        return section(self.config, "route")

    @property
    def retry_policy(self) -> Node:
        """The retries in force: its own, or its virtual host's."""
        return section(self.action, "retry_policy") or section(self.host, "retry_policy")

    def matches(self, verdict: Mapping[str, str], path: str | None = None) -> bool | None:
        """See `matching.route_matches`."""
        return route_matches(section(self.config, "match"), verdict, path)

    def targets(self, verdict: Mapping[str, str]) -> frozenset[str] | None:
        """The clusters that it leads to; None when the client or a plugin chooses."""
        action = self.action
        if not action:
            return frozenset()
        parts = [action, *sections(section(action, "weighted_clusters"), "clusters")]
        found = {text(part, key) for part in parts for key in ("cluster", "name") if key in part}
        for header in (text(part, "cluster_header").lower() for part in parts if "cluster_header" in part):
            if header not in VERDICT_HEADERS:
                return None
            found |= {verdict[header]} if header in verdict else set()
        return (
            None if {"cluster_specifier_plugin", "inline_cluster_specifier_plugin"} & set(action) else frozenset(found)
        )


@dataclass(frozen=True, slots=True)
class VirtualHost:
    """One virtual host of a route table."""

    where: str
    config: Node

    @property
    def routes(self) -> list[Route]:
        """Its routes, in the order in which they are tried."""
        return [
            Route(f"{self.where}, route {text(route, 'name') or number}", route, self.config)
            for number, route in enumerate(sections(self.config, "routes"), start=1)
        ]


@dataclass(frozen=True, slots=True)
class Manager:
    """One HTTP connection manager, with the listener and the bootstrap that it stands in."""

    where: str
    config: Node
    listener: Node
    bootstrap: Bootstrap

    @property
    def filters(self) -> list[tuple[str, Node]]:
        """Short type name and content of each HTTP filter."""
        return [unpack(item) for item in sections(self.config, "http_filters")]

    @property
    def position(self) -> int | None:
        """Where the service's ext_proc filter stands; None without one.

        Of several it is the one that takes the verdicts' metadata, else the one of a cluster with the service's name.
        """
        found = [number for number, (kind, _) in enumerate(self.filters) if kind == EXT_PROC]
        return max(found, key=lambda number: (self._ours(number), -number), default=None)

    def _ours(self, number: int) -> int:
        config = self.filters[number][1]
        namespaces = texts(section(config, "metadata_options", "receiving_namespaces"), "untyped")
        return 2 * (METADATA_NAMESPACE in namespaces) + (grpc_cluster(config) == TOKENLANE_CLUSTER)

    @property
    def filter_name(self) -> str:
        """Name of the service's filter, by which routes override it."""
        return text(sections(self.config, "http_filters")[self.position or 0], "name")

    @property
    def ext_proc(self) -> Node:
        """Content of the service's filter; empty without one."""
        return {} if self.position is None else self.filters[self.position][1]

    @property
    def processing_mode(self) -> Node:
        """What the filter sends to the service."""
        return section(self.ext_proc, "processing_mode")

    @property
    def hosts(self) -> list[VirtualHost]:
        """The virtual hosts in the file."""
        return [
            VirtualHost(f"{self.where}, virtual host {text(host, 'name')}", host)
            for host in sections(section(self.config, "route_config"), "virtual_hosts")
        ]

    @property
    def routes(self) -> list[Route]:
        """All routes of all virtual hosts."""
        return [route for host in self.hosts for route in host.routes]

    def reaches(self, route: Route, verdict: Mapping[str, str]) -> bool:
        """Whether `route` may lead to an engine; what a client chooses may."""
        targets = route.targets(verdict)
        return targets is None or bool(targets & self.bootstrap.engine_names)

    @property
    def engine_hosts(self) -> list[VirtualHost]:
        """The virtual hosts with a way to an engine."""
        return [host for host in self.hosts if any(self._leads(route) for route in host.routes)]

    def _leads(self, route: Route) -> bool:
        weighted = sections(section(route.action, "weighted_clusters"), "clusters")
        by_header = any("cluster_header" in part for part in (route.action, *weighted))
        return by_header or self.reaches(route, UNADMITTED)


@dataclass(frozen=True)
class Bootstrap:
    """A whole configuration, and the policy that says which of its clusters are engines."""

    config: Node
    policy: Policy

    @cached_property
    def clusters(self) -> dict[str, Cluster]:
        """The static clusters by name."""
        found = sections(section(self.config, "static_resources"), "clusters")
        return {text(config, "name"): Cluster(text(config, "name"), config) for config in found}

    @property
    def clusters_by_xds(self) -> bool:
        """Whether there may be clusters that the file does not hold."""
        return "cds_config" in section(self.config, "dynamic_resources")

    @property
    def network_filters(self) -> Iterator[tuple[str, Node, str, Node]]:
        """Where, listener, short type name and content of each network filter."""
        for number, listener in enumerate(sections(section(self.config, "static_resources"), "listeners"), start=1):
            where = f"listener {text(listener, 'name') or number}"
            default = section(listener, "default_filter_chain")
            links = chain(sections(listener, "filter_chains"), [default] if default else [])
            for item in (item for link in links for item in sections(link, "filters")):
                yield where, listener, *unpack(item)

    @property
    def managers(self) -> list[Manager]:
        """Every HTTP connection manager of every listener."""
        return [
            Manager(where, config, listener, self)
            for where, listener, kind, config in self.network_filters
            if kind == "HttpConnectionManager"
        ]

    @property
    def guarded(self) -> list[Manager]:
        """The connection managers that ask the service."""
        return [manager for manager in self.managers if manager.position is not None]

    @cached_property
    def engine_names(self) -> frozenset[str]:
        """Clusters that hold a replica of the policy, have the name of a pool, or are made of such clusters."""
        replicas = {canonical(replica.address) for replica in self.policy.replicas()}
        found = set(self.policy.pools)
        found |= {cluster.name for cluster in self.clusters.values() if replicas & (cluster.addresses or frozenset())}
        aggregates = [cluster for cluster in self.clusters.values() if cluster.members]
        for _ in aggregates:
            found |= {cluster.name for cluster in aggregates if found & set(cluster.members)}
        return frozenset(found)

    @property
    def engines(self) -> list[Cluster]:
        """The static clusters of engines."""
        return [cluster for name, cluster in self.clusters.items() if name in self.engine_names]

    @property
    def services(self) -> list[Cluster]:
        """The static clusters that ext_proc filters call, each once."""
        names = dict.fromkeys(grpc_cluster(manager.ext_proc) for manager in self.guarded)
        return [self.clusters[name] for name in names if name in self.clusters]


def grpc_cluster(config: Node) -> str:
    """The cluster that a filter or logger calls; empty when it calls none by `envoy_grpc`."""
    return text(section(config, "grpc_service", "envoy_grpc"), "cluster_name")
