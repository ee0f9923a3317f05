"""Out-of-core clients: state and data are loaded per cohort.

The program is compiled for a federation of the cohort's size. Before a round the cohort's memory is
read from a store and its records are gathered; after it the new memory is written, while the next
cohort's is prefetched. Each of the N clients takes about 50 bytes of main memory. Random keys are
derived from client numbers among all N, so results are those of client_state="array", to the
rounding of sums that the compiler may order differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.precision import narrowed, type_in
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation.evaluation import default_metrics
from fedscaffold.simulation.evaluation_batches import test_batches
from fedscaffold.simulation.resolve import cohort_size
from fedscaffold.simulation.sampling import Drawer, Streams
from fedscaffold.simulation.spec import Draws, Federation, Spec, State
from fedscaffold.state import FileStore, Prefetched, SparseStore, Store, choose
from fedscaffold.state.platforms import require

__all__ = [
    "OutOfCoreClients",
    "cohort_federation",
    "field_slices",
    "gather_records",
    "open_clients",
    "resolve_client_state",
    "row_width",
]


def resolve_client_state(config: RunConfig) -> RunConfig:
    """Resolve client_state="auto" to the first kind that fits 1 GB, and the default metrics."""
    problem, kind = config.problem, config.client_state
    if kind == "array" or not isinstance(problem, Problem):
        return config
    if kind == "auto":
        kind = choose(
            problem.num_clients, problem.dim, config.precision, cohort_size(config), config.rounds
        )
    if kind != "array" and config.metrics is None:
        config = replace(
            config,
            metrics=[
                name for name in default_metrics(problem) if name in out_of_core_metrics(problem)
            ],
        )
    return replace(config, client_state=kind)


def out_of_core_metrics(problem: Problem) -> set[str]:
    """Return the metrics that do not need all clients."""
    return {"distance", "drift", "residual", *(["accuracy"] if problem.test is not None else [])}


def _refuse(config: RunConfig, spec: Spec) -> None:
    """Raise an InputError for arguments that need all clients in memory."""
    kind = f"client_state={config.client_state!r}"
    if spec.policy.drop_after is not None:
        raise InputError(
            f"stale='drop' looks at all clients in every round; with {kind} use keep, decay or "
            "refresh"
        )
    if spec.algorithm.has_own:
        raise InputError(
            f"{config.algorithm.name}'s clients keep models of their own, which {kind} does not; "
            "use 'array'"
        )
    begun: Any = spec.algorithm.memory(np.ones(1))
    if begun is not None and any(np.any(value) for value in begun):
        raise InputError(
            f"what {config.algorithm.name}'s clients remember does not begin at 0, as {kind} takes "
            "it to"
        )
    if spec.local_buffers:
        raise InputError(
            f"buffers='local' keeps a state at every client, which {kind} does not; use 'array'"
        )
    if spec.errors:
        raise InputError(
            f"compressed moves leave an error at every client, which {kind} does not keep; use "
            "'array'"
        )
    if config.problem.offsets[-1] >= 2**31:
        raise InputError(
            f"records are counted in 32 bits: at most {2**31 - 1}, got {config.problem.offsets[-1]}"
        )
    needy = [
        name
        for name in spec.metrics
        if name not in out_of_core_metrics(config.problem) | spec.own_columns
    ]
    if needy:
        raise InputError(
            f"{', '.join(needy)} would look at all clients in a round; with {kind} measure drift, "
            "distance, "
            "or accuracy on test data: metrics=(...)"
        )


def row_width(spec: Spec) -> int:
    """Return the length of a client's row, which concatenates the fields of its memory."""
    return sum(spec.widths.values()) or 1


def field_slices(spec: Spec) -> dict[str, slice]:
    """Return the slice of each memory field in a client's row."""
    ends = np.cumsum([0, *spec.widths.values()]).tolist()
    return {
        name: slice(begin, end)
        for name, (begin, end) in zip(spec.widths, pairwise(ends), strict=True)
    }


