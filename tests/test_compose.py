"""docker-compose.yml without a container engine: its schema, its files, and its very commands on loopback.

The compose network's addresses are moved to 127.77.0.0/24, which Linux serves as loopback; everything else runs as
written.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from extproc.cli.serve import serve
from extproc.demo.envoy_process import EnvoyProcess, validate
from extproc.envoy_config import Addresses, bootstrap, to_yaml
from extproc.settings import load_policy

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
POLICY = ROOT / "envoy" / "compose" / "policy.yaml"
ENVOY = ROOT / "envoy" / "compose" / "envoy.yaml"
READY_S_MAX = 40


def _address(service: str) -> str:
    address: str = COMPOSE["services"][service]["networks"]["mesh"]["ipv4_address"]
    return address


def _option(service: str, name: str) -> str:
    words: list[str] = COMPOSE["services"][service]["command"]
    (value,) = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return value


def test_schema() -> None:
    """The file is a compose file by the compose specification's own schema."""
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "ok -- validation done\n") == (done.returncode, done.stdout)


def test_mounted_files_exist() -> None:
    """Every file that is mounted from the repository is in it."""
    mounts = [
        volume.partition(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    ]

    assert len(mounts) == 3
    assert all((ROOT / mount).is_file() for mount in mounts)


def test_addresses_agree() -> None:
    """The policy's replicas are the engines at their fixed addresses, and Envoy finds the service at its own."""
    replicas = {replica.name: replica.address for replica in load_policy(POLICY).replicas()}
    engines = {
        name: f"{_address(name)}:{_option(name, '--listen').rpartition(':')[2]}"
        for name, service in COMPOSE["services"].items()
        if "extproc.demo.engine" in service.get("entrypoint", [])
    }
    targets = yaml.safe_load((ROOT / "envoy" / "compose" / "prometheus.yml").read_text())["scrape_configs"]

    assert engines == replicas
    assert {name: name for name in engines} == {name: _option(name, "--name") for name in engines}
    assert [f"{_address('tokenlane')}:9003", f"{_address('envoy')}:9901"] == [
        job["static_configs"][0]["targets"][0] for job in targets
    ]


def _generated() -> dict[str, Any]:
    service = f"{_address('tokenlane')}:{_option('tokenlane', '--listen').rpartition(':')[2]}"
    return bootstrap(load_policy(POLICY), Addresses("0.0.0.0:8080", "0.0.0.0:9901", service))


def test_envoy_configuration_is_generated() -> None:
    """The mounted Envoy configuration is what tokenlane makes of the mounted policy, and Envoy takes it."""
    _, _, content = ENVOY.read_text().partition("edits here are lost.\n")

    assert to_yaml(_generated()) == content
    validate(yaml.safe_load(content))


def test_dockerfile() -> None:
    """What the image copies exists and is not ignored, and it runs as a user that is not root."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [
        source for line in lines if line.startswith("COPY ") and "--from" not in line for source in line.split()[1:-1]
    ]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    command = next(line for line in lines if line.startswith("CMD "))

    assert set(copied) == allowed
    assert all((ROOT / source).exists() for source in copied)
    assert ["65532"] == users
    serve.make_context("serve", re.findall(r'"([^"]+)"', command)[1:])


@contextmanager
def _process(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The mounted files with loopback addresses, and the tokenizer where this checkout has it."""
    for source in (POLICY, ENVOY):
        text = source.read_text().replace("10.77.0.", "127.77.0.").replace("0.0.0.0", "127.77.0.2")  # noqa: S104
        text = re.sub(r"tokenizer_dir: .*", f"tokenizer_dir: {ROOT}/extproc/demo/qwen3", text)
        (tmp_path / source.name).write_text(text)
    return tmp_path


def _command(service: str, local: Path) -> list[str]:
    replaced = {
        "/etc/tokenlane/policy.yaml": str(local / "policy.yaml"),
        "/var/lib/tokenlane": str(local),
        "0.0.0.0": _address(service).replace("10.77.0.", "127.77.0."),  # noqa: S104
    }
    words = []
    for word in COMPOSE["services"][service]["command"]:
        for old, new in replaced.items():
            word = word.replace(old, new)  # noqa: PLW2901 (one replacement after another)
        words.append(word)
    return words


def test_runs_as_written(local: Path) -> None:
    """With the commands and files of the compose file, a request goes through Envoy to the reserved engine."""
    if sys.platform != "linux":
        pytest.skip("only Linux serves all of 127.0.0.0/8 as loopback")
    with ExitStack() as stack:
        for name in ("chat-0", "chat-1", "docs-0"):
            stack.enter_context(_process(["extproc.demo.engine", *_command(name, local)]))
        service = stack.enter_context(_process(["extproc", *_command("tokenlane", local)]))
        client = stack.enter_context(httpx.Client(timeout=10))
        deadline_s = time.monotonic() + READY_S_MAX
        while not _all_ready(client):
            assert service.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        stack.enter_context(EnvoyProcess(yaml.safe_load((local / "envoy.yaml").read_text())))
        body = {"model": "qwen3", "prompt": "Hello", "max_tokens": 16}
        answer = client.post("http://127.77.0.2:8080/v1/completions", json=body)

        assert (200, "interactive", "chat-0") == (
            answer.status_code,
            answer.headers["x-llm-lane"],
            answer.headers["x-engine-name"],
        )
        assert (local / "journal").exists()


def _all_ready(client: httpx.Client) -> bool:
    try:
        if client.get("http://127.77.0.10:9003/readyz").status_code != 200:
            return False
        replicas = client.get("http://127.77.0.10:9003/debug/ledger").json()["replicas"]
    except httpx.HTTPError:
        return False
    return all(replica["ready"] for replica in replicas.values())
