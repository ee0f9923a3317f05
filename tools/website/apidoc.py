"""The pages of the Python reference.

Every public name of a room, read from its `__all__` without importing it.
"""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "fedscaffold"


@cache
def public(file):
    """The names in a module's `__all__`, each with the module that it is imported from."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    origins = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return {name: origins.get(name, "") for name in names}


def path(room, name):
    """Where to look a name up: in the public interface first, past a module of the same name."""
    package = f"fedscaffold.{room}"
    face, origin = public(SOURCE / "__init__.py"), public(SOURCE / room / "__init__.py")[name]
    if face.get(name, "").startswith(package):
        return f"fedscaffold.{name}"
    return f"{origin}.{name}" if origin == f"{package}.{name}" else f"{package}.{name}"


def room(name, page=""):
    """Directives for a whole room; what the page has already is left out."""
    head = f"::: fedscaffold.{name}\n    options:\n      members: false\n"
    paths = [path(name, one) for one in public(SOURCE / name / "__init__.py")]
    lines = page.splitlines()
    return head + "\n".join(f"::: {one}" for one in paths if f"::: {one}" not in lines)


def find(name):
    """The anchor of `theory.bias`, `simulate` or `Run.x`, where there is one."""
    first, *rest = name.split(".")
    package = SOURCE / first / "__init__.py"
    if package.exists() and rest:
        if rest[0] in public(package):  # an attribute is found with its class
            return path(first, rest[0])
        return None
    return f"fedscaffold.{first}" if first in public(SOURCE / "__init__.py") else None
