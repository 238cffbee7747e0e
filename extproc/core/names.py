"""Names of the contract: request headers, response headers and metadata that Envoy, the service and clients share."""

from __future__ import annotations

METADATA_NAMESPACE = "llm.admission"
"""Envoy dynamic metadata written with every verdict. Its keys are `METADATA_HEADERS`, `reason` and `ticket`."""

METADATA_REASON = "reason"
"""Present in the metadata of every refusal made here, and of nothing else."""

METADATA_TICKET = "ticket"
METADATA_LANE = "lane"
METADATA_COUNT = "count"
METADATA_DESTINATION = "destination"
"""Address of the reserved replica; the access log is compared with it."""

METADATA_RETRY_AFTER = "retry_after"
"""Retry-After of the answer that takes the place of an engine's own 429 or 503, in seconds."""

OWN_PREFIX = "x-llm-"
"""Headers that only the gateway writes, in both directions; a client's copies are removed."""

LANE_HEADER = "x-llm-lane"
POOL_HEADER = "x-llm-pool"
REASON_HEADER = "x-llm-reason"
COUNT_HEADER = "x-llm-count"
INEXACT = "inexact"
"""The only value of `x-llm-count`, which an exact count does not send."""

DESTINATION_HEADER = "x-gateway-destination-endpoint"

INTENT_HEADER = "x-request-intent"
"""A client's declared service: `bulk` lowers, every other value is ignored."""

READ_HEADERS = frozenset(
    {
        ":method",
        ":path",
        "content-encoding",
        "content-length",
        "content-type",
        "prefer",
        "upgrade",
        "x-request-id",
        INTENT_HEADER,
    }
)
"""Request headers that the service reads, and so all that Envoy forwards to it: no client's credentials are among
them."""
