"""A look at the state of a run, finished or under way, without running it or touching its folder.

The last whole checkpoint is read by the same readers that `resume` uses: every byte under its checksum, no pickle. Rows
of clients who are away are read chunk by chunk, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.metrics import met
from fedscaffold.problems.problem import weights_of
from fedscaffold.simulation import parts
from fedscaffold.simulation.aging import faded
from fedscaffold.simulation.away import clients_of
from fedscaffold.simulation.checkpoint import restored
from fedscaffold.simulation.identity import differences, facts
from fedscaffold.simulation.local import Held, local_round
from fedscaffold.simulation.rounds import called, longest
from fedscaffold.simulation.run import noise_key
from fedscaffold.simulation.setup import Ready, Request, prepare
from fedscaffold.simulation.spec import Draws, Federation, Settings, Spec, State
from fedscaffold.state import FileStore, Snapshot, SparseStore, StateError, Store, latest
from fedscaffold.state.commit import generations

__all__ = ["Standing", "StateError", "local_moves", "looking_at", "still_there"]

Rows: TypeAlias = Iterator[tuple[NDArray[np.int64], NDArray[Any]]]
CHUNK = 1024


class Standing(NamedTuple):
    """A run as its last whole checkpoint has it."""

    ready: Ready
    state: State
    """Without the rows of clients who are away."""
    weights: NDArray[Any]
    """(N,) the p_i."""
    heard_at: NDArray[np.int64]
    """(N,) the round in which each client was last heard, 0 for never: as kept, or as the seed draws it."""
    columns: dict[str, NDArray[Any]]
    """Metrics by round, `round` included."""
    ended: bool
    """Whether it went to its end."""
    diverged_at: int | None
    changed: str | None
    """How the configuration differs from the one that ran."""
    warnings: tuple[str, ...]
    generation: int
    chunks: Callable[[], Rows]
    """() -> (clients, their c_i as they stand now), ascending; clients left out have zeros."""

    @property
    def round(self) -> int:
        """Rounds done."""
        return int(self.state.round)


@contextmanager
def looking_at(folder: Path, request: Request, evaluate_every: int = 1) -> Iterator[Standing]:
    """The run whose checkpoints are in `folder`, as `request` asks for it (its seed is the first of its seeds)."""
    with jax.enable_x64(request.precision == "float64"):
        ready = prepare(request)
        store = _store(request, ready, folder)
        try:
            snapshot = latest(folder, accept=partial(_complete, folder, request.problem.num_clients, store))
            if snapshot is None:
                raise InputError(f"{folder} holds no checkpoint: the run has not begun, or kept no state")
            yield _standing(request, ready, snapshot, store, evaluate_every)
        finally:
            if store is not None:
                store.close()


def still_there(folder: Path, standing: Standing) -> bool:
    """Whether the commit that was looked at is still kept: rows in files are its own only if so."""
    return any(number == standing.generation for number, _ in generations(folder))


def _store(request: Request, ready: Ready, folder: Path) -> Store | None:
    """Where the rows are, if not in the state; opened to be read only, as a run may be at work there."""
    if request.client_state == "array":
        return None
    shape = (request.problem.num_clients, request.problem.dim if ready.spec.keeps else 1, request.precision)
    return SparseStore(*shape) if request.client_state == "sparse" else FileStore(folder, *shape, read_only=True)


def _complete(folder: Path, num_clients: int, store: Store | None, snapshot: Snapshot) -> None:
    """Let the store take its rows, or the snapshot those that many processes wrote apart; StateError passes it over."""
    if store is not None:
        kept = snapshot.arrays.items()
        store.restore({name.removeprefix("rows."): array for name, array in kept if name.startswith("rows.")})
    elif listed := parts.names(snapshot.facts):
        snapshot.arrays.update(parts.read(folder, listed, slice(0, num_clients)))


def _standing(request: Request, ready: Ready, snapshot: Snapshot, store: Store | None, every: int) -> Standing:
    like = ready.start if store is None else ready.start._replace(c_i=None, heard_at=None)
    progress = restored(snapshot, like)
    state = progress.state
    if store is not None:
        state = state._replace(heard_at=snapshot.arrays.get("heard_at"))
    table = np.concatenate(progress.table)[: int(state.round)] if progress.table else np.zeros((0, 0))
    columns: dict[str, NDArray[Any]] = {"round": np.arange(1, len(table) + 1)}
    columns |= {name: table[:, j] for j, name in enumerate(ready.spec.metrics) if table.size}
    stop = ready.spec.stop
    reached = stop is not None and bool(table.size) and bool(met(stop, columns[stop][-1], ready.target))
    return Standing(
        ready,
        state,
        weights_of(request.problem, request.weights),
        last_heard(ready, state, request.seeds[0]),
        columns,
        bool(snapshot.facts.get("ended")),
        int(state.round) if bool(state.done) and not reached else None,
        differences(snapshot.facts.get("run", {}), facts(request, ready, every)),
        snapshot.warnings,
        snapshot.generation,
        lambda: _chunks(ready, state, store),
    )


def last_heard(ready: Ready, state: State, seed: int) -> NDArray[np.int64]:
    """(N,) the round in which each client was last heard, 0 for never."""
    if state.heard_at is not None:
        return np.asarray(state.heard_at, np.int64)
    done, drawer = int(state.round), ready.drawer
    if drawer.always:
        return np.full(drawer.num_clients, done)
    at = np.zeros(drawer.num_clients, np.int64)
    for r, cohort in enumerate(drawer.heard(seed, done), 1):
        at[cohort] = r
    return at


def _chunks(ready: Ready, state: State, store: Store | None) -> Rows:
    if not ready.spec.keeps:
        return
    if store is not None:
        for clients, rows in store.chunks():
            yield clients, faded(ready.spec, state, rows, clients)
        return
    for first in range(0, len(state.c_i), CHUNK):
        some = slice(first, first + CHUNK)
        rows = faded(ready.spec, state, state.c_i[some], some)
        yield np.arange(first, first + len(rows)), rows


def local_moves(
    request: Request, standing: Standing, clients: NDArray[np.int64], c_i: NDArray[Any]
) -> NDArray[Any] | None:
    """|y_i - x| of some clients, ascending, after one more local round from the present x, with the c_i given.

    None where a round is more than local steps (Mime's exchange), or is defined for all clients together only.
    """
    algorithm, seed = request.algorithm, request.seeds[0]
    if algorithm.anchor is not None or (algorithm.everyone and len(clients) < request.problem.num_clients):
        return None
    asked = request._replace(
        rounds=1, cohorts=[clients.tolist()], availability=None, stop_at=None, metrics=("drift",), stale="keep",
        compression=None, client_state="sparse", block=None,
    )  # fmt: skip
    with jax.enable_x64(request.precision == "float64"):
        ready = prepare(asked)
        away, spec = clients_of(asked, ready, seed, None), ready.spec
        if spec.keeps:
            away.store.write(clients, np.asarray(c_i, request.precision))
        federation, slots = away.federation(clients)
        draws = away.draws(ready.drawer.draw(seed, 0, 1, 1), slots)
        state = away.with_rows(standing.state._replace(c_i=None, heard_at=None, errors=None), clients)
        settings = Settings(ready.lr, noise_key(seed), np.array(np.nan, request.precision))
        lengths = np.asarray(_lengths(spec, federation, settings, state, jax.tree.map(lambda a: a[0], draws)))
    return lengths[: len(clients)]


@partial(jax.jit, static_argnums=0)
def _lengths(spec: Spec, federation: Federation, settings: Settings, state: State, draw: Draws) -> Any:
    """|x - y_i| of everybody in a cohort."""
    work = called(spec, federation, settings, state, draw).work
    most = longest(spec, draw, work)

    def moved(held: Held, work: Any) -> Any:
        reply = local_round(spec, federation, settings, state.x, state.told, held, work, most)
        if reply.move is None:
            return (work.steps if spec.unequal else spec.travel_steps) * settings.lr * jnp.linalg.norm(reply.d)
        return jnp.linalg.norm(reply.move) * (1 if reply.travel is None else reply.travel)

    return jax.vmap(moved)(Held(state.c_i, None), work)
