"""`tokenlane check`: bad configurations are found, good ones pass, and nothing ends in a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from extproc.cli import main
from extproc.config_check import Finding, Severity, check
from extproc.config_check.document import snake_case
from extproc.config_check.filter_rules import WRITTEN_HEADERS
from extproc.config_check.findings import Rule
from extproc.config_check.rules import BOOTSTRAP_RULES, MANAGER_RULES, SHAPE
from extproc.core.names import DESTINATION_HEADER, LANE_HEADER, POOL_HEADER
from extproc.core.policy import Policy
from extproc.core.rejection import answer
from extproc.core.values import Demand, Reason, Reject
from extproc.demo.envoy_process import EnvoyError, validate
from extproc.envoy_config import Addresses, bootstrap, to_yaml
from extproc.settings import load_policy
from tests.config_check.corpus import POLICY, ROOT, Bad, corpus, good, patched
from tests.envoy.gateway import make_model, make_policy

pytestmark = pytest.mark.timeout(60)

BAD = corpus()
TWO_POOLS = {
    "chat": {"replicas": {"c0": {"address": "127.0.0.1:8100", "gross_tokens": 96_000}}},
    "docs": {"replicas": {"d0": {"address": "[0::1]:8110", "gross_tokens": 160_000}}},
}
RULES: tuple[Rule[Any], ...] = (*BOOTSTRAP_RULES, *MANAGER_RULES)
OPERATIONS = ROOT / "docs" / "operations.md"


def run(*arguments: str | Path) -> Result:
    """`tokenlane check` with these arguments."""
    result = CliRunner().invoke(main, ["check", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def written(path: Path, content: Any) -> Path:
    """The file at `path`, with `content` as JSON unless it is text."""
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def camel_case(value: Any) -> Any:
    """The same data with the field names of protobuf's JSON form."""
    if isinstance(value, dict):
        return {
            re.sub(r"_([a-z])", lambda m: m[1].upper(), key) if re.fullmatch(r"[a-z0-9_]+", key) else key: camel_case(
                item
            )
            for key, item in value.items()
        }
    return [camel_case(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_configuration_is_found(bad: Bad, tmp_path: Path) -> None:
    """Each configuration of the corpus is reported with exactly its sentences, and errors fail the check."""
    failed = any(line.startswith("error") for line in bad.expect)
    policy = POLICY
    if bad.policy:
        policy = written(tmp_path / "policy.yaml", {**yaml.safe_load(POLICY.read_text()), **bad.policy})

    result = run("--no-tokenizers", policy, written(tmp_path / "envoy.json", bad.config))

    assert [*bad.expect, *([] if failed else ["ok"])] == result.output.splitlines()
    assert int(failed) == result.exit_code


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_what_envoy_says(bad: Bad) -> None:
    """Envoy itself starts with nearly all of them, which is why they need a check."""
    try:
        validate(bad.config)
        said = "accepts"
    except EnvoyError:
        said = "refuses"

    assert bad.envoy == said


def test_every_rule_has_a_bad_configuration() -> None:
    """No rule is without a configuration that breaks it."""
    rules = {rule.name for rule in RULES}

    assert rules | {SHAPE} == {name for bad in BAD for name in bad.rules}


def test_rule_names_are_unique() -> None:
    """One name, one rule."""
    names = [rule.name for rule in RULES]

    assert sorted(set(names)) == sorted(names)


def test_the_committed_configuration_is_ok() -> None:
    """The example policy, its tokenizer and the committed configuration pass."""
    result = run(POLICY, POLICY.with_name("envoy.yaml"))

    assert ("ok\n", 0) == (result.output, result.exit_code)


@pytest.mark.parametrize(
    "addresses",
    [
        Addresses(),
        Addresses("127.0.0.1:1", "127.0.0.1:65535", "10.0.0.1:80"),
        Addresses("[::]:8080", "[::1]:9901", "[::1]:9002"),
        Addresses(tokenlane="unix:/run/tokenlane/ext_proc.sock"),
    ],
    ids=["default", "other ports", "IPv6", "unix socket"],
)
def test_generated_configuration_is_ok(addresses: Addresses, tmp_path: Path) -> None:
    """What `tokenlane envoy-config` prints passes, wherever things listen, even strictly."""
    options = ("--listen", addresses.listen, "--admin", addresses.admin, "--tokenlane", addresses.tokenlane)
    config = CliRunner().invoke(main, ["envoy-config", str(POLICY), *options]).output

    result = run("--no-tokenizers", "--strict", POLICY, written(tmp_path / "envoy.yaml", config))

    assert ("ok\n", 0) == (result.output, result.exit_code)


@pytest.mark.parametrize(
    "policy",
    [
        make_policy(),
        make_policy(
            pools=TWO_POOLS,
            models={"a": make_model(interactive="chat", bulk="docs"), "b": make_model(bulk="chat")},
            bypass=[{"path": "/v1/models", "pool": "docs"}, {"method": "HEAD", "path": "/v1/models", "pool": "chat"}],
        ),
        make_policy(limits={"upstream_retries_max": 0}),
        make_policy(limits={"body_bytes_max": 256 * 2**20}),
        make_policy(limits={"body_bytes_max": 1, "streams_max": 1}),
        make_policy(limits={"decision_s_max": "0.001", "response_s_max": "0.000001"}),
        make_policy(limits={"decision_s_max": 3600, "response_s_max": 1}),
    ],
    ids=["one lane", "two pools", "no retries", "largest body", "smallest", "shortest times", "long hold"],
)
def test_every_policy_has_a_good_configuration(policy: Policy) -> None:
    """Whatever the policy says, nothing is found in the configuration that is made from it."""
    assert [] == check(policy, bootstrap(policy, Addresses()))


def test_field_names_of_the_json_form(tmp_path: Path) -> None:
    """Both spellings of field names are the same configuration, as they are to Envoy."""
    bad = next(bad for bad in BAD if "route-timeout" in bad.rules)
    config = camel_case(bad.config)
    validate(config)

    result = run("--no-tokenizers", POLICY, written(tmp_path / "envoy.yaml", config))

    assert list(bad.expect) == result.output.splitlines()
    assert snake_case(camel_case(good())) == good()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "it holds no configuration: a bootstrap is a mapping with static_resources"),
        ("- 1", "it holds no configuration: a bootstrap is a mapping with static_resources"),
        ("a: [", "while parsing a flow node"),
        ("a: \x00", "unacceptable character #x0000"),
        ("[" * 1000, "it is nested too deeply to be read"),
        (None, "No such file or directory"),
    ],
    ids=["empty", "a list", "cut off", "control character", "deep", "absent"],
)
def test_unreadable_file(content: str | None, sentence: str, tmp_path: Path) -> None:
    """A file that cannot be read is one line that says why."""
    path = tmp_path / "envoy.yaml"
    if content is not None:
        path.write_text(content)

    result = run("--no-tokenizers", POLICY, path)
    (line,) = result.output.splitlines()

    assert line.startswith(f"error [file] {path}: ")
    assert sentence in line
    assert 1 == result.exit_code


