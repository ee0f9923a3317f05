"""`grid`: all combinations of algorithms, step sizes, seeds and any other arguments of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedscaffold import algorithms, checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.grids.cells import expand, labelled
from fedscaffold.grids.execute import run_cells
from fedscaffold.grids.grid_run import Grid
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import ARGUMENTS, RunConfig, document, refuse_arguments
from fedscaffold.state.files import owned

__all__ = ["grid"]

REFUSED = dict.fromkeys(
    ("checkpoint", "every", "callbacks", "devices"),
    "its runs go to other processes and are kept whole, in the folder `out`",
)

Algorithms = Algorithm | str | Sequence[Algorithm | str] | Mapping[str, Algorithm]


@document(without=[*REFUSED, "progress"])
def grid(  # noqa: D417
    algorithm: Algorithms,
    problem: Problem | Mapping[str, Problem],
    *,
    over: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
    **arguments: Any,
) -> Grid:
    """Run all combinations of algorithms, problems and arguments, on all cores.

    Each run has the bits of `simulate` with the same arguments in a process with one thread
    (PJRT_NPROC=1). A run that fails does not end the grid: it has an `error`.

    Args:
        algorithm: The algorithm, a list of algorithms, or a dict from labels to algorithms.
        problem: The problem, or a dict from labels to problems.
        over: For each argument that varies, its values: a list, or a dict from labels to values.
        out: Folder that keeps finished runs; the same call then runs only those that are missing.
        workers: Number of processes; by default one for each core, or 1 on accelerators.
        executor: A `concurrent.futures` executor that runs the cells instead, such as
            `dask.distributed.Client().get_executor()`.
        progress: Show a progress line; default: on a terminal and in notebooks only.
        ARGUMENTS

    Returns:
        The runs, with one table of all.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=2, mu=0.1, noise=0.01, seed=0)
    >>> found = fs.grid(
    ...     [fs.scaffold(), fs.fedavg()], problem, over={"lr": [0.1, 0.2], "seed": range(3)},
    ...     rounds=10, local_steps=5,
    ... )
    >>> found
    Grid(algorithm x lr x seed: 12 runs)
    >>> found.select(algorithm="scaffold", lr=0.2, seed=1)
    [GridRun(algorithm scaffold, lr 0.2, seed 1, finished, 10 rounds)]
    """
    began = time.perf_counter()
    varied = _varied(algorithm, problem, over or {}, arguments)

    def make(chosen: dict[str, Any]) -> RunConfig:
        given = {"algorithm": algorithm, "problem": problem} | chosen
        one, whose = given.pop("algorithm"), given.pop("problem")
        made = algorithms.make(one) if isinstance(one, str) else one
        return RunConfig(made, whose, progress=False, **arguments | given)

    cells = expand(varied, make)
    folder = None if out is None else checks.path("out", out)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(owned(folder))
        runs = run_cells(cells, out=folder, workers=workers, executor=executor, progress=progress)
    return Grid(keys=tuple(varied), runs=runs, seconds=time.perf_counter() - began)


def _varied(
    algorithm: Any, problem: Any, over: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, dict[Any, Any]]:
    """Return the values of all keys that vary, by label."""
    refuse_arguments("grid", [*over, *arguments], REFUSED | {"progress": "give it to grid itself"})
    twice = sorted(set(over) & set(arguments))
    if twice:
        raise InputError(f"{twice[0]} is given twice: once for all runs, and in over")
    varied: dict[str, dict[Any, Any]] = {}
    if not isinstance(algorithm, (Algorithm, str)):
        varied["algorithm"] = labelled("algorithm", algorithm)
    if isinstance(problem, Mapping):
        varied["problem"] = labelled("problem", problem)
    for name, values in over.items():
        check = ARGUMENTS[name].check
        values = labelled(f"{name} in over", values)
        varied[name] = {
            label: value if check is None or value is None else check(name, value)
            for label, value in values.items()
        }
    return varied
