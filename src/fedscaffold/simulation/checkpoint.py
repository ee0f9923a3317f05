"""Checkpoints: a run's whole state in one atomic commit, and going on from it with the same bits.

A commit holds the state the next round needs, the metrics of the rounds so far, and the facts that make the run this
run. As every round has random streams of its own, that is all: whoever continues draws what the first would have drawn.
A signal ends the run after the stretch of rounds at work, with a commit.
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
from fedscaffold.simulation import parts
from fedscaffold.simulation.away import Away
from fedscaffold.simulation.health import Watch
from fedscaffold.simulation.hosts import most, tried
from fedscaffold.simulation.identity import differences
from fedscaffold.simulation.mesh import OF_CLIENTS, Shards
from fedscaffold.simulation.spec import State
from fedscaffold.state import Snapshot, StateError, commit, latest
from fedscaffold.state.commit import generations

__all__ = ["Checkpoint", "Interrupted", "Progress", "StateWarning", "discard", "last_round", "listening", "unfinished"]

SECONDS = 20.0  # between two commits by the clock
SHARE = 50.0  # a commit takes at most one part in so many of the time
METRICS = "metrics"
ROWS = tuple(f"state.{name}" for name in OF_CLIENTS)


class StateWarning(UserWarning):
    """A checkpoint was passed over, and an older one is used."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after a commit; calling again with the same folder goes on."""

    def __init__(self, number: int, round: int, folder: Path) -> None:
        super().__init__(f"{signal.Signals(number).name} after round {round}; the checkpoint in {folder} has it all")
        self.signal, self.round, self.folder = number, round, folder


class Progress(NamedTuple):
    """How far a run is."""

    state: State
    table: list[NDArray[Any]]
    done: int


