"""`shoal top`: a run in the terminal, live, from its files."""

import io
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.common import AsJson, print_json
from shoal.cli.jobs import Name, Runs

if TYPE_CHECKING:
    from rich.console import RenderableType


def top(
    run: Name,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    every: Annotated[
        float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Seconds between two looks at the files.")
    ] = 1.0,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show a run, running or finished: curves, speed, memory, checkpoints, faults. It only reads the run's files. Ends
    with the run, or with q."""
    from shoal import api

    view, status = api.view(run, runs=runs), api.status(run, runs=runs)
    if as_json:
        print_json(view.as_dict(status.as_dict()))
        return
    from rich.console import Console
    from rich.live import Live

    from shoal.observe.top import render

    console = Console(highlight=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # arrows, where the locale has none

    def shown() -> "RenderableType":
        about = (status.name, status.state, status.detail)
        return render(view, *about, console.width, ascii_only=console.options.ascii_only)

    if once or not console.is_terminal:
        console.print(shown())
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
            while status.active:
                live.update(shown(), refresh=True)
                if pressed(every) in ("q", "Q"):
                    break
                view.refresh()
                status = api.status(run, runs=runs)
    except KeyboardInterrupt:
        pass
    console.print(shown())


@contextmanager
def _keys() -> Iterator["_Pressed"]:
    """A function that waits so many seconds for a key, without Enter."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _Pressed(terminal=False)
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _Pressed(terminal=True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class _Pressed:
    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal

    def __call__(self, seconds: float) -> str:
        if not self.terminal:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
