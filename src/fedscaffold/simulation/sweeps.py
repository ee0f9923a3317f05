"""`sweep`: seeds and step sizes in one compiled program.

Small runs are vectorised with vmap, as many as fit the cache; large ones run one after the other.
Both compile once, and each run's result is that of `simulate` with the same seed and step size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.privacy.several import Together, refuse_budget, spend_together
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import RunConfig, document, refuse_arguments
from fedscaffold.simulation.callbacks import ProgressLine
from fedscaffold.simulation.checkpoint import Progress
from fedscaffold.simulation.engine import Seconds, compile_rounds, run_rounds
from fedscaffold.simulation.program import PreparedRun, prepare
from fedscaffold.simulation.resolve import in_precision
from fedscaffold.simulation.result import Run, finish

__all__ = ["Sweep", "sweep"]

WORTHWHILE = 8  # least number of runs for which vmap is faster than a loop


class Sweep(NamedTuple):
    """The runs of a sweep: `runs[j][k]` has step size `lr[j]` and seed `seeds[k]`."""

    lr: tuple[Any, ...]
    """Step sizes, or one schedule."""
    seeds: tuple[int, ...]
    runs: list[list[Run]]
    seconds: Seconds
    """Time of the whole sweep."""

    def __repr__(self) -> str:
        steps = ", ".join("by a schedule" if callable(lr) else f"{lr:g}" for lr in self.lr[:8]) + (
            ", ..." if len(self.lr) > 8 else ""
        )
        return f"Sweep(lr {steps}; {len(self.seeds)} seeds; {sum(map(len, self.runs))} runs)"

    @property
    def privacy(self) -> Together | None:
        """What private runs spend, each and all; None without `privacy`."""
        private = [
            (seed, run.privacy.facts())
            for row in self.runs
            for seed, run in zip(self.seeds, row, strict=True)
            if run.privacy is not None
        ]
        return spend_together(private)


REFUSED = dict.fromkeys(
    ("checkpoint", "every", "client_state", "devices", "callbacks"),
    "it is not checkpointed and keeps its clients in memory, on one device; run simulate for each "
    "lr and seed",
) | {
    "local_optimizer": "it varies lr, and a local_optimizer brings its own; "
    "run simulate for each instead",
    "seed": "give seeds, a list or how many",
}


@document(without=[*REFUSED, "lr"])
def sweep(  # noqa: D417
    algorithm: Algorithm,
    problem: Problem,
    *,
    lr: float | Callable[..., float] | Sequence[float],
    seeds: int | Sequence[int],
    **arguments: Any,
) -> Sweep:
    """Run all combinations of step sizes and seeds in one compiled program.

    Args:
        algorithm: The algorithm to run, such as `fs.scaffold()`.
        problem: The problem to minimise.
        lr: The step sizes, or one schedule.
        seeds: The seeds, or their number.
        ARGUMENTS

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=2, mu=0.1, noise=0.01, seed=0)
    >>> found = fs.sweep(fs.scaffold(), problem, rounds=10, local_steps=5, lr=[0.1, 0.2], seeds=3)
    >>> len(found.runs), len(found.runs[0])
    (2, 3)
    """
    refuse_arguments(
        "sweep", [name for name, value in arguments.items() if value is not None], REFUSED
    )
    steps = [lr] if callable(lr) else _step_sizes(lr)
    chosen = list(range(checks.whole("seeds", seeds))) if np.ndim(seeds) == 0 else list(seeds)  # type: ignore[arg-type]
    if not steps or not chosen:
        raise InputError("a sweep needs at least one lr and one seed")
    config = RunConfig(algorithm, problem, lr=steps[0], **arguments)
    refuse_budget([config.privacy])
    if not callable(lr):
        in_precision(steps, config.precision)
    runs = [[replace(config, lr=one, seed=seed) for seed in chosen] for one in steps]
    grid = [run for row in runs for run in row]
    with jax.enable_x64(config.precision == "float64"):
        began = time.perf_counter()
        ready, group = _choose_group(prepare(config, [run.seed for run in grid]), len(grid))
        seeds_of, lrs = [run.seed for run in grid], [run.lr for run in grid]
        engine = compile_rounds(ready, seeds_of, config.evaluate_every, lrs=lrs, group=group)
        now = Progress(engine.place(ready.start), [], 0)
        compiled, cpu = time.perf_counter(), time.process_time()
        line = ProgressLine(config.progress, config.rounds)
        line.begin(0, ready.size)
        now = run_rounds(engine, now, config.rounds, line)
        line.end(now.done)
        seconds = Seconds(
            compiled - began, time.perf_counter() - compiled, time.process_time() - cpu
        )
        states, table = engine.collect(now.state), np.concatenate(now.table, axis=-2)
    done = iter(range(len(grid)))

    def finished(run: RunConfig) -> Run:
        i = next(done)
        return finish(run, ready, jax.tree.map(lambda a: a[i], states), table[i], seconds)

    found = [[finished(run) for run in row] for row in runs]
    return Sweep(tuple(steps), tuple(run.seed for run in runs[0]), found, seconds)


def _step_sizes(lr: Any) -> list[Any]:
    listed = np.atleast_1d(np.asarray(lr, dtype=object)).tolist()
    if any(map(callable, listed)):
        raise InputError(
            "a sweep takes numbers for lr, or one schedule: run a sweep for each schedule"
        )
    return [checks.number("lr", value, above=0) for value in listed]


def _choose_group(ready: PreparedRun, number: int) -> tuple[PreparedRun, int]:
    """Choose the number of runs to vectorise over.

    A divisor of their number that fits the cache, or 1.
    """
    group = max(g for g in range(1, min(number, ready.fitting) + 1) if number % g == 0)
    group = (
        group if group >= WORTHWHILE and not (ready.spec.one_by_one or ready.spec.by_blocks) else 1
    )
    return ready._replace(spec=ready.spec._replace(side_by_side=group > 1)), group
