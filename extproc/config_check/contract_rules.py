"""Rules for what clients may send and what they are told: headers, paths, upgrades, Envoy's own replies, the log."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config_check.document import Node, choice, flag, section, sections, text, unpack
from extproc.config_check.findings import Fault
from extproc.config_check.matching import VERDICT_HEADERS, string_matches
from extproc.config_check.view import Manager, grpc_cluster
from extproc.core.names import DESTINATION_HEADER, METADATA_NAMESPACE, METADATA_REASON, METADATA_TICKET, OWN_PREFIX
from extproc.core.policy import Policy
from extproc.envoy_config.listener import ENGINE_PRIORITY_HEADERS

OTHER_OWN_HEADER = f"{OWN_PREFIX}any"
"""Stands for every header of the prefix that is not looked at by name."""

SLASH_ACTIONS = (
    "IMPLEMENTATION_SPECIFIC_DEFAULT",
    "KEEP_UNCHANGED",
    "REJECT_REQUEST",
    "UNESCAPE_AND_REDIRECT",
    "UNESCAPE_AND_FORWARD",
)


def strip_verdict(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """A client's copies of the headers that a verdict sets are removed before the first route lookup."""
    forged = [name for name in VERDICT_HEADERS if _arrives(manager, name)]
    if forged:
        effect = "names its own replica" if forged == [DESTINATION_HEADER] else "admits itself"
        yield Fault(
            manager.where,
            f"early_header_mutation_extensions leave {', '.join(forged)}, so a client that sends them {effect}",
        )


def strip_priority(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Headers by which clients would jump an engine's queue are removed."""
    kept = [name for name in ENGINE_PRIORITY_HEADERS if _arrives(manager, name)]
    if kept:
        yield Fault(
            manager.where,
            f"early_header_mutation_extensions leave {', '.join(kept)}, so a client that sends them jumps its engine's "
            "queue",
        )


def strip_prefix(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """All headers of the gateway's own prefix are removed from requests."""
    if _arrives(manager, OTHER_OWN_HEADER) and not all(_arrives(manager, name) for name in VERDICT_HEADERS):
        yield Fault(
            manager.where,
            f"early_header_mutation_extensions do not remove the prefix {OWN_PREFIX}, so engines and logs take a "
            "client's words for the gateway's",
        )


def _arrives(manager: Manager, name: str) -> bool:
    """Whether a request header of a client is still there after the early mutations, or is written by them."""
    there = True
    for extension in sections(manager.config, "early_header_mutation_extensions"):
        for mutation in sections(unpack(extension)[1], "mutations"):
            if _removes(mutation, name):
                there = False
            elif text(section(mutation, "append", "header"), "key").lower() == name:
                there = True
    return there


def _removes(mutation: Node, name: str) -> bool:
    if text(mutation, "remove").lower() == name:
        return True
    return string_matches(section(mutation, "remove_on_match", "key_matcher"), name) is True


def upgrades(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """No upgrade is offered."""
    places = [(manager.where, manager.config), *((route.where, route.action) for route in manager.routes)]
    for where, node in places:
        kinds = [text(config, "upgrade_type") for config in sections(node, "upgrade_configs") if _enabled(config)]
        if kinds:
            yield Fault(
                where,
                f"upgrade_configs offer {', '.join(kinds)}, but the service refuses every upgrade, because what it "
                "would carry could not be counted",
            )


def _enabled(config: Node) -> bool:
    return "enabled" not in config or flag(config, "enabled")


def paths(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Paths are normalized, but for escaped slashes."""
    for name in ("normalize_path", "merge_slashes"):
        if not flag(manager.config, name):
            yield Fault(manager.where, f"{name} is not true, so other spellings of a served path are answered 404")
    action = choice(manager.config, "path_with_escaped_slashes_action", SLASH_ACTIONS)
    if action not in SLASH_ACTIONS[:2]:
        yield Fault(
            manager.where,
            f"path_with_escaped_slashes_action is {action}, so a path with %2F is not answered by the contract",
        )


def request_id(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Every answer carries its request id."""
    if not flag(manager.config, "always_set_request_id_in_response"):
        yield Fault(
            manager.where,
            "always_set_request_id_in_response is not true, so clients cannot say which request they mean",
        )


def local_replies(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Envoy's own replies are mapped into the contract, and the service's refusals are left alone."""
    mappers = sections(section(manager.config, "local_reply_config"), "mappers")
    if not mappers:
        yield Fault(
            manager.where,
            "there is no local_reply_config, so Envoy's own 413, 503 and 504 reach clients without a reason or a "
            "Retry-After",
        )
    for number, mapper in enumerate(mappers, start=1):
        if not _spares_refusals(section(mapper, "filter")):
            yield Fault(
                manager.where,
                f"mapper {number} of local_reply_config does not ask whether {METADATA_NAMESPACE} has a "
                f"{METADATA_REASON}, so it rewrites refusals of the service",
            )


def _spares_refusals(condition: Node) -> bool:
    if any(_spares_refusals(part) for part in sections(section(condition, "and_filter"), "filters")):
        return True
    return _looks_at(condition, METADATA_REASON)


def _looks_at(condition: Node, key: str) -> bool:
    """Whether an access log filter asks for `key` of the metadata that the service writes."""
    matcher = section(condition, "metadata_filter", "matcher")
    keys = [text(segment, "key") for segment in sections(matcher, "path")]
    return text(matcher, "filter") == METADATA_NAMESPACE and keys == [key]


def access_log(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """The service gets the end of every response in Envoy's access log."""
    service = grpc_cluster(manager.ext_proc)
    loggers = [item for item in sections(manager.config, "access_log") if _log_cluster(item) == service]
    if not service:
        return
    if not loggers:
        yield Fault(
            manager.where,
            "no gRPC access log leads to the service, so reservations of a process that died are held until "
            "response_s_max",
        )
    elif not any(_keeps_admitted(section(item, "filter")) for item in loggers):
        yield Fault(
            manager.where,
            f"the access log to the service has a filter by other than {METADATA_TICKET}, so reservations of a process "
            "that died are held until response_s_max where it drops the entry",
        )


def _keeps_admitted(condition: Node) -> bool:
    """Whether an access log filter lets every admitted request through: only those have a ticket."""
    if not condition:
        return True
    matcher = section(condition, "metadata_filter", "matcher")
    return (
        _looks_at(condition, METADATA_TICKET)
        and flag(section(matcher, "value"), "present_match")
        and not flag(matcher, "invert")
    )


def access_log_cluster(_policy: Policy, manager: Manager) -> Iterator[Fault]:
    """Every gRPC access log leads to a cluster that exists."""
    known = manager.bootstrap.clusters
    for item in sections(manager.config, "access_log"):
        name = _log_cluster(item)
        if name and name not in known and not manager.bootstrap.clusters_by_xds:
            yield Fault(
                manager.where, f"the access log is sent to cluster {name}, which does not exist, so nobody gets it"
            )


def _log_cluster(item: Node) -> str:
    kind, config = unpack(item)
    return grpc_cluster(section(config, "common_config")) if kind == "HttpGrpcAccessLogConfig" else ""
