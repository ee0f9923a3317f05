"""The user's app: a folder with `app.py`, which has a function `learner(settings)`, and `federation.toml`."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path

from fedscaffold.checks import InputError
from fedscaffold.deploy.client import Learner
from fedscaffold.deploy.settings import Settings, load
from fedscaffold.state.files import make_folder, write_private

__all__ = ["APP", "TOML", "learner_of", "note", "open_app"]

APP, TOML = "app.py", "federation.toml"


def open_app(folder: Path) -> tuple[Settings, Learner]:
    """The settings and the learner of an app's folder."""
    settings = load(Path(folder) / TOML)
    return settings, learner_of(Path(folder), settings)


def note(out: Path, folder: Path, engine: str) -> None:
    """Make the folder of a run, open to its owner only, and note which app runs there."""
    make_folder(out.absolute().parent)
    make_folder(out, private=True)
    write_private(out / "deployment.json", json.dumps({"app": str(folder.resolve()), "engine": engine}) + "\n")


def learner_of(folder: Path, settings: Settings) -> Learner:
    """Import `app.py` of a folder and let it make its learner."""
    path = Path(folder) / APP
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
        raise InputError(f"{path} cannot be imported: {_brief(error, path)}") from error
    make = getattr(module, "learner", None)
    if not callable(make):
        raise InputError(f"{path} must have a function learner(settings) that returns a TorchLearner or the like")
    try:
        made: Learner = make(settings)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"learner(settings) of {path} failed: {_brief(error, path)}") from error
    if not hasattr(made, "schema"):
        raise InputError(f"learner(settings) of {path} must return a TorchLearner or the like, got {made!r}"[:300])
    if made.schema.dtype != settings.precision:
        raise InputError(
            f"the learner is {made.schema.dtype} and precision is {settings.precision}; "
            "give the learner precision=settings.precision"
        )
    return made


def _brief(error: Exception, path: Path) -> str:
    """An error of the app in a line: its type, its text, and the last line of the app it came from."""
    here = path.resolve()
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == here
    ]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:200]
    return f"{type(error).__name__}{'' if line is None else f' in line {line}'}: {text}"
