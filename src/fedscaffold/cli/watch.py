"""`watch`: the live page of a run; and what `run --watch` and `--log` share with it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import raising
from fedscaffold.cli.verbs import app, say

if TYPE_CHECKING:
    from fedscaffold.experiments.config import Config
    from fedscaffold.experiments.federation import Built
    from fedscaffold.experiments.record import Record

__all__ = ["NOBODY", "Shown", "followed", "shown", "watch"]


class Shown(NamedTuple):
    """Who is to see a run: the live page, trackers."""

    page: bool = False
    trackers: tuple[str, ...] = ()


NOBODY = Shown()


def shown(page: bool, trackers: Sequence[str] | None) -> Shown:
    """Check what was asked for, before anything is run.

    >>> shown(True, None)
    Shown(page=True, trackers=())
    """
    from fedscaffold.report.adapters import wanted

    return Shown(page, wanted(trackers or ()))


@contextmanager
def followed(config: Config, built: Built, folder: Path, shown: Shown, speaks: bool = True) -> Iterator[Record | None]:
    """The record of a run while it lasts, on the live page and with trackers if asked for.

    None for a sweep, and in a process that leaves it to another to speak for the run.
    """
    if config.local.lr == "tuned" and shown != NOBODY:
        raise InputError("--watch and --log follow one run; with local.lr = 'tuned' it is a sweep: give a number")
    if config.local.lr == "tuned" or not speaks:
        yield None
        return
    from fedscaffold.experiments.record import Record, facts_of
    from fedscaffold.report.adapters import tracked

    with ExitStack() as stack:
        if shown.page:
            from fedscaffold.report.live import simulated
            from fedscaffold.report.serve import Server

            server = stack.enter_context(Server(folder, simulated(folder)))
            stack.callback(server.wait_for_last_look)
            typer.echo(f"live page: {server.address}", err=True)
            _open(server.address)
        facts = {**facts_of(config, built), "stoppable": True}
        yield stack.enter_context(Record(folder, facts, tracked(shown.trackers, folder)))


@app.command(epilog="Example: fedscaffold watch runs/first")
def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a deployed server.")],
    port: Annotated[int, typer.Option(help="Port on this machine; any that is free by default.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state once, as one JSON object, and end.")] = False,
) -> None:
    """Show a run as it goes, or one that is over, on a page on this machine; Ctrl-C ends the page, not the run."""
    from fedscaffold.report.live import source_of
    from fedscaffold.report.picture import state

    source = source_of(folder)
    if as_json:
        say(state(source.picture()), [], True)
        return
    from fedscaffold.report.serve import Server

    checks.whole("port", port, at_least=0, at_most=65535)
    with Server(folder, source, port) as server:
        typer.echo(f"live page: {server.address}\nCtrl-C ends it; the run goes on.")
        if not no_open:
            _open(server.address)
        with suppress(KeyboardInterrupt), raising():
            threading.Event().wait()


def _open(address: str) -> None:
    """Open the page, where there is somebody at a screen."""
    screen = sys.platform in ("darwin", "win32") or any(os.environ.get(v) for v in ("DISPLAY", "WAYLAND_DISPLAY"))
    if screen and sys.stderr.isatty():
        import webbrowser

        webbrowser.open(address)
