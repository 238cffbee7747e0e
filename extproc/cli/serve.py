"""`tokenlane serve`: run the service until SIGTERM, then drain."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
import uvloop

from extproc.counting import TokenizerError
from extproc.service import logs
from extproc.service.server import Options, Server
from extproc.settings import PolicyError, load_policy


@click.command()
@click.argument("policy", type=click.Path(path_type=Path, dir_okay=False), envvar="TOKENLANE_POLICY")
@click.option("--listen", multiple=True, default=["127.0.0.1:9002"], show_default=True, help="IP:port or unix:/path.")
@click.option("--admin", default="127.0.0.1:9003", show_default=True, help="IP:port of the admin server.")
@click.option("--drain-delay-s", default=0.0, show_default=True, help="Keep accepting after SIGTERM for this long.")
@click.option("--drain-grace-s", default=30.0, show_default=True, help="Let what runs finish for this long.")
@click.option("--tokenizer-threads", default=2, show_default=True, help="Threads that count tokens.")
@click.option(
    "--journal",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that keeps open reservations across a crash; on storage that outlives the process.",
)
@click.option("--log-level", default="info", show_default=True, type=click.Choice(["info", "warning", "error"]))
def serve(  # noqa: PLR0913, PLR0917 (one parameter an option)
    policy: Path,
    listen: tuple[str, ...],
    admin: str,
    drain_delay_s: float,
    drain_grace_s: float,
    tokenizer_threads: int,
    journal: Path | None,
    log_level: str,
) -> None:
    """Serve ext_proc streams under POLICY. Every option can be set as TOKENLANE_SERVE_<OPTION>."""
    logs.configure(log_level)
    host, _, port = admin.rpartition(":")
    options = Options(listen, host, int(port), drain_delay_s, drain_grace_s, tokenizer_threads, journal)
    try:
        uvloop.run(_serve(Server(load_policy(policy), options)))
    except (PolicyError, TokenizerError, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error


async def _serve(server: Server) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await server.start()
    await stopping.wait()
    # A second signal ends the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    await server.drain()
