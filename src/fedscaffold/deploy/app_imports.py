"""Import of an app: `app.py` and the modules beside it, apart from those of any other app.

In `app.py`, and in the modules that it imports from its folder, `import mynet` finds the `mynet.py`
or package `mynet` beside `app.py` first, then what is installed, as in a script. The modules are
registered below a package name of the app's own, so `sys.path` is not changed, no other code in the
process sees them, and two apps may each have a `mynet`.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["import_app", "own_module"]

PREFIX = "fedscaffold_app_"


def import_app(path: Path) -> ModuleType:
    """Import an `app.py` and what it imports from its folder, anew if it was imported before."""
    place = path.resolve()
    package = PREFIX + hashlib.sha256(str(place.parent).encode()).hexdigest()[:16]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    importlib.invalidate_caches()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    root = ModuleType(package)
    root.__path__ = [str(place.parent)]
    root.__dict__["builtins"] = _builtins_of(package, place.parent)
    sys.modules[package] = root
    return importlib.import_module(f"{package}.{place.stem}")


def own_module(thing: Any) -> str | None:
    """Return the module of an app that defines a function, or an object's class; None for others.

    >>> own_module(print) is None
    True
    """
    module = getattr(thing, "__module__", None)
    name = module if isinstance(module, str) else type(thing).__module__
    package, _, rest = name.partition(".")
    return rest if package.startswith(PREFIX) else None


class _Finder:
    """Finds the modules of apps, and gives those in Python the app's `__import__`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if not package.startswith(PREFIX) or not rest:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads a module of an app."""

    def exec_module(self, module: ModuleType) -> None:
        root = sys.modules[module.__name__.partition(".")[0]]
        module.__dict__["__builtins__"] = root.__dict__["builtins"]
        super().exec_module(module)


def _builtins_of(package: str, folder: Path) -> dict[str, Any]:
    """Return Python's built-ins with an `__import__` that looks into the app's folder first."""

    @cache
    def beside(name: str) -> bool:
        """Whether a top-level module is in the folder; a mere folder gives way to a package."""
        spec = PathFinder.find_spec(f"{package}.{name}", [str(folder)])
        if spec is None or spec.origin is not None:
            return spec is not None
        return any((folder / name).glob("**/*.py")) and find_spec(name) is None

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not beside(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if fromlist:
            return builtins.__import__(f"{package}.{name}", globals, locals, fromlist, 0)
        importlib.import_module(f"{package}.{name}")
        return sys.modules[f"{package}.{top}"]

    return vars(builtins) | {"__import__": import_}
