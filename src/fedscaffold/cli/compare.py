"""`compare` and `demo` in their folder: each run is kept as it ends, so that a comparison goes on where it was.

The folder holds `comparison.json`, what was asked for and whether it is done, and meanwhile `cells/`, with a file for
every run that is done. A run whose step size is tuned keeps its runs in `cells/` too.
"""

from __future__ import annotations

import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import saying
from fedscaffold.cli.verbs import command_typed, prepared, progress, say

if TYPE_CHECKING:
    from fedscaffold.experiments.config import Config
    from fedscaffold.experiments.federation import Built
    from fedscaffold.report import Study

__all__ = ["ASKED", "CELLS", "broken_off", "carry_out", "clear", "go_on"]

ASKED = "comparison.json"
CELLS = "cells"


class Asked(NamedTuple):
    """What makes a comparison this comparison."""

    config: dict[str, Any]
    algorithms: list[str]
    left_out: dict[str, str]
    seeds: int
    target: str | None


def carry_out(
    config: Config, names: str, seeds: int, target: str | None, out: Path, fresh: bool, as_json: bool
) -> None:
    """Compare algorithms, by name or "all", and keep the results in `out`; go on with what is done there already."""
    from fedscaffold import checks
    from fedscaffold.algorithms import ALGORITHMS

    every = names.strip() == "all"
    chosen = [] if every else [checks.choice("algorithm", name.strip(), ALGORITHMS) for name in names.split(",")]
    checks.whole("seeds", seeds)
    built = prepared(config)
    from fedscaffold.experiments.compare import fitting

    chosen, refused = fitting(config, built) if every else (chosen, {})
    asked = Asked(config.model_dump(mode="json", exclude_none=True), chosen, refused, seeds, target)
    _compare(config, built, asked, out, fresh, as_json)


def go_on(folder: Path, as_json: bool) -> None:
    """Go on with a comparison that was broken off."""
    from fedscaffold.experiments.config import Config

    asked, ended = _asked(folder) or (None, True)
    if asked is None or ended:
        raise InputError(f"the comparison in {folder} is finished: `fedscaffold report {folder}` makes its page anew")
    config = Config.model_validate(asked.config)
    _compare(config, prepared(config), asked, folder, False, as_json)


def _compare(config: Config, built: Built, asked: Asked, out: Path, fresh: bool, as_json: bool) -> None:
    from fedscaffold.experiments import compare as room
    from fedscaffold.experiments.cells import Store
    from fedscaffold.report import tables
    from fedscaffold.state.files import owned

    what = asked.algorithms, asked.seeds, asked.target
    room.refuse_comparison(config, built, *what)
    total = room.number_of_runs(config, *what[:2])
    words = shlex.join(["fedscaffold", "resume", str(out)])

    def stopped() -> str:
        return f"stopped; {len(_kept(out))} of {total} runs are kept; the same command goes on, or: {words}"

    with owned(out):
        _begin(out, asked, fresh)
        with saying(stopped):
            tell = partial(progress, as_json=as_json)
            study = room.compare(config, built, *what, command_typed(), tell, Store(out / CELLS))
            page = room.keep(study, out)
            _note(out, asked, ended=True)
            clear(out)
    answer = {
        "rows": study.rows,
        "target": study.target,
        "left_out": asked.left_out,
        "seconds": study.seconds,
        "folder": str(out),
        "report": str(page),
    }
    notes = [*_warnings(study), *(f"left out: {reason}" for reason in asked.left_out.values())]
    say(answer, [study.problem, "", tables.terminal(study.rows), "", *notes, f"report: {page}"], as_json)


def broken_off(folder: Path) -> bool:
    """Whether the folder holds runs of a sweep that is not finished."""
    if not _kept(folder):
        return False
    before = _asked(folder)
    return before is None or not before[1]


def clear(folder: Path) -> None:
    """Remove the runs that were kept one by one: all at once, whenever this is stopped."""
    old = folder / f".{CELLS}.old"
    shutil.rmtree(old, ignore_errors=True)
    if (folder / CELLS).is_dir():
        (folder / CELLS).rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _begin(out: Path, asked: Asked, fresh: bool) -> None:
    """Make the folder ready for a comparison, or for more of the one that it holds."""
    from fedscaffold.cli.resume import make_way
    from fedscaffold.simulation.identity import differences, flat

    before = None if fresh else _asked(out)
    if before is None or not broken_off(out):
        make_way(out, fresh)
        _note(out, asked, ended=False)
        return
    changed = differences(flat(before[0]._asdict()), flat(asked._asdict()))
    if changed is not None:
        raise InputError(
            f"{out} holds a comparison that was broken off, and it is another one ({changed}); ask for the same, "
            "give another --out, or --fresh to start anew there"
        )


def _kept(folder: Path) -> list[Path]:
    return list((folder / CELLS).glob("*.npz"))


def _note(folder: Path, asked: Asked, ended: bool) -> None:
    new = folder / f".{ASKED}.new"
    new.write_text(json.dumps(asked._asdict() | {"ended": ended}, indent=1), encoding="utf-8")
    new.replace(folder / ASKED)


def _asked(folder: Path) -> tuple[Asked, bool] | None:
    """What the comparison in a folder was asked for, and whether it is done; None where there is none."""
    from fedscaffold.experiments.config import Config

    try:
        kept = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        ended = bool(kept.pop("ended"))
        asked = Asked(**kept)
        Config.model_validate(asked.config)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise InputError(f"{folder / ASKED} is damaged: give --fresh to start anew in this folder") from None
    return asked, ended


def _warnings(study: Study) -> list[str]:
    return [f"{c.algorithm}, seed {c.seed}: {c.advice}" for c in study.curves if c.advice]
