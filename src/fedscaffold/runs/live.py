"""Sources of the run page: runs, comparisons and deployed servers, read without JAX.

`source_of` opens one folder, which `poll` reads incrementally; `sources` reads any number of them
as they are now.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from fedscaffold.checks import InputError
from fedscaffold.runs.deployed import Deployed, find_server_folder
from fedscaffold.runs.round_log import NAME, STOP, RoundLog, process_exists
from fedscaffold.runs.run_folder import CONFIG, INDEX, RUN, RunRecord, Study, find_studies, read
from fedscaffold.runs.view_model import Progress, Source

__all__ = ["LiveSource", "Simulated", "source_of", "sources"]


class LiveSource(Protocol):
    """A folder that can be polled for its present state."""

    def poll(self) -> Source:
        """Read what was added since the last call and return the present state."""


class Simulated:
    """Source of a simulated run: its log while it goes on, its whole folder once it has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, RoundLog(folder)
        self.whole: Study | None = None

    def poll(self) -> Source:
        """Read what was added since the last call and return the present state."""
        begun = self.log.update()
        phase = self._phase() if begun else "starting"
        if phase in ("finished", "target", "diverged", "budget") and (self.folder / RUN).is_file():
            self.whole = self.whole or read(self.folder)
        else:
            self.whole = None
        study = self.whole or self._so_far()
        return Source(str(self.folder), study, self._progress(phase))

    def _so_far(self) -> Study:
        log, facts = self.log, self.log.facts
        columns = {name: np.array(column) for name, column in log.columns.items()}
        columns["round"] = columns["round"].astype(np.int64)
        residuals = columns.get("residual", np.array([math.nan]))
        run = RunRecord(
            algorithm=facts.get("algorithm") or "run",
            seed=facts.get("seed") or 0,
            columns=columns,
            diverged_at=log.round
            if log.end is not None and log.end.get("how") == "diverged"
            else None,
            residual=float(residuals[-1]) if len(residuals) else math.nan,
            explained=math.nan if log.explained is None else log.explained,
            config=_read_text(self.folder / CONFIG),
            clock=np.array(log.clock) if len(log.clock) > 1 else None,
            privacy=log.spent,
        )
        target = facts.get("target")
        return Study(
            problem=facts.get("problem") or "",
            runs=[run],
            target=None if target is None else (target[0], target[1]),
            precision=facts.get("precision", "float32"),
        )

    def _progress(self, phase: str) -> Progress:
        log, facts = self.log, self.log.facts
        marks = tuple(
            heard if heard is None or isinstance(heard, int) else {"heard": heard}
            for heard in log.heard
        )
        return Progress(
            kind="simulation",
            phase=phase,
            round=log.round,
            rounds=facts.get("rounds"),
            first=log.round - len(marks) + 1,
            marks=marks if any(mark is not None for mark in marks) else (),
            clients=facts.get("clients", 0),
            heard_at=log.heard_at,
            all_at=log.all_at,
            stamps=tuple(log.stamps),
            seconds={
                key: log.earlier.get(key, 0.0) + log.seconds.get(key, 0.0) for key in log.phases
            },
            stoppable=phase == "running"
            and bool(facts.get("stoppable"))
            and not (self.folder / STOP).exists(),
            notes=_notes(self.folder, phase, log.round),
        )

    def _phase(self) -> str:
        facts, end = self.log.facts, self.log.end
        if end is not None:
            return str(end.get("how", "failed"))
        # its process cannot be checked from this machine
        elsewhere = facts.get("host") not in (None, platform.node())
        return "running" if elsewhere or process_exists(facts.get("pid")) else "silent"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _notes(folder: Path, phase: str, round: int) -> tuple[str, ...]:
    if phase == "starting":
        return ("It is compiling.",)
    if phase in ("stopped", "silent", "failed"):
        why = {"stopped": "It was stopped", "silent": "Its process is gone", "failed": "It failed"}[
            phase
        ]
        return (f"{why} after round {round}; go on with: fedscaffold resume {folder}",)
    if phase == "running" and (folder / STOP).exists():
        return ("It was asked to stop, and will after the rounds at work.",)
    return ()


class Compared:
    """Source of a finished comparison."""

    def __init__(self, folder: Path) -> None:
        self.source = Source(str(folder), read(folder))

    def poll(self) -> Source:
        """Return the comparison, which no longer changes."""
        return self.source


def source_of(folder: Path) -> LiveSource:
    """Open a folder for polling.

    Args:
        folder: The folder of a run (running or finished), of a comparison, or of a deployed server.

    Raises:
        InputError: The folder holds none of these, or was written by another version.
    """
    deployed = find_server_folder(folder)
    if (folder / INDEX).is_file():
        return Compared(folder)
    if (folder / RUN).is_file() or (folder / "study.json").is_file():
        read(folder)  # a finished run: raise here if it cannot be read
    if (folder / NAME).is_file():
        return Simulated(folder)
    if deployed is not None:
        return Deployed(deployed)
    if (folder / CONFIG).is_file():
        return Simulated(folder)
    raise InputError(
        f"{folder} holds no run: give the folder of `fedscaffold run`, or of a deployed server"
    )


def sources(paths: Sequence[Path]) -> list[Source]:
    """Read all runs and comparisons in or below the given paths, as they are now.

    A single run is read with its progress.
    """
    found = find_studies(list(paths))
    given = [_read_source(folder) for folder in found]
    return given if len(given) == 1 else [source._replace(progress=None) for source in given]


def _read_source(folder: Path) -> Source:
    """Read a comparison, or a run with its progress, whether it has ended or not."""
    if (folder / INDEX).is_file() or (folder / "study.json").is_file():
        return Source(str(folder), read(folder))
    ended = (folder / RUN).is_file()
    study = read(folder) if ended else None  # raises if it cannot be read
    source = Simulated(folder).poll()
    progress = source.progress
    if progress is not None and progress.phase in ("starting", "running"):
        progress = replace(progress, phase="unfinished", stoppable=False)
    return Source(source.folder, study or source.study, progress)
