"""Progress line of a grid, with an estimate from the runs measured so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from fedscaffold.grids.cells import Cell
from fedscaffold.grids.worker import Answer
from fedscaffold.run_config import RunConfig
from fedscaffold.status_line import StatusLine

__all__ = ["GridProgress"]


class GridProgress:
    """One line about all runs of a grid.

    Args:
        wanted: Whether to show it; None shows it on a terminal and in notebooks only.
        kept: Number of runs that were finished before.
        missing: The cells to run.
    """

    def __init__(self, wanted: bool | None, kept: int, missing: Sequence[Cell]) -> None:
        self.status = StatusLine(wanted)
        self.kept, self.total = kept, kept + len(missing)
        self.done, self.failed = 0, 0
        self.work_left, self.work_done = float(sum(work(cell.config) for cell in missing)), 0.0
        self.unseen = {cell.program for cell in missing}
        self.programs = len(self.unseen)
        self.compiling, self.running = 0.0, 0.0
        self.began = self.heard = time.monotonic()

    def finished(self, cell: Cell, answer: Answer) -> None:
        """Count a run that has ended."""
        size = work(cell.config)
        self.done += 1
        self.work_left -= size
        if answer.error is None:
            self.work_done += size
            self.unseen.discard(cell.program)
        self.failed += answer.error is not None
        self.compiling += answer.compiling
        self.running += answer.running
        self.heard = time.monotonic()

    def line(self, workers: int) -> str:
        """Return the line.

        >>> from fedscaffold.algorithms import fedavg
        >>> config = RunConfig(fedavg(), None, rounds=10)
        >>> cells = [Cell(labels={}, config=config, program=program) for program in "aab"]
        >>> progress = GridProgress(False, 1, cells)
        >>> progress.finished(cells[0], Answer(None, None, 3.0, 1.0))
        >>> progress.line(workers=1)  # two runs, and one program to compile
        '2 of 4 runs, about 5 s left'
        """
        words = f"{self.kept + self.done} of {self.total} runs"
        words += f", {self.failed} failed" if self.failed else ""
        runs = self.total - self.kept - self.done
        left = self.left()
        if not runs:
            words += f", {time.monotonic() - self.began:.1f} s"
        elif left is not None:
            left = left / min(max(1, workers), runs) - (time.monotonic() - self.heard)
            words += f", about {max(0.0, left):.0f} s left"
        return words

    def left(self) -> float | None:
        """Return the seconds of work left, as the runs so far took them; None before the first."""
        if not self.work_done:
            return None
        left = self.running / self.work_done * self.work_left
        return left + self.compiling / (self.programs - len(self.unseen)) * len(self.unseen)

    def show(self, workers: int) -> None:
        """Show the line; the last one stays."""
        over = self.kept + self.done == self.total
        (self.status.keep if over else self.status.show)(self.line(workers))


def work(config: RunConfig) -> float:
    """Return the size of a run in comparison with others of its grid: clients' steps in all.

    >>> from fedscaffold.algorithms import fedavg
    >>> [work(RunConfig(fedavg(), None, rounds=10, local_steps=steps)) for steps in (5, [5, 15])]
    [50.0, 100.0]
    """
    steps = config.local_epochs or (1 if config.local_steps is None else config.local_steps)
    clients = 1 if config.problem is None else config.problem.num_clients
    taking_part = config.cohort if isinstance(config.cohort, int) else config.cohort * clients
    return config.rounds * float(np.mean(steps)) * taking_part
