"""Run the cells of a grid: in this process, in worker processes, or by an executor.

Every run computes on one core, wherever it runs, so that runs do not take cores from one another.
This process runs cells only if it has one thread itself, and only short ones, side by side with
workers: that spares a small grid their start, and the others one start and one compilation. Long
runs are left to workers, whose death the grid survives.
"""

from __future__ import annotations

import io
import os
import queue
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fedscaffold import checks
from fedscaffold.grids import payload
from fedscaffold.grids.cells import Cell, key_of
from fedscaffold.grids.grid_run import GridRun
from fedscaffold.grids.progress import GridProgress
from fedscaffold.grids.store import CELLS, load
from fedscaffold.grids.worker import Answer, error_line, run_cell, run_task
from fedscaffold.grids.workers import Board, Crew
from fedscaffold.privacy.several import refuse_budget
from fedscaffold.state.files import create, make_folder
from fedscaffold.state.platforms import cores

__all__ = ["run_cells"]

PATIENCE = 0.5
"""Seconds after which workers are started; a grid that ends sooner needs none."""
WORTH = 3.0
"""Seconds of work left, where that is known, for which workers are worth their start."""
SHORT = 30.0  # seconds of a run that this process may as well do itself
TICK = 1.0  # seconds between two refreshes of the progress line
PAYLOAD = ".cells"

Done = Callable[[int, Answer], None]


def run_cells(
    cells: Sequence[Cell],
    *,
    out: Path | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
    share: slice = slice(None),
) -> list[GridRun]:
    """Run cells that are not finished yet, and return all results in the order of the cells.

    Args:
        cells: The cells.
        out: Folder that keeps finished runs, from which an interrupted grid continues, or None.
        workers: Number of processes; by default one for each core, or 1 on accelerators.
        executor: Runs the cells instead of processes of our own.
        progress: Whether to show a progress line; None to decide by the terminal.
        share: The cells to run; others are returned if they are finished.

    Returns:
        One record per cell, those that failed with their `error`; with a `share`, only cells of
        the share and those that are finished.

    Raises:
        InputError: Several runs are asked to keep one privacy budget.
    """
    if len(cells) > 1:
        refuse_budget(cell.config.privacy for cell in cells)
    with ExitStack() as stack:
        if out is None:
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedscaffold-")))
        else:
            store = out / CELLS
        known: dict[int, Any] = {}
        places = [store / key_of(cell, known) for cell in cells]
        runs = dict(enumerate(map(load, places, cells)))
        missing = [i for i in range(len(cells))[share] if runs[i] is None]
        kept = sum(run is not None for run in runs.values())
        line = GridProgress(progress, kept, [cells[i] for i in missing])
        width = cores() if workers is None else checks.whole("workers", workers)
        task = _Task(cells, places, missing, line, width)
        if executor is not None:
            task.run_by_executor(executor, out)
        elif missing:
            task.run_here_or_in_workers(workers)
        for i, answer in task.answers.items():
            runs[i] = _result(cells[i], places[i], answer)
        return [run for run in (runs[i] for i in range(len(cells))) if run is not None]


def _result(cell: Cell, place: Path, answer: Answer) -> GridRun:
    if answer.error is not None:
        return GridRun(cell=cell.labels, error=answer.error, traceback=answer.traceback)
    found = load(place, cell)
    if found is None:
        return GridRun(cell=cell.labels, error=f"its result in {place} cannot be read")
    return found


