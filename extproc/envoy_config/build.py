"""The whole bootstrap, as the dictionary and as the YAML that Envoy reads."""

from __future__ import annotations

from typing import Any

import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap import v3 as envoy_bootstrap
from envoy_data_plane.google.protobuf import Struct

from extproc.core.policy import Policy
from extproc.envoy_config.addresses import Addresses, address
from extproc.envoy_config.clusters import TOKENLANE_CLUSTER, clusters
from extproc.envoy_config.listener import build_listener

RUNTIME = {"envoy.reloadable_features.ext_proc_graceful_grpc_close": True}
"""Envoy half-closes a stream when its response has ended, without the reset that a lost connection looks like too."""


def bootstrap(policy: Policy, addresses: Addresses) -> dict[str, Any]:
    """Envoy's bootstrap for `policy` in JSON form, with the field names of the API (snake_case).

    ValueError when a pool has the name of the service's own cluster.
    """
    if TOKENLANE_CLUSTER in policy.pools:
        raise ValueError(f"pool {TOKENLANE_CLUSTER}: the cluster of the service has this name")
    message = envoy_bootstrap.Bootstrap(
        admin=envoy_bootstrap.Admin(address=address(addresses.admin)),
        static_resources=envoy_bootstrap.BootstrapStaticResources(
            listeners=[build_listener(policy, addresses.listen)],
            clusters=clusters(policy, addresses.tokenlane),
        ),
        layered_runtime=envoy_bootstrap.LayeredRuntime(
            layers=[envoy_bootstrap.RuntimeLayer(name="static", static_layer=Struct.from_dict(RUNTIME))]
        ),
    )
    return message.to_dict(casing=Casing.SNAKE)


def to_yaml(config: dict[str, Any]) -> str:
    """The configuration as YAML, in the order in which it was built."""
    return yaml.dump(config, Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)


class _PlainDumper(yaml.SafeDumper):
    """Writes shared objects out each time: anchors would only hide what Envoy reads."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 (the signature of the base)
        return True
