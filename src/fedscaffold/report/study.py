"""A study: the runs that belong together, as they are kept in a folder and shown on a page.

One folder holds `study.json` (table, command, versions, who holds which labels), `config.toml` (resolved),
`metrics.jsonl` (one line for every round of every run) and `report.html`. A single run is a study of one.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold import parsing
from fedscaffold.brief import brief
from fedscaffold.checks import InputError, shown
from fedscaffold.report.record import is_count, is_number

__all__ = ["Curve", "Study", "read", "versions", "write"]

PACKAGES = ("fedscaffold", "numpy", "jax", "jaxlib", "optax", "scikit-learn", "scipy")


class Curve(NamedTuple):
    """One run of a study."""

    def __repr__(self) -> str:
        return brief(self)

    algorithm: str
    seed: int
    lr: float | None
    columns: dict[str, NDArray[Any]]
    """By round: `round`, the metrics, `residual`, `bytes_up`, `bytes_down`."""
    diverged_at: int | None
    reached_at: int | None
    """The first round that meets the study's target."""
    advice: str | None
    residual: float
    """|c - sum p_i c_i| at the end."""
    explained: float
    """What rounding explains of the residual."""
    digest: str


class Study(NamedTuple):
    """Runs that belong together, and everything to tell where they came from."""

    def __repr__(self) -> str:
        return brief(self)

    title: str
    problem: str
    """One sentence: data, split, model."""
    target: tuple[str, float] | None
    curves: list[Curve]
    rows: list[dict[str, Any]]
    """The table: one row for each algorithm."""
    label_counts: NDArray[np.int64] | None
    """(N, classes) who holds what."""
    precision: str
    config: str
    """The resolved configuration, as TOML."""
    command: str
    versions: dict[str, str]
    seconds: dict[str, float]


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on.

    >>> sorted(versions())[0]
    'fedscaffold'
    """
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def write(study: Study, folder: Path) -> None:
    """Keep a study in a folder: config.toml, metrics.jsonl, study.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(study.config, encoding="utf-8", newline="")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as lines:
        for index, curve in enumerate(study.curves):
            names = ["run", *curve.columns]
            for values in zip(*(column.tolist() for column in curve.columns.values()), strict=True):
                held = zip(names, [index, *map(_plain, values)], strict=True)
                lines.write(json.dumps(dict(held), allow_nan=False) + "\n")
    about = study._asdict() | {
        "curves": [_without_rounds(curve) for curve in study.curves],
        "rows": [{key: _plain(value) for key, value in row.items()} for row in study.rows],
        "label_counts": None if study.label_counts is None else study.label_counts.tolist(),
    }
    del about["config"]
    text = json.dumps(about, indent=1, default=_plain, allow_nan=False)
    (folder / "study.json").write_text(text, encoding="utf-8")


def read(folder: Path) -> Study:
    """Read back what `write` kept; a folder that holds no study is refused in one line."""
    try:
        about = parsing.json(parsing.text_of(folder / "study.json"), "study.json")
        with (folder / "config.toml").open(encoding="utf-8", newline="") as file:
            config = file.read()
        text = parsing.text_of(folder / "metrics.jsonl")
        lines = [parsing.json(line, f"line {k} of metrics.jsonl") for k, line in enumerate(text.splitlines(), 1)]
        return _study(about, config, lines)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise FileNotFoundError(f"{folder} holds no run: {missing} is missing") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise InputError(f"{folder} holds a damaged run: {what}; run it again, or restore the folder") from None


def _study(about: dict[str, Any], config: str, lines: list[dict[str, Any]]) -> Study:
    _refuse_other_types(about)
    by_run: list[list[dict[str, Any]]] = [[] for _ in about["curves"]]
    for line in lines:
        if not is_count(line["run"]):
            raise InputError(f"a line of metrics.jsonl is of run {shown(line['run'])}")
        by_run[line["run"]].append(line)
    about["curves"] = [_with_rounds(*pair) for pair in zip(about["curves"], by_run, strict=True)]
    counts = about["label_counts"]
    about["label_counts"] = None if counts is None else np.array(counts, np.int64)
    about["target"] = None if about["target"] is None else tuple(about["target"])
    return Study(config=config, **about)


