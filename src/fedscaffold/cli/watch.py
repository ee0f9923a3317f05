"""`watch`: the live page of a run; and the parts shared with `run --watch` and `--log`."""

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
from fedscaffold.cli.interrupts import raise_on_signal
from fedscaffold.cli.verbs import app, print_answer

if TYPE_CHECKING:
    from fedscaffold.experiments.build_problem import Built
    from fedscaffold.experiments.config_file import Config
    from fedscaffold.runs.log_writer import LogWriter

__all__ = ["NO_VIEWERS", "Viewers", "check_viewers", "open_callbacks", "watch"]


class Viewers(NamedTuple):
    """Where to show a run: live page and trackers."""

    page: bool = False
    trackers: tuple[str, ...] = ()


NO_VIEWERS = Viewers()


def check_viewers(page: bool, trackers: Sequence[str] | None) -> Viewers:
    """Validate the requested viewers before anything is run.

    >>> check_viewers(True, None)
    Viewers(page=True, trackers=())
    """
    from fedscaffold.runs.trackers import check_trackers

    return Viewers(page, check_trackers(trackers or ()))


@contextmanager
def open_callbacks(
    config: Config, built: Built, folder: Path, shown: Viewers, is_main: bool = True
) -> Iterator[list[LogWriter]]:
    """Yield the callbacks of a run: its log writer, with live page and trackers if requested.

    No callbacks for a sweep, nor in processes other than the main one.
    """
    if config.local.lr == "tuned" and shown != NO_VIEWERS:
        raise InputError(
            "--watch and --log follow one run; with local.lr = 'tuned' it is a sweep: give a number"
        )
    if config.local.lr == "tuned" or not is_main:
        yield []
        return
    from fedscaffold.experiments.compare import log_facts
    from fedscaffold.runs.log_writer import LogWriter
    from fedscaffold.runs.trackers import make_trackers

    with ExitStack() as stack:
        if shown.page:
            from fedscaffold.runs.live import Simulated
            from fedscaffold.runs.live_server import Server

            try:
                server = stack.enter_context(Server(folder, Simulated(folder)))
            except (OSError, RuntimeError) as error:  # run without the page
                typer.echo(
                    f"fedscaffold: no live page: {error}; `fedscaffold watch {folder}` shows the "
                    "run",
                    err=True,
                )
            else:
                stack.callback(server.wait_for_last_look)
                typer.echo(f"live page: {server.address}", err=True)
                _open_browser(server.address)
        facts = {**log_facts(config, built), "stoppable": True}
        yield [stack.enter_context(LogWriter(folder, facts, make_trackers(shown.trackers, folder)))]


@app.command(epilog="Example: fedscaffold watch runs/first")
def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run, or of a deployed server.")
    ],
    port: Annotated[
        int, typer.Option(help="Port on this machine; any that is free by default.")
    ] = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Do not open the page in a browser.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the state once, as one JSON object, and end.")
    ] = False,
) -> None:
    """Show a run as it goes, or one that is over, on a page on this machine.

    Ctrl-C ends the page, not the run.
    """
    from fedscaffold.runs.live import source_of
    from fedscaffold.runs.view_model import view

    source = source_of(folder)
    if as_json:
        print_answer(view([source.poll()]), [], True)
        return
    from fedscaffold.runs.live_server import Server

    checks.whole("port", port, at_least=0, at_most=65535)
    with Server(folder, source, port) as server:
        typer.echo(f"live page: {server.address}\nCtrl-C ends it; the run goes on.")
        if not no_open:
            _open_browser(server.address)
        with suppress(KeyboardInterrupt), raise_on_signal():
            threading.Event().wait()


def _open_browser(address: str) -> None:
    """Open the page in a browser, if there is a display."""
    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(v) for v in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if screen and sys.stderr.isatty():
        import webbrowser

        webbrowser.open(address)
