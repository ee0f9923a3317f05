"""`simulate`: run a federated algorithm on a problem, and what comes out of it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.brief import brief
from fedscaffold.checks import InputError
from fedscaffold.metrics import met
from fedscaffold.problems.problem import Problem, weights_of
from fedscaffold.simulation.aging import ages, faded
from fedscaffold.simulation.away import Away, clients_of, settled
from fedscaffold.simulation.checkpoint import Checkpoint, listening
from fedscaffold.simulation.compression import Compressor
from fedscaffold.simulation.engine import Seconds, drive
from fedscaffold.simulation.evaluation_batches import describe
from fedscaffold.simulation.follow import Follow, Follower
from fedscaffold.simulation.health import Watch, exact_mean, fault, level, residual_of
from fedscaffold.simulation.hosts import agree_on, most, several, together, tried
from fedscaffold.simulation.identity import facts
from fedscaffold.simulation.setup import Ready, Request, prepare
from fedscaffold.simulation.spec import Settings, State
from fedscaffold.simulation.stale import Policy
from fedscaffold.simulation.traffic import traffic
from fedscaffold.state.files import owned

__all__ = ["Clients", "Run", "Server", "simulate"]


class Server(NamedTuple):
    """What the server keeps between rounds."""

    def __repr__(self) -> str:
        return brief(self)

    x: NDArray[Any]
    c: NDArray[Any] | None
    """In double precision where it is the mean of the c_i; clients are sent it in the run's."""


class Clients(NamedTuple):
    """What the clients keep between rounds, one row each."""

    def __repr__(self) -> str:
        return brief(self)

    c_i: NDArray[Any] | None
    age: NDArray[Any] | None
    """(N,) rounds since each was last heard, where that is kept: with the metric `age` or a policy for stale c_i."""
    who: NDArray[Any] | None = None
    """The clients' numbers, where only this process's own are here: a run on several processes."""