class Checkpoint:
    """The checkpoints of one run in `folder`, every so many rounds, or by the clock where `every` is None."""

    def __init__(
        self,
        folder: Path | str,
        every: int | None,
        identity: dict[str, Any],
        rounds: int,
        watch: Watch,
        signals: list[int],
        away: Away | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.folder, self.every = Path(folder), None if every is None else checks.whole("every", every)
        self.identity, self.rounds, self.watch, self.signals = identity, rounds, watch, signals
        self.away, self.shards = away, shards
        self.shared = shards is not None and jax.process_count() > 1
        self.own = slice(0, identity["problem.num_clients"]) if shards is None else shards.own
        self.generation: int | None = None
        self.named: list[list[str]] = []
        self.at = time.perf_counter()
        self.pause, self.spent = SECONDS, 0.0

    def begin(self, start: State) -> Progress:
        """Where to go on: the newest whole checkpoint, or the start, which is committed at once."""
        snapshot = self.newest()
        if snapshot is None:
            begun = Progress(start, [], 0)
            self.keep(begun)
            return begun
        for sentence in snapshot.warnings:
            warnings.warn(sentence, StateWarning, stacklevel=2)
        self.generation, self.named = snapshot.generation, [parts.names(snapshot.facts)]
        found = restored(snapshot, self.committed(start))
        if self.away is not None:
            found = found._replace(state=found.state._replace(c_i=start.c_i, heard_at=start.heard_at))
        if found.done > self.rounds:
            raise InputError(
                f"the checkpoint in {self.folder} is after round {found.done}; "
                f"rounds must be at least as many, got {self.rounds}"
            )
        self.refuse_faults(found.state)
        return found

    def newest(self) -> Snapshot | None:
        """The newest whole snapshot, with the rows of the clients here; of many processes, the newest all can read."""
        if not self.shared:
            return latest(self.folder, accept=self.accept)
        found: dict[int, Snapshot | None] = {}

        def look(limit: int | None) -> int:
            snapshot = latest(self.folder, accept=partial(self.accept, limit=limit))
            generation = 0 if snapshot is None else snapshot.generation
            found[generation] = snapshot
            return generation

        seen = tried(partial(look, None))
        while len(set(seen)) > 1:
            if 0 in seen:
                raise InputError(f"{self.folder} must be the same for all: process {seen.index(0)} finds it empty")
            found.clear()
            seen = tried(partial(look, min(seen)))
        return found[seen[0]]

    def accept(self, snapshot: Snapshot, limit: int | None = None) -> None:
        """Refuse the snapshot of another run; let clients take their rows, or pass it over."""
        if limit is not None and snapshot.generation > limit:
            raise StateError(f"generation {snapshot.generation} is not whole for another process")
        changed = differences(snapshot.facts.get("run", {}), self.identity)
        if changed is not None:
            raise InputError(
                f"the checkpoint in {self.folder} is of another run ({changed}); "
                "ask for the same, or take another folder"
            )
        if self.away is not None:
            self.away.restore(snapshot.arrays)
        if listed := parts.names(snapshot.facts):
            snapshot.arrays.update(parts.read(self.folder, listed, self.own))
        elif self.shards is not None:
            snapshot.arrays.update({name: a[self.own] for name, a in snapshot.arrays.items() if name in ROWS})

    def committed(self, state: State) -> State:
        """The part of a state that is committed as it is: of clients who are away, their store is."""
        return state if self.away is None else state._replace(c_i=None, heard_at=None)

    def until(self, done: int) -> int:
        """Rounds to run at most before the next commit."""
        return self.rounds if self.every is None else self.every - done % self.every

    def after(self, progress: Progress) -> None:
        """Commit if it is time to, or if the run ends here; raise Interrupted if a signal came."""
        ended = progress.done >= self.rounds or bool(progress.state.done)
        waited = time.perf_counter() - self.at
        due = int(waited >= self.pause if self.every is None else progress.done % self.every == 0)
        signalled = self.signals[0] if self.signals else 0
        if self.shared:
            due, signalled = most(due, signalled)
        if due or ended or signalled:
            self.keep(progress)
        if signalled and not ended:
            raise Interrupted(signalled, progress.done, self.folder)

    def keep(self, progress: Progress) -> None:
        """Commit a state that is sound."""
        began = time.perf_counter()
        state = progress.state
        if self.shards is not None and isinstance(state.x, jax.Array):
            state = self.shards.collected(state)
        if self.away is None or self.watch.due() or progress.done >= self.rounds:
            self.refuse_faults(state)  # the rows of clients who are away are read every so often only
        arrays = {name: np.asarray(leaf) for name, leaf in named(self.committed(state))}
        arrays |= {} if self.away is None else self.away.snapshot()
        if progress.table:
            progress.table[:] = [np.concatenate(progress.table)]
            arrays[METRICS] = progress.table[0]
        ended = progress.done >= self.rounds or bool(state.done)
        facts = {"run": self.identity, "round": int(state.round), "rounds": self.rounds, "ended": ended}
        self.write(arrays, facts)
        if self.away is not None:
            self.away.store.committed()
        self.at = time.perf_counter()
        self.pause = max(SECONDS, SHARE * (self.at - began))
        self.spent += self.at - began

    def write(self, arrays: dict[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        """Commit; of many processes each its part, and the first what is common once all parts are on the disk."""
        listed: list[str] = []
        if self.shared and (rows := {name: arrays.pop(name) for name in ROWS if name in arrays}):
            listed = tried(lambda: parts.write(self.folder, self.own, rows, facts["round"]))
            facts = facts | {"parts": listed}

        def common() -> int | None:
            if self.shared and jax.process_index() > 0:
                return None
            if absent := [name for name in listed if not (self.folder / name).is_file()]:
                raise InputError(f"{self.folder} must be one folder that all processes share: {absent[0]} is not there")
            return commit(self.folder, arrays, facts, after=self.generation)

        self.generation = tried(common)[0] if self.shared else common()
        self.named = [*self.named[-1:], listed]
        if not self.shared or jax.process_index() == 0:
            parts.sweep(self.folder, {name for names in self.named for name in names})

    def refuse_faults(self, state: State) -> None:
        """Raise StateError for a state in which c is not the mean of the c_i."""
        wrong = self.watch(state)
        if wrong is not None:
            whole = f"; the checkpoint in {self.folder} is of before" if self.generation is not None else ""
            raise StateError(f"the state is not sound: {wrong}{whole}")


def unfinished(folder: Path) -> int | None:
    """The round after which the run of a checkpoint folder stopped; None where there is none, or it went to its end.

    >>> unfinished(Path("nowhere")) is None
    True
    """
    stands = last_round(folder)
    return None if stands is None or stands[1] else stands[0]


def last_round(folder: Path) -> tuple[int, bool] | None:
    """The round after which the last checkpoint of a folder is, and whether the run went to its end; None for none.

    >>> last_round(Path("nowhere")) is None
    True
    """
    snapshot = latest(folder)
    if snapshot is None:
        return None
    round = checks.whole("the round of a checkpoint", snapshot.facts.get("round"), at_least=0)
    return round, bool(snapshot.facts.get("ended"))


def discard(folder: Path) -> None:
    """Remove all checkpoints of a folder, the newest first: what is left in between is an older state, whole."""
    for _, path in generations(folder):  # which refuses a link
        path.unlink(missing_ok=True)
    for path in folder.glob("rows-*"):  # of clients whose state was in files: no commit speaks of them any more
        path.unlink(missing_ok=True)
    parts.sweep(folder, ())


def named(state: State) -> list[tuple[str, Any]]:
    """The arrays of a state with their names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return [("state" + jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def restored(snapshot: Snapshot, like: State) -> Progress:
    """The progress a snapshot holds, if its arrays are those of this run's state."""
    leaves = []
    for name, leaf in named(like):
        array = snapshot.arrays.get(name)
        if array is None or array.shape != np.shape(leaf) or array.dtype != leaf.dtype:
            raise StateError(f"the checkpoint has no array {name} of {leaf.dtype} {np.shape(leaf)}")
        leaves.append(array)
    state: State = jax.tree.unflatten(jax.tree.structure(like), leaves)
    table = [snapshot.arrays[METRICS]] if METRICS in snapshot.arrays else []
    return Progress(state, table, sum(map(len, table)))


@contextmanager
def listening() -> Iterator[list[int]]:
    """Note the first SIGINT or SIGTERM instead of dying of it; a second one acts as always.

    Only the main thread may do so; signals that were ignored stay ignored.
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
