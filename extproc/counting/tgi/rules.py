"""What TGI's endpoints have in common.

Derived from the source of its router (lib.rs, validation.rs and infer/ of text-generation-inference at db931fcf);
nothing here was observed on a running engine. Its JSON is read by serde: numbers are numbers, never text or booleans,
and fields that it does not know are ignored. A model that reads images takes them out of Markdown in the text of a
prompt, so such a model is not counted by this profile.
"""

from __future__ import annotations

from collections.abc import Mapping

from extproc.counting.fields import Check, as_list, as_str, malformed, nullable

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def unsigned(low: int = 0, high: int = UINT32_MAX) -> Check:
    """An integer from `low` to `high`, written as one."""

    def check(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise malformed(f"{name} must be an integer from {low} to {high}", name)
        return value

    return check


def flag(name: str, value: object) -> bool:
    """A boolean, and nothing that could stand for one."""
    if isinstance(value, bool):
        return value
    raise malformed(f"{name} must be a boolean", name)


def float_number(name: str, value: object) -> float:
    """A number, and no text that could be read as one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise malformed(f"{name} must be a number", name)


def texts(name: str, value: object) -> list[str]:
    """A list of strings."""
    return [as_str(name, item) for item in as_list(name, value)]


OPENAI: Mapping[str, Check] = {
    "frequency_penalty": nullable(float_number),
    "seed": nullable(unsigned(high=UINT64_MAX)),
    "service_tier": nullable(as_str),
    "stop": nullable(texts),
    "stream": flag,
    "temperature": nullable(float_number),
    "top_p": nullable(float_number),
}
"""Fields of both of OpenAI's endpoints. `n` is read by neither: one sequence runs for each prompt."""
