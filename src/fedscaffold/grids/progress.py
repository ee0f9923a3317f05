"""Progress line of a grid, with an estimate from the runs measured so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedscaffold.grids.worker import Answer

__all__ = ["GridProgress"]


class GridProgress:
    """One line on stderr about all runs of a grid.

    Args:
        wanted: Whether to print; None prints on a terminal and in notebooks only.
        kept: Number of runs that were finished before.
        programs: The program of each run that is missing.
    """

    def __init__(self, wanted: bool | None, kept: int, programs: Sequence[str]) -> None:
        on_screen = sys.stderr.isatty() or "ipykernel" in sys.modules
        self.shown = on_screen if wanted is None else wanted
        self.kept, self.total, self.failed = kept, kept + len(programs), 0
        self.unseen = set(programs)
        self.programs = len(self.unseen)
        self.compiling, self.running = 0.0, list[float]()
        self.last = ""

    def finished(self, program: str, answer: Answer) -> None:
        """Count a run that has ended."""
        self.unseen.discard(program)
        self.failed += answer.error is not None
        self.compiling += answer.compiling
        self.running.append(answer.running)

    def line(self, workers: int) -> str:
        """Return the line.

        >>> progress = GridProgress(False, 1, ["a", "a", "b"])
        >>> progress.finished("a", Answer(None, None, 3.0, 1.0))
        >>> progress.line(workers=1)  # two runs, and one program to compile
        '2 of 4 runs, about 5 s left'
        """
        done = self.kept + len(self.running)
        words = f"{done} of {self.total} runs"
        words += f", {self.failed} failed" if self.failed else ""
        left = self.left()
        if left is not None and done < self.total:
            words += f", about {left / max(1, workers):.0f} s left"
        return words

    def left(self) -> float | None:
        """Return the seconds of work left, by the mean of the runs so far; None before the first."""
        number = len(self.running)
        if not number:
            return None
        left = sum(self.running) / number * (self.total - self.kept - number)
        return left + self.compiling / (self.programs - len(self.unseen)) * len(self.unseen)

    def show(self, workers: int) -> None:
        """Print the line in place of the one before, if it has changed."""
        line = self.line(workers)
        if self.shown and line != self.last:
            end = "\n" if self.kept + len(self.running) == self.total else ""
            sys.stderr.write(f"\r{line} \x1b[K{end}")
            sys.stderr.flush()
            self.last = line
