"""Checkpoints: atomic commits of a run's state, from which it resumes bit-identically.

A commit holds the state, the metrics of the rounds so far, and a fingerprint of the run. Every
round has its own random streams, so no generator state is needed. On SIGINT or SIGTERM the run
finishes the current chunk of rounds, commits and raises `Interrupted`.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.parsing import format_of
from fedscaffold.privacy.ledger import Ledger
from fedscaffold.simulation import sharded_checkpoint
from fedscaffold.simulation.distributed import allreduce_max, run_everywhere
from fedscaffold.simulation.fingerprint import differences
from fedscaffold.simulation.invariants import InvariantMonitor
from fedscaffold.simulation.out_of_core import OutOfCoreClients
from fedscaffold.simulation.sharding import OF_CLIENTS, Shards
from fedscaffold.simulation.spec import State
from fedscaffold.state import Snapshot, StateError, commit, latest
from fedscaffold.state.commit import generations

__all__ = [
    "Checkpoint",
    "Interrupted",
    "Progress",
    "StateWarning",
    "catch_signals",
    "discard",
    "last_round",
    "unfinished",
]

FORMAT = 2  # version 0.1.0 wrote format 1, which has a fixed state and no format field
SECONDS = 20.0  # least time between two commits if `every` is None
SHARE = 50.0  # commits take at most 1 / SHARE of the time
METRICS = "metrics"
ROWS = tuple(f"state.{name}" for name in OF_CLIENTS)


class StateWarning(UserWarning):
    """A damaged checkpoint was skipped and an older one is used."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after a commit; run again with the same folder to resume."""

    def __init__(self, number: int, round: int, folder: Path) -> None:
        super().__init__(
            f"{signal.Signals(number).name} after round {round}; the checkpoint in {folder} has it "
            "all"
        )
        self.signal, self.round, self.folder = number, round, folder


class Progress(NamedTuple):
    """Progress of a run: state, tables of metrics, and number of rounds done."""

    state: State
    table: list[NDArray[Any]]
    done: int


