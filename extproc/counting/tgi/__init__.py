"""TGI's rules, by endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.core.policy import Endpoint
from extproc.counting.request import Reader
from extproc.counting.tgi import chat, completions, generate

READERS: Mapping[Endpoint, Reader] = MappingProxyType(
    {
        Endpoint.CHAT_COMPLETIONS: chat.read,
        Endpoint.COMPLETIONS: completions.read,
        Endpoint.GENERATE: generate.read,
    }
)
