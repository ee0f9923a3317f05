"""One line of text about work in progress, replaced in place."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

__all__ = ["StatusLine", "in_notebook"]

REFRESH = 0.1  # seconds between two texts on a terminal or in a notebook
LOG = 10.0  # seconds between two lines of a log
KERNEL = "JPY_PARENT_PID"  # variable of a notebook's kernel, and of the commands of its cells


class StatusLine:
    r"""A line on stderr, or one output of a notebook's cell.

    On a terminal and in a notebook a new text replaces the old one. Elsewhere, as in a log file,
    each text is a line of its own, and there is one every ten seconds at most. The output of a
    command in a notebook's cell (`!command`) is stored as it was written, so texts follow each
    other on one line there.

    Args:
        wanted: Whether to show the line; None shows it on a terminal and in notebooks only.

    >>> import contextlib, io
    >>> with contextlib.redirect_stderr(io.StringIO()) as log:
    ...     line = StatusLine(True)
    ...     line.show("1 of 2")
    ...     line.show("2 of 2")  # too soon
    ...     line.keep("done")
    >>> log.getvalue()
    '1 of 2\ndone\n'
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self.notebook, terminal = in_notebook(), sys.stderr.isatty()
        self.follows = not self.notebook and terminal and KERNEL in os.environ
        self.replaces = self.notebook or (terminal and not self.follows)
        self.shown = (self.notebook or terminal) if wanted is None else wanted
        self.next = 0.0
        self.handle: Any = None

    def show(self, text: str) -> None:
        """Show a text until the next one."""
        now = time.monotonic()
        if self.shown and now >= self.next:
            self.next = now + (REFRESH if self.replaces else LOG)
            self._write(text, "" if self.replaces else "; " if self.follows else "\n")

    def keep(self, text: str) -> None:
        """Replace the text by one that stays."""
        if self.shown:
            self._write(text, "\n")
            self.handle, self.next = None, 0.0

    def _write(self, text: str, end: str) -> None:
        if not self.notebook:
            sys.stderr.write(f"\r{text}\x1b[K{end}" if self.replaces else f"{text}{end}")
            sys.stderr.flush()
        elif self.handle is None:
            from IPython.display import display

            self.handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
