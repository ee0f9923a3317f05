"""What operating systems do differently: locks, flags, folders, and what only POSIX systems have.

Everything but deployment, runs of several processes and `client_state="file"` works without POSIX.
"""

from __future__ import annotations

import errno
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError

try:
    fcntl: Any = import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

__all__ = [
    "BINARY",
    "CLOSE",
    "NO_LINKS",
    "NO_WAITING",
    "cores",
    "lock",
    "make_private",
    "require",
    "sync",
]

NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAITING: int = getattr(os, "O_NONBLOCK", 0)
CLOSE: int = getattr(os, "O_CLOEXEC", 0)
BINARY: int = getattr(os, "O_BINARY", 0)
LOCKED_BYTE = 1 << 30  # Windows locks ranges of bytes, also against reading: one that no file has


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lock(fd: int) -> None:
    """Lock a file until it is closed; raise BlockingIOError if another process has locked it."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    msvcrt: Any = import_module("msvcrt")
    os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(errno.EAGAIN, "locked by another process") from error
    finally:
        os.lseek(fd, 0, os.SEEK_SET)


def make_private(fd: int) -> None:
    """Let only the owner read a file, where files have modes."""
    if hasattr(os, "fchmod"):
        os.fchmod(fd, 0o600)


def sync(folder: Path) -> None:
    """Sync a folder, where folders can be opened; elsewhere the system keeps them in order."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | CLOSE)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def require(call: str, what: str) -> None:
    """Raise an InputError if this system lacks a system call.

    Args:
        call: Name of the function in `os`.
        what: What needs it.

    >>> require("no_such_call", "client_state='file'")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: client_state='file' needs a POSIX system such as Linux or macOS:
    this one has no os.no_such_call
    """
    if not hasattr(os, call):
        raise InputError(
            f"{what} needs a POSIX system such as Linux or macOS: this one has no os.{call}"
        )
