"""Errors of a site's own code: what they say may be about a patient, so a type and a reference leave the site, no more.

The text and the traceback stay at the site, in `errors/REFERENCE.log` of its folder. The reference is drawn at random:
a fingerprint of the text could be guessed by trying texts. The type is the nearest one that Python itself has (or our
own `InputError`), as the names of other types are made by the app.
"""

from __future__ import annotations

import builtins
import contextlib
import secrets
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fedscaffold.checks import InputError
from fedscaffold.state import StateError
from fedscaffold.state.files import make_folder, write_private

__all__ = ["FOLDER", "Failed", "guarded", "type_of"]

FOLDER = "errors"
MOST_KEPT = 200  # files of a site; the oldest go first


class Failed(RuntimeError):
    """Something at a site failed; the text is fit to leave it."""


@contextlib.contextmanager
def guarded(doing: str, folder: Path, site: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever is raised inside, but `passing`, into `Failed`; what it says is kept in the site's `folder`."""
    through: tuple[type[BaseException], ...] = (KeyboardInterrupt, GeneratorExit, *passing)
    try:
        yield
    except through:
        raise
    except BaseException as error:  # the app may well call sys.exit
        where = _kept(doing, folder, site, error)
        raise Failed(f"{doing} failed: {type_of(error)} ({where})") from None  # a log must not show the error


def type_of(error: BaseException) -> str:
    """The nearest type of an error whose name the app cannot have made.

    >>> type_of(type("Patient4711", (KeyError,), {})())
    'KeyError'
    """
    cause = error.__cause__ if type(error) is InputError and error.__cause__ is not None else error
    known = (cls for cls in type(cause).__mro__ if cls is InputError or getattr(builtins, cls.__name__, None) is cls)
    return next(known).__name__


def _kept(doing: str, folder: Path, site: str, error: BaseException) -> str:
    """Write an error down at the site; returns where."""
    reference = secrets.token_hex(4)
    head = f"{datetime.now(UTC).isoformat(timespec='seconds')} {site}: {doing} failed\n\n"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # an error that cannot be shown is still one
        text = "its text could not be made\n"
    try:
        make_folder(folder / FOLDER, private=True)
        for old in sorted((folder / FOLDER).glob("*.log"), key=lambda path: path.stat().st_mtime)[: 1 - MOST_KEPT]:
            old.unlink(missing_ok=True)
        write_private(folder / FOLDER / f"{reference}.log", (head + text).encode(errors="backslashreplace"))
    except (OSError, StateError):
        return "which could not be written down there"
    return f"reference {reference}"
