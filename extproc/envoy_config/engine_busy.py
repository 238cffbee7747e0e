"""An engine's own 429 or 503 becomes the contract's `engine_busy`, without a message to the service.

The filter stands between ext_proc and the router, so it sees what engines answer. It leaves alone what carries a
reason: refusals of the service, and Envoy's own replies, which `replies` has already put into the contract. Its local
reply then goes through the same mappers, where a 429 without a reason of the service can only be this one.
"""

from __future__ import annotations

from envoy_data_plane.envoy.extensions.filters.http.custom_response import v3 as custom_response
from envoy_data_plane.envoy.extensions.http.custom_response.local_response_policy import v3 as local_response
from envoy_data_plane.envoy.type.matcher import v3 as inputs
from envoy_data_plane.google.protobuf import Any as ProtoAny
from envoy_data_plane.xds.core import v3 as xds
from envoy_data_plane.xds.type.matcher import v3 as matcher

from extproc.core.names import REASON_HEADER
from extproc.core.rejection import STATUS
from extproc.core.values import Reason

BUSY_STATUSES = "429|503"
"""What engines answer when they are full: SGLang and vLLM 503, TGI 429."""


def engine_busy_filter() -> custom_response.CustomResponse:
    """The filter that turns an engine away from the client."""
    busy = _matches(inputs.HttpResponseStatusCodeMatchInput(), BUSY_STATUSES)
    explained = _matches(inputs.HttpResponseHeaderMatchInput(header_name=REASON_HEADER), ".+")
    predicates = [busy, matcher.MatcherMatcherListPredicate(not_matcher=explained)]
    answer = local_response.LocalResponsePolicy(status_code=STATUS[Reason.ENGINE_BUSY])
    return custom_response.CustomResponse(
        custom_response_matcher=matcher.Matcher(
            matcher_list=matcher.MatcherMatcherList(
                matchers=[
                    matcher.MatcherMatcherListFieldMatcher(
                        predicate=matcher.MatcherMatcherListPredicate(
                            and_matcher=matcher.MatcherMatcherListPredicatePredicateList(predicate=predicates)
                        ),
                        on_match=matcher.MatcherOnMatch(
                            action=xds.TypedExtensionConfig(name="engine-busy", typed_config=ProtoAny.pack(answer))
                        ),
                    )
                ]
            )
        )
    )


def _matches(
    what: inputs.HttpResponseStatusCodeMatchInput | inputs.HttpResponseHeaderMatchInput, regex: str
) -> matcher.MatcherMatcherListPredicate:
    return matcher.MatcherMatcherListPredicate(
        single_predicate=matcher.MatcherMatcherListPredicateSinglePredicate(
            input=xds.TypedExtensionConfig(name="response", typed_config=ProtoAny.pack(what)),
            value_match=matcher.StringMatcher(
                safe_regex=matcher.RegexMatcher(google_re2=matcher.RegexMatcherGoogleRe2(), regex=regex)
            ),
        )
    )
