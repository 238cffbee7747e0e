"""Where Envoy listens and where it finds the service."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from envoy_data_plane.envoy.config.core import v3 as core

UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Socket addresses as `IP:port` (IPv6 in brackets); `tokenlane` may also be `unix:/path`.

    ValueError names the field that is neither.
    """

    listen: str = "0.0.0.0:8080"
    admin: str = "127.0.0.1:9901"
    tokenlane: str = "127.0.0.1:9002"

    def __post_init__(self) -> None:
        for name, text in (("listen", self.listen), ("admin", self.admin), ("tokenlane", self.tokenlane)):
            if name == "tokenlane" and text.startswith(UNIX):
                if not text.startswith(f"{UNIX}/"):
                    raise ValueError(f"tokenlane: {text} is not unix: and an absolute path")
                continue
            try:
                _split(text)
            except ValueError as error:
                raise ValueError(f"{name}: {text} is not IP:port") from error


def address(text: str) -> core.Address:
    """Envoy's form of `IP:port` or `unix:/path`."""
    if text.startswith(UNIX):
        return core.Address(pipe=core.Pipe(path=text.removeprefix(UNIX)))
    host, port = _split(text)
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def _split(text: str) -> tuple[str, int]:
    host, _, port_text = text.rpartition(":")
    host = str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    port = int(port_text)
    if not 0 < port < 65536:
        raise ValueError(f"no port {port}")
    return host, port
