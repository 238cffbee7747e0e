"""Envoy without the service: nothing reaches an engine, and clients read why."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.envoy.gateway import Gateway

pytestmark = pytest.mark.timeout(60)

FORGED = {"x-llm-lane": "interactive", "X-LLM-Pool": "chat", "x-gateway-destination-endpoint": "127.0.0.1:1"}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """Envoy and engines; nobody listens where the service should be."""
    async with Gateway() as running:
        yield running


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("headers", [{}, FORGED], ids=["honest", "forged"])
async def test_no_verdict_no_engine(gateway: Gateway, method: str, headers: dict[str, str], http2: bool) -> None:
    """Without the service every request is answered 503 admission_unavailable, whatever headers the client forges."""
    async with httpx.AsyncClient(http1=not http2, http2=http2) as client:
        answer = await client.request(
            method,
            f"{gateway.url}/v1/chat/completions",
            content=b'{"model":"m"}' if method == "POST" else None,
            headers={**headers, "content-type": "application/json", "x-request-id": 'id-"1"'},
        )

    assert answer.status_code == 503
    assert answer.json() == {
        "type": "error",
        "error": {
            "message": "no admission decision could be made",
            "type": "api_error",
            "param": None,
            "code": "admission_unavailable",
            "details": {"error_code": "admission_unavailable"},
        },
        "request_id": 'id-"1"',
    }
    assert {
        name: answer.headers.get_list(name)
        for name in (
            "content-type",
            "retry-after",
            "retry-after-ms",
            "x-llm-reason",
            "x-llm-lane",
            "x-request-id",
            "x-llm-replica",
            "x-should-retry",
        )
    } == {
        "content-type": ["application/json"],
        "retry-after": ["1"],
        "retry-after-ms": ["1000"],
        "x-llm-reason": ["admission_unavailable"],
        "x-llm-lane": ["none"],
        "x-request-id": ['id-"1"'],
        "x-llm-replica": [],
        "x-should-retry": [],
    }


async def test_the_route_answers_alone_too() -> None:
    """A listener without these local replies still answers with the contract's body and headers."""
    gateway = Gateway()
    manager = gateway.config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["local_reply_config"]
    async with gateway, httpx.AsyncClient() as client:
        answer = await client.post(f"{gateway.url}/v1/chat/completions", content=b"{}")

    assert (
        answer.status_code,
        answer.headers["content-type"],
        answer.headers["retry-after"],
        answer.headers["x-llm-reason"],
    ) == (503, "application/json", "1", "admission_unavailable")
    assert answer.json()["error"]["code"] == "admission_unavailable"
    assert answer.json()["request_id"] is None


async def test_an_upgrade_is_403_of_the_contract(gateway: Gateway) -> None:
    """A WebSocket handshake is refused by Envoy before the service is asked, in the contract's shape."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(
            f"{gateway.url}/v1/realtime",
            headers={
                "connection": "upgrade",
                "upgrade": "websocket",
                "sec-websocket-version": "13",
                "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
            },
        )

    assert (
        answer.status_code,
        answer.headers["x-llm-reason"],
        answer.headers["x-should-retry"],
    ) == (403, "unknown_endpoint", "false")
    assert answer.json()["error"]["code"] == "unknown_endpoint"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("target", ["/v1/x%00y", "/v1/x#fragment"])
async def test_a_request_that_envoy_cannot_read_is_400_of_the_contract(gateway: Gateway, target: str) -> None:
    """What Envoy's own parser or path rules refuse is malformed_request."""
    status, headers, body = await gateway.raw(
        f"GET {target} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n".encode()
    )

    assert status == 400
    assert headers["x-llm-reason"] == "malformed_request"
    assert headers["x-should-retry"] == "false"
    assert json.loads(body)["error"]["code"] == "malformed_request"


async def test_connect_is_answered(gateway: Gateway) -> None:
    """CONNECT has no path, so no route can match it; the answer is 404 unknown_endpoint."""
    status, headers, body = await gateway.raw(b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n")

    assert (status, headers["x-llm-reason"]) == (404, "unknown_endpoint")
    assert json.loads(body)["error"]["type"] == "not_found_error"
