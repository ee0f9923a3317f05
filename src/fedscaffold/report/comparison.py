"""The compare page: any number of runs in one HTML file that opens offline.

Runs that are equal but for their seed make one group, a row and a curve. The page computes its table itself, for
whatever target is chosen in it, from the curves of the runs (`numbers.js`); tests/test_compare_page.py compares it with
`fedscaffold.report.tables`. Its own security policy forbids the browser to ask the network for anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.metrics import METRICS, rises
from fedscaffold.parsing import toml
from fedscaffold.report import figures
from fedscaffold.report.page import gauges
from fedscaffold.report.record import NAME, Tail, sound
from fedscaffold.report.study import Curve, Study, read
from fedscaffold.report.tables import named

__all__ = ["EACH", "Source", "asset", "comparison", "folders", "gathered", "sources"]

ASSETS = files("fedscaffold.report") / "compare_page"
SCRIPTS = ("numbers", "exports", "chart", "page")
ASIDE = ("seed", "metrics", "output")  # keys and tables that do not make another group
TIMED = ("draw", "rounds", "checkpoint")  # what counts as the time of rounds; compiling comes once
EACH = ", a run"  # with the algorithm's name before it: seconds that the rounds of one run of a sweep took
MAPS = 4  # pictures of who holds what


class Source(NamedTuple):
    """A study and where it is."""

    folder: str
    study: Study
    clock: NDArray[Any] | None = None
    """(R, 2) rounds and the seconds until their ends, as the record of a single run has them."""


def folders(paths: Iterable[Path]) -> list[Path]:
    """The folders of all runs and comparisons among or below some folders, each once.

    >>> folders([Path("nowhere")])
    Traceback (most recent call last):
    FileNotFoundError: nowhere holds no run: study.json is missing, there and in all folders below
    """
    found: dict[Path, Path] = {}
    for path in paths:
        here = [path] if (path / "study.json").is_file() else sorted(p.parent for p in path.rglob("study.json"))
        if not here:
            raise FileNotFoundError(f"{path} holds no run: study.json is missing, there and in all folders below")
        found |= {one.resolve(): one for one in here}
    return list(found.values())


def sources(paths: Iterable[Path]) -> list[Source]:
    """All runs among or below some folders."""
    return [Source(str(folder), read(folder), _clock(folder)) for folder in folders(paths)]


def comparison(given: Sequence[Source], title: str | None = None) -> str:
    """Return the page of some studies, as the text of one HTML file.

    >>> study = Study("A title", "A problem.", None, [], [], None, "float32", "", "demo", {}, {})
    >>> text = comparison([Source("runs/a", study)])
    >>> text[:15], "A title" in text, "http" in text.replace("http-equiv", "")
    ('<!DOCTYPE html>', True, False)
    """
    held = gathered(given)
    one = given[0].study if len(given) == 1 else None
    title = title or (one.title if one else f"Comparison of {len(held['groups'])} kinds of runs")
    problems = list(dict.fromkeys(source.study.problem for source in given))
    text = json.dumps(held, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return Template(asset("page.html")).substitute(
        {name: asset(f"{name}.js") for name in SCRIPTS},
        style=asset("style.css"),
        title=escape(title),
        problem="".join(f"<p>{escape(problem)}</p>" for problem in problems[:5]),
        data=text.replace("<", "\\u003c"),  # no text inside may end the script element
    )


def asset(name: str) -> str:
    """Return the text of one part of the page.

    >>> asset("numbers.js").count("const Numbers")
    1
    """
    return (ASSETS / name).read_text(encoding="utf-8")


def gathered(given: Sequence[Source]) -> dict[str, Any]:
    """Everything the page is given: groups of runs with their configurations and columns, and where they came from."""
    groups: dict[str, dict[str, Any]] = {}
    for source in given:
        rows = {row["algorithm"]: row for row in source.study.rows}
        table = _settings(source.study.config)
        for curve in source.study.curves:
            config = _of_curve(table, curve)
            key = json.dumps([source.study.problem, config], sort_keys=True)
            ends = rows.get(curve.algorithm, {}).get("ends")
            group = groups.setdefault(key, {"algorithm": curve.algorithm, "config": config, "ends": ends, "runs": []})
            group["runs"].append(_run(source, curve))
    listed = list(groups.values())
    keys = _differing([group["config"] for group in listed])
    shown = _distinguishing([group["config"] for group in listed], keys)
    for group in listed:
        group["name"] = named(group.pop("algorithm"))
        group["detail"] = ", ".join(f"{key} {group['config'].get(key, '-')}" for key in shown)
    targets = [source.study.target for source in given if source.study.target is not None]
    measured = {name for group in listed for run in group["runs"] for name in run["columns"]}
    return {
        "groups": listed,
        "keys": keys,
        "metrics": sorted(measured - set(figures.NOT_SHOWN), key=_telling),
        "meanings": {name: figures.METRICS.get(name, name) for name in METRICS},
        "rises": [name for name in METRICS if rises(name)],
        "target": None if not targets else {"metric": targets[0][0], "value": targets[0][1]},
        "maps": _maps(given),
        "origins": [_origin(source) for source in given],
    }


def _telling(metric: str) -> tuple[bool, int, str]:
    """In this order metrics are offered: accuracy, then as they are listed, then others."""
    return metric != "accuracy", METRICS.index(metric) if metric in METRICS else len(METRICS), metric


def _settings(config: str) -> dict[str, Any]:
    """A configuration's keys under dotted names; nothing where it is no TOML."""
    try:
        table = toml(config, "config.toml")
    except InputError:
        return {}
    return _flat({key: value for key, value in table.items() if key not in ASIDE})


