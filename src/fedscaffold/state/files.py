"""File system primitives for durable state: atomic writes, locks, syncs.

Everything goes through `os`, one function per system call, so that tests can stop a writer between
any two; what differs between operating systems is in `platforms`.
"""

from __future__ import annotations

import errno
import os
import platform
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedscaffold.checks import InputError
from fedscaffold.state.platforms import (
    BINARY,
    CLOSE,
    NO_LINKS,
    NO_WAITING,
    lock,
    make_private,
    sync,
)

__all__ = [
    "StateError",
    "create",
    "locked",
    "make_folder",
    "open_file",
    "owned",
    "refuse_link",
    "reported",
    "sync_folder",
    "write_all",
    "write_private",
    "write_whole",
]

CHUNK = 8 << 20
"""Largest number of bytes per system call, so that signals are handled in between."""
OWNER = ".owner"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StateError(InputError):
    """State could not be written, or is damaged; the message says what is still intact."""


@contextmanager
def reported(doing: str, *, intact: str = "what was committed before is intact") -> Iterator[None]:
    """Convert OSError to StateError: what was being done, why it failed, and what is intact.

    >>> with reported("writing the model"):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: writing the model failed: the disk or the quota is full (No
    space left on device); what was committed before is intact; free some space and resume
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
    """Write all bytes of a contiguous buffer at the file's position, repeating short writes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view[:CHUNK]) :]


def create(path: Path, private: bool = False) -> int:
    """Create a file for reading and writing, replacing an existing one; links are not followed.

    A private file has mode 0600, whatever the umask.
    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINKS | CLOSE | BINARY
    fd = os.open(path, flags, 0o600 if private else 0o666)
    if private:
        make_private(fd)
    return fd


def write_whole(
    path: Path, data: bytes | str | Callable[[int], object], *, private: bool = False
) -> None:
    """Write a file atomically. Unlike a commit it is not synced, so a power cut may lose it.

    Args:
        path: The file. A symbolic link is replaced, not followed.
        data: Its bytes, its text (UTF-8), or a function that writes them to a file descriptor.
        private: Whether only its owner may read it, whatever the umask.
    """
    # another process may write the same file
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    fd = create(temporary, private)
    try:
        if callable(data):
            data(fd)
        else:
            write_all(fd, data.encode() if isinstance(data, str) else data)
    finally:
        os.close(fd)
    temporary.replace(path)


def write_private(path: Path, data: bytes | str | Callable[[int], object]) -> None:
    """Write a file atomically, readable by its owner only."""
    write_whole(path, data, private=True)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open an existing regular file without blocking.

    Raises:
        StateError: If it is a link, a pipe, a device or a folder.

    >>> open_file(Path("/dev/null"))
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: null is not a regular file
    """
    try:
        fd = os.open(path, flags | NO_LINKS | NO_WAITING | CLOSE | BINARY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StateError(f"{path.name} is a symbolic link, not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StateError(f"{path.name} is not a regular file")
    return fd


def refuse_link(folder: Path) -> None:
    """Raise StateError if a folder is a symbolic link.

    >>> refuse_link(Path("nowhere"))
    """
    if folder.is_symlink():
        raise StateError(
            f"{folder} is a symbolic link, and state is not written through links; give the "
            "folder itself"
        )


def sync_folder(folder: Path) -> None:
    """Sync a folder, which makes created and renamed files durable."""
    sync(folder)


def make_folder(folder: Path, private: bool = False) -> None:
    """Create `folder` and missing parents durably; private folders have mode 0700."""
    if not folder.is_dir():
        make_folder(folder.absolute().parent, private)
        folder.mkdir(exist_ok=True)
        if private:
            folder.chmod(0o700)
        sync_folder(folder.absolute().parent)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock file `path` and yield its descriptor; raise StateError if it is already locked.

    The lock is released when the process ends, however it ends; the file stays.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS | CLOSE | BINARY, 0o600)
    try:
        try:
            lock(fd)
        except BlockingIOError:
            raise StateError(
                f"{path.parent} is in use by another process; end it or take another folder"
            ) from None
        yield fd
    finally:
        os.close(fd)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Lock a folder for a run; raise StateError with the process number if it is in use.

    A killed owner leaves only an unlocked file behind.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> with owned(place), owned(place):
    ...     pass
    Traceback (most recent call last):
    fedscaffold.state.files.StateError: ... is in use by process ...: wait until it ends, or take
        another folder
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
    """Describe the process that has locked a file."""
    time.sleep(0.1)  # it may not have written its number yet
    number, _, host = path.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    if not number.isdigit():
        return "another process"
    return f"process {number}" if host == platform.node() else f"process {number} of {host}"