def open_store(config: RunConfig, spec: Spec) -> Store:
    """Open the store of a run; file stores are prefetched."""
    shape = (config.problem.num_clients, row_width(spec), config.precision)
    if config.client_state == "sparse":
        return SparseStore(*shape)
    if config.checkpoint is None:
        raise InputError(
            "client_state='file' keeps rows in the checkpoint folder: give checkpoint=DIR"
        )
    require("preadv", "client_state='file'")
    return Prefetched(FileStore(config.checkpoint, *shape))


class OutOfCoreClients(NamedTuple):
    """The out-of-core clients of a run."""

    problem: Problem
    drawer: Drawer
    spec: Spec
    seed: int
    store: Store
    heard_at: NDArray[np.int32] | None
    """(N,) round in which each client last took part; 0 for never."""
    weights: NDArray[Any]
    steps: NDArray[np.int64]
    template: Federation
    """Federation of the cohort's size, with the fields that do not change over rounds."""

    def cohort(self, round: int) -> NDArray[np.int64]:
        """Return the clients of a round, without padding."""
        return self.drawer.cohort(Streams(self.seed), round)

    def advance(
        self, program: Any, state: State, round: int, rounds: int, every: int
    ) -> tuple[State, Any]:
        """Run one round: read the cohort's rows, call the program, write the new rows."""
        who = self.cohort(round)
        state = self.with_rows(state, who)
        if round + 1 < rounds and isinstance(self.store, Prefetched):
            self.store.ask(self.cohort(round + 1))
        federation, slots = self.federation(who)
        draws = self.draws(self.drawer.draw(self.seed, round, 1, 1), slots)
        with jax.enable_x64(True):
            state, row = program(
                federation, state, draws, np.int32(1), np.int32(every), np.int32(round)
            )
        if self.spec.keeps and len(who):
            rows = [np.asarray(a)[: len(who)].reshape(len(who), -1) for a in state.memory]
            self.store.write(who, np.concatenate(rows, axis=1))
        if self.heard_at is not None:
            self.heard_at[who] = round + 1
        return state, np.asarray(row)

    def with_rows(self, state: State, who: NDArray[np.int64]) -> State:
        """Return the state with the cohort's rows read from the store."""
        slots = self.drawer.slots
        if self.spec.keeps:
            rows = np.zeros((slots, row_width(self.spec)), state.x.dtype)
            rows[: len(who)] = self.store.read(who)
            fields = [rows[:, place] for place in field_slices(self.spec).values()]
            memory = type(state.memory)(
                *(a.reshape(b.shape) for a, b in zip(fields, state.memory, strict=True))
            )
            state = state._replace(memory=jax.device_put(memory, may_alias=False))
        if self.heard_at is not None:
            heard = np.zeros(slots, np.int32)
            heard[: len(who)] = self.heard_at[who]
            state = state._replace(heard_at=jax.device_put(heard, may_alias=False))
        return state

    def federation(self, who: NDArray[np.int64]) -> tuple[Federation, NDArray[np.int64]]:
        """Return the federation of a cohort, padded with weight 0, and the clients in its slots."""
        slots = np.full(self.drawer.slots, self.problem.num_clients - 1)
        slots[: len(who)] = who
        shares = self.weights[slots]
        shares[len(who) :] = 0
        weights = shares.astype(self.template.weights.dtype)
        noise, own = self.template.noise, self.problem.noise
        if own is not None and own.ndim == 3 and len(own) > 1:
            noise = own[slots].astype(noise.dtype)
        return self.template._replace(
            records=gather_records(
                self.problem, slots, self.spec.max_rows, self.template.weights.dtype
            ),
            counts=(self.problem.offsets[slots + 1] - self.problem.offsets[slots]).astype(np.int32),
            steps=self.steps[slots].astype(np.int32),
            weights=weights,
            noise=noise,
            who=slots.astype(np.int32),
            shares=shares if self.spec.keeps else None,
        ), slots

    def draws(self, drawn: Draws, slots: NDArray[np.int64]) -> Draws:
        """Return a round's draws with clients and records renumbered within the cohort."""
        rows = drawn.rows
        if rows is not None:
            first = np.arange(len(slots)) * self.spec.max_rows - self.problem.offsets[slots]
            rows = np.maximum(rows + first[:, None, None], 0).astype(np.int32)
        return drawn._replace(cohort=np.arange(len(slots), dtype=np.int32)[None], rows=rows)

    def mean(self, round: int) -> tuple[NDArray[np.float64], ...]:
        """Return sum p_i c_i over all clients after a round, in float64, by pair of `means`."""
        rate = self.spec.policy.rate
        total = np.zeros(row_width(self.spec))
        for clients, rows in self.store.chunks() if self.spec.keeps else ():
            share = self.weights[clients]
            if rate is not None and self.heard_at is not None:
                share = share * rate ** (round - self.heard_at[clients])
            total += np.einsum("n,nd->d", share, rows, dtype=np.float64)
        at = field_slices(self.spec)
        return tuple(total[at[of]] for _, of in self.spec.algorithm.means)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that a checkpoint must hold."""
        ages = {} if self.heard_at is None else {"heard_at": self.heard_at}
        return ages | {f"rows.{name}": array for name, array in self.store.snapshot().items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the clients' state from the arrays of a checkpoint."""
        self.store.restore(
            {
                name.removeprefix("rows."): a
                for name, a in arrays.items()
                if name.startswith("rows.")
            }
        )
        if self.heard_at is not None:
            self.heard_at[:] = arrays["heard_at"]


