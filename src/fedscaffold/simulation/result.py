"""The result of a run, and its history: metrics and bytes by round."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.privacy.budget import Spent
from fedscaffold.problems.layout import Layout
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import notebook
from fedscaffold.simulation.bad_records import find_bad_records
from fedscaffold.simulation.engine import Seconds
from fedscaffold.simulation.invariants import check_means
from fedscaffold.simulation.out_of_core import OutOfCoreClients
from fedscaffold.simulation.program import PreparedRun
from fedscaffold.simulation.sampling import Streams
from fedscaffold.simulation.spec import Spec, State
from fedscaffold.simulation.spending import budget_of
from fedscaffold.simulation.staleness import ages, decay_memory

__all__ = ["Clients", "Run", "count_bytes", "finish", "history_of"]

EARLY = 10  # rounds: a run that diverges in one of them may have met a record without a loss


class Clients(NamedTuple):
    """State of the clients at the end of a run, one row per client."""

    def __repr__(self) -> str:
        return brief(self)

    memory: Any
    """Client memory as the algorithm's record, each field with one row per client; None for
    stateless algorithms."""
    age: NDArray[Any] | None
    """(N,) rounds since each client last took part; kept with the metric `age` or a `stale` policy,
    else None."""
    who: NDArray[Any] | None = None
    """Client numbers of the rows, in a run on several processes, each of which holds its own
    clients."""
    own: Any = None
    """Private client state as the algorithm's record (personal models), or None."""
    models: NDArray[Any] | None = None
    """(N, d) personal models as flat vectors, for algorithms that have them; see `Run.model`."""
    state: Any = None
    """The state that the loss updates, one row per client, where each keeps its own
    (`buffers="local"`)."""

    @property
    def c_i(self) -> NDArray[Any] | None:
        """Control variates of the clients; None for algorithms without them."""
        return getattr(self.memory, "c_i", None)


class Run(NamedTuple):
    """Result of a run."""

    def __repr__(self) -> str:
        last = (
            {name: column[-1] for name, column in self.history.items() if name != "round"}
            if self.rounds
            else {}
        )
        said = [f"{self.rounds} rounds", f"d = {self.vector.size}"]
        said += [
            f"{name} {value:.4g}" for name, value in last.items() if not name.startswith("bytes")
        ]
        said += [] if self.reached_at is None else [f"target reached in round {self.reached_at}"]
        said += [] if self.diverged_at is None else [f"diverged in round {self.diverged_at}"]
        said += [] if self.fault is None else ["FAULT"]
        return f"Run({', '.join(said)})"

    def _repr_html_(self) -> str:
        return notebook.table(self)

    def to_pandas(self) -> Any:
        """Return the history as a pandas DataFrame with one row per round."""
        return notebook.to_pandas(self.history)

    def plot(self, metrics: str | Sequence[str] | None = None) -> Any:
        """Plot metrics (by default all) against rounds; return matplotlib axes, one per metric."""
        return notebook.plot(self.history, metrics)

    def model(self, client: int) -> Any:
        """Return the model that a client uses, with the pytree structure of the problem's params.

        Args:
            client: The client's number.

        Returns:
            Its personal model where the algorithm gives it one (Ditto, FedBN), else the common
            model `x`.

        Raises:
            InputError: There is no such client, or another process holds it.

        >>> import fedscaffold as fs
        >>> problem = fs.problems.quadratic(num_clients=3, dim=2, seed=0)
        >>> run = fs.simulate(fs.ditto(), problem, rounds=2, local_steps=2, lr=0.1)
        >>> run.model(client=1).shape, run.model(client=1) is run.x
        ((2,), False)
        """
        here = range(self.num_clients) if self.clients.who is None else self.clients.who.tolist()
        if client not in here:
            raise InputError(
                f"client must be one of the {len(here)} clients here, counted from 0, got "
                f"{client!r}"
            )
        models = self.clients.models
        return self.x if models is None else Layout.of(self.x).unflatten(models[here.index(client)])

    x: Any
    """The model, with the pytree structure of the problem's params."""
    vector: NDArray[Any]
    """The model as a flat vector."""
    server: Any
    """Server state as the algorithm's record, in which `x` is the flat model.

    Means over clients, such as `c`, are
    float64."""
    clients: Clients
    history: dict[str, NDArray[Any]]
    """Columns with one entry per round: `round`, the metrics asked for, `residual`, `bytes_up`,
    `bytes_down`, `time` of a run with `delays` (virtual seconds), and `epsilon` of a private run:
    the largest of any client."""
    rounds: int
    """Number of rounds run."""
    outcome: str
    """How the run ended: "finished" (all rounds), "target", "diverged", or "stopped" by a callback,
    or "budget" (no further round within `stop_at_epsilon`)."""
    reached_at: int | None
    """Round in which `stop_at` was reached, or None."""
    diverged_at: int | None
    """First round with a non-finite value, or None."""
    advice: str | None
    """What to change after a divergence."""
    residual: float
    """|c - sum p_i c_i| at the end, computed from all stored c_i."""
    scale: float
    """Largest root mean square of |c_i| in any round."""
    explained: float
    """Largest residual that rounding explains; a larger one means a permanent bias."""
    seconds: Seconds
    digest: str
    """Hash of the model's bytes; equal digests mean bit-identical models."""
    fault: str | None
    """Description of the violated invariant, if the residual is larger than rounding explains; else
    None."""
    measured: dict[str, str]
    """For each metric on records, the data it was measured on: record by record, or in which
    batches."""
    num_clients: int
    """Number of clients N."""
    state: Any = None
    """The state that the loss updates, such as running statistics, averaged over clients; None if
    there is none."""
    privacy: Spent | None = None
    """What a private run has spent, by client; None without `privacy`."""
    refused: NDArray[Any] | None = None
    """(N,) number of rounds in which each client was refused; None without `robust`."""


