"""`tokenlane envoy-config`: the Envoy configuration that belongs to a policy."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from extproc.envoy_config import Addresses, bootstrap, to_yaml
from extproc.settings import PolicyError, load_policy

_DEFAULT = Addresses()


@click.command("envoy-config")
@click.argument("policy", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--listen", default=_DEFAULT.listen, show_default=True, help="IP:port for clients.")
@click.option("--admin", default=_DEFAULT.admin, show_default=True, help="IP:port of Envoy's admin interface.")
@click.option(
    "--tokenlane",
    default=_DEFAULT.tokenlane,
    show_default=True,
    help="IP:port or unix:/path on which `tokenlane serve` listens.",
)
def envoy_config(policy: Path, listen: str, admin: str, tokenlane: str) -> None:
    """Print the Envoy configuration for POLICY as YAML."""
    try:
        config = bootstrap(load_policy(policy), Addresses(listen=listen, admin=admin, tokenlane=tokenlane))
    except (PolicyError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    command = shlex.join(
        ["tokenlane", "envoy-config", str(policy), "--listen", listen, "--admin", admin, "--tokenlane", tokenlane]
    )
    click.echo(f"# Made by: {command}\n# Change the policy and make it again; edits here are lost.")
    click.echo(to_yaml(config), nl=False)
