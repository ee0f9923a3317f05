"""Child processes: groups, descendants, and ending them without affecting others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Kin",
    "descendants",
    "end_processes",
    "free_port",
    "has_ended",
    "is_alive",
    "signal_group",
    "start_of",
]


class Kin(NamedTuple):
    """A process id with its start time, as ids are reused."""

    pid: int
    started: str


def free_port() -> int:
    """Return a TCP port that is currently unused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended, without reaping it.

    Its id stays reserved until its group is ended too.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def is_alive(pid: int, started: str = "") -> bool:
    """Return whether a process (not a child) exists and is not a zombie.

    Args:
        pid: Its id.
        started: Its start time, as after a reboot another may have the id; "" for any.

    >>> is_alive(os.getpid()), is_alive(os.getpid(), start_of(os.getpid()))
    (True, True)
    """
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return _stat(pid)[:1] != ["Z"] and started in ("", start_of(pid))


def start_of(pid: int) -> str:
    """Return the start time of a process; "" where /proc does not tell."""
    return "".join(_stat(pid)[19:20])


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def descendants(pid: int) -> list[Kin]:
    """Return all descendants of a process from /proc; none where /proc does not exist."""
    below: dict[int, list[Kin]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if len(fields) > 19:
            below.setdefault(int(fields[1]), []).append(Kin(int(entry.name), fields[19]))
    found: list[Kin] = []
    waiting = [pid]
    while waiting:
        children = below.get(waiting.pop(), [])
        found += children
        waiting += [child.pid for child in children]
    return found


def end_processes(kin: list[Kin], patience: float = 5.0) -> None:
    """Wait up to `patience` seconds for processes to end, then kill them."""
    until = time.monotonic() + patience
    while (left := [one for one in kin if _is_running(one)]) and time.monotonic() < until:
        time.sleep(0.05)
    for one in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


def _is_running(one: Kin) -> bool:
    fields = _stat(one.pid)
    return len(fields) > 19 and fields[19] == one.started and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or none if the process is gone.

    The first is the state, the second the parent, the twentieth the start time.
    """
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return []