def gather_records(problem: Problem, clients: NDArray[np.int64], most: int, dtype: Any) -> Any:
    """Return the records of some clients, padded to `most` rows, in the precision `dtype`."""

    def leaf(column: NDArray[Any]) -> NDArray[Any]:
        out = np.zeros((len(clients) * most, *column.shape[1:]), type_in(dtype, column.dtype))
        for slot, client in enumerate(clients.tolist()):
            begin, end = problem.offsets[client], problem.offsets[client + 1]
            rows = narrowed(f"the records of client {client}", column[begin:end], dtype)
            out[slot * most : slot * most + end - begin] = rows
        return out

    return jax.tree.map(leaf, problem.records)


def cohort_federation(config: RunConfig, spec: Spec, slots: int) -> Federation:
    """Return a federation of the cohort's size: its shapes, and what is constant over rounds."""
    _refuse(config, spec)
    problem, dtype = config.problem, np.dtype(config.precision)

    def room(column: NDArray[Any]) -> NDArray[Any]:
        shape = (slots * spec.max_rows, *column.shape[1:])
        return np.zeros(shape, type_in(dtype, column.dtype))

    def cast(a: Any) -> Any:
        return narrowed("the data", a, dtype)

    numbers = np.zeros(slots, np.int32)
    noise = None if problem.noise is None else cast(problem.noise)
    if noise is not None and noise.ndim == 3 and len(noise) > 1:
        noise = np.resize(noise, (slots, *noise.shape[1:]))
    return Federation(
        records=jax.tree.map(room, problem.records),
        first=np.arange(slots, dtype=np.int32) * np.int32(spec.max_rows),
        counts=numbers,
        steps=numbers,
        weights=np.zeros(slots, dtype),
        test=jax.tree.map(cast, problem.test) if "accuracy" in spec.metrics else None,
        noise=noise,
        optimum=cast(problem.optimum(config.weights)) if "distance" in spec.metrics else None,
        controls=None,
        optimal_loss=None,
        record_weights=None,
        who=numbers,
        test_evaluation=test_batches(problem, spec, config.precision),
        shares=np.zeros(slots) if spec.keeps else None,
    )


def open_clients(config: RunConfig, ready: Any) -> OutOfCoreClients:
    """Open the out-of-core clients of a prepared run."""
    spec, problem = ready.spec, config.problem
    heard_at = np.zeros(problem.num_clients, np.int32) if spec.ages else None
    store = open_store(config, spec)
    p = weights_of(problem, config.weights)
    drawer = ready.drawer
    return OutOfCoreClients(
        problem, drawer, spec, config.seed, store, heard_at, p, drawer.steps, ready.federation
    )