def _refuse_other_types(about: dict[str, Any]) -> None:
    """Raise InputError where a value of study.json is not of its type."""
    _refuse("a study", about, STUDY)
    for curve in about["curves"]:
        _refuse("a run", curve, CURVE)
        for name, kind in curve["columns"].items():
            _refuse("a run", {name: kind}, {name: lambda kind: kind in ("float32", "float64", "int32", "int64")})
        if "round" not in curve["columns"]:
            raise InputError("a run without the column round")
    for row in about["rows"]:
        _refuse("a row", row, {"algorithm": is_text} | dict.fromkeys(row.keys() - {"algorithm"}, is_plain))


def _refuse(what: str, held: Any, kinds: dict[str, Callable[[Any], bool]]) -> None:
    if not isinstance(held, dict):
        raise InputError(f"{what} must be an object, got {shown(held)}")
    for key, is_right in kinds.items():
        if key not in held:
            raise InputError(f"{key!r} of {what} is missing")
        if not is_right(held[key]):
            raise InputError(f"{key!r} of {what} is {shown(held[key])}")


def is_text(value: Any) -> bool:
    """Whether a value is text."""
    return isinstance(value, str)


def is_plain(value: Any) -> bool:
    """Whether a value is null, text, true or false, or a number."""
    return value is None or isinstance(value, (str, bool)) or is_number(value)


def _is_target(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and is_text(value[0]) and is_number(value[1]))


def _is_table(value: Any) -> bool:
    """Whether a value is rows of counts, all of one length."""
    rows = isinstance(value, list) and all(isinstance(row, list) and all(map(is_count, row)) for row in value)
    return value is None or (rows and len(set(map(len, value))) <= 1)


STUDY: dict[str, Callable[[Any], bool]] = {
    "title": is_text,
    "problem": is_text,
    "target": _is_target,
    "curves": lambda value: isinstance(value, list),
    "rows": lambda value: isinstance(value, list),
    "label_counts": _is_table,
    "precision": lambda value: value in ("float32", "float64"),
    "command": is_text,
    "versions": lambda value: isinstance(value, dict) and all(map(is_text, value.values())),
    "seconds": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
}
CURVE: dict[str, Callable[[Any], bool]] = {
    "algorithm": is_text,
    "seed": is_count,
    "lr": lambda value: value is None or is_number(value),
    "columns": lambda value: isinstance(value, dict),
    "diverged_at": lambda value: value is None or is_count(value),
    "reached_at": lambda value: value is None or is_count(value),
    "advice": lambda value: value is None or is_text(value),
    "residual": lambda value: value is None or is_number(value),
    "explained": lambda value: value is None or is_number(value),
    "digest": is_text,
}


def _without_rounds(curve: Curve) -> dict[str, Any]:
    """A run as study.json keeps it: the columns by type only, their values being in metrics.jsonl."""
    types = {name: column.dtype.name for name, column in curve.columns.items()}
    return {key: _plain(value) for key, value in curve._asdict().items()} | {"columns": types}


def _with_rounds(curve: dict[str, Any], lines: list[dict[str, Any]]) -> Curve:
    """The opposite of `_without_rounds`; a float32 stays one, so that it meets the targets it met before."""
    if not lines:
        raise InputError("metrics.jsonl has no rounds of a run")
    columns = {
        name: np.array([math.nan if line[name] is None else _number(name, line[name]) for line in lines], kind)
        for name, kind in curve["columns"].items()
    }
    unknown = {name: math.nan for name in ("residual", "explained") if curve[name] is None}
    return Curve(**(curve | unknown | {"columns": columns}))


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise InputError(f"{name} is {shown(value)} in metrics.jsonl")
    return float(value) if isinstance(value, float) else int(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN, no infinity (both become null, and NaN when read) and no NumPy numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
