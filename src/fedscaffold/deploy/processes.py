"""Processes of our own: their groups, their descendants, and ending them without touching anybody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["Kin", "alive", "descendants", "end", "ended", "free_port", "signal_group"]


class Kin(NamedTuple):
    """A process and when it was started: a number alone may be given to another."""

    pid: int
    started: str


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; it is not reaped, so that its number stays its own until its group is ended too."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def alive(pid: int) -> bool:
    """Whether a process that is no child of ours is there, and not a zombie.

    >>> alive(os.getpid())
    True
    """
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return _stat(pid)[:1] != ["Z"]


def signal_group(pid: int, number: int) -> None:
    """Signal a process group; what is gone is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def descendants(pid: int) -> list[Kin]:
    """All processes below one, by /proc; none where there is no /proc."""
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


def end(kin: list[Kin], patience: float = 5.0) -> None:
    """Give processes some time to end by themselves, then end them."""
    until = time.monotonic() + patience
    while (left := [one for one in kin if _same(one)]) and time.monotonic() < until:
        time.sleep(0.05)
    for one in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


def _same(one: Kin) -> bool:
    fields = _stat(one.pid)
    return len(fields) > 19 and fields[19] == one.started and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    """State, parent ... start time of a process: the fields of /proc/PID/stat after its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
