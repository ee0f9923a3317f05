"""A study: the runs that belong together, as they are kept in a folder and shown on a page.

One folder holds `study.json` (table, command, versions, who holds which labels), `config.toml` (resolved),
`metrics.jsonl` (one line for every round of every run) and `report.html`. A single run is a study of one.
"""

from __future__ import annotations

import json
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError

__all__ = ["Curve", "Study", "read", "versions", "write"]

PACKAGES = ("fedscaffold", "numpy", "jax", "jaxlib", "optax", "scikit-learn", "scipy")


class Curve(NamedTuple):
    """One run of a study."""

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
        about = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        with (folder / "config.toml").open(encoding="utf-8", newline="") as text:
            config = text.read()
        lines = list(map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
        return _study(about, config, lines)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise FileNotFoundError(f"{folder} holds no run: {missing} is missing") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise InputError(f"{folder} holds a damaged run: {what}; run it again, or restore the folder") from None


def _study(about: dict[str, Any], config: str, lines: list[dict[str, Any]]) -> Study:
    by_run: list[list[dict[str, Any]]] = [[] for _ in about["curves"]]
    for line in lines:
        by_run[line["run"]].append(line)
    about["curves"] = [_with_rounds(*pair) for pair in zip(about["curves"], by_run, strict=True)]
    counts = about["label_counts"]
    about["label_counts"] = None if counts is None else np.array(counts, np.int64)
    about["target"] = None if about["target"] is None else tuple(about["target"])
    return Study(config=config, **about)


def _without_rounds(curve: Curve) -> dict[str, Any]:
    """A run as study.json keeps it: the columns by type only, their values being in metrics.jsonl."""
    types = {name: column.dtype.name for name, column in curve.columns.items()}
    return {key: _plain(value) for key, value in curve._asdict().items()} | {"columns": types}


def _with_rounds(curve: dict[str, Any], lines: list[dict[str, Any]]) -> Curve:
    """The opposite of `_without_rounds`; a float32 stays one, so that it meets the targets it met before."""
    columns = {
        name: np.array([math.nan if line[name] is None else line[name] for line in lines], kind)
        for name, kind in curve["columns"].items()
    }
    unknown = {name: math.nan for name in ("residual", "explained") if curve[name] is None}
    return Curve(**(curve | unknown | {"columns": columns}))


def _plain(value: Any) -> Any:
    """JSON has no NaN, no infinity (both become null, and NaN when read) and no NumPy numbers."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
