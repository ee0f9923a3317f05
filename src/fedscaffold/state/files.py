"""Files that are whole or not there: the few system calls every kind of state is written and read with.

Everything goes through `os`, one call for one system call, so that the tests can stop a writer between any two.
POSIX only (Linux, macOS): folders are synced, locks are `flock`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError

__all__ = [
    "StateError", "create", "locked", "make_folder", "open_file", "owned", "refuse_link", "reported", "sync_folder",
    "write_all", "write_private",
]  # fmt: skip

CHUNK = 8 << 20
"""Bytes handed to one system call at most: large enough to cost nothing, small enough to interrupt."""
OWNER = ".owner"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StateError(InputError):
    """State that cannot be kept, or that is not what it claims to be; the sentence says what is still whole."""


@contextmanager
def reported(doing: str, *, intact: str = "what was committed before is intact") -> Iterator[None]:
    """Turn errors of the operating system into StateError: what was being done, why it failed, what is still whole.

    >>> with reported("writing the model"):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: writing the model failed: the disk or the quota is full (No space left on
    device); what was committed before is intact; free some space and resume
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        if error.errno in FULL:
            full = f"the disk or the quota is full ({why}); {intact}; free some space and resume"
            raise StateError(f"{doing} failed: {full}") from error
        raise StateError(f"{doing} failed: {why}; {intact}") from error


def write_all(fd: int, data: Any) -> None:
    """Write all bytes of a contiguous buffer at the file's position: the system may take fewer than it is given."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view[:CHUNK]) :]


def create(path: Path, private: bool = False) -> int:
    """Open a new file for reading and writing; a file of that name is removed first, a link is not followed.

    A private one is its owner's only, whatever the umask.
    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600 if private else 0o666)
    if private:
        os.fchmod(fd, 0o600)
    return fd


def write_private(path: Path, data: bytes | str) -> None:
    """Write a file that only its owner can read, whole or not at all; a view, not synced: a power cut may lose it."""
    temporary = path.with_name(path.name + ".part")
    fd = create(temporary, private=True)
    try:
        write_all(fd, data.encode() if isinstance(data, str) else data)
    finally:
        os.close(fd)
    temporary.replace(path)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open an existing regular file; links, pipes, devices and folders are refused, none of them can block us.

    >>> open_file(Path("/dev/null"))
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: null is not a regular file
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StateError(f"{path.name} is a symbolic link, not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StateError(f"{path.name} is not a regular file")
    return fd


def refuse_link(folder: Path) -> None:
    """Refuse a folder that is a symbolic link: state is written where it was asked for, and nowhere else.

    >>> refuse_link(Path("nowhere"))
    """
    if folder.is_symlink():
        raise StateError(f"{folder} is a symbolic link, and state is not written through links; give the folder itself")


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a file created or renamed is there after a power cut only after this."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, private: bool = False) -> None:
    """Create `folder` and its parents where they are missing, durably; private ones are their owner's only."""
    if not folder.is_dir():
        make_folder(folder.absolute().parent, private)
        folder.mkdir(exist_ok=True)
        if private:
            folder.chmod(0o700)
        sync_folder(folder.absolute().parent)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock file `path`; refused at once when another process (or thread) holds it.

    The lock goes with the process that holds it, however that one ends; the file stays. Yields its descriptor.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(f"{path.parent} is in use by another process; end it or take another folder") from None
        yield fd
    finally:
        os.close(fd)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a folder for the whole life of a run; while somebody else does, refused with the number of its process.

    What is left of an owner that was killed is no more than a file that nobody has locked.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> with owned(place), owned(place):
    ...     pass
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: ... is in use by process ...: wait until it ends, or take another folder
    """
    path = folder / OWNER
    make_folder(folder)
    with ExitStack() as stack:
        with reported(f"making {folder} the folder of one run"):
            try:
                fd = stack.enter_context(locked(path))
            except StateError:
                advice = "wait until it ends, or take another folder"
                raise StateError(f"{folder} is in use by {_owner(path)}: {advice}") from None
            os.ftruncate(fd, 0)
            write_all(fd, f"{os.getpid()} {platform.node()}\n".encode())
        yield


def _owner(path: Path) -> str:
    """Who has locked a file, in words."""
    time.sleep(0.1)  # it may be about to write its number down
    number, _, host = path.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    if not number.isdigit():
        return "another process"
    return f"process {number}" if host == platform.node() else f"process {number} of {host}"