def _flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            out |= _flat(value, f"{name}.")
        else:
            plain = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
            out[name] = value if plain else str(value)
    return out


def _of_curve(table: dict[str, Any], curve: Curve) -> dict[str, Any]:
    """The configuration of one run of a study: its own algorithm and step size."""
    own = table.get("algorithm.name", curve.algorithm) == curve.algorithm
    kept = {"algorithm.name": curve.algorithm}
    kept |= {k: v for k, v in table.items() if own or not k.startswith("algorithm.")}
    return kept if curve.lr is None else kept | {"local.lr": curve.lr}


def _differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The keys that are not the same everywhere.

    >>> _differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}])
    ['b', 'c']
    """
    every = dict.fromkeys(key for config in configs for key in config)
    absent = object()
    return [key for key in every if len({json.dumps(c.get(key, repr(absent))) for c in configs}) > 1]


def _distinguishing(configs: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    """A few of the keys that tell all apart, beside the algorithm's name; data sets are always told.

    >>> _distinguishing([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 3}], ["a", "b"])
    ['b']
    """

    def kinds(chosen: Sequence[str]) -> int:
        return len({json.dumps([config.get(key) for key in ("algorithm.name", *chosen)]) for config in configs})

    chosen = [key for key in keys if key == "problem.dataset"]
    rest = [key for key in keys if key not in ("algorithm.name", *chosen)]
    while rest and kinds(chosen) < kinds(keys):
        best = max(rest, key=lambda key: kinds([*chosen, key]))
        chosen.append(best)
        rest.remove(best)
    return chosen


def _run(source: Source, curve: Curve) -> dict[str, Any]:
    study = source.study
    health = gauges(study._replace(curves=[curve]))[0]
    return {
        "seed": curve.seed,
        "folder": source.folder,
        "rounds": len(curve.columns["round"]),
        "diverged": curve.diverged_at,
        "advice": curve.advice,
        "digest": curve.digest,
        "health": health.state,
        "relative": health.relative if math.isfinite(health.relative) else None,
        "residual": curve.residual if math.isfinite(curve.residual) else None,
        "columns": {name: _column(values) for name, values in curve.columns.items()},
        "seconds": _numbers(_seconds(source, curve)),
    }


def _column(values: NDArray[Any]) -> dict[str, Any]:
    """A column as JSON: its numbers, and whether they are of single precision, so that they meet targets as before."""
    return {"single": values.dtype == np.float32, "values": _numbers(values)}


def _numbers(values: NDArray[Any]) -> list[Any]:
    """Numbers as JSON has them, single ones with the digits they have; None for those that are not finite."""
    short = (lambda v: float(str(v))) if values.dtype == np.float32 else (lambda v: v.item())
    return [short(value) if np.isfinite(value) else None for value in values]


def _seconds(source: Source, curve: Curve) -> NDArray[Any]:
    """Seconds until the end of each round: from the record, else by equal shares of the whole.

    Of a comparison the whole is the run's share of its algorithm's sweep, in which all runs are side by side.
    """
    rounds, seconds = curve.columns["round"], source.study.seconds
    if source.clock is not None and len(source.clock):
        return np.asarray(np.interp(rounds, *source.clock.T)).round(4)
    whole = seconds.get("wall", seconds.get(f"{curve.algorithm}{EACH}", math.nan))
    return np.asarray(whole * rounds / max(1, len(rounds))).round(4)


def _clock(folder: Path) -> NDArray[Any] | None:
    """Rounds and seconds as `rounds.jsonl` has them, all sessions of the run one after the other."""
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    begun = 0.0
    for line in filter(sound, Tail(folder / NAME).new()[1]):
        if line.get("event") == "begin":
            points = [point for point in points if point[0] <= line.get("after", 0)]
            begun = points[-1][1]
        elif "seconds" in line and line["round"] > points[-1][0]:
            points.append((line["round"], begun + sum(line["seconds"].get(phase, 0.0) for phase in TIMED)))
    return np.array(points) if len(points) > 1 else None


def _maps(given: Sequence[Source]) -> list[dict[str, Any]]:
    """Who holds what, once for every split."""
    found: dict[str, dict[str, Any]] = {}
    for source in given:
        counts = source.study.label_counts
        if counts is not None and counts.size:
            shown = counts[: figures.CLIENTS].tolist()
            found.setdefault(json.dumps(shown), {"of": source.study.problem, "counts": shown, "clients": len(counts)})
    return list(found.values())[:MAPS]


def _origin(source: Source) -> dict[str, Any]:
    study = source.study
    return {
        "folder": source.folder,
        "command": study.command,
        "precision": study.precision,
        "versions": ", ".join(f"{name} {version}" for name, version in study.versions.items()),
        "seconds": ", ".join(f"{name} {value:.3g}" for name, value in study.seconds.items()),
        "config": study.config,
    }
