"""Engine profiles: whose rules turn a body into prompts and ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.core.policy import Endpoint, EngineName, TokenizerMode
from extproc.counting import sglang, tgi, vllm
from extproc.counting.request import Reader

PROFILES: Mapping[EngineName, Mapping[Endpoint, Reader]] = MappingProxyType(
    {EngineName.VLLM: vllm.READERS, EngineName.SGLANG: sglang.READERS, EngineName.TGI: tgi.READERS}
)

ENDPOINTS: Mapping[TokenizerMode, frozenset[Endpoint]] = MappingProxyType(
    {
        TokenizerMode.HARMONY: frozenset(
            {
                Endpoint.CHAT_COMPLETIONS,
                Endpoint.CHAT_COMPLETIONS_BATCH,
                Endpoint.COMPLETIONS,
                Endpoint.MESSAGES,
                Endpoint.COUNT_TOKENS,
            }
        ),
        TokenizerMode.MISTRAL: frozenset({Endpoint.CHAT_COMPLETIONS, Endpoint.COMPLETIONS}),
    }
)
"""Endpoints that are counted where chats are no template's; elsewhere the engine goes other ways to the prompt."""
