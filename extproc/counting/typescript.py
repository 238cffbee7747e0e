"""JSON schemas of functions as the TypeScript declarations that Harmony prints for gpt-oss.

A rule of Harmony's encoding, read in its source (openai/harmony, src/encoding.rs) and compared with what oss-harmony
0.0.11 prints. That library is not used here: it encodes while it holds the interpreter lock, in time that grows with
the square of a word's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from extproc.counting.fields import deeper_than, malformed

SCHEMA_DEPTH_MAX = 32
"""Levels of a function's parameters. Each indents all lines below it, so that depth multiplies what is printed."""


def namespace(functions: list[dict[str, Any]]) -> str:
    """The section of a prompt that declares `functions`, each with name, description and parameters."""
    declared = "\n".join(line for function in functions for line in _declaration(function))
    return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{declared}\n}} // namespace functions"


def _declaration(function: dict[str, Any]) -> Iterator[str]:
    for line in _lines(function["description"] or ""):
        yield f"// {line}"
    parameters = function["parameters"]
    if deeper_than(parameters, SCHEMA_DEPTH_MAX):
        raise malformed(f"parameters nest deeper than {SCHEMA_DEPTH_MAX} levels", "tools.function.parameters")
    arguments = "" if parameters is None else f"_: {_type(parameters, '')}"
    yield f"type {function['name']} = ({arguments}) => any;\n"


def _lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _type(schema: object, indent: str) -> str:
    if not isinstance(schema, dict):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_variant(variant, indent)}" for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list) and (kinds := [item for item in kind if isinstance(item, str)]):
        return " | ".join("number" if item == "integer" else item for item in kinds)
    return _plain(schema, kind, indent) if isinstance(kind, str) else "any"


def _plain(schema: dict[str, Any], kind: str, indent: str) -> str:
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        return " | ".join(f'"{word}"' for word in _enum(schema) if isinstance(word, str)) or "string"
    return {"number": "number", "integer": "number", "boolean": "boolean"}.get(kind, "any")


def _variant(variant: object, indent: str) -> str:
    """One type of a union that is no property's own, with its comment."""
    comments = [text] if (text := _text(variant, "description")) is not None else []
    if isinstance(variant, dict) and "default" in variant:
        default = variant["default"]
        quoted = isinstance(default, str) and not _enum(variant)
        comments.append(f'default: "{default}"' if quoted else f"default: {_json(default)}")
    return _nullable(variant, f"{indent}   ") + (f" // {' '.join(comments)}" if comments else "")


def _nullable(schema: object, indent: str) -> str:
    found = _type(schema, indent)
    nullable = isinstance(schema, dict) and schema.get("nullable") is True and "null" not in found
    return f"{found} | null" if nullable else found


def _object(schema: dict[str, Any], indent: str) -> str:
    text = _text(schema, "description")
    lines = ["{\n"] if text is None else [f"{indent}// {text}\n", "{\n"]
    properties, required = schema.get("properties"), schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    for name, value in properties.items() if isinstance(properties, dict) else ():
        named = name if name in names else f"{name}?"
        lines += _property(named, value if isinstance(value, dict) else {}, indent)
    return "".join([*lines, f"{indent}}}"])


def _property(named: str, schema: dict[str, Any], indent: str) -> Iterator[str]:
    if (title := _text(schema, "title")) is not None:
        yield f"{indent}// {title}\n{indent}//\n"
    text = _text(schema, "description")
    if "oneOf" not in schema and text is not None:
        yield f"{indent}// {text}\n"
    examples = schema.get("examples")
    if isinstance(examples, list) and examples:
        yield f"{indent}// Examples:\n"
        yield from (f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str))
    if isinstance(schema.get("oneOf"), list):
        yield from _union(named, schema, text, indent)
        return
    default = "".join(f" // {found}" for found in _default(schema)) if "oneOf" not in schema else ""
    yield f"{indent}{named}: {_nullable(schema, indent + '    ')},{default}\n"


def _union(named: str, schema: dict[str, Any], text: str | None, indent: str) -> Iterator[str]:
    """A property of several types; a text that it shares with the first of them is printed once."""
    variants = schema["oneOf"]
    above = text is not None and not (variants and _text(variants[0], "description") == text)
    if above:
        yield f"{indent}// {text}\n"
    yield from (f"{indent}// {found}\n" for found in _default(schema))
    yield f"{indent}{named}:\n"
    for index, variant in enumerate(variants):
        own = None if above and index == 0 else _text(variant, "description")
        comments = [*([] if own is None or own == text else [own]), *_default(variant)]
        comment = f" // {' '.join(comments)}" if comments else ""
        yield f"{indent} | {_nullable(variant, indent + '   ')}{comment}\n"
    yield f"{indent},\n"


def _default(schema: object) -> Iterator[str]:
    if isinstance(schema, dict) and "default" in schema:
        default = schema["default"]
        if isinstance(default, str):
            yield f"default: {default}" if _enum(schema) else f'default: "{default}"'
        else:
            yield f"default: {_json(default)}"


def _json(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer beyond 64 bits, or half a character
        raise malformed("a default cannot be printed exactly and is not accepted here", "tools.function") from None


def _enum(schema: dict[str, Any]) -> list[object]:
    found = schema.get("enum")
    return found if isinstance(found, list) else []


def _text(schema: object, key: str) -> str | None:
    found = schema.get(key) if isinstance(schema, dict) else None
    return found if isinstance(found, str) else None
