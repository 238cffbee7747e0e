"""An Envoy configuration file as plain data, read field by field.

Nothing is demanded of parts that no rule asks for. A field that is asked for and has the wrong type raises
`ShapeError`; one that is absent or null has Envoy's default. Both spellings of the JSON form of protobuf are read:
camelCase becomes snake_case, enums may be numbers, and 64-bit numbers may be text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

Node = Mapping[str, Any]

NS_PER_S = 1_000_000_000

_CAMEL = re.compile(r"[a-z][a-z0-9]*(?:[A-Z][a-z0-9]*)+")
_DURATION = re.compile(r"-?\d{1,12}(?:\.\d{1,9})?s")


class FileError(ValueError):
    """The file holds no configuration; the text is one sentence."""


class ShapeError(ValueError):
    """A field has a type that Envoy does not accept there; the text is one sentence."""


def read(path: Path) -> Node:
    """The bootstrap in the YAML or JSON file at `path`; FileError when there is none."""
    try:
        content = path.read_text(encoding="utf-8")
        found = snake_case(json.loads(content) if path.suffix == ".json" else yaml.safe_load(content))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FileError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise FileError("it is nested too deeply to be read") from error
    if not isinstance(found, dict):
        raise FileError("it holds no configuration: a bootstrap is a mapping with static_resources")
    return found


def snake_case(value: Any) -> Any:  # noqa: ANN401 (any YAML)
    """The same data with the field names of the API; names that are not fields, such as `@type`, stay."""
    if isinstance(value, dict):
        return {_snake_name(str(key)): snake_case(item) for key, item in value.items()}
    if isinstance(value, list):
        return [snake_case(item) for item in value]
    return value


def _snake_name(name: str) -> str:
    if not _CAMEL.fullmatch(name):
        return name
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def section(node: Node, *path: str) -> Node:
    """The message at `path` below `node`; empty when it is absent."""
    for name in path:
        found = node.get(name)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise ShapeError(f"{name} is not a mapping")
        node = found
    return node


def sections(node: Node, name: str) -> list[Node]:
    """The messages of a repeated field."""
    found = _list(node, name)
    if not all(isinstance(item, Mapping) for item in found):
        raise ShapeError(f"{name} holds something that is not a mapping")
    return found


def texts(node: Node, name: str) -> list[str]:
    """The strings of a repeated field."""
    found = _list(node, name)
    if not all(isinstance(item, str) for item in found):
        raise ShapeError(f"{name} holds something that is not text")
    return found


def _list(node: Node, name: str) -> list[Any]:
    found = node.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ShapeError(f"{name} is not a list")
    return found


def text(node: Node, name: str) -> str:
    """A string; empty when it is absent."""
    found = node.get(name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise ShapeError(f"{name} is not text")
    return found


def flag(node: Node, name: str) -> bool:
    """A boolean; false when it is absent."""
    found = node.get(name)
    if found is None:
        return False
    if not isinstance(found, bool):
        raise ShapeError(f"{name} is neither true nor false")
    return found


def whole(node: Node, name: str, default: int) -> int:
    """A whole number."""
    found = node.get(name)
    if found is None:
        return default
    if isinstance(found, float) and found.is_integer():
        return int(found)
    if isinstance(found, str) and re.fullmatch(r"\d{1,20}", found):
        return int(found)
    if not isinstance(found, int) or isinstance(found, bool):
        raise ShapeError(f"{name} is not a whole number")
    return found


def duration_ns(node: Node, name: str, default_ns: int) -> int:
    """A duration, in nanoseconds."""
    found = node.get(name)
    if found is None:
        return default_ns
    if not isinstance(found, str) or not _DURATION.fullmatch(found):
        raise ShapeError(f"{name} is not a duration such as 30s")
    return int(Decimal(found.removesuffix("s")) * NS_PER_S)


def choice(node: Node, name: str, values: Sequence[str]) -> str:
    """A value of an enum whose `values` are in the order of their numbers; the first when it is absent."""
    found = node.get(name)
    if found is None:
        return values[0]
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < len(values):
        return values[found]
    if not isinstance(found, str) or found not in values:
        raise ShapeError(f"{name} is none of {', '.join(values)}")
    return found


def unpack(extension: Node) -> tuple[str, Node]:
    """The short type name and the content of an extension's `typed_config`; empty without one."""
    config = section(extension, "typed_config")
    kind = text(config, "@type").rpartition("/")[2]
    if kind in {"xds.type.v3.TypedStruct", "udpa.type.v1.TypedStruct"}:
        return text(config, "type_url").rpartition(".")[2], section(config, "value")
    return kind.rpartition(".")[2], config
