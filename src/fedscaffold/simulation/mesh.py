"""Clients spread over devices: each has a range of the clients, with their state and their records.

Every device runs the same compiled program on its own members of a cohort, and one psum a round joins what they send;
x, c and all that the server keeps are the same on every device. On the host a process knows the rows of its own clients
only, one after the other; on its devices they are laid out with equal room for each, filled up with rows that nobody
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.simulation import asked
from fedscaffold.simulation.asked import Request
from fedscaffold.simulation.double import doubles
from fedscaffold.simulation.evaluation_batches import Batches
from fedscaffold.simulation.spec import Draws, Federation, Spec, State

__all__ = ["Shards", "joined", "on_all_devices", "shards_of"]

AXIS = "clients"
OF_CLIENTS = ("c_i", "heard_at", "errors")  # what of a state has one row for each client
EVENLY = 4  # blocks on a device where cohorts are drawn: it seldom has just its share of one


def joined(spec: Spec, sums: Any) -> Any:
    """Sums over the clients of a device made sums over those of all devices: one psum of one vector."""
    if spec.mesh is None:
        return sums
    with doubles():
        vector, apart = ravel_pytree(sums)
        return apart(jax.lax.psum(vector, AXIS))


def on_all_devices(spec: Spec, program: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """The program of one device as that of all, for arguments that are placed already; the state is the third."""
    places = jax.tree.map(lambda a: a.sharding.spec, arguments)
    return jax.shard_map(
        program, mesh=spec.mesh, in_specs=places, out_specs=(places[2], PartitionSpec()), check_vma=False
    )


class Shards(NamedTuple):
    """Which clients are on which device, and how the parts of a run are laid out there."""

    mesh: Mesh
    bounds: NDArray[np.int64]
    """(D + 1,) the first client of each device, and N."""
    offsets: NDArray[np.int64]
    """(N + 1,) where each client's records begin."""
    devices: NDArray[np.int64]
    """Which of the D are this process's, one after the other."""
    block: int
    """Clients that a device runs at once."""
    slots: int
    """Members of a cohort that a device has room for."""
    alone: int
    """Clients that one device would run at once, had it them all: by this a checkpoint knows the run."""

    @property
    def own(self) -> slice:
        """The clients of this process."""
        return slice(int(self.bounds[self.devices[0]]), int(self.bounds[self.devices[-1] + 1]))

    @property
    def rows(self) -> int:
        """Clients that each device has room for."""
        return int(np.diff(self.bounds).max())

    def spec(self, alone: Spec) -> Spec:
        """What the program of many devices is compiled for, from that of one."""
        return alone._replace(block=self.block, everyone=False, mesh=self.mesh)

    def federation(self, host: Federation) -> Federation:
        """What stays the same all run long, on the devices; records and clients numbered within each."""
        dtype, begins = host.weights.dtype, self.offsets[self.bounds]
        clients, real = self._places(self.bounds)
        records, there = self._places(begins)

        def cast(a: Any) -> Any:
            return a.astype(dtype, copy=False) if np.issubdtype(a.dtype, np.floating) else a

        def some(tree: Any, places: NDArray[np.int64]) -> Any:
            return self.put(jax.tree.map(lambda a: cast(np.asarray(_taken(a, places))), tree), 0)

        each = host.noise is not None and host.noise.ndim == 3 and len(host.noise) > 1
        first = self.offsets[clients] - np.repeat(begins[self.devices], self.rows)
        weighed = host.record_weights is not None
        return Federation(
            some(host.records, records),
            self.put(first.astype(np.int32), 0),
            some(host.counts, clients),
            some(host.steps, clients),
            self.put(host.weights[clients] * real.astype(dtype), 0),
            self.put(jax.tree.map(cast, host.test), None),
            some(host.noise, clients) if each else self.put(host.noise, None),
            self.put(host.optimum, None),
            some(host.controls, clients),
            self.put(host.optimal_loss, None),
            self.put(host.record_weights[records] * there.astype(dtype), 0) if weighed else None,
            self.put(clients.astype(np.int32), 0),
            {kind: [self._deal(part, begins) for part in parts] for kind, parts in host.evaluation.items()},
            self.put(host.test_evaluation, None),
            None if host.shares is None else self.put(host.shares[clients] * real, 0),
        )

    def _deal(self, batches: Batches, begins: NDArray[np.int64]) -> Batches:
        """Batches for evaluation dealt out to the devices that hold their records, as many rows to each."""
        real = batches.share.ravel() > 0
        first, count, share = (a.ravel()[real] for a in batches[:3])
        device = np.searchsorted(begins, first, side="right") - 1
        width = batches.first.shape[1]
        most = int(np.bincount(device, minlength=len(begins) - 1).max())
        rows = max(1, -(-most // width))

        def laid(column: NDArray[Any], filling: int) -> Any:
            tables = np.full((len(self.devices), rows * width), filling, column.dtype)
            for place, own in enumerate(self.devices.tolist()):
                here = column[device == own]
                tables[place, : len(here)] = here
            return self.put(tables.reshape(-1, width), 0)

        within = (first - begins[device]).astype(np.int32)
        return Batches(laid(within, 0), laid(count, 1), laid(share, 0), self.put(batches.place, None))

    def state(self, host: State) -> State:
        """A state on the devices, from that of this process's clients."""
        clients, _ = self._places(self.bounds)
        here = clients - self.own.start
        laid = [
            self.put(jax.tree.map(lambda a: _taken(a, here), leaf), 0) if name in OF_CLIENTS else self.put(leaf, None)
            for name, leaf in host._asdict().items()
        ]
        return State(*laid)

    def collected(self, state: State) -> State:
        """The state on the host: of rows, those of this process's clients."""
        _, real = self._places(self.bounds)

        def rows(a: Any) -> Any:
            here = sorted(a.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            pieces = [np.asarray(shard.data) for shard in here]
            return _taken(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), np.flatnonzero(real))

        def same(a: Any) -> Any:
            return np.asarray(a.addressable_data(0))

        fields = state._asdict().items()
        return State(*(jax.tree.map(rows if name in OF_CLIENTS else same, leaf) for name, leaf in fields))

    def draws(self, drawn: Draws) -> Draws:
        """The draws of a cohort dealt out: to each device its members, numbered within it, and their records."""
        room, slots = len(drawn.cohort), len(self.devices) * self.slots
        cohort = np.full((room, slots), self.rows, np.int32)
        dealt = [(np.zeros((room, slots, *a.shape[2:]), a.dtype), a) for a in drawn[1:3] if a is not None]
        for place, device in enumerate(self.devices.tolist()):
            first, end = self.bounds[device], self.bounds[device + 1]
            for r, clients in enumerate(drawn.cohort):
                low, high = np.searchsorted(clients, (first, end))
                here = slice(place * self.slots, place * self.slots + int(high - low))
                cohort[r, here] = clients[low:high] - first
                for own, everybodys in dealt:
                    own[r, here] = everybodys[r, low:high]
                if drawn.rows is not None:
                    dealt[0][0][r, here] -= np.int32(self.offsets[first])
        parts = iter(own for own, _ in dealt)
        rows, weights = (None if a is None else self.put(next(parts), 1) for a in drawn[1:3])
        return Draws(self.put(cohort, 1), rows, weights, self.put(drawn.steps, None))

    def put(self, tree: Any, axis: int | None) -> Any:
        """Arrays on the devices: cut along an axis, as many pieces as devices here, or the same on all."""
        own = self.mesh.devices[self.devices].tolist()

        def leaf(a: Any) -> Any:
            whole = np.asarray(a)
            pieces = [whole] * len(own) if axis is None else np.split(whole, len(own), axis)
            place = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
            shape = list(pieces[0].shape)
            if axis is not None:
                shape[axis] *= self.mesh.size
            placed = [jax.device_put(piece, to, may_alias=False) for piece, to in zip(pieces, own, strict=True)]
            return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(self.mesh, place), placed)

        with doubles():
            return jax.tree.map(leaf, tree)

    def total(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of the processes' vectors, in double precision."""
        if jax.process_count() == 1:
            return vector
        pieces = np.zeros((len(self.devices), len(vector)))
        pieces[0] = vector
        with doubles():
            summed = jax.jit(lambda a: a.sum(axis=0), out_shardings=NamedSharding(self.mesh, PartitionSpec()))
            return np.array(summed(self.put(pieces, 0)).addressable_data(0))

    def _places(self, edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows from edge to edge for each device here, its last one repeated to equal room; and which are real."""
        at = edges[self.devices, None] + np.arange(np.diff(edges).max())
        end = edges[self.devices + 1, None]
        return np.minimum(at, end - 1).ravel(), (at < end).ravel()


def _taken(a: Any, places: NDArray[np.int64]) -> Any:
    """Some rows, in rising order; not copied where they lie one after the other."""
    first, last = int(places[0]), int(places[-1])
    return a[first : last + 1] if last - first + 1 == len(places) and (np.diff(places) == 1).all() else a[places]


def shards_of(request: Request, size: int, footprint: int, alone: int) -> Shards:
    """Deal a problem's clients out to the devices asked for, in ranges as even as they come."""
    number = checks.whole("devices", request.devices)
    problem = request.problem
    every = np.array(jax.devices())
    if number > problem.num_clients:
        raise InputError(f"devices must be at most as many as clients, {problem.num_clients}, got {number}")
    if number > len(every):
        raise InputError(
            f"devices={number}, but JAX has {len(every)}: jax.config.update('jax_num_cpu_devices', {number}) before "
            "JAX starts, or --devices on the command line"
        )
    if jax.process_count() > 1 and number < len(every):
        raise InputError(f"on several processes devices must be all that they have, {len(every)}, got {number}")
    if request.client_state != "array":
        raise InputError(
            f"client_state={request.client_state!r} reads its rows for one device: with devices keep 'array', whose "
            "rows are spread over them"
        )
    bounds = np.arange(number + 1) * problem.num_clients // number
    rows, share = int(np.diff(bounds).max()), -(-size // number)
    block = alone if request.block is not None else asked.block(request, share, footprint)
    if request.block is None and size < problem.num_clients:
        block = min(block, -(-share // EVENLY))
    most = min(size, rows)
    block = min(block, most)
    mine = [j for j, device in enumerate(every[:number]) if device.process_index == jax.process_index()]
    return Shards(
        Mesh(every[:number], (AXIS,)),
        bounds,
        problem.offsets,
        np.array(mine),
        block,
        -(-most // block) * block,
        alone,
    )
