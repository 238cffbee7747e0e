"""How Envoy matches routes, as far as admission depends on it: without the request of a client at hand.

A client may write every header but those that only a verdict sets, so answers are three: True, False, and None for
what depends on the client or on something that is not looked into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from extproc.config_check.document import Node, flag, section, sections, text
from extproc.core.names import DESTINATION_HEADER, LANE_HEADER, METADATA_NAMESPACE, POOL_HEADER

VERDICT_HEADERS = (LANE_HEADER, POOL_HEADER, DESTINATION_HEADER)
"""Headers that only a verdict sets, once a client's copies are removed."""

UNADMITTED: Mapping[str, str] = {}
"""The verdict headers of a request without a verdict."""

_OTHER_CONDITIONS = ("query_parameters", "cookies", "runtime_fraction", "tls_context", "filter_state", "grpc")


def string_matches(matcher: Node, value: str) -> bool | None:
    """A StringMatcher on `value`; None where it is a kind that is not looked into."""
    lowered = flag(matcher, "ignore_case")
    for kind, test in (
        ("exact", str.__eq__),
        ("prefix", str.startswith),
        ("suffix", str.endswith),
        ("contains", str.__contains__),
    ):
        if kind in matcher:
            wanted = text(matcher, kind)
            return test(value.lower(), wanted.lower()) if lowered else test(value, wanted)
    return regex_matches(section(matcher, "safe_regex"), value) if "safe_regex" in matcher else None


def regex_matches(matcher: Node, value: str) -> bool | None:
    """A RegexMatcher on the whole of `value`; None where the expression is one that only RE2 reads."""
    try:
        return re.fullmatch(text(matcher, "regex"), value) is not None
    except re.error:
        return None


def route_matches(match: Node, verdict: Mapping[str, str], path: str | None = None) -> bool | None:
    """Whether a RouteMatch takes a request for `path` with the headers of `verdict`; None when that depends.

    Without `path` the client chooses it.
    """
    parts = [_path_matches(match, path), *(_header_matches(header, verdict) for header in sections(match, "headers"))]
    parts += [_metadata_matches(matcher, verdict) for matcher in sections(match, "dynamic_metadata")]
    parts += [None for name in _OTHER_CONDITIONS if match.get(name)]
    return _all(parts)


def _all(parts: Iterable[bool | None]) -> bool | None:
    found = set(parts)
    if False in found:
        return False
    return None if None in found else True


def _path_matches(match: Node, path: str | None) -> bool | None:
    if text(match, "prefix") == "/" or text(section(match, "safe_regex"), "regex") in {".*", "/.*"}:
        return True
    if path is None:
        return None
    folded = "case_sensitive" in match and not flag(match, "case_sensitive")
    if "safe_regex" in match:
        return regex_matches(section(match, "safe_regex"), path)
    for kind in ("path", "prefix", "path_separated_prefix"):
        if kind in match:
            wanted = text(match, kind)
            if folded:
                path, wanted = path.lower(), wanted.lower()
            below = path.startswith(wanted.removesuffix("/") + "/")
            return path == wanted or (kind == "prefix" and path.startswith(wanted)) or (kind != "path" and below)
    return False if "connect_matcher" in match else None


def _header_matches(matcher: Node, verdict: Mapping[str, str]) -> bool | None:
    name = text(matcher, "name").lower()
    if name not in VERDICT_HEADERS:
        return None
    inverted = flag(matcher, "invert_match")
    if "present_match" in matcher or not _states_value(matcher):
        present = flag(matcher, "present_match") if "present_match" in matcher else True
        return ((name in verdict) == present) != inverted
    if name not in verdict and not flag(matcher, "treat_missing_header_as_empty"):
        # A header that is missing matches no value. Inverted, that is left to the reader.
        return None if inverted else False
    found = _value_matches(matcher, verdict.get(name, ""))
    return None if found is None else found != inverted


_VALUE_KINDS = ("string_match", "exact_match", "prefix_match", "suffix_match", "contains_match", "safe_regex_match")


def _states_value(matcher: Node) -> bool:
    return any(kind in matcher for kind in (*_VALUE_KINDS, "range_match"))


def _value_matches(matcher: Node, value: str) -> bool | None:
    if "string_match" in matcher:
        return string_matches(section(matcher, "string_match"), value)
    if "safe_regex_match" in matcher:
        return regex_matches(section(matcher, "safe_regex_match"), value)
    old = {kind.removesuffix("_match"): matcher[kind] for kind in _VALUE_KINDS[1:-1] if kind in matcher}
    return string_matches(old, value) if old else None


def _metadata_matches(matcher: Node, verdict: Mapping[str, str]) -> bool | None:
    """Metadata of the namespace comes with a verdict, and with nothing else."""
    ours = text(matcher, "filter") == METADATA_NAMESPACE and not flag(matcher, "invert")
    return False if ours and not verdict else None