class _Task:
    """Cells to run, and the answers so far."""

    def __init__(
        self,
        cells: Sequence[Cell],
        places: Sequence[Path],
        missing: Sequence[int],
        line: GridProgress,
        width: int,
    ) -> None:
        self.cells, self.places, self.missing, self.line = cells, places, missing, line
        self.width = min(width, len(missing))
        self.answers: dict[int, Answer] = {}

    def note(self, cell: int, answer: Answer) -> None:
        """Record how a cell ended."""
        self.answers[cell] = answer
        self.line.finished(self.cells[cell], answer)
        self.line.show(self.width)

    def run_here_or_in_workers(self, workers: int | None) -> None:
        """Run all missing cells on this machine."""
        board = Board({i: self.cells[i].program for i in self.missing})
        accelerator = workers is None and _on_accelerator()
        if accelerator or (_has_one_thread() and self.width == 1):
            self.width = 1
            self._run_here(board)
            return
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(prefix="fedscaffold-"))
            hired = _Hired(self, board, file.fileno(), lambda: payload.dump(self.cells, file))
            stack.callback(hired.end)
            if _has_one_thread():
                hired.later(self.width - 1)
                self._run_here(board, until=hired.can_take_over)
                hired.cancel()
                hired.replace_this_process()
            else:
                hired.now(self.width)
            hired.collect()

    def _run_here(
        self, board: Board, until: Callable[[Answer], bool] = lambda answer: False
    ) -> None:
        """Run cells in this process, until a condition on the last answer holds."""
        answer = Answer(None)
        while not until(answer) and (cell := board.take(self)) is not None:
            answer = run_cell(self.cells[cell].config, self.places[cell])
            self.note(cell, answer)

    def run_by_executor(self, executor: Executor, out: Path | None) -> None:
        """Run all missing cells by an executor.

        The cells travel through a file in `out`, which the executor's workers must see; without
        `out`, with each task, and the results with each answer.
        """
        with ExitStack() as stack:
            sent: str | bytes
            if out is None:
                memory = io.BytesIO()
                payload.dump(self.cells, memory)
                sent = memory.getvalue()
            else:
                make_folder(out)
                path = (out / f"{PAYLOAD}-{os.getpid()}").absolute()
                stack.callback(lambda: path.unlink(missing_ok=True))
                with os.fdopen(create(path, private=True), "wb") as file:
                    payload.dump(self.cells, file)
                sent = str(path)
            events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
            futures = self._submit(executor, sent, out is not None, events)
            try:
                for _ in futures:
                    self.note(*self._received(*events.get()))
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _submit(
        self, executor: Executor, sent: str | bytes, on_disk: bool, events: Any
    ) -> list[Future[Any]]:
        futures: list[Future[Any]] = []
        for cell in sorted(self.missing, key=lambda i: self.cells[i].program):
            place = str(self.places[cell].absolute()) if on_disk else None
            try:
                future = executor.submit(run_task, sent, cell, place)
            except RuntimeError as error:  # it was shut down, or is broken
                future = Future()
                future.set_exception(error)
            future.add_done_callback(partial(_report, events, cell))
            futures.append(future)
        return futures

    def _received(self, cell: int, future: Future[Any]) -> tuple[int, Answer]:
        try:
            answer, files = future.result()
        except Exception as error:
            return cell, Answer(error_line(error))
        if files:
            make_folder(self.places[cell])
        for name, data in files.items():
            (self.places[cell] / name).write_bytes(data)
        return cell, Answer(*answer)


def _report(events: queue.SimpleQueue[tuple[int, Any]], cell: int, done: Future[Any]) -> None:
    events.put((cell, done))


class _Hired:
    """Workers of a task, started now or later; without any, the task goes on in this process."""

    def __init__(self, task: _Task, board: Board, file: int, dump: Callable[[], None]) -> None:
        self.task, self.board, self.file, self.dump = task, board, file, dump
        self.crew: Crew | None = None
        self.watch: threading.Thread | None = None
        self.called_off = threading.Event()
        self.lock = threading.Lock()
        self.reason: str | None = None

    def later(self, number: int) -> None:
        """Start workers after `PATIENCE`, or as soon as the work left is known to be worth it."""

        def watch() -> None:
            while not self.called_off.wait(PATIENCE):
                left = self.task.line.left()
                if left is None or left >= WORTH:
                    self.now(number)
                    return

        self.watch = threading.Thread(target=watch, daemon=True)
        self.watch.start()

    def cancel(self) -> None:
        """Start none, unless they are being started."""
        self.called_off.set()
        if self.watch is not None:
            self.watch.join()

    def can_take_over(self, last: Answer) -> bool:
        """Return whether workers are ready, and the runs of this process are not short.

        Also if there can be no workers, which `collect` then says.

        Args:
            last: The answer to the last run of this process.
        """
        if self.reason is not None and self.crew is None:
            return True
        return self.crew is not None and self.crew.ready.is_set() and last.running > SHORT

    def replace_this_process(self) -> None:
        """Start one more worker for cells that still wait."""
        if self.crew is not None and not self.board.is_empty:
            self.crew.grow(1)

    def now(self, number: int) -> None:
        """Start workers at once."""
        with self.lock:
            try:
                self.dump()
            except Exception as error:
                self.reason = error_line(error)
                return
            self.crew = Crew(self.board, self.task.places, self.file)
            self.crew.grow(number)

    def collect(self) -> None:
        """Record what the workers answer until all cells have ended."""
        task, lost = self.task, 0
        while len(task.answers) < len(task.missing):
            if self.crew is None or lost == self.crew.size:
                self._go_on_here()
                return
            try:
                cell, answer = self.crew.events.get(timeout=TICK)
            except queue.Empty:
                task.line.show(task.width)
                continue
            if cell is None:
                lost, self.reason = lost + 1, answer.error
            else:
                task.note(cell, answer)

    def _go_on_here(self) -> None:
        warnings.warn(
            f"the runs of this grid go on in this process, one after the other: they cannot be "
            f"sent to another process ({self.reason})",
            RuntimeWarning,
            stacklevel=2,
        )
        self.task.width = 1
        self.task._run_here(self.board)

    def end(self) -> None:
        """End all workers."""
        self.cancel()
        with self.lock:
            if self.crew is not None:
                self.crew.end()


def _has_one_thread() -> bool:
    """Return whether JAX computes with one thread in this process."""
    return os.environ.get("PJRT_NPROC") == "1" or cores() == 1


def _on_accelerator() -> bool:
    import jax

    return jax.default_backend() != "cpu"
