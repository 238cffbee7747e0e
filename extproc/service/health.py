"""grpc.health.v1 under the names that Kubernetes and Envoy ask for.

Liveness stays SERVING while the process drains: a restart in the middle would cut what still runs.
"""

from __future__ import annotations

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

READINESS_NAMES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
LIVENESS_NAME = "liveness"


class Health:
    """The health service; not ready until told."""

    def __init__(self) -> None:
        self.servicer = HealthServicer()
        self.ready = False

    async def start(self) -> None:
        """Alive and not ready."""
        await self.servicer.set(LIVENESS_NAME, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(ready=False)

    async def set_ready(self, *, ready: bool) -> None:
        """Say whether new requests are welcome."""
        self.ready = ready
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in READINESS_NAMES:
            await self.servicer.set(name, state)
