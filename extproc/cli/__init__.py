"""The command line: one module a command, imported when the command is asked for.

`tokenlane count` must start without grpc and protobuf, so the group knows its commands by name and module only.
"""

from __future__ import annotations

import importlib

import click

from extproc import __version__

COMMANDS = {
    "check": "extproc.cli.check:check_command",
    "count": "extproc.cli.count:count",
    "demo": "extproc.cli.demo:demo",
    "envoy-config": "extproc.cli.envoy_config:envoy_config",
    "serve": "extproc.cli.serve:serve",
}
"""Command name -> `module:attribute` of its click command."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is run or described."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in the order of the help text."""
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`; None when there is none."""
        target = COMMANDS.get(cmd_name)
        if target is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is not a click command")
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TOKENLANE"})
@click.version_option(__version__, prog_name="tokenlane")
def main() -> None:
    """Token-exact admission control for LLM fleets, in front of Envoy."""
