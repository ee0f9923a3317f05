"""Forecast of the memory that a run takes, made before anything large is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.spec import Spec
from fedscaffold.simulation.threads import threads

if TYPE_CHECKING:
    from fedscaffold.simulation.sampling import Drawer

__all__ = ["Forecast", "forecast"]

PROGRAM = 1 << 25  # bytes that compiling leaves behind: 7 to 62 MB for the models of the benchmarks
SUMS = 12  # vectors of the model's size in double precision: sums over clients, server's record


class Forecast(NamedTuple):
    """Size of a run, in bytes apart from `parameters`."""

    parameters: int
    """Number of parameters of the model."""
    state: int
    """What the clients keep between rounds, and what tasks at work were sent in asynchronous ones.
    """
    data: int
    """Records of clients and tests, in the run's precision."""
    work: int
    """What a round needs besides: its cohort's state, blocks of clients at work, sums, draws."""

    program: int = PROGRAM
    """The compiled program."""

    @property
    def total(self) -> int:
        """All memory together."""
        return self.state + self.data + self.work + self.program

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} parameters; memory {_size(self.total)}: {_size(self.state)} for "
            f"the clients' state, {_size(self.data)} of data, {_size(self.work)} to work in, "
            f"{_size(self.program)} for the program"
        )


def forecast(
    config: RunConfig, spec: Spec, drawer: Drawer, touched: int, rows: int, runs: int
) -> Forecast:
    """Forecast the memory of a run, or of the runs of a sweep.

    Args:
        config: The run.
        spec: Static description of its program.
        drawer: Its cohorts and batches.
        touched: Bytes that a client touches in a local step.
        rows: Number of clients whose state and records are in memory.
        runs: Number of runs, each with a state of its own.

    Raises:
        InputError: The machine does not have so much.
    """
    problem, itemsize = config.problem, np.dtype(config.precision).itemsize
    private: Any = spec.algorithm.own(np.zeros(problem.dim)) or ()
    numbers = sum(spec.widths.values()) + sum(map(np.size, private))
    numbers += len(spec.errors) * problem.dim
    client = numbers * itemsize
    if spec.local_buffers:
        client += sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(problem.state))
    # rows are written block by block, or after all blocks where several cores share them
    gathered = 0 if spec.everyone else (drawer.slots if spec.by_blocks else spec.block) * client
    lanes = min(threads(), drawer.slots // spec.block) if spec.by_blocks else 1
    stored = rows * client
    # out of core, each client of the cohort has room for as many records as any has
    share = rows / problem.num_clients
    if config.client_state != "array":
        share = rows * spec.max_rows / int(problem.offsets[-1])
    server: Any = spec.algorithm.init(np.zeros(problem.dim))
    sent = (drawer.at_work or 0) * sum(map(np.size, server)) * itemsize
    expected = Forecast(
        parameters=problem.dim,
        state=runs * (stored + sent),
        data=int(_records(problem.records, itemsize) * share) + _records(problem.test, itemsize),
        work=2 * gathered
        + (2 * stored if spec.everyone else 0)  # the new state of all, beside the old one
        + lanes * spec.block * touched
        + (lanes + spec.by_blocks) * SUMS * 8 * problem.dim
        + drawer.bytes,
    )
    if expected.total > (most := checks.memory()):
        raise InputError(
            f"the run would take {_size(expected.total)} and this machine has {_size(int(most))}: "
            f"{expected}; {_advice(config, expected)}"
        )
    return expected


def _records(records: Any, itemsize: int) -> int:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(records)]
    return sum(leaf.size * min(leaf.itemsize, itemsize) for leaf in leaves)


def _advice(config: RunConfig, expected: Forecast) -> str:
    """Return what to change, by the largest part."""
    if expected.state >= max(expected.data, expected.work):
        if config.client_state == "array":
            return "keep the clients' state out of memory with client_state='file' and checkpoint="
        return "take a smaller model"
    if expected.work >= expected.data:
        return "take smaller cohorts, smaller batches or block=1"
    return "take fewer records, precision='float32', or several processes (devices=)"


def _size(number: int) -> str:
    """Return a number of bytes with its unit.

    >>> _size(1_500_000), _size(12)
    ('1.5 MB', '12 B')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"
