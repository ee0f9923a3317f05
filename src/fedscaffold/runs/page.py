"""The run page: one self-contained HTML file for one run, several runs, or a run in progress.

Its parts are in `run_page/` and have no dependencies. The page's content security policy forbids
network access; the live page may contact the server it came from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedscaffold.runs.run_folder import Study
from fedscaffold.runs.view_model import Source, view

__all__ = ["asset", "live_page", "page", "split_page"]

ASSETS = files("fedscaffold.runs") / "run_page"
SCRIPTS = ("numbers", "exports", "chart", "maps", "panels", "page")


def asset(name: str) -> str:
    """Return the text of one file of the page.

    >>> asset("numbers.js").count("const Numbers")
    1
    """
    return (ASSETS / name).read_text(encoding="utf-8")


def page(given: Sequence[Source], title: str | None = None) -> str:
    """Return the page of the given studies as the text of one HTML file.

    >>> text = page([Source("runs/a", Study(problem="A problem.", runs=[]))])
    >>> text[:15], "No runs" in text, "http" in text.replace("http-equiv", "")
    ('<!DOCTYPE html>', True, False)
    """
    model = view(given, title)
    return _render(model["title"], model, SCRIPTS)


def live_page() -> str:
    """Return the live page, which fetches its state from the server it came from."""
    return _render("fedscaffold, live", None, (*SCRIPTS, "live"))


def split_page(counts: NDArray[np.int64], title: str) -> str:
    """Return a page that shows only which client holds which labels."""
    return page([Source("", Study(problem="", runs=[], label_counts=counts))], title)


def _render(title: str, model: dict[str, Any] | None, scripts: Sequence[str]) -> str:
    data = json.dumps(model, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=asset("style.css"),
        connect="; connect-src 'self'" if model is None else "",
        data=data.replace("<", "\\u003c"),  # or text in it could close the script element
        script="".join(asset(f"{name}.js") for name in scripts),
    )
