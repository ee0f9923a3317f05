"""Clients sharded over devices: each device holds a range of clients, with their state and records.

Every device runs the same program on its members of the cohort; one psum per round reduces their
sums. The server state is replicated. On the host a process holds the rows of its own clients
contiguously; on its devices every shard is padded to the same number of rows.
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
from fedscaffold.precision import narrowed
from fedscaffold.run_config import RunConfig
from fedscaffold.simulation import resolve
from fedscaffold.simulation.evaluation_batches import Batches
from fedscaffold.simulation.spec import Draws, Federation, Spec, State

__all__ = ["Shards", "make_shards", "on_all_devices", "sum_over_devices"]

AXIS = "clients"
# fields of a state with one row per client
OF_CLIENTS = "memory", "heard_at", "errors", "own", "own_buffers"
EVENLY = 4  # blocks per device if cohorts are sampled, as a device's number of members varies


def sum_over_devices(spec: Spec, sums: Any) -> Any:
    """Reduce sums over devices, with one psum of one concatenated vector."""
    if spec.mesh is None:
        return sums
    with jax.enable_x64(True):
        vector, apart = ravel_pytree(sums)
        return apart(jax.lax.psum(vector, AXIS))


def on_all_devices(spec: Spec, program: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """Wrap the program of one device in shard_map, for arguments (federation, state, ...)."""
    places = jax.tree.map(lambda a: a.sharding.spec, arguments)
    return jax.shard_map(
        program,
        mesh=spec.mesh,
        in_specs=places,
        out_specs=(places[1], PartitionSpec()),
        check_vma=False,
    )


class Shards(NamedTuple):
    """Placement of clients on devices, and the layout of a run's arrays there."""

    mesh: Mesh
    bounds: NDArray[np.int64]
    """(D + 1,) first client of each device, and N."""
    offsets: NDArray[np.int64]
    """(N + 1,) offset of each client's records."""
    devices: NDArray[np.int64]
    """Indices of this process's devices among the D, consecutive."""
    block: int
    """Clients that a device runs at once."""
    slots: int
    """Members of a cohort that a device has room for."""
    alone: int
    """Block size on a single device; part of the run's fingerprint, which does not depend on the
    devices."""

    @property
    def own(self) -> slice:
        """Range of this process's clients."""
        return slice(int(self.bounds[self.devices[0]]), int(self.bounds[self.devices[-1] + 1]))

    @property
    def rows(self) -> int:
        """Rows of a shard: the largest number of clients on a device."""
        return int(np.diff(self.bounds).max())

    def spec(self, alone: Spec) -> Spec:
        """Return the spec for several devices, from that for one."""
        return alone._replace(block=self.block, everyone=False, mesh=self.mesh)

    def federation(self, host: Federation) -> Federation:
        """Copy a federation to the devices, renumbered within each shard."""
        dtype, begins = host.weights.dtype, self.offsets[self.bounds]
        clients, real = self._padded_rows(self.bounds)
        records, there = self._padded_rows(begins)

        def cast(a: Any) -> Any:
            return narrowed("the records", a, dtype)

        def some(tree: Any, places: NDArray[np.int64]) -> Any:
            return self.put(jax.tree.map(lambda a: cast(_take_rows(a, places)), tree), 0)

        each = host.noise is not None and host.noise.ndim == 3 and len(host.noise) > 1
        first = self.offsets[clients] - np.repeat(begins[self.devices], self.rows)
        weighed = host.record_weights is not None
        return Federation(
            records=some(host.records, records),
            first=self.put(first.astype(np.int32), 0),
            counts=some(host.counts, clients),
            steps=some(host.steps, clients),
            weights=self.put(host.weights[clients] * real.astype(dtype), 0),
            test=self.put(jax.tree.map(cast, host.test), None),
            noise=some(host.noise, clients) if each else self.put(host.noise, None),
            optimum=self.put(host.optimum, None),
            controls=some(host.controls, clients),
            optimal_loss=self.put(host.optimal_loss, None),
            record_weights=self.put(host.record_weights[records] * there.astype(dtype), 0)
            if weighed
            else None,
            who=self.put(clients.astype(np.int32), 0),
            evaluation={
                kind: [self._shard_batches(part, begins) for part in parts]
                for kind, parts in host.evaluation.items()
            },
            test_evaluation=self.put(host.test_evaluation, None),
            shares=None if host.shares is None else self.put(host.shares[clients] * real, 0),
            measured=tuple(self._shard_metric_data(data, begins) for data in host.measured),
            target=self.put(host.target, None),
        )

    def _shard_metric_data(self, data: Any, begins: NDArray[np.int64]) -> Any:
        """Copy the data of a user's metric.

        Replicated, but for the clients to measure, which are sharded.
        """
        if data.groups is None:
            return self.put(data, None)
        inside = begins if data.records is None else np.zeros_like(begins)
        groups = [self._shard_group(group, inside) for group in data.groups]
        return data._replace(
            records=self.put(data.records, None),
            groups=groups,
            weights=self.put(data.weights, None),
        )

    def _shard_group(self, group: Any, begins: NDArray[np.int64]) -> Any:
        """Distribute a group of clients to the devices that hold them, padded to equal length."""
        ghost = int(self.bounds[-1])
        real = group.client.ravel() < ghost
        client, first = (a.ravel()[real] for a in (group.client, group.first))
        device = np.searchsorted(self.bounds, client, side="right") - 1
        width = group.client.shape[1]
        rows = max(1, -(-int(np.bincount(device).max()) // width))
        tables = [
            np.full((len(self.devices), rows * width), filling, np.int32) for filling in (ghost, 0)
        ]
        for place, own in enumerate(self.devices.tolist()):
            here = device == own
            tables[0][place, : here.sum()] = client[here]
            tables[1][place, : here.sum()] = first[here] - begins[own]
        laid = [self.put(table.reshape(-1, width), 0) for table in tables]
        return group._replace(client=laid[0], first=laid[1], place=self.put(group.place, None))

    def _shard_batches(self, batches: Batches, begins: NDArray[np.int64]) -> Batches:
        """Distribute evaluation batches to the devices that hold their records, padded likewise."""
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
        return Batches(
            laid(within, 0), laid(count, 1), laid(share, 0), self.put(batches.place, None)
        )

    def state(self, host: State) -> State:
        """Copy a state with the rows of this process's clients to the devices."""
        clients, _ = self._padded_rows(self.bounds)
        here = clients - self.own.start

        def place(name: str, leaf: Any) -> Any:
            if name not in OF_CLIENTS:
                return self.put(leaf, None)
            return self.put(jax.tree.map(lambda a: _take_rows(a, here), leaf), 0)

        return State(*(place(name, leaf) for name, leaf in host._asdict().items()))

    def collect(self, state: State) -> State:
        """Copy a state to the host, with the rows of this process's clients."""
        _, real = self._padded_rows(self.bounds)

        def rows(a: Any) -> Any:
            here = sorted(a.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            pieces = [np.asarray(shard.data) for shard in here]
            return _take_rows(
                pieces[0] if len(pieces) == 1 else np.concatenate(pieces), np.flatnonzero(real)
            )

        def same(a: Any) -> Any:
            return np.asarray(a.addressable_data(0))

        fields = state._asdict().items()
        return State(
            *(jax.tree.map(rows if name in OF_CLIENTS else same, leaf) for name, leaf in fields)
        )

    def draws(self, drawn: Draws) -> Draws:
        """Distribute draws: each device gets its members of the cohorts, and their records."""
        room, slots = len(drawn.cohort), len(self.devices) * self.slots
        cohort = np.full((room, slots), self.rows, np.int32)
        dealt = [
            (np.zeros((room, slots, *a.shape[2:]), a.dtype), a) for a in drawn[1:3] if a is not None
        ]
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
        shared = self.put((drawn.steps, drawn.lr, drawn.key), None)
        return Draws(self.put(cohort, 1), rows, weights, *shared)

    def put(self, tree: Any, axis: int | None) -> Any:
        """Copy arrays to the devices.

        Split along `axis` over this process's devices, or replicated if None.
        """
        own = self.mesh.devices[self.devices].tolist()

        def leaf(a: Any) -> Any:
            whole = np.asarray(a)
            pieces = [whole] * len(own) if axis is None else np.split(whole, len(own), axis)
            place = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
            shape = list(pieces[0].shape)
            if axis is not None:
                shape[axis] *= self.mesh.size
            placed = [
                jax.device_put(piece, to, may_alias=False)
                for piece, to in zip(pieces, own, strict=True)
            ]
            return jax.make_array_from_single_device_arrays(
                tuple(shape), NamedSharding(self.mesh, place), placed
            )

        with jax.enable_x64(True):
            return jax.tree.map(leaf, tree)

    def total(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of a float64 vector over all processes."""
        if jax.process_count() == 1:
            return vector
        pieces = np.zeros((len(self.devices), len(vector)))
        pieces[0] = vector
        with jax.enable_x64(True):
            summed = jax.jit(
                lambda a: a.sum(axis=0), out_shardings=NamedSharding(self.mesh, PartitionSpec())
            )
            return np.array(summed(self.put(pieces, 0)).addressable_data(0))

    def _padded_rows(self, edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows of each device here, padded to equal length, and which are real."""
        at = edges[self.devices, None] + np.arange(np.diff(edges).max())
        end = edges[self.devices + 1, None]
        return np.minimum(at, end - 1).ravel(), (at < end).ravel()


def _take_rows(a: Any, places: NDArray[np.int64]) -> Any:
    """Return rows of an array by ascending indices; a view if they are contiguous."""
    first, last = int(places[0]), int(places[-1])
    return (
        a[first : last + 1]
        if last - first + 1 == len(places) and (np.diff(places) == 1).all()
        else a[places]
    )


def make_shards(config: RunConfig, size: int, footprint: int, alone: int) -> Shards:
    """Split a problem's clients into ranges, one per device, as evenly as possible."""
    number = checks.whole("devices", config.devices)
    problem = config.problem
    every = np.array(jax.devices())
    if number > problem.num_clients:
        raise InputError(
            f"devices must be at most as many as clients, {problem.num_clients}, got {number}"
        )
    if number > len(every):
        raise InputError(
            f"devices={number}, but JAX has {len(every)}: jax.config.update('jax_num_cpu_devices', "
            f"{number}) before "
            "JAX starts, or --devices on the command line"
        )
    if jax.process_count() > 1 and number < len(every):
        raise InputError(
            f"on several processes devices must be all that they have, {len(every)}, got {number}"
        )
    if config.client_state != "array":
        raise InputError(
            f"client_state={config.client_state!r} reads its rows for one device: with devices "
            "keep 'array', whose "
            "rows are spread over them"
        )
    bounds = np.arange(number + 1) * problem.num_clients // number
    rows, share = int(np.diff(bounds).max()), -(-size // number)
    block = alone if config.block is not None else resolve.block(config, share, footprint)
    if config.block is None and size < problem.num_clients:
        block = min(block, -(-share // EVENLY))
    most = min(size, rows)
    block = min(block, most)
    mine = [
        j for j, device in enumerate(every[:number]) if device.process_index == jax.process_index()
    ]
    return Shards(
        Mesh(every[:number], (AXIS,)),
        bounds,
        problem.offsets,
        np.array(mine),
        block,
        -(-most // block) * block,
        alone,
    )
