"""The JSON view model of the run page: runs in groups, thinned curves, and progress.

Runs that differ only in their seed form one group: one row of the table and one line in every
chart. `run_page/` draws the result.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedscaffold.checks import InputError
from fedscaffold.metrics import METRICS, rises
from fedscaffold.parsing import toml
from fedscaffold.runs.round_log import RECENT
from fedscaffold.runs.run_folder import RunRecord, Study
from fedscaffold.runs.tables import display_name, first_reached

__all__ = ["MEANINGS", "Health", "Progress", "Source", "health", "thin", "view"]

MEANINGS = {
    "accuracy": "Accuracy (share of records predicted right)",
    "loss": "Loss f(x)",
    "gap": "Loss above the optimum, f(x) - f(x*)",
    "distance": "Distance to the optimum, |x - x*|",
    "grad_norm": "Gradient norm, |grad f(x)|",
    "drift": "Drift (spread of the local models at the end of a round)",
    "control_error": "Error of the control variates, distance of the c_i from grad f_i(x*)",
    "age": "Mean age of the control variates (rounds)",
    "epsilon": "Epsilon spent, the largest of any client",
}
NOT_SHOWN = ("round", "residual", "epsilon", "bytes_up", "bytes_down", "time")
# configuration keys and tables that do not distinguish groups
ASIDE = "seed", "metrics", "output"
COLOURS = 6  # of the page's style; an algorithm has the same one on every page
OWN_COLOURS = {"scaffold": 0, "fedavg": 1, "fedprox": 2, "sgd": 3, "scaffold-m": 4, "scaffnew": 5}
VALUES = 12_000  # curve points on a page; longer curves are thinned
FEWEST, MOST = 40, 700  # stretches of a thinned curve
CLIENTS, MAPS = 100, 4  # rows of a label map, and number of maps
PACE_SECONDS = 20.0  # window for estimating the remaining time
OLDEST = 10
BINS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # lower bounds of the age histogram


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, and the clients heard.

    Attributes:
        kind: simulation or deployment.
        phase: starting, running, silent (its process is gone), unfinished (it was running when a
            page that does not change was written), or the outcome: see `round_log.ENDS`.
        round: Rounds done.
        rounds: Rounds planned, or None.
        first: The round of the first entry of `marks`.
        marks: For the last rounds, clients by outcome (heard, late, refused, failed), or the number
            heard.
        clients: Their names, or their number.
        heard_at: The round in which each client was last heard, after `all_at`; None if unknown.
        all_at: The last round in which all clients were heard; 0 for none.
        stamps: (round, clock) of the last rounds.
        seconds: Time by phase.
        stoppable: Whether the page may request a stop.
        notes: Sentences for the reader.
    """

    kind: str
    phase: str
    round: int
    rounds: int | None = None
    first: int = 1
    marks: tuple[dict[str, Any] | int | None, ...] = ()
    clients: tuple[str, ...] | int = 0
    heard_at: Mapping[Any, int] | None = None
    all_at: int = 0
    stamps: tuple[tuple[int, float], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    stoppable: bool = False
    notes: tuple[str, ...] = ()


class Source(NamedTuple):
    """A study, its folder, and its progress if it is a single run."""

    folder: str
    study: Study
    progress: Progress | None = None


class Health(NamedTuple):
    """State of a run's control variates."""

    state: str
    """healthy, broken, none (there are no control variates), noised (whole clients are private, and
    c holds the noise) or unknown (not finite, or not recorded)"""
    relative: float
    """The largest |c - sum p_i c_i| of all rounds, in units of what rounding explains."""


def view(
    given: Sequence[Source], title: str | None = None, now: float | None = None
) -> dict[str, Any]:
    """Return the view model of the given studies.

    Args:
        given: The studies. Progress is shown for a single one.
        title: The heading; by default "SCAFFOLD, 1 run" or "4 configurations compared".
        now: The clock, for the time since the last round.
    """
    groups = _group_runs(given)
    targets = [source.study.target for source in given if source.study.target is not None]
    shown = sorted(
        {name for one in groups for run in one["held"] for name in run.columns} - set(NOT_SHOWN),
        key=_metric_order,
    )
    metrics = [*shown, "residual", "epsilon"]
    stretches = _number_of_stretches(groups, metrics)
    longest = max((len(run.columns["round"]) for one in groups for run in one["held"]), default=0)
    for one in groups:
        held, sources = one.pop("held"), one.pop("sources")
        kept = {name: _drawn_rounds(held, name, targets[:1], stretches) for name in metrics}
        one["runs"] = [
            _run_entry(*pair, kept, stretches) for pair in zip(sources, held, strict=True)
        ]
    progress = given[0].progress if len(given) == 1 else None
    return {
        "title": title or _title(groups, progress),
        "problems": list(dict.fromkeys(source.study.problem for source in given))[:5],
        "groups": groups,
        "keys": _differing_keys([group["config"] for group in groups]),
        "metrics": shown,
        "meanings": MEANINGS,
        "rises": [name for name in METRICS if rises(name)],
        "target": None if not targets else {"metric": targets[0][0], "value": targets[0][1]},
        "stretch": math.ceil(longest / stretches) if longest > 2 * stretches else None,
        "maps": _label_maps(given),
        "origins": [_origin(source) for source in given],
        "progress": None if progress is None else _progress(progress, now),
    }


def _title(groups: list[dict[str, Any]], progress: Progress | None) -> str:
    if len(groups) != 1:
        return f"{len(groups)} configurations compared" if groups else "No runs"
    name, runs = groups[0]["name"], len(groups[0]["runs"])
    if progress is not None and progress.kind == "deployment":
        sites = progress.clients if isinstance(progress.clients, int) else len(progress.clients)
        return f"{name}, deployed at {sites} site{'s' * (sites != 1)}"
    return f"{name}, {runs} run{'s' * (runs != 1)}"


def _group_runs(given: Sequence[Source]) -> list[dict[str, Any]]:
    """Group runs by configuration without the seed; add names, colours and differing keys."""
    groups: dict[str, dict[str, Any]] = {}
    for source in given:
        rows = {row["algorithm"]: row for row in source.study.rows}
        for run in source.study.runs:
            config = _settings(run)
            key = json.dumps([source.study.problem, config], sort_keys=True)
            new: dict[str, Any] = {
                "algorithm": run.algorithm,
                "name": display_name(run.algorithm),
                "config": config,
                "toml": run.config,
            }
            new |= {"ends": rows.get(run.algorithm, {}).get("ends"), "held": [], "sources": []}
            group = groups.setdefault(key, new)
            group["held"].append(run)
            group["sources"].append(source)
    listed = list(groups.values())
    colours = _assign_colours([group["algorithm"] for group in listed])
    told = _distinguishing_keys(
        [group["config"] for group in listed],
        _differing_keys([group["config"] for group in listed]),
    )
    for group in listed:
        group["colour"] = colours[group["algorithm"]]
        group["detail"] = ", ".join(f"{key} {group['config'].get(key, '-')}" for key in told)
    return listed


def _assign_colours(algorithms: Sequence[str]) -> dict[str, int]:
    """Assign each algorithm its own colour, else the first free one, else one in turn.

    >>> _assign_colours(["mine", "scaffold", "fedavg", "scaffold"])
    {'mine': 2, 'scaffold': 0, 'fedavg': 1}
    """
    names = list(dict.fromkeys(algorithms))
    taken = {name: OWN_COLOURS[name] for name in names if name in OWN_COLOURS}
    free = [colour for colour in range(COLOURS) if colour not in taken.values()]
    rest = [name for name in names if name not in taken]
    taken |= {name: free[k] if k < len(free) else k % COLOURS for k, name in enumerate(rest)}
    return {name: taken[name] for name in names}


def _metric_order(metric: str) -> tuple[bool, int, str]:
    """Sort key of metrics: accuracy, then in the order of `METRICS`, then others."""
    return (
        metric != "accuracy",
        METRICS.index(metric) if metric in METRICS else len(METRICS),
        metric,
    )


def _settings(run: RunRecord) -> dict[str, Any]:
    """Return a run's configuration under dotted names, with its own algorithm and step size."""
    try:
        table = toml(run.config, "config.toml")
    except InputError:
        table = {}
    held = {"algorithm.name": run.algorithm} | _flatten(
        {key: table[key] for key in table if key not in ASIDE}
    )
    held |= {"algorithm.name": run.algorithm}
    return held if run.lr is None else held | {"local.lr": run.lr}


def _flatten(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            out |= _flatten(value, f"{name}.")
        else:
            plain = isinstance(value, (bool, int, str)) or (
                isinstance(value, float) and math.isfinite(value)
            )
            out[name] = value if plain else str(value)
    return out


def _differing_keys(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all configurations.

    >>> _differing_keys([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}])
    ['b', 'c']
    """
    every = dict.fromkeys(key for config in configs for key in config)
    absent = object()
    return [
        key for key in every if len({json.dumps(c.get(key, repr(absent))) for c in configs}) > 1
    ]


def _distinguishing_keys(configs: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return a few of the keys that tell configurations apart; the data set is always among them.

    >>> _distinguishing_keys([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 3}], ["a", "b"])
    ['b']
    """

    def kinds(chosen: Sequence[str]) -> int:
        return len(
            {
                json.dumps([config.get(key) for key in ("algorithm.name", *chosen)])
                for config in configs
            }
        )

    chosen = [key for key in keys if key == "problem.dataset"]
    rest = [key for key in keys if key not in ("algorithm.name", *chosen)]
    while rest and kinds(chosen) < kinds(keys):
        best = max(rest, key=lambda key: kinds([*chosen, key]))
        chosen.append(best)
        rest.remove(best)
    return chosen


def health(run: RunRecord) -> Health:
    """Judge the invariant c = sum p_i c_i: a residual above what rounding explains is a fault.

    Where whole clients are private there is no such invariant: c is the server's own.
    """
    column = np.append(np.asarray(run.columns.get("residual", ()), np.float64), run.residual)
    finite = column[np.isfinite(column)]
    largest = float(finite.max()) if len(finite) else math.nan
    if run.explained > 0 and run.privacy is not None and run.privacy["unit"] == "client":
        return Health("noised", math.nan)
    if run.explained == 0:
        return Health("broken", math.inf) if largest > 0 else Health("none", 0.0)
    relative = largest / run.explained if math.isfinite(run.explained) else math.nan
    if math.isnan(relative):
        return Health("unknown", relative)
    return Health("healthy" if relative <= 1 else "broken", relative)


def thin(low: NDArray[Any], high: NDArray[Any], stretches: int) -> NDArray[np.int64]:
    """Return the indices to keep of a curve, or of a band from `low` to `high`.

    The curve is divided into stretches of equal length. The lowest and the highest value of each
    are kept, as are the first and the last, so that no spike is lost. Curves of at most two points
    per stretch are kept whole.

    >>> curve = np.array([3.0, 9.0, 3.0, 3.0, 1.0, 3.0])
    >>> thin(curve, curve, 2).tolist()
    [0, 1, 3, 4, 5]
    """
    number = len(low)
    if number <= 2 * stretches:
        return np.arange(number)
    length = math.ceil(number / stretches)
    whole = math.ceil(number / length) * length

    def places(values: NDArray[Any]) -> NDArray[np.int64]:
        table = np.full(whole, np.inf)
        table[:number] = np.where(np.isfinite(values), values, np.inf)
        lowest = table.reshape(-1, length).argmin(axis=1) + np.arange(0, whole, length)
        found: NDArray[np.int64] = lowest[np.isfinite(table[lowest])]
        return found

    ends = np.array([0, number - 1], np.int64)
    kept: NDArray[np.int64] = np.unique(np.concatenate([ends, places(low), places(-high)]))
    return kept


def _number_of_stretches(groups: list[dict[str, Any]], metrics: Sequence[str]) -> int:
    """Return into how many stretches curves are divided to keep the page small."""
    columns = sum(len(metrics) * (len(one["held"]) + 1) for one in groups)
    return int(np.clip(VALUES // max(1, 2 * columns), FEWEST, MOST))


def _drawn_rounds(
    runs: Sequence[RunRecord], metric: str, targets: Sequence[tuple[str, float]], stretches: int
) -> NDArray[Any] | None:
    """Return the rounds of a group's curves to draw, or None for all."""
    last = max((int(run.columns["round"].max(initial=0)) for run in runs), default=0)
    if last <= 2 * stretches:
        return None
    low, high = np.full((2, last), np.nan)
    for run in runs:
        if metric in run.columns:
            inside = run.columns["round"] >= 1
            at = run.columns["round"][inside] - 1
            values = np.asarray(run.columns[metric], np.float64)[inside]
            values = np.where(np.isfinite(values), values, np.nan)
            low[at], high[at] = np.fmin(low[at], values), np.fmax(high[at], values)
    measured = np.flatnonzero(np.isfinite(low))
    kept = measured[thin(low[measured], high[measured], stretches)] + 1
    there = [first_reached(run.columns, target) for run in runs for target in targets]
    return np.unique(
        [
            *kept,
            *(at for at in there if at is not None),
            *(run.columns["round"][-1] for run in runs),
        ]
    )


def _run_entry(
    source: Source, run: RunRecord, kept: Mapping[str, NDArray[Any] | None], stretches: int
) -> dict[str, Any]:
    judged, rounds = health(run), run.columns["round"]
    grid = np.arange(len(rounds))
    if len(rounds) > 2 * stretches:
        at = np.linspace(0, len(rounds) - 1, stretches).round().astype(int)
        targets = () if source.study.target is None else (source.study.target,)
        met = [first_reached(run.columns, target) for target in targets]
        grid = np.union1d(at, np.searchsorted(rounds, [m for m in met if m is not None]))
    along = {"round": rounds[grid].tolist(), "seconds": _json_numbers(_seconds(run)[grid])}
    ways = {"up": ("bytes_up",), "sent": ("bytes_up", "bytes_down")}
    for way, names in ways.items():
        there = [
            np.nan_to_num(run.columns[name]).astype(np.int64)
            for name in names
            if name in run.columns
        ]
        along[way] = np.cumsum(sum(there))[grid].tolist() if there else None
    return {
        "seed": run.seed,
        "folder": source.folder,
        "rounds": len(rounds),
        "diverged": run.diverged_at,
        "advice": run.advice,
        "digest": run.digest,
        "health": judged.state,
        "relative": judged.relative if math.isfinite(judged.relative) else None,
        "residual": run.residual if math.isfinite(run.residual) else None,
        "explained": run.explained if math.isfinite(run.explained) else None,
        "privacy": _privacy(source, run),
        "along": along,
        "columns": {
            name: _column(run, name, some) for name, some in kept.items() if name in run.columns
        },
    }


def _privacy(source: Source, run: RunRecord) -> dict[str, Any] | None:
    """Return what a private run spent, by client; of many clients the quantiles alone."""
    held = run.privacy
    if held is None:
        return None
    listed = held.get("by_client")
    deployed = source.progress is not None and source.progress.kind == "deployment"
    return {
        "unit": held["unit"],
        "delta": held["delta"],
        "epsilon": held.get("epsilon"),
        "budget": held.get("stop_at_epsilon"),
        "before": held.get("before"),
        "after": held.get("after", held.get("rounds")),
        "clients": listed if listed is not None and len(listed) <= CLIENTS else None,
        "quantiles": held.get("quantiles"),
        "simulated": not deployed,
    }


def _column(run: RunRecord, name: str, kept: NDArray[Any] | None) -> dict[str, Any]:
    """Return a column as JSON: values, their rounds if thinned, and their precision."""
    values = run.columns[name]
    single = bool(values.dtype == np.float32)
    if kept is None:
        return {"single": single, "values": _json_numbers(values)}
    rounds = run.columns["round"]
    at = np.searchsorted(rounds, kept)
    at = at[at < len(rounds)]
    short = [
        None if v is None else float(f"{v:.6g}") if name != "accuracy" else v
        for v in _json_numbers(values[at])
    ]
    return {"single": single, "round": rounds[at].tolist(), "values": short}


def _json_numbers(values: NDArray[Any]) -> list[Any]:
    """Convert values to JSON numbers, float32 with its own digits, and to None if not finite."""
    short = (lambda v: float(str(v))) if values.dtype == np.float32 else (lambda v: v.item())
    return [short(value) if np.isfinite(value) else None for value in values]


def _seconds(run: RunRecord) -> NDArray[Any]:
    """Return the seconds until the end of each round: logged, or equal shares of the total."""
    rounds = np.asarray(run.columns["round"])
    if run.clock is not None and len(run.clock):
        return np.asarray(np.interp(rounds, *run.clock.T)).round(4)
    whole = math.nan if run.seconds is None else run.seconds
    return np.asarray(whole * rounds / max(1, len(rounds))).round(4)


def _label_maps(given: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the label counts of each distinct split, for at most `CLIENTS` clients."""
    found: dict[bytes, dict[str, Any]] = {}
    for source in given:
        counts = source.study.label_counts
        if counts is not None and counts.size:
            who = np.unique(np.linspace(0, len(counts) - 1, CLIENTS).round().astype(int))
            one = {"of": source.study.problem, "clients": len(counts), "records": int(counts.sum())}
            found.setdefault(
                counts.tobytes(), one | {"who": who.tolist(), "counts": counts[who].tolist()}
            )
    return list(found.values())[:MAPS]


def _origin(source: Source) -> dict[str, Any]:
    study = source.study
    return {
        "folder": source.folder,
        "command": study.command,
        "precision": study.precision,
        "versions": ", ".join(f"{name} {version}" for name, version in study.versions.items()),
        "seconds": ", ".join(f"{name} {value:.3g}" for name, value in study.seconds.items()),
    }


def _progress(given: Progress, now: float | None) -> dict[str, Any]:
    pace = _pace(given.stamps)
    left = None
    if given.phase == "running" and pace and given.rounds is not None:
        left = (given.rounds - given.round) / pace
    return {
        "kind": given.kind,
        "phase": given.phase,
        "round": given.round,
        "rounds": given.rounds,
        "first": given.first,
        "marks": list(given.marks[-RECENT:]),
        "clients": given.clients,
        "ages": _ages(given),
        "seconds": dict(given.seconds),
        "pace": pace,
        "left": left,
        "quiet": None
        if not given.stamps
        else (time.time() if now is None else now) - given.stamps[-1][1],
        "stoppable": given.stoppable,
        "notes": list(given.notes),
    }


def _pace(stamps: tuple[tuple[int, float], ...]) -> float | None:
    """Return rounds per second over the last `PACE_SECONDS`, or the last block if that is longer.

    >>> _pace(((0, 10.0), (1, 14.0), (5, 16.0), (9, 18.0))), _pace(((0, 10.0),))
    (1.125, None)
    """
    if len(stamps) < 2:
        return None
    last, now = stamps[-1]
    first, then = next((s for s in stamps[:-1] if now - s[1] <= PACE_SECONDS), stamps[-2])
    return (last - first) / (now - then) if now > then else None


def _ages(given: Progress) -> dict[str, Any] | None:
    """Return a histogram of the rounds since clients were heard, the oldest and the mean."""
    if given.heard_at is None or not given.clients:
        return None
    number = given.clients if isinstance(given.clients, int) else len(given.clients)
    heard = list(given.heard_at)
    ages = np.maximum(0, given.round - np.fromiter(given.heard_at.values(), np.int64, len(heard)))
    # clients not heard since the last round with all clients
    rest, since = number - len(heard), given.round - given.all_at
    counts = np.bincount(np.searchsorted(BINS, ages, side="right") - 1, minlength=len(BINS))
    ever = number if given.all_at else len(heard)
    if given.all_at:
        counts[np.searchsorted(BINS, since, side="right") - 1] += rest
    total = ages.sum() + (rest * since if given.all_at else 0)
    oldest = [] if given.all_at and rest else np.argsort(-ages, kind="stable")[:OLDEST].tolist()
    return {
        "bins": list(BINS),
        "counts": counts.tolist(),
        "never": number - ever,
        "mean": float(total / ever) if ever else None,
        "oldest": [[heard[k], int(ages[k])] for k in oldest],
    }
