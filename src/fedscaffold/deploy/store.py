"""The server's state on disk: one atomic commit for everything a round changes, and its way back."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.deploy.audit import Head
from fedscaffold.deploy.rounds import Member, State
from fedscaffold.deploy.schema import Schema
from fedscaffold.deploy.settings import Settings
from fedscaffold.state import Snapshot, StateError, commit, latest

__all__ = ["Kept", "keep", "recall", "seen"]


class Kept(NamedTuple):
    """A committed state and which run it belongs to."""

    state: State
    run: str
    generation: int
    resync: bool
    warnings: tuple[str, ...]
    audit: Head | None = None
    """Where the audit log ended; None in states of before this was kept."""


def keep(folder: Path, kept: Kept, settings: Settings, schema: Schema) -> int:
    """Commit a state; when this returns it survives any crash. Returns the generation."""
    state = kept.state
    arrays = {"x": state.x}
    arrays |= {} if state.c is None else {"c": state.c}
    arrays |= {f"c_i.{site}": value for site, value in state.c_i.items()}
    arrays |= {f"buffer.{name}": value for name, value in state.buffers.items()}
    facts = {
        "run": kept.run,
        "round": state.round,
        "scale": state.scale,
        "resync": kept.resync,
        "settings": settings.digest,
        "schema": schema.digest,
        "roster": {site: member._asdict() for site, member in state.roster.items()},
        "audit": None if kept.audit is None else list(kept.audit),
    }
    return commit(folder, arrays, facts, after=kept.generation or None, private=True)


def recall(folder: Path, settings: Settings, schema: Schema) -> Kept | None:
    """The latest whole state of `folder`, None where there is none; another model's or settings' is refused."""
    snapshot = latest(folder)
    if snapshot is None:
        return None
    for what, mine in (("schema", schema.digest), ("settings", settings.digest)):
        if snapshot.facts[what] != mine:
            name = "model" if what == "schema" else "algorithm or local settings"
            raise InputError(f"the state in {folder} belongs to another {name}; take another folder or put them back")
    return _kept(snapshot)


def seen(folder: Path) -> Kept | None:
    """The latest whole state of `folder`, whoever it belongs to, for those who only look; None where there is none."""
    snapshot = latest(folder)
    return None if snapshot is None else _kept(snapshot)


def _kept(snapshot: Snapshot) -> Kept:
    try:
        return _as_kept(snapshot)
    except (KeyError, TypeError, AttributeError, InputError) as error:
        said = f"generation {snapshot.generation} is not the state of a server: {type(error).__name__}: {error}"
        raise StateError(said) from None


def _as_kept(snapshot: Snapshot) -> Kept:
    facts, arrays = snapshot.facts, snapshot.arrays
    state = State(
        checks.whole("round", facts["round"], at_least=0),
        arrays["x"],
        arrays.get("c"),
        {name.removeprefix("c_i."): value for name, value in arrays.items() if name.startswith("c_i.")},
        {site: Member(**member) for site, member in facts["roster"].items()},
        {name.removeprefix("buffer."): value for name, value in arrays.items() if name.startswith("buffer.")},
        facts.get("scale", 0.0),
    )
    audit = facts.get("audit")
    head = None if audit is None else Head(*audit)
    return Kept(state, facts["run"], snapshot.generation, facts["resync"], snapshot.warnings, head)
