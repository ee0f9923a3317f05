"""Ctrl-C and SIGTERM, from the first line of a command to its last.

A command that is interrupted says one line and ends where it stands. Nothing is raised for it: Python forgets an
exception that is raised in a callback of the garbage collector, of which JAX has one, and a library that is interrupted
while it is imported may crash. It need not be, as whatever a command writes survives even kill -9. Who has something to
put in order first takes the signals over: a run with checkpoints (`simulation.checkpoint.listening`), a federation of
processes (`raising`). A second signal ends the process at once even there, and also where a compiler keeps Python from
running.
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

__all__ = ["Interrupt", "Says", "code_of", "deaf", "interruptible", "line_of", "only_once", "raising", "saying"]

SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class Interrupt(KeyboardInterrupt):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def code_of(stop: KeyboardInterrupt) -> int:
    """The exit code of a command that was ended by a signal.

    >>> code_of(Interrupt(signal.SIGTERM)), code_of(KeyboardInterrupt())
    (143, 130)
    """
    return 128 + int(getattr(stop, "signal", signal.SIGINT))


def line_of(stop: KeyboardInterrupt) -> str:
    """What to say of a command that was interrupted: the line of the innermost `saying`.

    >>> line_of(KeyboardInterrupt())
    'interrupted'
    """
    return str(getattr(stop, "__notes__", ["interrupted"])[0])


class Says:
    """A handler that says a line and ends the process."""

    def __init__(self, line: Callable[[], str], last: Callable[[], object] = lambda: None) -> None:
        self.line, self.last = line, last

    def __call__(self, number: int, frame: Any) -> None:
        """End here."""
        deaf()
        below = "\n" if sys.stderr.isatty() else ""  # what the terminal shows of Ctrl-C, or a line of progress
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"{below}fedscaffold: {self.line()}\n".encode())
        self.last()
        os._exit(128 + number)


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process with one line at the first signal, unless somebody takes it over, and at the second at once.

    Once the work is over, a signal no longer disturbs the end of the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with saying("interrupted"):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=_end_at_second, args=(reading,), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            os.close(writing)
            atexit.register(deaf)


@contextmanager
def saying(line: str | Callable[[], str], last: Callable[[], object] | None = None) -> Iterator[None]:
    """End the process with this line if a signal comes meanwhile; `last`, or what was to be done last, before.

    A KeyboardInterrupt that the work itself raises takes the line along, for `line_of`.
    """
    outer = signal.getsignal(signal.SIGINT)
    if last is None:
        last = outer.last if isinstance(outer, Says) else lambda: None
    says = Says(line if callable(line) else lambda: line, last)
    with _handled(says):
        try:
            yield
        except KeyboardInterrupt as stop:
            stop.add_note(says.line())
            raise


@contextmanager
def raising() -> Iterator[None]:
    """Raise `Interrupt` if a signal comes meanwhile, and ignore others: for work that neither imports nor uses JAX."""

    def interrupt(number: int, frame: Any) -> None:
        while frame is not None and frame.f_code is not subprocess.Popen.__init__.__code__:
            frame = frame.f_back
        if frame is not None:  # a process that is being started: it would be known to nobody
            threading.Timer(0.05, _thread.interrupt_main, (number,)).start()
            return
        deaf()
        raise Interrupt(number)

    only_once()
    with _handled(interrupt):
        yield


def only_once() -> None:
    """Let no second signal end this process at once, nor a child that it forks: it has to speak for others."""
    signal.set_wakeup_fd(-1)


@contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install a handler for a while; signals that are ignored stay ignored, and other threads have none."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # somebody wants to be left alone from here on
                signal.signal(number, usual)


def deaf() -> None:
    """Ignore further signals: what is done now is not to be left half done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_at_second(reading: int) -> None:
    """Count the signals as the system delivers them, which it does whatever Python is at."""
    with os.fdopen(reading, "rb", buffering=0) as came:
        first = came.read(1)
        second = came.read(1)
    if first and second:
        os._exit(128 + second[0])
