"""The drift theatre: one interactive HTML page that shows client drift in two dimensions.

The page runs a JavaScript port of the round and of the theory (`engine.js`, `theory.js`), which
tests/runs/test_theatre.py compares with the library; `stage.js` draws and `controls.js` handles
input. Its content security policy forbids network access.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template

__all__ = ["asset", "theatre", "write_theatre"]

ASSETS = files("fedscaffold.runs") / "theatre_page"
SCRIPTS = ("engine", "theory", "words", "stage", "controls")


def asset(name: str) -> str:
    """Return the text of one file of the page.

    >>> asset("engine.js").count("const remember")
    1
    """
    return (ASSETS / name).read_text(encoding="utf-8")


def theatre() -> str:
    """Return the page as the text of one HTML file.

    >>> text = theatre()
    >>> text[:15], "http" in text.replace("http-equiv", "")
    ('<!DOCTYPE html>', False)
    """
    return Template(asset("page.html")).substitute(
        {"style": asset("style.css")} | {name: asset(f"{name}.js") for name in SCRIPTS}
    )


def write_theatre(path: Path) -> Path:
    """Write the page to a file, creating its folder, and return its absolute path.

    >>> import tempfile
    >>> write_theatre(Path(tempfile.mkdtemp()) / "lecture" / "theatre.html").name
    'theatre.html'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(theatre(), encoding="utf-8")
    return path.resolve()
