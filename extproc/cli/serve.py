"""`tokenlane serve`: run the service until SIGTERM, then drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path

import click
import uvloop

from extproc.counting import TokenizerError
from extproc.service import logs
from extproc.service.server import Options, Server
from extproc.settings import PolicyError, load_policy, socket_address

SWITCH_INTERVAL_S = 0.001
"""How long a thread that checks a large body may keep the event loop waiting; Python's own is 5 ms."""

UNIX_PREFIX = "unix:"


def _address(_context: click.Context, _option: click.Parameter, value: str) -> str:
    """IP:port that can be listened on now; said before tokenizers load, which takes seconds."""
    try:
        host, _, port = socket_address(value, port_min=0).rpartition(":")  # 0: the system picks
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise click.BadParameter(f"cannot listen on {value}: {error.strerror}") from error
    return value


def _listen(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not value.startswith(UNIX_PREFIX):
            _address(context, option, value)
        elif not Path(value.removeprefix(UNIX_PREFIX)).parent.is_dir():
            raise click.BadParameter(f"cannot listen on {value}: its directory does not exist")
    return values


_SECONDS = click.FloatRange(min=0)


@click.command()
@click.argument("policy", type=click.Path(path_type=Path, dir_okay=False), envvar="TOKENLANE_POLICY")
@click.option(
    "--listen",
    multiple=True,
    default=["127.0.0.1:9002"],
    show_default=True,
    callback=_listen,
    help="IP:port or unix:/path.",
)
@click.option(
    "--admin", default="127.0.0.1:9003", show_default=True, callback=_address, help="IP:port of the admin server."
)
@click.option(
    "--drain-delay-s", default=0.0, type=_SECONDS, show_default=True, help="Keep accepting after SIGTERM for this long."
)
@click.option(
    "--drain-grace-s", default=30.0, type=_SECONDS, show_default=True, help="Let what runs finish for this long."
)
@click.option(
    "--tokenizer-threads",
    default=2,
    type=click.IntRange(1, 64),
    show_default=True,
    help="Threads that count large texts.",
)
@click.option(
    "--tokenizer-processes",
    default=1,
    type=click.IntRange(0, 64),
    show_default=True,
    help="Processes that read and count large bodies; 0: threads do, and a hostile body can stall the service.",
)
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
    tokenizer_processes: int,
    journal: Path | None,
    log_level: str,
) -> None:
    """Serve ext_proc streams under POLICY. Every option can be set as TOKENLANE_SERVE_<OPTION>."""
    logs.configure(log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    host, _, port = admin.rpartition(":")
    options = Options(
        listen, host, int(port), drain_delay_s, drain_grace_s, tokenizer_threads, tokenizer_processes, journal
    )
    try:
        uvloop.run(_serve(Server(load_policy(policy), options)))
    except (PolicyError, TokenizerError, OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error


async def _serve(server: Server) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    flushing = asyncio.create_task(logs.keep_flushed())
    await server.start()
    await stopping.wait()
    # A second signal ends the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    await server.drain()
    flushing.cancel()
