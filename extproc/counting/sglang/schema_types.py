"""Types in the schemas of tools.

SGLang writes the standard name where a schema has a database's or a language's own, and the template prints what it
wrote. A type that it does not know is refused.
"""

from __future__ import annotations

import re

from extproc.counting.fields import malformed

_STANDARD = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})

_ALIASES = {
    alias: name
    for name, aliases in {
        "string": "binary blob bytea bytes char date datetime enum str text time timestamp uuid varbinary varchar",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "decimal double numeric real",
        "array": "arr set tuple",
        "object": "map",
    }.items()
    for alias in aliases.split()
}

_PREFIXES = tuple(
    (re.compile(rf"(?:{words})(?:[0-9\[<( \t]|\Z)"), name)
    for words, name in (
        ("int|uint|long|short|unsigned", "integer"),
        ("num|float", "number"),
        ("list", "array"),
        ("dict", "object"),
    )
)
"""Words that a type may start with, up to a digit, a bracket, a space or its end: int32, float64, list[str]."""

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys of a schema whose values hold schemas by name."""

_SCHEMAS = frozenset(
    {
        "additionalProperties",
        "allOf",
        "anyOf",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "oneOf",
        "prefixItems",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keys of a schema whose values are schemas, or lists of them."""


def standard_types(schema: object) -> object:
    """`schema` as the engine prints it; Fault for a type that it refuses."""
    if isinstance(schema, list):
        return [standard_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _standard_part(key, value) for key, value in schema.items()}


def _standard_part(key: str, value: object) -> object:
    if key == "type" and isinstance(value, str):
        return _standard(value)
    if key == "type" and isinstance(value, list):
        return list(dict.fromkeys(_standard(item) for item in value))
    if key in _MAPS and isinstance(value, dict):
        return {name: standard_types(item) for name, item in value.items()}
    return standard_types(value) if key in _SCHEMAS else value


def _standard(kind: object) -> str:
    if isinstance(kind, str):
        if kind in _STANDARD:
            return kind
        base = kind.split("(", 1)[0].strip().lower()
        if base in _STANDARD:
            return base
        if base in _ALIASES:
            return _ALIASES[base]
        for pattern, name in _PREFIXES:
            if pattern.match(base):
                return name
    raise malformed("the parameters of a tool have a type that is none of JSON Schema's", "tools.function.parameters")