def history_of(
    config: RunConfig,
    ready: PreparedRun,
    table: NDArray[Any],
    start: int,
    stop: int,
    heard_at: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the columns of rounds start + 1 .. stop, as in `Run.history`.

    Args:
        config: The run.
        ready: The prepared run.
        table: Their metrics, one row per round; further rows are left out.
        start: Number of rounds before.
        stop: The last round.
        heard_at: As in `count_bytes`.
    """
    columns: dict[str, NDArray[Any]] = {"round": np.arange(start + 1, stop + 1)}
    columns |= {name: table[: stop - start, j] for j, name in enumerate(ready.spec.metrics)}
    columns |= count_bytes(config, ready, start, stop, heard_at)
    if ready.drawer.delays is not None:
        columns |= {"time": ready.drawer.clock(config.seed).times(start, stop)}
    if ready.budget is not None:
        columns |= {"epsilon": ready.budget.epsilons(start, stop)}
    return columns


def count_bytes(
    config: RunConfig,
    ready: PreparedRun,
    start: int,
    stop: int,
    heard_at: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[np.int64]]:
    """Return the bytes sent up and down in rounds start + 1 .. stop.

    `heard_at` is the round in which each client was last heard, 0 for never; under the `refresh`
    policy it is updated in place. It may be omitted if `start` is 0.
    """
    spec, drawer = ready.spec, ready.drawer
    itemsize = np.dtype(config.precision).itemsize
    dim = config.problem.dim - sum(end - begin for begin, end in spec.algorithm.private)
    vector = dim * itemsize
    message = vector if spec.compressor is None else spec.compressor.bytes(dim, itemsize)
    heard = np.full(stop - start, drawer.size, np.int64)
    renewed = np.zeros(stop - start, np.int64)
    after = spec.policy.refresh_after
    varying = drawer.schedule is not None or drawer.available is not None
    if varying or callable(drawer.sampling) or after is not None:
        streams = Streams(config.seed)
        cohorts = [drawer.cohort(streams, r) for r in range(start, stop)]
        heard = np.array([len(cohort) for cohort in cohorts], np.int64)
        if after is not None:
            last = np.zeros(drawer.num_clients, np.int64) if heard_at is None else heard_at
            renewed = _count_renewals(cohorts, start, last, after)
    gradients = vector * (spec.algorithm.prepare is not None) + itemsize * len(
        spec.exchange.numbers
    )
    # what clients find from the models they receive, they find only after plain steps of clients
    # and server
    plain = spec.constant_step and not spec.unequal and spec.server_optimizer is None
    found = 0 if plain else len(spec.algorithm.finds)
    buffers = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(ready.start.buffers))
    return {
        "bytes_up": (len(spec.sent) * message + gradients + buffers) * heard + vector * renewed,
        "bytes_down": ((1 + len(spec.exchange.down) + found) * vector + buffers) * heard,
    }


def _count_renewals(
    cohorts: Sequence[NDArray[Any]], start: int, heard_at: NDArray[np.int64], after: int
) -> NDArray[np.int64]:
    """Return the number of clients of each cohort that renewed their control variate.

    Update `heard_at`.
    """
    counts = np.zeros(len(cohorts), np.int64)
    for k, cohort in enumerate(cohorts):
        counts[k] = np.sum(start + k - heard_at[cohort] >= after)
        heard_at[cohort] = start + k + 1
    return counts


def finish(
    config: RunConfig,
    ready: PreparedRun,
    state: State,
    table: NDArray[Any],
    seconds: Seconds,
    away: OutOfCoreClients | None = None,
) -> Run:
    """Build the `Run` of a final state; `table` holds its metrics by round."""
    done = int(state.round)
    if ready.budget is not None and config.seed != ready.seed:  # a run of a sweep
        ready = ready._replace(budget=budget_of(config, ready.drawer))
    history, budget = history_of(config, ready, table, 0, done), ready.budget
    ended = bool(state.done)
    stop = ready.spec.stop
    reached = (
        ended
        and stop is not None
        and bool(stop.met(history[stop.metric][-1], ready.federation.target))
    )
    diverged = done if ended and not reached else None
    residual, explained, fault = check_means(config, ready, state, away)
    if away is not None:
        state = state._replace(memory=None, heard_at=away.heard_at)
    outcome = "finished" if done >= config.rounds else "stopped"
    if ended:
        outcome = "target" if reached else "diverged"
    clients = config.problem.num_clients
    memory = state.memory
    if ready.spec.policy.rate is not None:
        decayed = decay_memory(ready.spec, state, memory)
        memory = jax.tree.map(lambda a: a.astype(state.x.dtype, copy=False), decayed)
    age = None if state.heard_at is None else ages(state)
    algorithm = ready.spec.algorithm
    models = algorithm.personal(state.x, state.own) if algorithm.has_personal else None
    who = None
    if ready.several and ready.shards is not None:
        who = np.arange(clients)[ready.shards.own]
    return Run(
        x=ready.spec.layout.unflatten(state.x),
        vector=state.x,
        server=state.server,
        clients=Clients(memory, age, who, state.own, models, state.own_buffers),
        history=history,
        rounds=done,
        outcome=outcome,
        reached_at=done if reached else None,
        diverged_at=diverged,
        advice=None if diverged is None else _advice(config, ready, diverged),
        residual=residual,
        scale=float(state.scale),
        explained=explained,
        seconds=seconds,
        digest=hashlib.sha256(np.ascontiguousarray(state.x).tobytes()).hexdigest()[:16],
        fault=fault,
        measured=_describe_data(config.problem, ready.spec),
        num_clients=clients,
        state=state.buffers,
        privacy=None if budget is None else budget.spent(done),
        refused=None if state.guard is None else state.guard.refused,
    )


def _describe_data(problem: Problem, spec: Spec) -> dict[str, str]:
    """Describe, for each metric on records, the data it is measured on."""
    kinds, size = spec.kinds, problem.evaluation_batch
    of = {
        "loss": kinds.loss,
        "gap": kinds.loss,
        "accuracy": kinds.accuracy,
        "grad_norm": kinds.gradient,
    }

    def words(metric: str) -> str:
        tested = metric == "accuracy" and problem.test is not None
        if of[metric] == "mean":
            return "the test data, record by record" if tested else "all records, one by one"
        if size is None:
            return "all test data at once" if tested else "all records of each client at once"
        return f"the {'test data' if tested else 'records of each client'} in batches of {size}"

    own = {column: measure.said for measure in spec.own for column in measure.columns}
    return {metric: words(metric) for metric in spec.metrics if metric in of} | own


def _advice(config: RunConfig, ready: PreparedRun, at: int) -> str:
    what = f"diverged at round {at}"
    in_memory = config.client_state == "array" and ready.shards is None
    if in_memory and at <= max(EARLY, config.evaluate_every):
        bad = find_bad_records(config.problem, config.precision, ready.start)
        if bad is not None:
            return f"{what}: {bad} at the initial model, whatever the step size"
    smoothness = config.problem.smoothness
    if config.local_optimizer is not None or callable(config.lr):
        return f"{what}: take smaller local steps"
    if smoothness is None:
        return f"{what} with lr {config.lr:g}: try a tenth of it, or fewer local steps"
    limit = 2 / smoothness
    if config.lr is not None and not callable(config.lr) and config.lr >= limit:
        why = f"lr {config.lr:g} is above 2/L = {limit:.3g}, where even one client alone diverges"
        return f"{what}: {why}; try {1 / smoothness:.3g}"
    below = f"lr {config.lr:g} is below 2/L = {limit:.3g}"
    return f"{what}: {below}; take fewer local steps or a smaller server_lr"
