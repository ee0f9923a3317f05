"""`Simulator`, which runs a federation round by round or to the end, and `simulate`."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm
from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.problems.problem import Problem
from fedscaffold.run_config import MOST, RunConfig, refuse_arguments, takes
from fedscaffold.simulation.callbacks import Observers
from fedscaffold.simulation.checkpoint import Checkpoint, Progress, catch_signals
from fedscaffold.simulation.distributed import (
    check_same_run,
    detect_lost_processes,
    run_everywhere,
)
from fedscaffold.simulation.engine import Engine, Seconds, compile_rounds, run_rounds
from fedscaffold.simulation.fingerprint import facts
from fedscaffold.simulation.forecast import Forecast
from fedscaffold.simulation.invariants import InvariantMonitor, find_fault
from fedscaffold.simulation.out_of_core import OutOfCoreClients, open_clients, resolve_client_state
from fedscaffold.simulation.program import PreparedRun, prepare
from fedscaffold.simulation.result import Run, finish, history_of
from fedscaffold.simulation.spec import State
from fedscaffold.simulation.spending import Account, open_account, within_budget
from fedscaffold.state.files import owned

__all__ = ["Simulator", "simulate"]


class Simulator:
    """Simulator of a federation: `run` runs all rounds, `init` and `step` some at a time.

    Both ways give bit-identical results. States are immutable: `step` returns a new state and does
    not modify its argument, so a run can continue from any earlier state, or, unless it is private,
    from a modified one
    (`state._replace(server=state.server._replace(x=...))`). `state.server` is the algorithm's
    server record, in which `x` is the model as a flat vector; `state.memory` and `state.own` are
    the clients' records, each field an array with one row per client.

    Args:
        algorithm: The algorithm to run, such as `fs.scaffold()`.
        problem: The problem to minimise.
        **arguments: The keyword arguments of `simulate`.

    Raises:
        InputError: An argument is invalid, or two arguments are incompatible.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, seed=0)
    >>> simulator = fs.Simulator(fs.scaffold(), problem, local_steps=5, lr=0.5, cohort=0.4)
    >>> state = simulator.init()
    >>> while int(state.round) < 100:
    ...     state, rows = simulator.step(state, rounds=10)
    >>> sorted(rows)
    ['bytes_down', 'bytes_up', 'distance', 'loss', 'residual', 'round']
    >>> rows["round"].tolist()
    [91, 92, 93, 94, 95, 96, 97, 98, 99, 100]
    """

    def __init__(self, algorithm: Algorithm, problem: Problem, **arguments: Any) -> None:
        refuse_arguments("Simulator", arguments)
        self.config = RunConfig(algorithm, problem, **arguments)
        if self.config.client_state != "array":
            self.config = resolve_client_state(self.config)
        with jax.enable_x64(self.config.precision == "float64"):
            self.ready = prepare(self.config)

    @classmethod
    def of(cls, config: RunConfig) -> Simulator:
        """Return the simulator of a `RunConfig`."""
        return cls(**{one.name: getattr(config, one.name) for one in fields(config)})

    def init(self) -> State:
        """Return the state before the first round."""
        return self._engine.place(self.ready.start)

    def step(self, state: State, rounds: int = 1) -> tuple[State, dict[str, NDArray[Any]]]:
        """Run the next rounds.

        Args:
            state: The state to continue from; it is not modified.
            rounds: Number of rounds to run. One call with many rounds is faster than many calls.

        Returns:
            The new state, and the metrics of these rounds as columns, as in `run.history`. A run
            that diverges, reaches its target or has spent its privacy budget ends at that round;
            later calls return no rows.

        Raises:
            InputError: The state is not one of this simulator, `cohorts` does not cover the rounds
                asked for, or a private run would draw the same noise at another state.
        """
        state = self._check_state(state)
        self._refuse_second_use_of_noise(state)
        done = int(state.round)
        stop = done + checks.whole("rounds", rounds)
        self._refuse_rounds(done, stop)
        if self.ready.budget is not None:
            stop = min(stop, max(done, self.ready.budget.limit(stop)))
        tables, at = [np.zeros((0, len(self.ready.spec.metrics)), self.config.precision)], done
        heard_at = None if state.heard_at is None else np.array(state.heard_at, np.int64)
        with jax.enable_x64(self.config.precision == "float64"):
            state = self._engine.place(state)
            while at < stop and not bool(state.done):
                number = min(stop - at, self._engine.until(at))
                state, table = self._engine.advance(state, at, number)
                tables.append(table)
                at += number
        if self.ready.budget is not None:
            self._known.add(_digest(self._check_state(state)))
        stop = int(state.round)
        rows = np.concatenate(tables)
        return state, history_of(self.config, self.ready, rows, done, stop, heard_at)

    def _check_state(self, state: State) -> State:
        """Return a state with the types of this simulator's.

        Raise an InputError if it has other shapes.
        """
        start = self.ready.start
        structure: Any = jax.tree.structure(state)
        if structure != jax.tree.structure(start) or any(
            np.shape(a) != np.shape(b)
            for a, b in zip(*map(jax.tree.leaves, (state, start)), strict=True)
        ):
            raise InputError("state must be one of this simulator, from init() or step()")
        typed: State = jax.tree.map(lambda a, b: np.asarray(a, np.asarray(b).dtype), state, start)
        return typed

    def _refuse_second_use_of_noise(self, state: State) -> None:
        """Raise an InputError if a private run would draw the noise of a round for another state.

        From the states that `init` and `step` return, rounds that are run again give the same.
        """
        if self.ready.budget is None:
            return
        if self.config.checkpoint is not None:
            raise InputError(
                "a ledger is charged by run(), not by step(): with privacy and step() "
                "give no checkpoint"
            )
        if _digest(state) not in self._known:
            raise InputError(
                "with privacy a state must be as init() or step() of this simulator returned it: "
                "from another one a round would draw the same noise, which cancels in differences"
            )

    @cached_property
    def _known(self) -> set[bytes]:
        """Digests of the states of a private run that rounds may start from."""
        return {_digest(self._check_state(self.ready.start))}

    @property
    def size(self) -> Forecast:
        """Parameters of the model, and the memory that the run takes.

        >>> import fedscaffold as fs
        >>> problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, seed=0)
        >>> print(fs.Simulator(fs.scaffold(), problem, local_steps=5, lr=0.5).size)
        3 parameters; memory ...
        """
        return self.ready.size

    def params(self, state: State) -> Any:
        """Return the model of a state, with the pytree structure of the problem's params."""
        return self.ready.spec.layout.unflatten(np.asarray(state.x))

    def result(self, state: State, rows: dict[str, NDArray[Any]]) -> Run:
        """Return the `Run` that ends at this state.

        Args:
            state: A state returned by `step`.
            rows: Metrics of the last rounds, as returned by `step`; earlier rounds are filled with
                NaN.
        """
        done = int(state.round)
        table = np.full((done, len(self.ready.spec.metrics)), np.nan, self.config.precision)
        for j, name in enumerate(self.ready.spec.metrics):
            table[done - len(rows[name]) :, j] = rows[name]
        return finish(
            self.config, self.ready, jax.tree.map(np.asarray, state), table, Seconds(0.0, 0.0, 0.0)
        )

    def run(self) -> Run:
        """Run all rounds, resuming from the checkpoint if there is one.

        Raises:
            Interrupted: A signal ended the run; a checkpoint was written first.
            StateError: The state or a checkpoint is damaged or violates an invariant.
        """
        config, ready, away, checkpoint, account = self.config, self.ready, None, None, None
        with jax.enable_x64(self.config.precision == "float64"), ExitStack() as stack:
            if config.checkpoint is not None or ready.several:
                identity = _claim(config, ready, stack)
            if (budget := ready.budget) is not None:
                if config.checkpoint is not None:
                    account = open_account(Path(config.checkpoint), budget, identity)
                    budget = account.budget
                ready = ready._replace(budget=budget)
                config = within_budget(config, budget, account)
            if config.client_state != "array":
                away = open_clients(config, ready)
                stack.callback(away.store.close)
            monitor = InvariantMonitor(partial(find_fault, config, ready, away), ready.several)
            if config.checkpoint is not None:
                checkpoint = Checkpoint(
                    folder=Path(config.checkpoint),
                    every=config.every,
                    identity=identity,
                    rounds=config.rounds,
                    monitor=monitor,
                    signals=stack.enter_context(catch_signals()),
                    away=away,
                    shards=ready.shards,
                    ledger=None if account is None else account.ledger,
                )
            observers = Observers(config, ready, monitor, checkpoint)
            now, seconds = self._run(config, observers, checkpoint, away, account)
            run = finish(config, ready, now.state, np.concatenate(now.table), seconds, away)
            if run.outcome == "finished" and config.rounds < self.config.rounds:
                run = run._replace(outcome="budget")
            if account is not None:
                run = run._replace(privacy=account.spent(run.rounds))
            run = run if monitor.found is None else run._replace(fault=monitor.found)
            observers.end(run)
            return run

    def _run(
        self,
        config: RunConfig,
        observers: Observers,
        checkpoint: Checkpoint | None,
        away: OutOfCoreClients | None,
        account: Account | None,
    ) -> tuple[Progress, Seconds]:
        """Compile and run the remaining rounds.

        The returned progress holds the state on the host.
        """
        ready = self.ready
        began = time.perf_counter()
        now = Progress(ready.start, [], 0) if checkpoint is None else checkpoint.begin(ready.start)
        if now.done >= config.rounds or bool(now.state.done):  # the checkpoint is of a finished run
            observers.begin(now, time.perf_counter() - began)
            return now, Seconds(time.perf_counter() - began, 0.0, 0.0)
        engine = compile_rounds(ready, [config.seed], config.evaluate_every, away=away)
        now = now._replace(state=engine.place(now.state))
        compiled, cpu = time.perf_counter(), time.process_time()
        observers.begin(now, compiled - began)
        if observers.callbacks:
            engine = engine._replace(draw=observers.time_draws(engine.draw))
        if account is not None:
            engine = engine._replace(charge=account.charge)
        now = run_rounds(engine, now, config.rounds, observers)
        seconds = Seconds(
            compiled - began, time.perf_counter() - compiled, time.process_time() - cpu
        )
        return now._replace(state=engine.collect(now.state)), seconds

    @cached_property
    def _engine(self) -> Engine:
        """Compiled program of `step`."""
        config = self.config
        if config.client_state != "array" or self.ready.shards is not None:
            what = "devices" if self.ready.shards is not None else "client_state"
            raise InputError(
                f"{what} is for run(): step() keeps its clients in memory, on one device"
            )
        with jax.enable_x64(self.config.precision == "float64"):
            return compile_rounds(self.ready, [config.seed], config.evaluate_every)

    def _refuse_rounds(self, done: int, stop: int) -> None:
        most_rounds = MOST
        if self.config.cohorts is not None or work_of(self.config.algorithm, 1).geometric:
            most_rounds = (
                self.config.rounds
            )  # cohorts, or geometric step counts, exist for these rounds only
        if stop > most_rounds:
            raise InputError(
                f"the simulator was made for {most_rounds} rounds and {done} are done: "
                f"at most {most_rounds - done} more, got {stop - done}; make it with rounds={stop}"
            )


