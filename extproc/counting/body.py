"""Request bodies as JSON: read as the engine reads them, and changed in one field only.

The engine runs `json.loads`: the last of duplicate keys wins, NaN is a number, integers have no bound. orjson is
several times faster and differs in few places, so it goes first, and `json` is asked wherever their answers could
differ. UTF-16 and UTF-32, which `json.loads` would detect, are refused: JSON between systems is UTF-8 (RFC 8259 §8.1).
"""

from __future__ import annotations

import json
import re
from typing import cast

import orjson

from extproc.counting.fields import deeper_than, malformed

JSON_DEPTH_MAX = 256
"""Twice what serde_json reads, and a quarter of the interpreter's recursion limit, so that neither the parser, a
template's `tojson` nor the re-serialiser can meet that limit. Schemas in use nest some tens of levels."""

_RENDERED = (b'"tools"', b'"chat_template_kwargs"', b'"arguments"', b'"input"', b"\\u")

_LONG_INTEGER = re.compile(rb"[0-9]{19}")  # the shortest integers that orjson may read as floats


def parse(body: bytes) -> dict[str, object]:
    """The JSON object in `body` as the engine sees it; Fault(MALFORMED_REQUEST) for anything else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = _loads(body)
    else:
        if isinstance(document, dict) and _is_plain(document):
            return document
        if _numbers_may_differ(body):
            document = _loads(body)
    if not isinstance(document, dict):
        raise malformed("the request body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > JSON_DEPTH_MAX and deeper_than(document, JSON_DEPTH_MAX):
        raise malformed(f"the request body nests deeper than {JSON_DEPTH_MAX} levels")
    return document


def _is_plain(document: dict[str, object]) -> bool:
    """Whether `document` is but scalars and messages of text: no number of it is printed, and it is not deep."""
    for name, value in document.items():
        kind = type(value)
        if kind is dict or (kind is list and not (name == "messages" and _are_texts(cast("list[object]", value)))):
            return False
    return True


def _are_texts(messages: list[object]) -> bool:
    return all(type(message) is dict and {str} >= set(map(type, message.values())) for message in messages)


def _numbers_may_differ(body: bytes) -> bool:
    """Whether a template could print a number that orjson reads otherwise than `json`."""
    # These hold values that a template prints; an escape could spell one of their names.
    rendered = any(name in body for name in _RENDERED)
    return rendered and _LONG_INTEGER.search(body) is not None


def _loads(body: bytes) -> object:
    try:
        document = json.loads(body.decode("utf-8-sig"))
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeError:
        raise malformed("the request body holds text that is not valid Unicode in UTF-8") from None
    except RecursionError:
        raise malformed(f"the request body nests deeper than {JSON_DEPTH_MAX} levels") from None
    except ValueError:
        raise malformed("the request body is not valid JSON") from None
    return document


def append_field(body: bytes, name: str, number: int) -> bytes:
    """`body` with one more field at its end. The object must not be empty and must not have the field yet."""
    end = body.rindex(b"}")
    return b'%b,"%b":%d%b' % (body[:end], name.encode(), number, body[end:])


def rewritten(body: bytes, path: tuple[str, ...], number: int, removed: tuple[str, ...] = ()) -> bytes:
    """`body` serialised again with the field at `path`, if that is not empty, set to `number`, and without `removed`.

    All else keeps its value in `json.loads`.
    """
    document = json.loads(body.decode("utf-8-sig"))
    for name in removed:
        document.pop(name, None)
    section = document
    for key in path[:-1]:
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
    if path:
        section[path[-1]] = number
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
