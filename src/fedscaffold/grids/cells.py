"""The cells of a grid: one run each, described by its `RunConfig` and by labels for the table."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedscaffold import checks
from fedscaffold.brief import short
from fedscaffold.checks import InputError
from fedscaffold.run_config import ARGUMENTS, RunConfig
from fedscaffold.runs.run_folder import versions
from fedscaffold.simulation.fingerprint import problem_facts, to_json

__all__ = ["Cell", "expand", "key_of", "labelled"]

SAME_PROGRAM = ("lr", "seed", "rounds")
"""Arguments that are inputs of the compiled program: runs that differ in them only share it."""
SHORT = 48  # longest readable part of a cell's folder name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid.

    Attributes:
        labels: What distinguishes it from the other cells, by key: the row heads of the table.
        config: Arguments of the run.
        program: Cells with equal values are likely to share a compiled program.
    """

    labels: dict[str, Any]
    config: RunConfig
    program: str = ""

    def __repr__(self) -> str:
        return f"Cell({describe(self.labels)})"


def describe(labels: Mapping[str, Any]) -> str:
    """Return the labels of a cell in one line.

    >>> describe({"algorithm": "scaffold", "lr": 0.1})
    'algorithm scaffold, lr 0.1'
    """
    return ", ".join(f"{key} {value}" for key, value in labels.items())


def expand(
    over: Mapping[str, Mapping[Any, Any]], make: Callable[[dict[str, Any]], RunConfig]
) -> list[Cell]:
    """Return all combinations of values as cells, the last key varying fastest.

    Args:
        over: For each key, its values by label.
        make: Called with one value for each key; returns the arguments of the run.
    """
    cells = []
    for chosen in itertools.product(*(values.items() for values in over.values())):
        labels = {key: label for key, (label, _) in zip(over, chosen, strict=True)}
        config = make({key: value for key, (_, value) in zip(over, chosen, strict=True)})
        differs = {key: label for key, label in labels.items() if key not in SAME_PROGRAM}
        cells.append(Cell(labels=labels, config=config, program=describe(differs)))
    return cells


def labelled(key: str, values: Any) -> dict[Any, Any]:
    """Return the values of a key by their labels.

    Args:
        key: The key, for messages.
        values: A mapping from labels to values, or an iterable of values.

    Raises:
        InputError: There are no values, or two have the same label.

    >>> labelled("lr", [0.1, 0.2])
    {0.1: 0.1, 0.2: 0.2}
    >>> labelled("lr", [0.1, 0.1])
    Traceback (most recent call last):
    fedscaffold.checks.InputError: lr has two values with the label 0.1; name them: {"first": ...,
        "second": ...}
    """
    if isinstance(values, Mapping):
        found = dict(values)
    else:
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(
                f"{key} must be a list of values, or a dict from labels to values, "
                f"got {checks.shown(values)}"
            )
        found = {}
        for value in values:
            label = _label(value)
            if label in found:
                raise InputError(
                    f"{key} has two values with the label {label}; name them: "
                    '{"first": ..., "second": ...}'
                )
            found[label] = value
    if not found:
        raise InputError(f"{key} needs at least one value")
    return found


def _label(value: Any) -> Any:
    item = value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    name = getattr(item, "name", None)
    return name if isinstance(name, str) else short(item)


def key_of(cell: Cell, problems: dict[int, Any]) -> str:
    """Return the name of a cell's folder: labels, and a hash of all that its result depends on.

    Args:
        cell: The cell.
        problems: Facts of problems by `id`, filled by this function: hashing records takes time.
    """
    config = cell.config
    if id(config.problem) not in problems:
        problems[id(config.problem)] = problem_facts(config.problem)
    known = problems[id(config.problem)]
    told = {
        name: to_json(getattr(config, name))
        for name, stated in ARGUMENTS.items()
        if stated.bits or name in ("rounds", "block")
    }
    depends = [to_json(config.algorithm), known, told, versions()]
    digest = hashlib.sha256(json.dumps(to_json(depends)).encode()).hexdigest()[:20]
    words = re.sub(r"[^a-z0-9.]+", "-", describe(cell.labels).lower()).strip("-.")[:SHORT]
    return f"{words.strip('-.')}-{digest}" if words else digest