def test_file_in_no_encoding(tmp_path: Path) -> None:
    """Bytes that are no text are a sentence too."""
    path = tmp_path / "envoy.json"
    path.write_bytes(b"\xff\xfe\x00")

    result = run("--no-tokenizers", POLICY, path)

    assert (1, 1) == (len(result.output.splitlines()), result.exit_code)


def good_manager() -> dict[str, Any]:
    """The connection manager of the good configuration; a copy."""
    (chain,) = patched(good(), [])["static_resources"]["listeners"][0]["filter_chains"]
    manager: dict[str, Any] = chain["filters"][0]["typed_config"]
    return manager


def places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of everything in a configuration."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("value", [None, 7, "x", [], ["x"], {}, [{}], True], ids=repr)
def test_any_value_anywhere_is_taken(value: Any) -> None:
    """Whatever stands in place of any part, the check ends with findings and not with an exception."""
    policy = load_policy(POLICY)
    # Parts that are many and alike: one of them is enough.
    one_of_each = [
        {"set": "$hcm/local_reply_config/mappers", "to": good_manager()["local_reply_config"]["mappers"][:1]},
        {"set": "$host/response_headers_to_add", "to": []},
        {"set": "$host/routes/3/response_headers_to_add", "to": []},
        {"set": "$hcm/http_filters/1", "to": {"name": "c", "typed_config": {"@type": "x/CustomResponse"}}},
    ]
    config = patched(good(), one_of_each)
    found = 0
    for path in list(places(config)):
        node: Any = config
        for key in path[:-1]:
            node = node[key]
        kept, node[path[-1]] = node[path[-1]], value
        found += bool(check(policy, config))
        node[path[-1]] = kept

    assert found > 50


def test_policy_alone() -> None:
    """Without a configuration the policy is checked."""
    result = run("--no-tokenizers", POLICY)

    assert ("ok\n", 0) == (result.output, result.exit_code)


def test_policy_that_could_never_work(tmp_path: Path) -> None:
    """Each fault of the policy is a line, and the configuration is not looked at."""
    document = yaml.safe_load(POLICY.read_text())
    document["models"]["qwen3"]["lanes"]["bulk"]["total_tokens_max"] = 999_999
    document["default_model"] = "nobody"
    path = written(tmp_path / "policy.yaml", document)

    result = run(path, tmp_path / "absent.yaml")
    never = "a request of 999999 tokens is within the limits but no replica of pool docs can ever hold more than 144000"

    assert [
        f"error [policy] {path}: model qwen3, lane bulk: {never}",
        f"error [policy] {path}: default_model nobody is not a model, so a request without one could not run",
    ] == result.output.splitlines()
    assert 1 == result.exit_code


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    """A tokenizer that does not load is an error, unless tokenizers are left out."""
    document = yaml.safe_load(POLICY.read_text())
    document["models"]["qwen3"]["tokenizer_dir"] = "nowhere"
    path = written(tmp_path / "policy.yaml", document)

    result = run(path)
    (line,) = result.output.splitlines()

    assert line.startswith(f"error [tokenizer] {path}: {tmp_path / 'nowhere'}")
    assert line.endswith(", so the service does not start")
    assert 1 == result.exit_code
    assert "ok\n" == run("--no-tokenizers", path).output