@takes(RunConfig)
def simulate(algorithm: Algorithm, problem: Problem, **arguments: Any) -> Run:  # noqa: D417
    """Simulate a federation: run rounds of `algorithm` on `problem`.

    Args:
        algorithm: The algorithm to run, such as `fs.scaffold()`.
        problem: The problem to minimise.
        ARGUMENTS

    Returns:
        The model, the history by round, and how the run ended.

    Raises:
        InputError: An argument is invalid, or two arguments are incompatible.
        Interrupted: A signal ended a run that has a checkpoint.

    >>> import fedscaffold as fs
    >>> problem = fs.problems.quadratic(num_clients=5, dim=3, mu=0.1, seed=0)
    >>> run = fs.simulate(
    ...     fs.scaffold(), problem, rounds=200, local_steps=5, lr=0.5, cohort=0.4,
    ...     precision="float64",
    ... )
    >>> bool(run.history["distance"][-1] < 1e-8), run.diverged_at
    (True, None)
    """
    return Simulator(algorithm, problem, **arguments).run()


def _digest(state: State) -> bytes:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.digest()


def _claim(config: RunConfig, ready: PreparedRun, stack: ExitStack) -> dict[str, Any]:
    """Lock the checkpoint folder until `stack` is closed, and return the run's fingerprint.

    With several processes, check that all run the same, end the run if one of them is lost, and let
    process 0 hold the lock.
    """
    identity, folder = facts(config, ready), config.checkpoint
    if not ready.several:
        stack.enter_context(owned(Path(str(folder))))
        return identity
    agreed = {"rounds": config.rounds, "every": config.every, "checkpoint": folder is not None}
    check_same_run(identity | agreed)
    stack.enter_context(detect_lost_processes())
    if folder is not None:
        first, path = jax.process_index() == 0, Path(folder)
        run_everywhere(lambda: stack.enter_context(owned(path)) if first else None)
    return identity
