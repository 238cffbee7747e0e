"""vLLM's rules, by endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.core.policy import Endpoint
from extproc.counting.request import Reader
from extproc.counting.vllm import batch, chat, completions, messages, pooling, responses

READERS: Mapping[Endpoint, Reader] = MappingProxyType(
    {
        Endpoint.CHAT_COMPLETIONS: chat.read,
        Endpoint.CHAT_COMPLETIONS_BATCH: batch.read,
        Endpoint.COMPLETIONS: completions.read,
        Endpoint.RESPONSES: responses.read,
        Endpoint.MESSAGES: messages.read,
        Endpoint.COUNT_TOKENS: messages.read_count,
        Endpoint.EMBEDDINGS: pooling.read,
        Endpoint.CLASSIFY: pooling.read,
        Endpoint.RERANK: pooling.read_rerank,
        Endpoint.RERANK_V1: pooling.read_rerank,
        Endpoint.RERANK_V2: pooling.read_rerank,
        Endpoint.SCORE: pooling.read_score,
        Endpoint.SCORE_V1: pooling.read_score,
    }
)
