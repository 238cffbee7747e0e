"""Request bodies -> Demand: an engine's own rules for prompts and ceilings, and its tokenizer's counts."""

from __future__ import annotations

from extproc.counting.counter import Counter, Draft
from extproc.counting.tokenizer import TokenizerError

__all__ = ["Counter", "Draft", "TokenizerError"]
