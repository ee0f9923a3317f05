"""Errors in a site's code: only a type and a reference leave the site.

Messages of errors may contain private data.

The message and the traceback are written to `errors/REFERENCE.log` in the site's folder. The
reference is random, since a hash of the text could be inverted by guessing. The type is the nearest
built-in base class (or `InputError`), since the names of other classes are chosen by the app.
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

__all__ = ["FOLDER", "HINTS", "Failed", "Hint", "guarded", "public_type_of"]

FOLDER = "errors"
MOST_KEPT = 200  # log files per site; the oldest are deleted


HINTS = {
    "one record": "step {step} has a batch of one record, on which batch normalisation cannot be "
    "trained: set local.drop_last = true, or a local.batch_size that leaves no such batch",
    "too few": "its {records} records are fewer than a batch of {batch}, and local.drop_last "
    "leaves "
    "such batches out: take a smaller local.batch_size",
    "no batch": "its DataLoader makes no batch of its {records} records: take a smaller "
    "batch_size, "
    "or drop_last=False",
}
"""Sentences that may leave a site, with whole numbers to fill in."""


class Hint(InputError):
    """An error of local training that the site may explain: a sentence of `HINTS`.

    >>> Hint("too few", records=3, batch=8).sentence.partition(",")[0]
    'its 3 records are fewer than a batch of 8'
    """

    def __init__(self, name: str, **numbers: int) -> None:
        self.name, self.numbers = name, numbers
        super().__init__(self.sentence)

    @property
    def sentence(self) -> str:
        """The sentence; it can hold nothing else, whoever raised the error."""
        return HINTS[self.name].format(**{name: int(n) for name, n in self.numbers.items()})


class Failed(RuntimeError):
    """A site failed; the message contains no private data."""


@contextlib.contextmanager
def guarded(
    doing: str,
    folder: Path,
    site: str,
    passing: tuple[type[Exception], ...] = (),
    typed: bool = True,
) -> Iterator[None]:
    """Convert exceptions to `Failed` and write their texts to `folder`.

    Args:
        doing: What is being done, for the message.
        folder: The site's folder.
        site: The site's name.
        passing: Exceptions that propagate unchanged.
        typed: Whether the error's type may leave the site.
    """
    through: tuple[type[BaseException], ...] = (KeyboardInterrupt, GeneratorExit, *passing)
    try:
        yield
    except through:
        raise
    except BaseException as error:  # including SystemExit
        where = _write_error(doing, folder, site, error)
        said = error.sentence if type(error) is Hint else public_type_of(error)
        why = f": {said}" if typed else ""
        raise Failed(f"{doing} failed{why} ({where})") from None  # no error in the traceback


def public_type_of(error: BaseException) -> str:
    """Return the name of the nearest base class that is built in or `InputError`.

    >>> public_type_of(type("Patient4711", (KeyError,), {})())
    'KeyError'
    """
    cause = error.__cause__ if type(error) is InputError and error.__cause__ is not None else error
    known = (
        cls
        for cls in type(cause).__mro__
        if cls is InputError or getattr(builtins, cls.__name__, None) is cls
    )
    return next(known).__name__


def _write_error(doing: str, folder: Path, site: str, error: BaseException) -> str:
    """Write an error to the site's folder; return its reference."""
    reference = secrets.token_hex(4)
    head = f"{datetime.now(UTC).isoformat(timespec='seconds')} {site}: {doing} failed\n\n"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # its __str__ may fail
        text = "its text could not be made\n"
    try:
        make_folder(folder / FOLDER, private=True)
        for old in sorted((folder / FOLDER).glob("*.log"), key=lambda path: path.stat().st_mtime)[
            : 1 - MOST_KEPT
        ]:
            old.unlink(missing_ok=True)
        write_private(
            folder / FOLDER / f"{reference}.log", (head + text).encode(errors="backslashreplace")
        )
    except (OSError, StateError):
        return "which could not be written down there"
    return f"reference {reference}"
