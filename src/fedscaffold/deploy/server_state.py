"""Saving and loading of the server's state: one atomic commit per round."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

from fedscaffold import checks
from fedscaffold.algorithms import Algorithm, make
from fedscaffold.checks import InputError
from fedscaffold.deploy.aggregation import Member, State
from fedscaffold.deploy.audit import Head
from fedscaffold.deploy.schema import Array, Schema, digest_of
from fedscaffold.deploy.settings import Local, Settings
from fedscaffold.parsing import format_of
from fedscaffold.state import Snapshot, StateError, commit, latest

__all__ = ["SavedState", "load_state", "peek_state", "save_state"]


FORMAT = 2  # version 0.1.0 wrote format 1, without the keys "format" and "means"
BEFORE = (("c", "c_i"),)  # the means of format 1


class SavedState(NamedTuple):
    """A committed state with its run and generation."""

    state: State
    run: str
    generation: int
    resync: bool
    warnings: tuple[str, ...]
    audit: Head | None = None
    """Head of the audit log; None in states written before it was stored."""
    means: tuple[tuple[str, str], ...] = ()
    """The algorithm's `means`: (server field, memory field) pairs."""
    changes: tuple[str, ...] = ()
    """What is allowed to differ from the run before, and does, one sentence each."""


def save_state(folder: Path, kept: SavedState, settings: Settings, schema: Schema) -> int:
    """Commit a state durably; return its generation."""
    state = kept.state
    arrays = dict(state.server._asdict())
    memory = (
        (f"{name}.{site}", value)
        for site, one in state.memory.items()
        for name, value in one._asdict().items()
    )
    arrays |= dict(memory)
    arrays |= {f"buffer.{name}": value for name, value in state.buffers.items()}
    facts = {
        "format": FORMAT,
        "run": kept.run,
        "round": state.round,
        "scale": state.scale,
        "resync": kept.resync,
        "settings": settings.digest,
        "settings but lr": settings.digest_but_lr,
        "lr": [list(row) for row in settings.local.schedule or ((1, settings.local.lr),)],
        "app": digest_of(settings.app),
        "schema": schema.digest,
        "roster": {site: member._asdict() for site, member in state.roster.items()},
        "audit": None if kept.audit is None else list(kept.audit),
        "means": [list(pair) for pair in kept.means],
    }
    return commit(folder, arrays, facts, after=kept.generation or None, private=True)


def load_state(folder: Path, settings: Settings, schema: Schema) -> SavedState | None:
    """Load the latest valid state of `folder`; None if there is none.

    Raises:
        InputError: If it belongs to another model or other settings.
    """
    snapshot = latest(folder)
    if snapshot is None:
        return None
    facts, changes = snapshot.facts, []
    for what, mine in (("schema", schema.digest), ("settings", settings.digest)):
        if facts[what] == mine:
            continue
        if what == "settings" and facts.get("settings but lr") == settings.digest_but_lr:
            changes += _changed_lr(folder, facts["lr"], facts["round"], settings.local)
            continue
        name = "model" if what == "schema" else "algorithm or local settings"
        raise InputError(
            f"the state in {folder} belongs to another {name}; take another folder or put them back"
        )
    if facts.get("app", digest_of(settings.app)) != digest_of(settings.app):
        changes.append(f"files of the app changed after round {facts['round']}")
    return _decode_snapshot(snapshot, make(**settings.algorithm))._replace(changes=tuple(changes))


def _changed_lr(folder: Path, before: list[list[Any]], round: int, now: Local) -> list[str]:
    """Say which step sizes later rounds have, if they changed; raise if past rounds differ."""
    old = Local(schedule=tuple((begin, lr) for begin, lr in before))
    new = now if now.schedule else now._replace(schedule=((1, now.lr),))
    starts = {begin for begin, _ in (*old.schedule, *new.schedule)}
    if any(old.at(r).lr != new.at(r).lr for r in starts if r <= round):
        kept = old._replace(schedule=tuple(row for row in old.schedule if row[0] <= round))
        wanted = new.at(round + 1).lr
        more = kept._replace(schedule=(*kept.schedule, (round + 1, wanted)))
        raise InputError(
            f"the state in {folder} has {round} rounds with local.lr = {old.at(round).lr}; to go "
            f"on with {wanted}, write lr = {_written(more)}"
        )
    if old.schedule == new.schedule:
        return []
    return [f"after round {round} local.lr is {_written(new)}, where it was {_written(old)}"]


def _written(local: Local) -> str:
    """Return the step sizes by rounds as the settings have them."""
    return f"{{ {', '.join(f'{begin} = {lr}' for begin, lr in local.schedule)} }}"


def peek_state(folder: Path) -> SavedState | None:
    """Load the latest valid state of `folder`, of any model and settings; None without one."""
    snapshot = latest(folder)
    return None if snapshot is None else _decode_snapshot(snapshot)


def _decode_snapshot(snapshot: Snapshot, algorithm: Algorithm | None = None) -> SavedState:
    """Build the state with the algorithm's record types.

    Without an algorithm, the records are generic ones with the same fields.
    """
    facts = snapshot.facts
    format_of(
        facts.get("format"), FORMAT, f"generation {snapshot.generation} of the server's state"
    )
    server: dict[str, Array] = {}
    memory: dict[str, dict[str, Array]] = defaultdict(dict)
    buffers: dict[str, Array] = {}
    for name, value in snapshot.arrays.items():
        field, _, of = name.partition(".")
        if not of:
            server[field] = value
        elif field == "buffer":
            buffers[of] = value
        else:
            memory[of][field] = value
    try:
        if algorithm is None:
            kinds: Any = (
                namedtuple("Server", server),
                namedtuple("Memory", next(iter(memory.values()), {})),
            )
        else:
            kinds = (
                type(algorithm.init(0.0)),
                type(algorithm.memory(0.0)),
            )
        state = State(
            checks.whole("round", facts["round"], at_least=0),
            kinds[0](**server),
            {site: kinds[1](**fields) for site, fields in memory.items()},
            {site: Member(**member) for site, member in facts["roster"].items()},
            buffers,
            facts.get("scale", 0.0),
        )
        means = tuple((field, of) for field, of in facts.get("means", BEFORE) if field in server)
        head = None if facts.get("audit") is None else Head(*facts["audit"])
        return SavedState(
            state,
            facts["run"],
            snapshot.generation,
            facts["resync"],
            snapshot.warnings,
            head,
            means,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        said = (
            f"generation {snapshot.generation} is not the state of a server: "
            f"{type(error).__name__}: {error}"
        )
        raise StateError(said) from None
