"""The tour on a terminal: one block a step, the ledger as bars. Without a terminal the same text comes plain."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from extproc.demo.stack import POOLS, Stack
from extproc.demo.tour import Outcome, shown_headers, verdict
from extproc.demo.tour_steps import STEPS, Step
from extproc.demo.tour_values import Account, Ledger, Moment, Observation

INDENT = "   "
WIDTH_MAX = 120
NAME_WIDTH = 7
FIGURES_WIDTH = 13
"""Of `24,662/86,400`."""

BAR_WIDTH_MAX = 16
BAR_WIDTH_MIN = 4

STATUS_STYLES: Mapping[int, str] = {2: "bold green", 4: "bold yellow", 5: "bold red"}


class Page:
    """Writes to `console`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, WIDTH_MAX)
        self._full, self._empty = ("#", ".") if console.options.ascii_only else ("█", "░")

    def starting(self) -> None:
        """Before anything runs."""
        self._line(Text("Starting a real Envoy, Tokenlane and three simulated engines ...", "dim"))

    def started(self, stack: Stack, seconds: float) -> None:
        """Everything runs."""
        pools = ", ".join(f"{pool} with {' and '.join(names)}" for pool, names in POOLS.items())
        self._line(Text(f"Up after {seconds:.1f} s. Envoy: {stack.url}. Pools: {pools}."))
        self._line(Text(f"Policy, configuration, log and bodies: {stack.directory}"))

    def step(self, outcome: Outcome) -> None:
        """One step, whole."""
        step, seen = outcome.step, outcome.observation
        self._line(Text())
        self._line(self._heading(outcome))
        self._wrapped(step.text, "dim")
        if seen is not None:
            self._wrapped(f"$ {seen.request}", "cyan")
            self._headers(seen)
            self._wrapped(verdict(seen.reply), "bold")
            if seen.reply.message:
                self._wrapped(f"Its body says: {seen.reply.message}.", "")
            self._ledger(step, seen)
            for note in step.notes:
                self._wrapped(note.format(**seen.facts), "")
        for problem in outcome.problems:
            self._wrapped(f"NOT AS DOCUMENTED: {problem}", "bold red")

    def summary(self, steps: int, failed: int, seconds: float) -> None:
        """After the last step."""
        self._line(Text())
        if failed:
            self._line(Text(f"{failed} of {steps} steps did not come out as documented ({seconds:.1f} s).", "bold red"))
        else:
            self._line(Text(f"All {steps} steps came out as documented, in {seconds:.1f} s.", "bold green"))

    def invitation(self, stack: Stack) -> None:
        """What to try while everything stays up."""
        self._line(Text())
        self._line(Text("Everything stays up until Ctrl-C. In another terminal:", "bold"))
        for comment, *commands in _commands(stack):
            self._line(Text(f"\n# {comment}", "dim"))
            for command in commands:
                # Unwrapped, because these lines are there to be copied.
                self._console.print(Text(command, "cyan"), soft_wrap=True)

    def ending(self) -> None:
        """All children are about to end."""
        self._line(Text("\nEnding everything.", "dim"))

    def _heading(self, outcome: Outcome) -> Text:
        left = f"{outcome.number}/{len(STEPS)} {outcome.step.title} "
        right = " not as documented" if outcome.problems else " as documented"
        rule = "-" if self._console.options.ascii_only else "─"
        fill = rule * max(3, self._width - len(left) - len(right))
        return Text.assemble((left, "bold"), (fill, "dim"), (right, "bold red" if outcome.problems else "green"))

    def _headers(self, seen: Observation) -> None:
        """Status, then the headers, as many to a line as fit."""
        status = seen.reply.status
        line = Text.assemble(INDENT, (str(status), STATUS_STYLES.get(status // 100, "bold")))
        for name, value in shown_headers(seen.reply).items():
            if line.cell_len + len(name) + len(value) + 4 > self._width:
                self._line(line)
                line = Text(INDENT + "   ")
            line.append(f"  {name}: ", "dim").append(value)
        self._line(line)

    def _ledger(self, step: Step, seen: Observation) -> None:
        titles = {Moment.BEFORE: "before", Moment.DURING: step.during, Moment.AFTER: "after"}
        moments = [moment for moment in Moment if moment in seen.ledger]
        room = (self._width - len(INDENT) - NAME_WIDTH) // len(moments)
        bar_width = max(BAR_WIDTH_MIN, min(BAR_WIDTH_MAX, room - FIGURES_WIDTH - 4))
        cell_width = bar_width + FIGURES_WIDTH + 3
        head = "".join(titles[moment].ljust(cell_width) for moment in moments)
        self._line(Text(f"{INDENT}{'ledger'.ljust(NAME_WIDTH)} {head}".rstrip(), "dim"))
        for name in seen.ledger[moments[0]]:
            line = Text(f"{INDENT}{name.ljust(NAME_WIDTH)} ")
            for moment in moments:
                cell = self._cell(seen.ledger[moment], name, bar_width)
                cell.pad_right(cell_width - cell.cell_len)
                line.append_text(cell)
            line.rstrip()
            self._line(line)

    def _cell(self, ledger: Ledger, name: str, bar_width: int) -> Text:
        account = ledger[name]
        if not account.ready:
            return Text("not ready", "bold red")
        filled = _filled(account, bar_width)
        style = "red" if filled == bar_width else "yellow" if 2 * filled > bar_width else "green"
        figures = f" {account.reserved_tokens:>6,}/{account.budget_tokens:,}"
        return Text.assemble((self._full * filled, style), (self._empty * (bar_width - filled), "dim"), figures)

    def _wrapped(self, text: str, style: str) -> None:
        for line in Text(text, style).wrap(self._console, self._width - len(INDENT)):
            line.rstrip()
            self._line(Text(INDENT).append_text(line))

    def _line(self, text: Text) -> None:
        self._console.print(text)


def _filled(account: Account, bar_width: int) -> int:
    """Cells of the bar that are filled: at least one as soon as anything is reserved, all only when nothing is left."""
    if not account.reserved_tokens:
        return 0
    return max(1, bar_width * account.reserved_tokens // account.budget_tokens)


def _commands(stack: Stack) -> tuple[tuple[str, ...], ...]:
    """Comment and command lines of everything worth trying."""
    post = 'curl -i $GATEWAY/v1/chat/completions -H "$JSON"'
    engines = " ".join(engine.address for name, engine in stack.engines.items() if name.startswith("chat"))
    control = f"for engine in {engines}; do curl -s $engine/control -d"
    return (
        (
            "where everything is",
            f"cd {stack.directory}",
            f"GATEWAY={stack.url}",
            "JSON='content-type: application/json'",
        ),
        ("a small chat", f"{post} -d @chat.json"),
        ("a stream", f"{post} -N -d @stream.json"),
        ("a long document, and one that is too long", f"{post} -d @document.json", f"{post} -d @oversized.json"),
        (
            "fill the chat lane, be refused, and let it go",
            f"{control} '{{\"hold\": true}}'; done",
            f"for i in 1 2 3 4 5 6; do {post} -d @fill.json -so $i.txt & done; sleep 1",
            f"{post} -m 5 -d @chat.json",
            f"{control} '{{\"hold\": false}}'; done",
        ),
        ("what is reserved where", f"curl {stack.admin_url}/debug/ledger"),
        ("Tokenlane's metrics", f"curl {stack.admin_url}/metrics"),
        ("Envoy's view of its clusters", f"curl {stack.envoy_admin_url}/clusters"),
    )
