"""Run cells: in a worker process of the grid's own, or wherever an executor runs its tasks.

A worker process is started with a file that holds the cells (`payload`), reads the numbers of cells
to run from its standard input, one JSON object per line, commits each result to the grid's folder,
and answers with one line. It ends when its standard input does, even in the middle of a run, so
that nothing outlives a grid that was killed.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold.checks import InputError

__all__ = [
    "Answer",
    "cache_folder",
    "environment",
    "error_line",
    "main",
    "run_cell",
    "run_task",
]

THREADS = ("PJRT_NPROC", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
CACHE = "JAX_COMPILATION_CACHE_DIR"


class Answer(NamedTuple):
    """How a cell's run ended."""

    error: str | None
    """Why it failed, in one line; None if it did not."""
    traceback: str | None = None
    compiling: float = 0.0
    """Seconds until the first round."""
    running: float = 0.0
    """Seconds of all else."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker: one thread, and a cache of compiled programs for all.

    >>> environment({"PJRT_NPROC": "8"})["PJRT_NPROC"]
    '1'
    """
    shared = {CACHE: given.get(CACHE) or str(cache_folder(given))}
    kept = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kept["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return {**given, **kept, **shared, **dict.fromkeys(THREADS, "1")}


def cache_folder(given: Mapping[str, str]) -> Path:
    """Return the folder of compiled programs in the user's cache folder."""
    home = given.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fedscaffold" / "jax"


def run_cell(config: Any, place: Path) -> Answer:
    """Run one cell and commit its result to a folder. An exception becomes part of the answer."""
    from fedscaffold.grids.store import save
    from fedscaffold.simulation import Simulator

    began = time.perf_counter()
    try:
        run = Simulator.of(config).run()
        save(place, run)
    except Exception as error:
        return Answer(error_line(error), traceback.format_exc())
    took = time.perf_counter() - began
    return Answer(None, None, took - run.seconds.wall, run.seconds.wall)


def error_line(error: BaseException) -> str:
    """Return an exception as one line, without the name of the type if it is a sentence of ours.

    >>> error_line(ValueError("no"))
    'ValueError: no'
    """
    told = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return " ".join(told.split())


def run_task(cells: str | bytes, number: int, place: str | None) -> tuple[Answer, dict[str, bytes]]:
    """Run one cell as the task of an executor.

    Args:
        cells: The cells of the grid (`payload`), or the path of a file that holds them.
        number: The cell to run.
        place: Folder for its result, or None to return it.

    Returns:
        How it ended, and the files of its result, by name, if `place` is None.
    """
    import tempfile

    config = _configs(cells)[number]
    if place is not None:
        return run_cell(config, Path(place)), {}
    with tempfile.TemporaryDirectory() as folder:
        answer = run_cell(config, Path(folder))
        return answer, {path.name: path.read_bytes() for path in Path(folder).glob("state-*")}


@lru_cache(maxsize=1)
def _configs(cells: str | bytes) -> list[Any]:
    from fedscaffold.grids import payload

    if isinstance(cells, bytes):
        return payload.load(cells)
    with Path(cells).open("rb") as file:
        return payload.load_file(file.fileno())


def main() -> None:
    """Serve the cells of the file whose descriptor is the first argument."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's code prints is no answer
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()

    def reply(**said: Any) -> None:
        replies.write(json.dumps(said) + "\n")
        replies.flush()

    begin = requests.get()
    sys.path[:] = begin["path"]
    try:
        _configure(begin["jax"])
        from fedscaffold.grids import payload

        configs = payload.load_file(int(sys.argv[1]))
    except BaseException as error:
        reply(error=error_line(error))
        return
    reply(error=None)
    while True:
        asked = requests.get()
        reply(**run_cell(configs[asked["cell"]], Path(asked["place"]))._asdict())


def _read_requests(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(1)  # the grid is gone: end, whatever the main thread is doing


def _configure(settings: Mapping[str, Any]) -> None:
    """Give JAX the settings of the grid's process."""
    import jax

    for name, value in settings.items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
