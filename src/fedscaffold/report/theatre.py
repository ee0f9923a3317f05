"""The drift theatre: one HTML file in which drift can be seen, turned up and down, and broken.

The page computes everything itself, by a port of the round and of the theory for two coordinates (`engine.js`,
`theory.js`), which tests/test_theatre.py compares with the library; `stage.js` draws, `controls.js` listens. The page's
own security policy forbids the browser to ask the network for anything, so it can be mailed.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template

__all__ = ["asset", "theatre", "write_theatre"]

ASSETS = files("fedscaffold.report") / "theatre_page"
SCRIPTS = ("engine", "theory", "words", "stage", "controls")


def asset(name: str) -> str:
    """Return the text of one part of the page.

    >>> asset("engine.js").count("const remember")
    1
    """
    return (ASSETS / name).read_text(encoding="utf-8")


def theatre() -> str:
    """Return the page, as the text of one HTML file.

    >>> text = theatre()
    >>> text[:15], "http" in text.replace("http-equiv", "")
    ('<!DOCTYPE html>', False)
    """
    return Template(asset("page.html")).substitute(
        {"style": asset("style.css")} | {name: asset(f"{name}.js") for name in SCRIPTS}
    )


def write_theatre(path: Path) -> Path:
    """Write the page to a file, whose folder is made if need be, and return its full path.

    >>> import tempfile
    >>> write_theatre(Path(tempfile.mkdtemp()) / "lecture" / "theatre.html").name
    'theatre.html'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(theatre(), encoding="utf-8")
    return path.resolve()
