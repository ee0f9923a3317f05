"""User apps: a folder with `federation.toml` and `app.py`, which defines `learner(settings)`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from fedscaffold.checks import InputError
from fedscaffold.deploy.client import Learner
from fedscaffold.deploy.settings import Settings, load

__all__ = ["APP", "TOML", "open_app"]

APP, TOML = "app.py", "federation.toml"


def open_app(folder: Path) -> tuple[Settings, Learner]:
    """Read the settings of an app's folder, import its `app.py`, and return both.

    Raises:
        FileNotFoundError: If there is no `app.py` or no `federation.toml`.
        InputError: If the app cannot be imported, or returns no learner of the settings' precision.
    """
    settings, path = load(Path(folder) / TOML), Path(folder) / APP
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; `fedscaffold deploy new DIR` writes one")
    spec = importlib.util.spec_from_file_location("fedscaffold_site_app", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
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
    """Return an error of the app in one line: type, line number in the app, message."""
    here = path.resolve()
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == here
    ]
    if isinstance(error, SyntaxError):
        line, message = error.lineno, error.msg
    else:
        line, message = lines[-1] if lines else None, str(error)
    where = "" if line is None else f" in line {line}"
    text = " ".join(str(message).split())[:200]
    return f"{type(error).__name__}{where}: {text}"
