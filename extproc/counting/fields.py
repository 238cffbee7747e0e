"""Checks of request fields, as data: a table maps a field to the check of its value.

A check returns the value the engine would use or raises Fault with the field's name. Coercions are those of
pydantic's lax mode, which vLLM's request models run in: "5", 5.0 and true are integers, "yes" and 1 are booleans.
Fields that no table names are ignored by the engine and pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from extproc.core.values import Fault, Reason

Check = Callable[[str, object], object]

INT64_MAX = 2**63 - 1
"""Engines hold counts, seeds and priorities as int64; a larger number is never a token count."""

_INT_TEXT = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_INT_TEXT_CHARS_MAX = 64  # far above the 19 digits of an int64, far below where int() becomes slow
SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace() and not "\x1c" <= char <= "\x1f")
"""What pydantic trims: Unicode's white space, to which Python's `strip` adds four separators."""

_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def malformed(message: str, param: str | None = None) -> Fault:
    """A 400: the engine would refuse this body, or it would run something other than what was counted."""
    return Fault(Reason.MALFORMED_REQUEST, message, param=param)


def as_int(name: str, value: object) -> int:
    """An integer, or what lax mode turns into one; within int64."""
    number: int | None = None
    if isinstance(value, int):
        number = int(value)
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif isinstance(value, str):
        number = _int_of_text(value)
    if number is None:
        raise malformed(f"{name} must be an integer", name)
    if not -INT64_MAX - 1 <= number <= INT64_MAX:
        raise malformed(f"{name} is outside the range of a 64-bit integer", name)
    return number


def _int_of_text(text: str) -> int | None:
    text = text.strip(SPACES)
    if len(text) > _INT_TEXT_CHARS_MAX or not _INT_TEXT.fullmatch(text):
        return None
    return int(text.partition(".")[0])


def as_float(name: str, value: object) -> float:
    """A finite number. NaN and infinities parse in the engine, but its sampler refuses them."""
    if isinstance(value, int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise malformed(f"{name} must be a finite number", name)


def as_bool(name: str, value: object) -> bool:
    """A boolean, 0, 1 or one of the words of lax mode."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise malformed(f"{name} must be a boolean", name)


def as_str(name: str, value: object) -> str:
    """A string; nothing else becomes one."""
    if isinstance(value, str):
        return value
    raise malformed(f"{name} must be a string", name)


def as_object(name: str, value: object) -> dict[str, object]:
    """A JSON object."""
    if isinstance(value, dict):
        return value
    raise malformed(f"{name} must be an object", name)


def as_list(name: str, value: object) -> list[object]:
    """A JSON array."""
    if isinstance(value, list):
        return value
    raise malformed(f"{name} must be an array", name)


def nullable(check: Check) -> Check:
    """`check`, or null."""
    return lambda name, value: None if value is None else check(name, value)


def integer(low: int | None = None, high: int | None = None) -> Check:
    """An integer from `low` to `high`."""

    def check(name: str, value: object) -> int:
        number = as_int(name, value)
        if low is not None and number < low:
            raise malformed(f"{name} must be at least {low}, got {number}", name)
        if high is not None and number > high:
            raise malformed(f"{name} must be at most {high}, got {number}", name)
        return number

    return check


def number(low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf) -> Check:
    """A number from `low` to `high` and greater than `above`."""

    def check(name: str, value: object) -> float:
        found = as_float(name, value)
        if not (low <= found <= high and found > above):
            raise malformed(f"{name} is out of range", name)
        return found

    return check


def one_of(*words: str) -> Check:
    """One of the strings `words`."""

    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise malformed(f"{name} must be one of {', '.join(words)}", name)

    return check


def list_of(check: Check) -> Check:
    """An array whose elements pass `check`."""
    return lambda name, value: [check(name, item) for item in as_list(name, value)]


def map_of(check: Check) -> Check:
    """An object whose values pass `check`."""
    return lambda name, value: {key: check(name, item) for key, item in as_object(name, value).items()}


def refused(message: str) -> Check:
    """A field that may only be absent or null."""

    def check(name: str, value: object) -> None:
        if value is not None:
            raise malformed(f"{name} {message}", name)

    return check


def checked(body: Mapping[str, object], table: Mapping[str, Check]) -> dict[str, object]:
    """The values of the fields of `body` that `table` names, as the engine would use them."""
    return {name: table[name](name, value) for name, value in body.items() if name in table}


def deeper_than(value: object, levels: int) -> bool:
    """Whether arrays and objects nest more than `levels` deep; iterative, so depth cannot exhaust the stack."""
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        layer = [
            child
            for node in layer
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not layer:
            return False
    return bool(layer)
