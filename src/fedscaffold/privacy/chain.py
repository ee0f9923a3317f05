"""Chains: files of JSON lines, each with the hash of the line before, that are only appended to.

A line is on the disk before `append` returns. A last line without its end was not synced: nothing
was done for it, and the next line replaces it. Any other line that does not fit is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fedscaffold.state.files import (
    StateError,
    create,
    make_folder,
    open_file,
    reported,
    sync_folder,
    write_all,
)

__all__ = ["Chain", "Head"]

START = "0" * 64


class Head(NamedTuple):
    """The end of a chain: its number of lines and the hash of the last."""

    lines: int
    hash: str


class Chain(ABC):
    """A chain of facts. Its folder must be held by one process while it is appended to.

    Args:
        path: The file; made by the first line.
        private: Whether only its owner may read it.

    Raises:
        StateError: The file is damaged.
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path, self.private = path, private
        self._hashes: list[str] = []
        self._length = 0
        with reported(f"reading {path}"):
            self._read()

    @property
    def head(self) -> Head:
        """The end of the chain, which commits hold."""
        return Head(len(self._hashes), self._hashes[-1])

    def refuse(self, head: Any) -> None:
        """Raise StateError unless this chain goes on from a head that was seen before."""
        try:
            lines, digest = head
            known = self._hashes[lines - 1] == digest and lines > 0
        except (IndexError, TypeError, ValueError):
            known = False
        if not known:
            self._fail(
                "it lacks charges that the checkpoint knows of, so it was replaced or cut short; "
                "put it back"
            )

    @abstractmethod
    def _enter(self, fact: dict[str, Any], digest: str) -> None:
        """Take in a line; raise ValueError, KeyError or TypeError if it does not fit."""

    def _append(self, fact: dict[str, Any]) -> str:
        """Append a line, durably; return its hash."""
        fact = fact | {"before": self._hashes[-1] if self._hashes else START}
        digest = _hash(fact)
        line = json.dumps(fact | {"hash": digest}, sort_keys=True).encode() + b"\n"
        with reported(f"charging {self.path}", intact="no round was run for it"):
            make_folder(self.path.parent, self.private)
            there = os.path.lexists(self.path)
            fd = open_file(self.path, os.O_RDWR) if there else create(self.path, self.private)
            try:
                os.ftruncate(fd, self._length)
                os.lseek(fd, 0, os.SEEK_END)
                write_all(fd, line)
                os.fsync(fd)
            finally:
                os.close(fd)
            if not self._hashes:
                sync_folder(self.path.parent)
        self._take(fact, digest, len(line))
        return digest

    def _read(self) -> None:
        if not os.path.lexists(self.path):
            return
        fd = open_file(self.path)
        with os.fdopen(fd, "rb") as file:
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            try:
                fact = json.loads(line)
                digest = fact.pop("hash")
                before = self._hashes[-1] if self._hashes else START
                if digest != _hash(fact) or fact["before"] != before:
                    raise ValueError
                self._take(fact, digest, len(line) + 1)
            except StateError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                self._fail(f"line {len(self._hashes) + 1} is damaged; put a copy back")

    def _take(self, fact: dict[str, Any], digest: str, length: int) -> None:
        self._enter(fact, digest)
        self._hashes.append(digest)
        self._length += length

    def _fail(self, why: str) -> NoReturn:
        raise StateError(f"{self.path} is the ledger of what was spent: {why}; nothing is trained")


def _hash(fact: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()
