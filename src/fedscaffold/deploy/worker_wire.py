"""The wire between a site's messenger and its worker: packets over a Unix socket.

A frame is

    8 bytes     MAGIC, which names the version of this format
    4 bytes     length of the head, big endian
    head        JSON: note (what the two tell each other), facts, and of each blob its name, dtype,
                shape and length
    blobs       their bytes, one after the other

The socket has mode 0600 and lies in a folder of mode 0700. Each side asks the kernel for the user
of the other (SO_PEERCRED), and talks to its own only. Addresses of sockets have 107 bytes at most,
so the folder is opened and named by its descriptor.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fedscaffold
from fedscaffold.checks import InputError
from fedscaffold.deploy.packets import Blob, Packet

__all__ = [
    "AVAILABLE",
    "FOLDER",
    "WORKER",
    "BrokenFrame",
    "Connection",
    "Frame",
    "OtherLanguage",
    "code_version",
    "connect",
    "listen",
    "open_place",
]

AVAILABLE = hasattr(socket, "SO_PEERCRED") and Path("/proc/self/fd").is_dir()
"""Whether this system can tell the peer of a socket; without it there are no workers."""
WORKER = ("-P", "-m", "fedscaffold.deploy.worker")
"""Python's arguments that run a worker; without the current folder among those of imports."""
FOLDER, SOCKET = "worker", "socket"
MAGIC = b"fsworkr1"
MOST_HEAD = 16 << 20  # bytes
MOST_BYTES = 64 << 30  # of all blobs of a frame
BUFFER = 1 << 20


class BrokenFrame(ConnectionError):
    """What came is no whole frame of this format."""


class OtherLanguage(BrokenFrame):
    """The peer uses another version of this format."""


class Frame(NamedTuple):
    """What is sent at once."""

    note: dict[str, Any]
    packet: Packet = Packet({}, {})


def code_version() -> str:
    """Return what tells this installation from another: version, place and time of installation."""
    place = Path(__file__).parent.parent / "__init__.py"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{fedscaffold.__version__} {python} {place.parent} {place.stat().st_mtime_ns}"


@contextmanager
def open_place(folder: Path) -> Iterator[int]:
    """Open the folder of a worker's socket, made with mode 0700 if needed; yield its descriptor.

    Raises:
        InputError: Others than this user could use it.
    """
    place = folder / FOLDER
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        held = os.fstat(fd)
        if held.st_uid != os.geteuid() or stat.S_IMODE(held.st_mode) & 0o077:
            raise InputError(
                f"{place} must belong to this user, with mode 700; it has "
                f"{stat.S_IMODE(held.st_mode):o} and user {held.st_uid}"
            )
        yield fd
    finally:
        os.close(fd)


class Connection:
    """A connected socket whose peer is of the same user; a context manager that closes it."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a socket.

        Raises:
            InputError: The peer is of another user.
        """
        said = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.peer, user, _ = struct.unpack("3i", said)
        """The process at the other end."""
        self.begun = False
        """Whether the peer has begun with what it was asked."""
        self.link, self.reader = link, link.makefile("rb", BUFFER)
        if user != os.geteuid():
            self.close()
            raise InputError(f"the process at the other end is of user {user}: nothing was said")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.reader.close()
        self.link.close()

    def send(self, frame: Frame, timeout: float | None = None) -> None:
        """Send a frame.

        Raises:
            ValueError: The packet holds something else than facts of JSON's types and blobs.
        """
        note, (facts, blobs) = frame
        try:
            rows = [[name, b.dtype, b.shape, len(b.data)] for name, b in blobs.items()]
            head = json.dumps({"note": note, "facts": facts, "blobs": rows}).encode()
        except (AttributeError, TypeError):
            raise ValueError("the packet holds facts or arrays of other types than ours") from None
        if len(head) > MOST_HEAD or sum(len(b.data) for b in blobs.values()) > MOST_BYTES:
            raise ValueError("the packet is too large for a worker")
        self.link.settimeout(timeout)
        self.link.sendall(MAGIC + struct.pack(">I", len(head)) + head)
        for b in blobs.values():
            self.link.sendall(b.data)

    def receive(self, timeout: float | None = None) -> Frame:
        """Wait for a frame.

        Raises:
            BrokenFrame: The peer has closed the connection, or has sent something else.
            TimeoutError: Nothing came for `timeout` seconds.
        """
        self.link.settimeout(timeout)
        begin = self._read(len(MAGIC) + 4)
        (length,) = struct.unpack(">I", begin[len(MAGIC) :])
        if not begin.startswith(MAGIC) or length > MOST_HEAD:
            raise OtherLanguage("it speaks another language")
        try:
            head = json.loads(self._read(length))
            note, facts = dict(head["note"]), dict(head["facts"])
            rows = [
                (str(n), str(k), tuple(map(int, s)), int(size)) for n, k, s, size in head["blobs"]
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise BrokenFrame("its head cannot be read") from error
        if any(size < 0 for *_, size in rows) or sum(size for *_, size in rows) > MOST_BYTES:
            raise BrokenFrame("it is too large")
        blobs = {name: Blob(kind, shape, self._read(size)) for name, kind, shape, size in rows}
        return Frame(note, Packet(facts, blobs))

    def _read(self, size: int) -> bytes:
        data: bytes = self.reader.read(size)
        if len(data) != size:
            raise BrokenFrame("the connection was closed")
        return data


def listen(place: int) -> socket.socket:
    """Listen on the socket of a worker; one that a dead worker left is replaced."""
    address = _address(place)
    Path(address).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    Path(address).chmod(0o600)  # before it listens, in a folder that no one else can enter
    listener.listen(16)
    return listener


def connect(place: int) -> Connection:
    """Connect to a worker.

    Raises:
        OSError: There is none: FileNotFoundError, or ConnectionRefusedError at a dead one's socket;
            BlockingIOError where too many wait for it.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(0.0)
    try:
        link.connect(_address(place))
    except BaseException:
        link.close()
        raise
    return Connection(link)


def _address(place: int) -> str:
    return f"/proc/self/fd/{place}/{SOCKET}"
