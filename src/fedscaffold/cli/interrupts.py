"""Handling of SIGINT and SIGTERM during a command.

By default the handler prints one line and exits at once. It raises no exception: Python discards
exceptions raised in garbage-collector callbacks, of which JAX installs one, and a library
interrupted during import may crash. Exiting is safe, because everything a command writes survives
even SIGKILL. Work that must clean up first handles
the signals itself: runs with checkpoints (`simulation.checkpoint.catch_signals`) and federations of
processes (`raise_on_signal`). A second signal exits at once, even during a checkpoint or while a
compiler keeps Python from running, unless `disable_second_signal` was called.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = [
    "Interrupt",
    "PrintAndExit",
    "disable_second_signal",
    "exit_code_of",
    "exit_with_line",
    "ignore_signals",
    "interruptible",
    "message_of",
    "raise_on_signal",
]

SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class Interrupt(KeyboardInterrupt):
    """A signal that asks the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a command stopped by a signal.

    >>> exit_code_of(Interrupt(signal.SIGTERM)), exit_code_of(KeyboardInterrupt())
    (143, 130)
    """
    return 128 + int(getattr(stop, "signal", signal.SIGINT))


def message_of(stop: KeyboardInterrupt) -> str:
    """Return the message for an interrupted command: the line of the innermost `exit_with_line`.

    >>> message_of(KeyboardInterrupt())
    'interrupted'
    """
    return str(getattr(stop, "__notes__", ["interrupted"])[0])


class PrintAndExit:
    """Signal handler that prints a line and exits the process."""

    def __init__(self, line: Callable[[], str], last: Callable[[], object] = lambda: None) -> None:
        self.line, self.last = line, last

    def __call__(self, number: int, frame: Any) -> None:
        """Print the line and exit."""
        ignore_signals()
        below = "\n" if sys.stderr.isatty() else ""  # start below ^C or a progress line
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"{below}fedscaffold: {self.line()}\n".encode())
        self.last()
        os._exit(128 + number)


@contextmanager
def interruptible() -> Iterator[None]:
    """Exit with one line at the first signal, unless other code handles it; at once at the second.

    After the block, signals no longer disturb the exit of the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with exit_with_line("interrupted"):
        if os.name == "nt":  # signals wake sockets only there: the second one is like the first
            yield
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=_end_at_second, args=(reading,), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            os.close(writing)
            atexit.register(ignore_signals)


@contextmanager
def exit_with_line(
    line: str | Callable[[], str], last: Callable[[], object] | None = None
) -> Iterator[None]:
    """Exit with the given line if a signal arrives during the block, after calling `last`.

    If `last` is None, that of the enclosing block applies. A KeyboardInterrupt raised by the work
    itself carries the line, for `message_of`.
    """
    outer = signal.getsignal(signal.SIGINT)
    if last is None:
        last = outer.last if isinstance(outer, PrintAndExit) else lambda: None
    says = PrintAndExit(line if callable(line) else lambda: line, last)
    with _install_handler(says):
        try:
            yield
        except KeyboardInterrupt as stop:
            stop.add_note(says.line())
            raise


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise `Interrupt` at the first signal and ignore others.

    For work that neither imports nor uses JAX.
    """

    def interrupt(number: int, frame: Any) -> None:
        while frame is not None and frame.f_code is not subprocess.Popen.__init__.__code__:
            frame = frame.f_back
        if frame is not None:  # a process is being started and would be orphaned: try again later
            threading.Timer(0.05, _thread.interrupt_main, (number,)).start()
            return
        ignore_signals()
        raise Interrupt(number)

    disable_second_signal()
    with _install_handler(interrupt):
        yield


def disable_second_signal() -> None:
    """Keep a second signal from ending this process, or a forked child that reports for others."""
    signal.set_wakeup_fd(-1)


@contextmanager
def _install_handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install a signal handler for the block.

    Ignored signals stay ignored, and only in the main thread.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # signals are ignored from here on
                signal.signal(number, usual)


def ignore_signals() -> None:
    """Ignore further signals, so that the present work is not left half done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_at_second(reading: int) -> None:
    """Exit at the second signal, which arrives by a pipe even while Python code cannot run."""
    with os.fdopen(reading, "rb", buffering=0) as came:
        first = came.read(1)
        second = came.read(1)
    if first and second:
        os._exit(128 + second[0])
