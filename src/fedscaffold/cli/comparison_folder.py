"""`compare` and `demo`: run a comparison in its folder, on all cores, resumable run by run.

The folder holds `comparison.json`, with the request and whether it is finished, and meanwhile
`cells/`, with a commit for every finished run. A run with a tuned step size keeps its runs there
too. The tasks of a job array run shares of the cells into the same folder, without its lock; what
they leave is then assembled, or done, by `fedscaffold resume`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import exit_with_line
from fedscaffold.cli.verbs import prepare_problem, print_answer, typed_command
from fedscaffold.parsing import format_of, plain
from fedscaffold.state.files import write_whole

if TYPE_CHECKING:
    from fedscaffold.experiments.build_problem import Built
    from fedscaffold.experiments.compare import Comparison
    from fedscaffold.experiments.config_file import Config

__all__ = [
    "ASKED",
    "CELLS",
    "How",
    "ask_comparison",
    "is_unfinished",
    "parse_share",
    "remove_cells",
    "resume_comparison",
    "run_comparison",
    "write_slurm",
]

ASKED = "comparison.json"
FORMAT = 1
CELLS = "cells"
SLURM = """\
#!/bin/bash
# {total} runs into {out}, shared by {tasks} tasks; the last job makes the table and the page.
# Submit with: bash {script} [options of sbatch]
#SBATCH --job-name=fedscaffold
#SBATCH --array=0-{last}
#SBATCH --cpus-per-task=1
program=${{FEDSCAFFOLD:-{program}}}
out={out}
cd {here} || exit 2
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
  exec "$program" resume "$out" --share "$SLURM_ARRAY_TASK_ID/{tasks}"
fi
job=$(sbatch --parsable "$@" "$0") || exit
exec sbatch --dependency=afterany:"${{job%%;*}}" --job-name=fedscaffold-table "$@" \\
  --wrap "'$program' resume '$out'"
"""


class ComparisonRequest(NamedTuple):
    """What identifies a comparison."""

    config: dict[str, Any]
    algorithms: list[str]
    left_out: dict[str, str]
    seeds: int
    target: str | None
    over: dict[str, list[Any]] = {}  # noqa: RUF012 (a NamedTuple; never changed)


class How(NamedTuple):
    """How a comparison is run."""

    as_json: bool
    workers: int | None = None
    share: slice | None = None
    """The cells to run, of a job array's task; None for all."""


def ask_comparison(
    config: Config,
    names: str,
    seeds: int,
    target: str | None,
    over: dict[str, list[Any]],
) -> tuple[ComparisonRequest, Built]:
    """Check the algorithms of a comparison, by name or "all", and build its problem."""
    from fedscaffold.algorithms import ALGORITHMS

    every = names.strip() == "all"
    chosen = (
        []
        if every
        else [checks.choice("algorithm", name.strip(), ALGORITHMS) for name in names.split(",")]
    )
    checks.whole("seeds", seeds)
    built = prepare_problem(config, side_by_side=True)
    from fedscaffold.experiments.compare import compatible_algorithms

    chosen, refused = compatible_algorithms(config, built) if every else (chosen, {})
    asked = config.model_dump(mode="json", exclude_none=True)
    return ComparisonRequest(asked, chosen, refused, seeds, target, over), built


def run_comparison(
    config: Config, asked: ComparisonRequest, built: Built, out: Path, fresh: bool, how: How
) -> int:
    """Run a comparison and write the results to `out`; continue an unfinished one.

    Returns:
        The exit code: 1 if a run failed.
    """
    from fedscaffold.experiments import compare as room
    from fedscaffold.state.files import owned

    total = room.validate_comparison(config, built, *_what(asked), asked.over)
    words = shlex.join(["fedscaffold", "resume", str(out)])

    def stopped() -> str:
        kept = f"{count_cells(out)} of {total} runs are kept"
        return f"stopped; {kept}; the same command goes on, or: {words}"

    with ExitStack() as stack:
        if how.share is None:
            stack.enter_context(owned(out))
            _prepare_folder(out, asked, fresh)
        stack.enter_context(exit_with_line(stopped))
        found = room.compare(
            config,
            built,
            *_what(asked),
            typed_command(),
            over=asked.over,
            kept=out,
            workers=how.workers,
            progress=False if how.as_json else None,
            share=how.share,
        )
        page = None if found.study is None else room.write_results(found.study, out, found.grid)
        if how.share is None and not found.grid.failed:
            _write_request(out, asked, ended=True)
            remove_cells(out)
    _print_comparison(found, asked, out, page, how)
    return 1 if found.grid.failed else 0


