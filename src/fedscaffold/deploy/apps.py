"""User apps: a folder with `federation.toml` and `app.py`, which defines `learner(settings)`.

Modules and other files beside `app.py` belong to the app (`app_files`, `app_imports`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from fedscaffold.checks import InputError
from fedscaffold.deploy.app_files import APP, TOML, app_files, fingerprints
from fedscaffold.deploy.app_imports import import_app
from fedscaffold.deploy.client import Learner
from fedscaffold.deploy.settings import Settings, load

__all__ = ["APP", "TOML", "open_app", "read_settings"]


def read_settings(folder: Path) -> Settings:
    """Read the settings of an app's folder, with the digests of its files, and run nothing of it.

    Raises:
        FileNotFoundError: If there is no `app.py` or no `federation.toml`.
    """
    settings, path = load(Path(folder) / TOML), Path(folder) / APP
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; `fedscaffold deploy new DIR` writes one")
    return settings._replace(app=fingerprints(app_files(path.parent, settings.deploy.exclude)))


def open_app(
    folder: Path, check: Callable[[Settings], object] = lambda settings: None
) -> tuple[Settings, Learner]:
    """Read the settings of an app's folder, import its `app.py`, and make its learner.

    Args:
        folder: The folder.
        check: Called with the settings before anything of the app is run; it may raise.

    Returns:
        The settings, with the digests of the app's files, and the learner.

    Raises:
        FileNotFoundError: If there is no `app.py` or no `federation.toml`.
        InputError: If the app cannot be imported, or returns no learner of the settings' precision.
    """
    settings, path = read_settings(folder), Path(folder) / APP
    check(settings)
    try:
        module = import_app(path)
    except Exception as error:
        raise InputError(f"{path} cannot be imported: {_summarize_error(error, path)}") from error
    make = getattr(module, "learner", None)
    if not callable(make):
        raise InputError(
            f"{path} must have a function learner(settings) that returns a TorchLearner or the like"
        )
    try:
        made: Learner = make(settings)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"learner(settings) of {path} failed: {_summarize_error(error, path)}"
        ) from error
    if not hasattr(made, "schema"):
        raise InputError(
            f"learner(settings) of {path} must return a TorchLearner or the like, got {made!r}"[
                :300
            ]
        )
    if made.schema.dtype != settings.precision:
        raise InputError(
            f"the learner is {made.schema.dtype} and precision is {settings.precision}; give the "
            "learner precision=settings.precision"
        )
    return settings, made


def _summarize_error(error: Exception, path: Path) -> str:
    """Return an error of the app in one line: type, line number, file beside app.py, message."""
    folder = path.resolve().parent
    frames = [
        (Path(frame.filename).resolve(), frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((Path(error.filename).resolve(), error.lineno))
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    inside = [(file, line) for file, line in frames if file.is_relative_to(folder)]
    where = f" in line {inside[-1][1]}" if inside else ""
    if inside and inside[-1][0] != path.resolve():
        where += f" of {inside[-1][0].relative_to(folder).as_posix()}"
    text = " ".join(str(message).split())[:200]
    return f"{type(error).__name__}{where}: {text}"
