"""`resume`: continue an interrupted run; and the parts shared by `run` and `resume`."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.comparison_folder import (
    ASKED,
    How,
    is_unfinished,
    parse_share,
    remove_cells,
    resume_comparison,
)
from fedscaffold.cli.interrupts import exit_with_line
from fedscaffold.cli.multi_process import SINGLE_PROCESS, Team, process_options, run_supervised
from fedscaffold.cli.verbs import (
    Json,
    Log,
    Watch,
    Workers,
    app,
    prepare_problem,
    print_answer,
    refuse_other_options,
    typed_command,
)
from fedscaffold.cli.watch import NO_VIEWERS, Viewers, check_viewers, open_callbacks
from fedscaffold.state.files import write_whole

if TYPE_CHECKING:
    from fedscaffold.experiments.config_file import Config
    from fedscaffold.runs import Study

__all__ = ["resume", "run_in_folder"]

CHECKPOINT = "checkpoint"
NEW = ".new"  # temporary folder of results


@app.command(epilog="Example: fedscaffold resume runs/first")
@process_options
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    rounds: Annotated[
        int | None, typer.Option(help="Rounds in all, instead of the config's.")
    ] = None,
    watch: Watch = False,
    log: Log = None,
    team: Team = SINGLE_PROCESS,
    workers: Workers = None,
    share: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Of a comparison, run the I-th of N shares only."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Go on with a run or a comparison after a crash, or with a run for more rounds.

    Same bits as without a break.
    """
    from fedscaffold.experiments.config_file import load

    if (folder / ASKED).is_file():
        allowed = ("--json", "--workers", "--share")
        refuse_other_options(context, "resume of a comparison", allowed)
        part = None if share is None else parse_share(share)
        return resume_comparison(folder, How(as_json, workers, part))
    if workers is not None or share is not None:
        raise InputError("--workers and --share are for comparisons, which consist of many runs")
    if not (folder / "config.toml").is_file():
        raise InputError(
            f"{folder} holds no run: config.toml is missing; `fedscaffold run CONFIG.toml` starts "
            "one"
        )
    seen_by = check_viewers(watch, log)
    config = load(folder / "config.toml", [] if rounds is None else [f"rounds={rounds}"])
    return run_supervised(
        team, folder, lambda: run_in_folder(config, folder, as_json, None, team, seen_by)
    )


def clear_for_new_run(folder: Path, fresh: bool) -> None:
    """Clear a folder for a new run: of a finished run, or of any if `fresh`."""
    from fedscaffold.runs.round_log import NAME
    from fedscaffold.simulation.checkpoint import discard, unfinished

    kept = folder / CHECKPOINT
    at = None if fresh else unfinished(kept)
    if at is not None or (not fresh and is_unfinished(folder)):
        what = (
            "runs of a sweep that was broken off"
            if at is None
            else f"a run that stopped after round {at}"
        )
        raise InputError(
            f"{folder} holds {what}: `fedscaffold resume {folder}` goes on; "
            "or give another folder, or --fresh to start anew there"
        )
    discard(kept)
    (folder / NAME).unlink(missing_ok=True)
    remove_cells(folder)
    (folder / ASKED).unlink(missing_ok=True)


