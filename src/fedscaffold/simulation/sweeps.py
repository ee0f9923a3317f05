"""`sweep`: seeds and step sizes in one compiled program.

Small runs are run side by side under vmap, as many as fit the cache; large ones one after the other. Either way there
is one compilation for all of them, and each run's result is that of `simulate` with the same seed and step size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem
from fedscaffold.simulation.engine import Seconds, drive
from fedscaffold.simulation.run import Run, finished, noise_key, progress_line
from fedscaffold.simulation.setup import Ready, Request, prepare
from fedscaffold.simulation.spec import Settings

__all__ = ["Sweep", "sweep"]

WORTHWHILE = 8  # runs side by side below which it is faster to run them one after the other


class Sweep(NamedTuple):
    """The runs of a sweep: `runs[j][k]` has step size `lr[j]` and seed `seeds[k]`."""

    lr: tuple[float, ...]
    seeds: tuple[int, ...]
    runs: list[list[Run]]
    seconds: Seconds
    """Of the sweep as a whole."""

    def __repr__(self) -> str:
        steps = ", ".join(f"{lr:g}" for lr in self.lr[:8]) + (", ..." if len(self.lr) > 8 else "")
        return f"Sweep(lr {steps}; {len(self.seeds)} seeds; {sum(map(len, self.runs))} runs)"


def sweep(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    lr: float | Sequence[float],
    seeds: int | Sequence[int],
    evaluate_every: int = 1,
    progress: bool | None = None,
    **same: Any,
) -> Sweep:
    """Run all combinations of step sizes and seeds (a list, or how many) in one program.

    The other arguments are those of `simulate`, the same for all runs.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=4, dim=2, mu=0.1, noise=0.01, seed=0)
    >>> found = fs.sweep(fs.scaffold(), problem, rounds=10, local_steps=5, lr=[0.1, 0.2], seeds=3)
    >>> len(found.runs), len(found.runs[0])
    (2, 3)
    """
    steps = [checks.number("lr", value, above=0) for value in np.atleast_1d(np.asarray(lr, dtype=object)).tolist()]
    chosen = list(range(checks.whole("seeds", seeds))) if np.ndim(seeds) == 0 else list(seeds)  # type: ignore[arg-type]
    chosen = [checks.whole("seed", seed, at_least=0, at_most=2**63 - 1) for seed in chosen]
    if not steps or not chosen:
        raise InputError("a sweep needs at least one lr and one seed")
    if same.get("local_optimizer") is not None:
        raise InputError("a sweep varies lr, and a local_optimizer brings its own: run simulate for each instead")
    if same.keys() & {"checkpoint", "every", "client_state", "devices"}:
        raise InputError(
            "a sweep is not checkpointed and keeps its clients in memory, on one device: for checkpoint, every, "
            "client_state or devices run simulate for each lr and seed"
        )
    grid = [(j, k) for j in range(len(steps)) for k in range(len(chosen))]
    request = Request(algorithm, problem, rounds, lr=steps[0], seeds=tuple(chosen), **same)
    every = checks.whole("evaluate_every", evaluate_every)
    with jax.enable_x64(request.precision == "float64"):
        ready, group = _grouped(prepare(request), len(grid))
        outcome = drive(
            ready,
            _settings(ready, [steps[j] for j, _ in grid], [chosen[k] for _, k in grid], request.precision),
            [chosen[k] for _, k in grid],
            rounds,
            every,
            group,
            progress_line(progress, rounds),
        )
    runs: list[list[Run]] = [[] for _ in steps]
    for i, (j, k) in enumerate(grid):
        state = jax.tree.map(lambda a: a[i], outcome.state)  # noqa: B023
        done = finished(request._replace(lr=steps[j]), ready, chosen[k], state, outcome.table[i], outcome.seconds)
        runs[j].append(done)
    return Sweep(tuple(steps), tuple(chosen), runs, outcome.seconds)


def _grouped(ready: Ready, number: int) -> tuple[Ready, int]:
    """How many runs side by side: a divisor of their number that fits the cache, or none if that would be few."""
    group = max(g for g in range(1, min(number, ready.fitting) + 1) if number % g == 0)
    group = group if group >= WORTHWHILE and not ready.spec.one_by_one else 1
    return ready._replace(spec=ready.spec._replace(side_by_side=group > 1)), group


def _settings(ready: Ready, lr: list[float], seeds: list[int], precision: str) -> Settings:
    keys: NDArray[np.uint32] = np.stack([noise_key(seed) for seed in seeds])
    return Settings(np.array(lr, precision), keys, np.full(len(lr), ready.target, precision))