def test_strict(tmp_path: Path) -> None:
    """A warning passes, and fails with --strict."""
    bad = next(bad for bad in BAD if bad.rules == {"request-id"})
    path = written(tmp_path / "envoy.json", bad.config)

    assert 0 == run("--no-tokenizers", POLICY, path).exit_code
    assert 1 == run("--no-tokenizers", "--strict", POLICY, path).exit_code


def test_json(tmp_path: Path) -> None:
    """--json writes one object with the same findings and the same exit code."""
    bad = next(bad for bad in BAD if bad.rules == {"failure-mode"})

    result = run("--no-tokenizers", "--json", POLICY, written(tmp_path / "envoy.json", bad.config))
    printed = json.loads(result.output)

    assert False is printed["ok"]
    assert list(bad.expect) == [str(Finding(**finding)) for finding in printed["findings"]]
    assert 1 == result.exit_code
    assert {"ok": True, "findings": []} == json.loads(run("--no-tokenizers", "--json", POLICY).output)


def test_errors_come_first() -> None:
    """Among many findings the errors are read first."""
    found = check(load_policy(POLICY), patched(good(), [{"set": "$ext_proc/processing_mode", "to": {}}]))
    severities = [finding.severity for finding in found]

    assert {Severity.ERROR, Severity.WARNING} == set(severities)
    assert sorted(severities, key=lambda severity: severity is Severity.WARNING) == severities


def test_the_filter_of_the_service_is_found_among_others() -> None:
    """Of two ext_proc filters the one that takes the verdicts' metadata is the service's."""
    picker = {
        "name": "picker",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "chat"}},
        },
    }

    assert [] == check(load_policy(POLICY), patched(good(), [{"insert": "$hcm/http_filters/0", "value": picker}]))


def test_fail_closed_by_a_first_route() -> None:
    """A table that answers what was not admitted first, and asks for the pool alone after, is closed too."""
    absent = {"prefix": "/", "headers": [{"name": "x-llm-lane", "present_match": False}]}
    patch: list[dict[str, Any]] = [
        {"set": "$host/routes/3/match", "to": absent},
        {"move": "$host/routes/3", "to": "$host/routes/0"},
        *({"remove": f"$host/routes/{number}/match/headers/0"} for number in (1, 2, 3)),
    ]
    config = patched(good(), patch)
    validate(config)

    assert [] == check(load_policy(POLICY), config)


def test_pool_header_as_the_cluster() -> None:
    """A route may take the cluster's name from the pool header, which only a verdict sets."""
    admitted = good_manager()["route_config"]["virtual_hosts"][0]["routes"][0]
    admitted["match"] = {"prefix": "/", "headers": [{"name": "x-llm-lane"}]}
    del admitted["route"]["cluster"]
    admitted["route"]["cluster_header"] = "x-llm-pool"
    config = patched(good(), [{"remove": "$host/routes/0"}] * 3 + [{"insert": "$host/routes/0", "value": admitted}])
    validate(config)

    assert [] == check(load_policy(POLICY), config)


def test_headers_are_those_of_the_service() -> None:
    """The headers that a filter must let the service write are those that it writes."""
    demand = Demand("m", 1, max_output_tokens=1, output_tokens=1, sequences=1)
    refusals = [
        answer(Reject(reason, "", demand=demand), policy_version="v", request_id="i", jitter_ppm=0) for reason in Reason
    ]
    refused = {name for refusal in refusals for name, _ in refusal.headers}

    assert refused | {LANE_HEADER, POOL_HEADER, DESTINATION_HEADER, "content-length"} == set(WRITTEN_HEADERS)


def test_operators_can_read_the_rules() -> None:
    """The operations document lists every rule with its severity and what must be true."""
    rules = sorted((rule.name, rule.severity.value, rule.meaning) for rule in RULES)

    rows = re.findall(r"^\| `([\w-]+)` \| (error|warning) \| (.+) \|$", OPERATIONS.read_text(), re.MULTILINE)

    assert rules == sorted(rows)


def test_yaml_and_json_are_the_same(tmp_path: Path) -> None:
    """A configuration is read as what its name says, and means the same."""
    bad = next(bad for bad in BAD if bad.rules == {"strip-verdict"})

    assert (
        run("--no-tokenizers", POLICY, written(tmp_path / "envoy.json", bad.config)).output
        == run("--no-tokenizers", POLICY, written(tmp_path / "envoy.yaml", to_yaml(bad.config))).output
    )
