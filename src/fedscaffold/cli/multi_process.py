"""Runs on several processes or hosts: flags, and one line if a process is lost.

JAX terminates a process from native code when the coordinator or a peer is lost, and no Python runs
after that. The run is therefore a child process, whose parent only reports what happened.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fedscaffold.checks import InputError
from fedscaffold.cli.interrupts import disable_second_signal, exit_with_line
from fedscaffold.cli.options import replace_parameter
from fedscaffold.state.platforms import require

__all__ = ["SINGLE_PROCESS", "Team", "process_options", "run_supervised", "team_of"]

LOST = 3  # exit code if another process of the run is gone
# of which one is set in each process that SLURM's srun or Open MPI's mpirun starts
CLUSTERS = "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri"
REPORTED = "."  # the child has printed how it ended


class Team(NamedTuple):
    """The devices and processes of a run."""

    devices: int = 1
    coordinator: str | None = None
    processes: int = 1
    process_id: int = 0
    deadline: int = 60

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes the results."""
        return self.process_id == 0

    @property
    def total(self) -> int | None:
        """Number of devices that share the clients; None for a single device."""
        number = self.devices * self.processes
        return None if number == 1 else number

    def begin(self) -> None:
        """Configure JAX for these devices and join the other processes.

        JAX must not have started.
        """
        if self.total is not None:
            from fedscaffold.simulation.distributed import join

            join(
                self.coordinator,
                self.processes,
                self.process_id,
                devices=self.devices,
                deadline=self.deadline,
            )

    def flags(self) -> list[str]:
        """Return the flags for resuming."""
        if self.processes == 1:
            return [] if self.devices == 1 else ["--devices", str(self.devices)]
        own = ["--coordinator", str(self.coordinator), "--processes", str(self.processes)]
        return [*own, "--process-id", str(self.process_id)]


SINGLE_PROCESS = Team()


def team_of(
    devices: Annotated[
        int, typer.Option("--devices", help="Devices of this process that share the clients.")
    ] = 1,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", metavar="HOST:PORT", help="Several processes: where process 0 listens."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            help="Several processes: how many; by default those of the SLURM or Open MPI job.",
        ),
    ] = None,
    process_id: Annotated[
        int | None,
        typer.Option("--process-id", help="Several processes: which one this is, from 0."),
    ] = None,
    deadline: Annotated[
        int,
        typer.Option(
            "--deadline", help="Several processes: seconds until a silent one counts as gone."
        ),
    ] = 60,
) -> Team:
    """Return the team described by the flags.

    >>> team_of(1, "localhost:1234", 2, None, 60)
    Traceback (most recent call last):
    fedscaffold.checks.InputError: a run on several processes needs --coordinator HOST:PORT,
        --processes P and ...
    """
    from fedscaffold import checks

    checks.whole("--devices", devices)
    checks.whole("--deadline", deadline, at_least=2)
    if coordinator is None and processes is None and process_id is None:
        coordinator, processes, process_id = _detect_cluster()
    processes = 1 if processes is None else checks.whole("--processes", processes)
    given = (coordinator is not None, processes > 1, process_id is not None)
    if any(given) and not all(given):
        raise InputError(
            "a run on several processes needs --coordinator HOST:PORT, --processes P and "
            "--process-id I, all three, "
            "with P of at least 2"
        )
    if process_id is not None:
        checks.whole("--process-id", process_id, at_least=0, at_most=processes - 1)
    return Team(devices, coordinator, processes, process_id or 0, deadline)


def _detect_cluster() -> tuple[str | None, int | None, int | None]:
    """Return the coordinator, the number of processes and this one's, if a cluster started them."""
    if not any(name in os.environ for name in CLUSTERS):
        return None, None, None
    from fedscaffold.simulation.distributed import detect_cluster

    return detect_cluster() or (None, None, None)


def process_options(verb: Callable[..., int]) -> Callable[..., int]:
    """Decorate a verb that takes `team` to take the flags of `team_of` instead."""
    return replace_parameter(
        verb, "team", inspect.signature(team_of, eval_str=True).parameters, team_of
    )


