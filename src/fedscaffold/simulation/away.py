"""Clients' state and records that are not in memory: a round sees its cohort and nothing else.

The compiled program is the one for a federation as large as the cohort: before a round the cohort's control variates
are read from a store and its records gathered from where they lie, after it the new control variates are written; the
next cohort's are read ahead. What N clients cost in memory is some 50 bytes each. Only the random key of a client goes
by its number among all N, so that results are those of the array, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.simulation.asked import Request, cohort_size
from fedscaffold.simulation.double import doubles
from fedscaffold.simulation.draws import Drawer, Streams
from fedscaffold.simulation.evaluation import usual
from fedscaffold.simulation.spec import Draws, Federation, Settings, Spec, State
from fedscaffold.state import FileStore, Prefetched, SparseStore, Store, choose

__all__ = ["STORES", "Away", "clients_of", "gathered", "refuse_away", "settled"]

STORES = ("array", "auto", "file", "sparse")


def settled(request: Request, kind: str) -> Request:
    """The request with where clients' state is kept: as asked for, or for "auto" the first that fits a gigabyte."""
    problem = request.problem
    if checks.choice("client_state", kind, STORES) == "array" or not isinstance(problem, Problem):
        return request
    if kind == "auto":
        kind = choose(problem.num_clients, problem.dim, request.precision, cohort_size(request), request.rounds)
    if kind != "array" and request.metrics is None:
        request = request._replace(metrics=[name for name in usual(problem) if name in measurable(problem)])
    return request._replace(client_state=kind)


def measurable(problem: Problem) -> set[str]:
    """The metrics that need no look at all clients."""
    return {"distance", "drift", "residual", *(["accuracy"] if problem.test is not None else [])}


def refuse_away(request: Request, spec: Spec) -> None:
    """Raise an InputError for what needs all clients at once."""
    kind = f"client_state={request.client_state!r}"
    if spec.policy.drop_after is not None:
        raise InputError(f"stale='drop' looks at all clients in every round; with {kind} use keep, decay or refresh")
    if spec.compressor is not None and spec.sends_move:
        raise InputError(f"compressed moves leave an error at every client, which {kind} does not keep; use 'array'")
    if request.problem.offsets[-1] >= 2**31:
        raise InputError(f"records are counted in 32 bits: at most {2**31 - 1}, got {request.problem.offsets[-1]}")
    needy = [name for name in spec.metrics if name not in measurable(request.problem)]
    if needy:
        raise InputError(
            f"{', '.join(needy)} would look at all clients in a round; with {kind} measure drift, distance, "
            "or accuracy on test data: metrics=(...)"
        )


def opened(request: Request, spec: Spec, folder: Path | str | None) -> Store:
    """The store of a run, read ahead."""
    shape = (request.problem.num_clients, request.problem.dim if spec.keeps else 1, request.precision)
    if request.client_state == "sparse":
        return SparseStore(*shape)
    if folder is None:
        raise InputError("client_state='file' keeps rows in the checkpoint folder: give checkpoint=DIR")
    return Prefetched(FileStore(folder, *shape))


