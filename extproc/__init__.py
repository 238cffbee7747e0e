"""Tokenlane: admission control for LLM fleets, as an Envoy external-processing service."""

from __future__ import annotations

__version__ = "0.1.0"