def run_in_folder(
    config: Config,
    folder: Path,
    as_json: bool,
    fresh: bool | None = None,
    team: Team = SINGLE_PROCESS,
    seen_by: Viewers = NO_VIEWERS,
) -> int:
    """Run a configuration to its end and write the results to `folder`.

    Args:
        config: The configuration.
        folder: The run's folder.
        as_json: Whether to print JSON.
        fresh: None to continue from the folder's state, else whether a new run may replace an
            unfinished one.
        team: The processes of the run; the first one prepares the folder, prints and writes the
            results.
        seen_by: Live page and trackers.
    """
    if team.total is not None and config.local.lr == "tuned":
        raise InputError(
            "lr = 'tuned' is a sweep, which runs on one device: give a number for local.lr"
        )
    built = prepare_problem(config, team)
    from fedscaffold.experiments import compare as room
    from fedscaffold.experiments.config_file import to_toml
    from fedscaffold.simulation import Interrupted

    config = room.validate_run(config, built, team.total)
    words = shlex.join(["fedscaffold", "resume", str(folder), *team.flags()])
    _refuse_disagreement(team, config)
    with ExitStack() as stack:
        run_on_first_process(team, lambda: open_folder(stack, folder, to_toml(config), fresh))
        stack.enter_context(exit_with_line(f"stopped; go on with: {words}"))
        try:
            with (
                _print_state_warnings(),
                open_callbacks(config, built, folder, seen_by, team.is_main) as callbacks,
            ):
                line = None if team.is_main else False
                study = room.run(
                    config,
                    built,
                    typed_command(),
                    line,
                    folder / CHECKPOINT,
                    team.total,
                    callbacks,
                    folder,
                )
        except Interrupted as stop:
            typer.echo(
                f"fedscaffold: stopped after round {stop.round}; go on with: {words}", err=True
            )
            return 128 + stop.signal
        if team.is_main:
            page = room.write_results(study, folder)
            remove_cells(folder)
            _print_outcome(study, folder, page, as_json)
    return 0


def open_folder(stack: ExitStack, folder: Path, config: str, fresh: bool | None) -> None:
    """Lock the folder until `stack` is closed, and prepare it for a run of this configuration."""
    from fedscaffold.runs.round_log import NAME
    from fedscaffold.runs.run_folder import remove_study as clear_study
    from fedscaffold.state.files import owned

    stack.enter_context(owned(folder))
    for name in (CHECKPOINT, NAME, "config.toml", NEW):
        if (folder / name).is_symlink():
            raise InputError(
                f"{folder / name} is a symbolic link, and a run writes into its own folder only: "
                "remove it"
            )
    if fresh is not None:
        clear_for_new_run(folder, fresh)
        clear_study(folder)
    _write_config(folder / "config.toml", config)


def _refuse_disagreement(team: Team, config: Config) -> None:
    """Refuse processes with other configurations before the folder is touched."""
    if team.processes == 1:
        return
    from fedscaffold.simulation.distributed import check_same_run, detect_lost_processes
    from fedscaffold.simulation.fingerprint import flat

    with detect_lost_processes():
        check_same_run(flat(config.model_dump(mode="json", exclude_none=True)))


def run_on_first_process(team: Team, work: Callable[[], None]) -> None:
    """Run `work` on the first process while the others wait; if it fails, all raise its error."""
    if team.processes == 1:
        work()
        return
    from fedscaffold.simulation.distributed import detect_lost_processes, run_everywhere

    with detect_lost_processes():
        run_everywhere(work if team.is_main else lambda: None)


def _write_config(path: Path, text: str) -> None:
    """Write the resolved configuration before the first round, for `resume`."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


@contextmanager
def _print_state_warnings() -> Iterator[None]:
    """Print warnings about state as lines on stderr."""
    from fedscaffold.simulation.checkpoint import StateWarning

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, StateWarning):
                typer.echo(f"fedscaffold: {message}", err=True)
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", StateWarning)
        yield


def _print_outcome(study: Study, folder: Path, page: Path, as_json: bool) -> None:
    run = study.runs[0]
    last = {name: column[-1].item() for name, column in run.columns.items()}
    answer = {
        "rounds": int(run.columns["round"][-1]),
        "reached_at": run.reached_at,
        "diverged_at": run.diverged_at,
        "advice": run.advice,
        "lr": run.lr,
        "last": last,
        "residual": run.residual,
        "digest": run.digest,
        "seconds": study.seconds,
        "folder": str(folder),
        "report": str(page),
    }
    words = [f"{study.problem}: {run.algorithm}, {answer['rounds']} rounds"]
    words += [f"  {name} = {value:.6g}" for name, value in last.items() if isinstance(value, float)]
    words += [f"  {run.advice}"] if run.advice else []
    print_answer(answer, [*words, f"report: {page}"], as_json)