def run_supervised(team: Team, folder: Path, work: Callable[[], int]) -> int:
    """Run one process of a team in a child and return its exit code.

    Report if the child was terminated.

    Args:
        team: The devices and processes of the run.
        folder: The run's folder.
        work: The run; returns the exit code.
    """
    if team.processes == 1:
        return work()
    require("fork", "a run of several processes")
    disable_second_signal()
    said, telling = os.pipe()
    alive, living = os.pipe()
    logged, logging = os.pipe()
    pid = os.fork()
    if pid == 0:
        for end in (said, living, logged):
            os.close(end)
        return _run_child(work, telling, alive, logging)
    for end in (telling, alive, logging):
        os.close(end)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    with os.fdopen(logged, "rb") as log, os.fdopen(said, "rb") as words:
        lines = log.read().decode(errors="replace")  # to its end, which is the child's
        sentence = words.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if os.environ.get("FEDSCAFFOLD_DEBUG"):
        sys.stderr.write(lines)
    if sentence == REPORTED:
        return (
            code if code >= 0 else 2
        )  # JAX may terminate it when it leaves the others after an error
    if not sentence:
        _refuse_start(team, lines)
    _print_lost(team, folder, sentence or _describe_exit(team, code, lines))
    return LOST


def _run_child(work: Callable[[], int], words: int, alive: int, logging: int) -> int:
    """Child side: exit with the parent, and send it JAX's log and how the work ended."""
    os.setpgid(0, 0)  # receive Ctrl-C once, from the parent
    for number, name in (
        (1, "stdout"),
        (2, "stderr"),
    ):  # Python keeps its streams, native code writes to the parent
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1))
        os.dup2(logging, number)
    os.close(logging)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    with exit_with_line("interrupted", last=lambda: os.write(words, REPORTED.encode())):
        return _run_and_report(work, words)


def _run_and_report(work: Callable[[], int], words: int) -> int:
    """Do the work and tell the parent how it ended."""
    from fedscaffold.simulation.distributed import Lost, leave

    sentence = REPORTED
    try:
        code = work()
        leave()
    except Lost as gone:
        sentence = str(gone)
        os.write(words, sentence.encode())
        os._exit(LOST)  # a regular exit would wait for the others
    finally:
        if sentence == REPORTED:
            os.write(words, sentence.encode())
    return code


def _end_with(alive: int) -> None:
    """Wait until the parent is gone, and exit."""
    while os.read(alive, 1):
        pass
    os._exit(LOST)


def _refuse_start(team: Team, lines: str) -> None:
    """Raise InputError if JAX's log shows that the processes did not all join."""
    if twice := re.search(r"(\d+) unexpectedly tried to connect", lines):
        raise InputError(
            f"two processes say that they are process {twice[1]}: give each a --process-id of its "
            "own"
        )
    if "CoordinationService/RegisterTask" in lines:
        raise InputError(
            f"not all of the {team.processes} processes came within {team.deadline} s: start each "
            "with the same --coordinator and --processes, or one alone with --processes 1"
        )


def _describe_exit(team: Team, code: int, lines: str) -> str:
    """Return why the child ended without a report, from JAX's log."""
    own = f"process {team.process_id} of {team.processes}"
    if code == -9:
        return f"{own} was killed"
    silent = re.search(r"roll call: process ([0-9, ]+) is gone", lines)
    silent = silent or re.search(r"stopped sending heartbeats\):\s*([0-9\s]+)", lines)
    gone = [] if silent is None else re.findall(r"\d+", silent[1])
    gone = [number for number in gone if number != str(team.process_id)]
    if not gone and "Failed to send RPC to coordination service" in lines:
        gone = ["0"]
    return (
        f"{own} has lost process {', '.join(gone)}"
        if gone
        else f"{own} has lost touch with the others"
    )


def _print_lost(team: Team, folder: Path, what: str) -> None:
    from fedscaffold.simulation.checkpoint import last_round

    try:
        stands = last_round(folder / "checkpoint")
    except InputError:
        stands = None
    words = shlex.join(["fedscaffold", "resume", str(folder), *team.flags()])
    kept = "there is no checkpoint: start anew"
    if stands is not None:
        last = ", the last" if stands[1] else ""
        kept = f"the last common checkpoint is after round {stands[0]}{last}"
        kept += f"; go on, with as many processes as you like: {words}"
    sys.stderr.write(f"fedscaffold: {what}; {kept}\n")
