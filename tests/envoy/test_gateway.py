"""Envoy with a service: the reserved replica is served, clients read true headers, and refusals stay as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.core.policy import BUFFER_MARGIN_BYTES
from tests.envoy.gateway import BODY_BYTES_MAX, ENGINES, Gateway, Service, admit, in_body, in_headers, refuse

pytestmark = pytest.mark.timeout(60)

PATH = "/v1/chat/completions"
METADATA: dict[str, str | int] = {
    "lane": "interactive",
    "lane_reason": "size",
    "input_tokens": "14000",
    "max_output_tokens": "4000",
    "reserved_tokens": "18000",
    "queue_ms": "0",
    "policy": "p1",
    "ticket": "t1",
}
CLIENT_HEADERS = ("lane", "input-tokens", "max-output-tokens", "reserved-tokens", "queue-ms", "policy", "replica")


def nothing_expected(headers: Mapping[str, str], body: bytes) -> pb.ProcessingResponse:
    """A verdict that a test replaces once it knows the addresses."""
    raise AssertionError((headers, body))


def admitting(gateway: Gateway, engine: int, attempts: int = 1) -> None:
    """From now on every request is admitted to one engine; a GET in the header phase, a POST in the body phase."""
    destination = ",".join([gateway.engine_addresses[engine]] * attempts)

    def verdict(headers: Mapping[str, str], _body: bytes) -> pb.ProcessingResponse:
        if headers[":method"] == "GET":
            response = in_headers(admit("bypass", "chat"))
            response.dynamic_metadata.update({"llm.admission": {"lane": "bypass", "policy": "p1"}})
            return response
        return in_body(admit("interactive", "chat", destination), **METADATA)

    assert gateway.service is not None
    gateway.service.verdict = verdict


def own_headers(answer: httpx.Response) -> dict[str, list[str]]:
    """Every x-llm-* header of the answer with all its values."""
    return {name: answer.headers.get_list(name) for name in answer.headers if name.startswith("x-llm-")}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """Envoy, a service and two engines."""
    async with Gateway(Service(nothing_expected)) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP/1.1 client."""
    async with httpx.AsyncClient(timeout=20) as running:
        yield running


@pytest.mark.parametrize("engine", [0, 1], ids=ENGINES)
async def test_the_reserved_replica_serves(gateway: Gateway, client: httpx.AsyncClient, engine: int) -> None:
    """An admitted request reaches the replica that the verdict names, each time."""
    admitting(gateway, engine)
    answers = [await client.post(f"{gateway.url}{PATH}", content=b"{}") for _ in range(8)]

    assert {(200, ENGINES[engine])} == {(answer.status_code, answer.json()["engine"]) for answer in answers}


