"""The Envoy side of the contract: a bootstrap configuration built from the policy.

Messages are built with their types, so a field that does not exist or has the wrong type cannot be written; Envoy's
own validation proves the rest. The package is only for where speed does not matter.
"""

from __future__ import annotations

from extproc.envoy_config.addresses import Addresses
from extproc.envoy_config.build import bootstrap, to_yaml

__all__ = ["Addresses", "bootstrap", "to_yaml"]
