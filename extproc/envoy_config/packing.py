"""Small shapes that Envoy's messages repeat."""

from __future__ import annotations

from datetime import timedelta

import betterproto2
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as ProtoAny

NS_PER_US = 1_000


def duration(ns: int) -> timedelta:
    """`ns` nanoseconds, rounded up to the microsecond that timedelta can hold."""
    return timedelta(microseconds=-(-ns // NS_PER_US))


def extension(name: str, message: betterproto2.Message) -> core.TypedExtensionConfig:
    """An extension point filled with `message`."""
    return core.TypedExtensionConfig(name=name, typed_config=ProtoAny.pack(message))


def header(key: str, value: str, *, keep_existing: bool = False) -> core.HeaderValueOption:
    """A response header that replaces any other value of it, or with `keep_existing` yields to it."""
    action = core.HeaderValueOptionHeaderAppendAction
    return core.HeaderValueOption(
        header=core.HeaderValue(key=key, value=value),
        append_action=action.ADD_IF_ABSENT if keep_existing else action.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def remove(name: str) -> mutation_rules.HeaderMutation:
    """The mutation that removes one header."""
    return mutation_rules.HeaderMutation(remove=name)


def remove_prefix(prefix: str) -> mutation_rules.HeaderMutation:
    """The mutation that removes every header whose name starts with `prefix`."""
    return mutation_rules.HeaderMutation(
        remove_on_match=mutation_rules.HeaderMutationRemoveOnMatch(key_matcher=matcher.StringMatcher(prefix=prefix))
    )
