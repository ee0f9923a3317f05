"""The user's app: a folder with `app.py`, which has a function `learner(settings)`, and `federation.toml`."""

from __future__ import annotations

import importlib.util
import json
import sys
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
    spec.loader.exec_module(module)
    make = getattr(module, "learner", None)
    if not callable(make):
        raise InputError(f"{path} must have a function learner(settings) that returns a TorchLearner or the like")
    made: Learner = make(settings)
    if made.schema.dtype != settings.precision:
        raise InputError(
            f"the learner is {made.schema.dtype} and precision is {settings.precision}; "
            "give the learner precision=settings.precision"
        )
    return made
