"""`resume`: go on with a run that was ended, however; and what `run` and `resume` share."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.compare import ASKED, CELLS, broken_off, clear, go_on
from fedscaffold.cli.interrupts import saying
from fedscaffold.cli.team import ALONE, Coordinator, Deadline, Devices, Processes, ProcessId, Team, team_of, watched
from fedscaffold.cli.verbs import Json, Log, Watch, app, only, prepared, say
from fedscaffold.cli.watch import NOBODY, Shown, followed, shown

if TYPE_CHECKING:
    from fedscaffold.experiments.config import Config
    from fedscaffold.report import Study

__all__ = ["carry_out", "resume"]

CHECKPOINT = "checkpoint"
NEW = ".new"  # where results are written before they are moved to their places


@app.command(epilog="Example: fedscaffold resume runs/first")
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    rounds: Annotated[int | None, typer.Option(help="Rounds in all, instead of the config's.")] = None,
    watch: Watch = False,
    log: Log = None,
    devices: Devices = 1,
    coordinator: Coordinator = None,
    processes: Processes = 1,
    process_id: ProcessId = None,
    deadline: Deadline = 60,
    as_json: Json = False,
) -> int:
    """Go on with a run or a comparison after a crash, or with a run for more rounds; same bits as without a break."""
    from fedscaffold.experiments.config import load

    if (folder / ASKED).is_file():
        only(context, "resume of a comparison", ("--json",))
        go_on(folder, as_json)
        return 0
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} holds no run: config.toml is missing; `fedscaffold run CONFIG.toml` starts one")
    seen_by = shown(watch, log)
    config = load(folder / "config.toml", [] if rounds is None else [f"rounds={rounds}"])
    team = team_of(devices, coordinator, processes, process_id, deadline)
    return watched(team, folder, lambda: carry_out(config, folder, as_json, None, team, seen_by))


def make_way(folder: Path, fresh: bool) -> None:
    """Let a new run into a folder: in place of a finished one, or of any if `fresh`."""
    from fedscaffold.report.record import NAME
    from fedscaffold.simulation.checkpoint import discard, unfinished

    kept = folder / CHECKPOINT
    at = None if fresh else unfinished(kept)
    if at is not None or (not fresh and broken_off(folder)):
        what = "runs of a sweep that was broken off" if at is None else f"a run that stopped after round {at}"
        raise InputError(
            f"{folder} holds {what}: `fedscaffold resume {folder}` goes on; "
            "or give another folder, or --fresh to start anew there"
        )
    discard(kept)
    (folder / NAME).unlink(missing_ok=True)
    clear(folder)
    (folder / ASKED).unlink(missing_ok=True)


def carry_out(
    config: Config,
    folder: Path,
    as_json: bool,
    fresh: bool | None = None,
    team: Team = ALONE,
    seen_by: Shown = NOBODY,
) -> int:
    """Run a configuration to its end and keep the results in `folder`, from where that stands if `fresh` is None.

    Of a team's processes the first one makes the folder ready, prints and writes the results.
    """
    if team.total is not None and config.local.lr == "tuned":
        raise InputError("lr = 'tuned' is a sweep, which runs on one device: give a number for local.lr")
    built = prepared(config, team)
    from fedscaffold.experiments import compare as room
    from fedscaffold.experiments.cells import Store
    from fedscaffold.experiments.config import to_toml
    from fedscaffold.simulation import Interrupted

    room.refuse(config, built, team.total)
    config = room.placed(config, built)
    command = shlex.join(["fedscaffold", *sys.argv[1:]])
    words = shlex.join(["fedscaffold", "resume", str(folder), *team.flags()])
    with ExitStack() as stack:
        first(team, lambda: opened(stack, folder, to_toml(config), fresh))
        stack.enter_context(saying(f"stopped; go on with: {words}"))
        try:
            with _told(), followed(config, built, folder, seen_by, team.speaks) as record:
                line = None if team.speaks else False
                memo = Store(folder / CELLS)
                study = room.run(config, built, command, line, folder / CHECKPOINT, team.total, record, memo)
        except Interrupted as stop:
            typer.echo(f"fedscaffold: stopped after round {stop.round}; go on with: {words}", err=True)
            return 128 + stop.signal
        if team.speaks:
            page = room.keep(study, folder)
            clear(folder)
            _say_outcome(study, folder, page, as_json)
    return 0


def opened(stack: ExitStack, folder: Path, config: str, fresh: bool | None) -> None:
    """Make the folder ready for a run of this configuration, and its own as long as `stack` lasts."""
    from fedscaffold.report.record import NAME
    from fedscaffold.state.files import owned

    stack.enter_context(owned(folder))
    for name in (CHECKPOINT, NAME, "config.toml", NEW):
        if (folder / name).is_symlink():
            raise InputError(
                f"{folder / name} is a symbolic link, and a run writes into its own folder only: remove it"
            )
    if fresh is not None:
        make_way(folder, fresh)
    _settled(folder / "config.toml", config)


def first(team: Team, work: Callable[[], None]) -> None:
    """Let the first process do something that all wait for; if it cannot, all raise the reason."""
    if team.processes == 1:
        work()
        return
    from fedscaffold.simulation.hosts import together, tried

    with together():
        tried(work if team.speaks else lambda: None)


def _settled(path: Path, text: str) -> None:
    """Write the resolved configuration before the first round: `resume` goes by it."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(".config.toml.new")
    new.unlink(missing_ok=True)  # or it would be written through, if somebody made it a link
    with new.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
    new.replace(path)


@contextmanager
def _told() -> Iterator[None]:
    """Warnings about state as lines for the user."""
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


def _say_outcome(study: Study, folder: Path, page: Path, as_json: bool) -> None:
    curve = study.curves[0]
    last = {name: column[-1].item() for name, column in curve.columns.items()}
    answer = {
        "rounds": int(curve.columns["round"][-1]),
        "reached_at": curve.reached_at,
        "diverged_at": curve.diverged_at,
        "advice": curve.advice,
        "lr": curve.lr,
        "last": last,
        "residual": curve.residual,
        "digest": curve.digest,
        "seconds": study.seconds,
        "folder": str(folder),
        "report": str(page),
    }
    words = [f"{study.problem}: {curve.algorithm}, {answer['rounds']} rounds"]
    words += [f"  {name} = {value:.6g}" for name, value in last.items() if isinstance(value, float)]
    words += [f"  {curve.advice}"] if curve.advice else []
    say(answer, [*words, f"report: {page}"], as_json)
