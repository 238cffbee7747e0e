"""Names on which Envoy and the service agree."""

from __future__ import annotations

METADATA_NAMESPACE = "llm.admission"
"""Dynamic metadata written by the service at the verdict."""

METADATA_REASON = "reason"
"""Present in the metadata of every refusal of ours, and of nothing else."""

LANE_HEADER = "x-llm-lane"
POOL_HEADER = "x-llm-pool"
REASON_HEADER = "x-llm-reason"
DESTINATION_HEADER = "x-gateway-destination-endpoint"

OWN_PREFIX = "x-llm-"
"""Headers that only the gateway writes, in both directions."""

TOKENLANE_CLUSTER = "tokenlane"
"""Cluster of the service. Each pool has its cluster under its own name."""