class Checkpoint:
    """Checkpoints of a run in `folder`, every `every` rounds.

    By default time-based, with at most 2 % overhead.
    """

    def __init__(
        self,
        folder: Path,
        every: int | None,
        identity: dict[str, Any],
        rounds: int,
        monitor: InvariantMonitor,
        signals: list[int],
        away: OutOfCoreClients | None = None,
        shards: Shards | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.folder, self.every, self.ledger = folder, every, ledger
        self.identity, self.rounds, self.monitor, self.signals = identity, rounds, monitor, signals
        self.away, self.shards = away, shards
        self.shared = shards is not None and jax.process_count() > 1
        self.own = slice(0, identity["problem.num_clients"]) if shards is None else shards.own
        self.generation: int | None = None
        self.named: list[list[str]] = []
        self.at = time.perf_counter()
        self.pause, self.spent = SECONDS, 0.0

    def begin(self, start: State) -> Progress:
        """Return the progress of the newest intact checkpoint.

        Without one, commit and return the initial state.
        """
        snapshot = self.load_latest()
        if snapshot is None:
            begun = Progress(start, [], 0)
            self.save(begun)
            return begun
        for sentence in snapshot.warnings:
            warnings.warn(sentence, StateWarning, stacklevel=2)
        self.generation, self.named = (
            snapshot.generation,
            [sharded_checkpoint.names(snapshot.facts)],
        )
        found = load_progress(snapshot, self.committed(start))
        if self.away is not None:
            found = found._replace(
                state=found.state._replace(
                    memory=start.memory, own=start.own, heard_at=start.heard_at
                )
            )
        if (done := int(found.state.round)) > self.rounds:
            raise InputError(
                f"the checkpoint in {self.folder} is after round {done}; "
                f"rounds must be at least as many, got {self.rounds}"
            )
        self.refuse_faults(found.state)
        return found

    def load_latest(self) -> Snapshot | None:
        """Return the newest intact snapshot.

        With several processes, the newest that all of them can read.
        """
        if not self.shared:
            return latest(self.folder, accept=self.accept)
        found: dict[int, Snapshot | None] = {}

        def look(limit: int | None) -> int:
            snapshot = latest(self.folder, accept=partial(self.accept, limit=limit))
            generation = 0 if snapshot is None else snapshot.generation
            found[generation] = snapshot
            return generation

        seen = run_everywhere(partial(look, None))
        while len(set(seen)) > 1:
            if 0 in seen:
                raise InputError(
                    f"{self.folder} must be the same for all: process {seen.index(0)} finds it "
                    "empty"
                )
            found.clear()
            seen = run_everywhere(partial(look, min(seen)))
        return found[seen[0]]

    def accept(self, snapshot: Snapshot, limit: int | None = None) -> None:
        """Check that a snapshot is of this run, and load the rows of this process's clients.

        Raises:
            InputError: The snapshot is of another run or of an unsupported format.
            StateError: The snapshot is damaged; an older one may be used.
        """
        if limit is not None and snapshot.generation > limit:
            raise StateError(f"generation {snapshot.generation} is not whole for another process")
        if (
            format_of(snapshot.facts.get("format"), FORMAT, f"the checkpoint in {self.folder}")
            < FORMAT
        ):
            raise InputError(
                f"the checkpoint in {self.folder} is of fedscaffold 0.1.0, whose state this "
                "version cannot continue: "
                "finish the run with 0.1.0, or start anew with --fresh or in another folder"
            )
        changed = differences(snapshot.facts.get("run", {}), self.identity)
        if changed is not None:
            raise InputError(
                f"the checkpoint in {self.folder} is of another run ({changed}); "
                "ask for the same, or take another folder"
            )
        if self.ledger is not None:
            refuse_other_ledger(self.ledger, snapshot)
        if self.away is not None:
            self.away.restore(snapshot.arrays)
        if listed := sharded_checkpoint.names(snapshot.facts):
            snapshot.arrays.update(sharded_checkpoint.read(self.folder, listed, self.own))
        elif self.shards is not None:
            snapshot.arrays.update(
                {name: a[self.own] for name, a in snapshot.arrays.items() if name.startswith(ROWS)}
            )

    def committed(self, state: State) -> State:
        """Return the state without what the store of out-of-core clients holds."""
        return state if self.away is None else state._replace(memory=None, own=None, heard_at=None)

    def until(self, done: int) -> int:
        """Return the number of rounds to run before the next commit."""
        return self.rounds if self.every is None else self.every - done % self.every

    def after(self, progress: Progress, stopped: bool = False) -> None:
        """Commit if one is due or the run ends here; raise Interrupted after a signal."""
        ended = progress.done >= self.rounds or bool(progress.state.done)
        waited = time.perf_counter() - self.at
        due = int(waited >= self.pause if self.every is None else progress.done % self.every == 0)
        signalled = self.signals[0] if self.signals else 0
        if self.shared:
            due, signalled = allreduce_max(due, signalled)
        if due or ended or stopped or signalled:
            self.save(progress)
        if signalled and not ended:
            raise Interrupted(signalled, progress.done, self.folder)

    def save(self, progress: Progress) -> None:
        """Check the invariants of a state and commit it."""
        began = time.perf_counter()
        state = progress.state
        if self.shards is not None and isinstance(state.x, jax.Array):
            state = self.shards.collect(state)
        # a check reads all rows, which is too slow for every commit if they are out of core
        if self.away is None or self.monitor.due() or progress.done >= self.rounds:
            self.refuse_faults(state)
        arrays = {name: np.asarray(leaf) for name, leaf in named_arrays(self.committed(state))}
        arrays |= {} if self.away is None else self.away.snapshot()
        if progress.table:
            progress.table[:] = [np.concatenate(progress.table)]
            arrays[METRICS] = progress.table[0]
        ended = progress.done >= self.rounds or bool(state.done)
        facts = {
            "format": FORMAT,
            "run": self.identity,
            "round": int(state.round),
            "rounds": self.rounds,
            "ended": ended,
        }
        if self.ledger is not None:
            facts["ledger"] = list(self.ledger.head)
        self.write(arrays, facts)
        if self.away is not None:
            self.away.store.committed()
        self.at = time.perf_counter()
        self.pause = max(SECONDS, SHARE * (self.at - began))
        self.spent += self.at - began

    def write(self, arrays: dict[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        """Commit arrays and facts.

        With several processes each writes its rows, then process 0 the shared part.
        """
        listed: list[str] = []
        if self.shared and (
            rows := {name: arrays.pop(name) for name in list(arrays) if name.startswith(ROWS)}
        ):
            listed = run_everywhere(
                lambda: sharded_checkpoint.write(self.folder, self.own, rows, facts["round"])
            )
            facts = facts | {"parts": listed}

        def common() -> int | None:
            if self.shared and jax.process_index() > 0:
                return None
            if absent := [name for name in listed if not (self.folder / name).is_file()]:
                raise InputError(
                    f"{self.folder} must be one folder that all processes share: {absent[0]} is "
                    "not there"
                )
            return commit(self.folder, arrays, facts, after=self.generation)

        self.generation = run_everywhere(common)[0] if self.shared else common()
        self.named = [*self.named[-1:], listed]
        if not self.shared or jax.process_index() == 0:
            sharded_checkpoint.sweep(self.folder, {name for names in self.named for name in names})

    def refuse_faults(self, state: State) -> None:
        """Raise StateError if the server's fields are not the means of the clients' memories."""
        wrong = self.monitor(state)
        if wrong is not None:
            whole = (
                f"; the checkpoint in {self.folder} is of before"
                if self.generation is not None
                else ""
            )
            raise StateError(f"the state is not sound: {wrong}{whole}")


def refuse_other_ledger(ledger: Ledger, snapshot: Snapshot) -> None:
    """Raise an InputError if a ledger lacks what was spent when the snapshot was committed."""
    try:
        ledger.refuse(snapshot.facts.get("ledger"))
    except StateError as error:  # not for this snapshot alone: an older one would forget as much
        raise InputError(str(error)) from None


def unfinished(folder: Path) -> int | None:
    """Return the last round of an unfinished run in a checkpoint folder; None if there is none.

    >>> unfinished(Path("nowhere")) is None
    True
    """
    stands = last_round(folder)
    return None if stands is None or stands[1] else stands[0]


def last_round(folder: Path) -> tuple[int, bool] | None:
    """Return the round of the last checkpoint in a folder and whether the run had ended.

    None without a checkpoint.

    >>> last_round(Path("nowhere")) is None
    True
    """
    snapshot = latest(folder)
    if snapshot is None:
        return None
    round = checks.whole("the round of a checkpoint", snapshot.facts.get("round"), at_least=0)
    return round, bool(snapshot.facts.get("ended"))


def discard(folder: Path) -> None:
    """Remove all checkpoints of a folder.

    The newest goes first, so that an interruption leaves an older, intact state.
    """
    for _, path in generations(folder):  # raises for a symbolic link
        path.unlink(missing_ok=True)
    for path in folder.glob(
        "rows-*"
    ):  # rows of client_state="file", which no commit refers to any more
        path.unlink(missing_ok=True)
    sharded_checkpoint.sweep(folder, ())


def named_arrays(state: State) -> list[tuple[str, Any]]:
    """Return the arrays of a state with their names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return [("state" + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def load_progress(snapshot: Snapshot, like: State) -> Progress:
    """Return the progress that a snapshot holds, checked against the state `like`."""
    leaves = []
    for name, leaf in named_arrays(like):
        array = snapshot.arrays.get(name)
        if array is None or array.shape != np.shape(leaf) or array.dtype != leaf.dtype:
            raise StateError(f"the checkpoint has no array {name} of {leaf.dtype} {np.shape(leaf)}")
        leaves.append(array)
    state: State = jax.tree.unflatten(jax.tree.structure(like), leaves)
    table = [snapshot.arrays[METRICS]] if METRICS in snapshot.arrays else []
    return Progress(state, table, sum(map(len, table)))


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Record the first SIGINT or SIGTERM in the list yielded; a second signal is handled as before.

    Handlers are installed in the main thread only, and not for signals that are ignored.
    """
    caught: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        restore()
