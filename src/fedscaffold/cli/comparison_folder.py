"""`compare` and `demo`: run a comparison in its folder, resumable run by run.

The folder holds `comparison.json`, with the request and whether it is finished, and meanwhile
`cells/`, with a commit for every finished run. A run with a tuned step size keeps its runs there
too.
"""

from __future__ import annotations

import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import exit_with_line
from fedscaffold.cli.verbs import prepare_problem, print_answer, print_progress, typed_command
from fedscaffold.parsing import format_of
from fedscaffold.state.files import write_whole

if TYPE_CHECKING:
    from fedscaffold.experiments.build_problem import Built
    from fedscaffold.experiments.config_file import Config

__all__ = ["ASKED", "CELLS", "is_unfinished", "remove_cells", "resume_comparison", "run_comparison"]

ASKED = "comparison.json"
FORMAT = 1
CELLS = "cells"


class ComparisonRequest(NamedTuple):
    """What identifies a comparison."""

    config: dict[str, Any]
    algorithms: list[str]
    left_out: dict[str, str]
    seeds: int
    target: str | None


def run_comparison(
    config: Config,
    names: str,
    seeds: int,
    target: str | None,
    out: Path,
    fresh: bool,
    as_json: bool,
) -> None:
    """Compare algorithms, by name or "all", and write the results to `out`.

    Continue an unfinished comparison.
    """
    from fedscaffold import checks
    from fedscaffold.algorithms import ALGORITHMS

    every = names.strip() == "all"
    chosen = (
        []
        if every
        else [checks.choice("algorithm", name.strip(), ALGORITHMS) for name in names.split(",")]
    )
    checks.whole("seeds", seeds)
    built = prepare_problem(config)
    from fedscaffold.experiments.compare import compatible_algorithms

    chosen, refused = compatible_algorithms(config, built) if every else (chosen, {})
    asked = ComparisonRequest(
        config.model_dump(mode="json", exclude_none=True), chosen, refused, seeds, target
    )
    _compare(config, built, asked, out, fresh, as_json)


def resume_comparison(folder: Path, as_json: bool) -> None:
    """Continue an unfinished comparison."""
    from fedscaffold.experiments.config_file import Config

    asked, ended = _read_request(folder) or (None, True)
    if asked is None or ended:
        raise InputError(
            f"the comparison in {folder} is finished: `fedscaffold report {folder}` makes its page "
            "anew"
        )
    config = Config.model_validate(asked.config)
    _compare(config, prepare_problem(config), asked, folder, False, as_json)


def _compare(
    config: Config, built: Built, asked: ComparisonRequest, out: Path, fresh: bool, as_json: bool
) -> None:
    from fedscaffold.experiments import compare as room
    from fedscaffold.runs import tables
    from fedscaffold.state.files import owned

    what = asked.algorithms, asked.seeds, asked.target
    room.validate_comparison(config, built, *what)
    total = room.number_of_runs(config, *what[:2])
    words = shlex.join(["fedscaffold", "resume", str(out)])

    def stopped() -> str:
        return f"stopped; {count_cells(out)} of {total} runs are kept; the same command goes on, or: {words}"

    with owned(out):
        _prepare_folder(out, asked, fresh)
        with exit_with_line(stopped):
            tell = partial(print_progress, as_json=as_json)
            study = room.compare(config, built, *what, typed_command(), tell, out / CELLS)
            page = room.write_results(study, out)
            _write_request(out, asked, ended=True)
            remove_cells(out)
    answer = {
        "rows": study.rows,
        "target": study.target,
        "left_out": asked.left_out,
        "seconds": study.seconds,
        "folder": str(out),
        "report": str(page),
    }
    notes = [f"{run.algorithm}, seed {run.seed}: {run.advice}" for run in study.runs if run.advice]
    notes += [f"left out: {reason}" for reason in asked.left_out.values()]
    print_answer(
        answer,
        [study.problem, "", tables.terminal(study.rows), "", *notes, f"report: {page}"],
        as_json,
    )


def is_unfinished(folder: Path) -> bool:
    """Return whether the folder holds runs of an unfinished sweep."""
    if not count_cells(folder):
        return False
    before = _read_request(folder)
    return before is None or not before[1]


def remove_cells(folder: Path) -> None:
    """Remove the cached runs; atomically, by renaming their folder first."""
    old = folder / f".{CELLS}.old"
    shutil.rmtree(old, ignore_errors=True)
    if (folder / CELLS).is_dir():
        (folder / CELLS).rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _prepare_folder(out: Path, asked: ComparisonRequest, fresh: bool) -> None:
    """Prepare the folder for a new comparison, or for continuing the one it holds."""
    from fedscaffold.cli.resume import clear_for_new_run
    from fedscaffold.simulation.fingerprint import differences, flat

    before = None if fresh else _read_request(out)
    if before is None or not is_unfinished(out):
        clear_for_new_run(out, fresh)
        _write_request(out, asked, ended=False)
        return
    changed = differences(flat(before[0]._asdict()), flat(asked._asdict()))
    if changed is not None:
        raise InputError(
            f"{out} holds a comparison that was broken off, and it is another one ({changed}); ask "
            "for the same, "
            "give another --out, or --fresh to start anew there"
        )


def count_cells(folder: Path) -> int:
    """Return the number of finished runs that a folder keeps."""
    return len({path.parent for path in (folder / CELLS).glob("*/state-*.safetensors")})


def _write_request(folder: Path, asked: ComparisonRequest, ended: bool) -> None:
    write_whole(
        folder / ASKED,
        json.dumps({"format": FORMAT} | asked._asdict() | {"ended": ended}, indent=1),
    )


def _read_request(folder: Path) -> tuple[ComparisonRequest, bool] | None:
    """Return the request of a folder's comparison and whether it is finished.

    None if there is none.
    """
    from fedscaffold.experiments.config_file import Config

    damaged = InputError(f"{folder / ASKED} is damaged: give --fresh to start anew in this folder")
    try:
        kept = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        version = kept.pop("format", None)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError, TypeError):
        raise damaged from None
    format_of(version, FORMAT, str(folder / ASKED))
    try:
        ended = bool(kept.pop("ended"))
        asked = ComparisonRequest(**kept)
        Config.model_validate(asked.config)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise damaged from None
    return asked, ended
