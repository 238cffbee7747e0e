"""The listener: header hygiene, the ext_proc filter, the router, and every bound on bodies and time."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_access_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early_header_mutation
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as ProtoAny

from extproc.core.names import DESTINATION_HEADER, METADATA_NAMESPACE, METADATA_TICKET, OWN_PREFIX, READ_HEADERS
from extproc.core.policy import Limits, Policy
from extproc.envoy_config.addresses import address
from extproc.envoy_config.clusters import TOKENLANE_CLUSTER
from extproc.envoy_config.engine_busy import engine_busy_filter
from extproc.envoy_config.packing import duration, extension, remove, remove_prefix
from extproc.envoy_config.replies import local_replies
from extproc.envoy_config.routes import route_table

CONNECTION_WINDOW_BYTES = 24 * 2**20
"""Envoy's default for all streams of a connection together; never below the window of one stream."""

SERVICE_BACKOFF = core.BackoffStrategy(
    base_interval=timedelta(milliseconds=10), max_interval=timedelta(milliseconds=50)
)
"""Between tries of a call to the service. Envoy's default of a second would hold every client while it is away."""

RUNNING_INTERVAL_NS = 5_000_000_000
"""Running responses are logged this often: time enough to follow one that another replica serves."""

FLUSH_INTERVAL_NS = 10_000_000
"""Entries wait this long for company: an orphan ends that much later, and a message carries many of them."""

ENGINE_PRIORITY_HEADERS = (
    "x-vllm-priority",
    "x-data-parallel-rank",
    "x-override-priority",
    "x-override-rid",
    "x-override-routed-dp-rank",
    "x-override-conversation-id",
)
"""Headers by which a client would jump an engine's queue or choose its rank."""


def build_listener(policy: Policy, listen: str) -> listener.Listener:
    """The listener that clients connect to at `listen`."""
    manager = hcm_filter(policy)
    return listener.Listener(
        name="tokenlane",
        address=address(listen),
        per_connection_buffer_limit_bytes=policy.limits.buffer_bytes,
        filter_chains=[
            listener.FilterChain(
                filters=[
                    listener.Filter(
                        name="envoy.filters.network.http_connection_manager", typed_config=ProtoAny.pack(manager)
                    )
                ]
            )
        ],
    )


def hcm_filter(policy: Policy) -> hcm.HttpConnectionManager:
    """The HTTP connection manager with its filters and routes."""
    limits = policy.limits
    # Counted from the arrival of the request, so it has to hold the upload, the verdict and the response. The route
    # timeout is the exact bound of a response; this is the bound of everything.
    stream_ns_max = 2 * limits.decision_ns_max + limits.response_ns_max
    window_bytes = limits.buffer_bytes
    return hcm.HttpConnectionManager(
        stat_prefix="tokenlane",
        route_config=route_table(policy),
        http_filters=[
            hcm.HttpFilter(name="envoy.filters.http.ext_proc", typed_config=ProtoAny.pack(_ext_proc(limits))),
            hcm.HttpFilter(name="envoy.filters.http.custom_response", typed_config=ProtoAny.pack(engine_busy_filter())),
            hcm.HttpFilter(name="envoy.filters.http.router", typed_config=ProtoAny.pack(router.Router())),
        ],
        common_http_protocol_options=core.HttpProtocolOptions(max_stream_duration=duration(stream_ns_max)),
        # The window of a stream is what bounds a buffered HTTP/2 body.
        http2_protocol_options=core.Http2ProtocolOptions(
            initial_stream_window_size=window_bytes,
            initial_connection_window_size=max(window_bytes, CONNECTION_WINDOW_BYTES),
            # What is wrong with one request ends its stream; the responses beside it on the connection go on.
            override_stream_error_on_invalid_http_message=True,
        ),
        # The policy bounds the time from arrival to verdict; the upload is part of it.
        request_timeout=duration(limits.decision_ns_max),
        # Nothing moves on a stream that waits for its verdict or for an answer that is not streamed.
        stream_idle_timeout=duration(stream_ns_max),
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                early_header_mutation.HeaderMutation(
                    mutations=[
                        remove_prefix(OWN_PREFIX),
                        *(remove(name) for name in (DESTINATION_HEADER, *ENGINE_PRIORITY_HEADERS)),
                    ]
                ),
            )
        ],
        normalize_path=True,
        merge_slashes=True,
        # An escaped slash reaches the service as it is and matches no path, so the refusal is in the contract.
        path_with_escaped_slashes_action=hcm.HttpConnectionManagerPathWithEscapedSlashesAction.KEEP_UNCHANGED,
        always_set_request_id_in_response=True,
        local_reply_config=local_replies(policy.version),
        access_log=[_access_log()],
        access_log_options=hcm.HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=duration(RUNNING_INTERVAL_NS)
        ),
    )


def _access_log() -> accesslog.AccessLog:
    """Entries to the service: the end of every admitted response, and who serves the running ones."""
    logger = grpc_access_log.HttpGrpcAccessLogConfig(
        common_config=grpc_access_log.CommonGrpcAccessLogConfig(
            log_name="tokenlane",
            transport_api_version=core.ApiVersion.V3,
            grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=TOKENLANE_CLUSTER)),
            buffer_flush_interval=duration(FLUSH_INTERVAL_NS),
        )
    )
    ticket = matcher.MetadataMatcher(
        filter=METADATA_NAMESPACE,
        path=[matcher.MetadataMatcherPathSegment(key=METADATA_TICKET)],
        value=matcher.ValueMatcher(present_match=True),
    )
    admitted = accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(matcher=ticket, match_if_key_not_found=False)
    )
    return accesslog.AccessLog(
        name="envoy.access_loggers.http_grpc", filter=admitted, typed_config=ProtoAny.pack(logger)
    )


def _mode(response_body_mode: ext_proc.ProcessingModeBodySendMode) -> ext_proc.ProcessingMode:
    header_mode = ext_proc.ProcessingModeHeaderSendMode
    return ext_proc.ProcessingMode(
        request_header_mode=header_mode.SEND,
        request_body_mode=ext_proc.ProcessingModeBodySendMode.BUFFERED,
        response_header_mode=header_mode.SKIP,
        response_body_mode=response_body_mode,
        request_trailer_mode=header_mode.SKIP,
        response_trailer_mode=header_mode.SEND,  # keeps the stream until the response ends
    )


def _ext_proc(limits: Limits) -> ext_proc.ExternalProcessor:
    body_mode = ext_proc.ProcessingModeBodySendMode
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=TOKENLANE_CLUSTER),
            retry_policy=core.RetryPolicy(
                retry_on="connect-failure,reset", num_retries=2, retry_back_off=SERVICE_BACKOFF
            ),
        ),
        failure_mode_allow=True,  # the route table fails closed instead
        processing_mode=_mode(body_mode.NONE),
        allow_mode_override=True,
        allowed_override_modes=[_mode(body_mode.STREAMED)],  # of the responses that are compared with their counts
        message_timeout=duration(limits.decision_ns_max),
        forward_rules=ext_proc.HeaderForwardingRules(
            allowed_headers=matcher.ListStringMatcher(
                patterns=[matcher.StringMatcher(exact=name) for name in sorted(READ_HEADERS)]
            )
        ),
        mutation_rules=mutation_rules.HeaderMutationRules(),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[METADATA_NAMESPACE])
        ),
    )
