"""`tokenlane check`: what a policy or an Envoy configuration would let leak, pass or end too early."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from extproc.config_check import FileError, Finding, Severity, check, read
from extproc.core.policy import Policy
from extproc.counting import Counter, TokenizerError
from extproc.settings import PolicyError, load_policy


@click.command("check", short_help="Check a policy, and an Envoy configuration against it.")
@click.argument("policy", type=click.Path(path_type=Path))
@click.argument("envoy", type=click.Path(path_type=Path), required=False)
@click.option("--strict", is_flag=True, help="Warnings fail the check too.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object in place of lines.")
@click.option("--no-tokenizers", is_flag=True, help="Do not load the models' tokenizers.")
def check_command(policy: Path, envoy: Path | None, *, strict: bool, as_json: bool, no_tokenizers: bool) -> None:
    """Check POLICY, and the Envoy bootstrap ENVOY (YAML or JSON) against it.

    Prints one line a finding: severity, [rule], where, and what would happen. Exit code 1 with an error, or with
    --strict a warning; otherwise 0. `tokenlane envoy-config` writes a bootstrap in which nothing is found.
    """
    findings = list(_findings(policy, envoy, tokenizers=not no_tokenizers))
    failed = any(strict or finding.severity is Severity.ERROR for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            click.echo(str(finding))
        if not failed:
            click.echo("ok")
    sys.exit(int(failed))


def _findings(policy_file: Path, envoy_file: Path | None, *, tokenizers: bool) -> Iterator[Finding]:
    try:
        policy = load_policy(policy_file)
    except PolicyError as error:
        for problem in error.problems:
            yield Finding(Severity.ERROR, "policy", str(policy_file), problem)
        return
    if tokenizers:
        yield from _tokenizer_findings(policy, policy_file)
    if envoy_file is None:
        return
    try:
        document = read(envoy_file)
    except FileError as error:
        yield Finding(Severity.ERROR, "file", str(envoy_file), str(error))
        return
    yield from check(policy, document)


def _tokenizer_findings(policy: Policy, policy_file: Path) -> Iterator[Finding]:
    try:
        Counter(policy, threads=1).close()
    except TokenizerError as error:
        yield Finding(Severity.ERROR, "tokenizer", str(policy_file), f"{error}, so the service does not start")