class Run(NamedTuple):
    """What came out of a run; all fields are always there."""

    def __repr__(self) -> str:
        last = {name: column[-1] for name, column in self.history.items() if name != "round"} if self.rounds else {}
        said = [f"{self.rounds} rounds", f"d = {self.vector.size}"]
        said += [f"{name} {value:.4g}" for name, value in last.items() if not name.startswith("bytes")]
        said += [] if self.reached_at is None else [f"target reached in round {self.reached_at}"]
        said += [] if self.diverged_at is None else [f"diverged in round {self.diverged_at}"]
        said += [] if self.fault is None else ["FAULT"]
        return f"Run({', '.join(said)})"

    x: Any
    """The model, in the user's own structure."""
    vector: NDArray[Any]
    """The model as a flat vector."""
    server: Server
    clients: Clients
    history: dict[str, NDArray[Any]]
    """Columns by round: `round`, the metrics asked for, `residual`, `bytes_up`, `bytes_down`."""
    rounds: int
    """Rounds run."""
    reached_at: int | None
    """The round at which `stop_at` was reached."""
    diverged_at: int | None
    """The first round with a value that is not finite."""
    advice: str | None
    """What to do about a divergence."""
    residual: float
    """|c - sum p_i c_i| at the end, from all the c_i."""
    scale: float
    """The largest root mean square of |c_i| in any round."""
    explained: float
    """What rounding explains of the residual: more is a permanent bias."""
    seconds: Seconds
    digest: str
    """Fingerprint of the model's bits: equal digests, equal models."""
    fault: str | None
    """What is wrong with the state, if the residual is more than rounding explains."""
    measured: dict[str, str]
    """On what each metric was measured that looks at records: record by record, or on which batches."""


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    local_steps: int | Sequence[int] | NDArray[Any] | None = None,
    local_epochs: int | None = None,
    lr: float | Callable[[int], float] | None = None,
    cohort: float | int = 1.0,
    cohorts: Sequence[Sequence[int]] | None = None,
    batch_size: float | int | None = None,
    draw: str = "auto",
    weights: str | ArrayLike = "equal",
    local_optimizer: Any = None,
    x0: Any = None,
    seed: int = 0,
    stop_at: str | tuple[str, float] | Mapping[str, float] | None = None,
    metrics: Sequence[str] | None = None,
    evaluate_every: int = 1,
    precision: str = "float32",
    block: int | None = None,
    availability: ArrayLike | None = None,
    server_optimizer: Any = None,
    stale: str | Policy = "keep",
    compression: str | Compressor | None = None,
    client_state: str = "array",
    checkpoint: Path | str | None = None,
    every: int | None = None,
    progress: bool | None = None,
    follow: Follow | None = None,
    devices: int | None = None,
) -> Run:
    """Simulate a federation: `rounds` rounds of `algorithm` on `problem`.

    Args:
        algorithm: what is computed, such as `fs.scaffold()`.
        problem: what is minimised.
        rounds: communication rounds at most.
        local_steps: steps a client takes in a round: one number, or one for each client.
        local_epochs: instead of steps, passes over the client's own records, in a fresh order each.
        lr: local step size, or a schedule over the local steps of a round (k -> step size).
        cohort: who takes part in a round, drawn uniformly without replacement: a share (float) or a number (int).
        cohorts: instead, the user's own list of client indices for each round; sizes may differ.
        batch_size: records in a batch: a number (int), a share of the client's own (float), or None for all.
        draw: "replacement", "shuffle" (epoch by epoch), or "auto": shuffled for epochs, replaced for steps.
        weights: the p_i of the objective sum p_i f_i: "equal", "records", or one number for each client.
        local_optimizer: an optax transformation with its own step size, given instead of `lr`; fresh every round.
        x0: starting model, in the problem's structure or flat; the problem's own unless given.
        seed: of cohorts, batches and gradient noise. Same seed and settings, same bits.
        stop_at: end the run once a metric reaches a target: ("accuracy", 0.9).
        metrics: columns to measure, see `fedscaffold.metrics`; measured every `evaluate_every` rounds.
        evaluate_every: rounds between two measurements; rounds between hold NaN.
        precision: "float32" or "float64".
        block: clients run at once; by default as many as fit the cache.
        availability: who can be reached: rows of zeros and ones, one for each round, over and over; cohorts are drawn
            among those who can.
        server_optimizer: an optax transformation of the server's step, such as `optax.sgd(1.0, momentum=0.9)`.
        stale: what becomes of old control variates: "keep", "decay:0.9", "drop:20", "refresh:5" (see `fs.stale`).
        compression: of what clients send: "top_k:0.1", "random_k:0.1", "quantise:4" (see `fs.compression`).
        client_state: where the clients' control variates are: "array" (in memory, all N), "sparse" (in memory, those of
            clients ever heard), "file" (in the checkpoint folder), or "auto" by size; all but the first see only the
            cohort of a round, records included (see docs/resume.md).
        checkpoint: a folder to keep the whole state in. A run that was ended, however, goes on there when it is asked
            for again, with the same bits; SIGINT and SIGTERM end it with a checkpoint (see docs/resume.md).
        every: rounds between two checkpoints; by default by the clock, at some 2 % of the time at most.
        progress: show a line with the time left; by default on a terminal only.
        follow: a function that is told what is known after every stretch of rounds (see `simulation.Stretch`); where it
            returns True, the run ends as by Ctrl-C.
        devices: how many of JAX's devices share the clients out among them, those of all processes together; what
            comes out agrees with the run on one device to rounding (see docs/scale.md).

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, seed=0)
    >>> run = fs.simulate(fs.scaffold(), problem, rounds=200, local_steps=5, lr=0.5, cohort=0.4, precision="float64")
    >>> bool(run.history["distance"][-1] < 1e-8), run.diverged_at
    (True, None)
    """
    request = Request(
        algorithm, problem, rounds, local_steps, local_epochs, lr, cohort, cohorts, batch_size, draw, weights,
        local_optimizer, x0, stop_at, metrics, precision, block, availability, server_optimizer, stale, compression,
        (checks.whole("seed", seed, at_least=0, at_most=2**63 - 1),),
    )  # fmt: skip
    measured = checks.whole("evaluate_every", evaluate_every)
    if every is not None and checkpoint is None:
        raise InputError("every says how often to write a checkpoint: give its folder, checkpoint=...")
    shared = None if devices is None or checks.whole("devices", devices) == 1 else devices
    request = settled(request, client_state)._replace(devices=shared)
    with jax.enable_x64(precision == "float64"), ExitStack() as stack:
        ready = prepare(request)
        settings = Settings(ready.lr, noise_key(seed), np.array(ready.target, precision))
        keeper = away = None
        if checkpoint is not None or several(ready):
            own = facts(request, ready, measured)
        if several(ready):
            agree_on(own | {"rounds": rounds, "every": every, "checkpoint": checkpoint is not None})
            stack.enter_context(together())
        if checkpoint is not None:
            _take(Path(checkpoint), stack, ready)
        if request.client_state != "array":
            away = clients_of(request, ready, seed, checkpoint)
            stack.callback(away.store.close)
        watch = Watch(partial(_fault, request, ready, away), lambda due: most(due)[0] if several(ready) else due)
        if checkpoint is not None:
            signals = stack.enter_context(listening())
            keeper = Checkpoint(checkpoint, every, own, rounds, watch, signals, away, ready.shards)
        follower = None if follow is None else Follower(request, ready, seed, follow, keeper)
        line = progress_line(progress, rounds)
        watched = watch if ready.spec.keeps else None
        outcome = drive(ready, settings, [seed], rounds, measured, None, line, keeper, away, follower, watched)
        run = finished(request, ready, seed, outcome.state, outcome.table, outcome.seconds, away)
        return run if watch.found is None else run._replace(fault=watch.found)