def _what(asked: ComparisonRequest) -> tuple[list[str], int, str | None]:
    return asked.algorithms, asked.seeds, asked.target


def _print_comparison(
    found: Comparison, asked: ComparisonRequest, out: Path, page: Path | None, how: How
) -> None:
    from fedscaffold.grids.cells import describe
    from fedscaffold.runs import tables

    failed = [f"failed: {describe(run.cell)}: {run.error}" for run in found.grid.failed]
    answer: dict[str, Any] = {"runs": found.grid.rows, "folder": str(out)}
    study, lines, spent = found.study, list[str](), found.grid.privacy
    if spent is not None:
        answer["privacy"] = plain(spent._asdict()) | {"sentence": str(spent)}
    if study is not None:
        answer |= {
            "rows": study.rows,
            "target": study.target,
            "left_out": asked.left_out,
            "seconds": study.seconds,
            "report": str(page),
        }
        notes = [
            f"{run.algorithm}, seed {run.seed}: {run.advice}" for run in study.runs if run.advice
        ]
        notes += [f"left out: {reason}" for reason in asked.left_out.values()]
        notes += [] if spent is None else [f"privacy: {spent}; a simulated epsilon protects nobody"]
        lines = [study.problem, "", tables.terminal(study.rows), "", *notes, f"report: {page}"]
    elif how.share is not None:
        lines = [f"{count_cells(out)} runs are finished in {out}"]
    if lines or how.as_json:
        print_answer(answer, lines, how.as_json)
    if failed:
        again = f"{len(failed)} of {len(found.grid.runs)} runs failed; to run these again: "
        failed.append(again + shlex.join(["fedscaffold", "resume", str(out)]))
        typer.echo("\n".join(failed), err=True)


def resume_comparison(folder: Path, how: How) -> int:
    """Continue an unfinished comparison, or run a share of it; return the exit code."""
    from fedscaffold.experiments.config_file import Config

    asked, ended = _read_request(folder) or (None, True)
    if asked is None or ended:
        raise InputError(
            f"the comparison in {folder} is finished: `fedscaffold report {folder}` makes its page "
            "anew"
        )
    config = Config.model_validate(asked.config)
    built = prepare_problem(config, side_by_side=True)
    return run_comparison(config, asked, built, folder, False, how)


def parse_share(text: str) -> slice:
    """Parse the share of a job array's task, such as "0/4".

    >>> parse_share("1/4")
    slice(1, None, 4)
    """
    first, sign, number = text.partition("/")
    if not (sign and first.isdecimal() and number.isdecimal() and int(first) < int(number)):
        raise InputError(
            f"--share must be I/N, the I-th of N shares, counted from 0, got {checks.shown(text)}"
        )
    return slice(int(first), None, int(number))


def write_slurm(
    config: Config,
    asked: ComparisonRequest,
    built: Built,
    out: Path,
    fresh: bool,
    script: Path,
    tasks: int,
) -> tuple[dict[str, Any], list[str]]:
    """Prepare the folder of a comparison, and write the script of a SLURM job array that runs it.

    Returns:
        The answer as an object and as lines.
    """
    from fedscaffold.experiments import compare as room
    from fedscaffold.state.files import owned

    total = room.validate_comparison(config, built, *_what(asked), asked.over)
    tasks = min(checks.whole("tasks", tasks), total)
    with owned(out):
        _prepare_folder(out, asked, fresh)
    beside = Path(sys.executable).with_name("fedscaffold")
    write_whole(
        script,
        SLURM.format(
            total=total,
            out=shlex.quote(str(out.absolute())),
            tasks=tasks,
            last=tasks - 1,
            script=shlex.quote(str(script)),
            here=shlex.quote(str(Path.cwd())),
            program=shlex.quote(str(beside) if beside.is_file() else "fedscaffold"),
        ),
    )
    answer = {"script": str(script), "tasks": tasks, "runs": total, "folder": str(out)}
    line = f"{script}: {tasks} tasks for {total} runs into {out}; submit it with: bash {script}"
    return answer, [line]


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
