"""Engine profiles: whose rules turn a body into prompts and ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.core.policy import Endpoint, EngineName
from extproc.counting import sglang, tgi, vllm
from extproc.counting.request import Reader

PROFILES: Mapping[EngineName, Mapping[Endpoint, Reader]] = MappingProxyType(
    {EngineName.VLLM: vllm.READERS, EngineName.SGLANG: sglang.READERS, EngineName.TGI: tgi.READERS}
)