def _take(folder: Path, stack: ExitStack, ready: Ready) -> None:
    """Own the checkpoint folder as long as the run lasts; of several processes the first does, for all."""
    if not several(ready):
        stack.enter_context(owned(folder))
        return
    first = jax.process_index() == 0
    tried(lambda: stack.enter_context(owned(folder)) if first else None)


def noise_key(seed: int) -> NDArray[np.uint32]:
    """The raw random key of the gradient noise: the seed's two halves."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def finished(
    request: Request,
    ready: Ready,
    seed: int,
    state: State,
    table: NDArray[Any],
    seconds: Seconds,
    away: Away | None = None,
) -> Run:
    """Gather a run's outcome, cut off at the round where it ended."""
    done = int(state.round)
    history = {"round": np.arange(1, done + 1)}
    history |= {name: table[:done, j] for j, name in enumerate(ready.spec.metrics)}
    history |= traffic(request, ready, seed, 0, done)
    ended = bool(state.done)
    stop = ready.spec.stop
    reached = ended and stop is not None and bool(met(stop, history[stop][-1], ready.target))
    diverged = done if ended and not reached else None
    if away is not None:
        state, mean = state._replace(c_i=None, heard_at=away.heard_at), away.mean(done)
    else:
        mean = _mean(request, ready, state)
    clients = request.problem.num_clients
    c_i = None if state.c_i is None else faded(ready.spec, state, state.c_i).astype(state.c_i.dtype, copy=False)
    return Run(
        ready.spec.layout.unflatten(state.x),
        state.x,
        Server(state.x, state.c),
        Clients(c_i, None if state.heard_at is None else ages(state), _here(ready)),
        history,
        done,
        done if reached else None,
        diverged,
        None if diverged is None else _advice(request, ready, diverged),
        residual_of(state, mean),
        float(state.scale),
        level(state, clients),
        seconds,
        hashlib.sha256(np.ascontiguousarray(state.x).tobytes()).hexdigest()[:16],
        fault(state, mean, clients),
        describe(request.problem, ready.spec),
    )


def _mean(request: Request, ready: Ready, state: State) -> NDArray[Any] | None:
    if state.c_i is None:
        return None
    p = weights_of(request.problem, request.weights)
    if ready.shards is None:
        return exact_mean(ready.spec, state, p)
    return ready.shards.total(exact_mean(ready.spec, state, p[ready.shards.own]))


def _here(ready: Ready) -> NDArray[Any] | None:
    """The clients of this process, where there are others."""
    return np.arange(ready.drawer.num_clients)[ready.shards.own] if several(ready) and ready.shards else None


def _fault(request: Request, ready: Ready, away: Away | None, state: State) -> str | None:
    """What is wrong with a state, from the c_i as they are stored."""
    on_devices = ready.shards is not None and isinstance(state.x, jax.Array)
    state = ready.shards.collected(state) if on_devices and ready.shards else jax.tree.map(np.asarray, state)
    mean = _mean(request, ready, state) if away is None else away.mean(int(state.round))
    return fault(state, mean, request.problem.num_clients)


def _advice(request: Request, ready: Ready, at: int) -> str:
    what = f"diverged at round {at}"
    smoothness = request.problem.smoothness
    if request.local_optimizer is not None or callable(request.lr):
        return f"{what}: take smaller local steps"
    if smoothness is None:
        return f"{what} with lr {request.lr:g}: try a tenth of it, or fewer local steps"
    limit = 2 / smoothness
    if float(ready.lr.max()) >= limit:
        why = f"lr {request.lr:g} is above 2/L = {limit:.3g}, where even one client alone diverges"
        return f"{what}: {why}; try {1 / smoothness:.3g}"
    return f"{what}: lr {request.lr:g} is below 2/L = {limit:.3g}; take fewer local steps or a smaller server_lr"


def progress_line(wanted: bool | None, rounds: int) -> Callable[[int], None]:
    """Return what shows how far the run is, and the time left; nothing unless on a terminal or asked for."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        return lambda done: None
    began = time.perf_counter()

    def tell(done: int) -> None:
        left = (time.perf_counter() - began) * (rounds - done) / done
        end = "\n" if done == rounds else ""
        sys.stderr.write(f"\rround {done}/{rounds}, about {left:.0f} s left \x1b[K{end}")
        sys.stderr.flush()

    return tell
