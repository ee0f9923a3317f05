"""Load the state of a run, finished or in progress, without running it or changing its folder.

The last complete checkpoint is read as `resume` reads it: every byte is covered by a checksum, and
nothing is unpickled. Rows of out-of-core clients are read in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold.algorithms.round import needs
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import weights_of
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import sharded_checkpoint
from fedscaffold.simulation.checkpoint import load_progress
from fedscaffold.simulation.fingerprint import differences, facts
from fedscaffold.simulation.local import train
from fedscaffold.simulation.out_of_core import field_slices, open_clients, row_width
from fedscaffold.simulation.program import PreparedRun, prepare
from fedscaffold.simulation.rounds import loop_length, select_cohort
from fedscaffold.simulation.spec import ClientState, Draws, Federation, Spec, State
from fedscaffold.simulation.staleness import decay_memory
from fedscaffold.state import FileStore, Snapshot, SparseStore, StateError, Store, latest
from fedscaffold.state.commit import generations

__all__ = ["CheckpointedRun", "StateError", "is_current", "local_moves", "open_checkpoint"]

Rows: TypeAlias = Iterator[tuple[NDArray[np.int64], NDArray[Any]]]
CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class CheckpointedRun:
    """A run at its last complete checkpoint."""

    ready: PreparedRun
    state: State
    """Without the rows of out-of-core clients."""
    lr: NDArray[Any]
    """Step size, or one for each local step, of the next round; of the last round once the run has
    ended."""
    weights: NDArray[Any]
    """(N,) the p_i."""
    heard_at: NDArray[np.int64]
    """(N,) the round in which each client was last heard, 0 for never; as stored, or as drawn from
    the seed."""
    columns: dict[str, NDArray[Any]]
    """Metrics by round, `round` included."""
    ended: bool
    """Whether all rounds were run or a stopping rule was met."""
    diverged_at: int | None
    changed: str | None
    """How the configuration differs from the one that was run, or None."""
    warnings: tuple[str, ...]
    generation: int
    chunks: Callable[[], Rows]
    """() -> chunks of (clients, their present c_i), ascending; clients left out have zeros."""

    @property
    def round(self) -> int:
        """Number of rounds done."""
        return int(self.state.round)


@contextmanager
def open_checkpoint(folder: Path, config: RunConfig) -> Iterator[CheckpointedRun]:
    """Yield the run whose checkpoints are in `folder`, as described by `config`."""
    with jax.enable_x64(config.precision == "float64"):
        ready = prepare(config)
        store = _open_store(config, ready, folder)
        try:
            snapshot = latest(
                folder, accept=partial(_load_rows, folder, config.problem.num_clients, store)
            )
            if snapshot is None:
                raise InputError(
                    f"{folder} holds no checkpoint: the run has not begun, or kept no state"
                )
            yield _restore(config, ready, snapshot, store)
        finally:
            if store is not None:
                store.close()


def is_current(folder: Path, run: CheckpointedRun) -> bool:
    """Return whether the commit that was read still exists.

    If not, rows in files may be newer than it.
    """
    return any(number == run.generation for number, _ in generations(folder))


def _open_store(config: RunConfig, ready: PreparedRun, folder: Path) -> Store | None:
    """Open the store of the rows, read-only as the run may go on; None if they are in the state."""
    if config.client_state == "array":
        return None
    shape = (config.problem.num_clients, row_width(ready.spec), config.precision)
    if config.client_state == "sparse":
        return SparseStore(*shape)
    return FileStore(folder, *shape, read_only=True)


def _load_rows(folder: Path, num_clients: int, store: Store | None, snapshot: Snapshot) -> None:
    """Load the rows into the store, or those of several processes into the snapshot.

    Raises:
        StateError: If they are damaged.
    """
    if store is not None:
        kept = snapshot.arrays.items()
        store.restore(
            {name.removeprefix("rows."): array for name, array in kept if name.startswith("rows.")}
        )
    elif listed := sharded_checkpoint.names(snapshot.facts):
        snapshot.arrays.update(sharded_checkpoint.read(folder, listed, slice(0, num_clients)))


def _restore(
    config: RunConfig, ready: PreparedRun, snapshot: Snapshot, store: Store | None
) -> CheckpointedRun:
    like = (
        ready.start if store is None else ready.start._replace(memory=None, own=None, heard_at=None)
    )
    progress = load_progress(snapshot, like)
    state = progress.state
    if store is not None:
        state = state._replace(heard_at=snapshot.arrays.get("heard_at"))
    table = (
        np.concatenate(progress.table)[: int(state.round)] if progress.table else np.zeros((0, 0))
    )
    columns: dict[str, NDArray[Any]] = {"round": np.arange(1, len(table) + 1)}
    columns |= {name: table[:, j] for j, name in enumerate(ready.spec.metrics) if table.size}
    stop = ready.spec.stop
    reached = (
        stop is not None
        and bool(table.size)
        and bool(stop.met(columns[stop.metric][-1], ready.federation.target))
    )
    lr = ready.drawer.lr(min(int(state.round) + 1, config.rounds))
    return CheckpointedRun(
        ready=ready,
        state=state,
        lr=lr,
        weights=weights_of(config.problem, config.weights),
        heard_at=last_heard_rounds(ready, state, config.seed),
        columns=columns,
        ended=bool(snapshot.facts.get("ended")),
        diverged_at=int(state.round) if bool(state.done) and not reached else None,
        changed=differences(snapshot.facts.get("run", {}), facts(config, ready)),
        warnings=snapshot.warnings,
        generation=snapshot.generation,
        chunks=lambda: _row_chunks(ready, state, store),
    )


def last_heard_rounds(ready: PreparedRun, state: State, seed: int) -> NDArray[np.int64]:
    """Return (N,) the round in which each client was last heard, 0 for never."""
    if state.heard_at is not None:
        return np.asarray(state.heard_at, np.int64)
    done, drawer = int(state.round), ready.drawer
    if drawer.always:
        return np.full(drawer.num_clients, done)
    at = np.zeros(drawer.num_clients, np.int64)
    for r, cohort in enumerate(drawer.heard(seed, done), 1):
        at[cohort] = r
    return at


def _row_chunks(ready: PreparedRun, state: State, store: Store | None) -> Rows:
    """Yield the rows of the first memory field whose mean the server keeps."""
    spec = ready.spec
    if not spec.algorithm.means:
        return
    of = spec.algorithm.means[0][1]
    if store is not None:
        for clients, rows in store.chunks():
            yield clients, decay_memory(spec, state, rows[:, field_slices(spec)[of]], clients)
        return
    table = getattr(state.memory, of)
    for first in range(0, len(table), CHUNK):
        some = slice(first, first + CHUNK)
        rows = decay_memory(spec, state, table[some], some)
        yield np.arange(first, first + len(rows)), rows


def local_moves(
    config: RunConfig, run: CheckpointedRun, clients: NDArray[np.int64], c_i: NDArray[Any]
) -> NDArray[Any] | None:
    """Return |y_i - x| of the given clients after one more local round from the present x.

    Args:
        config: The run.
        run: Its state.
        clients: Client indices, ascending.
        c_i: Their control variates.

    Returns:
        The distances, or None if a round is more than local steps (Mime's exchange) or defined for
        all clients
            together only.
    """
    algorithm, seed = config.algorithm, config.seed
    together = (
        needs(algorithm, "everyone") is not None and len(clients) < config.problem.num_clients
    )
    if algorithm.prepare is not None or algorithm.has_own or together:
        return None
    asked = replace(
        config,
        rounds=1,
        cohort=1.0,
        cohorts=[clients.tolist()],
        availability=None,
        stop_at=None,
        metrics=("drift",),
        stale="keep",
        compression=None,
        client_state="sparse",
        checkpoint=None,
        every=None,
        block=None,
        sampling="uniform",
    )
    with jax.enable_x64(config.precision == "float64"):
        ready = prepare(asked)
        away, spec = open_clients(asked, ready), ready.spec
        if spec.keeps:
            away.store.write(clients, np.asarray(c_i, config.precision))
        federation, slots = away.federation(clients)
        draws = away.draws(ready.drawer.draw(seed, 0, 1, 1), slots)
        draws = draws._replace(lr=run.lr[None])
        state = away.with_rows(
            run.state._replace(memory=ready.start.memory, heard_at=None, errors=None), clients
        )
        lengths = np.asarray(
            _displacements(spec, federation, state, jax.tree.map(lambda a: a[0], draws))
        )
    return lengths[: len(clients)]


@partial(jax.jit, static_argnums=0)
def _displacements(spec: Spec, federation: Federation, state: State, draw: Draws) -> Any:
    """Return |x - y_i| for all clients of a cohort."""
    spec = spec._replace(block=len(draw.cohort))  # all of them at once
    work = select_cohort(spec, federation, state, draw)
    most = loop_length(spec, federation, draw, work)

    def moved(held: ClientState, work: Any) -> Any:
        _, _, move = train(spec, federation, state, draw.lr, held, work, most)
        return jnp.linalg.norm(move)

    return jax.vmap(moved)(ClientState(state.memory, None, None), work)
