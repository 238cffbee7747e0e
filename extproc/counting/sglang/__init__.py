"""SGLang's rules, by endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.core.policy import Endpoint
from extproc.counting.request import Reader

READERS: Mapping[Endpoint, Reader] = MappingProxyType({})
