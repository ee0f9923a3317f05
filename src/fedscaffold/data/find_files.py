"""Locate and read the user's copies of public data sets."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from fedscaffold.checks import InputError

__all__ = ["VARIABLE", "read"]

VARIABLE = "FEDSCAFFOLD_DATA"


def read(
    name: str, folder: Path | None, within: str, original: str, also: Sequence[Path] = ()
) -> tuple[bytes, str]:
    """Return the content of the file `name`, or of `name.gz` unpacked, and its path.

    Searches the subfolder `within` of `folder`, then `folder` itself, then the folders `also`. The
    default `folder`, None, is that of the environment variable FEDSCAFFOLD_DATA. `original` names
    the public source, for messages.

    >>> read("a9a", Path("nowhere"), "libsvm", "LIBSVM data sets page")
    Traceback (most recent call last):
    FileNotFoundError: a9a not found in nowhere/libsvm, nowhere; get it from LIBSVM data sets page,
    then set FEDSCAFFOLD_DATA or pass --data DIR
    """
    given = os.environ.get(VARIABLE, "")
    root = folder if folder is not None else Path(given) if given else None
    root = root and root.expanduser()
    places = [*([root / within, root] if root else []), *also]
    for path in (place / (name + suffix) for place in places for suffix in ("", ".gz")):
        if exists(path):
            return content(path), str(path)
    looked = f"in {', '.join(map(str, places))}" if places else f"({VARIABLE} is not set)"
    raise FileNotFoundError(
        f"{name} not found {looked}; get it from {original}, then set {VARIABLE} or pass --data DIR"
    )


def exists(path: Path) -> bool:
    """Return whether `path` is a file; False if the system cannot look it up.

    >>> exists(Path("x" * 5000))
    False
    """
    try:
        return path.is_file()
    except OSError:
        return False


def content(path: Path) -> bytes:
    """Return the bytes of a file, decompressed if it ends in .gz.

    Raise InputError if it cannot be read.

    >>> content(Path("."))
    Traceback (most recent call last):
    fedscaffold.checks.InputError: . cannot be read (IsADirectoryError); fetch it again or
    mend its permissions
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        reason = f"({type(error).__name__}); fetch it again or mend its permissions"
        raise InputError(f"{path} cannot be read {reason}") from None
