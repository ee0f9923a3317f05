"""What there is to watch in a folder: no JAX, and no word with the run.

A folder is that of a simulated run (`rounds.jsonl`, see `fedscaffold.report.record`), of a deployed server
(`audit.jsonl`, see `fedscaffold.report.deployed`), or of a finished run without a record (`study.json`). All of them
become one `Picture`.
"""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any, Protocol

from fedscaffold.checks import InputError
from fedscaffold.report.deployed import Deployed, home
from fedscaffold.report.picture import Picture
from fedscaffold.report.record import NAME, STOP, SUMMED, Record, alive

__all__ = ["Source", "simulated", "source_of"]


class Source(Protocol):
    """Somewhere a picture comes from."""

    def picture(self) -> Picture:
        """The picture now."""


class Simulated:
    """A simulated run by its record."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, Record(folder)

    def picture(self) -> Picture:
        """The picture now."""
        record = self.record
        if not record.update():
            where = {"folder": str(self.folder)}
            return Picture("simulation", "starting", where, "0", None, 0, {"round": []}, notes=("It is compiling.",))
        facts, phase = record.facts, self._phase()
        marks = tuple(heard if heard is None or isinstance(heard, int) else {"heard": heard} for heard in record.heard)
        target = facts.get("target")
        return Picture(
            "simulation",
            phase,
            {"folder": str(self.folder), **{key: facts.get(key) for key in SHOWN}},
            f"{facts.get('run')}-{record.version}",
            facts.get("rounds"),
            record.round,
            record.columns,
            first=record.round - len(marks) + 1,
            marks=marks,
            clients=facts.get("clients", 0),
            heard_at=record.heard_at,
            all_at=record.all_at,
            stamps=tuple(record.stamps),
            seconds={key: record.earlier.get(key, 0.0) + record.seconds.get(key, 0.0) for key in record.phases},
            precision=facts.get("precision", "float32"),
            explained=record.explained,
            worst=record.worst,
            sums=record.sums,
            target=None if target is None else (target[0], target[1]),
            stoppable=phase == "running" and bool(facts.get("stoppable")) and not (self.folder / STOP).exists(),
            notes=_notes(self.folder, phase, record.round),
        )

    def _phase(self) -> str:
        facts, end = self.record.facts, self.record.end
        if end is not None:
            return str(end.get("how", "failed"))
        elsewhere = facts.get("host") not in (None, platform.node())  # its process cannot be seen from here
        return "running" if elsewhere or alive(facts.get("pid")) else "silent"


SHOWN = ("algorithm", "problem", "clients", "cohort", "seed", "precision", "config")


def _notes(folder: Path, phase: str, round: int) -> tuple[str, ...]:
    if phase in ("stopped", "silent", "failed"):
        why = {"stopped": "It was stopped", "silent": "Its process is gone", "failed": "It failed"}[phase]
        return (f"{why} after round {round}; go on with: fedscaffold resume {folder}",)
    if phase == "running" and (folder / STOP).exists():
        return ("It was asked to stop, and will after the rounds at work.",)
    return ()


class Finished:
    """A run that left no record, by its study."""

    def __init__(self, folder: Path) -> None:
        from fedscaffold.report.study import read

        self.study = read(folder)
        self.folder = folder
        if len(self.study.curves) != 1:
            raise InputError(f"{folder} holds {len(self.study.curves)} runs: look at {folder / 'report.html'}")

    def picture(self) -> Picture:
        """The picture, always the same."""
        curve = self.study.curves[0]
        columns = {name: [_finite(v) for v in column.tolist()] for name, column in curve.columns.items()}
        how = "diverged" if curve.diverged_at else "target" if curve.reached_at else "finished"
        facts: dict[str, Any] = {"folder": str(self.folder), "algorithm": curve.algorithm}
        facts |= {"problem": self.study.problem, "seed": curve.seed, "precision": self.study.precision}
        done = len(columns["round"])
        return Picture(
            "study",
            how,
            facts,
            curve.digest,
            done,
            done,
            columns,
            seconds={name: spent for name, spent in self.study.seconds.items() if name != "cpu"},
            precision=self.study.precision,
            explained=_finite(curve.explained),
            worst=max((r for r in columns.get("residual", []) if r is not None), default=None),
            sums={name: sum(columns[name]) for name in SUMMED & columns.keys()},
            target=self.study.target,
            notes=("It left no record of its rounds: who was heard is not known.",),
        )


def source_of(folder: Path) -> Source:
    """What can be watched in a folder; refused in one line where there is nothing."""
    deployed = home(folder)
    if (folder / NAME).is_file():
        return Simulated(folder)
    if deployed is not None:
        return Deployed(deployed)
    if (folder / "study.json").is_file():
        return Finished(folder)
    if (folder / "config.toml").is_file():
        return Simulated(folder)
    raise InputError(f"{folder} holds no run: give the folder of `fedscaffold run`, or of a deployed server")


def simulated(folder: Path) -> Source:
    """A run that is about to begin in a folder."""
    return Simulated(folder)


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