class Away(NamedTuple):
    """The clients of a run: where their state and records are, and which of them make up a round."""

    problem: Problem
    drawer: Drawer
    spec: Spec
    seed: int
    store: Store
    heard_at: NDArray[np.int32] | None
    """(N,) the round in which each client was last heard."""
    weights: NDArray[Any]
    steps: NDArray[np.int64]
    template: Federation
    """What does not change from round to round."""

    def cohort(self, round: int) -> NDArray[np.int64]:
        """The clients of a round, without ghosts."""
        return self.drawer.cohort(Streams(self.seed), round)

    def advance(
        self, program: Any, settings: Settings, state: State, round: int, rounds: int, every: int
    ) -> tuple[State, Any]:
        """One round: rows in, the compiled program, rows out."""
        who = self.cohort(round)
        state = self.with_rows(state, who)
        if round + 1 < rounds and isinstance(self.store, Prefetched):
            self.store.ask(self.cohort(round + 1))
        federation, slots = self.federation(who)
        draws = self.draws(self.drawer.draw(self.seed, round, 1, 1), slots)
        with doubles():
            state, row = program(federation, settings, state, draws, np.int32(1), np.int32(every))
        if self.spec.keeps and len(who):
            self.store.write(who, np.asarray(state.c_i)[: len(who)])
        if self.heard_at is not None:
            self.heard_at[who] = round + 1
        return state, np.asarray(row)

    def with_rows(self, state: State, who: NDArray[np.int64]) -> State:
        """The state with the cohort's rows."""
        slots = self.drawer.slots
        if self.spec.keeps:
            rows = np.zeros((slots, self.problem.dim), state.x.dtype)
            rows[: len(who)] = self.store.read(who)
            state = state._replace(c_i=jax.device_put(rows, may_alias=False))
        if self.heard_at is not None:
            heard = np.zeros(slots, np.int32)
            heard[: len(who)] = self.heard_at[who]
            state = state._replace(heard_at=jax.device_put(heard, may_alias=False))
        return state

    def federation(self, who: NDArray[np.int64]) -> tuple[Federation, NDArray[np.int64]]:
        """The federation of a cohort, filled up with ghosts of weight 0; and the clients in its slots."""
        slots = np.full(self.drawer.slots, self.problem.num_clients - 1)
        slots[: len(who)] = who
        shares = self.weights[slots]
        shares[len(who) :] = 0
        weights = shares.astype(self.template.weights.dtype)
        noise, own = self.template.noise, self.problem.noise
        if own is not None and own.ndim == 3 and len(own) > 1:
            noise = own[slots].astype(noise.dtype)
        return self.template._replace(
            records=gathered(self.problem, slots, self.spec.max_rows, self.template.weights.dtype),
            counts=(self.problem.offsets[slots + 1] - self.problem.offsets[slots]).astype(np.int32),
            steps=self.steps[slots].astype(np.int32),
            weights=weights,
            noise=noise,
            who=slots.astype(np.int32),
            shares=shares if self.spec.keeps else None,
        ), slots

    def draws(self, drawn: Draws, slots: NDArray[np.int64]) -> Draws:
        """A round's draws with clients and records numbered within the cohort."""
        rows = drawn.rows
        if rows is not None:
            first = np.arange(len(slots)) * self.spec.max_rows - self.problem.offsets[slots]
            rows = np.maximum(rows + first[:, None, None], 0).astype(np.int32)
        return drawn._replace(cohort=np.arange(len(slots), dtype=np.int32)[None], rows=rows)

    def mean(self, round: int) -> NDArray[np.float64] | None:
        """Sum of p_i c_i over all clients as they stand after a round, from the store, in double precision."""
        if not self.spec.keeps:
            return None
        rate, total = self.spec.policy.rate, np.zeros(self.problem.dim)
        for clients, rows in self.store.chunks():
            share = self.weights[clients]
            if rate is not None and self.heard_at is not None:
                share = share * rate ** (round - self.heard_at[clients])
            total += np.einsum("n,nd->d", share, rows, dtype=np.float64)
        return total

    # What a checkpoint holds of the clients

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """What a commit must know."""
        ages = {} if self.heard_at is None else {"heard_at": self.heard_at}
        return ages | {f"rows.{name}": array for name, array in self.store.snapshot().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go to the clients' state of a snapshot."""
        self.store.restore({name.removeprefix("rows."): a for name, a in arrays.items() if name.startswith("rows.")})
        if self.heard_at is not None:
            self.heard_at[:] = arrays["heard_at"]


def gathered(problem: Problem, clients: NDArray[np.int64], most: int, dtype: Any) -> Any:
    """The records of some clients, each with room for `most`; floats of the given type."""

    def leaf(column: NDArray[Any]) -> NDArray[Any]:
        kind = dtype if np.issubdtype(column.dtype, np.floating) else column.dtype
        out = np.zeros((len(clients) * most, *column.shape[1:]), kind)
        for slot, client in enumerate(clients.tolist()):
            begin, end = problem.offsets[client], problem.offsets[client + 1]
            out[slot * most : slot * most + end - begin] = column[begin:end]
        return out

    return jax.tree.map(leaf, problem.records)


def clients_of(request: Request, ready: Any, seed: int, folder: Path | str | None) -> Away:
    """Everything a run needs to call its cohorts."""
    spec, problem = ready.spec, request.problem
    heard_at = np.zeros(problem.num_clients, np.int32) if spec.ages else None
    store = opened(request, spec, folder)
    p = weights_of(problem, request.weights)
    drawer = ready.drawer._replace(known=ready.drawer.shape)
    return Away(problem, drawer, spec, seed, store, heard_at, p, drawer.steps, ready.federation)
