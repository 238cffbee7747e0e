"""The configuration built from a policy: accepted by Envoy, bounded as the policy says, and committed as generated."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from extproc.cli import main
from extproc.core.policy import Policy
from extproc.core.rejection import RULES
from extproc.core.values import Lane
from extproc.demo.envoy_process import validate
from extproc.envoy_config import Addresses, bootstrap
from extproc.envoy_config.replies import MAPPINGS
from extproc.envoy_config.routes import lane_pools
from tests.envoy.gateway import make_model, make_policy

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parent.parent.parent
INJECTED_BYTES_MAX = 64 * 2**10
TWO_POOLS = {
    "chat": {"replicas": {"c0": {"address": "127.0.0.1:8100", "gross_tokens": 96_000}}},
    "docs": {"replicas": {"d0": {"address": "[::1]:8110", "gross_tokens": 160_000}}},
}
POLICIES = {
    "one lane": make_policy(),
    "two models, two pools": make_policy(
        pools=TWO_POOLS, models={"a": make_model(interactive="chat", bulk="docs"), "b": make_model(bulk="chat")}
    ),
    "bypass rules": make_policy(
        pools=TWO_POOLS,
        bypass=[
            {"path": "/v1/models", "pool": "docs"},
            {"path": "/version", "pool": "docs"},
            {"method": "HEAD", "path": "/v1/models", "pool": "chat"},
        ],
    ),
    "no retries": make_policy(limits={"upstream_retries_max": 0}),
    "largest body": make_policy(limits={"body_bytes_max": 256 * 2**20}),
    "smallest body": make_policy(limits={"body_bytes_max": 1}),
    "shortest times": make_policy(limits={"decision_s_max": "0.001", "response_s_max": "0.000001"}),
}


def manager_of(config: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of the configuration."""
    manager: dict[str, Any] = listener_of(config)["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def listener_of(config: dict[str, Any]) -> dict[str, Any]:
    """The only listener of the configuration."""
    (listener,) = config["static_resources"]["listeners"]
    assert isinstance(listener, dict)
    return listener


def seconds(text: str) -> float:
    """A protobuf JSON duration."""
    return float(text.removesuffix("s"))


def run_cli(*args: str) -> Result:
    """`tokenlane envoy-config` with these arguments."""
    return CliRunner().invoke(main, ["envoy-config", *args])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_envoy_accepts_every_policy(policy: Policy) -> None:
    """Whatever the policy file allows becomes a configuration that Envoy accepts."""
    validate(bootstrap(policy, Addresses()))


@pytest.mark.parametrize(
    "addresses",
    [Addresses(tokenlane="unix:/run/tokenlane/ext_proc.sock"), Addresses("[::]:8080", "[::1]:9901", "[::1]:9002")],
    ids=["unix socket", "IPv6"],
)
def test_envoy_accepts_every_address_form(addresses: Addresses) -> None:
    """The service is found on a Unix socket as on TCP, and IPv6 stands in brackets."""
    validate(bootstrap(make_policy(), addresses))


@pytest.mark.parametrize(
    "fields",
    [
        {"listen": "localhost:80"},
        {"listen": "unix:/run/x.sock"},
        {"admin": "127.0.0.1"},
        {"admin": "127.0.0.1:0"},
        {"tokenlane": "127.0.0.1:65536"},
        {"tokenlane": "unix:relative.sock"},
    ],
    ids=lambda fields: "=".join(*fields.items()),
)
def test_addresses_are_checked(fields: dict[str, str]) -> None:
    """What is neither IP:port nor, for the service, an absolute socket path is refused by the field's name."""
    with pytest.raises(ValueError, match=f"^{next(iter(fields))}: "):
        Addresses(**fields)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_routes_are_the_verdicts_that_are_possible(policy: Policy) -> None:
    """There is one route for each lane and pool that a verdict can name, and the last one fails closed."""
    (host,) = manager_of(bootstrap(policy, Addresses()))["route_config"]["virtual_hosts"]
    *admitted, last = host["routes"]
    lanes = {(limits.lane, limits.pool) for model in policy.models.values() for limits in model.lanes}
    bypass = {(Lane.BYPASS, rule.pool) for rule in policy.bypass}

    assert sorted(lanes | bypass) == lane_pools(policy)
    assert [([("x-llm-lane", lane), ("x-llm-pool", pool)], pool) for lane, pool in lane_pools(policy)] == [
        ([(h["name"], h["string_match"]["exact"]) for h in r["match"]["headers"]], r["route"]["cluster"])
        for r in admitted
    ]
    assert (last["match"], last["direct_response"]["status"]) == ({"prefix": "/"}, 503)


def test_no_retries_means_no_retry_policy() -> None:
    """Without retries in the policy no route of Envoy's repeats a request."""
    routes = manager_of(bootstrap(POLICIES["no retries"], Addresses()))["route_config"]["virtual_hosts"][0]["routes"]

    assert [route for route in routes if "retry_policy" in route.get("route", {})] == []


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_buffers_hold_every_body_within_the_cap(policy: Policy) -> None:
    """A body at the cap and what the service injects fit Envoy's buffer, over HTTP/1 and in a window of HTTP/2."""
    config = bootstrap(policy, Addresses())
    window = manager_of(config)["http2_protocol_options"]
    needed = policy.limits.body_bytes_max + INJECTED_BYTES_MAX

    assert needed < listener_of(config)["per_connection_buffer_limit_bytes"]
    assert needed < window["initial_stream_window_size"] <= window["initial_connection_window_size"]


def test_no_timer_cuts_what_the_policy_allows() -> None:
    """Upload, verdict and response each have their own bound, and no other timer ends before their sum."""
    config = manager_of(bootstrap(make_policy(limits={"decision_s_max": 7, "response_s_max": 100}), Addresses()))
    ext_proc = config["http_filters"][0]["typed_config"]
    route = config["route_config"]["virtual_hosts"][0]["routes"][0]["route"]

    assert seconds(config["request_timeout"]) == 7
    assert seconds(ext_proc["message_timeout"]) == 7
    assert seconds(route["timeout"]) == 100
    assert seconds(config["common_http_protocol_options"]["max_stream_duration"]) == 7 + 7 + 100
    assert seconds(config["stream_idle_timeout"]) == 7 + 7 + 100


def test_durations_are_never_rounded_to_nothing() -> None:
    """A time below a microsecond is one microsecond: zero would switch Envoy's timer off."""
    policy = make_policy(limits={"response_s_max": "0.000000001"})
    route = manager_of(bootstrap(policy, Addresses()))["route_config"]["virtual_hosts"][0]["routes"][0]["route"]

    assert timedelta(microseconds=1).total_seconds() == seconds(route["timeout"])


def test_breakers_never_refuse_what_was_admitted() -> None:
    """Every breaker is above what the ledger and the service allow at one time."""
    policy = make_policy(limits={"streams_max": 5000})
    breakers = {
        cluster["name"]: cluster["circuit_breakers"]["thresholds"]
        for cluster in bootstrap(policy, Addresses())["static_resources"]["clusters"]
    }
    kinds = ("max_connections", "max_pending_requests", "max_requests", "max_retries")

    assert {
        "chat": [dict.fromkeys(kinds, 2 * 256 + 5000)],
        "tokenlane": [dict.fromkeys(kinds, 2 * 5000)],
    } == breakers


def test_the_name_of_the_service_is_taken() -> None:
    """A pool named like the service's cluster would receive the admission calls, so it is refused."""
    policy = make_policy(pools={"tokenlane": TWO_POOLS["chat"]}, models={"m": make_model(interactive="tokenlane")})

    with pytest.raises(ValueError, match=r"^pool tokenlane: "):
        bootstrap(policy, Addresses())


def test_mapped_replies_keep_the_status_of_their_reason() -> None:
    """A reply of Envoy's has the status that the contract gives its reason; only client errors keep their own."""
    sent = {(row.reason, row.status or row.code) for row in MAPPINGS}

    assert {(reason, status) for reason, status in sent if RULES[reason].status != status} == {
        ("unknown_endpoint", 403),
        ("malformed_request", 499),
    }


def test_committed_configuration_is_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """envoy/envoy.yaml is what the command prints for envoy/policy.yaml."""
    monkeypatch.chdir(ROOT)
    result = run_cli("envoy/policy.yaml")

    assert (0, (ROOT / "envoy/envoy.yaml").read_text()) == (result.exit_code, result.stdout)


def test_header_comment_repeats_the_command(tmp_path: Path) -> None:
    """The first line of the output is the command that makes the same output again."""
    policy = tmp_path / "policy with space.yaml"
    policy.write_text((ROOT / "envoy/policy.yaml").read_text())
    result = run_cli(str(policy), "--tokenlane", "unix:/run/t.sock")

    assert (
        f"# Made by: tokenlane envoy-config '{policy}' --listen 0.0.0.0:8080 --admin 127.0.0.1:9901 "
        "--tokenlane unix:/run/t.sock"
    ) == result.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--listen", "everywhere"], "listen: everywhere is not IP:port"), ([], "version: missing")],
    ids=["address", "policy"],
)
def test_faults_are_sentences(tmp_path: Path, args: list[str], message: str) -> None:
    """A wrong option or policy is one sentence on stderr and status 1, and prints no half configuration."""
    policy = ROOT / "envoy/policy.yaml"
    if not args:
        policy = tmp_path / "policy.yaml"
        policy.write_text("limits: {}")
    result = run_cli(str(policy), *args)

    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_protobuf_modules_are_found_from_anywhere(tmp_path: Path) -> None:
    """The folder envoy/ hides no module of the package envoy, whatever the working directory."""
    command = [sys.executable, "-c", "import envoy.service.ext_proc.v3.external_processor_pb2 as m; print(m.__name__)"]
    printed = [
        subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False).stdout.strip()
        for cwd in (ROOT, ROOT / "envoy", tmp_path)
    ]

    assert printed == ["envoy.service.ext_proc.v3.external_processor_pb2"] * 3


def test_configuration_folder_holds_no_python() -> None:
    """A Python file under envoy/ would turn the folder into the package that it must not hide."""
    assert list((ROOT / "envoy").rglob("*.py")) == []
