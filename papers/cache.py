"""Where the results of claims are kept, and under which key.

A result's key is everything it depends on: the claim, its settings, the text of the module that measures it and the
package's version. Inside a long claim every cell has a key of its own, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fedscaffold
from fedscaffold.experiments.run_cache import digest
from papers.claim import Claim

__all__ = ["home", "key_of"]


def home() -> Path:
    """The folder in the user's cache where results are kept.

    >>> home().name
    'reproduce'
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedscaffold" / "reproduce"


def key_of(claim: Claim, size: str) -> str:
    """What a claim's result depends on: its name, settings, the module that measures it, the package's version."""
    measure: Any = claim.measure
    while isinstance(measure, partial):
        measure = measure.func
    source = inspect.getsource(sys.modules[measure.__module__])
    settings = claim.settings(size)
    return digest(claim.name, dict(settings), claim.depends(settings), source, fedscaffold.__version__)