async def test_headers_tell_the_verdict_and_engines_cannot(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """The client reads what the service wrote and which engine answered; what the engine claims is gone."""
    admitting(gateway, 1)
    answer = await client.post(f"{gateway.url}{PATH}", content=b"{}")

    assert {
        "x-llm-lane": ["interactive"],
        "x-llm-lane-reason": ["size"],
        "x-llm-input-tokens": ["14000"],
        "x-llm-max-output-tokens": ["4000"],
        "x-llm-reserved-tokens": ["18000"],
        "x-llm-queue-ms": ["0"],
        "x-llm-policy": ["p1"],
        "x-llm-replica": [gateway.engine_addresses[1]],
    } == own_headers(answer)
    assert len(answer.headers.get_list("x-request-id")) == 1


async def test_bypass_has_its_own_route(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """A request without tokens is routed by the header reply, and has no token headers, not even the engine's."""
    admitting(gateway, 0)
    answer = await client.get(f"{gateway.url}/v1/models")

    assert answer.status_code == 200
    assert own_headers(answer).keys() == {"x-llm-lane", "x-llm-policy", "x-llm-replica"}
    assert answer.headers["x-llm-lane"] == "bypass"
    assert answer.headers["x-llm-replica"] in gateway.engine_addresses


async def test_only_what_is_read_reaches_the_service(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """Envoy forwards the headers that a verdict depends on, so no credentials leave it; the engine gets them all."""
    admitting(gateway, 0)
    secrets = {"authorization": "Bearer secret", "cookie": "session=secret", "x-api-key": "secret"}
    answer = await client.post(
        f"{gateway.url}{PATH}", content=b"{}", headers={**secrets, "content-type": "application/json", "prefer": "x"}
    )
    assert gateway.service is not None
    (seen,) = gateway.service.seen

    assert {":method", ":path", "content-length", "content-type", "prefer", "x-request-id"} == seen.keys()
    assert secrets.items() <= {name.lower(): value for name, value in answer.json()["headers"].items()}.items()


async def test_client_copies_of_our_headers_vanish(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """Neither the service nor the engine sees a client's x-llm-*, destination or priority headers."""
    admitting(gateway, 0)
    forged = {
        "x-llm-lane": "bulk",
        "X-LLM-Anything": "1",
        "x-gateway-destination-endpoint": gateway.engine_addresses[1],
        "x-vllm-priority": "-5",
        "x-data-parallel-rank": "3",
        "x-override-priority": "-5",
        "x-override-rid": "theirs",
        "x-override-routed-dp-rank": "3",
        "x-override-conversation-id": "theirs",
    }
    answer = await client.post(f"{gateway.url}{PATH}", content=b"{}", headers={**forged, "x-request-intent": "bulk"})
    assert gateway.service is not None
    (seen,) = gateway.service.seen
    reached = {name.lower(): value for name, value in answer.json()["headers"].items()}

    assert [] == [name for name in forged if name.lower() in seen]
    assert seen["x-request-intent"] == "bulk"
    assert answer.json()["engine"] == ENGINES[0]
    written = {"x-llm-lane", "x-gateway-destination-endpoint"}
    assert [] == [name for name in forged if name.lower() in reached.keys() - written]
    assert reached["x-llm-lane"] == "interactive"


async def test_envoys_own_request_headers_are_harmless(client: httpx.AsyncClient) -> None:
    """A client cannot make Envoy retry, time out early or hedge by x-envoy-* headers."""
    attempts: list[str] = []

    async def failing(request: web.Request) -> web.Response:
        await request.read()
        attempts.append(request.path)
        await asyncio.sleep(0.1)  # longer than the timeout that the client asks for
        return web.Response(status=500)

    async with Gateway(Service(nothing_expected), engine=failing) as gateway:
        admitting(gateway, 0)
        answer = await client.post(
            f"{gateway.url}{PATH}",
            content=b"{}",
            headers={
                "x-envoy-retry-on": "5xx",
                "x-envoy-max-retries": "3",
                "x-envoy-upstream-rq-timeout-ms": "20",
                "x-envoy-upstream-rq-per-try-timeout-ms": "20",
                "x-envoy-hedge-on-per-try-timeout": "true",
            },
        )

    assert (500, [PATH]) == (answer.status_code, attempts)


@pytest.mark.parametrize("phase", ["headers", "body"])
@pytest.mark.parametrize("status", [404, 413, 429, 500, 503])
async def test_refusals_of_ours_are_left_alone(
    gateway: Gateway, client: httpx.AsyncClient, status: int, phase: str
) -> None:
    """A refusal that carries its reason keeps its body and headers, whatever its status."""
    assert gateway.service is not None
    gateway.service.verdict = lambda _headers, _body: refuse(
        status, '{"ours":1}', "queue_full", content_type="application/json", retry_after="7", x_llm_reason="queue_full"
    )
    content = b"{}" if phase == "body" else None
    answer = await client.request("POST", f"{gateway.url}{PATH}", content=content)

    assert (status, {"ours": 1}, "7", {"x-llm-reason": ["queue_full"]}) == (
        answer.status_code,
        answer.json(),
        answer.headers["retry-after"],
        own_headers(answer),
    )


async def test_a_refusal_without_reason_becomes_the_contracts(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """An ImmediateResponse that forgets its reason is still answered in the contract's shape."""
    assert gateway.service is not None
    gateway.service.verdict = lambda _headers, _body: refuse(500, "oops", None)
    answer = await client.post(f"{gateway.url}{PATH}", content=b"{}")

    assert (500, "internal_error") == (answer.status_code, answer.json()["error"]["code"])


@pytest.mark.parametrize("sized", [True, False], ids=["content-length", "chunked"])
async def test_a_body_over_the_buffer_is_413_of_the_contract(
    gateway: Gateway, client: httpx.AsyncClient, sized: bool
) -> None:
    """What Envoy itself refuses to buffer is body_too_large, not to be retried."""
    body = b"x" * (2 * (BODY_BYTES_MAX + BUFFER_MARGIN_BYTES))
    answer = await client.post(f"{gateway.url}{PATH}", content=body if sized else chunks(body))

    assert (413, "body_too_large", "false", None) == (
        answer.status_code,
        answer.headers["x-llm-reason"],
        answer.headers["x-should-retry"],
        answer.headers.get("retry-after"),
    )
    assert answer.json()["error"]["details"] == {"error_code": "body_too_large"}


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_a_body_somewhat_over_the_cap_reaches_the_service(gateway: Gateway, http2: bool) -> None:
    """Between cap and buffer the service decides: Envoy hands it the whole body."""
    admitting(gateway, 0)
    body = b"x" * (BODY_BYTES_MAX + BUFFER_MARGIN_BYTES // 2)
    async with httpx.AsyncClient(http1=not http2, http2=http2) as client:
        answer = await client.post(f"{gateway.url}{PATH}", content=chunks(body))

    assert (200, len(body)) == (answer.status_code, answer.json()["bytes"])


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    """The body in pieces of 64 KiB, which a client sends without a length."""
    for start in range(0, len(body), 65_536):
        yield body[start : start + 65_536]


@pytest.mark.parametrize("retries", [0, 2])
async def test_an_engine_that_is_away_is_capacity_unavailable(client: httpx.AsyncClient, retries: int) -> None:
    """When the reserved replica does not listen, the client reads 503, Retry-After and what was reserved."""
    async with Gateway(
        Service(nothing_expected), engines_up=(False, True), limits={"upstream_retries_max": retries}
    ) as gateway:
        admitting(gateway, 0, attempts=retries + 1)
        answer = await client.post(f"{gateway.url}{PATH}", content=b"{}")
        tried = gateway.envoy.stats("cluster.chat.").get("cluster.chat.upstream_rq_retry", 0)

    assert (503, "capacity_unavailable", "2", "2000", "interactive", "18000") == (
        answer.status_code,
        answer.headers["x-llm-reason"],
        answer.headers["retry-after"],
        answer.headers["retry-after-ms"],
        answer.headers["x-llm-lane"],
        answer.headers["x-llm-reserved-tokens"],
    )
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert tried == retries


async def test_an_engine_that_resets_is_not_asked_again(client: httpx.AsyncClient) -> None:
    """A request that an engine has seen is never repeated by Envoy; the client reads capacity_unavailable."""
    attempts: list[str] = []

    async def resetting(request: web.Request) -> web.Response:
        await request.read()
        attempts.append(request.path)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with Gateway(Service(nothing_expected), engine=resetting) as gateway:
        admitting(gateway, 0, attempts=2)
        answer = await client.post(f"{gateway.url}{PATH}", content=b"{}")

    assert (503, "capacity_unavailable", [PATH]) == (answer.status_code, answer.headers["x-llm-reason"], attempts)


async def test_the_response_time_starts_at_the_verdict(client: httpx.AsyncClient) -> None:
    """Waiting for the verdict does not shorten the response; an engine slower than the bound is upstream_timeout."""
    never = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        body = await request.read()
        if body == b"slow":
            await never.wait()
        return web.json_response({})

    service = Service(nothing_expected, hold=asyncio.Event())
    async with Gateway(service, engine=silent, limits={"decision_s_max": 60, "response_s_max": "0.5"}) as gateway:
        admitting(gateway, 0)
        assert service.hold is not None
        held = asyncio.create_task(client.post(f"{gateway.url}{PATH}", content=b"quick"))
        await asyncio.sleep(1)  # twice the longest response
        service.hold.set()
        quick = await held
        slow = await client.post(f"{gateway.url}{PATH}", content=b"slow")

    assert quick.status_code == 200
    assert (504, "upstream_timeout", "interactive") == (
        slow.status_code,
        slow.json()["error"]["code"],
        slow.headers["x-llm-lane"],
    )


async def test_a_verdict_that_is_late_fails_closed(client: httpx.AsyncClient) -> None:
    """After the longest decision time Envoy gives up on the service, and no engine gets the request."""
    service = Service(nothing_expected, hold=asyncio.Event())
    async with Gateway(service, limits={"decision_s_max": "0.3"}) as gateway:
        answer = await client.post(f"{gateway.url}{PATH}", content=b"{}")

    assert (503, "admission_unavailable") == (answer.status_code, answer.headers["x-llm-reason"])


async def test_an_upload_that_stalls_is_ended() -> None:
    """A body that does not arrive within the decision time is malformed_request, and holds nothing longer."""
    async with Gateway(Service(nothing_expected), limits={"decision_s_max": "0.3"}) as gateway:
        status, headers, body = await gateway.raw(
            f"POST {PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: 10\r\n\r\n{{".encode()
        )

    assert (408, "malformed_request") == (status, headers["x-llm-reason"])
    assert json.loads(body)["error"]["code"] == "malformed_request"


async def test_a_dying_service_cuts_no_response(client: httpx.AsyncClient) -> None:
    """A response that streams goes on to its end when the service is gone."""
    gone = asyncio.Event()

    async def streaming(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first ")
        await gone.wait()
        await response.write(b"last")
        return response

    async with Gateway(Service(nothing_expected), engine=streaming) as gateway:
        admitting(gateway, 0)
        async with client.stream("POST", f"{gateway.url}{PATH}", content=b"{}") as answer:
            received = answer.aiter_raw()
            text = await anext(received)
            assert gateway.server is not None
            await gateway.server.stop(None)
            gone.set()
            text += b"".join([piece async for piece in received])
        after = await client.post(f"{gateway.url}{PATH}", content=b"{}")

    assert text == b"first last"
    assert (503, "admission_unavailable") == (after.status_code, after.headers["x-llm-reason"])


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_the_stream_lives_as_long_as_the_response(client: httpx.AsyncClient, method: str) -> None:
    """The service learns the end of a response by the end of its stream, not before."""
    proceed = asyncio.Event()

    async def streaming(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        await proceed.wait()
        return response

    service = Service(nothing_expected)
    async with Gateway(service, engine=streaming) as gateway:
        admitting(gateway, 0)
        async with client.stream(method, f"{gateway.url}{PATH}", content=b"{}" if method == "POST" else None) as answer:
            await anext(answer.aiter_raw())
            open_streams = gateway.envoy.stats("cluster.tokenlane.upstream_rq_active")
            ended_early = service.ended.is_set()
            proceed.set()
        await asyncio.wait_for(service.ended.wait(), 10)

    assert ({"cluster.tokenlane.upstream_rq_active": 1}, False) == (open_streams, ended_early)


async def test_the_service_on_a_unix_socket(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """A Unix socket carries the calls as TCP does."""
    async with Gateway(Service(nothing_expected), socket_dir=tmp_path) as gateway:
        admitting(gateway, 1)
        answer = await client.post(f"{gateway.url}{PATH}", content=b"{}")

    assert (200, ENGINES[1]) == (answer.status_code, answer.json()["engine"])


async def test_escaped_slashes_reach_the_service_as_they_are(gateway: Gateway, client: httpx.AsyncClient) -> None:
    """Path tricks arrive canonical or unchanged, never decoded into a path that the service did not see."""
    admitting(gateway, 0)
    targets = {
        "/v1/chat%2Fcompletions": "/v1/chat%2Fcompletions",
        "//v1//chat/./completions": PATH,
        "/v1/%63hat/x/../completions?x=1": f"{PATH}?x=1",
    }
    for target in targets:
        status, _, _ = await gateway.raw(
            f"POST {target} HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode()
        )
        assert status == 200
    assert gateway.service is not None

    assert list(targets.values()) == [seen[":path"] for seen in gateway.service.seen]
