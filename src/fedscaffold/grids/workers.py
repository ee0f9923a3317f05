"""Worker processes of a grid on this machine: one thread each, one cell at a time.

They are started anew (never forked from a process in which JAX runs), do not import the user's main
module, and are told apart: one that dies takes only its own cell with it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedscaffold.grids.worker import Answer, environment

__all__ = ["Board", "Crew"]

MAIN = "from fedscaffold.grids.worker import main; main()"


class Board:
    """Cells that wait. Each worker gets cells of a program that it has compiled, where there are.

    Args:
        programs: The program of each waiting cell, by the cell's number.
    """

    def __init__(self, programs: Mapping[int, str]) -> None:
        self._programs = dict(programs)
        self._waiting = list(programs)
        self._compiled: dict[object, set[str]] = {}
        self._lock = threading.Lock()

    def take(self, worker: object) -> int | None:
        """Return the next cell for a worker; None if none waits."""
        with self._lock:
            if not self._waiting:
                return None
            own = self._compiled.setdefault(worker, set())
            others = set().union(*self._compiled.values())
            left = Counter(self._programs[cell] for cell in self._waiting)

            def preference(cell: int) -> tuple[bool, bool, int]:
                program = self._programs[cell]
                return program not in own, program in others, -left[program]

            cell = min(self._waiting, key=preference)
            self._waiting.remove(cell)
            own.add(self._programs[cell])
            return cell

    @property
    def is_empty(self) -> bool:
        """Whether no cell waits."""
        return not self._waiting


class Worker:
    """One worker process.

    Args:
        cells: Descriptor of the file that holds the cells.
        settings: JAX's settings.
    """

    def __init__(self, cells: int, settings: Mapping[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(cells)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[cells],
            env=_with_path(environment(os.environ)),
            start_new_session=True,  # Ctrl-C is for the grid, which ends its workers
        )
        self.begin = {"path": sys.path, "jax": dict(settings)}

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a request and return the answer; None if the process has died."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except (OSError, ValueError):
            return None
        answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return answer

    def cause_of_death(self) -> str:
        """Say in one line how the process ended."""
        code = self.process.wait()
        if code >= 0:
            return f"its worker process ended with exit code {code}"
        name = signal.Signals(-code).name
        why = ", most likely for want of memory" if code == -9 else ""
        return f"its worker process was killed by {name}{why}"

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Crew:
    """Threads that keep one worker process each, and report on a queue.

    Args:
        board: The cells that wait.
        places: Folder for the result of each cell.
        cells: Descriptor of the file that holds the cells.

    Attributes:
        events: (cell, answer) of each cell that ended; (None, answer) of a worker that could not
            start.
        ready: Set once a worker is ready.
    """

    def __init__(self, board: Board, places: Sequence[Path], cells: int) -> None:
        self.board, self.places, self.cells = board, places, cells
        self.events: queue.SimpleQueue[tuple[int | None, Answer]] = queue.SimpleQueue()
        self.ready = threading.Event()
        self._settings = _jax_settings()
        self._workers: set[Worker] = set()
        self._lock = threading.Lock()
        self._ended = False
        self.size = 0

    def grow(self, number: int) -> None:
        """Start more workers."""
        for _ in range(number):
            self.size += 1
            threading.Thread(target=self._serve, daemon=True).start()

    def end(self) -> None:
        """End all workers, whatever they do."""
        with self._lock:
            self._ended = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def _serve(self) -> None:
        while not self.board.is_empty:
            worker = self._start()
            if worker is None:
                return
            try:
                if not self._run_cells(worker):
                    return
            finally:
                self._dismiss(worker)

    def _start(self) -> Worker | None:
        with self._lock:  # a worker that starts while the crew ends would be orphaned
            if self._ended:
                return None
            worker = Worker(self.cells, self._settings)
            self._workers.add(worker)
        answer = worker.ask(worker.begin)
        if answer is not None and answer["error"] is None:
            self.ready.set()
            return worker
        why = worker.cause_of_death() if answer is None else answer["error"]
        self._dismiss(worker)
        if not self._ended:
            self.events.put((None, Answer(why)))
        return None

    def _run_cells(self, worker: Worker) -> bool:
        """Give a worker cells until none waits; return False if the crew has ended."""
        while (cell := self.board.take(worker)) is not None:
            answer = worker.ask({"cell": cell, "place": str(self.places[cell])})
            if self._ended:
                return False
            if answer is None:
                self.events.put((cell, Answer(worker.cause_of_death())))
                return True
            self.events.put((cell, Answer(**answer)))
        return True

    def _dismiss(self, worker: Worker) -> None:
        with self._lock:
            mine = worker in self._workers
            self._workers.discard(worker)
        if mine:
            worker.kill()


def _with_path(variables: dict[str, str]) -> dict[str, str]:
    """Let a worker find this package, even if only `sys.path` of this process leads to it."""
    package = str(Path(__file__).parents[2])
    path = [package, *filter(None, [variables.get("PYTHONPATH")])]
    return variables | {"PYTHONPATH": os.pathsep.join(path)}


def _jax_settings() -> dict[str, Any]:
    """Return JAX's settings in this process that can be sent, but for those of its cache."""
    import jax

    return {
        name: value
        for name, value in jax.config.values.items()
        if isinstance(value, (bool, int, float, str)) and "cache" not in name
    }
